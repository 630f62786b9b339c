"""Verifying a spec: the captured model against the eager one, bit for bit.

Every round draws fresh inputs and fresh live values and compares three runs: the model eagerly through
its spec, the replay, and, where the example has one, the unedited reference model. The first two are
compared at every break, so that a difference is named at the step where it first shows.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from .calls import BreakCall
from .errors import SpecError
from .executor import CapturedBreak, CapturedGraph, capture, run_checked
from .planner import CapturePlan, plan
from .spec import Example, ModelSpec, Preset


@attrs.frozen
class Difference:
    """Where two runs first differ.

    Args:
        step: the step, as text: `break 3, attention: output`, or `outputs`.
        tensor: name of the tensor.
        against: what the replay was compared with.
        num_different: elements that differ.
        num_elements: elements compared.
        largest: largest absolute difference; NaN where a NaN is involved.
    """

    step: str
    tensor: str
    against: str
    num_different: int
    num_elements: int
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.step}: {self.tensor} differs from {self.against} in {self.num_different} of "
            f"{self.num_elements} elements, by at most {self.largest:g}"
        )


@attrs.frozen
class Round:
    """One verified replay.

    Args:
        seed: of the inputs.
        live: live values, as text.
        difference: the first difference, if there is one.
    """

    seed: int
    live: Mapping[str, str]
    difference: Difference | None


@attrs.frozen
class VerifyReport:
    """What `verify` saw.

    Args:
        plan: the capture's plan.
        device: where it ran.
        rounds: one entry a replay.
        num_segments: graphs launched by a replay.
        has_reference: rounds were also compared with the unedited model.
    """

    plan: CapturePlan
    device: str
    rounds: tuple[Round, ...]
    num_segments: int
    has_reference: bool

    @property
    def passed(self) -> bool:
        """True where nothing differed."""
        return all(each.difference is None for each in self.rounds)


@attrs.frozen(eq=False)
class BuiltPreset:
    """A preset's model, and a way to make examples for it on a device."""

    fn: Callable[..., Any]
    preset: Preset
    dims: Mapping[str, int]
    device: torch.device

    def example(self, seed: int) -> Example:
        """Inputs drawn with that seed."""
        torch.manual_seed(seed)
        with _defaults(self.device, self.preset), torch.no_grad():
            made = self.preset.example(**self.dims)
        return made if isinstance(made, Example) else Example(made)


def choose_preset(spec: ModelSpec, name: str | None) -> Preset:
    """The preset called `name`; None: the only one.

    Raises:
        SpecError: there is no such preset, or several to choose from.
    """
    return spec.presets[name_of_preset(spec, name)]


def name_of_preset(spec: ModelSpec, name: str | None) -> str:
    """`name` where there is such a preset; None: the name of the only one.

    Raises:
        SpecError: there is no such preset, or several to choose from.
    """
    known = ", ".join(spec.presets) or "none"
    if name is None and len(spec.presets) == 1:
        return next(iter(spec.presets))
    if name is None or name not in spec.presets:
        raise SpecError(
            f"there is no preset {name!r}" if name else "the spec has no single preset",
            spec=spec.name,
            expected=f"one of: {known}",
            fix="choose one with --preset",
        )
    return name


def build_preset(preset: Preset, dims: Mapping[str, int], device: torch.device | None = None) -> BuiltPreset:
    """Build a preset's model.

    Args:
        preset: the preset.
        dims: values that stand in for, or add to, the preset's own.
        device: where to; None: the preset's own device, or the CPU.

    Raises:
        SpecError: the preset's `example` takes no such dim.
    """
    _check_dims(preset, dims)
    own = preset.device_dtype[0] if preset.device_dtype else torch.device("cpu")
    device = device or own
    torch.manual_seed(0)
    with _defaults(device, preset), torch.no_grad():
        fn = preset.build()
    return BuiltPreset(fn, preset, {**preset.dims, **dims}, device)


def _check_dims(preset: Preset, dims: Mapping[str, int]) -> None:
    parameters = inspect.signature(preset.example).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    for name in dims:
        if name not in parameters:
            raise SpecError(
                f"the preset's example takes no {name!r}",
                expected=f"one of: {', '.join(parameters) or 'none, it takes no dims'}",
                fix="correct the name in --dim, or add the parameter to the example",
            )


