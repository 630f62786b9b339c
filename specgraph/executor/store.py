"""The captures a runner holds: found by key, used by any thread, given up least recently used first.

A capture in use is never closed: one that is given up meanwhile leaves the store at once and is closed by
the last thread that uses it. All captures on one device share a pool. A pool keeps what it has taken from
the device for its next capture; it is given up with its last one.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping

import attrs
import torch

from ..errors import CaptureError
from .backends import Pool
from .buckets import Cuts
from .graph import CapturedGraph
from .keys import CallKey
from .runner_stats import Tally

logger = logging.getLogger("specgraph")


@attrs.define(eq=False)
class Capture:
    """One capture in a runner's store.

    Args:
        label: its bucket sizes, or its input sizes, as text.
        sizes: its bucket sizes.
        cuts: where each leaf of its outputs has bucketed axes.
        graph: the captured graph. Its `inputs` are the static buffers; a caller who writes those and passes
            them, or their first rows, saves the copy.
        seconds: that planning, warm-up and capture took.
        grown_nbytes: that the pool and the static inputs took from the device.
    """

    key: CallKey
    label: str
    sizes: Mapping[str, int]
    cuts: tuple[Cuts, ...]
    graph: CapturedGraph
    pool: Pool
    seconds: float
    grown_nbytes: int
    users: int = 0
    retired: bool = False

    @property
    def static_nbytes(self) -> int:
        """Bytes of the static inputs, which are outside the pool."""
        return sum(each.nbytes for each in self.graph.inputs.values())

    @property
    def break_nbytes(self) -> int:
        """Bytes that breaks copy in one replay."""
        return sum(each.copied_nbytes for each in self.graph.plan.breaks)

    def close(self) -> None:
        """Close the graph, between two replays of its pool, when the device has done the last.

        Its static inputs go back to the allocator, which knows of the stream they were made on and of none
        that replays have used them on.
        """
        with self.pool.exclusive():
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is not None and accelerator.type == self.pool.device.type:
                torch.accelerator.synchronize(self.pool.device)
            self.graph.close()


class CaptureStore:
    """Captures by key.

    Args:
        model: name of the `ModelSpec`.
        tally: counts evictions.
        lock: guards the store and the tally.
        max_captures: how many are held at most; None: any number.
        max_nbytes: bytes they take from devices at most, pools and static inputs together; None: any number.
    """

    def __init__(
        self,
        model: str,
        tally: Tally,
        lock: threading.RLock,
        max_captures: int | None,
        max_nbytes: int | None,
    ) -> None:
        self._model = model
        self._tally = tally
        self._lock = lock
        self._max_captures = max_captures
        self._max_nbytes = max_nbytes
        self._closed = False
        self._held: collections.OrderedDict[CallKey, Capture] = collections.OrderedDict()

    @property
    def limits_nbytes(self) -> bool:
        """True where a limit in bytes was set."""
        return self._max_nbytes is not None

    @property
    def nbytes(self) -> int:
        """Bytes taken from devices: what pools have reserved, and the static inputs."""
        return _nbytes(self.all())

    def fits(self, capture: Capture) -> bool:
        """True where one more capture, as it was measured, is within the limit in bytes."""
        return self._max_nbytes is None or _nbytes((*self.all(), capture)) <= self._max_nbytes

    def all(self) -> tuple[Capture, ...]:
        """The captures, the least recently used first."""
        with self._lock:
            return tuple(self._held.values())

    def keys(self) -> tuple[CallKey, ...]:
        """Their keys."""
        with self._lock:
            return tuple(self._held)

    def pool(self, device: torch.device) -> Pool | None:
        """The pool that captures on a device share; None before the first."""
        with self._lock:
            return next((each.pool for each in self._held.values() if each.pool.device == device), None)

    @contextlib.contextmanager
    def using(self, key: CallKey) -> Iterator[Capture | None]:
        """The capture for `key`, if there is one, held open for the duration."""
        with self._lock:
            capture = self._held.get(key)
            if capture is not None:
                self._held.move_to_end(key)
                capture.users += 1
        try:
            yield capture
        finally:
            if capture is not None:
                with self._lock:
                    capture.users -= 1
                    closes = capture.retired and capture.users == 0
                if closes:
                    capture.close()

    def add(self, capture: Capture) -> None:
        """Hold a capture; after `close`, close it."""
        with self._lock:
            self._held[capture.key] = capture
            closed = self._closed
        if closed:
            self._release(capture)

    def give_up(self, capture: Capture, why: str) -> None:
        """Let go of a capture, if it is still held."""
        if self._release(capture):
            with self._lock:
                self._tally.evictions += 1
            logger.info("%s: capture %s is given up: %s", self._model, capture.label, why)

    def give_up_all(self, why: str) -> None:
        """Let go of every capture."""
        for capture in self.all():
            self.give_up(capture, why)

    def close(self) -> None:
        """Let go of every capture, as the end of the runner and no eviction, and hold none from now on."""
        self._closed = True
        for capture in self.all():
            self._release(capture)

    def _release(self, capture: Capture) -> bool:
        with self._lock:
            if self._held.get(capture.key) is not capture:
                return False
            del self._held[capture.key]
            capture.retired = True
            closes = capture.users == 0
        if closes:
            capture.close()
        return True

    def make_room(
        self, pool_nbytes: int, static_nbytes: int, device: torch.device, protected: frozenset[CallKey]
    ) -> None:
        """Give up captures, the least recently used first, until one more fits.

        Args:
            pool_nbytes: that the capture to come needs in a pool, by its plan.
            static_nbytes: of its static inputs.
            device: where it will be.
            protected: captures to keep.

        Raises:
            CaptureError: it would not fit next to those.
        """
        while problem := self._too_full(pool_nbytes, static_nbytes, device):
            victim = next((each for each in self.all() if each.key not in protected), None)
            if victim is None:
                raise CaptureError(
                    f"one more capture would be past the limit: {problem}",
                    spec=self._model,
                    fix="raise max_captures or max_nbytes, or capture fewer or smaller buckets",
                )
            self.give_up(victim, f"room for another is needed, {problem}")

    def _too_full(self, pool_nbytes: int, static_nbytes: int, device: torch.device) -> str:
        if self._max_captures is not None and len(self._held) >= self._max_captures:
            return f"{len(self._held)} captures are held, the limit is {self._max_captures}"
        if self._max_nbytes is None:
            return ""
        pool = self.pool(device)
        if pool is not None:
            # What the pool has taken serves the next capture too, but for what outputs and leaks are in.
            pool_nbytes = max(0, pool_nbytes + pool.allocated_nbytes - pool.reserved_nbytes)
        held, more = self.nbytes, pool_nbytes + static_nbytes
        if held + more <= self._max_nbytes:
            return ""
        return f"{held:,} bytes are held, {more:,} more are needed, the limit is {self._max_nbytes:,}"


def _nbytes(captures: tuple[Capture, ...]) -> int:
    pools = {id(each.pool): each.pool for each in captures}
    reserved = sum(pool.reserved_nbytes for pool in pools.values())
    return reserved + sum(each.static_nbytes for each in captures)
