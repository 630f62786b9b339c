"""Serving a model's calls from captures: the runner.

A call is served by the capture of the smallest buckets it fits, padded on the way in and cut back on the way
out, or it is a miss. Whatever happens, it gets what the model computes through its spec at the call's own
lengths, and captures made before stay as they are: a miss is never served by a capture that differs in
anything a capture freezes (`keys`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.utils import _pytree as pytree

from ..errors import MovedWeightError, ReplayError, SpecError
from ..inputs import ModelInputs, check_live
from ..intercept import active_session
from ..spec import ModelSpec
from .buckets import Buckets, cut, fill, saved
from .capturer import CaptureOptions, Capturer, in_one_line, refused
from .drop_in import DropIn
from .eager import run_checked
from .keys import Call, CallReader
from .misses import Miss, explain
from .routing import Route, Router
from .runner_stats import RunnerStats, Tally
from .store import Capture, CaptureStore
from .warmup import ExampleLike, WarmupReport, example_at, warm_up

logger = logging.getLogger("specgraph")

_MAX_EXPLAINED = 1024

OnMiss: TypeAlias = Literal["eager", "capture", "error"]
Mode: TypeAlias = Literal["graph", "checked", "eager"]
OutputsMode: TypeAlias = Literal["fresh", "borrow"]


class _ThisThread(threading.local):
    """What the thread is in the middle of."""

    replays = False


class GraphRunner(DropIn):
    """Runs a model from captures of its spec's buckets; stands in for the model.

    Everything that is not the runner's own (`warmup`, `stats`, `captures`, `nbytes`, `mode`, `clear`,
    `close`) is read from and written to the wrapped model.

    Args:
        fn: the callable; a module keeps its attributes, parameters and class.
        spec: its spec.
        backend: `"cuda"`, `"cpu"`, or `"auto"`, the one of the inputs' device.
        on_miss: what becomes of a call that matches no capture: `"eager"` runs it through the spec without a
            graph, `"capture"` captures it, `"error"` refuses it.
        mode: `"graph"`; `"checked"` runs every call eagerly at the bucket's size, with all checks;
            `"eager"` calls `fn` itself.
        outputs: `"fresh"` tensors, or `"borrow"`: views of the static outputs, which the next replay over
            the pool overwrites.
        validate: as for `capture`.
        max_captures: captures held at most, the least recently used given up first; None: any number.
        max_nbytes: bytes that captures take from a device at most, by the plan's prediction; None: any
            number. A capture that would not fit alone is a failed one.
        max_fused: as for `capture`.
        ranges: put a `torch.profiler.record_function` range around every step of a replay; steps are not
            fused then.

    Raises:
        SpecError: a bucketed dim cannot be padded, the outputs have no layouts to cut by, or the callable
            has a parameter called `live`.
        ValueError: an option has no such value.
    """

    _spec: ModelSpec
    _mode: Mode
    _on_miss: OnMiss
    _outputs: OutputsMode
    _buckets: Buckets
    _reader: CallReader
    _router: Router
    _lock: threading.RLock
    _tally: Tally
    _store: CaptureStore
    _capturer: Capturer
    _explained: set[tuple[str, str]]
    _here: _ThisThread
    _closed: bool

    def __init__(
        self,
        fn: Callable[..., Any],
        spec: ModelSpec,
        backend: str = "auto",
        on_miss: OnMiss = "eager",
        *,
        mode: Mode = "graph",
        outputs: OutputsMode = "fresh",
        validate: str = "strict",
        max_captures: int | None = 128,
        max_nbytes: int | None = None,
        max_fused: int = 16,
        ranges: bool = False,
    ) -> None:
        super().__init__(fn)
        _check_option("on_miss", on_miss, get_args(OnMiss))
        _check_option("outputs", outputs, get_args(OutputsMode))
        self._spec = spec
        self._on_miss = on_miss
        self._outputs = outputs
        self.mode = mode
        self._buckets = Buckets(spec)
        self._reader = CallReader(fn)
        if "live" in self._reader.signature.parameters:
            raise SpecError(
                "the model has a parameter called 'live', which is the runner's own",
                spec=spec.name,
                fix="wrap the model in a function that names it otherwise",
            )
        self._router = Router(fn, spec, self._buckets)
        self._lock = threading.RLock()
        self._tally = Tally()
        self._store = CaptureStore(spec.name, self._tally, self._lock, max_captures, max_nbytes)
        options = CaptureOptions(backend, validate, 0 if ranges else max_fused, ranges)
        self._capturer = Capturer(fn, spec, options, self._buckets, self._store, self._tally, self._lock)
        self._explained = set()
        self._here = _ThisThread()
        self._closed = False

    @property
    def mode(self) -> Mode:
        """`"graph"`, `"checked"` or `"eager"`; may be set between calls."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        _check_option("mode", mode, get_args(Mode))
        self._mode = mode

    @property
    def stats(self) -> RunnerStats:
        """What the runner has done up to now."""
        with self._lock:
            return self._tally.snapshot()

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The captures held, the least recently used first."""
        return self._store.all()

    @property
    def nbytes(self) -> int:
        """Bytes that captures have taken from devices: pools and static inputs."""
        return self._store.nbytes

    def warmup(
        self,
        example: ExampleLike,
        live: Mapping[str, Any] | None = None,
        *,
        progress: bool | None = None,
    ) -> WarmupReport:
        """Capture every combination of bucket sizes, the largest first.

        Captures for other values of inputs that are no tensors, or other sizes of dims that are not bucketed,
        take a warm-up each. Outside mode `"graph"` nothing is done.

        Args:
            example: a call's inputs on the backend's device, padded or cut along its bucketed dims to each
                bucket; or what makes them, called with the bucket's sizes (`example(S=512)`).
            live: live values for all of them; those of an `Example` are taken too. Bucketed dims are live at
                full length.
            progress: show a bar on standard error; None: where that is a terminal.

        Returns:
            Time and memory of every bucket. One that could not be captured is logged and listed in `failed`;
            the others stand.

        Raises:
            CaptureError: not one of several buckets could be captured.
            SpecGraphError: the only bucket could not be captured.
            ReplayError: the runner is closed.
        """
        self._check_open()
        if self._mode != "graph":
            return WarmupReport()
        warmed: set[Any] = set()

        def attempt(sizes: Mapping[str, int]) -> Capture:
            inputs, values = example_at(example, live, sizes)
            call = self._reader.read(inputs)
            if call.unkeyed:
                raise refused(call).within(spec=self._spec.name)
            made = self._capturer.ensure(call, self._router.at(call, sizes), values, frozenset(warmed))
            warmed.add(made.key)
            return made

        return warm_up(self._spec, self._buckets.products(), attempt, progress)

    def __call__(self, *args: Any, live: Mapping[str, Any] | None = None, **inputs: Any) -> Any:
        """Serve a call.

        Args:
            *args: inputs by position.
            live: a value for each live value of the spec. The live length of a bucketed dim is its size in
                the inputs, unless given: then the inputs were padded by the caller.
            **inputs: the model's inputs.

        Returns:
            What the model returns at the live lengths, without gradients.

        Raises:
            PlanError: an input is missing or unknown.
            LayoutError: an input, or a body's result, is not what its layout says.
            ReplayError: a live value is missing or unknown, an input requires a gradient, the call is a miss
                under `on_miss="error"`, or the runner is closed.
        """
        self._check_open()
        session = active_session()
        if self._mode == "eager" or (session is not None and not session.suspended):
            # Under a capture of a larger model, the wrapped one is part of that.
            return self._fn(*args, **inputs)
        call = self._reader.read(self._reader.bound(args, inputs) if args else inputs)
        if torch.is_grad_enabled():
            self._refuse_gradients(call)
        route = self._router.route(call)
        values = self._live_values(live, route)
        if self._mode == "checked":
            padded = self._buckets.resized(ModelInputs.of(call.inputs), route.layouts)
            return self._eager(padded, values, call)
        moved = None
        if not call.unkeyed:
            with self._store.using(route.key) as capture:
                if capture is not None:
                    try:
                        return self._replay(capture, call, values)
                    except MovedWeightError as error:
                        moved = error
        if moved is not None:
            self._store.give_up_all(f"{moved.tensor} has moved")
        return self._miss(call, route, values, moved)

    def _live_values(self, live: Mapping[str, Any] | None, route: Route) -> dict[str, Any]:
        values = check_live(self._spec, live or {}, ReplayError)
        for dim, size in route.lengths.items():
            length = values.setdefault(dim, size)
            if not isinstance(length, int) or not 0 <= length <= size:
                raise ReplayError(
                    f"live length {dim!r} is not one of its inputs' rows",
                    spec=self._spec.name,
                    expected=f"an int from 0 to {size}",
                    actual=repr(length),
                    fix=f"hand in how many rows are live, or leave {dim!r} out where all are",
                )
        return values

    def _replay(self, capture: Capture, call: Call, values: Mapping[str, Any]) -> Any:
        copied, fused = capture.break_nbytes, 0

        def fill_inputs(static: Mapping[str, torch.Tensor]) -> None:
            nonlocal copied, fused
            fused = capture.graph.stats.fused
            for name, value in saved(call.tensors, static).items():
                copied += fill(static[name], value, self._buckets.padding(name))

        def take(result: Any) -> Any:
            nonlocal copied, fused
            fused = capture.graph.stats.fused - fused
            leaves, structure = pytree.tree_flatten(result)
            for index, (leaf, cuts) in enumerate(zip(leaves, capture.cuts, strict=True)):
                if isinstance(leaf, torch.Tensor):
                    part = cut(leaf, cuts, values)
                    if self._outputs == "fresh":
                        part = part.clone()
                        copied += part.nbytes
                    leaves[index] = part
            return pytree.tree_unflatten(leaves, structure)

        outer, self._here.replays = self._here.replays, True
        try:
            result = capture.graph.run(fill_inputs, take, values)
        finally:
            self._here.replays = outer
        with self._lock:
            self._tally.replays += 1
            self._tally.fused_replays += fused
            self._tally.copied_nbytes += copied
        return result

    def _miss(self, call: Call, route: Route, values: Mapping[str, Any], moved: ReplayError | None) -> Any:
        miss = self._explained_miss(call, route, moved)
        too_long = self._buckets.too_long(route.lengths)
        captures = self._on_miss == "capture" and not too_long and miss.reason not in ("unkeyed", "failed")
        # A body that calls its own runner holds the pool, which another thread's capture may wait for.
        captures = captures and not self._here.replays
        with self._lock:
            self._tally.miss(miss.reason)
            is_new = (miss.reason, miss.subject) not in self._explained
            if len(self._explained) >= _MAX_EXPLAINED:
                self._explained.clear()
            self._explained.add((miss.reason, miss.subject))
        if self._on_miss == "error":
            raise moved or ReplayError(
                f"the call matches no capture: {miss}",
                spec=self._spec.name,
                fix="warm up with such a call, add a bucket, or choose on_miss",
            )
        if is_new:
            level = logging.INFO if captures else logging.WARNING
            what = "it is captured now" if captures else "it is run eagerly"
            logger.log(level, "%s: a call matches no capture, %s: %s", self._spec.name, what, miss)
        if captures and self._captured(call, route, values):
            with self._store.using(route.key) as capture:
                if capture is not None:
                    return self._replay(capture, call, values)
        return self._eager(call.inputs, values, call)

    def _captured(self, call: Call, route: Route, values: Mapping[str, Any]) -> bool:
        """Capture a call that missed; False where that fails."""
        try:
            self._capturer.ensure(call, route, values)
        except Exception as error:  # noqa: BLE001  # the call is served all the same; the failure is logged
            name, label = self._spec.name, route.label
            logger.warning("%s: %s could not be captured: %s", name, label, in_one_line(error))
            return False
        return True

    def _explained_miss(self, call: Call, route: Route, moved: ReplayError | None) -> Miss:
        if moved is not None:
            return Miss("moved", moved.tensor, "elsewhere than when it was captured", "")
        for name, problem in call.unkeyed.items():
            return Miss("unkeyed", f"input {name!r}: {problem}", "", "")
        if failure := self._capturer.failure(route.key):
            return Miss("failed", f"the capture of {route.label} failed: {failure}", "", "")
        return explain(self._spec, route.key, route.lengths, self._store.keys())

    def _eager(self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: Call) -> Any:
        """Run through the spec: bodies, live values and checks, no graph."""
        devices = [tensor.device for tensor in call.tensors.values()]
        result = run_checked(
            self._fn, self._spec, inputs, values, devices[0] if devices else torch.device("cpu")
        )
        if not self._buckets.sizes:
            return result
        leaves, structure = pytree.tree_flatten(result)
        pairs = zip(leaves, self._buckets.cuts(result), strict=True)
        return pytree.tree_unflatten(
            [cut(leaf, cuts, values) if isinstance(leaf, torch.Tensor) else leaf for leaf, cuts in pairs],
            structure,
        )

    def _refuse_gradients(self, call: Call) -> None:
        for name, tensor in call.tensors.items():
            if tensor.requires_grad:
                raise ReplayError(
                    "requires a gradient, which a captured graph does not compute",
                    spec=self._spec.name,
                    tensor=f"input {name!r}",
                    fix="call under torch.no_grad() or torch.inference_mode(), pass input.detach(), or set "
                    'mode="eager"',
                )

    def _module_moved(self) -> None:
        self._store.give_up_all("the module was moved")

    def clear(self) -> None:
        """Give up every capture, and try those that failed again.

        For changes of the model that no capture can see: other submodules, hooks, attention processors.
        """
        self._store.give_up_all("cleared")
        self._capturer.forget_failures()

    def close(self) -> None:
        """Give up every capture and its memory; calls are refused from now on, calls under way finish."""
        self._closed = True
        self._store.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ReplayError(
                "the runner is closed", spec=self._spec.name, fix="make another, or close it later"
            )


def _check_option(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(map(repr, known))}, not {value!r}")
