"""Fused replay: bodies of a live value that comes back are captured, and nothing else changes."""

from __future__ import annotations

import enum
import itertools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import specgraph as sg
from specgraph.executor.fusing import MAX_SEEN
from specgraph.executor.value_key import value_key
from tests.churn import churn

ROWS = sg.TensorLayout("S D")
SAME = sg.TensorLayout("S D", dtype=sg.like("x"))


@sg.graph_break(SAME, inputs={"x": ROWS}, live={"length": "length"}, fusable=True)
def scale_rows(x: Tensor, length: int = 0) -> Tensor:
    return torch.cat([x[:length] * 2, x[length:]])


@sg.graph_break(
    SAME,
    inputs={"x": ROWS},
    ownership=sg.Ownership.PASS_THROUGH,
    out="out",
    live={"length": "length"},
    fusable=True,
)
def negate_rows(x: Tensor, length: int = 0, out: Tensor | None = None) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    out[:length].copy_(-x[:length])
    out[length:].copy_(x[length:])
    return out


def two_bodies(x: Tensor) -> Tensor:
    return negate_rows(scale_rows(x + 1) * 3) - 1


def eager(x: Tensor, length: int) -> Tensor:
    return negate_rows.fn(scale_rows.fn(x + 1, length) * 3, length) - 1


SPEC = sg.ModelSpec("two", (scale_rows.spec, negate_rows.spec), inputs={"x": ROWS}, live=("length",))


def capture(device: torch.device, **options: Any) -> sg.CapturedGraph:
    return sg.capture(two_bodies, SPEC, {"x": torch.randn(8, 4, device=device)}, {"length": 8}, **options)


def num_launches(captured: sg.CapturedGraph) -> list[int]:
    """Calls of each program, the one used last at the end."""
    assert captured._fused is not None
    return [len(program.calls) for program in captured._fused._programs.values()]


def test_a_key_that_comes_back_is_one_launch_and_the_same_bits(device: torch.device) -> None:
    captured = capture(device)
    for length in (3, 5, 3, 5, 8, 3, 0, 8, 5, 0, 0):
        x = torch.randn(8, 4, device=device)
        assert torch.equal(captured(live={"length": length}, x=x), eager(x, length))
        churn(x, 50)
    # Of eleven replays, four met a new key and four made its program.
    assert attrs.asdict(captured.stats) == {"replays": 11, "fused": 3, "programs": 4, "evicted": 0}
    assert num_launches(captured) == [1, 1, 1, 1]


def test_a_key_is_fused_from_its_third_replay_or_from_prefuse_on(device: torch.device) -> None:
    captured = capture(device)
    seen = []
    for _ in range(3):
        captured.replay(live={"length": 2})
        seen.append((captured.stats.programs, captured.stats.fused))
    assert seen == [(0, 0), (1, 0), (1, 1)]
    captured.prefuse(live={"length": 6})
    captured.prefuse(live={"length": 6})
    assert captured.stats.programs == 2
    x = torch.randn(8, 4, device=device)
    assert torch.equal(captured(live={"length": 6}, x=x), eager(x, 6))
    assert captured.stats.fused == 2


def test_programs_are_kept_up_to_a_number_and_the_one_unused_for_longest_goes(device: torch.device) -> None:
    captured = capture(device, max_fused=2)
    for length in (1, 2, 1, 3):
        captured.prefuse(live={"length": length})
    captured.replay(live={"length": 1})
    assert attrs.asdict(captured.stats) == {"replays": 1, "fused": 0, "programs": 4, "evicted": 2}
    for length in (3, 1, 3, 1):
        x = torch.randn(8, 4, device=device)
        assert torch.equal(captured(live={"length": length}, x=x), eager(x, length))
    assert attrs.asdict(captured.stats) == {"replays": 5, "fused": 4, "programs": 4, "evicted": 2}
    assert num_launches(captured) == [1, 1]


def test_evicted_programs_give_their_memory_to_the_next(device: torch.device) -> None:
    captured = capture(device, max_fused=1)
    captured.prefuse(live={"length": 1})
    captured.prefuse(live={"length": 2})
    reserved = captured.pool.late.reserved_nbytes
    assert reserved > 0
    for length in range(8):
        captured.prefuse(live={"length": length})
    assert captured.pool.late.reserved_nbytes == reserved
    assert captured.stats.evicted == captured.stats.programs - 1


