"""The runner: buckets, padding, misses, warm-up, limits, threads.

Values are small integers in floating point, so that sums are exact in any order and a padded matmul has the
bits of an unpadded one.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import specgraph as sg
from benchmarks import chains
from tests.churn import churn

WIDTH = 4
ROWS = sg.TensorLayout("S D")
SAME = sg.TensorLayout("S D", dtype=sg.like("x"))


def whole(*shape: int, device: torch.device) -> Tensor:
    return torch.randint(-3, 4, shape, device=device).float()


@sg.graph_break(SAME, inputs={"x": ROWS}, live={"length": "S"})
def mix(x: Tensor, length: int | None = None) -> Tensor:
    """Adds the sum of the live rows to each; what it returns past them is NaN."""
    seen.append(x.shape[0] if length is None else length)
    rows.append(x.shape[0])
    out = torch.full_like(x, float("nan"))
    out[:length] = x[:length] + x[:length].sum(0)
    return out


@sg.graph_break(
    SAME,
    inputs={"x": ROWS, "y": sg.TensorLayout("T D", sg.like("x"))},
    live={"rows": "S", "others": "T"},
)
def attend(x: Tensor, y: Tensor, rows: int | None = None, others: int | None = None) -> Tensor:
    """Adds to each live row of `x` its product with all live rows of `y`."""
    out = torch.full_like(x, float("nan"))
    out[:rows] = x[:rows] + x[:rows] @ y[:others].T @ y[:others]
    return out


seen: list[int] = []
"""Live lengths that `mix` was handed."""

rows: list[int] = []
"""Rows that it was handed, padding among them."""


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()
    rows.clear()


def model(x: Tensor, y: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """[S D] and [T D] to [S D] and [T]; `1 / x` of a padded zero is infinite."""
    mixed = mix(torch.relu(x + 1) * scale)
    joined = attend(mixed - 1, y + 1)
    return joined * 2, (y * y).sum(1) + 0 * (1 / (y + 8)).sum(1)


SPEC = sg.ModelSpec(
    "mixing",
    (mix.spec, attend.spec),
    inputs={"x": ROWS, "y": sg.TensorLayout("T D")},
    outputs=(SAME, sg.TensorLayout("T", dtype=sg.like("x"))),
    buckets={"S": (16, 4, 8), "T": (2, 6)},
    pad={"y": 5.0},
)


def inputs(s: int, t: int, device: torch.device) -> dict[str, Any]:
    return {"x": whole(s, WIDTH, device=device), "y": whole(t, WIDTH, device=device)}


def same(actual: Any, expected: Any) -> bool:
    return all(
        mine.shape == theirs.shape and mine.stride() == theirs.stride() and torch.equal(mine, theirs)
        for mine, theirs in zip(actual, expected, strict=True)
    )


def warm(device: torch.device, **options: Any) -> sg.GraphRunner:
    runner = sg.GraphRunner(model, SPEC, **options)
    runner.warmup(inputs(3, 3, device))
    return runner


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="specgraph"):
        yield caplog


# Serving.


def test_a_thousand_calls_of_mixed_lengths_equal_eager_in_memory_that_does_not_grow(
    device: torch.device,
) -> None:
    draw = random.Random(0)
    runner = warm(device, validate="poison")
    (pool,) = {id(each.pool): each.pool for each in runner.captures}.values()

    def memory() -> list[int]:
        own = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        return [pool.reserved_nbytes, pool.allocated_nbytes, runner.nbytes, len(runner.captures), own]

    def serve(s: int, t: int) -> None:
        given = inputs(s, t, device)
        kept = {name: each.clone() for name, each in given.items()}
        expected = model(**given)
        assert same(runner(**given), expected)
        assert all(torch.equal(given[name], each) for name, each in kept.items())

    for s in (4, 8, 16):
        for t in (2, 6):
            serve(s, t)
    before = memory()
    for call in range(1000):
        serve(draw.randint(1, 16), draw.randint(1, 6))
        if call % 100 == 0:
            churn(torch.empty(16, WIDTH, device=device), 20)
    assert memory() == before
    stats = runner.stats
    assert (stats.replays, stats.misses, stats.captures, stats.evictions) == (1006, {}, 6, 0)


def test_the_smallest_bucket_that_fits_serves_and_bodies_get_the_true_length(device: torch.device) -> None:
    runner = warm(device)
    for length, bucket in ((1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)):
        seen.clear()
        runner(**inputs(length, 6, device))
        assert seen == [length]
        last = runner.captures[-1]
        assert last.sizes == {"S": bucket, "T": 6}
        assert last.graph.stats.replays >= 1


def test_inputs_are_padded_with_what_the_spec_says(device: torch.device) -> None:
    runner = warm(device)
    given = inputs(5, 4, device)
    runner(**given)
    static = runner.captures[-1].graph.inputs
    assert torch.equal(static["x"], torch.cat([given["x"], torch.zeros(3, WIDTH, device=device)]))
    assert torch.equal(static["y"], torch.cat([given["y"], torch.full((2, WIDTH), 5.0, device=device)]))


def test_a_caller_who_padded_says_so_and_gets_the_live_rows(device: torch.device) -> None:
    for on_miss in ("eager", "error"):
        runner = sg.GraphRunner(model, SPEC)
        if on_miss == "error":
            runner.warmup(inputs(3, 3, device))
        given = inputs(3, 4, device)
        padded = {**given, "x": torch.cat([given["x"], whole(5, WIDTH, device=device)])}
        assert same(runner(**padded, live={"S": 3}), model(**given))
        assert runner.stats.replays == (on_miss == "error")
        with pytest.raises(sg.ReplayError, match="'S' is not one of its inputs' rows") as caught:
            runner(**padded, live={"S": 9})
        assert (caught.value.expected, caught.value.actual) == ("an int from 0 to 8", "9")


def test_positional_arguments_are_bound_and_keywords_come_in_any_order(device: torch.device) -> None:
    runner = warm(device, on_miss="error")
    given = inputs(7, 5, device)
    expected = model(**given)
    assert same(runner(given["x"], given["y"]), expected)
    assert same(runner(given["x"], y=given["y"]), expected)
    assert same(runner(y=given["y"], x=given["x"]), expected)
    with pytest.raises(TypeError, match="multiple values"):
        runner(given["x"], **given)


def test_what_already_is_in_the_static_buffers_is_not_copied(device: torch.device) -> None:
    runner = warm(device)
    given = inputs(7, 6, device)
    runner(**given)
    static = dict(runner.captures[-1].graph.inputs)
    breaks = runner.captures[-1].break_nbytes
    out = (7 * WIDTH + 6) * 4
    assert runner.stats.copied_nbytes == (7 * WIDTH + 6 * WIDTH) * 4 + breaks + out
    before = runner.stats.copied_nbytes
    static["x"][:7] = given["x"] + 1
    static["x"][7:] = float("nan")
    actual = runner(x=static["x"][:7], y=static["y"])
    assert same(actual, model(given["x"] + 1, given["y"]))
    assert runner.stats.copied_nbytes - before == breaks + out


def test_rows_in_the_middle_of_a_static_buffer_are_moved_to_its_start(device: torch.device) -> None:
    runner = warm(device)
    given = inputs(8, 6, device)
    runner(**given)
    static = dict(runner.captures[-1].graph.inputs)
    actual = runner(x=static["x"][2:8], y=given["y"])
    assert same(actual, model(given["x"][2:8], given["y"]))


def test_one_static_buffer_may_be_handed_in_for_another(device: torch.device) -> None:
    spec = sg.ModelSpec("swap", ())
    runner = sg.GraphRunner(lambda x, y: x * 2 + y, spec)
    x, y = whole(3, WIDTH, device=device), whole(3, WIDTH, device=device)
    runner.warmup({"x": x, "y": y})
    static = runner.captures[0].graph.inputs
    runner(x=x, y=y)
    assert torch.equal(runner(x=static["y"], y=static["x"]), y * 2 + x)


def test_outputs_are_fresh_unless_borrowed(device: torch.device) -> None:
    given = inputs(7, 5, device)
    expected = [each.clone() for each in model(**given)]
    fresh = warm(device)
    first = fresh(**given)
    fresh(**inputs(7, 5, device))
    assert same(first, expected)
    lent = warm(device, outputs="borrow")
    rows, squares = lent(**given)
    assert torch.equal(rows, expected[0])
    assert torch.equal(squares, expected[1])
    static = lent.captures[-1].graph.outputs
    assert (rows.data_ptr(), squares.data_ptr()) == tuple(each.data_ptr() for each in static)
    copied = lent.stats.copied_nbytes
    assert copied == (7 * WIDTH + 5 * WIDTH) * 4 + lent.captures[-1].break_nbytes


# Misses.


def test_a_length_past_the_largest_bucket_is_explained_once_and_served_eagerly(
    device: torch.device, log: pytest.LogCaptureFixture
) -> None:
    for on_miss in ("eager", "capture"):
        runner = warm(device, on_miss=on_miss)
        log.clear()
        for length in (30, 31):
            given = inputs(length, 6, device)
            assert same(runner(**given), model(**given))
        assert [record.getMessage() for record in log.records] == [
            "mixing: a call matches no capture, it is run eagerly: input 'x': dim S is 30, captured: 4, 8, 16"
        ]
        assert runner.stats.misses == {"size": 2}
        assert len(runner.captures) == 6


MISSES: dict[str, tuple[Any, str, str]] = {
    "size": (
        lambda x, y: {"x": x.new_ones(40, 4), "y": y},
        "size",
        "input 'x': dim S is 40, captured: 4, 8, 16",
    ),
    "other dim": (
        lambda x, y: {"x": x[:, :3], "y": y[:, :3]},
        "size",
        "input 'x': dim D is 3, captured: 4",
    ),
    "value": (
        lambda x, y: {"x": x, "y": y, "scale": 3.0},
        "inputs",
        "the set of inputs is x, y, scale (float), captured: x, y",
    ),
    "dtype": (
        lambda x, y: {"x": x.double(), "y": y.double()},
        "dtype",
        "input 'x': dtype is float64, captured: float32",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_a_miss_is_refused_in_words(device: torch.device, name: str) -> None:
    change, reason, words = MISSES[name]
    runner = warm(device, on_miss="error")
    given = inputs(5, 5, device)
    with pytest.raises(sg.ReplayError) as caught:
        runner(**change(**given))
    assert caught.value.problem == f"the call matches no capture: {words}"
    assert runner.stats.misses == {reason: 1}
    assert same(runner(**given), model(**given))


def test_values_that_are_no_tensors_are_told_apart_by_type_and_bits(device: torch.device) -> None:
    runner = sg.GraphRunner(model, SPEC, on_miss="capture")
    given = inputs(4, 2, device)
    nan = float("nan")
    for scale in (2.0, 2, True, 1, 0.0, -0.0, nan, nan, 2.0):
        actual, expected = runner(**given, scale=scale), model(**given, scale=scale)
        assert torch.equal(actual[0].nan_to_num(7.0), expected[0].nan_to_num(7.0))
    assert len(runner.captures) == 7
    assert runner.stats.replays == 9
    refusing = sg.GraphRunner(model, SPEC, on_miss="error")
    refusing.warmup({**given, "scale": 2.0})
    with pytest.raises(sg.ReplayError, match=r"input 'scale' is 3\.5, captured: 2\.0"):
        refusing(**given, scale=3.5)
    many = sg.GraphRunner(lambda x, a, b: x * a + b, sg.ModelSpec("many", ()), on_miss="error")
    many.warmup({"x": given["x"], "a": 1, "b": 2})
    with pytest.raises(sg.ReplayError, match="input 'b' is 3, captured: 2"):
        many(x=given["x"], a=1, b=3)


def test_a_bucket_that_was_never_captured_is_named(device: torch.device) -> None:
    runner = sg.GraphRunner(model, SPEC, on_miss="error")
    with pytest.raises(sg.ReplayError, match="nothing is captured"):
        runner(**inputs(4, 2, device))
    small = sg.GraphRunner(model, SPEC, on_miss="capture")
    small(**inputs(16, 2, device))
    small(**inputs(3, 6, device))
    small._on_miss = "error"
    with pytest.raises(sg.ReplayError, match=r"input 'x': dim S is 5 \(bucket 8\), captured: 4, 16"):
        small(**inputs(5, 2, device))
    with pytest.raises(sg.ReplayError, match="the combination of layouts"):
        small(**inputs(16, 6, device))


@sg.graph_break(SAME, inputs={"x": ROWS})
def keep(x: Tensor) -> Tensor:
    return x * 1


def nested_model(x: Tensor, options: dict[str, Any], extra: object = None) -> dict[str, Any]:
    """Takes anything, returns anything."""
    shift = options["shift"][0] if options["shift"] else 0
    return {"out": keep(x + shift) * 2, "count": 3, "none": None}


NESTED = sg.ModelSpec("nested", (keep.spec,))


def test_nested_inputs_and_their_structure_are_part_of_the_key(device: torch.device) -> None:
    runner = sg.GraphRunner(nested_model, NESTED, on_miss="capture")
    x = whole(3, WIDTH, device=device)
    shift = whole(1, WIDTH, device=device)
    every: tuple[dict[str, Any], ...] = (
        {"shift": [shift]},
        {"shift": [2]},
        {"shift": []},
        {"shift": [shift + 1]},
    )
    for options in every:
        out = runner(x=x, options=options)
        expected = nested_model(x, options)
        assert torch.equal(out["out"], expected["out"])
        assert (out["count"], out["none"]) == (3, None)
    assert len(runner.captures) == 3
    assert runner.stats.replays == 4


class Holder:
    """Compares by identity; what is in it changes."""

    def __init__(self, value: float) -> None:
        self.value = value


def held_model(x: Tensor, holder: Any) -> Tensor:
    return keep(x + (holder.value if isinstance(holder, Holder) else len(holder))) * 2


@pytest.mark.parametrize("on_miss", ["eager", "capture"])
def test_inputs_that_no_key_can_hold_are_served_eagerly(device: torch.device, on_miss: Any) -> None:
    runner = sg.GraphRunner(held_model, sg.ModelSpec("held", ()), on_miss=on_miss)
    x = whole(3, WIDTH, device=device)
    holder = Holder(1.0)
    for value in (1.0, 2.0):
        holder.value = value
        assert torch.equal(runner(x=x, holder=holder), (x + value) * 2)
    assert torch.equal(runner(x=x, holder={1, 2}), (x + 2) * 2)
    assert runner.stats.misses == {"unkeyed": 3}
    assert runner.captures == ()
    with pytest.raises(sg.CaptureError, match="Holder compares by identity"):
        runner.warmup({"x": x, "holder": holder})
    with pytest.raises(sg.CaptureError, match="set is not hashable"):
        runner.warmup({"x": x, "holder": {1}})
    runner(x=x, holder=frozenset({1}))
    assert len(runner.captures) == (on_miss == "capture")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda g: {"x": g["x"]}, sg.PlanError),
        (lambda g: {**g, "z": g["x"]}, sg.PlanError),
        (lambda g: {**g, "y": g["y"][:, :2]}, sg.LayoutError),
        (lambda g: {**g, "x": g["x"].requires_grad_()}, sg.ReplayError),
        (lambda g: {**g, "live": {"q": 1}}, sg.ReplayError),
    ],
)
def test_a_call_that_breaks_the_spec_is_an_error_and_no_miss(
    device: torch.device, change: Any, error: type[sg.SpecGraphError]
) -> None:
    runner = warm(device)
    with pytest.raises(error):
        runner(**change(inputs(5, 5, device)))
    assert runner.stats.misses == {}
    given = inputs(5, 5, device)
    assert same(runner(**given), model(**given))


# Failures, eviction, closing: earlier captures stay usable.


@sg.graph_break(SAME, inputs={"x": ROWS}, name="fussy")
def fussy(x: Tensor) -> Tensor:
    if x.shape[0] in refused_sizes:
        raise ValueError(f"no {x.shape[0]} rows")
    return x + 1


refused_sizes: set[int] = set()


def fussy_model(x: Tensor) -> Tensor:
    return fussy(x * 2) * 3


FUSSY = sg.ModelSpec("fussy", (fussy.spec,), inputs={"x": ROWS}, outputs=SAME, buckets={"S": (2, 4, 8)})


@pytest.fixture
def refuse() -> Iterator[set[int]]:
    refused_sizes.clear()
    yield refused_sizes
    refused_sizes.clear()


def test_a_bucket_that_fails_does_not_lose_the_others(
    device: torch.device, refuse: set[int], log: pytest.LogCaptureFixture
) -> None:
    refuse.add(4)
    runner = sg.GraphRunner(fussy_model, FUSSY, on_miss="capture")
    report = runner.warmup({"x": whole(3, WIDTH, device=device)})
    assert [each.sizes["S"] for each in report.buckets] == [8, 4, 2]
    assert [str(each) for each in report.failed] == ["S=4: failed: ValueError: no 4 rows"]
    assert all(each.seconds > 0 and each.nbytes > 0 for each in report.buckets if not each.error)
    assert "fussy: S=4 could not be captured: ValueError: no 4 rows" in log.messages
    for length in (1, 2, 3, 5, 8):
        x = whole(length, WIDTH, device=device)
        assert torch.equal(runner(x=x), (x * 2 + 1) * 3)
    stats = runner.stats
    assert (stats.replays, stats.misses, stats.captures, stats.failures) == (4, {"failed": 1}, 2, 1)
    refuse.clear()
    assert not runner.warmup({"x": whole(3, WIDTH, device=device)}).failed
    x = whole(3, WIDTH, device=device)
    assert torch.equal(runner(x=x), (x * 2 + 1) * 3)
    assert runner.stats.replays == 5
    runner._store.give_up_all("the test says so")
    runner(x=x)
    assert runner.stats.replays == 6


def test_a_warm_up_in_which_nothing_could_be_captured_raises(device: torch.device, refuse: set[int]) -> None:
    refuse.update((2, 4, 8))
    runner = sg.GraphRunner(fussy_model, FUSSY)
    with pytest.raises(sg.CaptureError, match="not one of 3 buckets") as caught:
        runner.warmup({"x": whole(3, WIDTH, device=device)})
    assert caught.value.actual == "S=8: failed: ValueError: no 8 rows"


def test_a_capture_that_fails_while_serving_is_not_tried_at_every_call(
    device: torch.device, refuse: set[int]
) -> None:
    runner = sg.GraphRunner(fussy_model, FUSSY, on_miss="capture")
    good = whole(2, WIDTH, device=device)
    runner(x=good)
    refuse.add(8)
    for _ in range(3):
        x = whole(7, WIDTH, device=device)
        assert torch.equal(runner(x=x), (x * 2 + 1) * 3)
        assert torch.equal(runner(x=good), (good * 2 + 1) * 3)
    assert (runner.stats.failures, runner.stats.misses) == (1, {"uncaptured": 1, "size": 1, "failed": 2})
    refuse.clear()
    runner.clear()
    runner(x=whole(7, WIDTH, device=device))
    assert [each.sizes["S"] for each in runner.captures] == [8]


def test_the_least_recently_used_capture_makes_room(
    device: torch.device, log: pytest.LogCaptureFixture
) -> None:
    runner = sg.GraphRunner(fussy_model, FUSSY, on_miss="capture", max_captures=2)
    xs = {length: whole(length, WIDTH, device=device) for length in (2, 4, 8)}

    def serve(length: int) -> None:
        assert torch.equal(runner(x=xs[length]), (xs[length] * 2 + 1) * 3)

    for length in (2, 4, 2, 8):
        serve(length)
    assert [each.sizes["S"] for each in runner.captures] == [2, 8]
    assert runner.stats.evictions == 1
    assert any("capture S=4 is given up" in each for each in log.messages)
    for length in (2, 8, 4, 2):
        serve(length)
    assert [each.sizes["S"] for each in runner.captures] == [4, 2]


def test_a_warm_up_past_the_limit_keeps_what_it_has_captured(device: torch.device) -> None:
    runner = sg.GraphRunner(fussy_model, FUSSY, max_captures=2)
    report = runner.warmup({"x": whole(3, WIDTH, device=device)})
    assert [each.label for each in report.failed] == ["S=2"]
    assert "the limit is 2" in report.failed[0].error
    assert [each.sizes["S"] for each in runner.captures] == [8, 4]


BIG = sg.ModelSpec("big", (keep.spec,), inputs={"x": ROWS}, outputs=SAME, buckets={"S": (256, 1024, 4096)})


def big_model(x: Tensor) -> Tensor:
    return keep(x + 1) * 2


def test_captures_stay_under_a_limit_in_bytes(device: torch.device, log: pytest.LogCaptureFixture) -> None:
    width = 1024
    free = sg.GraphRunner(big_model, BIG, on_miss="capture")
    xs = {size: whole(size, width, device=device) for size in (4096, 1024, 256)}
    for x in xs.values():
        free(x=x)
    needed = free.nbytes
    free.close()
    limit = needed - xs[256].nbytes
    runner = sg.GraphRunner(big_model, BIG, on_miss="capture", max_nbytes=limit)
    for size in (4096, 1024, 256, 1024, 4096, 256):
        assert torch.equal(runner(x=xs[size]), (xs[size] + 1) * 2)
        assert runner.nbytes <= limit
    assert runner.stats.evictions > 0
    assert runner.stats.failures == 0
    tight = sg.GraphRunner(big_model, BIG, on_miss="capture", max_nbytes=16 << 20)
    for size in (256, 4096, 256):
        assert torch.equal(tight(x=xs[size]), (xs[size] + 1) * 2)
    assert (tight.stats.replays, tight.stats.failures) == (2, 1)
    assert tight.nbytes <= 16 << 20
    assert any("one more capture would be past the limit" in each for each in log.messages)


def test_a_closed_runner_refuses_calls_and_holds_nothing(device: torch.device) -> None:
    runner = warm(device)
    graphs = [each.graph for each in runner.captures]
    runner.close()
    runner.close()
    assert (runner.captures, runner.nbytes, runner.stats.evictions) == ((), 0, 0)
    for use in (lambda: runner(**inputs(4, 2, device)), lambda: runner.warmup(inputs(4, 2, device))):
        with pytest.raises(sg.ReplayError, match="closed"):
            use()
    for graph in graphs:
        with pytest.raises(sg.ReplayError, match="closed"):
            graph.replay()


@sg.graph_break(SAME, inputs={"x": ROWS})
def close_it(x: Tensor) -> Tensor:
    for runner in to_close:
        runner.close()
    return x * 1


to_close: list[sg.GraphRunner] = []


def test_a_capture_that_ends_after_its_runner_was_closed_is_not_held(device: torch.device) -> None:
    runner = sg.GraphRunner(
        lambda x: close_it(x + 1) * 2, sg.ModelSpec("closing", (close_it.spec,)), on_miss="capture"
    )
    x = whole(3, WIDTH, device=device)
    to_close[:] = [runner]
    try:
        assert torch.equal(runner(x=x), (x + 1) * 2)
    finally:
        to_close.clear()
    assert (runner.captures, runner.stats.captures, runner.nbytes) == ((), 1, 0)


def test_a_body_that_raises_leaves_every_capture_usable(device: torch.device, refuse: set[int]) -> None:
    runner = sg.GraphRunner(fussy_model, FUSSY)
    runner.warmup({"x": whole(3, WIDTH, device=device)})
    refuse.add(8)
    with pytest.raises(ValueError, match="no 8 rows"):
        runner(x=whole(7, WIDTH, device=device))
    refuse.clear()
    for length in (7, 3, 1):
        x = whole(length, WIDTH, device=device)
        assert torch.equal(runner(x=x), (x * 2 + 1) * 3)


def calls_itself(x: Tensor) -> Tensor:
    return again(x + 1) * 2


@sg.graph_break(SAME, inputs={"x": ROWS})
def again(x: Tensor) -> Tensor:
    if own_runner and x.shape[0] > 1:
        return torch.cat([own_runner[0](x=x[:-1]), x[-1:]])
    return x * 1


own_runner: list[sg.GraphRunner] = []


def test_a_body_that_calls_its_own_runner_captures_nothing(device: torch.device) -> None:
    runner = sg.GraphRunner(calls_itself, sg.ModelSpec("again", ()), on_miss="capture")
    x = whole(2, WIDTH, device=device)
    runner(x=x)
    own_runner[:] = [runner]
    try:
        expected = torch.cat([(x[:1] + 1 + 1) * 2, x[1:] + 1]) * 2
        assert torch.equal(runner(x=x), expected)
    finally:
        own_runner.clear()
    assert len(runner.captures) == 1
    assert torch.equal(runner(x=x), (x + 1) * 2)


# Warm-up.


def test_an_example_may_be_made_for_every_bucket(device: torch.device) -> None:
    asked: list[dict[str, int]] = []

    def example(**sizes: int) -> sg.Example:
        asked.append(sizes)
        return sg.Example(inputs(sizes["S"], 1, device), live={"S": 1})

    runner = sg.GraphRunner(model, SPEC, on_miss="error")
    report = runner.warmup(example, progress=True)
    assert asked == [each.sizes for each in report.buckets]
    assert set(seen) == {4, 8, 16}
    assert asked[0] == {"S": 16, "T": 6}
    assert asked[-1] == {"S": 4, "T": 2}
    assert str(report).splitlines()[0].startswith("S=16 T=6: ")
    assert runner.warmup(example).buckets[0].sizes == {"S": 16, "T": 6}
    assert runner.stats.captures == 6
    given = inputs(11, 3, device)
    assert same(runner(**given), model(**given))


class WideChain(nn.Module):
    """The memory of 28 transformer blocks over [S D], at little work: each tensor is as wide as there."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(28):
            query, _, _ = (x + 1).repeat(1, 3).chunk(3, 1)
            x = x + keep(query)
            x = x + (x + 1).repeat(1, 4).relu().unflatten(1, (4, -1)).sum(1)
        return x


