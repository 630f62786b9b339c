"""Named ranges around the steps of a replay, for profilers.

`torch.profiler` shows them as they are; under `torch.autograd.profiler.emit_nvtx()` they are NVTX ranges.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import record_function

from .graph import CapturedBreak, CapturedGraph, CapturedSegment


def add_ranges(graph: CapturedGraph, model: str) -> None:
    """Put a range around every step of a graph: `model: segment 0`, `model: break 0, attention`."""
    segments = breaks = 0
    ranged = []
    for step, run in zip(graph._steps, graph._run, strict=True):
        if isinstance(step, CapturedSegment):
            name, segments = f"segment {segments}", segments + 1
        elif isinstance(step, CapturedBreak):
            name, breaks = f"break {breaks}, {step.plan.name}", breaks + 1
        else:
            name = type(step).__name__
        ranged.append(_ranged(f"{model}: {name}", run))
    graph._run = ranged


def _ranged(name: str, run: Callable[[], object]) -> Callable[[], object]:
    def step() -> object:
        with record_function(name):
            return run()

    return step