@pytest.mark.parametrize("options", [{"max_fused": 0}, {"validate": "poison"}], ids=["none", "poison"])
def test_fusing_can_be_had_off(device: torch.device, options: dict[str, Any]) -> None:
    captured = capture(device, **options)
    for _ in range(3):
        x = torch.randn(8, 4, device=device)
        assert torch.equal(captured(live={"length": 3}, x=x), eager(x, 3))
    captured.prefuse(live={"length": 3})
    assert (captured.stats.fused, captured.stats.programs) == (0, 0)


# Bodies that cannot be captured, and segments that must stay apart.


@sg.graph_break(SAME, inputs={"x": ROWS}, mutates="x", fusable=True)
def reads_back(x: Tensor) -> Tensor:
    x.add_(1)
    return x * float(x[0, 0])


@sg.graph_break(SAME, inputs={"x": ROWS}, fusable=True)
def adds_noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@sg.graph_break(SAME, inputs={"x": ROWS})
def not_declared(x: Tensor) -> Tensor:
    return x * 5


@sg.graph_break(SAME, inputs={"x": ROWS}, fusable=True)
def plus_one(x: Tensor) -> Tensor:
    return x + 1


PLAIN = sg.ModelSpec("plain", (), inputs={"x": ROWS})


def test_what_cannot_be_captured_stays_eager_between_fused_runs_and_is_reported_once(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    def model(x: Tensor) -> Tensor:
        return plus_one(reads_back(plus_one(x * 1)) * 2) * 3

    captured = sg.capture(model, PLAIN, {"x": torch.ones(2, 2, device=device)})
    with caplog.at_level(logging.WARNING, "specgraph"):
        for _ in range(4):
            x = torch.randn(2, 2, device=device)
            assert torch.equal(captured(x=x), model(x))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("plain: break 'reads_back' stays eager, its body cannot be captured: ")
    assert "aten::_local_scalar_dense in a segment needs a value on the host" in message
    assert captured.stats.fused == 2
    assert num_launches(captured) == [3]


def test_a_body_that_draws_random_numbers_is_refused(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    def model(x: Tensor) -> Tensor:
        return adds_noise(x * 1) * 1

    x = torch.zeros(64, 4, device=device)
    captured = sg.capture(model, PLAIN, {"x": x})
    with caplog.at_level(logging.WARNING, "specgraph"):
        drawn = [captured(x=x) for _ in range(4)]
    assert all(not torch.equal(first, second) for first, second in itertools.pairwise(drawn))
    assert ["draws random numbers" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("dropout", "num_fused"), [(0.0, 2), (0.5, 0)])
def test_attention_is_fused_unless_it_drops_elements(
    device: torch.device, dropout: float, num_fused: int
) -> None:
    @sg.graph_break(sg.TensorLayout("S D", dtype=sg.like("x")), inputs={"x": ROWS}, fusable=True)
    def attends(x: Tensor) -> Tensor:
        heads = x[None, None]
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout)[0, 0].contiguous()

    def model(x: Tensor) -> Tensor:
        return attends(x * 1) * 1

    x = torch.randn(64, 32, device=device)
    captured = sg.capture(model, PLAIN, {"x": x})
    drawn = [captured(x=x) for _ in range(4)]
    assert captured.stats.fused == num_fused
    assert [torch.equal(first, second) for first, second in itertools.pairwise(drawn)] == [not dropout] * 3
    if not dropout:
        assert torch.equal(drawn[-1], model(x))


def test_a_segment_that_draws_random_numbers_is_launched_by_itself(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        noise = plus_one(torch.rand_like(x))
        return plus_one(noise * 1) * 1

    x = torch.zeros(64, 4, device=device)
    captured = sg.capture(model, PLAIN, {"x": x})
    drawn = [captured(x=x) for _ in range(4)]
    assert captured.stats.fused == 2
    assert all(not torch.equal(first, second) for first, second in itertools.pairwise(drawn))
    assert all(bool(((each >= 2) & (each < 3)).all()) for each in drawn)
    assert num_launches(captured) == [2]


def test_a_body_that_is_not_declared_fusable_is_a_step_of_its_own(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        return plus_one(not_declared(plus_one(x * 1)) * 1)

    captured = sg.capture(model, PLAIN, {"x": torch.ones(2, 2, device=device)})
    for value in (1.0, 2.0, 3.0):
        x = torch.full((2, 2), value, device=device)
        assert torch.equal(captured(x=x), (x + 1) * 5 + 1)
    assert captured.stats.fused == 1
    assert num_launches(captured) == [3]


def test_a_break_function_called_in_a_captured_body_is_an_ordinary_call(device: torch.device) -> None:
    @sg.graph_break(SAME, inputs={"x": ROWS}, fusable=True)
    def outer(x: Tensor) -> Tensor:
        return plus_one(x) * 2

    captured = sg.capture(lambda x: outer(x * 1) * 1, PLAIN, {"x": torch.ones(2, 2, device=device)})
    for value in (1.0, 2.0, 3.0):
        x = torch.full((2, 2), value, device=device)
        assert torch.equal(captured(x=x), (x + 1) * 2)
    assert num_launches(captured) == [1]


# The replay that captures is a replay like any other.

fails: BaseException | None = None
returns: Callable[[Tensor], Tensor] = torch.neg


@sg.graph_break(SAME, inputs={"x": ROWS}, fusable=True)
def may_fail(x: Tensor) -> Tensor:
    if fails is not None:
        raise fails
    return returns(x)


def failing_model(x: Tensor) -> Tensor:
    return may_fail(x * 1) * 2


def test_an_exception_of_a_body_passes_through_and_the_next_replay_is_right(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 2, device=device)
    captured = sg.capture(failing_model, PLAIN, {"x": x})
    captured(x=x)
    error = ValueError("the body's own")
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "fails", error)
        with pytest.raises(ValueError, match="the body's own") as caught:
            captured(x=x)
        assert caught.value is error
    for _ in range(3):
        x = torch.randn(2, 2, device=device)
        assert torch.equal(captured(x=x), -x * 2)
    # The replay that failed left nothing behind: the next one of the key captured.
    assert (captured.stats.programs, captured.stats.fused) == (1, 2)


def test_a_wrong_result_is_refused_and_the_buffer_keeps_its_content(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, 2, device=device)
    captured = sg.capture(failing_model, PLAIN, {"x": x})
    captured(x=x)
    buffer = captured._steps[1].outputs["output"]  # type: ignore[union-attr]  # it is a break
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "returns", lambda x: x[:1].clone())
        with pytest.raises(sg.LayoutError, match="does not have the expected layout"):
            captured(x=x)
    assert torch.equal(buffer, -x)
    for _ in range(3):
        x = torch.randn(4, 2, device=device)
        assert torch.equal(captured(x=x), -x * 2)


def test_padding_is_part_of_the_graph_and_its_length_of_the_key(device: torch.device) -> None:
    @sg.graph_break(SAME, inputs={"x": ROWS}, fusable=True)
    def leaves_nan(x: Tensor) -> Tensor:
        return torch.full_like(x, float("nan")).index_copy(
            0, torch.zeros(1, dtype=torch.int64, device=x.device), x[:1]
        )

    spec = sg.ModelSpec("padded", (leaves_nan.spec,), inputs={"x": ROWS}, buckets={"S": (8,)})
    captured = sg.capture(lambda x: leaves_nan(x + 1) * 2, spec, {"x": torch.ones(8, 2, device=device)})
    for length in (1, 3, 1, 3, 1, 3):
        out = captured(live={"S": length}, x=torch.ones(8, 2, device=device))
        assert out[:, 0].isnan().tolist() == [False] + [True] * (length - 1) + [False] * (8 - length)
        assert bool((out[length:] == 0).all())
    assert (captured.stats.programs, captured.stats.fused) == (2, 2)


# What a captured body reads from outside.

made_outside: list[Tensor] = []


def test_what_a_captured_body_reads_from_outside_is_kept(device: torch.device) -> None:
    @sg.graph_break(SAME, inputs={"x": ROWS}, fusable=True)
    def adds_table(x: Tensor) -> Tensor:
        return x + made_outside[0]

    table = torch.randn(16, 4, device=device)
    made_outside[:] = [table.clone()]
    captured = sg.capture(lambda x: adds_table(x * 1) * 1, PLAIN, {"x": torch.ones(16, 4, device=device)})
    captured.prefuse()
    made_outside.clear()
    for _ in range(3):
        churn(table)
        x = torch.randn(16, 4, device=device)
        assert torch.equal(captured(x=x), x + table)
    assert captured.stats.fused == 3


class Weighted(nn.Module):
    """A module whose weight only a body reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    @sg.graph_break(SAME, inputs={"x": ROWS}, fusable=True)
    def weigh(self, x: Tensor) -> Tensor:
        return x * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.weigh(x + 1) * 1


def test_a_program_whose_body_read_a_weight_that_moved_is_given_up(device: torch.device) -> None:
    with torch.no_grad():
        model = Weighted().to(device)
        x = torch.randn(8, 4, device=device)
        captured = sg.capture(model, PLAIN, {"x": x})
        captured.prefuse()
        assert torch.equal(captured(x=x), (x + 1) * 2)
        model.weight.data = torch.full((4,), 3.0, device=device)
        for _ in range(4):
            assert torch.equal(captured(x=x), (x + 1) * 3)
    assert attrs.asdict(captured.stats) == {"replays": 5, "fused": 3, "programs": 2, "evicted": 1}


# Keys.


class Mode(enum.Enum):
    """Of a live value."""

    PLAIN = 1


@pytest.mark.parametrize(
    "values",
    [(1, True, 1.0), (0.0, -0.0), ((1,), (1.0,), (True,)), ("a", b"a"), (Mode.PLAIN, 1), (None, False, 0)],
)
def test_values_that_mean_different_work_have_different_keys(values: tuple[object, ...]) -> None:
    assert len({value_key(value) for value in values}) == len(values)
    assert [value_key(value) for value in values] == [value_key(value) for value in values]
    assert value_key(float("nan")) == value_key(float("nan"))


@pytest.mark.parametrize("value", [[1], object(), torch.ones(1), (1, object()), frozenset([(object(),)])])
def test_a_value_that_may_change_unseen_has_no_key(value: object) -> None:
    with pytest.raises(TypeError, match=r"compares by identity|is not hashable"):
        value_key(value)


def test_a_live_value_without_a_key_is_replayed_step_by_step_and_reported_once(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    @sg.graph_break(SAME, inputs={"x": ROWS}, live={"factors": "factors"}, fusable=True)
    def times_all(x: Tensor, factors: list[int]) -> Tensor:
        for factor in factors:
            x = x * factor
        return x.clone()

    spec = sg.ModelSpec("listed", (times_all.spec,), live=("factors",))
    factors = [2]
    x = torch.ones(2, 2, device=device)
    captured = sg.capture(lambda x: times_all(x + 0, factors) * 1, spec, {"x": x}, {"factors": factors})
    with caplog.at_level(logging.WARNING, "specgraph"):
        for expected in (2, 6, 24):
            assert torch.equal(captured(live={"factors": factors}, x=x), x * expected)
            factors.append(expected // 2 + 2 if expected == 2 else 4)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "listed: live value 'factors' cannot be told from another: a list is not hashable"
    assert captured.stats.programs == 0


def test_keys_that_never_come_back_are_forgotten(device: torch.device) -> None:
    captured = capture(device)
    assert captured._fused is not None
    for number in range(MAX_SEEN + 10):
        captured._fused._seen[number] = None
    captured.replay(live={"length": 1})
    assert len(captured._fused._seen) == MAX_SEEN + 10


def test_a_replay_in_a_body_of_another_capture_is_not_fused(device: torch.device) -> None:
    inner = capture(device)
    x = torch.randn(8, 4, device=device)

    @sg.graph_break(SAME, inputs={"x": ROWS})
    def replays_inner(x: Tensor) -> Tensor:
        out: Tensor = inner(live={"length": 3}, x=x)
        return out

    outer = sg.capture(lambda x: replays_inner(x * 1) * 1, PLAIN, {"x": x})
    assert inner.stats.programs == 0
    assert torch.equal(outer(x=x), eager(x, 3))
    assert torch.equal(outer(x=x), eager(x, 3))
    assert (inner.stats.programs, inner.stats.fused) == (1, 1)


def test_a_fused_replay_makes_no_more_python_calls_for_more_breaks(device: torch.device) -> None:
    def replays(breaks: int) -> tuple[int, int]:
        def model(x: Tensor) -> Tensor:
            for _ in range(breaks):
                x = scale_rows(x + 1)
            return x

        spec = sg.ModelSpec("chain", (scale_rows.spec,), live=("length",))
        captured = sg.capture(model, spec, {"x": torch.randn(8, 4, device=device)}, {"length": 8})
        captured.prefuse({"length": 3})
        return framework_calls(captured, 5), framework_calls(captured, 3)

    (few, few_fused), (many, many_fused) = replays(2), replays(12)
    # Step by step, a break is a step and its body: the framework adds the write.
    assert many - few == 10 * 3
    assert many_fused == few_fused <= 12


def framework_calls(captured: sg.CapturedGraph, length: int) -> int:
    """Calls of Python functions in a replay, those of the backend's own recorded ops aside."""
    count = 0

    def profile(frame: types.FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event == "call" and "backends" not in frame.f_code.co_filename and not is_torch(frame):
            count += 1

    live = {"length": length}
    sys.setprofile(profile)
    try:
        captured.replay(live)
    finally:
        sys.setprofile(None)
    return count


def is_torch(frame: types.FrameType) -> bool:
    return "/torch/" in frame.f_code.co_filename or "/specgraph/ops.py" in frame.f_code.co_filename
