"""Why a call was not replayed, in words: which input, which dim, what was served against what is captured."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import attrs

from ..dims import Rest
from ..layout import ConcreteLayout, dtype_name
from ..spec import ModelSpec
from .keys import CallKey, value_text

Reason: TypeAlias = Literal[
    "uncaptured",
    "inputs",
    "context",
    "value",
    "dtype",
    "device",
    "size",
    "strides",
    "combination",
    "unkeyed",
    "failed",
    "moved",
]
"""Kinds of misses, as `RunnerStats.misses` counts them."""


@attrs.frozen
class Miss:
    """A call that matches no capture.

    Args:
        reason: its kind.
        subject: the input and dim concerned.
        served: what the call has there.
        captured: what captures have.
    """

    reason: Reason
    subject: str
    served: str
    captured: str

    def __str__(self) -> str:
        text = f"{self.subject} is {self.served}" if self.served else self.subject
        return f"{text}, captured: {self.captured}" if self.captured else text


def explain(spec: ModelSpec, key: CallKey, lengths: Mapping[str, int], captured: Collection[CallKey]) -> Miss:
    """Explain a miss by the captures that come closest to the call.

    The parts of a key are compared one after another, from what is hardest to change; each part keeps those
    captures that agree with the call, and the first that keeps none is the reason.

    Args:
        spec: the model's spec.
        key: of the call.
        lengths: of the bucketed dims, as the call has them.
        captured: keys of all captures.
    """
    if not captured:
        return Miss("uncaptured", "nothing is captured", "", "")
    near = [each for each in captured if _is_alike(each, key)]
    if not near:
        return Miss("inputs", "the set of inputs", _names(key), _listed(map(_names, captured)))
    same = [each for each in near if each.context == key.context]
    if not same:
        name, served, _ = key.context.differences(near[0].context)[0]
        others = {getattr(each.context, name) for each in near}
        return Miss("context", name.replace("_", " "), _text(served), _listed(map(_text, others)))
    near = [each for each in same if each.values == key.values]
    if not near:
        return _value(key, same)
    return _tensor(spec, key, lengths, near)


def _value(key: CallKey, near: list[CallKey]) -> Miss:
    for index, (name, value) in enumerate(key.values):
        others = [each.values[index][1] for each in near]
        if value not in others:
            return Miss("value", f"input {name!r}", value_text(value), _listed(map(value_text, others)))
    served = ", ".join(f"{name}={value_text(value)}" for name, value in key.values)
    return Miss("combination", "the combination of values", served, "each of them, not together")


def _tensor(spec: ModelSpec, key: CallKey, lengths: Mapping[str, int], near: list[CallKey]) -> Miss:
    for index, (name, layout, device) in enumerate(key.tensors):
        others = [each.tensors[index] for each in near]
        if layout.dtype not in {each.dtype for _, each, _ in others}:
            dtypes = _listed(dtype_name(each.dtype) for _, each, _ in others)
            return Miss("dtype", f"input {name!r}: dtype", dtype_name(layout.dtype), dtypes)
        if device not in {each for _, _, each in others}:
            return Miss("device", f"input {name!r}", f"on {device}", _listed(f"on {d}" for _, _, d in others))
        if miss := _size(spec, name, layout, lengths, [each for _, each, _ in others]):
            return miss
    served = ", ".join(f"{name} {layout}" for name, layout, _ in key.tensors)
    return Miss("combination", "the combination of layouts", served, "each of its sizes, not together")


def _size(
    spec: ModelSpec,
    name: str,
    layout: ConcreteLayout,
    lengths: Mapping[str, int],
    others: list[ConcreteLayout],
) -> Miss | None:
    ranks = [each for each in others if len(each.shape) == len(layout.shape)]
    if not ranks:
        shapes = _listed(f"[{' '.join(map(str, each.shape))}]" for each in others)
        return Miss("size", f"input {name!r}: shape", f"[{' '.join(map(str, layout.shape))}]", shapes)
    for axis, size in enumerate(layout.shape):
        sizes = sorted({each.shape[axis] for each in ranks})
        if size not in sizes:
            dim = _dim_name(spec, name, axis, len(layout.shape))
            length = lengths.get(dim, size)
            served = f"{length} (bucket {size})" if length != size else str(size)
            return Miss("size", f"input {name!r}: dim {dim or axis}", served, ", ".join(map(str, sizes)))
    if all(each.shape != layout.shape or each.same_strides(layout.strides) for each in ranks):
        return None
    return Miss("strides", f"input {name!r}", str(layout), _listed(map(str, ranks)))


def _dim_name(spec: ModelSpec, name: str, axis: int, rank: int) -> str:
    """What the spec calls an axis of an input; empty where it has no name for it."""
    layout = spec.inputs.get(name)
    if layout is None:
        return ""
    words = layout.dims.split()
    rest = next((i for i, dim in enumerate(layout.parsed) if isinstance(dim, Rest)), len(words))
    if axis < rest:
        return words[axis]
    from_end = axis - rank + len(words)
    return words[from_end] if from_end > rest else ""


def _is_alike(one: CallKey, other: CallKey) -> bool:
    """The same inputs, nested alike, and the same of them tensors."""
    tensors = [[name for name, *_ in each.tensors] for each in (one, other)]
    return one.structure == other.structure and tensors[0] == tensors[1]


def _names(key: CallKey) -> str:
    tensors = [name for name, *_ in key.tensors]
    values = [f"{name} ({kind.__name__})" for name, (kind, _) in key.values]
    return ", ".join((*tensors, *values)) or "empty"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{dtype_name(dtype)} on {device}" for device, dtype in value) or "off"
    return str(value)


def _listed(texts: Iterable[str]) -> str:
    """Each text once, in order, at most eight of them."""
    once = list(dict.fromkeys(texts))
    return ", ".join(once[:8]) + (f" and {len(once) - 8} more" if len(once) > 8 else "")
