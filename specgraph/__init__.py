"""CUDA graphs for models that cannot be captured whole.

`import specgraph as sg`; the names below are the public ones. They are loaded when first used, so that
the command line can answer without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .errors import (
        CaptureError,
        HostSyncError,
        LayoutError,
        MovedWeightError,
        PlanError,
        ReplayError,
        SpecError,
        SpecGraphError,
    )
    from .executor import CapturedGraph, GraphRunner, RunnerStats, WarmupReport, capture
    from .intercept import graph_break
    from .layout import TensorLayout, like
    from .planner import BreakStep, CapturePlan, SegmentStep, plan
    from .spec import BreakSpec, Example, ModelSpec, Ownership, Preset
    from .specfile import dump_spec, load_spec

__all__ = [
    "BreakSpec",
    "BreakStep",
    "CaptureError",
    "CapturePlan",
    "CapturedGraph",
    "Example",
    "GraphRunner",
    "HostSyncError",
    "LayoutError",
    "ModelSpec",
    "MovedWeightError",
    "Ownership",
    "PlanError",
    "Preset",
    "ReplayError",
    "RunnerStats",
    "SegmentStep",
    "SpecError",
    "SpecGraphError",
    "TensorLayout",
    "WarmupReport",
    "capture",
    "dump_spec",
    "graph_break",
    "like",
    "load_spec",
    "plan",
]

_ROOMS = {
    "errors": (
        "CaptureError",
        "HostSyncError",
        "LayoutError",
        "MovedWeightError",
        "PlanError",
        "ReplayError",
        "SpecError",
        "SpecGraphError",
    ),
    "executor": ("CapturedGraph", "GraphRunner", "RunnerStats", "WarmupReport", "capture"),
    "intercept": ("graph_break",),
    "layout": ("TensorLayout", "like"),
    "planner": ("BreakStep", "CapturePlan", "SegmentStep", "plan"),
    "spec": ("BreakSpec", "Example", "ModelSpec", "Ownership", "Preset"),
    "specfile": ("dump_spec", "load_spec"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        room = _ROOM_OF.get(name)
        if room is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{room}", __name__), name)
        globals()[name] = value
        return value
