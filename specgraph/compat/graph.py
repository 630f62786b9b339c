"""What a capture of decorated code leaves behind, and its replay.

A graph is empty until a capture has ended well, and a capture that failed leaves it as it was. Replays over
one pool, of this graph or another, take turns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

from ..errors import CaptureError, ReplayError
from ..executor.backends import Backend, Pool, make_backend
from ..executor.leaks import Leak
from ..intercept import active_session
from ..planner.model import Diagnostic
from .recording import Recorded


def backend_for(pool: Pool | None) -> Backend:
    """The backend of a pool; without one, CUDA where there is a GPU and the reference elsewhere."""
    if pool is None:
        return make_backend("cuda" if torch.cuda.is_available() else "cpu", {})
    return make_backend("auto", {"pool": torch.empty(0, device=pool.device)})


class BreakableCUDAGraph:
    """Graphs and the eager calls between them, captured by `breakable_graph` or `BreakableCUDAGraphCapture`.

    A second capture into the same graph is appended to the first. The tensors that the captured code read and
    left behind are its caller's: static inputs are filled, and outputs read, where they were at capture.

    Args:
        pool: memory to capture into: another graph's `.pool()`, or a `CapturedGraph.pool`. None: the
            capture's, or one of its own.
    """

    def __init__(self, pool: Pool | None = None) -> None:
        check_pool(pool)
        self._pool = pool
        self._recorded: list[Recorded] = []
        self._steps: tuple[Callable[[], object], ...] = ()

    @property
    def num_segments(self) -> int:
        """Graphs launched by a replay."""
        return sum(each.num_segments for each in self._recorded)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """What the graph reads from outside and keeps alive: static inputs, caches, globals."""
        return tuple(each for recorded in self._recorded for each in recorded.diagnostics)

    def pool(self) -> Pool:
        """The graph's memory, to be shared with other captures; made here where there is none yet."""
        if self._pool is None:
            self._pool = backend_for(None).new_pool()
        return self._pool

    def replay(self) -> None:
        """Run everything again, in the captured order, on the current stream.

        Raises:
            ReplayError: nothing has been captured, a parameter has moved, or this thread is already capturing
                into the pool or replaying over it.
            LayoutError: an eager call returned other than what it returned at capture.
        """
        if not self._recorded:
            raise ReplayError("nothing has been captured into the graph", fix="capture first")
        session = active_session()
        if session is not None and not session.suspended:
            raise ReplayError(
                "a graph cannot be replayed inside a segment that is being captured",
                fix="replay it in a function that is decorated to run eagerly",
            )
        with self.pool().exclusive(), torch.no_grad():
            for recorded in self._recorded:
                recorded.weights.check()
            for step in self._steps:
                step()

    def reset(self) -> None:
        """Drop what was captured, and what it keeps alive. The pool stays, for the next capture.

        Raises:
            ReplayError: this thread is replaying over the pool.
        """
        if self._recorded:
            with self.pool().exclusive():
                self._recorded, self._steps = [], ()

    def leaks(self, *outputs: object) -> tuple[Leak, ...]:
        """Tensors that the captures made in the pool and that something still refers to, `outputs` aside.

        They stay allocated, and hold garbage until the graph replays. Only the caller knows which tensors are
        its outputs, and which ones the model has kept.

        Args:
            outputs: tensors, or structures of them, that are meant to be kept.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        return tuple(leak for each in self._recorded for leak in each.made.still_alive(tensors))

    def capture_into(self, pool: Pool | None) -> None:
        """Make `pool` the graph's, where it has none yet.

        Raises:
            CaptureError: it is no pool, or the graph has another.
        """
        check_pool(pool)
        if self._pool is None:
            self._pool = pool
        if pool is not None and pool is not self._pool:
            raise CaptureError(
                "the graph has another pool than the capture was given",
                fix="leave pool out of one of the two; all captures into one graph share its pool",
            )

    def append(self, recorded: Recorded) -> None:
        """Add a capture that has ended well."""
        self._recorded.append(recorded)
        self._steps += recorded.steps


def check_pool(pool: object) -> None:
    """Refuse what is no pool, such as torch's pool handles.

    Raises:
        CaptureError: `pool` is neither a pool nor None.
    """
    if pool is not None and not hasattr(pool, "exclusive"):
        raise CaptureError(
            "is no pool",
            tensor="pool=",
            expected="a graph's .pool(), or None",
            actual=repr(pool),
            fix="pass another graph's .pool(); BreakableCUDAGraph().pool() makes one in advance",
        )
