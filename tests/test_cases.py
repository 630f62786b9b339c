"""Faults that breakable- and piecewise-graph implementations were reported to have, one test each.

Each asserts the right outcome on both backends; the module-level functions are the models.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import specgraph as sg
from specgraph.executor import CapturedBreak
from tests.churn import churn

ROWS = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", dtype=sg.like("x"))


def rows_break(target: object, **fields: object) -> sg.BreakSpec:
    """A break on one [S D] tensor `x` that returns another."""
    return sg.BreakSpec(target, ROWS_OUT, inputs={"x": ROWS}, **fields)  # type: ignore[arg-type]


def break_outputs(captured: sg.CapturedGraph, x: Tensor) -> Mapping[str, Tensor]:
    """The buffers of the first break, after a replay on `x`."""
    breaks = [step for step in captured.walk(x=x) if isinstance(step, CapturedBreak)]
    return breaks[0].outputs


# An external tensor: made by eager code, handed to a later body.

stash: list[Tensor] = []


def make_scale(x: Tensor) -> Tensor:
    stash[:] = [torch.full_like(x, 3.0)]
    return x + 1


def use_scale(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def stashing_model(x: Tensor) -> Tensor:
    y = make_scale(x * 2)
    return use_scale(y - 1, stash[0]) + stash[0]


def test_an_external_tensor_survives_the_list_that_held_it(device: torch.device) -> None:
    spec = sg.ModelSpec("stash", (rows_break(make_scale), rows_break(use_scale)))
    x = torch.randn(64, 64, device=device)
    expected = (x * 2 + 1 - 1) * 3.0 + 3.0
    stashing_model(x)
    captured = sg.capture(stashing_model, spec, {"x": x})
    stash.clear()
    churn(x)
    assert torch.equal(captured(x=x), expected)


def test_the_plan_calls_an_external_argument_external_and_says_where(device: torch.device) -> None:
    spec = sg.ModelSpec("stash", (rows_break(make_scale), rows_break(use_scale)))
    x = torch.randn(8, 8, device=device)
    stashing_model(x)
    plan = sg.plan(stashing_model, spec, {"x": x})
    (scale,) = [use for use in plan.breaks[1].tensors if use.name == "scale"]
    assert scale.provenance.origin.value == "external"
    (diagnostic,) = plan.diagnostics
    assert diagnostic.code == "external-tensor"
    assert "256 bytes" in diagnostic.message
    assert diagnostic.where.startswith("tests/test_cases.py") or "stashing_model" in diagnostic.where
    stash.clear()


# A result that drifts from its layout.

drift: list[str] = []


def drifting(x: Tensor) -> Tensor:
    y = x * 3
    match drift:
        case ["rows"]:
            return y[:1]
        case ["dtype"]:
            return y.double()
        case ["strides"]:
            return y.t().contiguous().t()
        case ["scalar"]:
            return 3  # type: ignore[return-value]
    return y


def drifting_model(x: Tensor) -> Tensor:
    return drifting(x + 1) * 2


@pytest.mark.parametrize(
    ("kind", "actual"),
    [
        ("rows", "float32[1 4]"),
        ("dtype", "float64[8 4]"),
        ("strides", "float32[8 4] strides (1 8)"),
        ("scalar", "int"),
    ],
)
def test_a_drifted_result_is_refused_before_anything_is_written(
    device: torch.device, kind: str, actual: str
) -> None:
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(drifting_model, sg.ModelSpec("drift", (rows_break(drifting),)), {"x": x})
    expected = captured(x=x)
    buffer = break_outputs(captured, x)["output"]
    before = buffer.clone()
    drift[:] = [kind]
    try:
        with pytest.raises(sg.LayoutError) as caught:
            captured(x=x + 1)
    finally:
        drift.clear()
    assert caught.value.break_name == "drifting"
    assert caught.value.tensor == "output of the body"
    assert caught.value.expected.startswith("float32[8 4]")
    assert caught.value.actual == actual
    assert torch.equal(buffer, before)
    assert torch.equal(before, (x + 1) * 3)
    assert torch.equal(captured(x=x), expected)
    assert torch.equal(expected, (x + 1) * 3 * 2)


# A padded bucket whose body leaves rows past the live length undefined.


def first_rows(x: Tensor, length: int = 8) -> Tensor:
    y = torch.full_like(x, float("nan"))
    y[:length] = x[:length] * 2
    return y


def padded_model(x: Tensor) -> Tensor:
    return first_rows(x + 1) @ torch.ones(x.shape[1], 2, device=x.device)


def padded_spec(fills_padding: bool) -> sg.ModelSpec:
    return sg.ModelSpec(
        "padded",
        (rows_break(first_rows, live={"length": "S"}, fills_padding=fills_padding),),
        inputs={"x": ROWS},
        buckets={"S": (8,)},
    )


def test_rows_past_the_live_length_are_zero_before_the_next_segment(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(padded_model, padded_spec(False), {"x": x}, live={"S": 8})
    for length in (1, 5, 8):
        out = captured(x=x, live={"S": length})
        expected = (x + 1) * 2 @ torch.ones(4, 2, device=device)
        assert torch.equal(out[:length], expected[:length])
        assert torch.equal(out[length:], torch.zeros(8 - length, 2, device=device))


def test_a_body_that_fills_its_padding_is_left_alone(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(padded_model, padded_spec(True), {"x": x}, live={"S": 8})
    assert captured(x=x, live={"S": 1})[1:].isnan().all()


def test_an_omitted_live_length_is_the_captured_size(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(padded_model, padded_spec(False), {"x": x}, live={"S": 8})
    captured(x=x, live={"S": 1})
    expected = (x + 1) * 2 @ torch.ones(4, 2, device=device)
    assert torch.equal(captured(x=x), expected)


# Attention that had to stay eager, called under another name.


def attention(x: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def smuggled(x: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def smuggling_model(x: Tensor) -> Tensor:
    return smuggled(attention(x[None])[0][None])[0]


def test_an_eager_only_op_in_a_segment_is_refused_at_plan_time(device: torch.device) -> None:
    layout = sg.TensorLayout("B S D", dtype=sg.like("x"))
    spec = sg.ModelSpec(
        "smuggle",
        (sg.BreakSpec(attention, layout, inputs={"x": sg.TensorLayout("B S D")}),),
        eager_only=("aten::*scaled_dot_product*",),
    )
    x = torch.randn(8, 16, device=device)
    for refuse in (sg.plan, sg.capture):
        with pytest.raises(sg.PlanError) as caught:
            refuse(smuggling_model, spec, {"x": x})
        assert "aten::scaled_dot_product_attention is eager_only" in caught.value.problem
        assert "segment 1" in caught.value.problem
        assert caught.value.where.endswith("in smuggled")


# Several outputs, read by a later body and by a segment, three sizes over one pool.


def two_results(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.sum(1)


def reads_aux(x: Tensor, aux: Tensor) -> Tensor:
    return x + aux[:, None]


def aux_model(x: Tensor) -> Tensor:
    y, aux = two_results(torch.relu(x) + 1)
    z = reads_aux(y.exp(), aux * 1)
    return z * aux[:, None] - y


AUX_SPEC = sg.ModelSpec(
    "aux",
    (
        sg.BreakSpec(
            two_results,
            (ROWS_OUT, sg.TensorLayout("S", dtype=sg.like("x"))),
            inputs={"x": ROWS},
        ),
        rows_break(reads_aux),
    ),
)


def test_captures_that_share_a_pool_replay_in_any_order(device: torch.device) -> None:
    inputs = [torch.randn(size, 16, device=device) for size in (64, 32, 16)]
    captured: list[sg.CapturedGraph] = []
    for x in inputs:
        pool = captured[0].pool if captured else None
        captured.append(sg.capture(aux_model, AUX_SPEC, {"x": x}, pool=pool))
    for index in (0, 1, 2, 0, 2, 1, 0):
        x = torch.randn_like(inputs[index])
        with torch.no_grad():
            expected = aux_model(x)
        churn(x)
        assert torch.equal(captured[index](x=x), expected)


# A host sync inside a segment.


def syncing_model(x: Tensor) -> Tensor:
    y = attention(x[None])[0]
    return y * y.sum().item()


def test_a_host_sync_in_a_segment_names_op_and_line_and_spoils_nothing(
    device: torch.device,
) -> None:
    x = torch.randn(8, 16, device=device)
    layout = sg.TensorLayout("B S D", dtype=sg.like("x"))
    spec = sg.ModelSpec("sync", (sg.BreakSpec(attention, layout, inputs={"x": sg.TensorLayout("B S D")}),))
    with pytest.raises(sg.CaptureError) as caught:
        sg.capture(syncing_model, spec, {"x": x})
    assert "aten::_local_scalar_dense in segment 1" in caught.value.problem
    assert caught.value.where.endswith("in syncing_model")
    assert "BreakSpec" in caught.value.fix
    captured = sg.capture(aux_model, AUX_SPEC, {"x": x})
    with torch.no_grad():
        assert torch.equal(captured(x=x), aux_model(x))


# A body that raises.

failing: list[Exception] = []


def may_fail(x: Tensor) -> Tensor:
    if failing:
        raise failing[0]
    return x * 2


def failing_model(x: Tensor) -> Tensor:
    return may_fail(may_fail(x + 1) * 3) - 1


def test_an_exception_from_a_body_passes_unchanged_and_the_next_replay_is_right(
    device: torch.device,
) -> None:
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(failing_model, sg.ModelSpec("fail", (rows_break(may_fail),)), {"x": x})
    failing[:] = [ValueError("the body's own error")]
    try:
        with pytest.raises(ValueError, match="the body's own error") as caught:
            captured(x=x)
        assert caught.value is failing[0]
    finally:
        failing.clear()
    x = torch.randn(8, 4, device=device)
    assert torch.equal(captured(x=x), failing_model(x))
