"""`verify` finds differences and names the step where they first show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import specgraph as sg
from specgraph.verify import verify

ROWS = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", dtype=sg.like("x"))
offset: list[float] = [0.0]
hidden: list[float] = [1.0]


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def first(x: Tensor) -> Tensor:
    return x * 2


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def second(x: Tensor) -> Tensor:
    hidden[0] += 1
    return x + offset[0] * hidden[0]


def model(x: Tensor) -> Tensor:
    return second(first(x + 1) - 1) * 3


def bad_segment_model(x: Tensor) -> Tensor:
    return second(first(x + 1) * hidden[0])


def example() -> sg.Example:
    return sg.Example({"x": torch.randn(8, 4)})


def preset(fn: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor] | None = None) -> sg.Preset:
    def made() -> sg.Example:
        inputs = example().inputs
        if reference is None:
            return sg.Example(inputs)
        return sg.Example(inputs, reference=lambda _: reference(inputs["x"]))

    return sg.Preset(lambda: fn, made)


SPEC = sg.ModelSpec("m", ())


def test_equal_runs_pass(device: torch.device) -> None:
    report = verify(SPEC, preset(model), device=device, replays=3)
    assert report.passed
    assert len(report.rounds) == 3
    assert (report.num_segments, report.has_reference) == (3, False)


def test_a_body_that_depends_on_hidden_state_is_named(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_verify.offset", [1.0])
    report = verify(SPEC, preset(model), device=device, replays=1)
    (only,) = report.rounds
    assert not report.passed
    assert only.difference is not None
    assert only.difference.step == "break 1, second"
    assert only.difference.tensor == "output"
    assert only.difference.num_different == 32
    assert "break 1, second: output differs from eager in 32 of 32 elements" in str(only.difference)


def test_a_segment_that_froze_hidden_state_is_named_by_what_it_hands_on(device: torch.device) -> None:
    report = verify(SPEC, preset(bad_segment_model), device=device, replays=1)
    (only,) = report.rounds
    assert only.difference is not None
    assert (only.difference.step, only.difference.tensor) == ("break 1, second", "x")


def test_the_reference_is_compared_too(device: torch.device) -> None:
    def right(x: Tensor) -> Tensor:
        return ((x + 1) * 2 - 1) * 3

    def wrong(x: Tensor) -> Tensor:
        return ((x + 1) * 2 - 1) * 3 + 1e-3

    assert verify(SPEC, preset(model, right), device=device, replays=2).passed
    report = verify(SPEC, preset(model, wrong), device=device, replays=1)
    (only,) = report.rounds
    assert only.difference is not None
    assert only.difference.step == "the outputs"
    assert only.difference.against == "the unedited model"
    assert only.difference.largest == pytest.approx(1e-3, rel=1e-2)
