"""A model run without breaks: what each break's target is called by is bound to something else for a while.

For comparisons: the same work eagerly, captured whole, or broken by other means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from .intercept import BreakFunction, patch_place
from .spec import BreakSpec, ModelSpec
from .targets import NamedTarget, resolve_target

Body: TypeAlias = Callable[..., Any]

Substitute: TypeAlias = Callable[[BreakSpec, Body], Body]
"""Of a break and its body, with the live values filled in, to what the model is to call."""


def the_body(spec: BreakSpec, body: Body) -> Body:
    """The substitute that is the body itself."""
    return body


def _as_it_is(call: Body) -> Body:
    return call


@contextlib.contextmanager
def substituted(
    spec: ModelSpec,
    fn: Callable[..., Any],
    live: Mapping[str, Any],
    substitute: Substitute = the_body,
    decorate: Callable[[Body], Body] = _as_it_is,
) -> Iterator[None]:
    """Have the model call `substitute` of each break where it calls the break's target.

    Inside a substitute every target is itself. One that is a dispatcher op is left as it is everywhere: no
    name stands for it. Not for use on several threads at once.

    Args:
        spec: whose breaks.
        fn: the callable that will run; submodule globs look in it.
        live: a value for each live value of the spec.
        substitute: made once for each target.
        decorate: applied to what is bound, outside everything else.

    Raises:
        SpecError: a target cannot be resolved.
    """
    guard = _Guard()
    with contextlib.ExitStack() as stack:
        for each in spec.breaks:
            if isinstance(each.target, BreakFunction):
                function, original = each.target, each.target.fn
                call = substitute(each, _filled_in(each, original, live))
                stack.callback(setattr, function, "fn", original)
                function.fn = decorate(guard.around(call, original))
                continue
            for target in resolve_target(each, fn):
                if isinstance(target, NamedTarget):
                    original = target.site.original
                    call = substitute(each, _filled_in(each, original, live))
                    bound = decorate(guard.around(call, original))
                    for place in target.places:
                        patch_place(stack, place, bound)
        yield


class _Guard:
    """Inside a substitute every call is an ordinary one, as it is inside a break's body."""

    def __init__(self) -> None:
        self._is_inside = False

    def around(self, call: Body, original: Body) -> Body:
        """`call`; inside any call made through this guard, `original`."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return original(*args, **kwargs)
            self._is_inside = True
            try:
                return call(*args, **kwargs)
            finally:
                self._is_inside = False

        return guarded


def _filled_in(spec: BreakSpec, original: Body, live: Mapping[str, Any]) -> Body:
    """The break's body, called with these live values."""
    body = spec.body or original
    if not spec.live:
        return body
    values = {parameter: live[name] for parameter, name in spec.live.items()}

    def call(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **{**kwargs, **values})

    return call
