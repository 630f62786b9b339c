"""What can be said of a spec without running its model.

Most rules are checked where a spec is built, and raise there. The rules here need more: the target itself,
the signatures of what stands in for it, and what it says it returns. docs/rules.md has a section on each.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from .errors import SpecError
from .importing import import_callable, signature_of
from .intercept import BreakFunction
from .spec import BreakSpec, ModelSpec, Outputs, Ownership
from .targets import BreakSite, resolve_target


def check_spec(spec: ModelSpec) -> list[SpecError]:
    """Everything that is wrong with a spec's breaks; submodule globs need the model and are left out."""
    found: list[SpecError] = []
    for each in spec.breaks:
        try:
            found += _check_break(each)
        except SpecError as error:
            found.append(error.within(break_name=each.name))
    return [error.within(spec=spec.name) for error in found]


def _check_break(spec: BreakSpec) -> Iterator[SpecError]:
    target = _target_of(spec)
    if target is None:
        if isinstance(spec.target, str) and spec.target.startswith("op:"):
            resolve_target(spec, _no_model)
        return
    signature = signature_of(target)
    if signature is None:
        resolve_target(spec, _no_model)
        return
    BreakSite(spec, target, (signature,))
    extra = (*spec.live, *spec.out)
    for field, stand_in in (("body", spec.body), ("capture_stub", spec.capture_stub)):
        theirs = None if stand_in is None else signature_of(stand_in)
        problem = None if theirs is None else misfit(signature, theirs, extra)
        if problem is not None:
            yield SpecError(
                f"{field} does not fit the target: {problem}",
                break_name=spec.name,
                code="SG107",
                expected=f"to take what {signature} takes{', plus ' if extra else ''}{', '.join(extra)}",
                actual=str(theirs),
                fix=f"give the {field} the target's parameters, or *args and **kwargs",
            )
    yield from _check_outputs(spec, spec.body or target)


def _no_model() -> None:
    """Stands for the captured callable where only names are looked up."""


def _target_of(spec: BreakSpec) -> Callable[..., Any] | None:
    """The function behind a target that is a function or an import path."""
    target = spec.target
    if isinstance(target, str):
        if target.startswith(("module:", "op:")):
            return None
        target = import_callable(target, "target")
    return target.fn if isinstance(target, BreakFunction) else target


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def misfit(target: inspect.Signature, stand_in: inspect.Signature, extra: Iterable[str]) -> str | None:
    """Why some call that `target` takes would not be taken by `stand_in`, if so.

    Args:
        target: what is called.
        stand_in: what runs instead.
        extra: parameters that the executor adds by name.
    """
    theirs = stand_in.parameters
    kinds = {each.kind for each in theirs.values()}
    positional = [each for each in theirs.values() if each.kind in _BY_POSITION]
    takes_args = inspect.Parameter.VAR_POSITIONAL in kinds
    takes_kwargs = inspect.Parameter.VAR_KEYWORD in kinds
    index = 0
    for name, parameter in target.parameters.items():
        matched = theirs.get(name)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL and not takes_args:
            return f"it takes no *{name}"
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and not takes_kwargs:
            return f"it takes no **{name}"
        if parameter.kind in _BY_POSITION:
            at_index = positional[index] if index < len(positional) else None
            index += 1
            if at_index is None and not takes_args:
                return f"it does not take {name!r} by position"
            only_position = parameter.kind is inspect.Parameter.POSITIONAL_ONLY
            if at_index is not None and at_index.name != name and not only_position:
                return f"its parameter {index} is {at_index.name!r}, not {name!r}"
            matched = at_index if only_position else matched
        by_name = matched is not None and matched.kind in _BY_NAME
        if parameter.kind in _BY_NAME and not by_name and not takes_kwargs:
            return f"it does not take {name!r} by name"
        has_default = parameter.default is not inspect.Parameter.empty
        if has_default and matched is not None and matched.default is inspect.Parameter.empty:
            return f"its {matched.name!r} needs a value, the target's does not"
    return _unfilled(target, stand_in, frozenset(extra))


def _unfilled(target: inspect.Signature, stand_in: inspect.Signature, extra: frozenset[str]) -> str | None:
    """Why a parameter of the stand-in would get no value, if so."""
    named = frozenset(target.parameters) | extra
    positions = sum(each.kind in _BY_POSITION for each in target.parameters.values())
    for index, (name, parameter) in enumerate(stand_in.parameters.items()):
        needs = parameter.default is inspect.Parameter.empty and parameter.kind in (*_BY_POSITION, *_BY_NAME)
        filled = name in named or (parameter.kind in _BY_POSITION and index < positions)
        if needs and not filled:
            return f"nothing gives its {name!r} a value"
    return None


def _check_outputs(spec: BreakSpec, function: Callable[..., Any]) -> Iterator[SpecError]:
    try:
        returned = typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):
        return  # annotations that cannot be looked up say nothing
    actual = _shape_of_annotation(returned)
    expected = _shape_of_outputs(spec.outputs)
    passes = spec.ownership is Ownership.PASS_THROUGH and actual == "nothing"
    both_known = actual is not None and actual != expected
    if both_known and not passes and not (actual == "a sequence" and expected.endswith("tensors")):
        yield SpecError(
            f"outputs declares {expected}, but the function returns {actual}",
            break_name=spec.name,
            code="SG104",
            expected=f"layouts for {actual}",
            actual=expected,
            fix="give outputs= the structure of what is returned, or correct the return annotation",
        )


def _shape_of_outputs(outputs: Outputs) -> str:
    if outputs is None:
        return "nothing"
    if isinstance(outputs, tuple):
        return f"{len(outputs)} tensors"
    return "a mapping" if isinstance(outputs, Mapping) else "one tensor"


def _shape_of_annotation(returned: Any) -> str | None:
    """What an annotation says about structure; None where it says nothing that is understood."""
    if returned is type(None):
        return "nothing"
    if isinstance(returned, type) and issubclass(returned, torch.Tensor):
        return "one tensor"
    origin, arguments = typing.get_origin(returned), typing.get_args(returned)
    if origin is tuple and arguments and Ellipsis not in arguments:
        are_tensors = all(_shape_of_annotation(each) == "one tensor" for each in arguments)
        return f"{len(arguments)} tensors" if are_tensors else None
    if origin in (tuple, list):
        return "a sequence" if _shape_of_annotation(arguments[0]) == "one tensor" else None
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    return None
