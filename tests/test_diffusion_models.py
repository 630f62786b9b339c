"""diffusers' transformers over one common attention break: tiny ones replayed, published sizes planned."""

from __future__ import annotations

import functools
from pathlib import Path

import attrs
import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

import specgraph as sg
from specgraph.lock import Lock, lock_path, read_lock
from specgraph.planner import CapturePlan
from specgraph.verify import build_preset, plan_preset, verify
from specs import ltx2
from specs._diffusion_attention import ATTENTION, EAGER_ONLY

SPECS = Path(__file__).parents[1] / "specs"


@attrs.frozen
class Case:
    """A spec, and what is known of its model.

    Args:
        name: the spec file's.
        tiny, full: attention calls of the two presets.
        parameters: of the published size, in billions.
        other_dims: of another example that must verify.
    """

    name: str
    tiny: int
    full: int
    parameters: float
    other_dims: dict[str, int]

    @property
    def spec(self) -> sg.ModelSpec:
        return _spec(self.name)


@functools.cache
def _spec(name: str) -> sg.ModelSpec:
    return sg.load_spec(SPECS / f"{name}.py")


CASES = (
    # Blocks of two streams and of one.
    Case("flux", 2 + 2, 19 + 38, 11.9, {"B": 2, "height": 2, "text": 5}),
    Case("qwen_image", 3, 60, 20.4, {"B": 1, "height": 2, "text": 5}),
    # Over the video, and to the prompt.
    Case("wan", 3 * 2, 40 * 2, 14.3, {"B": 2, "frames": 1, "text": 5}),
    # Over video and audio, from each to its prompt, and from each to the other.
    Case("ltx2", 2 * 6, 48 * 6, 18.9, {"B": 1, "frames": 2, "audio": 7, "text": 5}),
    # Two refiners of the image, two of the prompt, the blocks over both.
    Case("z_image", 2 + 2 + 2, 2 + 2 + 30, 6.2, {"B": 1, "height": 16, "text": 40}),
)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def lock_of(name: str) -> Lock:
    """The lock of the published size; skips where another torch made it, which may trace other ops."""
    lock = read_lock(lock_path(SPECS / f"{name}.py"))
    assert (lock.preset, lock.dims) == ("full", {})
    if lock.torch != torch.__version__.partition("+")[0]:
        pytest.skip(f"locked with torch {lock.torch}")
    return lock


@functools.cache
def full_plan(name: str) -> CapturePlan:
    """The plan of the published size; LTX-2's 288 breaks are read, the others' planned."""
    if name == "ltx2":
        return lock_of(name).plan
    spec = _spec(name)
    return plan_preset(spec, build_preset(spec.presets["full"], {}))


@every_case
def test_replays_on_changing_inputs_equal_eager(device: torch.device, case: Case) -> None:
    report = verify(case.spec, case.spec.presets["tiny"], device=device, replays=5)
    assert [each.difference for each in report.rounds] == [None] * 5
    assert (report.num_segments, len(report.plan.breaks)) == (case.tiny + 1, case.tiny)
    assert report.plan.diagnostics == ()
    # The other models are captured as they are.
    assert report.has_reference == (case.name in ("qwen_image", "z_image"))


@every_case
def test_other_sizes_verify_on_poisoned_memory(device: torch.device, case: Case) -> None:
    tiny = case.spec.presets["tiny"]
    report = verify(case.spec, tiny, dims=case.other_dims, device=device, replays=2, poison=True)
    assert [each.difference for each in report.rounds] == [None, None]


@every_case
@torch.no_grad()
def test_every_tensor_input_is_live(device: torch.device, case: Case) -> None:
    preset = build_preset(case.spec.presets["tiny"], {}, device)
    inputs = dict(preset.example(seed=1).inputs)
    captured = sg.capture(preset.fn, case.spec, inputs)
    before = captured(**inputs)
    for name in case.spec.inputs:
        tensor = inputs[name]
        assert isinstance(tensor, Tensor)
        after = captured(**{**inputs, name: _changed(tensor)})
        assert not torch.equal(_first(before), _first(after)), name


def _changed(tensor: Tensor) -> Tensor:
    """Other values, everywhere; masks are turned round, rotary factors turn the other way."""
    if tensor.is_complex():
        return tensor.conj().resolve_conj()
    if tensor.is_floating_point():
        return tensor * 3 + 1
    return ~tensor if tensor.dtype == torch.bool else (tensor + 1) % 2


