"""Making one capture for a runner: room for it, the capture, and its place in the store."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from ..inputs import ModelInputs
from ..planner.trace import plan
from ..spec import ModelSpec
from .buckets import Buckets
from .capture import capture
from .graph import CapturedGraph
from .keys import Call, CallKey
from .ranges import add_ranges
from .routing import Route
from .runner_stats import Tally
from .store import Capture, CaptureStore

logger = logging.getLogger("specgraph")

_MAX_FAILURES = 1024


@attrs.frozen
class CaptureOptions:
    """How a runner captures; see `GraphRunner`."""

    backend: str
    validate: str
    max_fused: int
    ranges: bool


class Capturer:
    """Makes captures, one at a time, whatever threads ask for them.

    Args:
        fn: the callable.
        spec: its spec.
        options: how to capture.
        buckets: of the spec.
        store: where captures go.
        tally: counts captures and failures.
        lock: guards the tally.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        spec: ModelSpec,
        options: CaptureOptions,
        buckets: Buckets,
        store: CaptureStore,
        tally: Tally,
        lock: threading.RLock,
    ) -> None:
        self._fn = fn
        self._spec = spec
        self._options = options
        self._buckets = buckets
        self._store = store
        self._tally = tally
        self._lock = lock
        self._one_at_a_time = threading.RLock()
        self._failures: dict[CallKey, str] = {}

    def failure(self, key: CallKey) -> str:
        """Why the last attempt to capture `key` failed; empty where it did not."""
        return self._failures.get(key, "")

    def forget_failures(self) -> None:
        """Let every key be tried again."""
        self._failures.clear()

    def ensure(
        self, call: Call, route: Route, live: Mapping[str, Any], protected: frozenset[CallKey] = frozenset()
    ) -> Capture:
        """The capture for a route; made where there is none.

        Args:
            call: whose inputs, resized to the route's layouts, the capture is warmed up with.
            route: the route.
            live: live values that go with them.
            protected: captures that are not given up to make room.

        Raises:
            Exception: whatever the capture fails with; it is remembered, and every other capture stands.
        """
        with self._one_at_a_time:
            with self._store.using(route.key) as held:
                if held is not None:
                    return held
            try:
                made = self._fitting(call, route, live, protected)
            except Exception as error:
                with self._lock:
                    self._tally.failures += 1
                if len(self._failures) >= _MAX_FAILURES:
                    self._failures.clear()
                self._failures[route.key] = in_one_line(error)
                raise
            self._failures.pop(route.key, None)
            self._store.add(made)
            with self._lock:
                self._tally.captures += 1
        logger.info(
            "%s: captured %s in %.2f s, %.1f MiB more",
            self._spec.name,
            made.label,
            made.seconds,
            made.grown_nbytes / 2**20,
        )
        return made

    def _fitting(
        self, call: Call, route: Route, live: Mapping[str, Any], protected: frozenset[CallKey]
    ) -> Capture:
        """A capture within the limit in bytes.

        What is predicted is a pool of its own. In a pool that others have cut up it may take more; then it is
        made again without them.
        """
        made = self._make(call, route, live, protected)
        if self._store.fits(made):
            return made
        made.close()
        if protected or not self._store.all():
            raise CaptureError(
                "the capture took more memory than its plan predicts, and is past the limit",
                spec=self._spec.name,
                actual=f"{made.grown_nbytes:,} bytes more",
                fix="raise max_nbytes, or capture fewer or smaller buckets",
            )
        self._store.give_up_all("their pool is too cut up for another capture within the limit")
        return self._fitting(call, route, live, protected)

    def _make(
        self, call: Call, route: Route, live: Mapping[str, Any], protected: frozenset[CallKey]
    ) -> Capture:
        started = time.perf_counter()
        inputs = self._buckets.resized(ModelInputs.of(call.inputs), route.layouts)
        static_nbytes = sum(layout.span_nbytes for layout in route.layouts.values())
        devices = [tensor.device for tensor in call.tensors.values()]
        device = devices[0] if devices else torch.device("cpu")
        with _without_autocast_cache():
            predicted = 0
            if self._store.limits_nbytes:
                predicted = plan(self._fn, self._spec, inputs, live).memory.pool_peak
            self._store.make_room(predicted, static_nbytes, device, protected)
            pool = self._store.pool(device)
            before = pool.reserved_nbytes if pool else 0
            graph = capture(
                self._fn,
                self._spec,
                inputs,
                live,
                backend=self._options.backend,
                validate=self._options.validate,
                pool=pool,
                max_fused=self._options.max_fused,
            )
        try:
            self._buckets.check_outputs(graph.outputs, graph.inputs)
            cuts = self._buckets.cuts(graph.outputs)
            _check_copyable(graph.outputs)
        except BaseException:
            _close(graph)
            raise
        if self._options.ranges:
            add_ranges(graph, self._spec.name)
        return Capture(
            key=route.key,
            label=route.label,
            sizes=route.sizes,
            cuts=cuts,
            graph=graph,
            pool=graph.pool,
            seconds=time.perf_counter() - started,
            grown_nbytes=graph.pool.reserved_nbytes - before + static_nbytes,
        )


def _close(graph: CapturedGraph) -> None:
    with graph.pool.exclusive():
        graph.close()


def _check_copyable(outputs: Any) -> None:
    """Refuse results that hold tensors out of sight: the next replay would change them under the caller."""
    for leaf in pytree.tree_leaves(outputs):
        inside = getattr(leaf, "__dict__", {})
        if not isinstance(leaf, torch.Tensor) and any(
            isinstance(each, torch.Tensor) for each in inside.values()
        ):
            kind = type(leaf).__qualname__
            raise CaptureError(
                f"the model returns a {kind}, and the tensors in it cannot be copied out",
                fix=f"register {kind} with torch.utils._pytree.register_pytree_node, or return tensors",
            )


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Keep autocast from remembering casts of weights that were made in the pool, or by fake tensors."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def in_one_line(error: BaseException) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def refused(call: Call) -> CaptureError:
    """The error for a call with inputs that no key can hold."""
    name, problem = next(iter(call.unkeyed.items()))
    return CaptureError(
        f"{problem}, so that no capture can be told by it",
        tensor=f"input {name!r}",
        fix="pass tensors and hashable values, declare it live, or bind it to the callable beforehand",
    )
