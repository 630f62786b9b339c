"""spec -> plan: a fake-tensor trace, and the data it yields."""

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
from .provenance import Origin, Provenance
from .trace import plan

__all__ = [
    "BreakStep",
    "Buffer",
    "CapturePlan",
    "Diagnostic",
    "Memory",
    "Origin",
    "Provenance",
    "SegmentStep",
    "TensorUse",
    "ValueUse",
    "plan",
]
