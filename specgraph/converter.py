"""The cattrs converters: how specs and plans become plain data, and back.

All hooks are here. `plan_converter` is for plans, which specgraph writes and reads itself. `spec_converter`
is for spec files, which people write: it refuses unknown keys and converts nothing silently.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, get_args, get_origin

import attrs
import cattrs
import torch
from cattrs.preconf.json import JsonConverter, make_converter

from .dims import GroupSizes
from .errors import SpecError
from .importing import import_callable, nearest, path_of
from .layout import TensorLayout, as_dtype, dtype_name
from .spec import Outputs, Ownership, TargetLike

Key: TypeAlias = str | int
DeviceDtype: TypeAlias = tuple[torch.device, torch.dtype] | None


def _structure_size(value: Any, _: Any) -> int | tuple[int, ...]:
    return value if isinstance(value, int) else tuple(value)


def _make_plan_converter() -> JsonConverter:
    converter = make_converter()
    converter.register_unstructure_hook(torch.dtype, dtype_name)
    converter.register_structure_hook(torch.dtype, lambda value, _: as_dtype(value))
    converter.register_structure_hook(int | tuple[int, ...], _structure_size)
    return converter


plan_converter = _make_plan_converter()


def _expect(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise SpecError(f"{value!r} is not {what}", code="SG100", fix=f"write {what} here")
    return value


def _structure_layout(value: Any, _: Any) -> TensorLayout:
    return TensorLayout.parse(_expect(value, str, 'a layout such as "bfloat16[B S D]"'))


def _structure_outputs(value: Any, _: Any) -> Outputs:
    if value is None:
        return None
    if isinstance(value, list):
        return tuple(_structure_layout(each, None) for each in value)
    if isinstance(value, dict):
        return {key: _structure_layout(each, None) for key, each in value.items()}
    return _structure_layout(value, None)


def _unstructure_outputs(value: Outputs) -> Any:
    if value is None or isinstance(value, TensorLayout):
        return None if value is None else str(value)
    if isinstance(value, tuple):
        return [str(each) for each in value]
    return {key: str(each) for key, each in value.items()}


def _structure_names(value: Any, _: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    names = _expect(value, list, "a list of names")
    return tuple(_expect(each, str, "a name") for each in names)


def _structure_ownership(value: Any, _: Any) -> Ownership:
    known = [each.value for each in Ownership]
    if value not in known:
        hint = nearest(value, known) if isinstance(value, str) else ""
        raise SpecError(
            f"{value!r} is none of {', '.join(map(repr, known))}{hint}",
            code="SG100",
            fix="write one of these",
        )
    return Ownership(value)


def _structure_callable(value: Any, _: Any) -> Callable[..., Any]:
    path = _expect(value, str, 'an import path such as "pkg.mod:fn"')
    return import_callable(path, "callable")


def _structure_groups(value: Any, _: Any) -> GroupSizes:
    groups = _expect(value, dict, "a table of group sizes")
    what = "a number of processes, or an import path"
    return {
        name: _structure_callable(each, None) if isinstance(each, str) else _expect(each, int, what)
        for name, each in groups.items()
    }


def _unstructure_groups(value: GroupSizes) -> dict[str, int | str]:
    return {name: path_of(each, "group") if callable(each) else each for name, each in value.items()}


def _structure_device_dtype(value: Any, _: Any) -> tuple[torch.device, torch.dtype] | None:
    if value is None:
        return None
    what = 'a device and a dtype, as ["meta", "bfloat16"]'
    pair = _expect(value, list, what)
    if len(pair) != 2 or not all(isinstance(each, str) for each in pair):
        _expect(None, list, what)
    try:
        return torch.device(pair[0]), as_dtype(pair[1])
    except RuntimeError:
        raise SpecError(
            f"{pair[0]!r} is no device", code="SG100", fix='write one such as "cpu" or "meta"'
        ) from None


def _unstructure_device_dtype(value: tuple[torch.device, torch.dtype] | None) -> list[str] | None:
    return None if value is None else [str(value[0]), dtype_name(value[1])]


def _is_callable(kind: Any) -> bool:
    """True for `Callable[...]`, and for it or None."""
    options = [each for each in get_args(kind) or (kind,) if each is not type(None)]
    if get_origin(kind) is collections.abc.Callable:
        options = [kind]
    return all(get_origin(each) is collections.abc.Callable for each in options)


def _strict(kind: type | tuple[type, ...], what: str) -> Callable[[Any, Any], Any]:
    return lambda value, _: _expect(value, kind, what)


def _unstructure_target(value: TargetLike) -> str:
    return value if isinstance(value, str) else path_of(value, "target")


def _unstructure_callable(value: Callable[..., Any] | None) -> str | None:
    return None if value is None else path_of(value, "callable")


def _make_spec_converter() -> JsonConverter:
    converter = make_converter(forbid_extra_keys=True, omit_if_default=True)
    for kind, what in ((str, "text"), (bool, "true or false"), (int, "a whole number")):
        converter.register_structure_hook(kind, _strict(kind, what))
    converter.register_structure_hook(float, _strict((int, float), "a number"))
    converter.register_structure_hook(TensorLayout, _structure_layout)
    converter.register_unstructure_hook(TensorLayout, str)
    converter.register_structure_hook_func(lambda kind: kind == tuple[str, ...], _structure_names)
    for matches, structure, unstructure in (
        (lambda kind: kind == Outputs, _structure_outputs, _unstructure_outputs),
        (lambda kind: kind == TargetLike, _strict(str, "a target"), _unstructure_target),
        (lambda kind: kind == GroupSizes, _structure_groups, _unstructure_groups),
        (_is_callable, _structure_callable, _unstructure_callable),
        (lambda kind: kind == DeviceDtype, _structure_device_dtype, _unstructure_device_dtype),
    ):
        converter.register_structure_hook_func(matches, structure)
        converter.register_unstructure_hook_func(matches, unstructure)
    converter.register_structure_hook(Ownership, _structure_ownership)
    return converter


spec_converter = _make_spec_converter()


def problems_in(
    error: BaseException, keys: tuple[Key, ...] = ()
) -> Iterator[tuple[tuple[Key, ...], SpecError]]:
    """What a failed structuring found wrong, each with the keys that lead there."""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [each.name for each in attrs.fields(error.cl) if each.init]
        for name in sorted(error.extra_fields):
            problem = f"unknown key {name!r}{nearest(name, known)}"
            yield (
                (*keys, name),
                SpecError(problem, code="SG100", expected=f"of: {', '.join(known)}", fix="correct the key"),
            )
    elif isinstance(error, cattrs.BaseValidationError):
        for each in error.exceptions:
            yield from problems_in(each, keys + _place_of(each))
    elif isinstance(error, SpecError):
        yield keys, error
    elif isinstance(error, KeyError):
        yield keys[:-1], SpecError(f"key {error.args[0]!r} is missing", code="SG100", fix="add it")
    else:
        problem = f"the value has the wrong form ({error})"
        yield keys, SpecError(problem, code="SG100", fix="see docs/spec-files.md for what goes here")


def _place_of(error: BaseException) -> tuple[Key, ...]:
    """The key under which cattrs met the error, from the note it leaves."""
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, cattrs.AttributeValidationNote):
            return (note.name,)
        if isinstance(note, cattrs.IterableValidationNote):
            return (note.index,)
    return ()
