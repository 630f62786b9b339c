"""Framework time of a break in strict mode: a replay less its bodies, launches and copies.

A chain of breaks whose bodies return a tensor made beforehand is replayed, once by specgraph and once by a
bare loop of the same graph launches, body calls and (COPY) copies in the same order. The difference is what
specgraph adds: live values, checks, bookkeeping. What a replay's look at the weights costs is timed apart,
for models of several numbers of parameters. Host time in microseconds; the two alternate, batch by
batch, and the median of the batches' differences is reported, for several runs in a row.

    python -m benchmarks.framework_time --out results.json
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import specgraph as sg
from benchmarks.about import about
from specgraph.executor import CapturedBreak, CapturedGraph, CapturedSegment
from specgraph.executor.weights import WatchedTensor, WeightWatch

BREAKS = 60
WARM_UPS = 20
BATCHES = 9
CALLS = 100
PARAMETER_COUNTS = (10, 1_000, 100_000)

ROWS = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", dtype=sg.like("x"))
made: list[Tensor] = []


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS}, live={"length": "length"})
def copied(x: Tensor, length: int = 0) -> Tensor:
    """A body that costs next to nothing."""
    return made[0]


@sg.graph_break(
    ROWS_OUT,
    inputs={"x": ROWS},
    ownership=sg.Ownership.PASS_THROUGH,
    out="out",
    live={"length": "length"},
)
def passed(x: Tensor, out: Tensor | None = None, length: int = 0) -> Tensor:
    """A body that costs next to nothing, handed its buffer."""
    assert out is not None
    return out


def chain(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`BREAKS` breaks with one op before each."""

    def model(x: Tensor) -> Tensor:
        for _ in range(BREAKS):
            x = fn(x + 1)
        return x + 1

    return model


def host_us(run: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Mean host time of one call over a batch, in microseconds; the device is idle at every start."""
    elapsed = 0.0
    for _ in range(CALLS):
        start = time.perf_counter()
        run()
        elapsed += time.perf_counter() - start
        synchronize()
    return elapsed / CALLS * 1e6


def bare_loop(captured: CapturedGraph, live: dict[str, int]) -> Callable[[], None]:
    """The launches, bodies and copies of a replay, and nothing else."""
    calls: list[Callable[[], object]] = []
    for step in captured.walk(live, **captured.inputs):
        if isinstance(step, CapturedSegment):
            calls.append(step.graph.replay)
        elif isinstance(step, CapturedBreak):
            calls.append(functools.partial(step.body.body, *step.body.args, **step.body.kwargs))
            if step.plan.ownership is sg.Ownership.COPY:
                calls.append(functools.partial(step.outputs["output"].copy_, made[0]))

    def loop() -> None:
        for call in calls:
            call()

    return loop


def measure(
    captured: CapturedGraph, live: dict[str, int], synchronize: Callable[[], None]
) -> dict[str, float]:
    """Host time of a replay and of its bare loop, and their difference a break."""
    loop = bare_loop(captured, live)
    with torch.no_grad():
        for _ in range(WARM_UPS):
            loop()
            captured.replay(live)
        synchronize()
        pairs = [
            (host_us(lambda: captured.replay(live), synchronize), host_us(loop, synchronize))
            for _ in range(BATCHES)
        ]
    return {
        "replay": statistics.median(replay for replay, _ in pairs),
        "bare_loop": statistics.median(bare for _, bare in pairs),
        "framework_per_break": statistics.median(replay - bare for replay, bare in pairs) / BREAKS,
    }


def run(device: torch.device) -> dict[str, Any]:
    """Both ownerships on one device."""
    is_cuda = device.type == "cuda"
    synchronize = torch.cuda.synchronize if is_cuda else lambda: None
    x = torch.randn(256, 64, device=device, dtype=torch.bfloat16)
    made[:] = [torch.randn_like(x)]
    spec = sg.ModelSpec("chain", (), live=("length",))
    live = {"length": 1}
    rows = {}
    for name, fn in (("COPY", copied), ("PASS_THROUGH", passed)):
        captured = sg.capture(chain(fn), spec, {"x": x}, live)
        rows[name] = measure(captured, live, synchronize)
        captured.close()
    watch = {f"{count} parameters": watch_us(count) for count in PARAMETER_COUNTS}
    return {**rows, "weight_watch": watch}


def watch_us(count: int) -> float:
    """Host time of a replay's look at the weights of a model with `count` parameters, in microseconds."""
    owner = torch.nn.ParameterList(torch.zeros(1) for _ in range(count))
    watched = (
        (WatchedTensor(name, owner, name, tensor.data_ptr()), tensor)
        for name, tensor in owner.named_parameters()
    )
    watch = WeightWatch("chain", watched)
    batches = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(CALLS):
            watch.check()
        batches.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(batches)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    runs = [run(torch.device(arguments.device)) for _ in range(arguments.runs)]
    text = json.dumps({**about(), "breaks": BREAKS, "unit": "us of host time", "runs": runs}, indent=1)
    print(text)  # noqa: T201  # a script's output
    if arguments.out is not None:
        arguments.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
