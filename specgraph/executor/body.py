"""Running a break's body: its arguments put in place once, its results checked before they are written.

Warm-up, capture, replay and checked eager runs all go through here, so that a body is called and judged
the same way everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch.utils import _pytree as pytree

from ..calls import BreakCall
from ..dims import Dim, Name, Rest
from ..errors import LayoutError
from ..layout import ConcreteLayout
from ..spec import ModelSpec, Ownership, named_outputs

Slot: TypeAlias = tuple[Any, int | str]
"""Where an argument goes: a list and an index, or a dict and a key."""


@attrs.frozen(eq=False)
class PlacedBody:
    """A body and its arguments.

    Args:
        body: the callable.
        args, kwargs: its arguments; those in `live` are overwritten before every call.
        live: where live values go, with their names.
    """

    body: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    live: tuple[tuple[Any, int | str, str], ...]

    def run(self, live: Mapping[str, Any]) -> Any:
        """Call the body with these live values."""
        for container, key, name in self.live:
            container[key] = live[name]
        return self.body(*self.args, **self.kwargs)


def place_body(
    call: BreakCall,
    body: Callable[..., Any] | None,
    buffers: Sequence[torch.Tensor],
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> PlacedBody:
    """Put a call's arguments in place for `body` (None: the break's own).

    Args:
        call: the call.
        body: what to run.
        buffers: what a PASS_THROUGH body is handed, in the order of `BreakSpec.out`.
        convert: applied to each tensor among the arguments.
    """
    spec = call.site.spec
    args, kwargs = list(call.args), dict(call.kwargs)
    if convert is not None:
        args, kwargs = pytree.tree_map_only(torch.Tensor, convert, (args, kwargs))
    positions = _positions(call.signature, len(args))
    if spec.ownership is Ownership.PASS_THROUGH:
        for parameter, buffer in zip(spec.out, buffers, strict=True):
            container, key = _slot(parameter, positions, args, kwargs)
            container[key] = buffer
    live = tuple((*_slot(parameter, positions, args, kwargs), name) for parameter, name in spec.live.items())
    return PlacedBody(body or spec.body or call.site.original, args, kwargs, live)


def _positions(signature: inspect.Signature, num_args: int) -> dict[str, int]:
    """Indices of the parameters that were passed by position."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, each in signature.parameters.items() if each.kind in by_position]
    return {name: index for index, name in enumerate(names[:num_args])}


def _slot(parameter: str, positions: Mapping[str, int], args: list[Any], kwargs: dict[str, Any]) -> Slot:
    return (args, positions[parameter]) if parameter in positions else (kwargs, parameter)


class CheckedBuffers:
    """Buffers, and what a tensor must be to be written to each: its very shape, dtype, strides and device.

    Args:
        names: what messages call the tensors.
        layouts: of the buffers.
        buffers: where the tensors are written.
        fix: what messages advise for a wrong layout.
        model: name of the model, for messages.
        label: name of the break, for messages.
    """

    def __init__(
        self,
        names: Sequence[str],
        layouts: Sequence[ConcreteLayout],
        buffers: Sequence[torch.Tensor],
        *,
        fix: str,
        label: str,
        model: str = "",
    ) -> None:
        self._names = names
        self._layouts = layouts
        self._fix = fix
        self._label = label
        self._model = model
        self.expected = [
            (buffer.shape, buffer.dtype, buffer.stride(), buffer.device, buffer) for buffer in buffers
        ]

    def check(self, values: Sequence[Any]) -> None:
        """Check one value for each buffer.

        Raises:
            LayoutError: a value is no tensor, or not exactly what was expected.
        """
        for value, (shape, dtype, strides, device, _) in zip(values, self.expected, strict=True):
            if (
                not isinstance(value, torch.Tensor)
                or value.shape != shape
                or value.dtype is not dtype
                or value.stride() != strides
                or value.device != device
            ):
                self._refuse(values)

    def are(self, values: Sequence[torch.Tensor]) -> bool:
        """True where every value is the buffer's memory."""
        pairs = zip(values, self.expected, strict=True)
        return all(value.data_ptr() == buffer.data_ptr() for value, (_, _, _, _, buffer) in pairs)

    def copy(self, values: Sequence[torch.Tensor]) -> None:
        """Copy the values, which `check` has passed; one that already is the buffer is left alone."""
        for value, (_, _, _, _, buffer) in zip(values, self.expected, strict=True):
            if value is not buffer and value.data_ptr() != buffer.data_ptr():
                buffer.copy_(value)

    def bind_one(self, slow: Callable[[Any], None], *, in_place: bool) -> Callable[[Any], None]:
        """Check and copy for a single buffer, as a replay calls it; what is unusual is left to `slow`.

        Args:
            slow: given what is not exactly what was expected.
            in_place: None, and nothing but the buffer's own memory, are expected.
        """
        ((shape, dtype, strides, device, buffer),) = self.expected
        address, copy = buffer.data_ptr(), buffer.copy_
        tensor = torch.Tensor

        def write(result: Any) -> None:
            if result is buffer or (in_place and result is None):
                return
            if (
                type(result) is not tensor
                or result.shape != shape
                or result.dtype is not dtype
                or result.stride() != strides
                or result.device != device
                or (in_place and result.data_ptr() != address)
            ):
                slow(result)
            elif result.data_ptr() != address:
                copy(result)

        return write

    def _refuse(self, values: Sequence[Any]) -> None:
        """Raise for the first value that is not what its layout says.

        Strides that address nothing are told from wrong ones here, off the common path.
        """
        for name, layout, value, expected in zip(
            self._names, self._layouts, values, self.expected, strict=True
        ):
            where = f"{name} of the body"
            device = expected[3]
            if not isinstance(value, torch.Tensor) or value.device != device:
                is_tensor = isinstance(value, torch.Tensor)
                raise LayoutError(
                    "is on another device" if is_tensor else "is no tensor",
                    spec=self._model,
                    break_name=self._label,
                    tensor=where,
                    expected=f"{layout} on {device}",
                    actual=f"a tensor on {value.device}" if is_tensor else type(value).__name__,
                    fix="return a tensor on the capture's device",
                )
            try:
                layout.check(value, where, self._fix)
            except LayoutError as error:
                raise error.within(spec=self._model, break_name=self._label) from None


