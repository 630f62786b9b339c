"""Resolving a break's target: from what the spec says to callables, signatures and places to patch.

A target is a callable or a string. Resolving it yields one `BreakSite` for each thing that can be called:
one for a function or method, one for each submodule that a glob matches, one for a dispatcher op.
"""

from __future__ import annotations

import fnmatch
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from .errors import SpecError
from .importing import import_path, nearest, signature_of
from .spec import BreakSpec


@attrs.frozen(eq=False)
class Place:
    """A namespace and the name in it under which a target is called."""

    owner: Any
    name: str

    def set(self, value: Any) -> None:
        """Bind the name to `value`."""
        setattr(self.owner, self.name, value)

    def restore(self, before: Any) -> None:
        """Bind the name to what `vars(owner)` had under it, or unbind it where that was nothing."""
        if before is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, before)


@attrs.frozen(eq=False)
class BreakSite:
    """A break's target, resolved.

    Args:
        spec: the break.
        original: the callable the model would have called.
        signatures: its parameters, one entry an overload; `self` is one of them for a method or a submodule's
            `forward`.
        instance: the submodule's name where the target is a submodule glob.
    """

    spec: BreakSpec
    original: Callable[..., Any]
    signatures: tuple[inspect.Signature, ...]
    instance: str = ""

    @property
    def label(self) -> str:
        """The break's name, with the submodule where there are several."""
        return f"{self.spec.name}[{self.instance}]" if self.instance else self.spec.name

    def __attrs_post_init__(self) -> None:
        check_parameters(self.spec, self.signatures)

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[inspect.Signature, inspect.BoundArguments]:
        """The first overload that takes the arguments, and the arguments bound to it.

        Raises:
            TypeError: none does.
        """
        *others, last = self.signatures
        for signature in others:
            try:
                return signature, signature.bind(*args, **kwargs)
            except TypeError:
                continue
        return last, last.bind(*args, **kwargs)


@attrs.frozen(eq=False)
class NamedTarget:
    """A target that is reached through names: patch the places, call the site."""

    site: BreakSite
    places: tuple[Place, ...]


@attrs.frozen(eq=False)
class OpTarget:
    """A dispatcher op, seen by the dispatcher rather than through a name."""

    site: BreakSite
    names: frozenset[str]


def check_parameters(spec: BreakSpec, target: tuple[inspect.Signature, ...]) -> None:
    """Check the names in a spec against its target's and its body's parameters.

    Raises:
        SpecError: a name in `inputs`, `mutates`, `live` or `out` is no parameter.
    """
    body = target if spec.body is None else (inspect.signature(spec.body),)
    checks = (
        ("inputs", spec.inputs, target, "target"),
        ("mutates", spec.mutates, body, "body"),
        ("live", spec.live, body, "body"),
        ("out", spec.out, body, "body"),
    )
    for field, names, signatures, whose in checks:
        known = list(dict.fromkeys(name for each in signatures for name in each.parameters))
        takes_any = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD
            for each in signatures
            for parameter in each.parameters.values()
        )
        for name in names:
            if name not in known and not takes_any:
                raise SpecError(
                    f"{field} names {name!r}, which is no parameter of the {whose}{nearest(name, known)}",
                    code="SG101",
                    break_name=spec.name,
                    expected=f"one of: {', '.join(known) or 'it has none'}",
                    fix=f"correct the name in {field}=, or add the parameter to the {whose}",
                )


def resolve_target(spec: BreakSpec, fn: Callable[..., Any]) -> list[NamedTarget | OpTarget]:
    """Everything `spec.target` stands for.

    Args:
        spec: a break whose target is not under `@graph_break`.
        fn: the callable to be captured; submodule globs look in it.

    Raises:
        SpecError: the target does not exist, has no signature, or no name reaches it.
    """
    target = spec.target
    if not isinstance(target, str):
        return [_callable(spec, target)]
    if target.startswith("module:"):
        return list(_submodules(spec, target.removeprefix("module:"), fn))
    if target.startswith("op:"):
        return [_op(spec, target.removeprefix("op:"))]
    return [_imported(spec, target)]


def _callable(spec: BreakSpec, target: Callable[..., Any]) -> NamedTarget:
    if not inspect.ismethod(target):
        return _named(spec, target, tuple(_places_of(target)))
    owner, function = target.__self__, target.__func__
    if not inspect.isclass(owner):
        raise SpecError(
            f"{_describe(target)} is a method of one object",
            code="SG106",
            break_name=spec.name,
            fix='name the class\'s method, as "pkg.mod:Class.method", or a submodule, as "module:name"',
        )
    return _method(spec, owner, function.__name__)


def _method(spec: BreakSpec, owner: type, name: str) -> NamedTarget:
    """A method, patched on the class that defines it."""
    defining = next(cls for cls in owner.__mro__ if name in vars(cls))
    return _named(spec, _unwrap(vars(defining)[name]), (Place(defining, name),))


