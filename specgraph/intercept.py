"""How a call to a break's target is seen while planning and capturing.

A `Session` is active on one thread from `with session:` on. While it is, calls of the model's break
targets are bound to their specs and handed to the session's handler, and every other dispatcher op goes
to the handler's `on_op`. Names are patched for as long as that lasts and put back on every way out;
other threads, and calls made inside a body, get the target itself. One session at a time exists in a
process, so that patches never nest.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .calls import BreakCall, bind_call
from .callsite import user_line
from .errors import CaptureError, LayoutError, PlanError, SpecError
from .layout import TensorLayout
from .ops import composite_op_of, is_composite, schema_arguments
from .spec import BreakSpec, ModelSpec, Outputs, Ownership
from .targets import BreakSite, NamedTarget, OpTarget, Place, resolve_target

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)
S = TypeVar("S")


class BreakHandler(Protocol):
    """What planning, capturing and checked eager runs do with what a session sees."""

    def on_break(self, call: BreakCall) -> object:
        """Stand in for the call; the result is what the model gets."""

    def on_op(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run an op that is part of a segment."""

    def on_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run a function of torch's Python API; its ops arrive at `on_op`."""

    @property
    def segment_name(self) -> str:
        """What messages call the segment that ops now go to; empty where ops simply run."""


class _Active(threading.local):
    session: Session | None = None


_active = _Active()
_one_session = threading.RLock()


def active_session() -> Session | None:
    """The session that this thread is in; inside a body it is there, but suspended."""
    return _active.session


