"""capture -> replay: a captured model, run again on new inputs.

A replay checks its inputs before anything is written, copies them into the static buffers, then goes
through its steps in the captured order: a graph launch for a segment; for a break its body, its checks,
and its writes. Nothing is decided at replay that capture could decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import attrs
import torch
from torch.utils import _pytree as pytree

from ..errors import LayoutError, ReplayError
from ..inputs import ModelInputs, check_live
from ..layout import ConcreteLayout, dtype_name
from ..planner.model import BreakStep, CapturePlan
from ..planner.provenance import StateTensor
from ..spec import ModelSpec
from .backends.base import Backend, Graph, Pool
from .body import PlacedBody, ResultWriter
from .fusing import FusableBody, FusedReplay, Step
from .leaks import Leak
from .poison import PoisonFill, UnwrittenCheck
from .stats import CaptureTimes, ReplayStats
from .weights import WeightWatch

T = TypeVar("T")


@attrs.frozen(eq=False)
class CapturedSegment:
    """A segment's graph.

    Args:
        graph: the graph.
        draws: it draws random numbers, which torch gives it at each launch.
    """

    graph: Graph
    draws: bool

    def bind(self, live: Mapping[str, Any]) -> Callable[[], object]:
        """The step as a callable; a graph knows no live values."""
        return self.graph.replay


@attrs.frozen(eq=False)
class CapturedBreak:
    """A break as it runs at replay.

    Args:
        plan: the plan's step.
        body: what runs, with its arguments in place.
        writer: checks and writes its results.
        tensors: what the body is handed, by leaf name.
        outputs: aliases of the buffers, by output name.
        is_fusable: equal live values make the body launch the same work.
    """

    plan: BreakStep
    body: PlacedBody
    writer: ResultWriter
    tensors: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    is_fusable: bool

    def bind(self, live: Mapping[str, Any]) -> Callable[[], None]:
        """The step as a callable; `live` is read anew at every call."""
        body, args, kwargs, slots = self.body.body, self.body.args, self.body.kwargs, self.body.live
        write = self.writer.bind(live)

        def step() -> None:
            for container, key, name in slots:
                container[key] = live[name]
            write(body(*args, **kwargs))

        return step


def _part(step: CapturedStep) -> Graph | FusableBody | None:
    """What the step can be in a fused replay."""
    match step:
        case CapturedSegment(graph, draws=False):
            return graph
        case CapturedBreak(is_fusable=True):
            handed = (*step.tensors.values(), *step.outputs.values())
            return FusableBody(step.plan.name, step.body, step.writer, handed)
        case _:
            return None


CapturedStep: TypeAlias = CapturedSegment | CapturedBreak | PoisonFill | UnwrittenCheck


class CapturedGraph:
    """A captured model. Made by `capture`.

    Attributes:
        plan: the plan the capture followed.
        times: what the capture took.
        inputs: the static input buffers, by input name.
        outputs: the static outputs, in the structure the model returns; the next replay overwrites them.
        stats: what it has done so far.
        leaks: what the capture made and the model keeps, outputs aside; logged as warnings too.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        plan: CapturePlan,
        pool: Pool,
        structure: ModelInputs,
        inputs: Mapping[str, torch.Tensor],
        outputs: Any,
        steps: list[CapturedStep],
        kept: list[torch.Tensor],
        live: dict[str, Any],
        weights: WeightWatch,
        leaks: tuple[Leak, ...],
        backend: Backend,
        state: list[StateTensor],
        max_fused: int,
        times: CaptureTimes,
    ) -> None:
        self.plan = plan
        self.times = times
        self.inputs = inputs
        self.outputs = outputs
        self.stats = ReplayStats()
        self._spec = spec
        self._pool: Pool | None = pool
        self._structure = structure
        self._steps = steps
        self._kept = kept
        self._weights = weights
        self.leaks = leaks
        # Bodies read live values from this one dict, which every replay fills.
        self._live = live
        self._full_lengths = {name: plan.dims[name] for name in spec.buckets}
        self._live_keys = frozenset(spec.live)
        self._run = [step.bind(live) for step in steps]
        parts = [_part(step) for step in steps]
        self._fused: FusedReplay | None = None
        if max_fused and any(isinstance(part, FusableBody) for part in parts):
            self._fused = FusedReplay(
                spec.name,
                list(map(Step, self._run, parts)),
                backend,
                pool,
                live,
                state,
                max_fused,
                self.stats,
            )
        self._expected = [
            (name, buffer.shape, buffer.dtype, buffer.device, buffer) for name, buffer in inputs.items()
        ]
        self._input_keys = frozenset(structure.order)
        self._output_leaves, self._output_structure = pytree.tree_flatten(outputs)

    @property
    def pool(self) -> Pool:
        """The graph's memory; hand it to another `capture` to share it."""
        if self._pool is None:
            raise ReplayError(
                "the graph is closed", spec=self._spec.name, fix="capture again, or close it later"
            )
        return self._pool

    @property
    def num_segments(self) -> int:
        """Graphs launched by a replay."""
        return sum(isinstance(step, CapturedSegment) for step in self._steps)

    def __call__(self, live: Mapping[str, Any] | None = None, **inputs: Any) -> Any:
        """Check the inputs, copy them in, replay, and hand out fresh outputs.

        Args:
            live: a value for each live value of the spec.
            **inputs: as captured: same structure, sizes and dtypes, any strides.

        Raises:
            ReplayError: an input or live value is missing or unknown, a frozen one differs, or the graph is
                closed.
            LayoutError: an input, or a body's result, is not what was captured.
        """
        with self.pool.exclusive():
            self._weights.check()
            tensors = self._checked(inputs)
            self._take_live(live)
            with torch.no_grad():
                for value, (_, _, _, _, buffer) in zip(tensors, self._expected, strict=True):
                    if value is not buffer:
                        buffer.copy_(value)
                self._replay()
            return self._fresh_outputs()

    def replay(self, live: Mapping[str, Any] | None = None) -> None:
        """Replay over `inputs` and `outputs`: nothing is copied in or out.

        Raises:
            ReplayError: a live value is missing or unknown, or the graph is closed.
            LayoutError: a body's result is not what was captured.
        """
        with self.pool.exclusive():
            self._weights.check()
            self._take_live(live)
            with torch.no_grad():
                self._replay()

    def run(
        self,
        fill: Callable[[Mapping[str, torch.Tensor]], object],
        take: Callable[[Any], T],
        live: Mapping[str, Any] | None = None,
    ) -> T:
        """Fill the static inputs, replay, and take what is wanted of the outputs, as one.

        No other replay over the pool comes between the three, on any thread or stream. For callers who pad,
        who have their inputs elsewhere, or who need only part of the outputs.

        Args:
            fill: writes `inputs`; what it writes is not checked, as the buffers' layouts are fixed.
            take: given `outputs`; they are overwritten by the next replay over the pool, so that what it
                returns is copies, or is used up before.
            live: a value for each live value of the spec.

        Raises:
            ReplayError: a live value is missing or unknown, or the graph is closed.
            LayoutError: a body's result is not what was captured.
        """
        with self.pool.exclusive():
            self._weights.check()
            self._take_live(live)
            with torch.no_grad():
                fill(self.inputs)
                self._replay()
                return take(self.outputs)

    def prefuse(self, live: Mapping[str, Any] | None = None) -> None:
        """Have the fusable bodies captured for these live values before the first replay asks for them.

        Replays twice, on what the static inputs hold; where nothing is fusable, does nothing.

        Raises:
            ReplayError: a live value is missing or unknown, or the graph is closed.
        """
        with self.pool.exclusive():
            self._weights.check()
            self._take_live(live)
            if self._fused is not None:
                with torch.no_grad():
                    self._fused.prefuse()

    def _replay(self) -> None:
        if self._fused is not None:
            self._fused.replay()
        else:
            for step in self._run:
                step()
        self.stats.replays += 1

    def walk(self, live: Mapping[str, Any] | None = None, **inputs: Any) -> Iterator[CapturedStep]:
        """One call, step by step: yields each step when it has run, before the next one does.

        Between two steps the tensors that a break was handed and has written may be looked at.

        Raises:
            ReplayError, LayoutError: as a call does.
        """
        with self.pool.exclusive(), torch.no_grad():
            self._weights.check()
            tensors = self._checked(inputs)
            self._take_live(live)
            for value, buffer in zip(tensors, self.inputs.values(), strict=True):
                buffer.copy_(value)
            for step, run in zip(self._steps, self._run, strict=True):
                run()
                yield step

    def close(self) -> None:
        """Give up the graphs and their memory; the graph cannot be replayed any more."""
        self._steps, self._run, self._kept, self._expected = [], [], [], []
        self._output_leaves = []
        self._fused = None
        self.inputs, self.outputs = {}, None
        self._pool = None

    def _take_live(self, live: Mapping[str, Any] | None) -> None:
        given = live or {}
        if given.keys() != self._live_keys:
            given = check_live(self._spec, given, ReplayError)
        if self._full_lengths:
            self._live.update(self._full_lengths)
        self._live.update(given)

    def _checked(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors among the inputs, in the order of the static buffers."""
        values: Mapping[str, Any] = inputs
        if inputs.keys() != self._input_keys:
            values = self._taken_apart(inputs)
        for name, frozen in self._structure.values.items():
            if values[name] != frozen:
                self._refuse_frozen(name, frozen, values[name])
        grad = torch.is_grad_enabled()
        tensors = []
        for name, shape, dtype, device, _ in self._expected:
            value = values[name]
            if (
                not isinstance(value, torch.Tensor)
                or value.shape != shape
                or value.dtype is not dtype
                or value.device != device
                or (grad and value.requires_grad)
            ):
                self._refuse_input(name, value)
            tensors.append(value)
        return tensors

    def _taken_apart(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs that nest, by leaf name; or the error for inputs that are missing or unknown."""
        given = ModelInputs.of(inputs)
        if given.structure != self._structure.structure:
            missing = sorted(self._input_keys - set(given.order))
            unknown = sorted(set(given.order) - self._input_keys)
            which = (
                f"input {missing[0]!r} is missing"
                if missing
                else f"input {unknown[0]!r} was not captured"
                if unknown
                else "the inputs have another structure"
            )
            raise ReplayError(
                which,
                spec=self._spec.name,
                expected=f"inputs {', '.join(self._structure.order) or 'none'}",
                actual=f"inputs {', '.join(given.order) or 'none'}",
                fix="pass the inputs that were captured, or capture with these",
            )
        return {**given.values, **given.tensors}

    def _refuse_frozen(self, name: str, frozen: Any, value: Any) -> None:
        raise ReplayError(
            "is no tensor, so its value was frozen at capture, and it differs now",
            spec=self._spec.name,
            tensor=f"input {name!r}",
            expected=repr(frozen),
            actual=repr(value),
            fix="pass the captured value, pass a tensor, declare it live, or capture again with this value",
        )

    def _refuse_input(self, name: str, value: Any) -> None:
        _, shape, dtype, device, _ = next(each for each in self._expected if each[0] == name)
        expected = f"{dtype_name(dtype)}[{' '.join(map(str, shape))}] on {device}"
        actual = (
            f"{ConcreteLayout.of(value)} on {value.device}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        if expected == actual.partition(" strides")[0]:
            raise ReplayError(
                "requires a gradient, which a captured graph does not compute",
                spec=self._spec.name,
                tensor=f"input {name!r}",
                fix="call under torch.no_grad() or torch.inference_mode(), or pass input.detach()",
            )
        raise LayoutError(
            "is not what was captured",
            spec=self._spec.name,
            tensor=f"input {name!r}",
            expected=expected,
            actual=actual,
            fix="pass a tensor like the captured one (move it with .to(), cast it yourself), or capture "
            "again with this one",
        )

    def _fresh_outputs(self) -> Any:
        leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in self._output_leaves]
        return pytree.tree_unflatten(leaves, self._output_structure)
