"""Capture and replay: ownership, live values, inputs and outputs, and what is refused."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import specgraph as sg
from specgraph.executor import CapturedBreak, run_checked
from tests.churn import churn

ROWS = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", dtype=sg.like("x"))


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def double(x: Tensor) -> Tensor:
    return x * 2


def double_model(x: Tensor) -> Tensor:
    return double(x + 1) - 1


DOUBLE = sg.ModelSpec("double", (double.spec,), inputs={"x": ROWS})


def test_replays_on_new_inputs_equal_eager(device: torch.device) -> None:
    captured = sg.capture(double_model, DOUBLE, {"x": torch.randn(8, 4, device=device)})
    for _ in range(5):
        x = torch.randn(8, 4, device=device)
        assert torch.equal(captured(x=x), (x + 1) * 2 - 1)
    assert captured.num_segments == 2
    assert captured.stats.replays == 5


def test_outputs_are_fresh_and_the_static_ones_are_overwritten(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(double_model, DOUBLE, {"x": x})
    first = captured(x=x)
    expected = first.clone()
    second = captured(x=x + 1)
    assert torch.equal(first, expected)
    assert torch.equal(captured.outputs, second)


def test_the_bare_replay_works_on_the_static_buffers(device: torch.device) -> None:
    captured = sg.capture(double_model, DOUBLE, {"x": torch.zeros(8, 4, device=device)})
    captured.inputs["x"].fill_(3.0)
    captured.replay()
    assert torch.equal(captured.outputs, torch.full((8, 4), 7.0, device=device))


def test_inputs_of_any_strides_are_copied_in(device: torch.device) -> None:
    captured = sg.capture(double_model, DOUBLE, {"x": torch.zeros(8, 4, device=device)})
    x = torch.randn(4, 8, device=device).t()
    assert torch.equal(captured(x=x), (x + 1) * 2 - 1)


# PASS_THROUGH: the body is handed the buffers.

handed: list[int] = []


def write_both(x: Tensor, total: Tensor | None = None, rows: Tensor | None = None) -> Any:
    assert rows is not None
    assert total is not None
    handed.append(rows.data_ptr())
    torch.add(x, 1, out=rows)
    total.copy_(x.sum(1))
    return (rows, total) if returns_buffers else None


returns_buffers = False

BOTH = sg.BreakSpec(
    write_both,
    (ROWS_OUT, sg.TensorLayout("S", dtype=sg.like("x"))),
    inputs={"x": ROWS},
    ownership=sg.Ownership.PASS_THROUGH,
    out=("rows", "total"),
)


def both_model(x: Tensor) -> Tensor:
    rows, total = write_both(x * 2)
    return torch.relu(rows * total[:, None])


@pytest.mark.parametrize("returns", [False, True])
def test_a_pass_through_body_writes_the_buffers_and_nothing_is_copied(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    monkeypatch.setattr("tests.test_replay.returns_buffers", returns)
    captured = sg.capture(both_model, sg.ModelSpec("both", (BOTH,)), {"x": torch.randn(8, 4, device=device)})
    handed.clear()
    for _ in range(3):
        x = torch.randn(8, 4, device=device)
        expected = ((x * 2 + 1) * (x * 2).sum(1)[:, None]).relu()
        assert torch.equal(captured(x=x), expected)
    (step,) = [step for step in captured.walk(x=x) if isinstance(step, CapturedBreak)]
    assert set(handed) == {step.outputs["output[0]"].data_ptr()}
    assert captured.plan.breaks[0].copied_nbytes == 0


def elsewhere(x: Tensor, out: Tensor) -> Tensor:
    return x.clone()


def elsewhere_model(x: Tensor) -> Tensor:
    return elsewhere(x * 2, None) + 1  # type: ignore[arg-type]  # the executor hands in the buffer


def test_a_pass_through_body_that_returns_other_memory_is_refused(device: torch.device) -> None:
    spec = sg.BreakSpec(
        elsewhere, ROWS_OUT, inputs={"x": ROWS}, ownership=sg.Ownership.PASS_THROUGH, out="out"
    )
    with pytest.raises(sg.LayoutError, match="memory that is not the buffer") as caught:
        sg.capture(elsewhere_model, sg.ModelSpec("m", (spec,)), {"x": torch.randn(8, 4, device=device)})
    assert "Ownership.COPY" in caught.value.fix


# A body that writes only its arguments.


def accumulate(state: Tensor, x: Tensor) -> None:
    state.add_(x)


def accumulating_model(x: Tensor) -> Tensor:
    state = x * 1
    accumulate(state, x + 1)
    return state * 2


def test_a_body_may_write_only_its_arguments(device: torch.device) -> None:
    spec = sg.BreakSpec(accumulate, None, mutates="state")
    model = sg.ModelSpec("accumulate", (spec,))
    captured = sg.capture(accumulating_model, model, {"x": torch.randn(8, 4, device=device)})
    for _ in range(3):
        x = torch.randn(8, 4, device=device)
        assert torch.equal(captured(x=x), (x + (x + 1)) * 2)
    (state, _) = captured.plan.breaks[0].tensors
    assert (state.name, state.mutated) == ("state", True)


# A mapping of outputs; the body's order does not matter.


@sg.graph_break({"a": ROWS_OUT, "b": ROWS_OUT}, inputs={"x": ROWS})
def named(x: Tensor) -> dict[str, Tensor]:
    return {"b": x - 1, "a": x + 1}


def named_model(x: Tensor) -> dict[str, Tensor]:
    parts = named(x * 2)
    return {"a": parts["a"] * 1, "b": parts["b"] * 1, "x": x}


def test_outputs_may_be_a_mapping_and_the_model_may_return_one(device: torch.device) -> None:
    captured = sg.capture(named_model, sg.ModelSpec("n", ()), {"x": torch.randn(8, 4, device=device)})
    x = torch.randn(8, 4, device=device)
    out = captured(x=x)
    assert list(out) == ["a", "b", "x"]
    assert torch.equal(out["a"], x * 2 + 1)
    assert torch.equal(out["b"], x * 2 - 1)
    assert torch.equal(out["x"], x)
    assert out["x"].data_ptr() != captured.inputs["x"].data_ptr()


# Live values, frozen values, body and stub.


def scale(x: Tensor, factor: float, shift: float = 0.0) -> Tensor:
    return x * factor + shift


def body_with_length(x: Tensor, factor: float, shift: float = 0.0, *, length: int) -> Tensor:
    return x * factor + shift + length


def stub(x: Tensor, factor: float, shift: float = 0.0) -> Tensor:
    stubbed.append(1)
    return torch.zeros_like(x)


stubbed: list[int] = []


def scaling_model(x: Tensor, factor: float = 2.0) -> Tensor:
    return scale(x + 1, factor, shift=5.0) * 1


def test_live_values_reach_positional_keyword_and_added_parameters(device: torch.device) -> None:
    spec = sg.BreakSpec(
        scale,
        ROWS_OUT,
        inputs={"x": ROWS},
        body=body_with_length,
        live={"factor": "f", "shift": "s", "length": "n"},
    )
    model = sg.ModelSpec("live", (spec,), live=("f", "s", "n"))
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(scaling_model, model, {"x": x}, live={"f": 1.0, "s": 0.0, "n": 0})
    assert torch.equal(captured(x=x, live={"f": 3.0, "s": 0.5, "n": 4}), (x + 1) * 3.0 + 0.5 + 4)
    assert torch.equal(captured(x=x, live={"f": 2.0, "s": 1.0, "n": 7}), (x + 1) * 2.0 + 1.0 + 7)
    for live, problem in (({"f": 1.0, "s": 1.0}, "'n' is missing"), ({"q": 1}, "'f' is missing")):
        with pytest.raises(sg.ReplayError, match=problem) as caught:
            captured(x=x, live=live)
        assert "ModelSpec.live" in caught.value.fix


def test_a_live_value_nobody_declared_is_refused(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    with pytest.raises(sg.CaptureError, match="'q' is not declared"):
        sg.capture(double_model, DOUBLE, {"x": x}, live={"q": 1})
    with pytest.raises(sg.ReplayError, match="'q' is not declared"):
        sg.capture(double_model, DOUBLE, {"x": x})(x=x, live={"q": 1})


def test_an_input_that_is_no_tensor_is_frozen(device: torch.device) -> None:
    spec = sg.ModelSpec("frozen", (sg.BreakSpec(scale, ROWS_OUT, inputs={"x": ROWS}),))
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(scaling_model, spec, {"x": x, "factor": 2.0})
    assert torch.equal(captured(x=x, factor=2.0), (x + 1) * 2.0 + 5.0)
    with pytest.raises(sg.ReplayError, match="frozen at capture") as caught:
        captured(x=x, factor=3.0)
    assert (caught.value.expected, caught.value.actual) == ("2.0", "3.0")


def test_a_stub_stands_in_during_capture_only(device: torch.device) -> None:
    spec = sg.BreakSpec(scale, ROWS_OUT, inputs={"x": ROWS}, capture_stub=stub)
    x = torch.randn(8, 4, device=device)
    stubbed.clear()
    captured = sg.capture(scaling_model, sg.ModelSpec("stub", (spec,)), {"x": x})
    assert len(stubbed) == 1
    assert torch.equal(captured(x=x), (x + 1) * 2.0 + 5.0)
    assert len(stubbed) == 1


# What a body sees at capture, and what a model keeps.

sums: list[float] = []


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def look(x: Tensor) -> Tensor:
    sums.append(float(x.sum()))
    return x * 2


def looking_model(x: Tensor) -> Tensor:
    return look(look(x + 1) + 1)


def test_bodies_see_real_values_while_capturing(device: torch.device) -> None:
    sums.clear()
    sg.capture(looking_model, sg.ModelSpec("look", ()), {"x": torch.ones(2, 2, device=device)})
    assert sums == [8.0, 20.0] * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.register_buffer("offset", torch.randn(16))

    def forward(self, x: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        hidden = double(self.first(x) + self.offset)
        hidden = torch.cat([hidden, *parts], 0)
        hidden = double(self.second(hidden).unflatten(0, (-1,)))
        return hidden.t(), hidden[:2]


def test_a_module_with_parameters_views_and_nested_inputs(device: torch.device) -> None:
    torch.manual_seed(0)
    net = Net().to(device)
    spec = sg.ModelSpec("net", (double.spec,))

    def inputs() -> dict[str, Any]:
        return {
            "x": torch.randn(8, 16, device=device),
            "parts": [torch.randn(2, 16, device=device), torch.randn(1, 16, device=device)],
        }

    captured = sg.capture(net, spec, inputs())
    for _ in range(3):
        fresh = inputs()
        churn(fresh["x"])
        with torch.no_grad():
            expected = net(**fresh)
        actual = captured(**fresh)
        assert isinstance(actual, tuple)
        for mine, theirs in zip(actual, expected, strict=True):
            assert torch.equal(mine, theirs)
            assert mine.stride() == theirs.stride()
    fresh = inputs()
    fresh["parts"].append(torch.randn(1, 16, device=device))
    with pytest.raises(sg.ReplayError, match="parts"):
        captured(**fresh)


def test_inference_mode_and_grad_mode_give_the_same_replay(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    with torch.inference_mode():
        inner = sg.capture(double_model, DOUBLE, {"x": x.clone()})
        assert torch.equal(inner(x=x.clone()), (x + 1) * 2 - 1)
    assert torch.equal(inner(x=x), (x + 1) * 2 - 1)
    outer = sg.capture(double_model, DOUBLE, {"x": x})
    with torch.inference_mode():
        assert torch.equal(outer(x=x), (x + 1) * 2 - 1)


def test_a_checked_eager_run_equals_eager(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    assert torch.equal(run_checked(double_model, DOUBLE, {"x": x}, {}, device), (x + 1) * 2 - 1)


# Wrong use.


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        (lambda _: {}, sg.ReplayError, "'x' is missing"),
        (lambda x: {"x": x, "y": x}, sg.ReplayError, "'y' was not captured"),
        (lambda x: {"x": x[:4]}, sg.LayoutError, "is not what was captured"),
        (lambda x: {"x": x.double()}, sg.LayoutError, "is not what was captured"),
        (lambda _: {"x": 3}, sg.LayoutError, "is not what was captured"),
        (lambda x: {"x": x.clone().requires_grad_()}, sg.ReplayError, "requires a gradient"),
        (lambda x: {"x": x.to("meta")}, sg.LayoutError, "is not what was captured"),
    ],
)
def test_a_replay_refuses_inputs_that_were_not_captured(
    device: torch.device, change: Any, error: type[sg.SpecGraphError], problem: str
) -> None:
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(double_model, DOUBLE, {"x": x})
    before = captured.inputs["x"].clone()
    with pytest.raises(error, match=problem) as caught:
        captured(**change(x + 1))
    assert caught.value.fix
    assert caught.value.spec == "double"
    assert torch.equal(captured.inputs["x"], before)
    assert captured.stats.replays == 0


def test_an_input_that_requires_grad_is_welcome_under_no_grad(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(double_model, DOUBLE, {"x": x})
    with torch.no_grad():
        assert torch.equal(captured(x=x.clone().requires_grad_()), (x + 1) * 2 - 1)


def test_a_closed_graph_is_refused_and_holds_nothing(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(double_model, DOUBLE, {"x": x})
    captured.close()
    captured.close()
    for use in (lambda: captured(x=x), captured.replay, lambda: captured.pool):
        with pytest.raises(sg.ReplayError, match="closed"):
            use()


@pytest.mark.cuda
def test_closing_gives_the_memory_back() -> None:
    x = torch.randn(1024, 1024, device="cuda")
    sg.capture(double_model, DOUBLE, {"x": x}).close()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    captured = sg.capture(double_model, DOUBLE, {"x": x})
    captured(x=x)
    assert torch.cuda.memory_reserved() > before
    captured.close()
    del captured
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


@pytest.mark.cuda
def test_a_cpu_tensor_for_a_cuda_capture_is_refused() -> None:
    with pytest.raises(sg.CaptureError, match="is on cpu") as caught:
        sg.capture(double_model, DOUBLE, {"x": torch.randn(8, 4)}, backend="cuda")
    assert '.to("cuda:0")' in caught.value.fix


def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(sg.CaptureError, match="no backend 'tpu'"):
        sg.capture(double_model, DOUBLE, {"x": torch.randn(8, 4)}, backend="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that sees no GPU")
def test_without_a_gpu_the_cuda_backend_says_so() -> None:
    with pytest.raises(sg.CaptureError, match="sees no GPU"):
        sg.capture(double_model, DOUBLE, {"x": torch.randn(8, 4)}, backend="cuda")


# Replays over one pool do not overlap.


def test_replays_from_two_threads_take_turns(device: torch.device) -> None:
    xs = [torch.randn(64, 64, device=device) for _ in range(2)]
    first = sg.capture(double_model, DOUBLE, {"x": xs[0]})
    second = sg.capture(double_model, DOUBLE, {"x": xs[1]}, pool=first.pool)
    wrong: list[int] = []

    def serve(index: int) -> None:
        for _ in range(50):
            x = xs[index]
            out = (first, second)[index](x=x)
            if not torch.equal(out, (x + 1) * 2 - 1):
                wrong.append(index)

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


inner_graph: list[sg.CapturedGraph] = []


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def replays_inner(x: Tensor) -> Tensor:
    return inner_graph[0](x=x) if inner_graph else x


def outer_model(x: Tensor) -> Tensor:
    return replays_inner(x + 1) * 1


def test_a_body_may_replay_a_graph_of_another_pool_only(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    inner_graph.clear()
    outer = sg.capture(outer_model, sg.ModelSpec("outer", ()), {"x": x})
    try:
        inner_graph[:] = [sg.capture(double_model, DOUBLE, {"x": x})]
        assert torch.equal(outer(x=x), (x + 1 + 1) * 2 - 1)
        inner_graph[:] = [sg.capture(double_model, DOUBLE, {"x": x}, pool=outer.pool)]
        with pytest.raises(sg.ReplayError, match="already in progress"):
            outer(x=x)
    finally:
        inner_graph.clear()
    assert torch.equal(outer(x=x), x + 1)


def test_filling_replaying_and_taking_are_one(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(double_model, DOUBLE, {"x": x})
    other = torch.randn(3, 4, device=device)

    def fill(inputs: Mapping[str, Tensor]) -> None:
        inputs["x"].zero_()[:3] = other
        with pytest.raises(sg.ReplayError, match="already in progress"):
            captured.replay()

    taken = captured.run(fill, lambda output: output[:3].clone())
    captured.replay()
    assert torch.equal(taken, double_model(other))
    assert captured.stats.replays == 2
