"""From a call to the capture that would serve it: inputs checked, dims bound, buckets chosen, key made."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import attrs

from ..inputs import ModelInputs, check_inputs
from ..layout import ConcreteLayout
from ..spec import ModelSpec
from .buckets import Buckets
from .keys import Call, CallKey

_MAX_ROUTES = 4096
"""Routes remembered; a server sees few distinct sizes at a time."""


@attrs.frozen(eq=False)
class Route:
    """Where a call goes.

    Args:
        key: of the capture that serves it.
        lengths: sizes of the bucketed dims in the call.
        sizes: the buckets they are padded to.
        layouts: of the static input buffers.
        label: the buckets, or the input sizes, as text.
    """

    key: CallKey
    lengths: Mapping[str, int]
    sizes: Mapping[str, int]
    layouts: Mapping[str, ConcreteLayout]
    label: str


class Router:
    """Routes calls of one callable; remembers the route of calls it has seen.

    Args:
        fn: the callable.
        spec: its spec.
        buckets: of the spec.
    """

    def __init__(self, fn: Callable[..., Any], spec: ModelSpec, buckets: Buckets) -> None:
        self._fn = fn
        self._spec = spec
        self._buckets = buckets
        self._seen: dict[Hashable, Route] = {}

    def route(self, call: Call) -> Route:
        """The smallest buckets that the call fits.

        Raises:
            PlanError: an input is missing, unknown, or needs a gradient.
            LayoutError: an input is not what its layout says.
        """
        if not call.is_plain:
            # What is remembered is kept; a caller's own objects should not be.
            return self._made(call, None)
        exact = call.exact()
        route = self._seen.get(exact)
        if route is None:
            route = self._made(call, None)
            if len(self._seen) >= _MAX_ROUTES:
                self._seen.clear()
            self._seen[exact] = route
        return route

    def at(self, call: Call, sizes: Mapping[str, int]) -> Route:
        """The route of the call, were its bucketed dims of these sizes.

        Raises:
            PlanError, LayoutError: as `route` does.
        """
        return self._made(call, sizes)

    def _made(self, call: Call, sizes: Mapping[str, int] | None) -> Route:
        apart = ModelInputs.of(call.inputs)
        dims = check_inputs(self._spec, self._fn, apart)
        lengths = self._buckets.lengths(apart.tensors) if sizes is None else sizes
        sizes = self._buckets.smallest(lengths) if sizes is None else sizes
        layouts = self._buckets.layouts(apart, dims, sizes)
        label = " ".join(f"{dim}={size}" for dim, size in sizes.items())
        label = label or ", ".join(f"{name} {layout}" for name, layout in layouts.items())
        return Route(call.key(layouts), lengths, sizes, layouts, label or "without tensors")