POOL_BUCKETS = (256, 512, 1024, 2048)


def assert_all_in_the_pool_of_the_largest(runner: sg.GraphRunner, example: Tensor) -> None:
    """Within 5 % of what the pool was when it held the largest alone."""
    largest, *others = runner.warmup({"x": example}).buckets
    assert largest.sizes == {"S": 2048}
    assert len(others) == 3
    pools = {id(each.pool): each.pool for each in runner.captures}
    assert len(pools) == 1
    alone = largest.nbytes - example.nbytes
    assert sum(pool.reserved_nbytes for pool in pools.values()) <= 1.05 * alone


def test_the_pool_of_all_buckets_is_that_of_the_largest(device: torch.device) -> None:
    spec = sg.ModelSpec("wide", (keep.spec,), inputs={"x": ROWS}, outputs=SAME, buckets={"S": POOL_BUCKETS})
    x = torch.zeros(2048, 768, device=device)
    assert_all_in_the_pool_of_the_largest(sg.GraphRunner(WideChain(), spec), x)


@pytest.mark.cuda
def test_the_pool_of_all_buckets_of_a_real_chain_is_that_of_the_largest() -> None:
    spec = sg.ModelSpec(
        "chain",
        (chains.ATTENTION,),
        inputs={"x": sg.TensorLayout("1 S C")},
        outputs=sg.TensorLayout("1 S C", sg.like("x")),
        buckets={"S": POOL_BUCKETS},
    )
    chain, x = chains.build(chains.Size(28, 2048), torch.device("cuda", 0))
    assert_all_in_the_pool_of_the_largest(sg.GraphRunner(chain, spec), x)


