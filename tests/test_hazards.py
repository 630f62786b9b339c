"""The six ways in which memory can go wrong in a graph, each planted and each caught.

Every test shows the right outcome first and then breaks one thing, in the model or in the executor, to see
that a check or a poisoned replay notices.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import specgraph as sg
from specgraph.executor import CapturedBreak
from specgraph.executor.backends import Backend, Pool, make_backend
from tests.churn import churn

ROWS = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", dtype=sg.like("x"))
SPEC = sg.ModelSpec("m", ())


# 1. An external tensor that is held by alias: its memory is handed out again.

stash: list[Tensor] = []


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def use_scale(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def stashing(x: Tensor) -> Tensor:
    return use_scale(x * 2, stash[0]) - 1


def recycled_tensor(like: Tensor) -> Tensor:
    """Threes; once nothing holds the tensor its memory is written over, at once and without a doubt."""
    if like.is_cuda:
        return torch.full_like(like, 3.0)
    memory = bytearray(like.nbytes)
    view = memoryview(memory)
    tensor = torch.frombuffer(view, dtype=like.dtype).view(like.shape).fill_(3.0)
    weakref.finalize(tensor.untyped_storage(), _overwrite, memory)
    keep_alive.append(memory)
    return tensor


keep_alive: list[bytearray] = []


def _overwrite(memory: bytearray) -> None:
    memory[:] = b"\xff" * len(memory)


def replay_after_the_stash_died(device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 64, device=device)
    stash[:] = [recycled_tensor(x)]
    captured = sg.capture(stashing, SPEC, {"x": x})
    stash.clear()
    churn(x)
    return captured(x=x), x * 2 * 3 - 1


def test_external_tensors_are_held(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    actual, expected = replay_after_the_stash_died(device)
    assert torch.equal(actual, expected)

    recorder = sys.modules["specgraph.executor.capture"]._Recorder

    def hold_nothing(self: Any, tensor: Tensor) -> Tensor:
        self.kept.clear()
        return self.backend.alias(tensor)  # type: ignore[no-any-return]  # the planted fault

    monkeypatch.setattr(recorder, "_held", hold_nothing)
    actual, expected = replay_after_the_stash_died(device)
    assert not torch.equal(actual, expected)


# 2. Rows that a body leaves unwritten expose whatever the pool held.


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS}, ownership=sg.Ownership.PASS_THROUGH, out="out")
def half_written(x: Tensor, out: Tensor | None = None) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    rows = len(x) if not skip else len(x) // 2
    out[:rows] = x[:rows] * 3
    return out


skip: list[bool] = []


def test_unwritten_rows_are_named_under_poison(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        return half_written(x + 1) * 2

    x = torch.randn(16, 8, device=device)
    captured = sg.capture(model, SPEC, {"x": x}, validate="poison")
    assert torch.equal(captured(x=x), (x + 1) * 3 * 2)
    skip.append(True)
    try:
        with pytest.raises(sg.ReplayError, match="64 of 128 elements were left"):
            captured(x=x)
    finally:
        skip.clear()


# 3. Two replays over one pool, overlapping in time.


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def interrupted(x: Tensor) -> Tensor:
    for replay in interruptions:
        replay()
    return x + 1


interruptions: list[Callable[[], object]] = []


def around_a_break(x: Tensor) -> Tensor:
    before = x * 2
    return interrupted(x - 1) + before


def no_lock(pool: Pool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@pytest.mark.parametrize("validate", ["strict", "poison"])
def test_overlapping_replays_are_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, validate: str
) -> None:
    x = torch.randn(64, 64, device=device)
    outer = sg.capture(around_a_break, SPEC, {"x": x}, validate=validate)
    inner = sg.capture(lambda x: (x * 5).exp() - x, SPEC, {"x": x}, validate=validate, pool=outer.pool)
    expected = x - 1 + 1 + x * 2
    interruptions[:] = [lambda: inner(x=x)]
    try:
        with pytest.raises(sg.ReplayError, match="already in progress"):
            outer(x=x)
        monkeypatch.setattr(type(outer.pool), "exclusive", no_lock)
        assert not torch.equal(outer(x=x), expected)
    finally:
        interruptions.clear()
    assert torch.equal(outer(x=x), expected)


def test_a_body_cannot_capture_into_the_pool_it_is_replayed_in(device: torch.device) -> None:
    x = torch.randn(64, 64, device=device)
    outer = sg.capture(around_a_break, SPEC, {"x": x})
    interruptions[:] = [lambda: sg.capture(lambda x: x * 5, SPEC, {"x": x}, pool=outer.pool)]
    try:
        with pytest.raises(sg.ReplayError, match="already in progress"):
            outer(x=x)
    finally:
        interruptions.clear()
    assert torch.equal(outer(x=x), x - 1 + 1 + x * 2)


# 4. A tensor that a segment made and the model keeps.


def test_what_the_model_keeps_of_a_segment_is_reported(device: torch.device) -> None:
    kept: dict[str, Tensor] = {}

    def caching(x: Tensor) -> Tensor:
        if "table" not in kept:
            kept["table"] = torch.arange(8.0, device=x.device)
        return use_scale(x, x) + kept["table"]

    x = torch.randn(16, 8, device=device)
    assert sg.capture(caching, SPEC, {"x": x}).leaks == ()

    def forgetting(x: Tensor) -> Tensor:
        kept.clear()
        return caching(x)

    (leak,) = sg.capture(forgetting, SPEC, {"x": x}).leaks
    assert (leak.made_in, leak.nbytes) == ("segment 0", 32)


# 5. A body captured after its plan, in the plan's pool: what lives across the break looks free by then.


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def crowded(x: Tensor) -> Tensor:
    return torch.stack([x * float(i) for i in range(8)]).sum(0)


def across_a_break(x: Tensor) -> Tensor:
    lives_across = torch.relu(x) + 2
    return crowded(x + 1) * lives_across


class Recording(TorchDispatchMode):
    def __init__(self, backend: Backend) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.backend = backend

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.backend.run_op(func, args, kwargs or {})


@contextlib.contextmanager
def body_captured_in(pool: Pool | None, captured: sg.CapturedGraph) -> Iterator[None]:
    """In `captured`, the body of the one break replaced by a graph of it."""
    steps = captured._steps
    (index,) = (index for index, step in enumerate(steps) if isinstance(step, CapturedBreak))
    step = steps[index]
    assert isinstance(step, CapturedBreak)
    backend = make_backend("auto", captured.inputs)
    pool = pool or backend.new_pool()
    with torch.no_grad(), backend.capturing(pool):
        backend.begin_segment()
        with Recording(backend):
            step.writer.write(step.body.run({}), {})
        graph = backend.end_segment()
    assert graph is not None
    before, captured._run[index] = captured._run[index], graph.replay
    yield
    captured._run[index] = before


@pytest.mark.parametrize("validate", ["strict", "poison"])
def test_a_body_captured_later_needs_a_pool_of_its_own(device: torch.device, validate: str) -> None:
    x = torch.randn(64, 64, device=device)
    captured = sg.capture(across_a_break, SPEC, {"x": x}, validate=validate)
    for other in (x, torch.randn_like(x)):
        assert torch.equal(captured(x=other), across_a_break(other))
        with body_captured_in(None, captured):
            assert torch.equal(captured(x=other), across_a_break(other))
        with body_captured_in(captured.pool, captured):
            assert not torch.equal(captured(x=other), across_a_break(other))


# 6. A parameter that has moved.


def test_a_moved_parameter_is_refused(device: torch.device) -> None:
    layer = torch.nn.Linear(8, 8, device=device)

    def model(x: Tensor) -> Tensor:
        return use_scale(layer(x), x)

    x = torch.randn(16, 8, device=device)
    captured = sg.capture(model, SPEC, {"x": x})
    with torch.no_grad():
        assert torch.equal(captured(x=x), model(x))
    layer.weight.data = layer.weight.data.clone()
    with pytest.raises(sg.ReplayError, match="has other memory"):
        captured(x=x)
