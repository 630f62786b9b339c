"""What a runner has done, counted."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .misses import Reason


@attrs.frozen
class RunnerStats:
    """What a runner has done up to now.

    Args:
        replays: calls served by a capture.
        fused_replays: those in which fusable bodies were part of the graphs.
        misses: calls that matched no capture, by reason.
        captures: captures made.
        failures: captures that failed.
        evictions: captures given up, to make room or because what they read has moved.
        copied_nbytes: bytes copied by replays: into static inputs, by breaks that COPY, and out of the static
            outputs.
    """

    replays: int
    fused_replays: int
    misses: Mapping[Reason, int]
    captures: int
    failures: int
    evictions: int
    copied_nbytes: int


@attrs.define
class Tally:
    """The counters behind `RunnerStats`; whoever changes them holds the runner's lock."""

    replays: int = 0
    fused_replays: int = 0
    misses: dict[Reason, int] = attrs.field(factory=dict)
    captures: int = 0
    failures: int = 0
    evictions: int = 0
    copied_nbytes: int = 0

    def miss(self, reason: Reason) -> None:
        """Count a miss."""
        self.misses[reason] = self.misses.get(reason, 0) + 1

    def snapshot(self) -> RunnerStats:
        """The counters as they are."""
        return RunnerStats(
            replays=self.replays,
            fused_replays=self.fused_replays,
            misses=dict(self.misses),
            captures=self.captures,
            failures=self.failures,
            evictions=self.evictions,
            copied_nbytes=self.copied_nbytes,
        )