# Modes.


def test_checked_mode_runs_the_padded_call_without_graphs(device: torch.device) -> None:
    runner = sg.GraphRunner(model, SPEC, mode="checked", on_miss="error")
    assert runner.warmup(inputs(3, 3, device)).buckets == ()
    for s, t, bucket in ((3, 2, 4), (16, 6, 16), (20, 1, 20)):
        given = inputs(s, t, device)
        assert same(runner(**given), model(**given))
        assert (seen[-2], rows[-2]) == (s, bucket)
    assert (runner.captures, runner.stats.replays) == ((), 0)


def wrong_layout(x: Tensor) -> Tensor:
    return x[:1]


def test_checked_mode_finds_what_eager_mode_lets_pass(device: torch.device) -> None:
    spec = sg.ModelSpec(
        "wrong", (sg.BreakSpec(keep, SAME, inputs={"x": ROWS}, body=wrong_layout, name="keep"),)
    )
    runner = sg.GraphRunner(big_model, spec, mode="checked")
    x = whole(4, WIDTH, device=device)
    with pytest.raises(sg.LayoutError, match="keep"):
        runner(x=x)
    runner.mode = "eager"
    assert torch.equal(runner(x=x), (x + 1) * 2)
    assert torch.equal(runner(x), (x + 1) * 2)


