"""Callables and modules by name: what spec files and targets say, and what dumping writes.

An import path is `pkg.mod:name` or `pkg.mod:Class.method`. Paths in a spec file are looked up as if the
folder above the file's package (the file's own folder where it is in none) came first on the import path,
as Python does for a script.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import SpecError


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name nearest to `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def import_path(path: str, what: str) -> tuple[Any, str]:
    """The owner (module or class) and the last name that an import path stands for.

    Args:
        path: the import path.
        what: what it is, for messages (`target`, `body`).

    Raises:
        SpecError: the path has another form, or names what does not exist.
    """
    module_name, _, qualname = path.partition(":")
    if not module_name or not qualname:
        raise SpecError(
            f"{what} {path!r} is no import path",
            code="SG106",
            fix='write "pkg.mod:fn" or "pkg.mod:Class.method"',
        )
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise SpecError(
            f"{what} {path!r}: module {module_name!r} cannot be imported ({error})",
            code="SG106",
            fix="correct the module's name, or install the package it belongs to",
        ) from error
    *parents, name = qualname.split(".")
    owners = [owner]
    for part in (*parents, name):
        owner = owners[-1]
        if not hasattr(owner, part):
            raise SpecError(
                f"{what} {path!r}: {getattr(owner, '__name__', owner)} has no {part!r}"
                f"{nearest(part, vars(owner))}",
                code="SG106",
                fix="correct the name after the colon",
            )
        owners.append(getattr(owner, part))
    return owners[-2], name


def import_callable(path: str, what: str) -> Callable[..., Any]:
    """The callable an import path names.

    Raises:
        SpecError: as `import_path` does, or it is not callable.
    """
    owner, name = import_path(path, what)
    found = getattr(owner, name)
    if not callable(found):
        raise SpecError(
            f"{what} {path!r} is {type(found).__name__}, which is not callable",
            code="SG106",
            fix="name a function",
        )
    return found  # type: ignore[no-any-return]  # callable() says no more than that


def path_of(function: Callable[..., Any], what: str) -> str:
    """The import path of a callable.

    Raises:
        SpecError: no import path leads to it (a lambda, a function made in a function).
    """
    path = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    try:
        found = import_callable(path, what)
    except SpecError:
        found = None
    if found is not function:
        raise SpecError(
            f"{what} {path!r} cannot be written to a file: no import path leads to it",
            fix="define it at the top of an importable module",
        )
    return path


def load_module(file: Path) -> ModuleType:
    """The module that a Python file is, imported under its own name where that is free.

    Raises:
        SpecError: the file, or something it imports, cannot be imported.
    """
    root, name = _root_and_name(file)
    loaded = sys.modules.get(name)
    if loaded is not None and _is_from(loaded, file):
        return loaded
    with first_on_path(root):
        if loaded is not None or not _finds(name, file):
            name = f"specgraph_spec_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
        return _execute(file, name)


def _execute(file: Path, name: str) -> ModuleType:
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise SpecError(f"{file} cannot be imported", code="SG100", fix="give a Python file")
    module = importlib.util.module_from_spec(module_spec)
    # Targets are looked for in loaded modules, and the file's own may be among them.
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except ImportError as error:
        del sys.modules[name]
        raise SpecError(
            f"{file} cannot be imported: {error}",
            code="SG100",
            fix="install what the spec file imports (specgraph[models] for the files in specs/)",
        ) from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def import_root(file: Path) -> Path:
    """The folder above a file's outermost package."""
    return _root_and_name(file)[0]


def _root_and_name(file: Path) -> tuple[Path, str]:
    parts = [file.stem]
    root = file.parent
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    return root, ".".join(parts)


def _is_from(module: ModuleType, file: Path) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is not None and Path(origin).resolve() == file


def _finds(name: str, file: Path) -> bool:
    """True where importing `name` gives this very file."""
    try:
        found = importlib.util.find_spec(name)
    except ImportError:
        return False
    return found is not None and found.origin is not None and Path(found.origin).resolve() == file


@contextlib.contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    """Put a folder first on the import path."""
    entry = str(folder)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(entry)


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """A callable's signature; None for a built-in that has none."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None
