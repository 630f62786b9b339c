"""Qwen-Image 2.1's cached step: the plan of the published size, and the tiny one verified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import specgraph as sg
from specgraph.verify import build_preset, plan_preset, verify

SPEC = sg.load_spec(Path(__file__).parents[1] / "specs" / "qwen_image21.py")


@pytest.mark.parametrize("prefix", [1, 100, 128])
def test_padded_replays_equal_eager_and_the_unpadded_unedited_model(
    device: torch.device, prefix: int
) -> None:
    report = verify(SPEC, SPEC.presets["tiny"], dims={"prefix": prefix}, device=device, replays=2)
    assert [each.difference for each in report.rounds] == [None, None]
    assert report.has_reference
    assert report.num_segments == 5
    assert report.rounds[0].live == {"prefix_pad": str(128 - prefix)}


def test_batches_and_other_images_verify(device: torch.device) -> None:
    dims = {"B": 2, "height": 4, "width": 6}
    assert verify(SPEC, SPEC.presets["tiny"], dims=dims, device=device, replays=2).passed


def test_the_plan_of_the_published_size() -> None:
    plan = plan_preset(SPEC, build_preset(SPEC.presets["full"], {}))
    assert (len(plan.segments), len(plan.breaks)) == (33, 32)
    attention = plan.breaks[0]
    assert attention.dims == {"B": 1, "T": 4096, "H": 32, "D": 128, "KV": 4224}
    assert {use.name: str(use.provenance) for use in attention.tensors} == dict.fromkeys(
        ("query", "key", "value"), "segment 0"
    )
    assert attention.copied_nbytes == 4096 * 32 * 128 * 2
    assert plan.memory.copied_at_breaks == 32 * attention.copied_nbytes
    assert plan.diagnostics == ()
    live = [value for value in attention.values if value.live]
    assert [(value.name, value.live) for value in live] == [("prefix_pad", "prefix_pad")]
