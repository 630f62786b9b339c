"""The trace that a plan is made from: the model run once on fake tensors, break bodies never.

Every tensor is a fake CPU tensor, whatever device the model is on: a torch built without CUDA cannot
make fake CUDA tensors, and the plan must be the same on a laptop. Real tensors that the model brings in
(parameters, caches, globals) are stood in for by fakes of the same layout, so that nothing is read,
written, or moved, and nothing large is allocated.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from ..calls import BreakCall
from ..callsite import user_line
from ..dims import Dims
from ..errors import PlanError, SpecGraphError
from ..inputs import ModelInputs, check_inputs, leaf_name
from ..intercept import Session
from ..layout import ConcreteLayout, empty
from ..ops import host_sync, launches, makes_constant, map_tensors, tensors_in
from ..spec import ModelSpec, Outputs, Ownership, target_text
from .memory import Lifetime, Lifetimes
from .model import (
    BreakStep,
    Buffer,
    CapturePlan,
    Diagnostic,
    Memory,
    SegmentStep,
    TensorUse,
    ValueUse,
)
from .preserve import unchanged
from .provenance import CONSTANT, Origin, Provenance, StorageOrigins, model_state, modules_of
from .scratch import scratch_nbytes
from .stand_ins import HOST, StandIns


def plan(
    fn: Callable[..., Any],
    spec: ModelSpec,
    inputs: Mapping[str, Any],
    live: Mapping[str, Any] | None = None,
) -> CapturePlan:
    """Plan the capture of `fn`; no GPU, no break's body and no memory of the model's size is needed.

    Args:
        fn: the callable to capture; parameters may be on any device, `meta` included.
        spec: its spec.
        inputs: keyword arguments; only the tensors' layouts matter.
        live: names of live values are checked, values are not looked at.

    Raises:
        SpecError: a target cannot be resolved.
        LayoutError: an input, or a break's call, does not fit its layouts.
        PlanError: a declared break is never reached, an `eager_only` op is in a segment, an op cannot be
            traced, or inputs are missing or unknown.
        HostSyncError: an op in a segment needs a value on the host.
    """
    if unknown := sorted(set(live or {}) - spec.live_names):
        raise PlanError(
            f"live value {unknown[0]!r} is not declared",
            spec=spec.name,
            expected=f"of: {', '.join(sorted(spec.live_names)) or 'none'}",
            fix="add it to ModelSpec.live",
        )
    taken_apart = ModelInputs.of(inputs)
    dims = check_inputs(spec, fn, taken_apart)
    with torch.inference_mode(False), torch.no_grad(), unchanged(modules_of(fn)):
        return _Trace(spec, fn, taken_apart, dims).run()


class _Trace:
    """One trace in progress; a session's handler."""

    def __init__(self, spec: ModelSpec, fn: Callable[..., Any], inputs: ModelInputs, dims: Dims) -> None:
        self.spec = spec
        self.fn = fn
        self.inputs = inputs
        self.dims = dims
        self.steps: list[SegmentStep | BreakStep] = []
        self.diagnostics: list[Diagnostic] = []
        self.lifetimes = Lifetimes()
        self.origins = StorageOrigins()
        self.fake_mode = FakeTensorMode()
        self.stand_ins = StandIns(self.fake_mode, model_state(fn))
        self.reached: set[str] = set()
        self._open_segment()

    def _open_segment(self) -> None:
        self.num_ops = 0
        self.allocated_nbytes = 0
        self.reads: dict[Provenance, TensorUse] = {}

    @property
    def segment_name(self) -> str:
        return f"segment {len(self.steps)}"

    def run(self) -> CapturePlan:
        layouts = self.inputs.static_layouts(self.spec)
        with self.fake_mode:
            static = {name: self._static_input(name, each) for name, each in layouts.items()}
            with Session(self.spec, self.fn, self):
                result = self._call(self.inputs.with_tensors(static))
        self._close_segment()
        self._check_all_reached()
        outputs = self._outputs(result)
        del result, static
        self._report_leftovers()
        return CapturePlan(
            model=self.spec.name,
            device=next((t.device.type for t in self.inputs.tensors.values()), "cpu"),
            dims=self.dims,
            inputs=layouts,
            values=tuple(ValueUse(name, frozen_text(value)) for name, value in self.inputs.values.items()),
            live=tuple(sorted(self.spec.live_names)),
            steps=tuple(self.steps),
            outputs=outputs,
            buffers=self._buffers(),
            memory=self._memory(layouts, outputs),
            diagnostics=tuple(self.diagnostics),
        )

    def _call(self, kwargs: dict[str, Any]) -> Any:
        try:
            return self.fn(**kwargs)
        except SpecGraphError as error:
            error.within(spec=self.spec.name)
            raise

    def _static_input(self, name: str, layout: ConcreteLayout) -> torch.Tensor:
        fake = empty(layout, HOST)
        provenance = Provenance(Origin.INPUT, name)
        self.origins.claim(fake, provenance)
        self._born(fake, provenance, name, step=-1)
        return fake

    def _born(self, tensor: torch.Tensor, provenance: Provenance, name: str, step: int) -> None:
        nbytes = tensor.untyped_storage().nbytes()
        lifetime = Lifetime(name, provenance, ConcreteLayout.of(tensor), nbytes, step, step, user_line())
        self.lifetimes.born(tensor, lifetime)

    # What the session sees.

    def on_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Keep everything on the host, where the fakes are."""
        name = getattr(func, "__name__", "")
        if name in ("numpy", "__array__"):
            raise host_sync(f"Tensor.{name}", self.segment_name)
        if name == "cpu":
            self._note("host-copy", "x.cpu() is nothing on the host; on a GPU it cannot be captured")
        if name == "cuda":
            return args[0]
        if func is torch.device:
            return torch.device(*args, **kwargs)
        args = tuple(HOST if _names_device(arg, name) else arg for arg in args)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": HOST}
        return func(*args, **kwargs)

    def on_op(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Trace an op of the open segment."""
        if makes_constant(func):
            constant = func(*args, **kwargs)
            self.origins.claim(constant, CONSTANT)
            return constant
        args, kwargs = map_tensors(self._fake, (args, kwargs))
        step = len(self.steps)
        if launches(func):
            self.num_ops += 1
            for tensor in tensors_in((args, kwargs)):
                self._read(tensor, step)
        result = self._run_fake(func, args, kwargs)
        for tensor in tensors_in(result):
            if self.origins.find(tensor) is None:
                provenance = Provenance(Origin.SEGMENT, self.segment_name)
                self.origins.claim(tensor, provenance)
                self._born(tensor, provenance, self.segment_name, step)
                self.allocated_nbytes += tensor.untyped_storage().nbytes()
        self.lifetimes.passing(scratch_nbytes(func, args, kwargs))
        return result

    def _run_fake(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise host_sync(func.name(), self.segment_name) from None
        except UnsupportedOperatorException:
            raise self._untraceable(func, "it has no fake implementation") from None
        except RuntimeError as error:
            if func.namespace in ("aten", "prims"):
                raise
            # torch.library.custom_op registers a fake that only raises.
            raise self._untraceable(func, str(error)) from error

    def _untraceable(self, func: torch._ops.OpOverload, reason: str) -> PlanError:
        return PlanError(
            f"{func.name()} in {self.segment_name} cannot be traced with fake tensors",
            spec=self.spec.name,
            actual=reason,
            where=user_line(),
            fix=f'register one with torch.library.register_fake, or declare the break "op:{func.name()}"',
        )

    def _read(self, tensor: torch.Tensor, step: int) -> None:
        self.lifetimes.used(tensor, step)
        provenance = self.origins.find(tensor)
        if provenance is None or provenance in self.reads or provenance == CONSTANT:
            return
        if provenance != Provenance(Origin.SEGMENT, self.segment_name):
            self.reads[provenance] = TensorUse(str(provenance), ConcreteLayout.of(tensor), provenance)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake that stands in for a real tensor."""
        if isinstance(tensor, FakeTensor):
            return tensor
        fake, provenance = self.stand_ins.of(tensor)
        if self.origins.find(fake) is not None:
            return fake
        self.origins.claim(fake, provenance)
        if provenance.origin is Origin.EXTERNAL:
            layout = ConcreteLayout.of(tensor)
            self._note(
                "external-tensor",
                f"{layout} ({layout.nbytes} bytes) is neither an input nor a parameter: it is kept alive by "
                "the capture, and every replay reads this very tensor; make it an input if it changes",
            )
        return fake

    def _note(self, code: str, message: str) -> None:
        """A diagnostic about the step and the line of the model that are being traced."""
        self.diagnostics.append(Diagnostic(code, message, step=len(self.steps), where=user_line()))

    def on_break(self, call: BreakCall) -> object:
        """End the segment, make the outputs, note the step."""
        self._close_segment()
        spec = call.site.spec
        step = len(self.steps)
        tensors, values = self._arguments(call, step)
        results = {}
        for name, layout in call.outputs.items():
            results[name] = empty(layout, HOST)
            provenance = Provenance(Origin.BREAK_OUTPUT, f"{call.site.label}: {name}")
            self.origins.claim(results[name], provenance)
            self._born(results[name], provenance, provenance.source, step)
        copies = spec.ownership is Ownership.COPY
        self.reached.add(spec.name)
        self.steps.append(
            BreakStep(
                name=call.site.label,
                target=target_text(spec.target),
                ownership=spec.ownership,
                dims=call.dims,
                tensors=tensors,
                values=values,
                outputs=call.outputs,
                copied_nbytes=sum(each.nbytes for each in call.outputs.values()) if copies else 0,
                where=user_line(),
            )
        )
        self._open_segment()
        return structured(spec.outputs, results)

    def _arguments(self, call: BreakCall, step: int) -> tuple[tuple[TensorUse, ...], tuple[ValueUse, ...]]:
        spec = call.site.spec
        tensors: list[TensorUse] = []
        values = [ValueUse(parameter, live=name) for parameter, name in spec.live.items()]
        for name, leaf in call.leaves.items():
            if not isinstance(leaf, torch.Tensor):
                values.append(ValueUse(name, frozen_text(leaf)))
                continue
            fake = self._fake(leaf)
            self.lifetimes.used(fake, step)
            provenance = self.origins.find(fake) or CONSTANT
            mutated = name.partition("[")[0] in spec.mutates
            tensors.append(TensorUse(name, ConcreteLayout.of(leaf), provenance, mutated))
            if mutated and provenance.origin is Origin.INPUT:
                self._note(
                    "mutated-input",
                    f"{call.site.label} writes {name}, which is {provenance}: the static buffer changes, the "
                    "caller's tensor does not",
                )
        return tuple(tensors), tuple(values)

    def _close_segment(self) -> None:
        if self.num_ops:
            self.steps.append(SegmentStep(self.num_ops, self.allocated_nbytes, tuple(self.reads.values())))

    # What the plan says of the whole.

    def _check_all_reached(self) -> None:
        for spec in self.spec.breaks:
            if spec.name not in self.reached:
                raise PlanError(
                    "is declared but never reached",
                    spec=self.spec.name,
                    break_name=spec.name,
                    actual=f"{target_text(spec.target)} is not called, or is called under a name that was "
                    "bound elsewhere (an attribute, a dict, a closure)",
                    fix="break at the name that is called, use @graph_break on the function, or drop it",
                )

    def _outputs(self, result: Any) -> tuple[TensorUse, ...]:
        outputs = []
        end = len(self.steps)
        for path, leaf in pytree.tree_flatten_with_path({"output": result})[0]:
            if isinstance(leaf, torch.Tensor):
                fake = self._fake(leaf)
                self.lifetimes.used(fake, end)
                provenance = self.origins.find(fake) or CONSTANT
                outputs.append(TensorUse(leaf_name(path), ConcreteLayout.of(leaf), provenance))
        return tuple(outputs)

    def _report_leftovers(self) -> None:
        """Tensors made in segments that the model still refers to, with no module to restore."""
        if self.lifetimes.alive_in_pool():
            gc.collect()
        for lifetime in self.lifetimes.alive_in_pool():
            self.diagnostics.append(
                Diagnostic(
                    "kept-tensor",
                    f"the model keeps {lifetime.layout} ({lifetime.nbytes} bytes) made in {lifetime.name}: "
                    "it would stay allocated in the pool and hold garbage until the graph replays; run the "
                    "model once before planning if it is a cache, or make it a parameter",
                    step=lifetime.birth,
                    where=lifetime.where,
                )
            )

    def _buffers(self) -> tuple[Buffer, ...]:
        return tuple(
            Buffer(each.name, each.provenance, each.layout, each.birth, each.last_use)
            for each in self.lifetimes.all()
            if each.provenance.origin is not Origin.SEGMENT or each.last_use > each.birth
        )

    def _memory(self, layouts: Mapping[str, ConcreteLayout], outputs: tuple[TensorUse, ...]) -> Memory:
        sizes = self.stand_ins.nbytes()
        return Memory(
            static_inputs=sum(layout.nbytes for layout in layouts.values()),
            parameters=sizes[Origin.PARAMETER],
            externals=sizes[Origin.EXTERNAL],
            pool_allocated=self.lifetimes.pool.allocated_peak_nbytes,
            pool_peak=self.lifetimes.pool.reserved_nbytes,
            copied_in=sum(layout.nbytes for layout in layouts.values()),
            copied_at_breaks=sum(step.copied_nbytes for step in self.steps if isinstance(step, BreakStep)),
            copied_out=sum(output.layout.nbytes for output in outputs),
        )


def structured(outputs: Outputs, results: Mapping[str, torch.Tensor]) -> object:
    """Tensors by output name, in the structure that the spec's `outputs` has."""
    tensors = list(results.values())
    if outputs is None:
        return None
    if isinstance(outputs, tuple):
        return tuple(tensors)
    if isinstance(outputs, Mapping):
        return dict(zip(outputs, tensors, strict=True))
    return tensors[0]


def frozen_text(value: Any) -> str:
    """A frozen value as text that does not depend on the process."""
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype):
        return repr(value)
    if isinstance(value, torch.device | enum.Enum):
        return str(value)
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else f"<{type(value).__qualname__}>"


def _names_device(value: object, function: str) -> bool:
    if isinstance(value, torch.device):
        return value.type != "meta"
    if isinstance(value, str):
        return value.partition(":")[0] in ("cuda", "hip")
    return function == "to" and isinstance(value, int) and not isinstance(value, bool)
