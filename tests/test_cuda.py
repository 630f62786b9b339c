"""What only a GPU can show: failed captures, other threads and streams, empty graphs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import specgraph as sg
from specgraph.executor.backends import make_backend

pytestmark = pytest.mark.cuda

ROWS = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", dtype=sg.like("x"))


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def double(x: Tensor) -> Tensor:
    return x * 2


def good_model(x: Tensor) -> Tensor:
    return double(x + 1) * 3


SPEC = sg.ModelSpec("m", ())


def synchronizes(x: Tensor) -> Tensor:
    torch.cuda.synchronize()
    return x


def copies_to_host(x: Tensor) -> Tensor:
    return x * x.sum().cpu().to(x.device)


def copies_from_host(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


@pytest.mark.parametrize("fault", [synchronizes, copies_to_host, copies_from_host])
@pytest.mark.parametrize("shares_pool", [False, True])
def test_a_capture_that_fails_leaves_the_process_as_it_was(
    fault: Callable[[Tensor], Tensor], shares_pool: bool
) -> None:
    x = torch.randn(8, 4, device="cuda")
    before = sg.capture(good_model, SPEC, {"x": x})

    def random_model(x: Tensor) -> Tensor:
        return double(x) + torch.rand(8, 4, device="cuda")

    seeded = sg.capture(random_model, SPEC, {"x": x})
    torch.manual_seed(0)
    expected_random = seeded(x=x)

    def bad_model(x: Tensor) -> Tensor:
        return fault(double(x + 1)) * 3

    with pytest.raises(sg.CaptureError, match="cannot be captured") as caught:
        sg.capture(bad_model, SPEC, {"x": x}, pool=before.pool if shares_pool else None)
    assert caught.value.where.endswith(f"in {fault.__name__}")
    assert "BreakSpec" in caught.value.fix
    assert torch.randn(3, device="cuda").isfinite().all()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    assert torch.equal(seeded(x=x), expected_random)
    after = sg.capture(good_model, SPEC, {"x": x}, pool=before.pool)
    x = torch.randn(8, 4, device="cuda")
    assert torch.equal(before(x=x), (x + 1) * 2 * 3)
    assert torch.equal(after(x=x), (x + 1) * 2 * 3)


def test_another_thread_may_allocate_and_synchronise_during_a_capture() -> None:
    stop = threading.Event()
    rounds: list[float] = []
    seen: list[int] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                held = torch.ones(1 << 20, device="cuda")
                rounds.append(held.sum().item())
                del held
                torch.cuda.empty_cache()

    def slow_model(x: Tensor) -> Tensor:
        for _ in range(20):
            x = double(x * 0.5 + 1)
            time.sleep(0.005)
            seen.append(len(rounds))
        return x

    x = torch.randn(64, 64, device="cuda")
    thread = threading.Thread(target=work)
    thread.start()
    try:
        captured = sg.capture(slow_model, SPEC, {"x": x})
    finally:
        stop.set()
        thread.join()
    during_capture = seen[-20:]
    assert during_capture[-1] > during_capture[0] + 5
    assert torch.equal(captured(x=x), slow_model(x))


def test_replays_from_two_streams_do_not_overlap() -> None:
    x = torch.randn(2048, 2048, device="cuda")

    def heavy_model(x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.tanh(double(x @ x))
        return x

    captured = sg.capture(heavy_model, SPEC, {"x": x})
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    inputs = [torch.randn_like(x) for _ in range(8)]
    torch.cuda.synchronize()
    outputs = []
    for index, each in enumerate(inputs):
        with torch.cuda.stream(streams[index % 2]):
            outputs.append(captured(x=each))
    torch.cuda.synchronize()
    for each, output in zip(inputs, outputs, strict=True):
        assert torch.equal(output, heavy_model(each))


def test_an_empty_leading_segment_launches_nothing() -> None:
    def model(x: Tensor) -> Tensor:
        return double(x.view(4, 8)) + 1

    captured = sg.capture(model, SPEC, {"x": torch.randn(8, 4, device="cuda")})
    assert captured.num_segments == 1
    x = torch.randn(8, 4, device="cuda")
    assert torch.equal(captured(x=x), model(x))


def test_the_side_stream_is_on_the_inputs_device() -> None:
    x = torch.randn(8, 4, device="cuda")
    assert make_backend("auto", {"x": x}).device == x.device
