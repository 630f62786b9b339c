"""The decorator front end: what runs when, what a replay checks, and what it keeps."""

from __future__ import annotations

import gc
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import specgraph as sg
from specgraph.compat import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    break_graph,
    breakable_graph,
    eager_on_graph,
    force_no_graph,
    is_in_breakable_graph,
    no_graph,
)
from specgraph.executor.backends import Pool, make_backend
from tests.churn import churn


@pytest.fixture
def pool(device: torch.device) -> Pool:
    """An empty pool of the backend under test; captures into it use that backend."""
    return make_backend(device.type, {}).new_pool()


def captured(
    model: Callable[..., Any], *inputs: Any, pool: Pool, warm_up: bool = True
) -> tuple[BreakableCUDAGraph, Any]:
    """The graph of one call, and what the call returned."""
    if warm_up:
        with torch.no_grad():
            model(*inputs)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, pool=pool):
        outputs = model(*inputs)
    return graph, outputs


def replayed(graph: BreakableCUDAGraph, static: Tensor, x: Tensor, output: Tensor) -> Tensor:
    """The static output after a replay on `x`."""
    static.copy_(x)
    graph.replay()
    return output.clone()


# Calls and steps.

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> Iterator[None]:
    calls.clear()
    yield
    calls.clear()


@eager_on_graph
def double(x: Tensor) -> Tensor:
    calls.append("double")
    return x * 2


def double_model(x: Tensor) -> Tensor:
    return double(x + 1) - 1


def test_replays_on_new_inputs_equal_eager(device: torch.device, pool: Pool) -> None:
    static = torch.randn(8, 4, device=device)
    graph, output = captured(double_model, static, pool=pool)
    assert graph.num_segments == 2
    calls.clear()
    for _ in range(5):
        x = torch.randn(8, 4, device=device)
        assert torch.equal(replayed(graph, static, x, output), (x + 1) * 2 - 1)
    assert calls == ["double"] * 5


def test_what_a_capture_returns_already_holds_its_values(device: torch.device, pool: Pool) -> None:
    x = torch.randn(8, 4, device=device)
    _, output = captured(double_model, x, pool=pool)
    assert torch.equal(output, (x + 1) * 2 - 1)


def first_step(x: Tensor) -> Tensor:
    return double(double(x))


def test_empty_segments_are_not_kept(device: torch.device, pool: Pool) -> None:
    static = torch.randn(8, 4, device=device)
    graph, output = captured(first_step, static, pool=pool)
    assert graph.num_segments == 0
    x = torch.randn(8, 4, device=device)
    assert torch.equal(replayed(graph, static, x, output), x * 4)


@eager_on_graph(True)
def outer(x: Tensor) -> Tensor:
    calls.append("outer")
    break_graph()
    return double(x) + 1


def test_a_decorated_function_in_anothers_body_is_an_ordinary_call(device: torch.device, pool: Pool) -> None:
    static = torch.randn(8, 4, device=device)
    graph, output = captured(lambda x: outer(x - 3) * 5, static, pool=pool)
    assert graph.num_segments == 2
    calls.clear()
    x = torch.randn(8, 4, device=device)
    assert torch.equal(replayed(graph, static, x, output), ((x - 3) * 2 + 1) * 5)
    assert calls == ["outer", "double"]


def test_an_explicit_break_ends_the_segment_and_records_no_step(device: torch.device, pool: Pool) -> None:
    def model(x: Tensor) -> Tensor:
        y = x + 1
        break_graph()
        y = y * 3
        force_no_graph()
        return y - 2

    break_graph()
    static = torch.randn(8, 4, device=device)
    graph, output = captured(model, static, pool=pool)
    assert graph.num_segments == 3
    x = torch.randn(8, 4, device=device)
    assert torch.equal(replayed(graph, static, x, output), (x + 1) * 3 - 2)


def test_a_disabled_decorator_returns_the_function_itself(device: torch.device, pool: Pool) -> None:
    def plain(x: Tensor) -> Tensor:
        return x * 2

    for decorated in (eager_on_graph(False)(plain), no_graph(enable=False)(plain)):
        assert decorated is plain
        assert decorated.run_eager is plain
    graph, _ = captured(lambda x: plain(x) + 1, torch.randn(8, 4, device=device), pool=pool)
    assert graph.num_segments == 1


def test_run_eager_never_breaks(device: torch.device, pool: Pool) -> None:
    graph, output = captured(lambda x: double.run_eager(x) + 1, torch.ones(2, 2, device=device), pool=pool)
    assert graph.num_segments == 1
    assert torch.equal(output, torch.full((2, 2), 3.0, device=device))


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    @eager_on_graph(True)
    def scale(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        return x * self.factor + shift

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x + 1, shift=2.0) - 1


def test_methods_may_be_decorated(device: torch.device, pool: Pool) -> None:
    model, static = Scaled(3.0), torch.randn(8, 4, device=device)
    graph, output = captured(model, static, pool=pool)
    x = torch.randn(8, 4, device=device)
    assert torch.equal(replayed(graph, static, x, output), (x + 1) * 3.0 + 2.0 - 1)
    assert torch.equal(Scaled.scale.run_eager(model, x), x * 3.0)