def test_a_miss_is_served_through_the_spec_s_bodies(device: torch.device) -> None:
    spec = sg.ModelSpec(
        "doubling", (sg.BreakSpec(keep, SAME, inputs={"x": ROWS}, body=times, live={"by": "by"}),), live="by"
    )
    runner = sg.GraphRunner(big_model, spec)
    x = whole(4, WIDTH, device=device)
    assert torch.equal(runner(x=x, live={"by": 7}), (x + 1) * 7 * 2)
    runner.warmup({"x": x}, live={"by": 1})
    assert torch.equal(runner(x=x, live={"by": 7}), (x + 1) * 7 * 2)
    assert runner.stats.replays == 1


def times(x: Tensor, by: int) -> Tensor:
    return x * by


@sg.graph_break(SAME, inputs={"x": ROWS}, live={"by": "by"}, fusable=True)
def times_by(x: Tensor, by: int = 1) -> Tensor:
    return x * by


def test_fused_replays_are_counted(device: torch.device) -> None:
    spec = sg.ModelSpec("fused", (times_by.spec,), live="by")
    x = whole(4, WIDTH, device=device)
    for max_fused, expected in ((16, 3), (0, 0)):
        runner = sg.GraphRunner(lambda x: times_by(x + 1) * 2, spec, max_fused=max_fused)
        runner.warmup({"x": x}, live={"by": 1})
        for _ in range(5):
            assert torch.equal(runner(x=x, live={"by": 3}), (x + 1) * 3 * 2)
        assert (runner.stats.replays, runner.stats.fused_replays) == (5, expected)


