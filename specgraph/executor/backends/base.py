"""What the executor asks of a backend.

A backend records segments, one after another, into one graph pool, and hands each back as a callable
that replays it on the same addresses. It says nothing about breaks, specs or plans. What the protocol
does not list (copies, fills) is an ordinary torch op on every backend.

Memory, for both backends: what a segment allocates comes from the pool; a block is handed out again once
no tensor refers to it, so that a replay reproduces the captured order of use and nothing else; `alias`
makes a tensor of the same memory that keeps no block from being handed out again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ...errors import ReplayError
from ...layout import ConcreteLayout


class Graph(Protocol):
    """What was recorded between the beginning and the end of a segment, or several of these in one."""

    @property
    def replay(self) -> Callable[[], object]:
        """Does it again, on the same memory: one launch."""


class Pool(Protocol):
    """Memory that captures share; `CapturedGraph.pool`, to be handed to the next `capture`."""

    @property
    def device(self) -> torch.device:
        """Where the memory is."""

    @property
    def reserved_nbytes(self) -> int:
        """Bytes taken from the device."""

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of blocks that a tensor is in."""

    @property
    def late(self) -> Pool:
        """Another pool, for what is captured when this one's captures have ended.

        By then every block of this pool that is not in use at the end of a capture looks free, also those
        that a replay uses in its middle.
        """

    def exclusive(self) -> AbstractContextManager[object]:
        """Around a replay or a capture: over one pool they never overlap in time, on any thread or stream."""


class ReplayLock:
    """A lock that refuses, rather than waits for, the thread that already holds it.

    A body that replays a graph of the same pool would overwrite what the outer replay still needs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._holder == me:
            raise ReplayError(
                "a replay or a capture over this pool is already in progress on this thread",
                fix="give a graph that a body replays or captures a pool of its own",
            )
        self._lock.acquire()
        self._holder = me

    def __exit__(self, *exc_info: object) -> None:
        self._holder = 0
        self._lock.release()


class Backend(Protocol):
    """Records and replays segments."""

    @property
    def device(self) -> torch.device:
        """The device that inputs must be on."""

    def new_pool(self) -> Pool:
        """An empty pool."""

    def warming_up(self, pool: Pool) -> AbstractContextManager[None]:
        """Around eager runs before a capture into `pool`."""

    def capturing(self, pool: Pool) -> AbstractContextManager[None]:
        """Around a capture: from here on segments can begin.

        On the way out through an exception, a segment still open is given up, as if its ops had not run,
        and the process is left as it was.
        """

    def begin_segment(self) -> None:
        """Start recording."""

    def end_segment(self) -> Graph | None:
        """Stop recording; None where nothing was recorded.

        Afterwards memory holds what the segment computes, so that the body that follows sees real values.
        """

    def compose(self, graphs: Sequence[Graph]) -> Graph:
        """One graph that does what these do, in this order, in one launch.

        Raises:
            CaptureError: this machine cannot.
        """

    def run_op(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a dispatcher op as part of the open segment."""

    def allocate(self, layout: ConcreteLayout) -> torch.Tensor:
        """An uninitialised tensor in the pool; a segment must be open."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, not owned."""

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over memory of the pool, not owned."""


def view_like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """`tensor`'s view of its storage, over `memory` instead: a tensor on a storage of the same size."""
    with torch.inference_mode(False), torch.no_grad():
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        storage = memory.untyped_storage()
        view = view.set_(storage, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.is_conj():
            view = view.conj()
        return torch._neg_view(view) if tensor.is_neg() else view
