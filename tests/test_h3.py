"""MiniMax-H3: the step with its embedding passed through, and attention modules in three variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import specgraph as sg
from specgraph.executor import CapturedBreak
from specgraph.verify import BuiltPreset, build_preset, plan_preset, verify
from specs import _vdn_attention as vdn
from specs.minimax_h3 import ATTENTION, PackedStep, attention_without_padding

SPECS = Path(__file__).parents[1] / "specs"
H3 = sg.load_spec(SPECS / "minimax_h3.py")
FULL_COVER = sg.load_spec(SPECS / "vdn_h3_full_cover.py")
PARTIAL = sg.load_spec(SPECS / "vdn_h3.py")
DENSE = sg.load_spec(SPECS / "h3_attention.py")
BUCKET = 24


class Copies(TorchDispatchMode):
    """Addresses of target and source of every copy that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is torch.ops.aten.copy_.default:
            self.seen.append((args[0].data_ptr(), args[1].data_ptr()))
        return func(*args, **(kwargs or {}))


def built(device: torch.device, spec: sg.ModelSpec = H3) -> BuiltPreset:
    return build_preset(spec.presets["tiny"], {}, device)


def model_inputs(inputs: dict[str, Tensor], text_pad: int) -> dict[str, Any]:
    """The packed rows from `text_pad` on, as diffusers' own `forward` takes them."""
    text, audio = inputs["text"][:, text_pad:], inputs["audio"]
    rows = torch.arange(len(inputs["token_tags"]) - text_pad, device=text.device)
    first_audio, first_video = text.shape[1], text.shape[1] + audio.shape[1]
    return {
        "hidden_states": inputs["video"],
        "audio_hidden_states": audio,
        "encoder_hidden_states": text,
        "timestep": inputs["timestep"],
        "timestep_indices": inputs["timestep_indices"][text_pad:],
        "token_tags": inputs["token_tags"][text_pad:],
        "position_ids": inputs["position_ids"][text_pad:],
        "text_indices": rows[:first_audio],
        "audio_indices": rows[first_audio:first_video],
        "video_indices": rows[first_video:],
        "return_dict": False,
    }


@pytest.mark.parametrize("text", [1, 13, BUCKET])
def test_replays_of_any_text_length_equal_eager_and_the_unedited_model(
    device: torch.device, text: int
) -> None:
    report = verify(H3, H3.presets["tiny"], dims={"text": text, "bucket": BUCKET}, device=device, replays=2)
    assert [each.difference for each in report.rounds] == [None, None]
    assert report.has_reference
    assert (report.num_segments, len(report.plan.breaks)) == (5, 4)
    assert report.rounds[0].live == {"text_pad": str(BUCKET - text)}


def test_one_capture_serves_texts_of_changing_length(device: torch.device) -> None:
    report = verify(H3, H3.presets["tiny"], dims={"B": 2, "side": 2}, device=device, replays=5, poison=True)
    assert report.passed
    assert len({each.live["text_pad"] for each in report.rounds}) > 1


@torch.no_grad()
def test_padding_changes_rounding_at_most(device: torch.device) -> None:
    preset = build_preset(H3.presets["tiny"], {"text": 9}, device)
    example = preset.example(seed=1)
    assert isinstance(preset.fn, PackedStep)
    captured = sg.capture(preset.fn, H3, example.inputs, example.live)
    padded = captured(live=example.live, **example.inputs)
    unpadded = preset.fn.model(**model_inputs(dict(example.inputs), example.live["text_pad"]))
    torch.testing.assert_close(padded, unpadded, rtol=0.05, atol=0.05)