def test_a_decorated_function_keeps_name_and_signature() -> None:
    assert (double.__name__, double.__module__) == ("double", __name__)
    assert str(inspect.signature(double)) == "(x: 'Tensor') -> 'Tensor'"


# Stubs and barriers.


def stub(x: Tensor) -> Tensor:
    calls.append("stub")
    return torch.zeros_like(x)


def test_a_stub_replaces_the_body_during_capture_only(device: torch.device, pool: Pool) -> None:
    stubbed = eager_on_graph(True, stub)(double.run_eager)
    static = torch.randn(8, 4, device=device)
    graph, output = captured(lambda x: stubbed(x + 1) - 1, static, pool=pool, warm_up=False)
    assert calls == ["stub"]
    assert torch.equal(output, torch.full((8, 4), -1.0, device=device))
    assert torch.equal(replayed(graph, static, static, output), (static + 1) * 2 - 1)
    assert calls == ["stub", "double"]


def test_the_barrier_is_called_at_every_break_of_the_capture_before_the_body(
    device: torch.device, pool: Pool
) -> None:
    static = torch.randn(8, 4, device=device)
    graph = BreakableCUDAGraph(pool=pool)
    with breakable_graph(graph, barrier_fn=lambda: calls.append("barrier")):
        outer(double(static) + 1)
        break_graph()
    assert calls == ["barrier", "double", "barrier", "outer", "double", "barrier"]
    graph.replay()
    assert calls[6:] == ["double", "outer", "double"]


# Results without a factory.


class Pair(NamedTuple):
    rows: Tensor
    total: Tensor


@no_graph
def nested(x: Tensor) -> dict[str, Any]:
    return {"pair": Pair(x * 2, x.sum(1)), "list": [x + 1, None, 7], "mode": "fast"}


def nested_model(x: Tensor) -> Tensor:
    parts = nested(x * 3)
    assert parts["list"][1] is None
    result: Tensor = parts["pair"].rows * parts["pair"].total[:, None] + parts["list"][0] * parts["list"][2]
    return result


def test_results_may_nest_and_hold_constants(device: torch.device, pool: Pool) -> None:
    static = torch.randn(8, 4, device=device)
    graph, output = captured(nested_model, static, pool=pool)
    for _ in range(3):
        x = torch.randn(8, 4, device=device)
        churn(x)
        assert torch.equal(replayed(graph, static, x, output), nested_model(x))


drift: list[str] = []


@eager_on_graph
def drifting(x: Tensor) -> Any:
    y = x * 3
    match drift:
        case ["rows"]:
            return y[:1], 5
        case ["dtype"]:
            return y.double(), 5
        case ["strides"]:
            return y.t().contiguous().t(), 5
        case ["scalar"]:
            return 3, 5
        case ["constant"]:
            return y, 6
        case ["bool"]:
            return y, 5.0
        case ["structure"]:
            return y
        case ["nothing"]:
            return None
    return y, 5


def drifting_model(x: Tensor) -> Tensor:
    y, factor = drifting(x + 1)
    calls.append(f"address {y.data_ptr()}")
    kept[:] = [y]
    result: Tensor = y * factor
    return result


kept: list[Tensor] = []


@pytest.mark.parametrize(
    ("kind", "tensor", "actual"),
    [
        ("rows", "output[0] of the body", "float32[1 4]"),
        ("dtype", "output[0] of the body", "float64[8 4]"),
        ("strides", "output[0] of the body", "float32[8 4] strides (1 8)"),
        ("scalar", "output[0] of the body", "int"),
        ("constant", "output[1] of the body", "6"),
        ("bool", "output[1] of the body", "5.0"),
        ("structure", "", "tensor"),
        ("nothing", "", "None"),
    ],
)
def test_a_drifted_result_is_refused_before_anything_is_written(
    device: torch.device, pool: Pool, kind: str, tensor: str, actual: str
) -> None:
    static = torch.randn(8, 4, device=device)
    graph, output = captured(drifting_model, static, pool=pool)
    (buffer,) = kept
    x = torch.randn(8, 4, device=device)
    expected = replayed(graph, static, x, output)
    before = buffer.clone()
    drift[:] = [kind]
    try:
        static.copy_(x + 1)
        with pytest.raises(sg.LayoutError) as caught:
            graph.replay()
    finally:
        drift.clear()
    assert (caught.value.break_name, caught.value.tensor, caught.value.actual) == ("drifting", tensor, actual)
    assert torch.equal(buffer, before)
    assert torch.equal(before, (x + 1) * 3)
    assert torch.equal(replayed(graph, static, x, output), expected)
    assert torch.equal(expected, (x + 1) * 3 * 5)


@eager_on_graph
def drifting_alone(x: Tensor) -> Tensor:
    return drifting(x)[0]  # type: ignore[no-any-return]  # returns anything


