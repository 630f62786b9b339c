"""What a captured graph took to make, and what it has done so far."""

from __future__ import annotations

import attrs


@attrs.define
class ReplayStats:
    """Counts, since the capture.

    Args:
        replays: all of them.
        fused: those that ran a program of their own key; see `fusing`.
        programs: programs made.
        evicted: programs given up, for others or because a weight moved.
    """

    replays: int = 0
    fused: int = 0
    programs: int = 0
    evicted: int = 0


@attrs.frozen
class CaptureTimes:
    """What a capture took, in seconds of host time.

    Args:
        warm_up: the eager run through the spec, on a GPU until it is done there.
        planning: the trace on the host.
        recording: the run under capture; bodies ran in it.
    """

    warm_up: float
    planning: float
    recording: float