# Inside another capture.


def test_under_a_capture_of_a_larger_model_the_wrapped_one_is_part_of_it(device: torch.device) -> None:
    runner = sg.GraphRunner(big_model, sg.ModelSpec("inner", (keep.spec,)))
    x = whole(4, WIDTH, device=device)
    runner.warmup({"x": x})
    outer = sg.capture(lambda x: runner(x=x - 1) * 3, sg.ModelSpec("outer", (keep.spec,)), {"x": x})
    assert len(outer.plan.breaks) == 1
    for shift in (1, 2):
        assert torch.equal(outer(x=x + shift), (x + shift) * 2 * 3)
    assert runner.stats.replays == 0


# Ranges.


def test_ranges_name_every_step_and_are_off_by_default(device: torch.device) -> None:
    given = inputs(4, 2, device)
    names = {}
    for ranges in (False, True):
        runner = warm(device, ranges=ranges)
        with torch.profiler.profile() as profile:
            assert same(runner(**given), model(**given))
        names[ranges] = [each.name for each in profile.events() or () if each.name.startswith("mixing")]
    assert names[False] == []
    assert names[True][0] == "mixing: segment 0"
    assert {"mixing: break 0, mix", "mixing: break 1, attend"} < set(names[True])


# Threads.


def test_threads_share_a_runner_while_captures_come_and_go(device: torch.device) -> None:
    runner = sg.GraphRunner(model, SPEC, on_miss="capture", max_captures=2)
    wrong: list[object] = []

    def serve(seed: int) -> None:
        draw = random.Random(seed)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        try:
            for _ in range(25):
                with torch.cuda.stream(stream):
                    given: dict[str, Any] = {
                        "x": torch.full((draw.randint(1, 16), WIDTH), float(seed), device=device),
                        "y": torch.full((draw.randint(1, 6), WIDTH), 1.0, device=device),
                    }
                    if not same(runner(**given), model(**given)):
                        wrong.append(given)
        except Exception as error:  # noqa: BLE001  # reported by the assertion below
            wrong.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = runner.stats
    assert stats.evictions > 0
    assert stats.captures - stats.evictions == len(runner.captures) <= 2
    assert stats.replays > 0
    assert stats.replays + sum(stats.misses.values()) >= 75