@contextlib.contextmanager
def _defaults(device: torch.device, preset: Preset) -> Iterator[None]:
    """torch's default device and dtype, as the preset wants them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(preset.device_dtype[1] if preset.device_dtype else before)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def plan_preset(spec: ModelSpec, built: BuiltPreset) -> CapturePlan:
    """The plan of a built preset."""
    example = built.example(seed=0)
    return plan(built.fn, with_groups(spec, built.preset), example.inputs, example.live)


def with_groups(spec: ModelSpec, preset: Preset) -> ModelSpec:
    """The spec, with the group sizes of the preset."""
    return attrs.evolve(spec, groups={**spec.groups, **preset.groups})


def refuse_weightless(spec: ModelSpec, preset: Preset, what: str) -> None:
    """Refuse a preset on the meta device.

    Raises:
        SpecError: the preset has no weights, so that nothing can be `what`.
    """
    if preset.device_dtype and preset.device_dtype[0].type == "meta":
        raise SpecError(
            f"the preset has no weights, so there is nothing to be {what}",
            spec=spec.name,
            fix="choose a preset with weights; this one is for planning",
        )


def verify(
    spec: ModelSpec,
    preset: Preset,
    *,
    dims: Mapping[str, int] | None = None,
    device: torch.device | None = None,
    replays: int = 5,
    poison: bool = False,
    on_round: Callable[[], None] | None = None,
) -> VerifyReport:
    """Capture a preset and compare replays with eager runs at rtol=0, atol=0.

    Args:
        spec: the spec.
        preset: how to build the model and its inputs.
        dims: values that stand in for the preset's own.
        device: where to run; None: the preset's own device, or the CPU.
        replays: how many, each on fresh inputs and live values.
        poison: fill memory that nothing may read with NaN; see `executor.poison`.
        on_round: called after each.

    Raises:
        SpecError: the preset is for planning only.
        SpecGraphError: the capture or a replay is refused.
    """
    refuse_weightless(spec, preset, "verified")
    spec = with_groups(spec, preset)
    built = build_preset(preset, dims or {}, device)
    first = built.example(seed=0)
    validate = "poison" if poison else "strict"
    captured = capture(built.fn, spec, first.inputs, first.live, validate=validate)
    rounds = []
    for seed in range(1, replays + 1):
        example = built.example(seed)
        difference = _compare(captured, built, spec, example)
        live = {name: repr(value) for name, value in example.live.items()}
        rounds.append(Round(seed, live, difference))
        if on_round is not None:
            on_round()
    report = VerifyReport(
        plan=captured.plan,
        device=str(built.device),
        rounds=tuple(rounds),
        num_segments=captured.num_segments,
        has_reference=first.reference is not None,
    )
    captured.close()
    return report


def _compare(
    captured: CapturedGraph, built: BuiltPreset, spec: ModelSpec, example: Example
) -> Difference | None:
    eager: list[dict[str, torch.Tensor]] = []

    def note(call: BreakCall, outputs: Mapping[str, torch.Tensor]) -> None:
        eager.append({name: each.clone() for name, each in {**call.tensors, **outputs}.items()})

    inputs = pytree.tree_map_only(torch.Tensor, torch.clone, dict(example.inputs))
    expected = run_checked(built.fn, spec, inputs, example.live, built.device, note)
    breaks = 0
    for step in captured.walk(example.live, **example.inputs):
        if isinstance(step, CapturedBreak):
            for name, tensor in {**step.tensors, **step.outputs}.items():
                place = f"break {breaks}, {step.plan.name}"
                if found := _difference(place, name, "eager", tensor, eager[breaks][name]):
                    return found
            breaks += 1
    if found := first_output_difference("eager", captured.outputs, expected):
        return found
    if example.reference is None:
        return None
    with torch.no_grad():
        reference = example.reference(built.fn)
    return first_output_difference("the unedited model", captured.outputs, reference)


def first_output_difference(against: str, actual: Any, expected: Any) -> Difference | None:
    """The first of two models' outputs that differs, if one does."""
    named = pytree.tree_flatten_with_path(actual)[0]
    others = pytree.tree_leaves(expected)
    for (path, leaf), other in zip(named, others, strict=True):
        name = f"output{pytree.keystr(path)}"
        if not isinstance(leaf, torch.Tensor):
            continue
        if found := _difference("the outputs", name, against, leaf, other):
            return found
    return None


def _difference(
    step: str, name: str, against: str, actual: torch.Tensor, expected: torch.Tensor
) -> Difference | None:
    """The difference of two tensors, if any; equal bits, and NaN against NaN, are no difference."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Difference(step, name, against, expected.numel(), expected.numel(), float("nan"))
    if torch.equal(actual, expected):
        return None
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    num_different = int((~same).sum())
    if num_different == 0:
        return None
    wide = torch.complex128 if actual.is_complex() else torch.float64
    largest = (actual.to(wide) - expected.to(wide)).abs()[~same].max()
    return Difference(step, name, against, num_different, expected.numel(), float(largest))
