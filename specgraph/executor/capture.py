"""plan -> capture: the model run once more, recorded segment by segment.

The recorder follows the plan. At a break it makes the outputs in the pool while the segment is still
being recorded, ends the segment, runs the body on the real arguments, checks and writes its results,
and begins the next segment. For the replay it keeps of each argument what its provenance calls for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..calls import BreakCall
from ..callsite import user_line
from ..dims import format_dims
from ..errors import CaptureError, PlanError, SpecGraphError
from ..inputs import ModelInputs, check_inputs, check_live
from ..intercept import Session
from ..layout import empty
from ..ops import draws_random_numbers, tensors_in
from ..planner.model import BreakStep, CapturePlan
from ..planner.provenance import Origin, Provenance, StorageOrigins, model_state
from ..planner.trace import plan, structured
from ..spec import ModelSpec
from .backends import Backend, Pool, make_backend
from .body import ResultWriter, place_body
from .eager import run_checked
from .graph import CapturedBreak, CapturedGraph, CapturedSegment, CapturedStep
from .leaks import MadeInCapture
from .poison import PoisonFill, Span, UnwrittenCheck, merged
from .stats import CaptureTimes
from .weights import WeightWatch

logger = logging.getLogger("specgraph")


def capture(
    fn: Callable[..., Any],
    spec: ModelSpec,
    inputs: Mapping[str, Any],
    live: Mapping[str, Any] | None = None,
    backend: str = "auto",
    validate: str = "strict",
    pool: Pool | None = None,
    max_fused: int = 16,
) -> CapturedGraph:
    """Plan `fn`, warm it up, and capture it.

    The model runs twice: once eagerly through its spec (the warm-up), once under capture. Bodies run for
    real in both, on the values the segments before them computed.

    Args:
        fn: the callable to capture.
        spec: its spec.
        inputs: keyword arguments, on the backend's device; their sizes are the captured ones.
        live: a value for each of the spec's live values.
        backend: `"cuda"`, `"cpu"`, or `"auto"`, the one of the inputs' device.
        validate: `"strict"`: every replay checks its inputs and every body's results. `"poison"`: and fills
            memory that nothing may read with NaN, and looks for elements a body left unwritten; slow.
        pool: another capture's `.pool`, to share memory with it.
        max_fused: sets of live values for which fusable bodies are kept captured; 0 for none.

    Raises:
        SpecError, LayoutError, PlanError: as `plan` does, or the capture does not follow the plan.
        CaptureError: the capture failed, or was asked for while another is in progress.
    """
    if validate not in ("strict", "poison"):
        raise CaptureError(
            f"there is no validation {validate!r}", spec=spec.name, fix='use "strict" or "poison"'
        )
    taken_apart = ModelInputs.of(inputs)
    dims = check_inputs(spec, fn, taken_apart)
    full_lengths = {name: dims[name] for name in spec.buckets}
    live = {**full_lengths, **check_live(spec, live or {}, CaptureError)}
    try:
        engine = make_backend(backend, taken_apart.tensors)
        pool = pool or engine.new_pool()
        if pool.device != engine.device:
            raise CaptureError(
                f"the pool is on {pool.device}, the capture on {engine.device}",
                fix="share a pool between captures on one device only",
            )
        static = _static_inputs(spec, taken_apart, engine.device)
        kwargs = taken_apart.with_tensors(static)
        start = time.perf_counter()
        with engine.warming_up(pool):
            run_checked(fn, spec, kwargs, live, engine.device)
            _fill(static, taken_apart)
        warm = time.perf_counter()
        capture_plan = plan(fn, spec, kwargs, live)
        planned = time.perf_counter()
        recorder = _Recorder(spec, fn, static, capture_plan, engine, live, validate == "poison")
        # What is recorded is launched too, into memory that other captures of the pool use.
        with pool.exclusive(), torch.inference_mode(False), torch.no_grad(), engine.capturing(pool):
            recorder.begin_segment()
            with Session(spec, fn, recorder):
                result = fn(**kwargs)
            recorder.finish()
        times = CaptureTimes(warm - start, planned - warm, time.perf_counter() - planned)
    except SpecGraphError as error:
        error.within(spec=spec.name)
        raise
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    leaks = recorder.made.still_alive(tensors)
    for leak in leaks:
        logger.warning("%s: %s", spec.name, leak)
    return CapturedGraph(
        spec=spec,
        plan=capture_plan,
        pool=pool,
        structure=taken_apart,
        inputs=static,
        outputs=result,
        steps=recorder.steps,
        kept=recorder.kept,
        live=recorder.live,
        weights=recorder.weights(),
        leaks=leaks,
        backend=engine,
        state=recorder.state,
        max_fused=0 if validate == "poison" else max_fused,
        times=times,
    )


def _static_inputs(spec: ModelSpec, inputs: ModelInputs, device: torch.device) -> dict[str, torch.Tensor]:
    with torch.inference_mode(False):
        static = {name: empty(layout, device) for name, layout in inputs.static_layouts(spec).items()}
    _fill(static, inputs)
    return static


def _fill(static: Mapping[str, torch.Tensor], inputs: ModelInputs) -> None:
    with torch.no_grad():
        for name, buffer in static.items():
            buffer.copy_(inputs.tensors[name])


class _Recorder:
    """One capture in progress; a session's handler."""

    def __init__(
        self,
        spec: ModelSpec,
        fn: Callable[..., Any],
        static: Mapping[str, torch.Tensor],
        capture_plan: CapturePlan,
        backend: Backend,
        live: dict[str, Any],
        poisons: bool,
    ) -> None:
        self.spec = spec
        self.backend = backend
        self._poisons = poisons
        self.segment_name = ""
        self.live = live
        self.steps: list[CapturedStep] = []
        self.kept: list[torch.Tensor] = []
        self.made = MadeInCapture()
        self._expected = list(capture_plan.breaks)
        self._done = 0
        self._origins = StorageOrigins()
        self.state = list(model_state(fn))
        self._draws = False
        self._read: set[Provenance] = set()
        for each in self.state:
            self._origins.claim(each.tensor, Provenance(Origin.PARAMETER, each.name))
        for name, tensor in static.items():
            self._origins.claim(tensor, Provenance(Origin.INPUT, name))

    def on_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return func(*args, **kwargs)

    def on_op(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Record an op; what it reads from outside the pool is kept."""
        self._draws = self._draws or draws_random_numbers(func, args, kwargs)
        for tensor in tensors_in((args, kwargs)):
            self._provenance(tensor)
        result = self.backend.run_op(func, args, kwargs)
        for tensor in tensors_in(result):
            if self._origins.find(tensor) is None:
                self._origins.claim(tensor, Provenance(Origin.SEGMENT, self.segment_name))
                self.made.note(tensor, self.segment_name)
        return result

    def _provenance(self, tensor: torch.Tensor) -> Provenance:
        """Where a tensor comes from; one that nothing accounts for is external, and kept from now on."""
        provenance = self._origins.find(tensor)
        if provenance is None:
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            origin = Origin.PARAMETER if is_parameter else Origin.EXTERNAL
            provenance = Provenance(origin, f"tensor {len(self.kept)}")
            self._origins.claim(tensor, provenance)
            self.kept.append(tensor)
        self._read.add(provenance)
        return provenance

    def weights(self) -> WeightWatch:
        """A watch over the parameters and buffers that were read."""
        read = {each.source for each in self._read if each.origin is Origin.PARAMETER}
        return WeightWatch.over(self.spec.name, (each for each in self.state if each.name in read))

    def begin_segment(self) -> None:
        planned = [step for step in self.steps if isinstance(step, CapturedSegment | CapturedBreak)]
        self.segment_name = f"segment {len(planned)}"
        self.backend.begin_segment()

    def _end_segment(self) -> None:
        graph = self.backend.end_segment()
        if graph is not None:
            self.steps.append(CapturedSegment(graph, self._draws))
        self._draws = False

    def finish(self) -> None:
        """End the last segment.

        Raises:
            PlanError: the plan has breaks that the capture did not come to.
        """
        self._end_segment()
        if self._poisons:
            # The first step of a replay: nothing in the pool is live yet.
            self.steps.insert(0, self._fill(self.made.all_spans()))
        if self._done < len(self._expected):
            self._differs(str_break(self._expected[self._done]), "the model returned")

    def on_break(self, call: BreakCall) -> object:
        step = self._follow(call)
        buffers = [self.backend.allocate(layout) for layout in call.outputs.values()]
        for name, buffer in zip(call.outputs, buffers, strict=True):
            source = Provenance(Origin.BREAK_OUTPUT, f"{call.site.label}: {name}")
            self._origins.claim(buffer, source)
            self.made.note(buffer, source.source)
        self._end_segment()
        writer = ResultWriter(self.spec, call, buffers)
        result = place_body(call, call.site.spec.capture_stub, buffers).run(self.live)
        writer.write(result, self.live)
        # The replay must not keep what the pool is to reuse, the buffers included.
        held = {id(tensor): self._held(tensor) for tensor in call.tensors.values()}
        aliases = [self.backend.alias(buffer) for buffer in buffers]
        by_name = dict(zip(call.outputs, aliases, strict=True))
        if self._poisons:
            spans = [_span_of(buffer) for buffer in buffers]
            self.steps.append(self._fill(merged([*self.made.dead_spans(), *spans])))
        self.steps.append(
            CapturedBreak(
                plan=step,
                body=place_body(call, None, aliases, lambda each: held.get(id(each), each)),
                writer=ResultWriter(self.spec, call, aliases),
                tensors={name: held[id(each)] for name, each in call.tensors.items()},
                outputs=by_name,
                is_fusable=call.site.spec.fusable,
            )
        )
        if self._poisons:
            self.steps.append(UnwrittenCheck(self.spec.name, call.site.label, by_name))
        self.begin_segment()
        return structured(call.site.spec.outputs, dict(zip(call.outputs, buffers, strict=True)))

    def _fill(self, spans: list[Span]) -> PoisonFill:
        return PoisonFill(tuple(self.backend.bytes_at(start, end - start) for start, end in spans))

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the replay holds of an argument: an alias of pool memory, anything else itself."""
        in_pool = self._provenance(tensor).origin.in_pool
        return self.backend.alias(tensor) if in_pool else tensor

    def _follow(self, call: BreakCall) -> BreakStep:
        """The plan's next break, if it is this call."""
        if self._done == len(self._expected):
            self._differs("no further break", call.site.label)
        step = self._expected[self._done]
        self._done += 1
        actual = self._describe(call)
        if actual != str_break(step):
            self._differs(str_break(step), actual)
        return step

    def _describe(self, call: BreakCall) -> str:
        tensors = [
            (tensor.shape, tensor.dtype, self._provenance(tensor).origin) for tensor in call.tensors.values()
        ]
        return _break_text(call.site.label, call.dims, tensors, call.outputs)

    def _differs(self, planned: str, captured: str) -> None:
        raise PlanError(
            f"the capture differs from the plan at break {self._done}",
            spec=self.spec.name,
            expected=planned,
            actual=captured,
            where=user_line(),
            fix="the model took another path than when it was traced on the host: look for a branch on the "
            "device, on values, or on state that the first run changed",
        )


def _span_of(tensor: torch.Tensor) -> Span:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def str_break(step: BreakStep) -> str:
    """What a capture must agree on with its plan, as text."""
    tensors = [(use.layout.shape, use.layout.dtype, use.provenance.origin) for use in step.tensors]
    return _break_text(step.name, step.dims, tensors, step.outputs)


def _break_text(name: str, dims: Any, tensors: Any, outputs: Any) -> str:
    arguments = "; ".join(
        f"{str(dtype).removeprefix('torch.')}[{' '.join(map(str, shape))}] {origin.value}"
        for shape, dtype, origin in tensors
    )
    results = "; ".join(map(str, outputs.values())) or "nothing"
    return (
        f"{name} with {format_dims(dims) or 'no dims'}, handed {arguments or 'no tensors'}, giving {results}"
    )
