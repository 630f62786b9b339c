"""The reference backend: dispatcher ops, recorded and run again on the same memory.

It keeps a CUDA graph's rules, so that what breaks them breaks here too. Recorded ops know addresses, not
tensors. Results of ops live in an arena whose blocks are reused as soon as the program drops the tensor
in them, also when that happens between two recorded ops. Values do not come back to the host inside a
segment. What differs from a graph is speed, and that ops really run while they are recorded.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from ...layout import ConcreteLayout
from ...ops import (
    host_sync,
    launches,
    makes_constant,
    map_tensors,
    reads_on_host,
    tensors_in,
    written_by,
)
from ...planner.allocator import BLOCK_NBYTES, CachingAllocator
from .base import Graph, Pool, ReplayLock, view_like

_DEVICE = torch.device("cpu")


class CpuPool:
    """Memory by a caching allocator's rules; a block is free once the storage over it has died."""

    device = _DEVICE

    def __init__(self) -> None:
        self._lock = ReplayLock()
        self._segments: list[torch.Tensor] = []
        self._allocator = CachingAllocator(self._take)
        # Storages die at any time, also while a block is being taken; both ends of a deque are atomic.
        self._returned: collections.deque[int] = collections.deque()

    def exclusive(self) -> contextlib.AbstractContextManager[object]:
        return self._lock

    @property
    def reserved_nbytes(self) -> int:
        return self._allocator.reserved_nbytes

    @property
    def allocated_nbytes(self) -> int:
        self._collect()
        return self._allocator.allocated_nbytes

    @property
    def allocated_peak_nbytes(self) -> int:
        """The most that was allocated at once."""
        return self._allocator.allocated_peak_nbytes

    @functools.cached_property
    def late(self) -> Pool:
        return CpuPool()

    def storage(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over a block that is its own until its storage dies."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        self._collect()
        address = self._allocator.allocate(nbytes)
        memory = _memory(address, nbytes)
        weakref.finalize(memory, self._give_back, address).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _give_back(self, address: int) -> None:
        # Called through the pool, so that memory in use keeps the pool alive.
        self._returned.append(address)

    def _take(self, nbytes: int) -> int:
        segment = torch.empty(nbytes + BLOCK_NBYTES, dtype=torch.uint8)
        self._segments.append(segment)
        return -(-segment.data_ptr() // BLOCK_NBYTES) * BLOCK_NBYTES

    def _collect(self) -> None:
        """Make returned blocks free."""
        while self._returned:
            self._allocator.free(self._returned.popleft())


def _memory(address: int, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * nbytes).from_address(address)


@attrs.frozen(eq=False)
class CpuGraph:
    """Recorded ops."""

    ops: tuple[Callable[[], object], ...]

    def replay(self) -> None:
        for op in self.ops:
            op()


class CpuBackend:
    """Records ops on CPU tensors."""

    device = _DEVICE

    def __init__(self) -> None:
        self._pool: CpuPool | None = None
        self._recorded: list[Callable[[], object]] | None = None
        self._overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._literals: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def new_pool(self) -> Pool:
        return CpuPool()

    def warming_up(self, pool: Pool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def capturing(self, pool: Pool) -> Iterator[None]:
        assert isinstance(pool, CpuPool), "capture() checks that pool and backend match"
        self._pool = pool
        try:
            yield
        finally:
            for tensor, before in reversed(self._overwritten):
                tensor.copy_(before)
            self._overwritten = []
            self._pool = self._recorded = None

    def begin_segment(self) -> None:
        self._recorded = []

    def end_segment(self) -> Graph | None:
        recorded, self._recorded = self._recorded, None
        self._overwritten = []
        return CpuGraph(tuple(recorded)) if recorded else None

    def compose(self, graphs: Sequence[Graph]) -> Graph:
        return CpuGraph(tuple(graph.replay for graph in graphs))

    def allocate(self, layout: ConcreteLayout) -> torch.Tensor:
        assert self._pool is not None, "no capture is in progress"
        block = self._pool.storage(layout.span_nbytes).untyped_storage()
        return torch.empty(0, dtype=layout.dtype).set_(block, 0, layout.shape, layout.strides)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return tensor.detach()
        return view_like(tensor, self.bytes_at(storage.data_ptr(), storage.nbytes()))

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(_memory(address, nbytes), dtype=torch.uint8)

    def run_op(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._recorded is not None, "no segment is open"
        if reads_on_host(func) and not all(map(self._is_literal, tensors_in(args))):
            raise host_sync(func.name())
        if launches(func):
            self._overwritten += ((tensor, tensor.clone()) for tensor in written_by(func, args, kwargs))
        result = func(*args, **kwargs)
        if makes_constant(func):
            self._literals[id(result)] = result
            return result
        owned = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        pooled = map_tensors(lambda t: self._into_pool(t, owned), result)
        if launches(func):
            self._recorded.append(self._record(func, args, kwargs, pooled, owned))
        return pooled

    def _is_literal(self, tensor: torch.Tensor) -> bool:
        return self._literals.get(id(tensor)) is tensor

    def _into_pool(self, tensor: torch.Tensor, owned: set[int]) -> torch.Tensor:
        """A fresh result moved into the pool; a view of an argument as it is."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in owned or storage.nbytes() == 0:
            return tensor
        assert self._pool is not None
        block = self._pool.storage(storage.nbytes())
        block.untyped_storage().copy_(storage)
        return view_like(tensor, block)

    def _record(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        owned: set[int],
    ) -> Callable[[], object]:
        args, kwargs = map_tensors(self.alias, (args, kwargs))
        fresh = [
            self.alias(t) if t.untyped_storage().data_ptr() not in owned else None for t in tensors_in(result)
        ]

        def run() -> None:
            for target, value in zip(fresh, tensors_in(func(*args, **kwargs)), strict=True):
                if target is not None:
                    target.copy_(value)

        return run
