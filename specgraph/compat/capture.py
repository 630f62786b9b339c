"""Captures as context managers around an ordinary call of the model.

Inside the block ops are recorded, and decorated functions run eagerly between two graphs. On every way out
the process is as it was: a capture that failed has added nothing to its graph, and the next one works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import torch

from ..errors import CaptureError
from ..executor.backends import Pool
from ..intercept import Session, active_session
from .graph import BreakableCUDAGraph, backend_for
from .recording import NO_SPEC, Recording


def is_in_breakable_graph() -> bool:
    """True on a thread that is inside a capture's block, in the bodies of breaks too."""
    session = active_session()
    return session is not None and isinstance(session.handler, Recording)


class BreakableCUDAGraphCapture:
    """Captures its block into a graph.

    The block runs once, for real: each segment is launched as soon as it is recorded, and the functions
    between them see its values. It runs under `torch.no_grad()`. What it reads must stay where it is; run it
    once beforehand, so that whatever is made on a first call is made outside.

    Args:
        cuda_graph: what to capture into; a capture that it already holds is followed by this one.
        pool: memory to capture into: another graph's `.pool()`. None: the graph's own.
        stream: what the capture waits for, and what waits for the capture. The block itself runs on a stream
            of the pool, which waits for `stream` when the block is entered; `stream` waits for it when the
            block is left, and the stream that is current then is the one from before. None: the current
            stream. A replay runs on the stream that is current when it is asked for.
        capture_error_mode: `"thread_local"` is what is done, on the GPU: calls that a capture does not allow
            are refused on this thread, and other threads are left alone. `"global"`, torch's default, is
            accepted and means the same here. `"relaxed"` is refused.
        barrier_fn: called at every break, once the segment has ended and before the function runs; for
            ranks whose functions must start together. Not called by replays.

    Raises:
        CaptureError: the arguments cannot be used; on entering, another capture is in progress on this
            thread; on leaving, what is in the block cannot be captured.
    """

    def __init__(
        self,
        cuda_graph: BreakableCUDAGraph,
        pool: Pool | None = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "thread_local",
        barrier_fn: Callable[[], object] | None = None,
    ) -> None:
        _check_error_mode(capture_error_mode)
        cuda_graph.capture_into(pool)
        self._graph = cuda_graph
        self._stream = stream
        self._barrier_fn = barrier_fn
        self._running: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> Self:
        self._running = self._capture()
        self._running.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        running, self._running = self._running, None
        assert running is not None, "the block was not entered"
        running.__exit__(kind, error, traceback)

    @contextlib.contextmanager
    def _capture(self) -> Iterator[None]:
        if active_session() is not None:
            raise CaptureError(
                "a plan or capture is already in progress on this thread",
                fix="finish it first; the body of a break may replay another graph, but not capture one",
            )
        pool = self._graph.pool()
        backend = backend_for(pool)
        recording = Recording(backend, self._barrier_fn)
        with self._on_stream(), pool.exclusive(), torch.no_grad(), backend.capturing(pool):
            recording.begin_segment()
            with Session(NO_SPEC, _no_model, recording):
                yield
            recorded = recording.finish()
        self._graph.append(recorded)

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class breakable_graph(BreakableCUDAGraphCapture):
    """`BreakableCUDAGraphCapture`, with its arguments in the order that breakable-cuda-graphs has them in.

    Args:
        cuda_graph, stream, capture_error_mode, barrier_fn, pool: as there.
    """

    def __init__(
        self,
        cuda_graph: BreakableCUDAGraph,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "thread_local",
        barrier_fn: Callable[[], object] | None = None,
        *,
        pool: Pool | None = None,
    ) -> None:
        super().__init__(cuda_graph, pool, stream, capture_error_mode, barrier_fn)


def _no_model() -> None:
    """Stands for the callable of a session, which here is whatever runs in the block."""


def _check_error_mode(mode: str) -> None:
    if mode not in ("thread_local", "global"):
        raise CaptureError(
            f"capture_error_mode {mode!r} is not what a capture does",
            expected='"thread_local", or "global", which means the same here',
            actual=repr(mode),
            fix='leave it out; what only "relaxed" allows inside a segment belongs into an eager function',
        )
