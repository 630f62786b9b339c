"""Timing a model, bit for bit the same work, several ways side by side.

A contender prepares its own static inputs and a call without arguments that runs the work on them. Before
anything is timed, each is handed fresh inputs and must return what eager returns for them. Then batches of
calls take turns, a batch of every contender in each round, so that a clock that drifts is everyone's.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from .executor import capture
from .executor.stats import CaptureTimes
from .inputs import ModelInputs
from .layout import empty
from .spec import Example, ModelSpec, Preset
from .substitution import substituted
from .verify import build_preset, first_output_difference, refuse_weightless, with_groups


@attrs.frozen
class Protocol:
    """How calls are timed.

    Args:
        warm_ups: calls before the first batch.
        batches: batches; medians are taken over them.
        calls: in a batch; the device is waited for at its end.
        host_calls: in a batch of calls timed one by one, each on an idle device.
    """

    warm_ups: int = 20
    batches: int = 9
    calls: int = 200
    host_calls: int = 20


DEFAULT = Protocol()


@attrs.frozen(eq=False)
class Case:
    """The work: a model, its spec, and inputs for it.

    Args:
        fn: the model.
        spec: its spec.
        example: inputs, which are captured and timed, and live values.
        device: where it runs.
    """

    fn: Callable[..., Any]
    spec: ModelSpec
    example: Example
    device: torch.device

    @property
    def live(self) -> Mapping[str, Any]:
        """The live values."""
        return self.example.live

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The inputs."""
        return self.example.inputs

    def other_inputs(self) -> Any:
        """Inputs to compare results on: every number with the other sign, padding left as it was."""
        return pytree.tree_map_only(torch.Tensor, _negated, dict(self.inputs))

    def static_inputs(self) -> dict[str, Any]:
        """Keyword arguments on static buffers of one's own, which hold the inputs."""
        apart = ModelInputs.of(self.inputs)
        layouts = apart.static_layouts(self.spec)
        static = {name: empty(layout, self.device) for name, layout in layouts.items()}
        kwargs = apart.with_tensors(static)
        fill(kwargs, self.inputs)
        return kwargs


@attrs.frozen(eq=False)
class Ready:
    """A contender that may be called.

    Args:
        inputs: its static inputs, as keyword arguments.
        call: runs the work on them; returns the outputs.
        active: to be entered around calls.
        pool_nbytes: bytes that its graph pools have taken from the device; None where it has none.
        times: what its capture took; None where there was none.
    """

    inputs: Mapping[str, Any]
    call: Callable[[], Any]
    active: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    pool_nbytes: int | None = None
    times: CaptureTimes | None = None


@attrs.frozen(eq=False)
class Contender:
    """A way to run the work.

    Args:
        name: of its row.
        prepare: makes it ready.
        is_exact: it must return eager's very bits.
    """

    name: str
    prepare: Callable[[Case], Ready]
    is_exact: bool = True


@attrs.frozen
class Row:
    """What was measured of one contender. None: not measured.

    Args:
        name: of the contender.
        wall_us: time a call in a batch, in microseconds: the median of the batches.
        host_us: time until a call returns, on an idle device, in microseconds.
        capture_s: warm-up and recording, in seconds.
        record_s: the recording alone.
        planning_s: planning.
        pool_nbytes: bytes its graph pools have taken.
        peak_nbytes: the most that was allocated from preparation to the first calls, above what was before.
        difference: how its results differ from eager's; empty where they are the same bits.
        problem: why it was not timed.
    """

    name: str
    wall_us: float | None = None
    host_us: float | None = None
    capture_s: float | None = None
    record_s: float | None = None
    planning_s: float | None = None
    pool_nbytes: int | None = None
    peak_nbytes: int | None = None
    difference: str = ""
    problem: str = ""

    @property
    def is_wrong(self) -> bool:
        """It had to return eager's bits, and does not."""
        return self.problem == _WRONG


_WRONG = "its results are not eager's"


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    return -tensor if tensor.is_floating_point() or tensor.is_complex() else tensor


class NotMeasured(Exception):
    """Why a contender does not run this work here."""