def test_the_embedding_writes_the_buffers_it_was_handed_and_copies_each_row_once(
    device: torch.device,
) -> None:
    preset = built(device)
    example = preset.example(seed=1)
    captured = sg.capture(preset.fn, H3, example.inputs, example.live)
    for seed in (2, 3):
        again = preset.example(seed)
        walk = captured.walk(again.live, **again.inputs)
        next(walk)
        with Copies() as copies:
            step = next(walk)
        assert isinstance(step, CapturedBreak)
        assert step.plan.name == "embed"
        packed, temb = step.outputs["output[0]"], step.outputs["output[1]"]
        handed = step.body.kwargs
        assert handed["packed"].data_ptr() == packed.data_ptr()
        assert handed["temb"].data_ptr() == temb.data_ptr()
        row = packed.stride(1) * packed.element_size()
        written = [packed.data_ptr() + row * first for first in (again.live["text_pad"], BUCKET, BUCKET + 10)]
        into = [target for target, _ in copies.seen]
        assert sorted(each for each in into if _is_inside(each, packed)) == written
        assert into.count(temb.data_ptr()) == 1
        assert all(target != source for target, source in copies.seen)
        for _ in walk:
            pass


def _is_inside(address: int, tensor: Tensor) -> bool:
    return tensor.data_ptr() <= address < tensor.data_ptr() + tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("output", ["output[0]", "output[1]"])
def test_later_segments_read_the_memory_the_embedding_wrote(device: torch.device, output: str) -> None:
    preset = built(device)
    example = preset.example(seed=1)
    captured = sg.capture(preset.fn, H3, example.inputs, example.live)
    for spoiled in (False, True):
        for step in captured.walk(example.live, **example.inputs):
            if spoiled and isinstance(step, CapturedBreak) and step.plan.name == "embed":
                step.outputs[output].fill_(float("nan"))
        assert [bool(each.isnan().all()) for each in captured.outputs] == [spoiled, spoiled]
        assert [bool(each.isnan().any()) for each in captured.outputs] == [spoiled, spoiled]


def test_a_call_outside_a_capture_embeds_into_fresh_tensors(device: torch.device) -> None:
    preset = build_preset(H3.presets["tiny"], {"text": BUCKET}, device)
    example = preset.example(seed=1)
    captured = sg.capture(preset.fn, H3, example.inputs, example.live)
    with torch.no_grad():
        plain = preset.fn(**example.inputs)
    for ours, replayed in zip(plain, captured(live=example.live, **example.inputs), strict=True):
        assert torch.equal(ours, replayed)


@torch.no_grad()
def test_diffusers_own_model_is_captured_without_an_adapter(device: torch.device) -> None:
    preset = build_preset(H3.presets["tiny"], {"text": BUCKET}, device)
    assert isinstance(preset.fn, PackedStep)
    model = preset.fn.model
    spec = sg.ModelSpec("unedited", (ATTENTION,), live=("text_pad",))
    first, second = (model_inputs(dict(preset.example(seed).inputs), 0) for seed in (1, 2))
    captured = sg.capture(model, spec, first, {"text_pad": 0})
    assert captured.num_segments == 6
    assert [step.dims["S"] for step in captured.plan.breaks] == [BUCKET] * 2 + [BUCKET + 10 + 48] * 3
    for replayed, eager in zip(captured(live={"text_pad": 0}, **second), model(**second), strict=True):
        assert torch.equal(replayed, eager)


def test_the_plan_of_the_published_size() -> None:
    plan = plan_preset(H3, build_preset(H3.presets["full"], {}))
    assert (len(plan.segments), len(plan.breaks)) == (52, 51)
    embed, attention = plan.breaks[:2]
    assert (embed.name, embed.ownership, embed.copied_nbytes) == ("embed", sg.Ownership.PASS_THROUGH, 0)
    assert {name: str(layout) for name, layout in embed.outputs.items()} == {
        "output[0]": "bfloat16[1 4864 5376]",
        "output[1]": "float32[2 2688]",
    }
    # What the body was handed is what the next segment reads: not a copy.
    assert {"embed: output[0]", "embed: output[1]"} <= {read.name for read in plan.segments[1].reads}
    assert [value.live for value in embed.values if value.live] == ["text_pad"]
    assert attention.dims == {"B": 1, "S": 4864, "H": 56, "D": 128}
    assert attention.copied_nbytes == 4864 * 56 * 128 * 2
    assert plan.memory.copied_at_breaks == 50 * attention.copied_nbytes
    # The 33 B parameters, less those of the embedding, which no segment reads.
    assert 60e9 < plan.memory.parameters < 66e9
    assert plan.diagnostics == ()


