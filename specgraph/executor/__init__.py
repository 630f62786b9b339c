"""plan -> capture -> replay."""

from .capture import capture
from .eager import run_checked
from .graph import CapturedBreak, CapturedGraph, CapturedSegment

__all__ = ["CapturedBreak", "CapturedGraph", "CapturedSegment", "capture", "run_checked"]