def test_a_capture_given_up_while_it_is_used_lives_until_it_is_done(device: torch.device) -> None:
    def waiting_model(x: Tensor) -> Tensor:
        return wait(x + 1) * 2

    runner = sg.GraphRunner(waiting_model, sg.ModelSpec("waiting", ()))
    x = whole(3, WIDTH, device=device)
    runner.warmup({"x": x})
    graph = runner.captures[0].graph
    inside.clear()
    go_on.clear()
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(runner(x=x)))
    waits.append(1)
    try:
        thread.start()
        assert inside.wait(10)
        runner.clear()
        assert runner.captures == ()
        assert graph.inputs
    finally:
        waits.clear()
        go_on.set()
        thread.join()
    assert torch.equal(results[0], (x + 1) * 2)
    assert not graph.inputs


inside, go_on = threading.Event(), threading.Event()
waits: list[int] = []


@sg.graph_break(SAME, inputs={"x": ROWS})
def wait(x: Tensor) -> Tensor:
    if waits:
        inside.set()
        assert go_on.wait(10)
    return x * 1


# What cannot be bucketed.


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"inputs": {"x": ROWS, "y": sg.TensorLayout("S+T D")}}, "computes with the bucketed dim 'S'"),
        ({"outputs": sg.TensorLayout("S*D", "float32")}, "computes with the bucketed dim 'S'"),
        ({"outputs": None}, "no layouts of its outputs"),
        ({"buckets": {"S": ()}}, r"'S' has the sizes \(\)"),
    ],
)
def test_a_spec_that_cannot_be_padded_is_refused(change: Mapping[str, Any], problem: str) -> None:
    fields: dict[str, Any] = {"inputs": {"x": ROWS}, "outputs": SAME, "buckets": {"S": (4,)}}
    with pytest.raises(sg.SpecError, match=problem):
        sg.GraphRunner(big_model, sg.ModelSpec("m", (keep.spec,), **{**fields, **change}))


