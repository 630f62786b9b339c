"""The predicted size of the graph pool against the measured one: within 10 %, and never under."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import specgraph as sg
from benchmarks import chains
from specgraph.executor.backends.cpu import CpuPool
from specgraph.planner.allocator import CachingAllocator, rounded
from tests.test_cases import AUX_SPEC, aux_model

MIB = 1 << 20
SPEC = sg.ModelSpec("m", ())


def assert_predicted(captured: sg.CapturedGraph) -> None:
    """The pool is as the plan says: at most a tenth smaller, never larger."""
    predicted, measured = captured.plan.memory.pool_peak, captured.pool.reserved_nbytes
    assert measured <= predicted <= 1.1 * measured


# The allocator.


def addresses() -> Callable[[int], int]:
    starts = itertools.count(1 << 40, 1 << 40)
    return lambda _: next(starts)


def test_small_and_large_blocks_come_from_segments_of_their_own() -> None:
    pool = CachingAllocator(addresses())
    for nbytes, reserved in [
        (1, 2),
        (MIB, 2),
        (MIB, 4),
        (MIB + 1, 24),
        (9 * MIB, 24),
        (10 * MIB, 34),
        (10 * MIB + 1, 46),
    ]:
        pool.allocate(nbytes)
        assert pool.reserved_nbytes == reserved * MIB
    assert pool.allocated_nbytes == 512 + 2 * MIB + (MIB + 512) + 9 * MIB + 10 * MIB + 10 * MIB + 512


def test_a_freed_block_merges_with_its_neighbours_and_the_best_fit_is_taken() -> None:
    pool = CachingAllocator(addresses())
    first, second, third, fourth = (pool.allocate(4 * MIB) for _ in range(4))
    other = pool.allocate(3 * MIB)
    pool.free(second)
    assert pool.allocate(4 * MIB) == second
    pool.free(first)
    pool.free(third)
    pool.free(second)
    assert pool.allocate(4 * MIB + 512) == first
    assert (fourth, other) == (first + 12 * MIB, first + 16 * MIB)
    assert pool.reserved_nbytes == 20 * MIB


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30 * MIB)), max_size=60), st.randoms())
def test_blocks_never_overlap_and_everything_merges_again(
    steps: list[tuple[bool, int]], random: random.Random
) -> None:
    pool = CachingAllocator(addresses())
    used: dict[int, int] = {}
    for frees, nbytes in steps:
        if frees and used:
            address = random.choice(sorted(used))
            pool.free(address)
            del used[address]
        else:
            address = pool.allocate(nbytes)
            assert all(address + nbytes <= other or other + size <= address for other, size in used.items())
            used[address] = nbytes
        assert pool.allocated_nbytes >= sum(map(rounded, used.values()))
    for address in used:
        pool.free(address)
    assert pool.allocated_nbytes == 0
    reserved = pool.reserved_nbytes
    again = [pool.allocate(nbytes) for nbytes in sorted(used.values(), reverse=True)]
    assert len(again) == len(used)
    assert pool.reserved_nbytes <= max(reserved, 2 * sum(map(rounded, used.values())) + 22 * MIB)


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(8))
def test_torch_s_own_allocator_takes_as_much(seed: int) -> None:
    draw = random.Random(seed)
    largest = draw.choice([4096, 2 * MIB, 40 * MIB])
    simulated, real = CachingAllocator(addresses()), torch.cuda.MemPool()
    held: list[tuple[Tensor, int]] = []
    with torch.cuda.use_mem_pool(real):
        for _ in range(300):
            if held and draw.random() < 0.5:
                tensor, address = held.pop(draw.randrange(len(held)))
                del tensor
                simulated.free(address)
            else:
                nbytes = draw.randrange(1, largest)
                tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
                held.append((tensor, simulated.allocate(nbytes)))
                del tensor
            segments = real.snapshot()
            assert simulated.reserved_nbytes == sum(each["total_size"] for each in segments)
            assert simulated.allocated_nbytes == sum(each["allocated_size"] for each in segments)


# Models.


@pytest.mark.parametrize(("rows", "width", "blocks"), [(8, 64, 2), (512, 256, 3), (2048, 512, 2)])
def test_the_pool_of_a_transformer_is_as_predicted(
    device: torch.device, rows: int, width: int, blocks: int
) -> None:
    chain, x = chains.build(chains.Size(blocks, rows, width), device)
    assert_predicted(sg.capture(chain, chains.SPEC, {"x": x}))


def test_the_pool_of_several_outputs_is_as_predicted(device: torch.device) -> None:
    assert_predicted(sg.capture(aux_model, AUX_SPEC, {"x": torch.randn(2048, 1024, device=device)}))


def test_a_smaller_capture_fits_in_the_pool_of_a_larger(device: torch.device) -> None:
    sizes = (4096, 2048, 1024)
    inputs = [torch.randn(size, 512, device=device) for size in sizes]
    largest = sg.capture(aux_model, AUX_SPEC, {"x": inputs[0]})
    before = largest.pool.reserved_nbytes
    others = [sg.capture(aux_model, AUX_SPEC, {"x": x}, pool=largest.pool) for x in inputs[1:]]
    assert largest.pool.reserved_nbytes == before
    assert all(torch.equal(each(x=x), aux_model(x)) for each, x in zip(others, inputs[1:], strict=True))


def test_what_is_in_use_at_once_is_predicted_to_the_byte() -> None:
    captured = sg.capture(aux_model, AUX_SPEC, {"x": torch.randn(64, 16)}, backend="cpu")
    pool = captured.pool
    assert isinstance(pool, CpuPool)
    assert pool.allocated_peak_nbytes == captured.plan.memory.pool_allocated


# Kernels that take more than their results.


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device="cuda", dtype=torch.bfloat16)


KERNELS: dict[str, tuple[Callable[[Tensor], object], tuple[int, ...]]] = {
    "softmax of a transposed tensor": (lambda x: x.t().softmax(-1), (4096, 4096)),
    "layer norm of a transposed tensor": (lambda x: F.layer_norm(x.t(), x.shape[:1]), (4096, 4096)),
    "matmul over every second element": (lambda x: x[:, ::2] @ x[::2], (4096, 4096)),
    "batched matmul over every second element": (lambda x: x[:, :, ::2] @ x[:, ::2], (64, 512, 512)),
    "sum of everything": (lambda x: x.sum(), (4096, 4096)),
    "sum of long columns": (lambda x: x.sum(0), (4096, 4096)),
    "mean of columns, in a batch": (lambda x: x.mean(1), (4, 1024, 4096)),
    "mean of few columns": (lambda x: x.mean(0), (65536, 16)),
    "mean of rows": (lambda x: x.mean(-1), (4096, 4096)),
    "variance of columns": (lambda x: x.var(0), (2048, 1024)),
    "norm of everything": (lambda x: torch.linalg.vector_norm(x), (4096, 4096)),
    "norm of columns": (lambda x: torch.linalg.vector_norm(x, dim=0), (4096, 4096)),
    "maximum of columns": (lambda x: x.amax(0), (4096, 4096)),
    "argmax of everything": (lambda x: x.argmax(), (4096, 4096)),
    "is any": (lambda x: x.any(), (4096, 4096)),
    "sort of rows": (lambda x: x.sort(-1).values, (1024, 4096)),
    "sort of one long row": (lambda x: x.sort(-1).values, (1, 4096 * 1024)),
    "top of rows": (lambda x: x.topk(8).values, (4096, 128)),
    "top of long rows": (lambda x: x.topk(8).values, (1024, 4096)),
    "RMS norm": (lambda x: F.rms_norm(x, x.shape[-1:]), (4096, 4096)),
    "patches, 2d": (lambda x: F.conv2d(x, ones(256, 64, 2, 2), stride=2), (2, 64, 256, 256)),
    "convolution, 2d": (lambda x: F.conv2d(x, ones(64, 64, 3, 3), padding=1), (2, 64, 256, 256)),
    "patches, 3d": (
        lambda x: F.conv3d(x, ones(256, 64, 1, 2, 2), stride=(1, 2, 2)),
        (1, 64, 8, 128, 128),
    ),
    "cumulative sum": (lambda x: x.cumsum(0), (4096, 4096)),
    "gather by index": (lambda x: x[torch.zeros(512, dtype=torch.long, device=x.device)], (4096, 4096)),
    "concatenation": (lambda x: torch.cat([x, x.t()], 1), (4096, 4096)),
    "complex product": (lambda x: torch.view_as_complex(x.float().view(-1, 2)) * 1j, (4096, 4096)),
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_takes_no_more_than_predicted(name: str) -> None:
    fn, shape = KERNELS[name]
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    assert_predicted(sg.capture(fn, SPEC, {"x": x}))
