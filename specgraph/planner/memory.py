"""Lifetimes of the storages that a trace makes, and the pool that holds them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..layout import ConcreteLayout
from .allocator import CachingAllocator
from .provenance import Provenance

_BETWEEN_SEGMENTS = 1 << 40
"""Address space a segment is given; there is no memory behind it."""


@attrs.define(eq=False)
class Lifetime:
    """One storage: what it is, when it was made, and when it was last read, in step indices."""

    name: str
    provenance: Provenance
    layout: ConcreteLayout
    nbytes: int
    birth: int
    last_use: int
    where: str


class Lifetimes:
    """Follows storages from birth to death, in the order in which the model makes and drops them.

    A storage is dead once nothing in the model refers to it, which is when a caching allocator would
    hand out its memory again.
    """

    def __init__(self) -> None:
        addresses = itertools.count(_BETWEEN_SEGMENTS, _BETWEEN_SEGMENTS)
        self.pool = CachingAllocator(lambda _: next(addresses))
        self._alive: dict[int, tuple[StorageWeakRef, Lifetime, int | None]] = {}
        self._all: list[Lifetime] = []

    def born(self, tensor: torch.Tensor, lifetime: Lifetime) -> None:
        """A tensor with a storage of its own has been made."""
        self.bury()
        storage = tensor.untyped_storage()
        in_pool = lifetime.provenance.origin.in_pool and lifetime.nbytes > 0
        block = self.pool.allocate(lifetime.nbytes) if in_pool else None
        self._alive[storage._cdata] = (StorageWeakRef(storage), lifetime, block)
        self._all.append(lifetime)

    def passing(self, sizes: Iterable[int]) -> None:
        """An op takes blocks of these sizes in the pool while it runs."""
        blocks = [self.pool.allocate(nbytes) for nbytes in sizes]
        for block in blocks:
            self.pool.free(block)

    def used(self, tensor: torch.Tensor, step: int) -> None:
        """Step `step` reads or writes the tensor."""
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            entry[1].last_use = max(entry[1].last_use, step)

    def bury(self) -> None:
        """Take note of storages that have died since."""
        for key in [key for key, (ref, _, _) in self._alive.items() if ref.expired()]:
            _, _, block = self._alive.pop(key)
            if block is not None:
                self.pool.free(block)

    def alive_in_pool(self) -> list[Lifetime]:
        """Pool storages that something still refers to."""
        self.bury()
        return [each for _, each, _ in self._alive.values() if each.provenance.origin.in_pool]

    def all(self) -> list[Lifetime]:
        """Every storage, in order of birth."""
        return list(self._all)
