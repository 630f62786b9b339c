"""Spec files: a `ModelSpec` as a typed Python module, as TOML or as JSON.

All three load to equal specs. In TOML and JSON a layout is text as a layout prints (`"bfloat16[B Q H D]"`,
`"like(query)[B Q]"`, `"any[B S]"`, with `" strides (S 1)"` behind where it has strides), a callable is an
import path, and everything else is written under its field's name. A file is data: nothing in it is
evaluated, and only the modules it names are imported. Unknown keys are refused.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cattrs
import tomlkit

from .converter import Key, problems_in, spec_converter
from .errors import SpecError
from .importing import first_on_path, import_root, load_module
from .spec import ModelSpec


def load_spec(path: str | Path) -> ModelSpec:
    """The spec in a `.py`, `.toml` or `.json` file.

    A Python file is run, as any module is; its `SPEC` is the spec.

    Raises:
        SpecError: there is no such file, or it holds no valid spec; of several problems, the first.
    """
    spec, problems = read_spec(path)
    if spec is None:
        raise problems[0]
    return spec


def read_spec(path: str | Path) -> tuple[ModelSpec | None, list[SpecError]]:
    """The spec in a file, or everything that is wrong with it."""
    file = Path(path).resolve()
    try:
        if not file.is_file():
            raise SpecError(f"there is no spec file {path}", code="SG100", fix="correct the path")
        if file.suffix == ".py":
            return _python_spec(file, path), []
        text = file.read_text()
        data = _parse(text, file.suffix, path)
        if not isinstance(data, dict):
            raise SpecError(f"{path} holds no object", code="SG100", fix="write a spec's fields in it")
        _spell_out_outputs(data)
        with first_on_path(import_root(file)):
            return spec_converter.structure(data, ModelSpec), []
    except SpecError as error:
        return None, [error.within(where=str(path))]
    except UnicodeDecodeError as error:
        return None, [SpecError(f"{path} is no text: {error}", code="SG100", fix="write UTF-8")]
    except cattrs.BaseValidationError as error:
        return None, _located(problems_in(error), path, text)


def dump_spec(spec: ModelSpec, path: str | Path) -> None:
    """Write a spec to a `.toml` or `.json` file; `load_spec` reads an equal one back.

    Raises:
        SpecError: the path ends otherwise, or the spec holds a callable that no import path leads to.
    """
    data = _without_defaults(spec_converter.unstructure(spec))
    suffix = Path(path).suffix
    if suffix == ".toml":
        Path(path).write_text(_toml(data))
    elif suffix == ".json":
        Path(path).write_text(f"{json.dumps(data, indent=2)}\n")
    else:
        raise SpecError(f"{path} is neither TOML nor JSON", fix='end the path in ".toml" or ".json"')


def _python_spec(file: Path, path: str | Path) -> ModelSpec:
    spec = getattr(load_module(file), "SPEC", None)
    if not isinstance(spec, ModelSpec):
        raise SpecError(
            f"{path} has no SPEC",
            code="SG100",
            expected="a module-level SPEC: ModelSpec",
            actual=f"SPEC is {type(spec).__name__}",
            fix="assign the ModelSpec to SPEC",
        )
    return spec


def _parse(text: str, suffix: str, path: str | Path) -> Any:
    try:
        if suffix == ".toml":
            return tomllib.loads(text)
        if suffix == ".json":
            return json.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        kind = suffix[1:].upper()
        raise SpecError(f"{path} is no {kind}: {error}", code="SG100", fix="correct the syntax") from None
    raise SpecError(f"{path} is no spec file", code="SG100", fix="give a .py, .toml or .json file")


def _spell_out_outputs(data: dict[str, Any]) -> None:
    """A break that returns nothing says so in Python; in a file it leaves `outputs` out."""
    breaks = data.get("breaks")
    for each in breaks if isinstance(breaks, list) else ():
        if isinstance(each, dict):
            each.setdefault("outputs", None)


def _located(
    problems: Iterator[tuple[tuple[Key, ...], SpecError]], path: str | Path, text: str
) -> list[SpecError]:
    """The problems, each with file, line and key path; in the order of the file."""
    found = []
    for keys, error in problems:
        line = line_of(keys, text) if keys and Path(path).suffix == ".toml" else 0
        place = f"{path}:{line}" if line else str(path)
        key_path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
        found.append((line, error.within(where=f"{place} at {key_path.lstrip('.') or 'the top'}")))
    return [error for _, error in sorted(found, key=lambda pair: pair[0])]


def line_of(keys: tuple[Key, ...], text: str) -> int:
    """The line, counted from 1, on which a TOML text sets the value at a key path; 0 where it does not.

    TOML is read line by line: the value is set by the first line up to which the text parses and has it.
    """
    lines = text.splitlines()
    start = 1
    for end in range(1, len(lines) + 1):
        try:
            data = tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue  # in the middle of a value of several lines
        if _has(data, keys):
            return start
        start = end + 1
    return 0


def _has(data: Any, keys: tuple[Key, ...]) -> bool:
    for key in keys:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _without_defaults(value: Any) -> Any:
    """Plain data without what an omitted key means anyway."""
    if isinstance(value, Mapping):
        trimmed = {key: _without_defaults(each) for key, each in value.items()}
        return {key: each for key, each in trimmed.items() if each not in (None, False, {}, [], "")}
    return [_without_defaults(each) for each in value] if isinstance(value, list) else value


def _toml(data: Mapping[str, Any]) -> str:
    """Scalars and lists first, then a table for each mapping and each break."""
    document = tomlkit.document()
    for key, value in data.items():
        if not isinstance(value, dict) and key != "breaks":
            document.add(key, tomlkit.item(value))
    breaks = tomlkit.aot()
    for each in data.get("breaks", []):
        breaks.append(_table(each))
    for key, value in data.items():
        if isinstance(value, dict):
            document.add(key, _table(value))
        elif key == "breaks":
            document.add(key, breaks)
    return tomlkit.dumps(document)


def _table(value: Mapping[str, Any]) -> tomlkit.items.Table:
    table = tomlkit.table()
    for key, each in value.items():
        if not isinstance(each, dict):
            table.add(key, tomlkit.item(each))
    for key, each in value.items():
        if isinstance(each, dict):
            table.add(key, _table(each))
    return table
