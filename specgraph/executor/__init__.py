"""plan -> capture -> replay."""

from .capture import capture
from .eager import run_checked
from .graph import CapturedBreak, CapturedGraph, CapturedSegment
from .runner import GraphRunner
from .runner_stats import RunnerStats
from .warmup import WarmupReport

__all__ = [
    "CapturedBreak",
    "CapturedGraph",
    "CapturedSegment",
    "GraphRunner",
    "RunnerStats",
    "WarmupReport",
    "capture",
    "run_checked",
]
