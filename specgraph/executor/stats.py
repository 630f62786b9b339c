"""What a captured graph has done so far."""

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
