"""Fused replay: bodies whose launches repeat are captured too, and run in one launch with their neighbours.

A body that is declared `fusable` promises that with equal live values, its *key*, and the same addresses it
launches the same work and never touches the host. So the replay of a key is data: a program, the flat list
of what to call. A new key is replayed step by step. When it comes back, its replay captures each fusable body
where it stands, with its checks, its writes and its padding; each maximal run of segments and captured bodies
becomes one graph, and what else there is stays a step between them. That replay computes what any other does;
the next one of its key runs the program it left behind.

A body captured late allocates from a pool of its own: in the plan's pool, blocks that a replay uses in its
middle look free by then. What it reads from outside both is kept for as long as its program is.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from ..calls import BreakCall
from ..callsite import user_line
from ..errors import CaptureError, MovedWeightError
from ..intercept import BodySession, active_session
from ..ops import draws_random_numbers, tensors_in
from ..planner.provenance import Origin, Provenance, StateTensor, StorageOrigins
from .backends.base import Backend, Graph, Pool
from .body import PlacedBody, ResultWriter
from .leaks import MadeInCapture
from .stats import ReplayStats
from .value_key import ATOMS, value_key
from .weights import WeightWatch

logger = logging.getLogger("specgraph")

Call: TypeAlias = Callable[[], object]

MAX_SEEN = 4096
"""Keys remembered as having been replayed."""


@attrs.frozen(eq=False)
class FusableBody:
    """A break's body, as far as it can become part of a graph.

    Args:
        label: name of the break.
        body: what runs.
        writer: checks and writes its results.
        handed: the tensors it gets, and the buffers it may write.
    """

    label: str
    body: PlacedBody
    writer: ResultWriter
    handed: tuple[torch.Tensor, ...]

    @property
    def live(self) -> frozenset[str]:
        """Names of the live values that decide what it launches."""
        return frozenset(name for _, _, name in self.body.live) | self.writer.lengths


@attrs.frozen(eq=False)
class Step:
    """A step of a replay, and what it can be part of.

    Args:
        run: does it.
        part: the segment's graph, or a body to capture; None for what stays a step of its own.
    """

    run: Call
    part: Graph | FusableBody | None


@attrs.frozen(eq=False)
class Program:
    """The replay of one key.

    Args:
        calls: to be made in this order.
        weights: watches the parameters that its captured bodies read.
        kept: what else they read from outside.
    """

    calls: tuple[Call, ...]
    weights: WeightWatch
    kept: tuple[torch.Tensor, ...]


class FusedReplay:
    """Finds or makes the program of every replay. The pool's lock is held around every call.

    Args:
        model: name of the model, for messages.
        steps: the captured steps.
        backend: records bodies and composes graphs.
        pool: of the capture.
        live: the current live values.
        state: parameters and buffers of the model.
        max_fused: programs kept; the one unused for longest makes room.
        stats: counts what happens.
    """

    def __init__(
        self,
        model: str,
        steps: Sequence[Step],
        backend: Backend,
        pool: Pool,
        live: Mapping[str, Any],
        state: Sequence[StateTensor],
        max_fused: int,
        stats: ReplayStats,
    ) -> None:
        self._model = model
        self._steps = list(steps)
        self._backend = backend
        self._pool = pool
        self._live = live
        self._state = state
        self._max_fused = max_fused
        self._stats = stats
        self._names = sorted(frozenset().union(*(each.live for each in self._bodies())))
        self._programs: collections.OrderedDict[Hashable, Program] = collections.OrderedDict()
        self._seen: collections.OrderedDict[Hashable, None] = collections.OrderedDict()
        self._reported: set[str] = set()

    def replay(self) -> None:
        """Replay with the current live values."""
        key = self._key()
        program = self._programs.get(key)
        if program is None:
            self._replay_step_by_step(key)
            return
        try:
            program.weights.check()
        except MovedWeightError as error:
            self._give_up(key)
            logger.info(
                "%s: %s has moved, so a fused replay that read it is given up", self._model, error.tensor
            )
            self._replay_step_by_step(None)
            return
        self._programs.move_to_end(key)
        for call in program.calls:
            call()
        self._stats.fused += 1

    def prefuse(self) -> None:
        """Make the program of the current live values, unless there is one: by two replays."""
        key = self._key()
        for _ in range(2):
            if key not in self._programs:
                self._replay_step_by_step(key)

    def _bodies(self) -> list[FusableBody]:
        return [step.part for step in self._steps if isinstance(step.part, FusableBody)]

    def _key(self) -> Hashable:
        """The live values that bodies depend on; None where one of them cannot tell two replays apart."""
        parts = []
        for name in self._names:
            value = self._live[name]
            kind = type(value)
            try:
                parts.append((kind, value) if kind in ATOMS else value_key(value))
            except TypeError as error:
                self._report(f"live {name}", f"live value {name!r} cannot be told from another: {error}")
                return None
        return tuple(parts)

    def _replay_step_by_step(self, key: Hashable) -> None:
        """Replay; a key that comes back leaves its program behind."""
        if key in self._seen and self._bodies() and self._max_fused > 0 and active_session() is None:
            self._replay_and_capture(key)
            return
        for step in self._steps:
            step.run()
        if key is not None:
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)

    def _replay_and_capture(self, key: Hashable) -> None:
        recorder = _BodyRecorder(self._backend, self._state)
        parts: list[list[Graph] | Call] = []
        for index, step in enumerate(self._steps):
            part: Graph | Call | None
            if isinstance(step.part, FusableBody):
                part = self._capture_or_run(index, step.part, recorder)
            else:
                step.run()
                part = step.part or step.run
            if callable(part):
                parts.append(part)
            elif part is not None and parts and isinstance(parts[-1], list):
                parts[-1].append(part)
            elif part is not None:
                parts.append([part])
        if not self._bodies():
            return
        for leak in recorder.made.still_alive(()):
            logger.warning("%s: %s", self._model, leak)
        try:
            calls = tuple(self._one(each) if isinstance(each, list) else each for each in parts)
        except CaptureError as error:
            self._report("composing", str(error))
            self._max_fused = 0
            return
        weights = WeightWatch.over(self._model, recorder.parameters())
        self._programs[key] = Program(calls, weights, tuple(recorder.kept))
        self._stats.programs += 1
        if len(self._programs) > self._max_fused:
            self._give_up(next(iter(self._programs)))

    def _one(self, run: list[Graph]) -> Call:
        """A run of graphs as one launch."""
        return (run[0] if len(run) == 1 else self._backend.compose(run)).replay

    def _capture_or_run(self, index: int, body: FusableBody, recorder: _BodyRecorder) -> Graph | Call | None:
        """The step, done: as a graph, as a call if it cannot be captured, or None if it launched nothing."""
        try:
            return self._capture(body, recorder)
        except Exception as error:  # noqa: BLE001  # whatever a body does that a capture forbids
            run = self._steps[index].run
            run()  # where the body is at fault and not the capture, this raises, and is the caller's
            self._steps[index] = Step(run, None)
            self._report(
                body.label, f"break {body.label!r} stays eager, its body cannot be captured: {error}"
            )
            return run

    def _capture(self, part: FusableBody, recorder: _BodyRecorder) -> Graph | None:
        """Capture a body and what is done with its results; afterwards it has run."""
        recorder.enter(part)
        with self._backend.capturing(self._pool.late):
            self._backend.begin_segment()
            with BodySession(recorder):
                part.writer.write(part.body.run(self._live), self._live)
            return self._backend.end_segment()

    def _give_up(self, key: Hashable) -> None:
        del self._programs[key]
        self._stats.evicted += 1

    def _report(self, what: str, message: str) -> None:
        """Log it, the first time."""
        if what not in self._reported:
            self._reported.add(what)
            logger.warning("%s: %s", self._model, message)


class _BodyRecorder:
    """Records bodies one after another; a session's handler. Notes what they read from outside and make."""

    segment_name = ""

    def __init__(self, backend: Backend, state: Sequence[StateTensor]) -> None:
        self.made = MadeInCapture()
        self.kept: list[torch.Tensor] = []
        self._backend = backend
        self._state = state
        self._label = ""
        self._read: set[str] = set()
        self._origins = StorageOrigins()
        for each in state:
            self._origins.claim(each.tensor, Provenance(Origin.PARAMETER, each.name))

    def enter(self, body: FusableBody) -> None:
        """From here on, ops are this body's."""
        self._label = f"the body of break {body.label!r}"
        for tensor in body.handed:
            if self._origins.find(tensor) is None:
                self._origins.claim(tensor, Provenance(Origin.SEGMENT, self._label))

    def parameters(self) -> list[StateTensor]:
        """Those that were read."""
        return [each for each in self._state if each.name in self._read]

    def on_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return func(*args, **kwargs)

    def on_op(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if draws_random_numbers(func, args, kwargs):
            raise CaptureError(
                f"{func.name()} draws random numbers, and a fused replay would draw the same again",
                where=user_line(),
                fix="leave fusable at False for this break, or draw the numbers in a segment",
            )
        for tensor in tensors_in((args, kwargs)):
            self._note_read(tensor)
        result = self._backend.run_op(func, args, kwargs)
        for tensor in tensors_in(result):
            if self._origins.find(tensor) is None:
                self._origins.claim(tensor, Provenance(Origin.SEGMENT, self._label))
                self.made.note(tensor, self._label)
        return result

    def on_break(self, call: BreakCall) -> object:
        raise NotImplementedError("in a body every call is an ordinary one")

    def _note_read(self, tensor: torch.Tensor) -> None:
        provenance = self._origins.find(tensor)
        if provenance is None:
            provenance = Provenance(Origin.EXTERNAL, "")
            self._origins.claim(tensor, provenance)
            self.kept.append(tensor)
        if provenance.origin is Origin.PARAMETER:
            self._read.add(provenance.source)
