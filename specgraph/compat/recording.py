"""One capture in progress, of a model that nothing was declared about.

What a segment or a body is handed is recognised by its storage, as in planning: memory that this capture made
in the graph pool is kept as an alias that owns nothing; a parameter is watched; everything else, the caller's
static inputs included, is kept alive and listed. What is kept is the storage, not the tensor, because
`tensor.data = ...` gives a tensor other memory while the graph goes on reading the old.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from ..calls import BreakCall
from ..callsite import user_line
from ..errors import CaptureError, HostSyncError
from ..executor.backends import Backend
from ..executor.backends.base import view_like
from ..executor.body import ResultWriter, place_body
from ..executor.leaks import MadeInCapture
from ..executor.weights import WatchedTensor, WeightWatch
from ..intercept import Session
from ..layout import ConcreteLayout
from ..ops import host_sync, makes_constant, tensors_in
from ..planner.model import Diagnostic
from ..planner.provenance import CONSTANT, Origin, Provenance, StorageOrigins
from ..planner.trace import structured
from ..spec import ModelSpec
from .results import ResultBuffers, TakenApart

logger = logging.getLogger("specgraph")

NO_SPEC = ModelSpec("breakable CUDA graph", ())
"""A session's spec where nothing is declared."""

_FIX = "decorate the function that does this (@eager_on_graph, @no_graph), or compute the value before"


@attrs.frozen(eq=False)
class EagerCall:
    """A call of a decorated function.

    Args:
        label: the function's name.
        fn: the function itself.
        capture_stub: replaces it during capture.
        output_factory: makes its outputs from its arguments; None: they are what it returns at capture.
        pass_output: it is handed the outputs as `output=`.
        args, kwargs: as the model passed them.
    """

    label: str
    fn: Callable[..., Any]
    capture_stub: Callable[..., Any] | None
    output_factory: Callable[..., Any] | None
    pass_output: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@attrs.frozen(eq=False)
class Recorded:
    """What a capture leaves behind.

    Args:
        steps: graph launches and eager calls, in order.
        num_segments: how many of them are graph launches.
        kept: memory that the steps use and that is not the pool's.
        weights: watches the parameters that were read.
        made: everything that was made in the pool.
        diagnostics: what was read from outside.
    """

    steps: tuple[Callable[[], object], ...]
    num_segments: int
    kept: tuple[torch.UntypedStorage, ...]
    weights: WeightWatch
    made: MadeInCapture
    diagnostics: tuple[Diagnostic, ...]


