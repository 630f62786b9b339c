"""Poisoned replays: what reads dead memory, or leaves its buffer unwritten, is found and named."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import specgraph as sg
from specgraph.executor import backends
from specgraph.executor.backends import Backend
from specgraph.executor.poison import merged, unwritten, without
from specgraph.layout import ConcreteLayout
from specgraph.verify import verify

ROWS = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", dtype=sg.like("x"))

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair))))


def cells(pairs: list[tuple[int, int]]) -> set[int]:
    return {cell for start, end in pairs for cell in range(start, end)}


@given(spans, spans)
def test_spans_are_sets_of_bytes(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    union = merged(first)
    assert cells(union) == cells(first)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(union))
    assert cells(without(first, second)) == cells(first) - cells(second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_elements_that_still_hold_the_pattern_are_counted(dtype: torch.dtype) -> None:
    assert unwritten(torch.full((6, 4), float("nan"), dtype=dtype)) == 0
    tensor = torch.full((24 * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype).view(6, 4)
    assert unwritten(tensor) == 24
    tensor[:5] = 0
    assert unwritten(tensor.t()) == 4


def preset(fn: Callable[[Tensor], Tensor], live: dict[str, Any] | None = None) -> sg.Preset:
    return sg.Preset(lambda: fn, lambda: sg.Example({"x": torch.randn(16, 8)}, live=live or {}))


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def double(x: Tensor) -> Tensor:
    return x * 2


def chain(x: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.relu(double(x + 1) - x.flip(0)) * 0.5
    return x


def crowded(x: Tensor) -> Tensor:
    """Many tensors are made while a break's output is live: one of them gets its memory if it is let go."""
    for _ in range(4):
        y = double(x + 1)
        others = [x * float(i) for i in range(8)]
        x = torch.relu(y - torch.stack(others).sum(0)) * 0.5
    return x


def test_a_correct_model_is_equal_to_eager_under_poison(device: torch.device) -> None:
    for model in (chain, crowded):
        report = verify(sg.ModelSpec("m", ()), preset(model), device=device, replays=2, poison=True)
        assert [each.difference for each in report.rounds] == [None, None]


@sg.graph_break(
    ROWS_OUT, inputs={"x": ROWS}, ownership=sg.Ownership.PASS_THROUGH, out="out", live={"rows": "S"}
)
def first_rows(x: Tensor, out: Tensor | None = None, rows: int = 16) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    out[:rows] = x[:rows] * 3
    return out


def rows_model(x: Tensor) -> Tensor:
    return first_rows(x + 1) * 2


def test_rows_that_a_body_leaves_unwritten_are_named(device: torch.device) -> None:
    spec = sg.ModelSpec("rows", (), live=("S",))
    x = torch.randn(16, 8, device=device)
    captured = sg.capture(rows_model, spec, {"x": x}, {"S": 16}, validate="poison")
    assert torch.equal(captured(x=x, live={"S": 16}), (x + 1) * 3 * 2)
    with pytest.raises(sg.ReplayError, match="24 of 128 elements were left") as caught:
        captured(x=x, live={"S": 13})
    assert (caught.value.break_name, caught.value.tensor) == ("first_rows", "output")
    assert torch.equal(captured(x=x, live={"S": 16}), (x + 1) * 3 * 2)


def test_rows_past_the_live_length_of_a_bucketed_dim_may_be_left(device: torch.device) -> None:
    spec = sg.ModelSpec("rows", (), inputs={"x": ROWS}, buckets={"S": (16,)})
    x = torch.randn(16, 8, device=device)
    captured = sg.capture(rows_model, spec, {"x": x}, validate="poison")
    out = captured(x=x, live={"S": 13})
    assert torch.equal(out[:13], ((x + 1) * 3 * 2)[:13])
    assert torch.equal(out[13:], torch.zeros(3, 8, device=device))


# A backend that gives up break outputs too early: later allocations take their memory.


def test_an_executor_that_lets_go_of_break_outputs_is_caught(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_backend = backends.make_backend

    def broken(name: str, tensors: dict[str, Tensor]) -> Backend:
        backend = make_backend(name, tensors)
        allocate = backend.allocate

        def let_go(layout: ConcreteLayout) -> Tensor:
            return backend.alias(allocate(layout))

        backend.allocate = let_go  # type: ignore[method-assign]  # the planted fault
        return backend

    monkeypatch.setattr(sys.modules["specgraph.executor.capture"], "make_backend", broken)
    report = verify(sg.ModelSpec("m", ()), preset(crowded), device=device, replays=1, poison=True)
    assert report.rounds[0].difference is not None
    assert report.rounds[0].difference.step.startswith("break")


def test_a_validation_that_does_not_exist_is_refused(device: torch.device) -> None:
    with pytest.raises(sg.CaptureError, match="no validation 'lax'"):
        sg.capture(chain, sg.ModelSpec("m", ()), {"x": torch.randn(4, 4, device=device)}, validate="lax")
