"""What a call is told by: everything about it that a capture freezes.

A capture serves a call where all of this is equal: which inputs there are and how they nest; of each tensor
the layout of its static buffer and the device; the type and value of every input that is no tensor; and the
state of torch and of the module that decides which kernels run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import attrs
import torch

from ..inputs import ModelInputs
from ..layout import ConcreteLayout
from .value_key import ATOMS, Key, value_key


@attrs.frozen(cache_hash=True)
class Context:
    """State outside a call's arguments that decides what it computes.

    Args:
        autocast: device types under autocast, each with its dtype.
        training: the module's flag; None where the callable has none.
        default_dtype: torch's.
    """

    autocast: tuple[tuple[str, torch.dtype], ...]
    training: bool | None
    default_dtype: torch.dtype

    def differences(self, other: Context) -> list[tuple[str, object, object]]:
        """Fields that differ: name, mine, the other's."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in FIELDS]
        return [each for each in pairs if each[1] != each[2]]


FIELDS = attrs.fields(Context)


@attrs.frozen(cache_hash=True)
class CallKey:
    """What a capture is found by.

    Args:
        structure: names of the inputs, and how they nest.
        tensors: of each tensor its name, the layout of its static buffer and its device.
        values: of each other input its name and value.
        context: state outside the arguments.
    """

    structure: Hashable
    tensors: tuple[tuple[str, ConcreteLayout, torch.device], ...]
    values: tuple[tuple[str, Key], ...]
    context: Context


@attrs.frozen(eq=False)
class Call:
    """One call, taken apart.

    Args:
        inputs: the keyword arguments, in the order of the callable's parameters.
        tensors: by leaf name.
        values: other leaves by name, as they enter the key.
        structure: names, and how they nest.
        unkeyed: inputs that no key can hold, with what is wrong with them.
        context: state outside the arguments.
        is_plain: no value but None, bool, int, float and str.
    """

    inputs: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    values: dict[str, Key]
    structure: Hashable
    unkeyed: dict[str, str]
    context: Context
    is_plain: bool

    def exact(self) -> Hashable:
        """Everything that decides the call's key, sizes and strides as they are."""
        tensors = [(each.shape, each.stride(), each.dtype, each.device) for each in self.tensors.values()]
        return self.structure, tuple(tensors), tuple(self.values.values()), self.context

    def key(self, layouts: Mapping[str, ConcreteLayout]) -> CallKey:
        """The key of the capture that serves this call, with these static buffers."""
        tensors = tuple((name, layouts[name], each.device) for name, each in self.tensors.items())
        return CallKey(self.structure, tensors, tuple(self.values.items()), self.context)


class CallReader:
    """Takes calls of one callable apart.

    Args:
        fn: the callable; a module's `forward` is its signature.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self.signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
        self._orders: dict[tuple[str, ...], tuple[str, ...]] = {}

    def bound(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> dict[str, Any]:
        """Positional arguments as keyword arguments.

        Raises:
            TypeError: they do not fit the signature, or go to a parameter that has no name.
        """
        bound = self.signature.bind(*args, **inputs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self.signature.parameters[name].kind
            if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
                raise TypeError(f"argument {name!r} is positional only; a captured model takes keywords")
            named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        return named

    def read(self, inputs: dict[str, Any]) -> Call:
        """Take a call apart."""
        order = self._order(tuple(inputs))
        ordered = {name: inputs[name] for name in order}
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Key] = {}
        for name, value in ordered.items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif type(value) in ATOMS or type(value) is float:
                values[name] = value_key(value)
            else:
                return self._read_nested(ordered)
        return Call(ordered, tensors, values, order, {}, self._context(tensors.values()), True)

    def _read_nested(self, ordered: dict[str, Any]) -> Call:
        apart = ModelInputs.of(ordered)
        values: dict[str, Key] = {}
        unkeyed: dict[str, str] = {}
        for name, value in apart.values.items():
            try:
                values[name] = value_key(value)
            except TypeError as error:
                unkeyed[name] = str(error)
        is_plain = not unkeyed and all(kind in ATOMS or kind is float for kind, _ in values.values())
        context = self._context(apart.tensors.values())
        return Call(ordered, apart.tensors, values, apart.structure, unkeyed, context, is_plain)

    def _order(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The names in the order of the signature; others behind, sorted."""
        order = self._orders.get(names)
        if order is None:
            known = [name for name in self.signature.parameters if name in names]
            order = (*known, *sorted(set(names) - set(known)))
            self._orders[names] = order
        return order

    def _context(self, tensors: Iterable[torch.Tensor]) -> Context:
        autocast = []
        for device in dict.fromkeys(["cpu", *(each.device.type for each in tensors)]):
            if _has_autocast(device) and torch.is_autocast_enabled(device):
                autocast.append((device, torch.get_autocast_dtype(device)))
        return _context(tuple(autocast), getattr(self._fn, "training", None), torch.get_default_dtype())


@functools.cache
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


@functools.cache
def _context(
    autocast: tuple[tuple[str, torch.dtype], ...], training: bool | None, default_dtype: torch.dtype
) -> Context:
    """One object for each state, so that its hash is computed once."""
    return Context(autocast, training, default_dtype)


def value_text(key: Key) -> str:
    """The value of a key, as the caller wrote it."""
    kind, held = key
    if issubclass(kind, float) and isinstance(held, str):
        return repr(float.fromhex(held))
    if isinstance(held, tuple | frozenset):
        return f"{kind.__name__}({', '.join(map(value_text, held))})"
    return repr(held)