def test_options_and_parameters_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="on_miss is one of 'eager', 'capture', 'error'"):
        sg.GraphRunner(big_model, BIG, on_miss="never")  # type: ignore[arg-type]  # the point of the test
    runner = sg.GraphRunner(big_model, BIG)
    with pytest.raises(ValueError, match="mode is one of"):
        runner.mode = "fast"  # type: ignore[assignment]  # the point of the test
    with pytest.raises(sg.SpecError, match="parameter called 'live'"):
        sg.GraphRunner(lambda x, live: (x, live), sg.ModelSpec("m", ()))


def two(x: Tensor) -> list[Tensor]:
    return [keep(x) * 1, x + 1]


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (two, "does not have the tensors of the spec's outputs"),
        (lambda x: keep(x).sum(1), "has 1 dims, not 2"),
        (lambda x: keep(x)[1:], "dim S is 4095, not 4096"),
        (lambda x: keep(x).double(), "has another dtype"),
    ],
)
def test_outputs_that_are_not_as_declared_fail_the_capture(
    device: torch.device, fn: Any, problem: str
) -> None:
    runner = sg.GraphRunner(fn, BIG)
    with pytest.raises(sg.CaptureError, match="not one of 3 buckets") as caught:
        runner.warmup({"x": whole(300, WIDTH, device=device)})
    assert problem in caught.value.actual


