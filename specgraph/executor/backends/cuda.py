"""CUDA graphs through `torch.cuda.CUDAGraph` (ROCm builds included).

All captures of a pool, its segments one after another, happen on one side stream: the allocator hands a
block on only within the stream it was first used on, so that captures on several streams would share
nothing. The mode is thread-local, so that other threads may allocate and synchronise meanwhile.

What torch keeps private is used here and nowhere else, with the version it was seen in.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...callsite import raising_line, user_line
from ...errors import CaptureError
from ...layout import ConcreteLayout
from ...ops import host_sync, reads_on_host, tensors_in
from .base import Graph, Pool, ReplayLock, view_like

_FIX = "declare a BreakSpec for the function that does this"


class CudaPool:
    """A graph pool, alive for as long as this object.

    torch (2.11) lets go of a pool, device and pinned host memory alike, with the last graph captured in it,
    and fails when another capture begins in it then. The first segment of a capture may well be empty and be
    dropped, so an empty graph that is never launched holds the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self._anchor = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self._anchor.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            _end_quietly(self._anchor)
        self._lock = ReplayLock()
        self._last_stream = torch.cuda.current_stream(device)

    @property
    def reserved_nbytes(self) -> int:
        return sum(segment["total_size"] for segment in self._segments())

    @property
    def allocated_nbytes(self) -> int:
        return sum(segment["allocated_size"] for segment in self._segments())

    @functools.cached_property
    def late(self) -> Pool:
        return CudaPool(self.device)

    def _segments(self) -> list[dict[str, Any]]:
        # torch 2.11 documents the argument but no type for the result.
        return torch.cuda.memory_snapshot(mempool_id=self.handle)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._lock:
            stream = torch.cuda.current_stream(self.device)
            if stream != self._last_stream:
                stream.wait_stream(self._last_stream)
                self._last_stream = stream
            yield


class _Span:
    """Device memory at an address, through the CUDA array interface (version 3); owns nothing."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class CudaGraph:
    """A captured graph, ready to launch."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph = graph
        self.replay: Callable[[], object] = graph.replay
        graph.instantiate()

    def add_to(self, parent: Any, after: list[Any]) -> Any:
        """The node of `parent` that does what this graph does, once `after` is done."""
        from cuda.bindings import runtime

        raw = self.graph.raw_cuda_graph()
        return _checked(runtime.cudaGraphAddChildGraphNode(parent, after, len(after), raw))


class ComposedGraph:
    """Graphs in a row, as the child nodes of one.

    A child node holds a copy of its graph, and no memory; what keeps the memory of the copied graphs is
    their pools.
    """

    def __init__(self, graphs: Sequence[CudaGraph], device: torch.device) -> None:
        from cuda.bindings import runtime

        self._device = device
        parent = _checked(runtime.cudaGraphCreate(0))
        try:
            last: list[Any] = []
            for graph in graphs:
                last = [graph.add_to(parent, last)]
            self._executable = _checked(runtime.cudaGraphInstantiate(parent, 0))
        finally:
            _checked(runtime.cudaGraphDestroy(parent))
        weakref.finalize(self, runtime.cudaGraphExecDestroy, self._executable).atexit = False
        self._launch = runtime.cudaGraphLaunch

    def replay(self) -> None:
        """Launch on the current stream."""
        (error,) = self._launch(self._executable, torch.cuda.current_stream(self._device).cuda_stream)
        if error:
            raise RuntimeError(f"launching a fused graph failed: {error.name}")


def _checked(returned: tuple[Any, ...]) -> Any:
    """What a call of the CUDA runtime gives, or its error as an exception."""
    error, *values = returned
    if error:
        raise CaptureError(f"graphs cannot be composed: {error.name}", fix="set max_fused=0 to do without")
    return values[0] if values else None