@pytest.mark.parametrize(
    ("kind", "actual"),
    [
        ("rows", "float32[1 4]"),
        ("dtype", "float64[8 4]"),
        ("strides", "float32[8 4] strides (1 8)"),
        ("scalar", "int"),
    ],
)
def test_a_drifted_tensor_alone_is_refused_too(
    device: torch.device, pool: Pool, kind: str, actual: str
) -> None:
    static = torch.randn(8, 4, device=device)
    graph, output = captured(lambda x: drifting_alone(x + 1) * 5, static, pool=pool)
    expected = output.clone()
    drift[:] = [kind]
    try:
        with pytest.raises(sg.LayoutError) as caught:
            graph.replay()
    finally:
        drift.clear()
    assert (caught.value.tensor, caught.value.actual) == ("output of the body", actual)
    assert torch.equal(replayed(graph, static, static, output), expected)


def test_a_result_that_is_an_object_is_refused_at_capture(device: torch.device, pool: Pool) -> None:
    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    boxed = no_graph(lambda x: (x, Box(x * 2)))
    with pytest.raises(sg.CaptureError, match="neither a tensor nor a constant") as caught:
        captured(boxed, torch.randn(8, 4, device=device), pool=pool)
    assert (caught.value.tensor, caught.value.actual) == ("output[1]", "Box")


@no_graph
def write_into(target: Tensor, x: Tensor) -> Tensor:
    return target.copy_(x * 2)


def test_a_body_may_write_its_arguments_and_return_them(device: torch.device, pool: Pool) -> None:
    def model(x: Tensor) -> Tensor:
        target = torch.empty_like(x)
        return write_into(target, x + 1) - target / 2

    static = torch.randn(8, 4, device=device)
    graph, output = captured(model, static, pool=pool)
    for _ in range(3):
        x = torch.randn(8, 4, device=device)
        churn(x)
        assert torch.equal(replayed(graph, static, x, output), (x + 1) * 2 - (x + 1))


# Results from a factory.

made: list[Tensor] = []
handed: list[int] = []
made_in_segment: list[bool] = []


def like_rows(x: Tensor, output: Tensor | None = None) -> tuple[Tensor, Tensor]:
    calls.append("factory")
    made_in_segment.append(is_in_breakable_graph())
    made[:] = [torch.empty_like(x), x.new_empty(x.shape[0])]
    return made[0], made[1]