def _first(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs[0]


@pytest.mark.parametrize(
    ("name", "mask", "masked"),
    [
        ("qwen_image", "prompt_mask", ("prompt",)),
        ("ltx2", "encoder_attention_mask", ("encoder_hidden_states",)),
        ("ltx2", "audio_encoder_attention_mask", ("audio_encoder_hidden_states",)),
    ],
)
@torch.no_grad()
def test_rows_outside_the_mask_do_not_matter(
    device: torch.device, name: str, mask: str, masked: tuple[str, ...]
) -> None:
    spec = _spec(name)
    preset = build_preset(spec.presets["tiny"], {}, device)
    captured = sg.capture(preset.fn, spec, preset.example(seed=0).inputs)
    inputs = dict(preset.example(seed=1).inputs)
    before = _first(captured(**inputs))
    outside = inputs[mask] == 0
    assert bool(outside.any())
    for row, reaches in ((outside, False), (~outside, True)):
        changed = {each: inputs[each].masked_fill(row[..., None], 7.0) for each in masked}
        assert torch.equal(before, _first(captured(**{**inputs, **changed}))) is not reaches


@every_case
def test_no_attention_is_in_a_segment(case: Case) -> None:
    preset = build_preset(case.spec.presets["tiny"], {})
    # What attention is made of; the projections around it are other ops.
    parts = ("aten::*attention*", "aten::*softmax*", "aten::*bmm*")
    spec = attrs.evolve(case.spec, eager_only=(*EAGER_ONLY, *parts))
    assert len(plan_preset(spec, preset).breaks) == case.tiny
    for eager_only in (EAGER_ONLY, parts):
        unbroken = attrs.evolve(case.spec, breaks=(), eager_only=eager_only)
        with pytest.raises(sg.PlanError, match="is eager_only but would be captured in segment 0"):
            plan_preset(unbroken, preset)


@every_case
def test_the_plan_of_the_published_size(case: Case) -> None:
    plan = full_plan(case.name)
    assert (len(plan.segments), len(plan.breaks)) == (case.full + 1, case.full)
    assert plan.diagnostics == ()
    assert plan.memory.externals == 0
    assert plan.memory.parameters == pytest.approx(case.parameters * 2e9, rel=0.03)
    for step in plan.breaks:
        assert step.dims["G"] == step.dims["H"]
        query, key, value = (use.layout.shape for use in step.tensors[:3])
        assert key == value
        assert {name: layout.shape for name, layout in step.outputs.items()} == {"output": query}


def test_ltx2_attends_six_times_a_block() -> None:
    breaks = full_plan("ltx2").breaks
    video, audio, text = 6144, 126, 1024
    block = [(video, video), (audio, audio), (video, text), (audio, text), (video, audio), (audio, video)]
    rows = [(step.dims["Q"], step.dims["K"]) for step in breaks]
    assert [sorted(rows[first : first + 6]) for first in range(0, len(rows), 6)] == [sorted(block)] * 48


@every_case
def test_the_lock_is_the_plan(case: Case) -> None:
    lock = lock_of(case.name)
    if case.name == "ltx2":
        # Two blocks of the published widths, and what is locked of the first two.
        build = functools.partial(ltx2.build_full, num_layers=2)
        plan = plan_preset(case.spec, build_preset(attrs.evolve(case.spec.presets["full"], build=build), {}))
        assert plan.inputs == lock.plan.inputs
        assert plan.steps[:24] == lock.plan.steps[:24]
    else:
        assert lock.plan.digest == full_plan(case.name).digest


@pytest.mark.parametrize("mask", [None, (7, 9), (2, 1, 1, 9), (2, 4, 7, 9)], ids=str)
@pytest.mark.parametrize(("groups", "value_dim"), [(4, 16), (2, 16), (4, 24)])
@torch.no_grad()
def test_the_break_serves_any_mask_grouped_heads_and_another_value_dim(
    device: torch.device, mask: tuple[int, ...] | None, groups: int, value_dim: int
) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        out = dispatch_attention_fn(query * 2, key, value, attn_mask=attn_mask, enable_gqa=groups != 4)
        result: Tensor = out + 1
        return result

    def inputs(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"query": (2, 7, 4, 16), "key": (2, 9, groups, 16), "value": (2, 9, groups, value_dim)}
        made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        if mask is not None:
            made["attn_mask"] = torch.rand(mask, generator=generator) < 0.7
        return {name: each.to(device) for name, each in made.items()}

    captured = sg.capture(model, sg.ModelSpec("attention", (ATTENTION,), eager_only=EAGER_ONLY), inputs(0))
    (step,) = captured.plan.breaks
    assert step.outputs["output"].shape == (2, 7, 4, value_dim)
    for seed in (1, 2):
        torch.testing.assert_close(
            captured(None, **inputs(seed)), model(**inputs(seed)), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_the_break_serves_any_batch_dims(batch: tuple[int, ...]) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = dispatch_attention_fn(query, key, value)
        return out

    shapes = {"query": (*batch, 5, 4, 8), "key": (*batch, 6, 4, 8), "value": (*batch, 6, 4, 12)}
    inputs = {name: torch.empty(shape) for name, shape in shapes.items()}
    (step,) = sg.plan(model, sg.ModelSpec("attention", (ATTENTION,)), inputs).breaks
    assert step.outputs["output"].shape == (*batch, 5, 4, 12)


@pytest.mark.parametrize("wrong", ["key", "value"])
def test_keys_and_values_of_other_rows_or_dtype_are_refused(wrong: str) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = dispatch_attention_fn(query, key, value)
        return out

    spec = sg.ModelSpec("attention", (ATTENTION,))
    good = {name: torch.empty(1, 5, 4, 8) for name in ("query", "key", "value")}
    for bad in (good[wrong][:, :4], good[wrong].half()):
        with pytest.raises(sg.LayoutError, match="attention"):
            sg.plan(model, spec, {**good, wrong: bad})
