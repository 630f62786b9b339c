"""Pool memory that outlives a capture.

What a segment makes and the model keeps (a table built on the first call, a cache) stays allocated in the
graph pool and holds garbage until that graph replays. After a capture, whatever was made in it and is
still referred to, outputs aside, is found here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..callsite import user_line
from ..layout import ConcreteLayout
from .poison import Span, merged, without


@attrs.frozen
class Leak:
    """A tensor made under capture that something still refers to.

    Args:
        layout: of the tensor.
        nbytes: that stay allocated in the pool.
        made_in: the segment or break that made it.
        where: the line of the model that made it.
    """

    layout: ConcreteLayout
    nbytes: int
    made_in: str
    where: str

    def __str__(self) -> str:
        return (
            f"{self.layout} ({self.nbytes} bytes) made in {self.made_in} is still referred to after the "
            "capture: it stays allocated in the pool and holds garbage until the graph replays "
            f"({self.where})"
        )


class MadeInCapture:
    """Every storage that a capture made, held weakly."""

    def __init__(self) -> None:
        self._made: list[tuple[StorageWeakRef, Leak]] = []
        self._spans: list[Span] = []

    def note(self, tensor: torch.Tensor, made_in: str) -> None:
        """A tensor with a storage of its own was made."""
        storage = tensor.untyped_storage()
        leak = Leak(ConcreteLayout.of(tensor), storage.nbytes(), made_in, user_line())
        self._made.append((StorageWeakRef(storage), leak))
        self._spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def still_alive(self, expected: Iterable[torch.Tensor]) -> tuple[Leak, ...]:
        """What something other than `expected` keeps alive."""
        known = {tensor.untyped_storage()._cdata for tensor in expected}
        if self._alive(known):
            gc.collect()
        return self._alive(known)

    def dead_spans(self) -> list[Span]:
        """Memory that held something and that nothing refers to now."""
        pairs = zip(self._made, self._spans, strict=True)
        alive = [span for (storage, _), span in pairs if not storage.expired()]
        return without(self._spans, alive)

    def all_spans(self) -> list[Span]:
        """All memory that the capture has used."""
        return merged(self._spans)

    def _alive(self, known: set[int]) -> tuple[Leak, ...]:
        return tuple(
            leak
            for storage, leak in self._made
            if leak.nbytes and not storage.expired() and storage.cdata not in known
        )