class Recording:
    """A session's handler: segments and eager calls, one after another.

    Args:
        backend: records the segments.
        barrier_fn: called at every break, after the segment has ended and before the body.

    Attributes:
        segment_name: what messages call the segment that is being recorded; empty where none is.
        is_making_outputs: an output factory is running, as part of the segment.
    """

    def __init__(self, backend: Backend, barrier_fn: Callable[[], object] | None) -> None:
        self.backend = backend
        self.segment_name = ""
        self.is_making_outputs = False
        self._barrier_fn = barrier_fn
        self._steps: list[Callable[[], object]] = []
        self._num_segments = 0
        self._origins = StorageOrigins()
        self._made_by: Provenance | None = None
        self._made = MadeInCapture()
        self._kept: list[torch.UntypedStorage] = []
        self._diagnostics: list[Diagnostic] = []
        self._parameters = torch.nn.Module()
        self._watched: list[tuple[WatchedTensor, torch.Tensor]] = []

    # Segments.

    def begin_segment(self) -> None:
        """Start recording the next segment."""
        self.segment_name = f"segment {len(self._steps)}"
        self.backend.begin_segment()

    def _end_segment(self) -> None:
        graph = self.backend.end_segment()
        self.segment_name = ""
        if graph is not None:
            self._steps.append(graph.replay)
            self._num_segments += 1

    def on_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return func(*args, **kwargs)

    def on_op(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Record an op; what it reads from outside the pool is kept.

        Raises:
            CaptureError: it cannot be part of a segment.
        """
        if not self.segment_name:
            raise CaptureError(
                "a break failed earlier in this capture, and the model went on",
                where=user_line(),
                fix="let the exception of a break's body leave the capture",
            )
        for tensor in tensors_in((args, kwargs)):
            if makes_constant(func) and self._origins.find(tensor) is None:
                self._keep(tensor, CONSTANT)
            self._provenance(tensor)
        try:
            result = self.backend.run_op(func, args, kwargs)
        except HostSyncError:
            error = host_sync(func.name(), self.segment_name)
            error.fix = _FIX
            raise error from None
        made_by = self._made_by or Provenance(Origin.SEGMENT, self.segment_name)
        for tensor in tensors_in(result):
            if self._origins.find(tensor) is not None:
                continue
            if tensor.device == self.backend.device:
                self._origins.claim(tensor, made_by)
                self._made.note(tensor, made_by.source)
            else:
                # Made on another device, so not in the pool, and not made again by a replay.
                self._keep(tensor, CONSTANT)
        return result

    def finish(self) -> Recorded:
        """End the last segment.

        Raises:
            CaptureError: a parameter moved while it was captured.
        """
        self._end_segment()
        for watched, _ in self._watched:
            if watched.has_moved():
                raise CaptureError(
                    "was given other memory while it was captured",
                    tensor=f"parameter {watched.name!r}",
                    fix="keep parameters in place from before the capture until after the last replay",
                )
        return Recorded(
            steps=tuple(self._steps),
            num_segments=self._num_segments,
            kept=tuple(self._kept),
            weights=WeightWatch(NO_SPEC.name, self._watched),
            made=self._made,
            diagnostics=tuple(self._diagnostics),
        )

    # Where tensors come from.

    def _provenance(self, tensor: torch.Tensor) -> Provenance:
        """Where a tensor comes from; one that nothing accounts for is external, and kept from now on."""
        known = self._origins.find(tensor)
        if known is not None:
            return known
        layout, where = ConcreteLayout.of(tensor), user_line()
        if isinstance(tensor, torch.nn.Parameter):
            provenance = Provenance(Origin.PARAMETER, f"{layout}, first read at {where}")
            self._origins.claim(tensor, provenance)
            self._watch(provenance.source, tensor)
            return provenance
        provenance = Provenance(Origin.EXTERNAL, f"tensor {len(self._kept)}")
        self._keep(tensor, provenance)
        message = (
            f"{layout} ({layout.nbytes} bytes) was not made by this capture: it is kept alive by the graph, "
            "and every replay uses this very memory"
        )
        self._diagnostics.append(Diagnostic("external-tensor", message, len(self._steps), where))
        logger.info("%s (%s)", message, where)
        return provenance

    def _watch(self, name: str, parameter: torch.nn.Parameter) -> None:
        attribute = str(len(self._watched))
        self._parameters.register_parameter(attribute, parameter)
        address = parameter.data_ptr()
        # The detached tensor holds the memory for as long as the capture lasts.
        self._watched.append((WatchedTensor(name, self._parameters, attribute, address), parameter.detach()))

    def _keep(self, tensor: torch.Tensor, provenance: Provenance) -> None:
        self._origins.claim(tensor, provenance)
        self._kept.append(tensor.untyped_storage())

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a replay holds of a tensor: an alias of pool memory, anything else itself."""
        return self.backend.alias(tensor) if self._provenance(tensor).origin.in_pool else tensor

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a replay writes to in a tensor's stead: neither an inference tensor nor a leaf."""
        held = self._held(tensor)
        return view_like(held, held) if held is tensor else held

    # Breaks.

    def split(self, session: Session) -> None:
        """End the segment and begin the next."""
        with self._between_segments(session):
            pass

    @contextlib.contextmanager
    def _between_segments(self, session: Session) -> Iterator[None]:
        """Around eager code; where that fails no segment is open afterwards."""
        self._end_segment()
        with session.suspend():
            if self._barrier_fn is not None:
                self._barrier_fn()
            yield
        self.begin_segment()

    def eager_call(self, session: Session, call: EagerCall) -> Any:
        """Run a decorated function between two segments; returns what the model goes on with.

        Raises:
            CaptureError: the call cannot be replayed.
            LayoutError: the function's result is not what the factory made.
        """
        if call.output_factory is None:
            with self._between_segments(session):
                result = (call.capture_stub or call.fn)(*call.args, **call.kwargs)
                taken = TakenApart.of(result, call.label)
                for tensor in taken.tensors:
                    if self._origins.find(tensor) is None:
                        self._keep(tensor, Provenance(Origin.EXTERNAL, f"{call.label}: output"))
                self._record(call, taken, call.kwargs, accepts_none=False)
            return result
        outputs = self._make_outputs(call, call.output_factory)
        taken = TakenApart.of(outputs, call.label)
        with self._between_segments(session):
            kwargs = {**call.kwargs, "output": outputs} if call.pass_output else call.kwargs
            result = (call.capture_stub or call.fn)(*call.args, **kwargs)
            # A stub need not fill what the factory has made.
            accepts_none = call.pass_output or call.capture_stub is not None
            own = ResultBuffers(call.label, taken, lambda tensor: tensor, accepts_none=accepts_none)
            own.write(result)
            self._record(call, taken, kwargs, accepts_none=call.pass_output)
        return outputs

    def _make_outputs(self, call: EagerCall, factory: Callable[..., Any]) -> Any:
        """The factory's tensors, made while the segment is still being captured: they are in the pool."""
        if call.pass_output and call.kwargs.get("output") is not None:
            raise CaptureError(
                "is handed output= by its caller, and would be by pass_output",
                break_name=call.label,
                where=user_line(),
                fix="leave output out of the call, or drop pass_output",
            )
        self.is_making_outputs = True
        self._made_by = Provenance(Origin.BREAK_OUTPUT, f"{call.label}: output")
        try:
            return factory(*call.args, **call.kwargs)
        finally:
            self.is_making_outputs = False
            self._made_by = None

    def _record(
        self, call: EagerCall, captured: TakenApart, kwargs: dict[str, Any], *, accepts_none: bool
    ) -> None:
        """The call as a step of the replay, on what the replay holds of its arguments."""
        fn = call.fn
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._held, (call.args, kwargs))
        write = ResultBuffers(call.label, captured, self._buffer, accepts_none=accepts_none).bind()
        self._steps.append(lambda: write(fn(*args, **kwargs)))

    def on_break(self, call: BreakCall) -> object:
        """Run the break of a function under `@graph_break`, its outputs as its spec says."""
        if self.is_making_outputs:
            raise CaptureError(
                "is called by an output factory, inside a segment",
                break_name=call.site.label,
                where=user_line(),
                fix="only allocate in a factory; compute in the function",
            )
        if call.site.spec.live:
            raise CaptureError(
                "takes live values, which this replay has no way to hand in",
                break_name=call.site.label,
                where=user_line(),
                fix="capture with specgraph.capture",
            )
        buffers = [self.backend.allocate(layout) for layout in call.outputs.values()]
        for name, buffer in zip(call.outputs, buffers, strict=True):
            made_by = Provenance(Origin.BREAK_OUTPUT, f"{call.site.label}: {name}")
            self._origins.claim(buffer, made_by)
            self._made.note(buffer, made_by.source)
        self._end_segment()
        if self._barrier_fn is not None:
            self._barrier_fn()
        result = place_body(call, call.site.spec.capture_stub, buffers).run({})
        ResultWriter(NO_SPEC, call, buffers).write(result, {})
        aliases = [self.backend.alias(buffer) for buffer in buffers]
        body = place_body(call, None, aliases, self._held)
        write = ResultWriter(NO_SPEC, call, aliases).bind({})
        self._steps.append(lambda: write(body.run({})))
        self.begin_segment()
        return structured(call.site.spec.outputs, dict(zip(call.outputs, buffers, strict=True)))
