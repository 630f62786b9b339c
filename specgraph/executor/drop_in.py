"""Standing in for a wrapped module: whatever a stand-in does not have itself is the module's.

Code that owns a module reads its attributes, walks its parameters, moves it, asks what class it is; all of
that gets the module's answers. Methods that return their module return the stand-in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

_FLUENT = frozenset(
    {
        "apply",
        "bfloat16",
        "cpu",
        "cuda",
        "double",
        "eval",
        "float",
        "half",
        "requires_grad_",
        "share_memory",
        "to",
        "to_empty",
        "train",
        "type",
        "xpu",
    }
)
"""Methods of `torch.nn.Module` that return it."""


class DropIn:
    """Stands in for `_fn`.

    Attributes that a subclass annotates or defines are its own, all others are read from, written to and
    deleted from the wrapped callable. `isinstance` sees the wrapped module's class as well as the stand-in's,
    and `forward` is the stand-in's call with the module's signature.

    Args:
        fn: the wrapped callable.
    """

    _fn: Callable[..., Any]
    _own: ClassVar[frozenset[str]] = frozenset({"_fn"})

    def __init_subclass__(cls) -> None:
        cls._own = cls._own.union(vars(cls).get("__annotations__", ()))

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        if isinstance(fn, torch.nn.Module):
            # Saved pipelines name a component by the module its class is in.
            self.__dict__["__module__"] = type(fn).__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped callable."""
        return self._fn(*args, **kwargs)

    @property  # type: ignore[misc]  # typeshed has it writable
    def __class__(self) -> type:
        fn = self._fn
        return type(fn) if isinstance(fn, torch.nn.Module) else type(self)

    def __getattr__(self, name: str) -> Any:
        if name == "_fn":
            raise AttributeError(name)
        value = getattr(self._fn, name)
        if not isinstance(self._fn, torch.nn.Module):
            return value
        if name == "forward":
            return functools.wraps(value)(lambda *args, **kwargs: self(*args, **kwargs))
        return functools.wraps(value)(functools.partial(self._fluent, value)) if name in _FLUENT else value

    def _fluent(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._addresses()
        result = method(*args, **kwargs)
        if self._addresses() != before:
            self._module_moved()
        return self if result is self._fn else result

    def _addresses(self) -> dict[str, int]:
        fn = self._fn
        if not isinstance(fn, torch.nn.Module):
            return {}
        return {name: each.data_ptr() for name, each in (*fn.named_parameters(), *fn.named_buffers())}

    def _module_moved(self) -> None:
        """The module's parameters have other memory than before."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._fn, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._fn, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._fn)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._fn!r})"
