"""Functions that run eagerly between two graphs, declared where they are defined.

Inside a capture of this front end a call of a decorated function is a break. Anywhere else, in another
decorated function's body included, it is an ordinary call, with nothing made or copied. A capture by a spec
that does not name the function refuses the call, since it would end up inside a segment.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from ..callsite import user_line
from ..errors import PlanError, SpecError
from ..intercept import active_session
from .recording import EagerCall, Recording

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)
S = TypeVar("S")


class EagerFunction(Generic[P, R]):
    """A function that is a break wherever a capture calls it; made by `eager_on_graph` and `no_graph`.

    Attributes:
        run_eager: the undecorated function, which never breaks. Of a method it takes `self`.
    """

    __name__: str
    __wrapped__: Callable[P, R]
    run_eager: Callable[P, R]

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        capture_stub: Callable[..., Any] | None = None,
        output_factory: Callable[..., Any] | None = None,
        pass_output: bool = False,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.run_eager = fn
        self._label: str = getattr(fn, "__name__", type(fn).__name__)
        self._capture_stub = capture_stub
        self._output_factory = output_factory
        self._pass_output = pass_output
        if pass_output:
            self._check_pass_output(inspect.signature(fn))

    def _check_pass_output(self, signature: inspect.Signature) -> None:
        if self._output_factory is None:
            raise SpecError(
                "pass_output needs an output_factory, which makes what is passed",
                break_name=self._label,
                fix="give output_factory=, or drop pass_output",
            )
        takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
        if "output" not in signature.parameters and not takes_any:
            raise SpecError(
                "pass_output hands over output=, which the function does not take",
                break_name=self._label,
                actual=f"{self._label}{signature}",
                fix="add a parameter output=None",
            )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        session = active_session()
        if session is None or session.suspended or not session.has_breaks:
            return self.run_eager(*args, **kwargs)
        recording = session.handler
        if not isinstance(recording, Recording):
            raise PlanError(
                "is decorated to run eagerly, but the spec does not declare it",
                break_name=self._label,
                spec=session.spec.name,
                where=user_line(),
                fix="list a BreakSpec for it in ModelSpec.breaks, or call its .run_eager to have it captured",
            )
        if recording.is_making_outputs:
            return self.run_eager(*args, **kwargs)
        call = EagerCall(
            label=self._label,
            fn=self.run_eager,
            capture_stub=self._capture_stub,
            output_factory=self._output_factory,
            pass_output=self._pass_output,
            args=args,
            kwargs=kwargs,
        )
        # A factory and a stub are trusted to make what the function returns, which R cannot express.
        result: R = recording.eager_call(session, call)
        return result

    @overload
    def __get__(self, instance: None, owner: type) -> EagerFunction[P, R]: ...
    @overload
    def __get__(
        self: EagerFunction[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


@overload
def eager_on_graph(enable: Callable[P, R], /) -> EagerFunction[P, R]: ...
@overload
def eager_on_graph(
    enable: bool = True,
    capture_stub: Callable[..., Any] | None = None,
    *,
    output_factory: Callable[..., Any] | None = None,
    pass_output: bool = False,
) -> Callable[[Callable[P, R]], EagerFunction[P, R]]: ...
def eager_on_graph(
    enable: Callable[P, R] | bool = True,
    capture_stub: Callable[..., Any] | None = None,
    *,
    output_factory: Callable[..., Any] | None = None,
    pass_output: bool = False,
) -> EagerFunction[P, R] | Callable[[Callable[P, R]], EagerFunction[P, R]]:
    """Declare a function that runs eagerly wherever a capture calls it. Bare, or with arguments.

    Args:
        enable: False: the function is returned as it is, with a `.run_eager` that is itself.
        capture_stub: runs in its stead during capture only, with the same arguments. Without a factory its
            result must look like the function's; with one it may return None.
        output_factory: called with the call's arguments during capture, returns the function's outputs,
            uninitialised: a tensor, or tuples, lists and dicts of them. They are made in the graph pool,
            which reuses them once the model has dropped them. Without one, what the function returns at
            capture is kept, and outlives the pool's reuse.
        pass_output: hand those outputs to the function as `output=`. It writes them and returns them, or
            None. Outside a capture it is called without, so that `output` needs a default of None.

    Raises:
        SpecError: `pass_output` without `output_factory`, or for a function that takes no `output`.
    """

    def decorate(fn: Callable[P, R]) -> EagerFunction[P, R]:
        if not enable:
            return _undecorated(fn)
        return EagerFunction(
            fn, capture_stub=capture_stub, output_factory=output_factory, pass_output=pass_output
        )

    return decorate if isinstance(enable, bool) else decorate(enable)


@overload
def no_graph(fn: Callable[P, R], /) -> EagerFunction[P, R]: ...
@overload
def no_graph(
    fn: None = None, *, enable: bool = True, capture_stub: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], EagerFunction[P, R]]: ...
@overload
def no_graph(
    fn: Callable[P, R], *, enable: bool = True, capture_stub: Callable[..., Any] | None = None
) -> EagerFunction[P, R]: ...
def no_graph(
    fn: Callable[P, R] | None = None,
    *,
    enable: bool = True,
    capture_stub: Callable[..., Any] | None = None,
) -> EagerFunction[P, R] | Callable[[Callable[P, R]], EagerFunction[P, R]]:
    """Declare a function that runs eagerly wherever a capture calls it. Bare, or with arguments.

    It may return tensors: what it returns at capture is kept, and later results are written back into it.

    Args:
        fn: the function.
        enable: False: the function is returned as it is, with a `.run_eager` that is itself.
        capture_stub: runs in its stead during capture only, with the same arguments; its result must look
            like the function's.
    """

    def decorate(fn: Callable[P, R]) -> EagerFunction[P, R]:
        return EagerFunction(fn, capture_stub=capture_stub) if enable else _undecorated(fn)

    return decorate if fn is None else decorate(fn)


def _undecorated(fn: Callable[P, R]) -> EagerFunction[P, R]:
    fn.run_eager = fn  # type: ignore[attr-defined]  # functions take attributes
    return fn  # type: ignore[return-value]  # the function itself, with all that an EagerFunction offers


def break_graph() -> None:
    """End the segment and begin the next; outside a capture, and in a body, nothing."""
    session = active_session()
    if session is None or session.suspended or not isinstance(session.handler, Recording):
        return
    if not session.handler.is_making_outputs:
        session.handler.split(session)


def force_no_graph() -> None:
    """`break_graph`, under breakable-cuda-graphs' name."""
    break_graph()