class Boxed:
    """Holds a tensor out of sight."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_outputs_that_cannot_be_copied_out_fail_the_capture(device: torch.device) -> None:
    runner = sg.GraphRunner(lambda x: Boxed(x + 1), sg.ModelSpec("boxed", ()), on_miss="capture")
    x = whole(3, WIDTH, device=device)
    with pytest.raises(sg.CaptureError, match="returns a Boxed") as caught:
        runner.warmup({"x": x})
    assert "register_pytree_node" in caught.value.fix
    first = runner(x=x).tensor
    runner(x=x + 1)
    assert torch.equal(first, x + 1)


def test_axes_behind_any_number_of_dims_are_padded_and_cut(device: torch.device) -> None:
    spec = sg.ModelSpec(
        "rest",
        (),
        inputs={"x": sg.TensorLayout("*rest S D")},
        outputs={"out": sg.TensorLayout("*rest S", sg.like("x"))},
        buckets={"S": (4, 8)},
    )
    runner = sg.GraphRunner(lambda x: {"out": (x * 2).sum(-1)}, spec, on_miss="capture")
    for shape in ((3, 5, 2), (2, 3, 7, 2), (3, 6, 2)):
        x = whole(*shape, device=device)
        assert same(runner(x=x).values(), [(x * 2).sum(-1)])
        assert runner.captures[-1].sizes == {"S": 8}
    assert runner.stats.captures == 2
