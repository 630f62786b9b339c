"""Lifetimes of the storages that a trace makes, and what they need at once."""

from __future__ import annotations

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..layout import ConcreteLayout
from .provenance import Provenance

BLOCK_NBYTES = 512
"""CUDA's caching allocator rounds every block up to this (`kMinBlockSize`, c10/cuda, torch 2.11)."""


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
        self.peak_nbytes = 0
        self._pool_nbytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, Lifetime]] = {}
        self._all: list[Lifetime] = []

    def born(self, tensor: torch.Tensor, lifetime: Lifetime) -> None:
        """A tensor with a storage of its own has been made."""
        self.bury()
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = (StorageWeakRef(storage), lifetime)
        self._all.append(lifetime)
        if lifetime.provenance.origin.in_pool:
            self._pool_nbytes += rounded(lifetime.nbytes)
            self.peak_nbytes = max(self.peak_nbytes, self._pool_nbytes)

    def used(self, tensor: torch.Tensor, step: int) -> None:
        """Step `step` reads or writes the tensor."""
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            entry[1].last_use = max(entry[1].last_use, step)

    def bury(self) -> None:
        """Take note of storages that have died since."""
        for key in [key for key, (ref, _) in self._alive.items() if ref.expired()]:
            lifetime = self._alive.pop(key)[1]
            if lifetime.provenance.origin.in_pool:
                self._pool_nbytes -= rounded(lifetime.nbytes)

    def alive_in_pool(self) -> list[Lifetime]:
        """Pool storages that something still refers to."""
        self.bury()
        return [each for _, each in self._alive.values() if each.provenance.origin.in_pool]

    def all(self) -> list[Lifetime]:
        """Every storage, in order of birth."""
        return list(self._all)


def rounded(nbytes: int) -> int:
    """Bytes an allocator's block takes."""
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