def _named(spec: BreakSpec, target: Callable[..., Any], places: tuple[Place, ...]) -> NamedTarget:
    if not callable(target):
        raise SpecError(
            f"target {target!r} is not callable",
            code="SG106",
            break_name=spec.name,
            fix='give a callable, or a string such as "pkg.mod:fn"',
        )
    if not places:
        raise SpecError(
            f"no module-level name is bound to {_describe(target)}, so its calls cannot be seen",
            code="SG106",
            break_name=spec.name,
            fix="decorate the function with @specgraph.graph_break(...) where it is defined",
        )
    return NamedTarget(BreakSite(spec, target, (_signature(spec, target),)), places)


def _describe(target: Any) -> str:
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', repr(target))}"


def _signature(spec: BreakSpec, target: Callable[..., Any]) -> inspect.Signature:
    signature = signature_of(target)
    if signature is None:
        name = getattr(target, "__name__", "name")
        raise SpecError(
            f"{_describe(target)} is built in and has no signature to bind a call to",
            break_name=spec.name,
            code="SG106",
            fix=f'name the dispatcher op instead, as "op:aten::{name}", or wrap it in a function',
        )
    return signature


def _places_of(target: Callable[..., Any]) -> Iterator[Place]:
    """Every module-level name bound to `target`, and its own class's where it is a method."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict):
            names = [name for name, value in list(namespace.items()) if value is target]
            yield from (Place(module, name) for name in names)
    class_path, _, name = getattr(target, "__qualname__", "").rpartition(".")
    owner: Any = sys.modules.get(getattr(target, "__module__", None) or "")
    for part in class_path.split("."):
        owner = getattr(owner, "__dict__", {}).get(part)
    if inspect.isclass(owner) and _unwrap(vars(owner).get(name)) is target:
        yield Place(owner, name)


def _unwrap(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute


def _imported(spec: BreakSpec, path: str) -> NamedTarget:
    try:
        owner, name = import_path(path, "target")
    except SpecError as error:
        raise error.within(break_name=spec.name) from None
    if inspect.isclass(owner):
        return _method(spec, owner, name)
    return _callable(spec, getattr(owner, name))


def _submodules(spec: BreakSpec, glob: str, fn: Callable[..., Any]) -> Iterator[NamedTarget]:
    if not isinstance(fn, torch.nn.Module):
        raise SpecError(
            f"target {spec.target!r} looks for submodules, but {_describe(fn)} is no nn.Module",
            code="SG106",
            break_name=spec.name,
            fix="capture an nn.Module, or name the function to break at",
        )
    parts = glob.split(".")
    found: dict[int, str] = {}
    for name, module in fn.named_modules(remove_duplicate=False):
        path = name.split(".")
        matches = len(path) == len(parts) and all(map(fnmatch.fnmatchcase, path, parts))
        if name and matches and id(module) not in found:
            found[id(module)] = name
            yield _submodule(spec, name, module)
    if not found:
        raise SpecError(
            f"target {spec.target!r} matches no submodule of {type(fn).__name__}",
            code="SG106",
            break_name=spec.name,
            actual=f"submodules: {', '.join(list(dict(fn.named_modules()))[1:9]) or 'none'}, ...",
            fix="correct the glob; * stands for one part of the dotted name",
        )


def _submodule(spec: BreakSpec, name: str, module: torch.nn.Module) -> NamedTarget:
    patched = vars(module).get("forward")
    unbound = type(module).forward

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return unbound(self, *args, **kwargs) if patched is None else patched(*args, **kwargs)

    site = BreakSite(spec, forward, (_signature(spec, unbound),), instance=name)
    return NamedTarget(site, (Place(module, "forward"),))


def _op(spec: BreakSpec, name: str) -> OpTarget:
    namespace, _, op_name = name.partition("::")
    op_name, _, overload = op_name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), op_name, None) if op_name else None
    if packet is None or (overload and overload not in packet.overloads()):
        raise SpecError(
            f"target {spec.target!r}: there is no such dispatcher op",
            code="SG106",
            break_name=spec.name,
            fix='write "op:namespace::name", and import what registers the op before the capture',
        )
    overloads = [overload] if overload else packet.overloads()
    ops = [getattr(packet, each) for each in overloads]
    site = BreakSite(spec, packet, tuple(_schema_signature(op) for op in ops))
    return OpTarget(site, frozenset(op.name() for op in ops))


def _schema_signature(op: torch._ops.OpOverload) -> inspect.Signature:
    parameters = []
    for argument in op._schema.arguments:
        by_name = inspect.Parameter.KEYWORD_ONLY
        kind = by_name if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        has_default = argument.has_default_value()
        default = argument.default_value if has_default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(argument.name, kind, default=default))
    return inspect.Signature(parameters)