@pytest.mark.parametrize("spec", [DENSE, FULL_COVER, PARTIAL], ids=lambda spec: spec.name)
def test_an_attention_module_is_two_segments_and_equals_eager(
    device: torch.device, spec: sg.ModelSpec
) -> None:
    report = verify(spec, spec.presets["tiny"], device=device, replays=5)
    assert [each.difference for each in report.rounds] == [None] * 5
    assert (report.num_segments, len(report.plan.breaks)) == (2, 1)
    assert report.has_reference == (spec is FULL_COVER)


@pytest.mark.parametrize(("spec", "results"), [(FULL_COVER, 1), (PARTIAL, 2)])
def test_the_linear_branch_is_absent_where_the_window_covers_everything(
    spec: sg.ModelSpec, results: int
) -> None:
    (step,) = plan_preset(spec, built(torch.device("cpu"), spec)).breaks
    assert [str(layout) for layout in step.outputs.values()] == ["bfloat16[1 24 4 32]"] * results
    assert step.copied_nbytes == results * 24 * 4 * 32 * 2


def test_anchors_are_live(device: torch.device) -> None:
    preset = built(device, PARTIAL)
    example = preset.example(seed=1)
    captured = sg.capture(preset.fn, PARTIAL, example.inputs, live={"anchors": (0,)})
    outputs = [captured(live={"anchors": anchors}, **example.inputs) for anchors in ((), (0,), (0, 5), (0,))]
    assert torch.equal(outputs[1], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


def qkv(frames: int, rows: int, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, frames * rows, 3, dim, generator=generator).unbind()
    return query, key, value


@pytest.mark.parametrize("anchors", [(), (0,), (1, 4)])
def test_windowed_softmax_is_attention_under_a_mask(anchors: tuple[int, ...]) -> None:
    query, key, value = qkv(6, 2)
    frame = torch.arange(6).repeat_interleave(2)
    mask = (frame[:, None] - frame).abs() <= 1
    mask |= torch.isin(frame, torch.tensor(anchors, dtype=torch.int64))
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    actual = vdn.windowed_softmax(query, key, value, 6, 1, anchors)
    torch.testing.assert_close(actual, expected)


def test_the_delta_rule_is_its_formula() -> None:
    _, key, value = qkv(1, 5)
    key = torch.nn.functional.normalize(key, dim=-1)
    beta = torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(1))
    actual = vdn.delta_rule(torch.zeros(2, 3, 8, 8), key, value, beta)
    for batch in range(2):
        for head in range(3):
            state = torch.zeros(8, 8)
            for row in range(5):
                k, v, b = key[batch, row, head], value[batch, row, head], beta[batch, row, head]
                state = state @ (torch.eye(8) - b * torch.outer(k, k)) + b * torch.outer(v, k)
            torch.testing.assert_close(actual[batch, head], state)


def test_the_linear_branch_recalls_what_is_outside_the_window_alone() -> None:
    """Of orthonormal keys written in full, each recalls its own value, and only from afar."""
    frames, anchors = 6, (1,)
    key = torch.eye(frames)[None, :, None]
    value = torch.randn(1, frames, 1, frames, generator=torch.Generator().manual_seed(0))
    beta = torch.ones(1, frames, 1)
    for asked in range(frames):
        query = key[:, asked : asked + 1].expand_as(key)
        recalled = vdn.linear_outside(query, key, value, beta, frames, 1, anchors)
        for frame in range(frames):
            seen = asked in vdn.visible_frames(frame, frames, 1, anchors)
            expected = torch.zeros(frames) if seen else value[0, asked, 0]
            torch.testing.assert_close(recalled[0, frame, 0], expected)


def test_the_attention_body_drops_the_keys_of_the_padding() -> None:
    query, key, value = qkv(4, 2)
    padded = [torch.cat([torch.full_like(each[:, :3], float("nan")), each], dim=1) for each in (key, value)]
    assert torch.equal(
        attention_without_padding(query, *padded, text_pad=3),
        attention_without_padding(query, key, value, text_pad=0),
    )
