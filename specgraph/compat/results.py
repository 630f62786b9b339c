"""What a break returns, taken apart, and written back at every replay.

At capture a result is a structure (tuples, lists, dicts) of tensors and constants. The model goes on with its
tensors' memory and its constants' values, so that both are the break's contract from then on: a later result
has the same structure, the same constants and tensors of exactly the same layouts, or it is refused before
anything is written.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any, TypeGuard

import attrs
import torch
from torch.utils import _pytree as pytree

from ..errors import CaptureError, LayoutError
from ..executor.body import CheckedBuffers
from ..layout import ConcreteLayout

_LEAVES = (
    torch.Tensor,
    types.NoneType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
)


@attrs.frozen(eq=False)
class TakenApart:
    """A result as its leaves.

    Args:
        names: what messages call the leaves: `output`, `output[0]`, `output['k']`.
        leaves: tensors and constants.
        structure: how the leaves make up the result.
    """

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    @classmethod
    def of(cls, result: Any, label: str) -> TakenApart:
        """Take a result apart.

        Raises:
            CaptureError: it holds something that is neither a tensor nor a constant.
        """
        paths, structure = pytree.tree_flatten_with_path(result)
        names = tuple(f"output{pytree.keystr(path)}" for path, _ in paths)
        leaves = tuple(leaf for _, leaf in paths)
        for name, leaf in zip(names, leaves, strict=True):
            if not isinstance(leaf, _LEAVES):
                raise CaptureError(
                    "is neither a tensor nor a constant, so that a replay could not write it back",
                    break_name=label,
                    tensor=name,
                    expected="tensors and constants in tuples, lists and dicts",
                    actual=type(leaf).__name__,
                    fix="return the object's tensors, or register its class with torch's pytree",
                )
        return cls(names, leaves, structure)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


class ResultBuffers:
    """Where a break's results go.

    Args:
        label: the break's name, for messages.
        captured: the result that the model went on with at capture.
        buffer: gives the tensor to write to for each of its tensors.
        accepts_none: None stands for results that the body wrote itself.
    """

    def __init__(
        self,
        label: str,
        captured: TakenApart,
        buffer: Callable[[torch.Tensor], torch.Tensor],
        *,
        accepts_none: bool,
    ) -> None:
        leaves = list(zip(captured.names, captured.leaves, strict=True))
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in captured.leaves]
        # Of the captured tensors themselves nothing is held: most are the pool's, which is to reuse them.
        self._label = label
        self._structure = captured.structure
        self._tensors = [index for index, is_one in enumerate(is_tensor) if is_one]
        self._constants = [(index, *leaves[index]) for index, is_one in enumerate(is_tensor) if not is_one]
        self._expected = _text(captured.leaves, captured.structure)
        is_bare = captured.names == ("output",)
        self._is_single = is_bare and bool(self._tensors)
        self._accepts_none = accepts_none or (is_bare and captured.leaves[0] is None)
        self._buffers = CheckedBuffers(
            [captured.names[index] for index in self._tensors],
            [ConcreteLayout.of(tensor) for tensor in captured.tensors],
            [buffer(tensor) for tensor in captured.tensors],
            fix="return exactly what was captured (nothing is broadcast or cast; .contiguous() mends "
            "strides); a size that changes needs another capture",
            label=label,
        )

    def write(self, result: Any) -> None:
        """Check a result, then copy what is not already in its buffer.

        Raises:
            LayoutError: it is not what was captured; nothing has been written.
        """
        if result is None and self._accepts_none:
            return
        values = (result,) if self._is_single else self._tensors_of(result)
        self._buffers.check(values)
        self._buffers.copy(values)

    def bind(self) -> Callable[[Any], None]:
        """`write`, as a replay calls it."""
        return self._buffers.bind_one(self.write, in_place=False) if self._is_single else self.write

    def _tensors_of(self, result: Any) -> list[Any]:
        leaves, structure = pytree.tree_flatten(result)
        if structure != self._structure:
            raise LayoutError(
                "the body's result does not have the structure that was captured",
                break_name=self._label,
                expected=self._expected,
                actual=_text(leaves, structure),
                fix="return the same structure at every call",
            )
        for index, name, before in self._constants:
            now = leaves[index]
            if not _same_constant(before, now):
                raise LayoutError(
                    "is no tensor, so its value was frozen at capture, and it differs now",
                    break_name=self._label,
                    tensor=f"{name} of the body",
                    expected=repr(before),
                    actual=type(now).__name__ if isinstance(now, torch.Tensor) else repr(now),
                    fix="return a tensor, or return nothing where the model does not use the value",
                )
        return [leaves[index] for index in self._tensors]


def _same_constant(before: object, now: object) -> bool:
    if type(before) is not type(now):
        return False
    return before == now or (_is_nan(before) and _is_nan(now))


def _is_nan(value: object) -> TypeGuard[float | complex]:
    return isinstance(value, float | complex) and value != value


def _text(leaves: Any, structure: pytree.TreeSpec) -> str:
    kinds = ["tensor" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return str(pytree.tree_unflatten(kinds, structure)).replace("'tensor'", "tensor")