def fill(static: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Copy the tensors among `inputs` into those of `static`."""
    with torch.no_grad():
        into, source = ModelInputs.of(static).tensors, ModelInputs.of(inputs).tensors
        for name, buffer in into.items():
            buffer.copy_(source[name])


def warm_up(case: Case, static: Mapping[str, Any], runs: int = 3) -> float:
    """Run the model a few times as before a capture, on a side stream; the seconds it took."""
    start = time.perf_counter()
    stream = torch.cuda.Stream(case.device)
    stream.wait_stream(torch.cuda.current_stream(case.device))
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(runs):
            case.fn(**static)
    torch.cuda.synchronize(case.device)
    return time.perf_counter() - start


def pool_nbytes(handle: Any) -> int:
    """Bytes that a CUDA graph pool has taken from the device."""
    return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(mempool_id=handle))


def prepare_eager(case: Case) -> Ready:
    """The model, with its breaks' bodies in place."""
    static = case.static_inputs()

    def call() -> Any:
        with torch.no_grad():
            return case.fn(**static)

    return Ready(static, call, lambda: substituted(case.spec, case.fn, case.live))


def prepare_whole_graph(case: Case) -> Ready:
    """Bodies and all in one CUDA graph: what a replay cannot be faster than."""
    if case.device.type != "cuda":
        raise NotMeasured("only a GPU has graphs of its own")
    static = case.static_inputs()
    graph = torch.cuda.CUDAGraph()
    with substituted(case.spec, case.fn, case.live):
        warm = warm_up(case, static)
        start = time.perf_counter()
        with torch.no_grad(), torch.cuda.graph(graph):
            outputs = case.fn(**static)
        times = CaptureTimes(warm, 0.0, time.perf_counter() - start)

    def call() -> Any:
        graph.replay()
        return outputs

    return Ready(static, call, pool_nbytes=pool_nbytes(graph.pool()), times=times)


def prepare_segmented(case: Case) -> Ready:
    """A capture whose bodies all stay eager."""
    return _prepare_captured(case, max_fused=0)


def prepare_fused(case: Case) -> Ready:
    """A capture whose fusable bodies are captured too."""
    if not any(each.fusable for each in case.spec.breaks):
        raise NotMeasured("no break of the spec is declared fusable")
    return _prepare_captured(case, max_fused=16)


def _prepare_captured(case: Case, max_fused: int) -> Ready:
    captured = capture(case.fn, case.spec, case.inputs, case.live, max_fused=max_fused)
    start = time.perf_counter()
    captured.prefuse(case.live)
    fusing = time.perf_counter() - start
    if max_fused and not captured.stats.programs:
        raise NotMeasured("nothing could be fused; the log says why")
    live = dict(case.live)
    outputs, replay = captured.outputs, captured.replay
    times = attrs.evolve(captured.times, recording=captured.times.recording + fusing)

    def call() -> Any:
        replay(live)
        return outputs

    apart = ModelInputs.of(case.inputs)
    nbytes = captured.pool.reserved_nbytes
    if captured.stats.programs:
        nbytes += captured.pool.late.reserved_nbytes
    return Ready(apart.with_tensors(dict(captured.inputs)), call, pool_nbytes=nbytes, times=times)


OWN = (
    Contender("eager", prepare_eager),
    Contender("one whole graph", prepare_whole_graph),
    Contender("specgraph, segmented", prepare_segmented),
    Contender("specgraph, fused", prepare_fused),
)
"""The contenders that need nothing but torch."""


def bench(
    case: Case,
    contenders: Sequence[Contender] = OWN,
    protocol: Protocol = DEFAULT,
    on_step: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Prepare each contender, compare its results with eager's, and time them in turns.

    Args:
        case: the work.
        contenders: one row each.
        protocol: how to time.
        on_step: told what is done next.
    """
    ready: dict[str, Ready] = {}
    rows = {}
    expected = None
    for each in contenders:
        on_step(f"preparing {each.name}")
        row = Row(each.name)
        try:
            made, row = _prepared(case, each)
        except NotMeasured as reason:
            rows[each.name] = Row(each.name, problem=str(reason))
            continue
        except Exception as error:  # noqa: BLE001  # one that fails is a row that says so
            message = str(error).strip().partition("\n")[0]
            rows[each.name] = Row(each.name, problem=f"{type(error).__name__}: {message}")
            continue
        results = _outputs_of(made, case.other_inputs())
        fill(made.inputs, case.inputs)
        if expected is None:
            expected = results
        difference = first_output_difference("eager", results, expected)
        text = "" if difference is None else str(difference)
        rows[each.name] = attrs.evolve(row, difference=text)
        if text and each.is_exact:
            rows[each.name] = attrs.evolve(rows[each.name], problem=_WRONG)
            continue
        ready[each.name] = made
    del expected
    for name, (wall, host) in _timed(ready, case.device, protocol, on_step).items():
        rows[name] = attrs.evolve(rows[name], wall_us=wall, host_us=host)
    return list(rows.values())


def _prepared(case: Case, contender: Contender) -> tuple[Ready, Row]:
    """Make a contender ready and call it twice, watching the device's memory."""
    is_cuda = case.device.type == "cuda"
    gc.collect()
    before = 0
    if is_cuda:
        torch.cuda.synchronize(case.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(case.device)
        before = torch.cuda.memory_allocated(case.device)
    made = contender.prepare(case)
    with made.active():
        for _ in range(2):
            made.call()
    _wait_for(case.device)
    peak = torch.cuda.max_memory_allocated(case.device) - before if is_cuda else None
    times = made.times
    return made, Row(
        contender.name,
        capture_s=times.warm_up + times.recording if times else None,
        record_s=times.recording if times else None,
        planning_s=times.planning if times else None,
        pool_nbytes=made.pool_nbytes,
        peak_nbytes=peak,
    )


def _outputs_of(made: Ready, inputs: Mapping[str, Any]) -> Any:
    """What the contender returns for these inputs, as tensors of their own."""
    fill(made.inputs, inputs)
    with made.active():
        return pytree.tree_map_only(torch.Tensor, torch.clone, made.call())


def _timed(
    ready: Mapping[str, Ready], device: torch.device, protocol: Protocol, on_step: Callable[[str], None]
) -> dict[str, tuple[float, float]]:
    """Wall and host time of a call, in microseconds, by contender."""
    walls: dict[str, list[float]] = {name: [] for name in ready}
    hosts: dict[str, list[float]] = {name: [] for name in ready}
    for name, each in ready.items():
        on_step(f"warming up {name}")
        with each.active():
            for _ in range(protocol.warm_ups):
                each.call()
    for batch in range(protocol.batches):
        on_step(f"batch {batch + 1} of {protocol.batches}")
        for name, each in ready.items():
            with each.active(), _no_collection():
                walls[name].append(_wall_us(each.call, device, protocol.calls))
                hosts[name].append(_host_us(each.call, device, protocol.host_calls))
    return {name: (statistics.median(walls[name]), statistics.median(hosts[name])) for name in ready}


def _wall_us(call: Callable[[], object], device: torch.device, calls: int) -> float:
    _wait_for(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _wait_for(device)
    return (time.perf_counter() - start) / calls * 1e6


def _host_us(call: Callable[[], object], device: torch.device, calls: int) -> float:
    elapsed = 0.0
    for _ in range(calls):
        _wait_for(device)
        start = time.perf_counter()
        call()
        elapsed += time.perf_counter() - start
    return elapsed / calls * 1e6


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def bench_preset(
    spec: ModelSpec,
    preset: Preset,
    *,
    dims: Mapping[str, int] | None = None,
    device: torch.device | None = None,
    protocol: Protocol = DEFAULT,
    on_step: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """`bench` of a preset's model.

    Raises:
        SpecError: the preset is for planning only.
    """
    refuse_weightless(spec, preset, "timed")
    spec = with_groups(spec, preset)
    built = build_preset(preset, dims or {}, device)
    return bench(Case(built.fn, spec, built.example(seed=0), built.device), OWN, protocol, on_step)


def to_json(rows: Sequence[Row]) -> str:
    """The rows as a JSON list."""
    return json.dumps([attrs.asdict(row) for row in rows], indent=1)