class ResultWriter:
    """Checks what a body returned against the resolved layouts, then writes it to the buffers.

    COPY copies what is not already the buffer; PASS_THROUGH accepts None or the buffers themselves.
    Afterwards rows past the live length are zero, unless the spec says `fills_padding`.

    Attributes:
        lengths: names of the live lengths it looks at.
    """

    def __init__(
        self,
        model: ModelSpec,
        call: BreakCall,
        buffers: Sequence[torch.Tensor],
    ) -> None:
        self._model = model.name
        self._spec = call.site.spec
        self._label = call.site.label
        self._passes = self._spec.ownership is Ownership.PASS_THROUGH
        self._buffers = CheckedBuffers(
            tuple(call.outputs),
            tuple(call.outputs.values()),
            buffers,
            fix="return exactly this layout (nothing is broadcast or cast; .contiguous() mends strides), or "
            "correct outputs=; a size that changes needs another capture",
            label=self._label,
            model=model.name,
        )
        self._is_single = len(buffers) == 1 and "output" in call.outputs
        self._padded = _padded_axes(model, call, buffers)
        self.lengths = frozenset(name for _, _, _, name in self._padded)

    def write(self, result: Any, live: Mapping[str, Any]) -> None:
        """Check, then write.

        Raises:
            LayoutError: a result is not what its layout says; nothing has been written.
        """
        results = (result,) if self._is_single else self._taken_apart(result)
        if not (self._passes and result is None):
            self._buffers.check(results)
            if not self._passes:
                self._buffers.copy(results)
            elif not self._buffers.are(results):
                self._refuse_other_memory()
        for buffer, axis, size, name in self._padded:
            length = live.get(name, size)
            if length < size:
                buffer.narrow(axis, length, size - length).zero_()

    def bind(self, live: Mapping[str, Any]) -> Callable[[Any], None]:
        """`write` for one mapping of live values, as a replay calls it.

        One tensor without padding, by far the most common result, takes the short way; whatever is unusual
        about it is left to `write`.
        """
        write = self.write
        if not self._is_single or self._padded:
            return lambda result: write(result, live)
        return self._buffers.bind_one(lambda result: write(result, live), in_place=self._passes)

    def _taken_apart(self, result: Any) -> tuple[Any, ...]:
        """The tensors of a result that is no single tensor, in the order of the spec's outputs."""
        outputs = self._spec.outputs
        if result is None and (outputs is None or self._passes):
            return ()
        if isinstance(outputs, Mapping) and isinstance(result, Mapping) and set(result) == set(outputs):
            return tuple(result[key] for key in outputs)
        is_sequence = isinstance(outputs, tuple) and isinstance(result, tuple | list)
        if is_sequence and len(result) == len(self._buffers.expected):
            return tuple(result)
        raise LayoutError(
            "the body's result does not have the structure of the spec's outputs",
            spec=self._model,
            break_name=self._label,
            expected=_structure(outputs),
            actual=_structure(result),
            fix="return what outputs= declares, or correct outputs=",
        )

    def _refuse_other_memory(self) -> None:
        raise LayoutError(
            "the body of a PASS_THROUGH break returned memory that is not the buffer it was handed",
            spec=self._model,
            break_name=self._label,
            expected=f"None, or what {', '.join(self._spec.out)} received",
            actual="another tensor",
            fix="write into the buffer and return None, or declare ownership=Ownership.COPY",
        )


def _structure(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(repr, value))}"
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    return "nothing" if value is None else f"one {type(value).__name__}"


def _padded_axes(
    model: ModelSpec, call: BreakCall, buffers: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, int, int, str], ...]:
    """Each output axis that is a bucketed dim: buffer, axis, captured size, name of the live length."""
    spec = call.site.spec
    if spec.fills_padding or not model.buckets:
        return ()
    found = []
    layouts = named_outputs(spec.outputs).values()
    for buffer, layout in zip(buffers, layouts, strict=True):
        axis = 0
        for dim in layout.parsed:
            if isinstance(dim, Name) and dim.name in model.buckets:
                found.append((buffer, axis, buffer.shape[axis], dim.name))
            axis += _width(dim, call)
    return tuple(found)


def _width(dim: Dim, call: BreakCall) -> int:
    if not isinstance(dim, Rest):
        return 1
    sizes = call.dims[dim.name]
    return len(sizes) if isinstance(sizes, tuple) else 1
