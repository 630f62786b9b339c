"""What a user declares: graph breaks and models, as frozen data.

A `BreakSpec` says which call stays eager, what its results look like, and who owns their memory. A
`ModelSpec` gathers the breaks of one model with its inputs, live values and presets. Nothing here looks
at a model or at a tensor; targets are resolved in `intercept`, layouts in `layout`.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import attrs
import torch

from .dims import BinOp, GroupSizes, dim_names
from .errors import SpecError
from .layout import TensorLayout, as_dtype

Outputs: TypeAlias = TensorLayout | tuple[TensorLayout, ...] | Mapping[str, TensorLayout] | None
"""Layouts of what a break returns: one tensor, a tuple, a mapping, or nothing."""

TargetLike: TypeAlias = Callable[..., Any] | str
"""A callable, or a string that names one; see `BreakSpec.target`."""


class Ownership(enum.Enum):
    """Who makes the memory that a break's outputs live in."""

    COPY = "copy"
    """The body returns fresh tensors; the executor copies them into its buffers."""

    PASS_THROUGH = "pass_through"
    """The body is handed the buffers and writes them; nothing is copied."""


# One converter a type: mypy's attrs support takes a field's argument type from its converter, and does
# not solve type variables there.


def _layouts(value: Mapping[str, TensorLayout]) -> Mapping[str, TensorLayout]:
    return types.MappingProxyType(dict(value))


def _strings(value: Mapping[str, str]) -> Mapping[str, str]:
    return types.MappingProxyType(dict(value))


def _ints(value: Mapping[str, int]) -> Mapping[str, int]:
    return types.MappingProxyType(dict(value))


def _groups(value: Mapping[str, int | Callable[[], int]]) -> GroupSizes:
    return types.MappingProxyType(dict(value))


def _floats(value: Mapping[str, float]) -> Mapping[str, float]:
    return types.MappingProxyType(dict(value))


def _sizes(value: Mapping[str, Iterable[int]]) -> Mapping[str, tuple[int, ...]]:
    return types.MappingProxyType({name: tuple(sizes) for name, sizes in value.items()})


