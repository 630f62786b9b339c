"""CUDA's caching allocator, without the memory.

How much a graph pool takes from the device is not the sum of what is in use: memory is taken in segments,
small and large blocks never share one, blocks are rounded up and split, and a segment once taken stays. The
plan counts with these rules, and the reference backend hands out memory by them, so that one prediction can
be held against both.

Rules and sizes are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11) in its default settings: best fit
by size, then address; free neighbours merge. `PYTORCH_CUDA_ALLOC_CONF` can change them (expandable segments,
rounding to powers of two); a pool's peak is then another.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import attrs

BLOCK_NBYTES = 512
"""Blocks are rounded up to a multiple of this."""

SMALL_NBYTES = 1 << 20
"""Blocks up to this size come from small segments."""

SMALL_SEGMENT_NBYTES = 2 << 20
LARGE_SEGMENT_NBYTES = 20 << 20
LARGE_BLOCK_NBYTES = 10 << 20
"""Blocks from this size on get a segment of their own size, rounded up to `ROUND_NBYTES`."""

ROUND_NBYTES = 2 << 20


@attrs.define(eq=False)
class _Block:
    """Consecutive bytes of a segment, with its neighbours there."""

    address: int
    nbytes: int
    is_small: bool
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Hands out addresses.

    Args:
        take: makes a segment of so many bytes and returns its address, a multiple of `BLOCK_NBYTES`.
    """

    def __init__(self, take: Callable[[int], int]) -> None:
        self.reserved_nbytes = 0
        self.allocated_nbytes = 0
        self.allocated_peak_nbytes = 0
        self._take = take
        self._used: dict[int, _Block] = {}
        self._free: dict[bool, list[_Block]] = {True: [], False: []}

    def allocate(self, nbytes: int) -> int:
        """The address of a block of at least `nbytes` (> 0) bytes."""
        size = rounded(nbytes)
        is_small = size <= SMALL_NBYTES
        block = self._best_fit(size, is_small) or self._new_segment(size, is_small)
        remaining = block.nbytes - size
        if remaining >= BLOCK_NBYTES if is_small else remaining > SMALL_NBYTES:
            self._split(block, size)
        block.is_free = False
        self._used[block.address] = block
        self.allocated_nbytes += block.nbytes
        self.allocated_peak_nbytes = max(self.allocated_peak_nbytes, self.allocated_nbytes)
        return block.address

    def free(self, address: int) -> None:
        """Give back the block at `address`."""
        block = self._used.pop(address)
        self.allocated_nbytes -= block.nbytes
        if block.before is not None and block.before.is_free:
            block = self._merge(self._unlisted(block.before), block)
        if block.after is not None and block.after.is_free:
            block = self._merge(block, self._unlisted(block.after))
        self._list(block)

    def _best_fit(self, size: int, is_small: bool) -> _Block | None:
        free = self._free[is_small]
        index = bisect.bisect_left(free, size, key=lambda block: block.nbytes)
        return free.pop(index) if index < len(free) else None

    def _new_segment(self, size: int, is_small: bool) -> _Block:
        if is_small:
            nbytes = SMALL_SEGMENT_NBYTES
        elif size < LARGE_BLOCK_NBYTES:
            nbytes = LARGE_SEGMENT_NBYTES
        else:
            nbytes = -(-size // ROUND_NBYTES) * ROUND_NBYTES
        self.reserved_nbytes += nbytes
        return _Block(self._take(nbytes), nbytes, is_small)

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.nbytes - size, block.is_small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.nbytes = rest, size
        self._list(rest)

    def _merge(self, first: _Block, second: _Block) -> _Block:
        first.nbytes += second.nbytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _list(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], block, key=_order)

    def _unlisted(self, block: _Block) -> _Block:
        free = self._free[block.is_small]
        del free[bisect.bisect_left(free, _order(block), key=_order)]
        return block


def _order(block: _Block) -> tuple[int, int]:
    return block.nbytes, block.address


def rounded(nbytes: int) -> int:
    """Bytes that a block for `nbytes` takes."""
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