@eager_on_graph(output_factory=like_rows)
def rows_and_total(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.sum(1)


@eager_on_graph(True, output_factory=like_rows, pass_output=True)
def written(x: Tensor, output: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor] | None:
    if output is None:
        return x * 2, x.sum(1)
    rows, total = output
    handed.append(rows.data_ptr())
    torch.mul(x, 2, out=rows)
    torch.sum(x, 1, out=total)
    return None if returns_none else (rows, total)


returns_none = False


def factory_model(x: Tensor) -> Tensor:
    rows, total = rows_and_total(x + 1)
    return rows * total[:, None]


def written_model(x: Tensor) -> Tensor:
    result = written(x + 1)
    assert result is not None
    return result[0] * result[1][:, None]


def eager_result(x: Tensor) -> Tensor:
    return (x + 1) * 2 * (x + 1).sum(1)[:, None]


def test_eager_calls_make_nothing_and_copy_nothing(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    assert torch.equal(factory_model(x), eager_result(x))
    assert torch.equal(written_model(x), eager_result(x))
    assert calls == []


def test_a_factorys_outputs_are_made_in_the_pool_while_the_segment_is_captured(
    device: torch.device, pool: Pool
) -> None:
    allocated: list[tuple[int, int]] = []
    ended: list[str] = []

    def factory(x: Tensor) -> Tensor:
        before = pool.allocated_nbytes
        output = torch.full_like(x, 9.0)
        allocated.append((before, pool.allocated_nbytes))
        ended.extend(calls)
        return output

    @eager_on_graph(output_factory=factory)
    def nines(x: Tensor) -> Tensor:
        return x

    graph = BreakableCUDAGraph(pool)
    static = torch.randn(64, 16, device=device)
    with BreakableCUDAGraphCapture(graph, barrier_fn=lambda: calls.append("segment ended")):
        output = nines(static + 1) * 1
    ((before, after),) = allocated
    assert after - before == 64 * 16 * 4
    assert ended == []
    assert calls == ["segment ended"]
    assert torch.equal(replayed(graph, static, static, output), static + 1)


def test_a_factorys_outputs_are_not_kept_from_the_pool(device: torch.device, pool: Pool) -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(6):
            rows, total = rows_and_total(x)
            x = rows + total[:, None]
        return x

    static = torch.randn(64, 64, device=device)
    graph, output = captured(model, static, pool=pool)
    made.clear()
    gc.collect()
    assert pool.allocated_nbytes == output.untyped_storage().nbytes()
    x = torch.randn(64, 64, device=device)
    churn(x)
    assert torch.equal(replayed(graph, static, x, output), model(x))
    assert calls.count("factory") == 6


@pytest.mark.parametrize("none", [False, True])
def test_a_passed_output_is_written_in_place_at_the_address_the_factory_made(
    device: torch.device, pool: Pool, monkeypatch: pytest.MonkeyPatch, none: bool
) -> None:
    monkeypatch.setattr("tests.test_compat.returns_none", none)
    handed.clear()
    static = torch.randn(8, 4, device=device)
    graph, output = captured(written_model, static, pool=pool, warm_up=False)
    address = made[0].data_ptr()
    made.clear()
    for _ in range(3):
        x = torch.randn(8, 4, device=device)
        assert torch.equal(replayed(graph, static, x, output), eager_result(x))
    assert handed == [address] * 4
    assert calls == ["factory"]


def test_a_result_that_is_the_buffer_is_not_copied(
    device: torch.device, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[int, ...]] = []
    copy = Tensor.copy_

    def spy(self: Tensor, other: Tensor) -> Tensor:
        copied.append(tuple(self.shape))
        return copy(self, other)

    graph, _ = captured(written_model, torch.randn(8, 4, device=device), pool=pool)
    other, _ = captured(factory_model, torch.randn(8, 4, device=device), pool=pool)
    monkeypatch.setattr(Tensor, "copy_", spy)
    in_place, _ = captured(no_graph(lambda x: x.mul_(2)), torch.randn(3, device=device), pool=pool)
    copied.clear()
    graph.replay()
    assert copied.count((8,)) == 0
    other.replay()
    assert copied.count((8,)) == 1
    in_place.replay()
    assert copied.count((3,)) == 0


def test_a_result_unlike_what_the_factory_made_is_refused_at_capture(
    device: torch.device, pool: Pool
) -> None:
    wrong = eager_on_graph(output_factory=lambda x: torch.empty_like(x[:1]))(lambda x: x * 2)
    with pytest.raises(sg.LayoutError) as caught:
        captured(lambda x: wrong(x + 1), torch.randn(8, 4, device=device), pool=pool)
    assert (caught.value.expected, caught.value.actual) == ("float32[1 4]", "float32[8 4]")
    graph, _ = captured(double_model, torch.randn(8, 4, device=device), pool=pool)
    assert graph.num_segments == 2


def test_a_stub_may_leave_a_factorys_outputs_alone(device: torch.device, pool: Pool) -> None:
    lazy = eager_on_graph(True, lambda *_: None, output_factory=torch.empty_like)(double.run_eager)
    static = torch.randn(8, 4, device=device)
    graph, output = captured(lambda x: lazy(x + 1) - 1, static, pool=pool, warm_up=False)
    assert torch.equal(replayed(graph, static, static, output), (static + 1) * 2 - 1)


def test_a_decorated_function_in_a_factory_is_an_ordinary_call(device: torch.device, pool: Pool) -> None:
    def factory(x: Tensor) -> Tensor:
        break_graph()
        return double(x)

    tripled = eager_on_graph(output_factory=factory)(lambda x: x * 3)
    static = torch.randn(8, 4, device=device)
    graph, output = captured(lambda x: tripled(x + 1) - 1, static, pool=pool)
    assert graph.num_segments == 2
    calls.clear()
    assert torch.equal(replayed(graph, static, static, output), (static + 1) * 3 - 1)
    assert calls == []


def test_a_factory_may_hand_out_a_buffer_of_the_callers(device: torch.device, pool: Pool) -> None:
    buffers = {"rows": torch.empty(8, 4, device=device)}

    @eager_on_graph(output_factory=lambda *_: buffers["rows"], pass_output=True)
    def fill(x: Tensor, output: Tensor | None = None) -> Tensor:
        return x * 2 if output is None else torch.mul(x, 2, out=output)

    static = torch.randn(8, 4, device=device)
    graph, output = captured(lambda x: fill(x + 1) - 1, static, pool=pool)
    buffers.clear()
    x = torch.randn(8, 4, device=device)
    churn(x)
    assert torch.equal(replayed(graph, static, x, output), (x + 1) * 2 - 1)


def test_pass_output_needs_a_factory_and_a_parameter() -> None:
    with pytest.raises(sg.SpecError, match="needs an output_factory"):
        eager_on_graph(pass_output=True)(written.run_eager)
    with pytest.raises(sg.SpecError, match="does not take"):
        eager_on_graph(output_factory=torch.empty_like, pass_output=True)(lambda x: x)


def test_a_caller_may_not_hand_over_what_pass_output_does(device: torch.device, pool: Pool) -> None:
    x = torch.randn(8, 4, device=device)
    with pytest.raises(sg.CaptureError, match="output= by its caller"):
        captured(lambda x: written(x, output=(x, x[:, 0])), x, pool=pool, warm_up=False)


# Where arguments come from.

stash: list[Tensor] = []


@no_graph
def make_scale(x: Tensor) -> Tensor:
    stash[:] = [torch.full_like(x, 3.0)]
    return x + 1


@no_graph
def use_scale(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def stashing_model(x: Tensor) -> Tensor:
    y = make_scale(x * 2)
    return use_scale(y - 1, stash[0]) + stash[0]


def test_an_external_tensor_survives_the_list_that_held_it_and_is_listed(
    device: torch.device, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    static = torch.randn(64, 64, device=device)
    with caplog.at_level(logging.INFO, logger="specgraph"):
        graph, output = captured(stashing_model, static, pool=pool)
    stash.clear()
    churn(static)
    assert torch.equal(replayed(graph, static, static, output), (static * 2 + 1 - 1) * 3.0 + 3.0)
    read_first, scale = graph.diagnostics
    assert read_first.where.endswith("in stashing_model")
    assert (scale.code, scale.where.rpartition(" ")[2]) == ("external-tensor", "stashing_model")
    assert "16384 bytes" in scale.message
    assert caplog.text.count("kept alive by the graph") == 2


def test_a_static_input_outlives_its_caller(device: torch.device, pool: Pool) -> None:
    static = torch.randn(64, 64, device=device)
    expected = (static + 1) * 2 - 1
    graph, output = captured(double_model, static, pool=pool)
    like = torch.empty_like(static)
    del static
    churn(like)
    graph.replay()
    assert torch.equal(output, expected)


def test_an_external_tensors_old_memory_is_kept_where_it_is_given_other_memory(
    device: torch.device, pool: Pool
) -> None:
    table = torch.full((64, 64), 2.0, device=device)
    static = torch.randn(64, 64, device=device)
    graph, output = captured(lambda x: double(x * table) - 1, static, pool=pool)
    table.data = torch.zeros(64, 64, device=device)
    churn(static)
    assert torch.equal(replayed(graph, static, static, output), static * 2.0 * 2 - 1)


def test_a_moved_parameter_is_refused_before_anything_is_launched(device: torch.device, pool: Pool) -> None:
    linear = nn.Linear(4, 4).to(device)
    graph, output = captured(lambda x: double(linear(x)) - 1, torch.randn(8, 4, device=device), pool=pool)
    before = output.clone()
    calls.clear()
    linear.weight.data = linear.weight.data + 1
    with pytest.raises(sg.ReplayError, match="has other memory") as caught:
        graph.replay()
    assert "float32[4 4], first read at" in caught.value.tensor
    assert calls == []
    assert torch.equal(output, before)


def test_a_parameter_written_in_place_is_seen(device: torch.device, pool: Pool) -> None:
    linear, static = nn.Linear(4, 4).to(device), torch.randn(8, 4, device=device)
    graph, output = captured(lambda x: double(linear(x)) - 1, static, pool=pool)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(4, 4))
        assert torch.equal(replayed(graph, static, static, output), linear(static) * 2 - 1)


def test_a_parameter_that_moves_while_it_is_captured_is_refused(device: torch.device, pool: Pool) -> None:
    linear = nn.Linear(4, 4).to(device)

    def model(x: Tensor) -> Tensor:
        y: Tensor = linear(x)
        linear.weight.data = linear.weight.data.clone()
        return y

    with pytest.raises(sg.CaptureError, match="while it was captured"):
        captured(model, torch.randn(8, 4, device=device), pool=pool)


@no_graph
def repeat(x: Tensor, times: int) -> Tensor:
    calls.append(f"times {times}")
    return x * times


def test_scalars_are_frozen(device: torch.device, pool: Pool) -> None:
    times = [2]
    static = torch.ones(2, 2, device=device)
    graph, output = captured(lambda x: repeat(x + 1, times[0]) * 1, static, pool=pool)
    times[:] = [7]
    assert torch.equal(replayed(graph, static, static, output), torch.full((2, 2), 4.0, device=device))
    assert set(calls) == {"times 2"}


@no_graph
def two_results(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.sum(1)


def aux_model(x: Tensor) -> Tensor:
    y, aux = two_results(torch.relu(x) + 1)
    z = use_scale(y.exp(), (aux * 1)[:, None])
    return z * aux[:, None] - y


def factory_aux_model(x: Tensor) -> Tensor:
    y, aux = rows_and_total(torch.relu(x) + 1)
    z = use_scale(y.exp(), (aux * 1)[:, None])
    return z * aux[:, None] - y


@pytest.mark.parametrize("model", [aux_model, factory_aux_model])
def test_captures_that_share_a_pool_replay_in_any_order(
    device: torch.device, pool: Pool, model: Callable[[Tensor], Tensor]
) -> None:
    statics = [torch.randn(size, 16, device=device) for size in (64, 32, 16)]
    graphs: list[tuple[BreakableCUDAGraph, Tensor]] = []
    for static in statics:
        graphs.append(captured(model, static, pool=graphs[0][0].pool() if graphs else pool))
    for index in (0, 1, 2, 0, 2, 1, 0):
        x = torch.randn_like(statics[index])
        expected = model(x)
        churn(x)
        graph, output = graphs[index]
        assert torch.equal(replayed(graph, statics[index], x, output), expected)


# Memory that outlives a capture.

cache: dict[str, Tensor] = {}


def test_what_the_model_keeps_is_told_from_its_outputs(device: torch.device, pool: Pool) -> None:
    def keeping_model(x: Tensor) -> Tensor:
        cache["last"] = x + 1
        return double(cache["last"]) - 1

    graph, output = captured(keeping_model, torch.randn(8, 16, device=device), pool=pool)
    try:
        (leak,) = graph.leaks({"out": [output]})
        assert (leak.nbytes, leak.made_in) == (512, "segment 0")
        assert leak.where.endswith("in keeping_model")
    finally:
        cache.clear()
    assert graph.leaks(output) == ()


# What is refused, and what a failure leaves behind.


def syncing_model(x: Tensor) -> Tensor:
    y = double(x)
    return y * y.sum().item()


def test_a_host_sync_in_a_segment_names_op_and_line_and_spoils_nothing(
    device: torch.device, pool: Pool
) -> None:
    static = torch.randn(8, 16, device=device)
    with pytest.raises(sg.CaptureError) as caught:
        captured(syncing_model, static, pool=pool)
    assert "aten::_local_scalar_dense in segment 1" in caught.value.problem
    assert caught.value.where.endswith("in syncing_model")
    assert "eager_on_graph" in caught.value.fix
    graph, output = captured(aux_model, static, pool=pool)
    x = torch.randn(8, 16, device=device)
    assert torch.equal(replayed(graph, static, x, output), aux_model(x))


def test_a_failed_capture_adds_nothing_to_its_graph(device: torch.device, pool: Pool) -> None:
    graph = BreakableCUDAGraph(pool)
    static = torch.randn(8, 4, device=device)
    with breakable_graph(graph):
        output = double_model(static)
    with pytest.raises(sg.CaptureError), breakable_graph(graph):
        syncing_model(static)
    assert graph.num_segments == 2
    x = torch.randn(8, 4, device=device)
    assert torch.equal(replayed(graph, static, x, output), (x + 1) * 2 - 1)


failing: list[Exception] = []


@eager_on_graph
def may_fail(x: Tensor) -> Tensor:
    if failing:
        raise failing[0]
    return x * 2


def failing_model(x: Tensor) -> Tensor:
    return may_fail(may_fail(x + 1) * 3) - 1


def test_an_exception_from_a_body_passes_unchanged_and_the_next_replay_is_right(
    device: torch.device, pool: Pool
) -> None:
    static = torch.randn(8, 4, device=device)
    graph, output = captured(failing_model, static, pool=pool)
    failing[:] = [ValueError("the body's own error")]
    try:
        with pytest.raises(ValueError, match="the body's own error") as caught:
            graph.replay()
        assert caught.value is failing[0]
    finally:
        failing.clear()
    x = torch.randn(8, 4, device=device)
    assert torch.equal(replayed(graph, static, x, output), failing_model(x))


def test_an_exception_from_a_body_at_capture_passes_unchanged(device: torch.device, pool: Pool) -> None:
    static = torch.randn(8, 4, device=device)
    failing[:] = [RuntimeError("the body's own error")]
    try:
        with pytest.raises(RuntimeError, match="the body's own error") as caught:
            captured(failing_model, static, pool=pool, warm_up=False)
        assert caught.value is failing[0]
    finally:
        failing.clear()
    graph, output = captured(failing_model, static, pool=pool)
    assert torch.equal(replayed(graph, static, static, output), failing_model(static))


def test_a_model_that_goes_on_after_a_failed_break_is_refused(device: torch.device, pool: Pool) -> None:
    def swallowing(x: Tensor) -> Tensor:
        try:
            return may_fail(x)
        except ValueError:
            return x + 1

    failing[:] = [ValueError("the body's own error")]
    try:
        with pytest.raises(sg.CaptureError, match="a break failed earlier"):
            captured(swallowing, torch.randn(8, 4, device=device), pool=pool)
    finally:
        failing.clear()


def test_a_capture_inside_a_capture_is_refused(device: torch.device, pool: Pool) -> None:
    x = torch.randn(8, 4, device=device)
    inner = no_graph(lambda x: captured(double_model, x, pool=pool, warm_up=False)[1])
    for model in (inner, lambda x: captured(double_model, x, pool=pool)[1]):
        with pytest.raises(sg.CaptureError, match="already in progress"):
            captured(model, x, pool=pool, warm_up=False)
    assert captured(double_model, x, pool=pool)[0].num_segments == 2


def test_a_graph_is_replayed_in_a_body_and_not_in_a_segment(device: torch.device, pool: Pool) -> None:
    static = torch.randn(8, 4, device=device)
    inner, inner_output = captured(double_model, static, pool=make_backend(device.type, {}).new_pool())

    def replay_inner(x: Tensor) -> Tensor:
        return replayed(inner, static, x, inner_output)

    with pytest.raises(sg.ReplayError, match="inside a segment"):
        captured(lambda _: inner.replay(), static, pool=pool, warm_up=False)
    x = torch.randn(8, 4, device=device)
    graph, output = captured(lambda x: no_graph(replay_inner)(x * 2) + 1, x, pool=pool)
    graph.replay()
    assert torch.equal(output, (x * 2 + 1) * 2 - 1 + 1)
    with pytest.raises(sg.ReplayError, match="already in progress"):
        captured(lambda _: no_graph(graph.replay)(), x, pool=pool, warm_up=False)


def test_error_modes_that_a_capture_does_not_have_are_refused(pool: Pool) -> None:
    for mode in ("thread_local", "global"):
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), pool, capture_error_mode=mode)
    for mode in ("relaxed", "loose"):
        with pytest.raises(sg.CaptureError, match=mode):
            breakable_graph(BreakableCUDAGraph(pool), capture_error_mode=mode)


# Graphs and pools.


def test_a_graph_is_empty_before_capture_and_after_reset(device: torch.device, pool: Pool) -> None:
    static = torch.randn(8, 4, device=device)
    graph = BreakableCUDAGraph(pool=pool)
    graph.reset()
    with pytest.raises(sg.ReplayError, match="nothing has been captured"):
        graph.replay()
    with breakable_graph(graph):
        double_model(static)
    graph.reset()
    assert (graph.num_segments, graph.diagnostics) == (0, ())
    with pytest.raises(sg.ReplayError, match="nothing has been captured"):
        graph.replay()
    with breakable_graph(graph):
        output = failing_model(static)
    assert graph.pool() is pool
    x = torch.randn(8, 4, device=device)
    assert torch.equal(replayed(graph, static, x, output), failing_model(x))


def test_a_second_capture_into_a_graph_follows_the_first(device: torch.device, pool: Pool) -> None:
    static = torch.randn(8, 4, device=device)
    graph = BreakableCUDAGraph(pool=pool)
    with breakable_graph(graph):
        first = double_model(static)
    with breakable_graph(graph):
        second = failing_model(first)
    x = torch.randn(8, 4, device=device)
    assert torch.equal(replayed(graph, static, x, second), failing_model(double_model(x)))
    assert graph.num_segments == 5


def test_a_pool_is_the_graphs_or_the_captures_or_another_graphs(device: torch.device, pool: Pool) -> None:
    graph = BreakableCUDAGraph()
    BreakableCUDAGraphCapture(graph, pool=pool)
    assert graph.pool() is pool
    assert BreakableCUDAGraph(pool=graph.pool()).pool() is pool
    assert BreakableCUDAGraph().pool() is not pool
    other = BreakableCUDAGraph().pool()
    with pytest.raises(sg.CaptureError, match="another pool"):
        breakable_graph(graph, pool=other)
    for wrong in ((0, 1), graph):
        with pytest.raises(sg.CaptureError, match="is no pool"):
            BreakableCUDAGraph(pool=wrong)  # type: ignore[arg-type]  # what is under test


def test_a_pool_may_be_shared_with_a_capture_by_a_spec(device: torch.device, pool: Pool) -> None:
    static = torch.randn(8, 4, device=device)
    graph, output = captured(aux_model, static, pool=pool)
    by_spec = sg.capture(lambda x: x.exp() * 2, sg.ModelSpec("whole", ()), {"x": static}, pool=graph.pool())
    for _ in range(2):
        x = torch.randn(8, 4, device=device)
        assert torch.equal(by_spec(x=x), x.exp() * 2)
        assert torch.equal(replayed(graph, static, x, output), aux_model(x))


def test_the_backend_is_cuda_where_there_is_a_gpu() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert BreakableCUDAGraph().pool().device.type == expected


def test_replays_from_two_threads_take_turns(device: torch.device, pool: Pool) -> None:
    statics = [torch.randn(64, 64, device=device) for _ in range(2)]
    graphs = [captured(double_model, static, pool=pool) for static in statics]
    running: list[int] = []
    overlaps: list[int] = []

    def watched(index: int) -> Callable[[Tensor], Tensor]:
        @no_graph
        def body(x: Tensor) -> Tensor:
            running.append(index)
            overlaps.extend(each for each in running if each != index)
            threading.Event().wait(0.001)
            running.remove(index)
            return x * 2

        return lambda x: body(x + 1) - 1

    graphs = [captured(watched(index), static, pool=pool) for index, static in enumerate(statics)]

    def serve(index: int) -> None:
        for _ in range(20):
            graphs[index][0].replay()

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []
    for (_, output), static in zip(graphs, statics, strict=True):
        assert torch.equal(output, (static + 1) * 2 - 1)


def test_the_block_knows_that_it_is_captured(device: torch.device, pool: Pool) -> None:
    seen: list[bool] = []
    look = no_graph(lambda: seen.append(is_in_breakable_graph()))
    assert not is_in_breakable_graph()
    graph = BreakableCUDAGraph(pool=pool)
    with breakable_graph(graph):
        assert is_in_breakable_graph()
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert not is_in_breakable_graph()
    graph.replay()
    assert seen == [True, False, False]


def test_inference_mode_and_grad_mode_give_the_same_replay(device: torch.device, pool: Pool) -> None:
    def model(x: Tensor) -> Tensor:
        total.add_(1)
        return double(x + total) - factory_model(x)

    with torch.inference_mode():
        total = torch.zeros(4, device=device)
        static = torch.randn(8, 4, device=device)
        graph, output = captured(model, static, pool=pool)
        total.zero_()
        x = torch.randn(8, 4, device=device)
        first = replayed(graph, static, x, output)
        assert torch.equal(first, (x + 1) * 2 - eager_result(x))
        total.zero_()
    graph.replay()
    assert torch.equal(output, first)


# With specs.


@sg.graph_break(sg.TensorLayout("S D", dtype=sg.like("x")), inputs={"x": sg.TensorLayout("S D")})
def declared(x: Tensor) -> Tensor:
    calls.append("declared")
    return x - 5


def test_a_function_under_graph_break_breaks_this_capture_too(device: torch.device, pool: Pool) -> None:
    static = torch.randn(8, 4, device=device)
    graph, output = captured(lambda x: declared(double(x) + 1) * 2, static, pool=pool)
    assert graph.num_segments == 2
    calls.clear()
    x = torch.randn(8, 4, device=device)
    churn(x)
    assert torch.equal(replayed(graph, static, x, output), (x * 2 + 1 - 5) * 2)
    assert calls == ["double", "declared"]


def test_a_break_in_a_factory_is_refused(device: torch.device, pool: Pool) -> None:
    declaring = eager_on_graph(output_factory=declared)(lambda x: x * 3)
    with pytest.raises(sg.CaptureError, match="called by an output factory"):
        captured(lambda x: declaring(x + 1), torch.randn(8, 4, device=device), pool=pool)


def test_live_values_need_a_capture_by_a_spec(device: torch.device, pool: Pool) -> None:
    @sg.graph_break(
        sg.TensorLayout("S D", dtype=sg.like("x")), inputs={"x": sg.TensorLayout("S D")}, live={"n": "n"}
    )
    def takes_live(x: Tensor, n: int = 1) -> Tensor:
        return x * n

    with pytest.raises(sg.CaptureError, match="live values"):
        captured(takes_live, torch.randn(8, 4, device=device), pool=pool)


def test_a_capture_by_a_spec_refuses_a_decorated_function_it_does_not_declare(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    with pytest.raises(sg.PlanError, match="spec does not declare it") as caught:
        sg.capture(double_model, sg.ModelSpec("undeclared", ()), {"x": x})
    assert (caught.value.break_name, caught.value.spec) == ("double", "undeclared")
    rows = sg.TensorLayout("S D")
    spec = sg.BreakSpec(double, sg.TensorLayout("S D", dtype=sg.like("x")), inputs={"x": rows})
    by_spec = sg.capture(double_model, sg.ModelSpec("declared", (spec,)), {"x": x})
    assert by_spec.num_segments == 2
    assert torch.equal(by_spec(x=x), (x + 1) * 2 - 1)


@sg.graph_break(
    sg.TensorLayout("S D", dtype=sg.like("x")), inputs={"x": sg.TensorLayout("S D")}, fusable=True
)
def fusable(x: Tensor) -> Tensor:
    break_graph()
    return double(x) + 1


def test_a_decorated_function_in_a_fused_body_is_an_ordinary_call(device: torch.device) -> None:
    fused = sg.capture(
        lambda x: fusable(x - 3) * 5,
        sg.ModelSpec("fused", (fusable.spec,)),
        {"x": torch.randn(8, 4, device=device)},
    )
    for _ in range(4):
        x = torch.randn(8, 4, device=device)
        calls.clear()
        assert torch.equal(fused(x=x), ((x - 3) * 2 + 1) * 5)
    assert fused.stats.fused > 0
    assert calls == []


# What a type checker sees; an ignore that is not needed is an error.

if TYPE_CHECKING:
    double("no tensor")  # type: ignore[arg-type]  # the type checker knows the signature
    rows_and_total(torch.ones(1))[2]  # type: ignore[misc]  # and what is returned
    Scaled(1.0).scale(torch.ones(1), turn=1)  # type: ignore[call-arg]  # of methods too


# Streams.


@pytest.mark.cuda
def test_a_capture_waits_for_its_stream_which_waits_for_the_capture() -> None:
    device = torch.device("cuda", 0)
    static = torch.zeros(1024, 1024, device=device)

    @no_graph
    def slow(x: Tensor) -> Tensor:
        torch.cuda._sleep(50_000_000)
        return x * 2

    def model(x: Tensor) -> Tensor:
        return slow(x + 1) - 1

    model(static)
    stream = torch.cuda.Stream()
    current = torch.cuda.current_stream()
    graph = BreakableCUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        static.fill_(3.0)
    with BreakableCUDAGraphCapture(graph, stream=stream):
        output = model(static)
    assert torch.cuda.current_stream() == current
    with torch.cuda.stream(stream):
        seen = output.clone()
    torch.cuda.synchronize()
    assert torch.equal(seen, torch.full_like(seen, 7.0))


@pytest.mark.cuda
def test_another_thread_may_allocate_and_copy_meanwhile() -> None:
    device = torch.device("cuda", 0)
    stop, errors = threading.Event(), []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    torch.randn(512, 512, device=device).cpu()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        static = torch.randn(64, 64, device=device)
        graph, output = captured(aux_model, static, pool=BreakableCUDAGraph().pool())
        x = torch.randn(64, 64, device=device)
        actual = replayed(graph, static, x, output)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert torch.equal(actual, aux_model(x))