def _values(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return types.MappingProxyType(dict(value))


def _names(value: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _optional_names(value: str | tuple[str, ...] | list[str] | None) -> tuple[str, ...]:
    return () if value is None else _names(value)


def _frozen_outputs(value: Outputs | list[TensorLayout]) -> Outputs:
    if isinstance(value, Mapping):
        return _layouts(value)
    return tuple(value) if isinstance(value, list) else value


def _check_layouts(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, Mapping):
        entries = [(f"{attribute.name}[{key!r}]", layout) for key, layout in value.items()]
    elif value is None or isinstance(value, TensorLayout):
        return
    elif isinstance(value, tuple):
        entries = [(f"{attribute.name}[{i}]", layout) for i, layout in enumerate(value)]
    else:
        entries = [(attribute.name, value)]
    is_break = isinstance(instance, BreakSpec)
    for place, layout in entries:
        if not isinstance(layout, TensorLayout):
            raise SpecError(
                f"{place} is {layout!r}, which is no TensorLayout",
                break_name=instance.name if is_break else "",
                spec="" if is_break else instance.name,
                code="SG103",
                expected="a TensorLayout",
                actual=type(layout).__name__,
                fix='write TensorLayout("B Q H D", dtype)',
            )


def named_outputs(outputs: Outputs) -> dict[str, TensorLayout]:
    """The layouts of `outputs`, flat, each with the name that plans and messages use for it."""
    if outputs is None:
        return {}
    if isinstance(outputs, TensorLayout):
        return {"output": outputs}
    if isinstance(outputs, tuple):
        return {f"output[{i}]": layout for i, layout in enumerate(outputs)}
    return {f"output[{key!r}]": layout for key, layout in outputs.items()}


def target_text(target: TargetLike) -> str:
    """A break's target as text; a callable and its import path have the same."""
    if isinstance(target, str):
        return target
    qualname = getattr(target, "__qualname__", type(target).__name__)
    return f"{getattr(target, '__module__', '?')}:{qualname}"


@attrs.frozen
class BreakSpec:
    """One kind of call that stays eager.

    Args:
        target: the callable, or a string: `"pkg.mod:fn"`, `"pkg.mod:Class.method"`,
            `"module:blocks.*.attn"` (submodules of the captured module; their `forward`, `self`
            included, is the signature), `"op:ns::name"` (a dispatcher op).
        outputs: layout of the result: one, a tuple, a mapping, or None where only arguments are written.
        inputs: layouts of the target's parameters, by name; dims bind here.
        ownership: who makes the outputs' memory.
        out: PASS_THROUGH: the body's parameter or parameters that receive the buffers, in order.
        mutates: parameters the body writes in place.
        body: runs instead of the target; same parameters, plus those in `live`.
        live: body parameter -> name of the live value it receives at every replay.
        capture_stub: runs instead of the body, during capture only.
        fusable: the body launches the same work for equal live values and never touches the host.
        fills_padding: the body defines the rows past the live length itself.
        name: what plans and messages call the break; by default the target's last name.

    Raises:
        SpecError: the fields contradict one another.
    """

    target: TargetLike = attrs.field(eq=lambda target: target_text(target))
    outputs: Outputs = attrs.field(converter=_frozen_outputs, validator=_check_layouts)
    inputs: Mapping[str, TensorLayout] = attrs.field(
        factory=dict, converter=_layouts, validator=_check_layouts, kw_only=True
    )
    ownership: Ownership = attrs.field(default=Ownership.COPY, kw_only=True)
    out: tuple[str, ...] = attrs.field(default=None, converter=_optional_names, kw_only=True)
    mutates: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    body: Callable[..., Any] | None = attrs.field(default=None, kw_only=True)
    live: Mapping[str, str] = attrs.field(factory=dict, converter=_strings, kw_only=True)
    capture_stub: Callable[..., Any] | None = attrs.field(default=None, kw_only=True)
    fusable: bool = attrs.field(default=False, kw_only=True)
    fills_padding: bool = attrs.field(default=False, kw_only=True)
    name: str = attrs.field(kw_only=True)

    @name.default
    def _target_name(self) -> str:
        if isinstance(self.target, str):
            path = self.target.rpartition(":")[2]
            if self.target.startswith("op:"):
                return path.partition(".")[0]
            named = [part for part in path.split(".") if part != "*"]
            return named[-1] if named else path
        return getattr(self.target, "__name__", type(self.target).__name__)

    def __attrs_post_init__(self) -> None:
        self._check_ownership()
        bound: frozenset[str] = frozenset().union(*(layout.binding_names for layout in self.inputs.values()))
        for output, layout in named_outputs(self.outputs).items():
            if unbound := sorted(layout.names - bound):
                raise SpecError(
                    f"dim {unbound[0]!r} of {layout} is bound by no input",
                    code="SG102",
                    break_name=self.name,
                    tensor=output,
                    expected=f"one of: {', '.join(sorted(bound)) or 'none, inputs has no layouts'}",
                    fix=f"name {unbound[0]!r} as a plain dim of a layout in inputs=",
                )
            if layout.dtype is None:
                raise SpecError(
                    f"{layout} has no dtype",
                    code="SG104",
                    break_name=self.name,
                    tensor=output,
                    fix='an output needs a dtype: torch.bfloat16, "bfloat16" or like("argument")',
                )

    def _check_ownership(self) -> None:
        count = len(named_outputs(self.outputs))
        passes = self.ownership is Ownership.PASS_THROUGH
        if passes and not count:
            raise SpecError(
                "PASS_THROUGH without outputs has no buffers to hand over",
                break_name=self.name,
                code="SG105",
                expected="layouts in outputs=, and as many names in out=",
                fix="declare outputs=; where the body writes only its arguments, leave the ownership at COPY",
            )
        if len(self.out) != (count if passes else 0):
            raise SpecError(
                f"{self.ownership.name} with {len(self.out)} parameters in out=",
                break_name=self.name,
                code="SG105",
                expected=f"{count} names in out=, one an output" if passes else "no out=",
                fix="PASS_THROUGH names one body parameter an output, in order, in out=; COPY has none",
            )


@attrs.frozen
class Example:
    """Inputs to plan, capture or verify with.

    Args:
        inputs: the model's keyword arguments.
        live: live values that go with them.
        reference: given the callable that `Preset.build` made, computes what the unedited model returns,
            where that is not simply the callable on the same inputs (padded inputs against an unpadded
            model, say).
    """

    inputs: Mapping[str, Any] = attrs.field(converter=_values)
    live: Mapping[str, Any] = attrs.field(factory=dict, converter=_values)
    reference: Callable[[Callable[..., Any]], Any] | None = None


def _device_dtype(
    value: tuple[str | torch.device, torch.dtype | str] | None,
) -> tuple[torch.device, torch.dtype] | None:
    return None if value is None else (torch.device(value[0]), as_dtype(value[1]))


@attrs.frozen
class Preset:
    """A way to build a model, and inputs for it.

    Args:
        build: makes the callable to capture.
        example: `example(**dims)` makes the inputs; keyword arguments left out of `dims` are its own
            defaults, which may be drawn at random.
        dims: the dims `example` is called with, unless the command line says otherwise.
        device_dtype: device and default dtype under which both run. The device `"meta"` allocates
            nothing and is for planning only. None: the backend's device and torch's default dtype.
        groups: sizes of process groups that stand in for those of `ModelSpec.groups`, so that a plan for
            eight processes can be made in one.
    """

    build: Callable[[], Callable[..., Any]]
    example: Callable[..., Mapping[str, Any] | Example]
    dims: Mapping[str, int] = attrs.field(factory=dict, converter=_ints)
    device_dtype: tuple[torch.device, torch.dtype] | None = attrs.field(default=None, converter=_device_dtype)
    groups: GroupSizes = attrs.field(factory=dict, converter=_groups)


def _presets(value: Mapping[str, Preset]) -> Mapping[str, Preset]:
    return types.MappingProxyType(dict(value))


def _breaks(value: Iterable[BreakSpec]) -> tuple[BreakSpec, ...]:
    return tuple(value)


@attrs.frozen
class ModelSpec:
    """One model: its breaks, inputs, live values and presets.

    Args:
        name: what plans and messages call the model.
        breaks: the calls that stay eager.
        inputs: layouts of the model's tensor inputs, by keyword. Empty: inputs are not checked against
            layouts, only replays against the capture.
        outputs: layouts of its outputs; needed where a bucketed dim must be sliced back.
        live: names of the live values that every replay hands in.
        buckets: captured sizes of a named input dim, as `{"S": (256, 512)}`. The dim's live length is a
            live value of the same name.
        pad: padding value of an input; 0 by default.
        eager_only: globs of dispatcher ops (`"aten::*attention*"`) that must never be in a segment.
        presets: ways to build the model, by name.
        groups: the number of processes in each group that a dim names, as `{"ulysses": 8}` for
            `world("ulysses")`, or a callable that returns it. Called at each call whose layouts name the
            group, and at no other.

    Raises:
        SpecError: the fields contradict one another.
    """

    name: str
    breaks: tuple[BreakSpec, ...] = attrs.field(converter=_breaks)
    inputs: Mapping[str, TensorLayout] = attrs.field(
        factory=dict, converter=_layouts, validator=_check_layouts
    )
    outputs: Outputs = attrs.field(default=None, converter=_frozen_outputs, validator=_check_layouts)
    live: tuple[str, ...] = attrs.field(default=(), converter=_names)
    buckets: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict, converter=_sizes)
    pad: Mapping[str, float] = attrs.field(factory=dict, converter=_floats)
    eager_only: tuple[str, ...] = attrs.field(default=(), converter=_names)
    presets: Mapping[str, Preset] = attrs.field(factory=dict, converter=_presets)
    groups: GroupSizes = attrs.field(factory=dict, converter=_groups)

    @property
    def live_names(self) -> frozenset[str]:
        """Names of the values a replay may hand in: `live`, and the lengths of bucketed dims."""
        return frozenset(self.live) | frozenset(self.buckets)

    @breaks.validator
    def _check_breaks(self, attribute: attrs.Attribute[Any], value: tuple[object, ...]) -> None:
        for entry in value:
            if not isinstance(entry, BreakSpec):
                raise SpecError(
                    f"breaks holds {entry!r}, which is no BreakSpec",
                    spec=self.name,
                    fix="of a function under @graph_break, list its .spec",
                )

    def __attrs_post_init__(self) -> None:
        for spec in self.breaks:
            for parameter, value in spec.live.items():
                if value not in self.live_names:
                    raise SpecError(
                        f"parameter {parameter!r} takes live value {value!r}, which is not declared",
                        code="SG108",
                        spec=self.name,
                        break_name=spec.name,
                        expected=f"one of: {', '.join(sorted(self.live_names)) or 'none declared'}",
                        fix=f"add {value!r} to ModelSpec.live",
                    )
            self._check_padding(spec)
            self._check_groups({**spec.inputs, **named_outputs(spec.outputs)}, spec.name)
        self._check_groups({**self.inputs, **named_outputs(self.outputs)}, "")
        names = [spec.name for spec in self.breaks]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise SpecError(
                f"two breaks are called {doubled[0]!r}",
                spec=self.name,
                code="SG109",
                fix="give them name=",
            )
        bound: frozenset[str] = frozenset().union(*(each.plain_dims for each in self.inputs.values()))
        if lost := sorted(frozenset(self.buckets) - bound):
            raise SpecError(
                f"bucketed dim {lost[0]!r} is a dim of no input",
                code="SG110",
                spec=self.name,
                fix=f"name {lost[0]!r} as a plain dim in ModelSpec.inputs",
            )

    def _check_groups(self, layouts: Mapping[str, TensorLayout], break_name: str) -> None:
        for tensor, layout in layouts.items():
            if unknown := sorted(layout.groups - frozenset(self.groups)):
                raise SpecError(
                    f"{layout} names group {unknown[0]!r}, which is not declared",
                    code="SG111",
                    spec=self.name,
                    break_name=break_name,
                    tensor=tensor,
                    expected=f"one of: {', '.join(sorted(self.groups)) or 'none declared'}",
                    fix=f'add "{unknown[0]}" to ModelSpec.groups, with the number of its processes or a '
                    "callable that returns it",
                )

    def _check_padding(self, spec: BreakSpec) -> None:
        """A bucketed dim needs an output axis of its own, or its padded rows cannot be told."""
        if spec.fills_padding:
            return
        for output, layout in named_outputs(spec.outputs).items():
            for dim in layout.parsed:
                if isinstance(dim, BinOp) and not dim_names(dim).isdisjoint(self.buckets):
                    raise SpecError(
                        f"{layout} computes with a bucketed dim, so its padded rows cannot be told",
                        code="SG110",
                        spec=self.name,
                        break_name=spec.name,
                        tensor=output,
                        fix="give the bucketed dim an axis of its own, or set fills_padding=True",
                    )