class CudaBackend:
    """Records CUDA graphs on one device."""

    def __init__(self, device: torch.device | None) -> None:
        if not torch.cuda.is_available():
            raise CaptureError(
                "this torch sees no GPU",
                actual=f"torch {torch.__version__}",
                fix='use backend="cpu", or install a torch built for the GPU',
            )
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self._pool: CudaPool | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def new_pool(self) -> Pool:
        return CudaPool(self.device)

    @contextlib.contextmanager
    def warming_up(self, pool: Pool) -> Iterator[None]:
        assert isinstance(pool, CudaPool), "capture() checks that pool and backend match"
        with self._on(pool.stream):
            yield
        torch.cuda.synchronize(self.device)
        # The pool takes memory of its own; what the warm-up left cached is of no use to it.
        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)

    @contextlib.contextmanager
    def capturing(self, pool: Pool) -> Iterator[None]:
        assert isinstance(pool, CudaPool), "capture() checks that pool and backend match"
        self._pool = pool
        try:
            # A collection during capture may destroy a graph or an event, which is not allowed then.
            with _no_collection(), self._on(pool.stream), self._giving_up(pool.stream):
                yield
        finally:
            self._pool = None

    @contextlib.contextmanager
    def _giving_up(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Give up an open segment on the way out through an exception.

        What fails in a segment ran in the warm-up, so it failed because it was captured; what fails in a
        body, when no segment is open, is the body's own.
        """
        try:
            yield
        except BaseException as error:
            was_open = self._graph is not None
            self._give_up(stream.cuda_stream)
            if was_open and isinstance(error, RuntimeError):
                raise _capture_error(str(error), raising_line(error)) from error
            raise

    def _give_up(self, stream: int) -> None:
        """End a capture that failed, and leave torch's allocator and random state as they were.

        Ending an invalid capture raises in `capture_end` before torch (2.11) takes back its own preparations,
        and every later capture in the process would fail. So the invalid capture is ended in the driver and
        an empty one begun in its place, which torch then ends as it should.
        """
        graph, self._graph = self._graph, None
        if graph is None:
            return
        if _has_bindings():
            from cuda.bindings import runtime

            _, status = runtime.cudaStreamIsCapturing(stream)
            if status == runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusInvalidated:
                runtime.cudaStreamEndCapture(stream)
                runtime.cudaGetLastError()
                mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
                runtime.cudaStreamBeginCapture(stream, mode)
        _end_quietly(graph)

    def begin_segment(self) -> None:
        assert self._pool is not None, "no capture is in progress"
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
        self._graph = graph

    def end_segment(self) -> Graph | None:
        graph = self._graph
        assert graph is not None, "no segment is open"
        _end_quietly(graph)
        # Where ending it fails, it is still open, and is given up on the way out of the capture.
        self._graph = None
        if _is_empty(graph):
            return None
        recorded = CudaGraph(graph)
        recorded.replay()
        return recorded

    def compose(self, graphs: Sequence[Graph]) -> Graph:
        if not _has_bindings():
            raise CaptureError(
                "fused replay needs cuda-bindings", fix='pip install "specgraph[cuda]", or set max_fused=0'
            )
        own = [graph for graph in graphs if isinstance(graph, CudaGraph)]
        assert len(own) == len(graphs), "a backend composes what it recorded"
        return ComposedGraph(own, self.device)

    def allocate(self, layout: ConcreteLayout) -> torch.Tensor:
        return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=self.device)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return tensor.detach()
        return view_like(tensor, self.bytes_at(storage.data_ptr(), storage.nbytes()))

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.as_tensor(_Span(address, nbytes), device=self.device)

    def run_op(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if reads_on_host(func) and any(t.is_cuda for t in tensors_in(args)):
            raise host_sync(func.name())
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            raise _capture_error(f"{func.name()}: {error}", user_line()) from error


def _capture_error(problem: str, where: str) -> CaptureError:
    first_line = problem.partition("\n")[0]
    return CaptureError(f"cannot be captured: {first_line}", where=where, fix=_FIX)


@functools.cache
def _has_bindings() -> bool:
    """True where cuda-bindings is installed, as it is with torch's own CUDA wheels (2.11)."""
    return importlib.util.find_spec("cuda") is not None


def _end_quietly(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # torch warns of an empty graph; here it is dropped.
        warnings.simplefilter("ignore")
        graph.capture_end()


def _is_empty(graph: torch.cuda.CUDAGraph) -> bool:
    """True for a graph without nodes; without cuda-bindings no graph counts as empty."""
    if not _has_bindings():
        return False
    from cuda.bindings import runtime

    error, _, num_nodes = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
    return bool(error == runtime.cudaError_t.cudaSuccess and num_nodes == 0)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