class BreakFunction(Generic[P, R]):
    """A function that is a graph break wherever a capture calls it; made by `graph_break`.

    Outside planning and capture a call is an ordinary call of the function. `spec` is its `BreakSpec`.
    """

    spec: BreakSpec

    def __init__(self, fn: Callable[P, R]) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        session = _active.session
        if session is None or session.suspended or not session.has_breaks:
            return self.fn(*args, **kwargs)
        # What stands in for the call has the layouts the spec gives it, which R cannot express.
        stand_in: R = session.break_call(session.site_of(self), args, kwargs)
        return stand_in

    @overload
    def __get__(self, instance: None, owner: type) -> BreakFunction[P, R]: ...
    @overload
    def __get__(
        self: BreakFunction[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def graph_break(
    outputs: Outputs,
    *,
    inputs: Mapping[str, TensorLayout] | None = None,
    ownership: Ownership = Ownership.COPY,
    out: str | tuple[str, ...] | None = None,
    mutates: str | tuple[str, ...] = (),
    body: Callable[..., Any] | None = None,
    live: Mapping[str, str] | None = None,
    capture_stub: Callable[..., Any] | None = None,
    fusable: bool = False,
    fills_padding: bool = False,
    name: str | None = None,
) -> Callable[[Callable[P, R]], BreakFunction[P, R]]:
    """Declare a function of your own as a graph break; the arguments are `BreakSpec`'s.

    The decorated function breaks every capture that calls it. List its `.spec` in `ModelSpec.breaks` as
    well to have the plan refused when it is never reached.
    """

    def decorate(fn: Callable[P, R]) -> BreakFunction[P, R]:
        function = BreakFunction(fn)
        function.spec = BreakSpec(
            function,
            outputs,
            inputs=inputs or {},
            ownership=ownership,
            out=out,
            mutates=mutates,
            body=body,
            live=live or {},
            capture_stub=capture_stub,
            fusable=fusable,
            fills_padding=fills_padding,
            name=name or fn.__name__,
        )
        return function

    return decorate


class Session:
    """Sees one run of a model. Use as a context manager around the run.

    Args:
        spec: whose breaks to see.
        fn: the callable that will run; submodule globs look in it.
        handler: gets the breaks and ops.

    Raises:
        SpecError: a target cannot be resolved, or two breaks share one.
        CaptureError: this thread is already planning or capturing.
    """

    has_breaks = True

    def __init__(self, spec: ModelSpec, fn: Callable[..., Any], handler: BreakHandler) -> None:
        self.spec = spec
        self.handler = handler
        self.suspended = False
        self._functions: dict[BreakFunction[Any, Any], BreakSite] = {}
        self._named: list[NamedTarget] = []
        self._ops: dict[str, BreakSite] = {}
        self._is_eager_only: dict[str, bool] = {}
        self._stack = contextlib.ExitStack()
        try:
            for each in spec.breaks:
                self._add(each, fn)
        except SpecError as error:
            raise error.within(spec=spec.name) from None

    def _add(self, spec: BreakSpec, fn: Callable[..., Any]) -> None:
        if isinstance(spec.target, BreakFunction):
            if spec.target in self._functions:
                raise _same_target(self._functions[spec.target].label, spec.name)
            self._functions[spec.target] = _function_site(spec, spec.target)
            return
        for target in resolve_target(spec, fn):
            if isinstance(target, OpTarget):
                for name in target.names:
                    if name in self._ops:
                        raise _same_target(self._ops[name].label, spec.name)
                    self._ops[name] = target.site
            else:
                self._named.append(target)

    def site_of(self, function: BreakFunction[Any, Any]) -> BreakSite:
        """The site of a function under `graph_break`, listed in the model's spec or not."""
        site = self._functions.get(function)
        if site is None:
            site = self._functions[function] = _function_site(function.spec, function)
        return site

    def break_call(self, site: BreakSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand a call to the handler; what the handler does is not seen by the session."""
        # A model may enter inference mode on its own; what a break makes outlives that.
        with self.suspend(), torch.inference_mode(False), torch.no_grad():
            try:
                return self.handler.on_break(bind_call(site, args, kwargs, self.spec.groups))
            except LayoutError as error:
                raise error.within(spec=self.spec.name, break_name=site.label) from None

    @contextlib.contextmanager
    def suspend(self) -> Iterator[None]:
        """Let calls and ops through, unseen."""
        before, self.suspended = self.suspended, True
        try:
            yield
        finally:
            self.suspended = before

    def op_site(self, name: str) -> BreakSite | None:
        """The break that stands for the dispatcher op `name`, if there is one."""
        return self._ops.get(name)

    def check_allowed(self, op: str) -> None:
        """Refuse an op of the spec's `eager_only`.

        Raises:
            PlanError: the op may not be part of a segment.
        """
        if op not in self._is_eager_only:
            globs = self.spec.eager_only
            self._is_eager_only[op] = any(fnmatch.fnmatchcase(op, glob) for glob in globs)
        segment = self.handler.segment_name
        if self._is_eager_only[op] and segment:
            raise PlanError(
                f"{op} is eager_only but would be captured in {segment}",
                spec=self.spec.name,
                where=user_line(),
                fix="declare a BreakSpec for the call that leads here, by the name it is called under",
            )

    def __enter__(self) -> Session:
        if _active.session is not None:
            raise CaptureError(
                "a plan or capture is already in progress on this thread",
                spec=self.spec.name,
                fix="finish it first; a break's body may replay another graph, but not capture one",
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(_one_session)
            self._patch(stack)
            _active.session = self
            stack.callback(setattr, _active, "session", None)
            stack.enter_context(_OpWatch(self))
            stack.enter_context(_FunctionWatch(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.__exit__(*exc_info)

    def _patch(self, stack: contextlib.ExitStack) -> None:
        patched: dict[tuple[int, str], BreakSite] = {}
        for target in self._named:
            for place in target.places:
                other = patched.setdefault((id(place.owner), place.name), target.site)
                if other is not target.site:
                    raise _same_target(other.label, target.site.label).within(spec=self.spec.name)
                patch_place(stack, place, self._wrapper(target.site))

    def _wrapper(self, site: BreakSite) -> Callable[..., Any]:
        @functools.wraps(site.original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _active.session is not self or self.suspended:
                return site.original(*args, **kwargs)
            return self.break_call(site, args, kwargs)

        return call


class BodySession(Session):
    """Sees the ops of a break's body, in which every call is an ordinary one."""

    has_breaks = False

    def __init__(self, handler: BreakHandler) -> None:
        super().__init__(ModelSpec("body", ()), _no_model, handler)


def _no_model() -> None:
    """Stands for the callable where no target is looked up in it."""


def _same_target(first: str, second: str) -> SpecError:
    return SpecError(
        f"breaks {first!r} and {second!r} have the same target", code="SG109", fix="keep one of them"
    )


def _function_site(spec: BreakSpec, function: BreakFunction[Any, Any]) -> BreakSite:
    return BreakSite(spec, function.fn, (inspect.signature(function.fn),))


def patch_place(stack: contextlib.ExitStack, place: Place, wrapper: Callable[..., Any]) -> None:
    """Bind a place to `wrapper` until the stack is left."""
    before = vars(place.owner).get(place.name)
    replacement: Any = wrapper
    if isinstance(before, staticmethod | classmethod):
        replacement = type(before)(wrapper)
    elif isinstance(place.owner, torch.nn.Module):
        replacement = types.MethodType(wrapper, place.owner)
    place.set(replacement)
    stack.callback(place.restore, before)


class _OpWatch(TorchDispatchMode):
    """Sees dispatcher ops."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.session = session

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch (2.11 to 2.13) imports its compiler, a second and a half, at the first op.
        return False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        session = self.session
        kwargs = kwargs or {}
        if session.suspended or func.namespace == "prim":
            return func(*args, **kwargs)
        name = func.name()
        site = session.op_site(name)
        if site is not None:
            return session.break_call(site, args, kwargs)
        session.check_allowed(name.partition(".")[0])
        if is_composite(func):
            # Reaches the dispatcher whole only for inference tensors, which skip autograd.
            with self:
                return func.decompose(*args, **kwargs)
        return session.handler.on_op(func, args, kwargs)


class _FunctionWatch(TorchFunctionMode):
    """Sees calls of torch's Python API, where composite ops are still whole."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        session = self.session
        kwargs = kwargs or {}
        if session.suspended:
            return func(*args, **kwargs)
        op = composite_op_of(func)
        if op is not None:
            name = op.name()
            site = session.op_site(name)
            if site is not None:
                return session.break_call(site, *schema_arguments(args, kwargs))
            session.check_allowed(name.partition(".")[0])
        return session.handler.on_function(func, args, kwargs)
