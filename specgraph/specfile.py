"""Loading spec files.

A spec file is a typed Python module with a module-level `SPEC: ModelSpec`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from .errors import SpecError
from .spec import ModelSpec


def load_spec(path: str | Path) -> ModelSpec:
    """The `SPEC` of a Python spec file. The file is run, as any module is.

    Raises:
        SpecError: there is no such file, it is no Python file, it fails, or it has no `SPEC: ModelSpec`.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise SpecError(f"there is no spec file {path}", fix="correct the path")
    if file.suffix != ".py":
        raise SpecError(f"{path} is no Python file", fix="give a .py file with SPEC: ModelSpec in it")
    name = f"specgraph_spec_{file.stem}"
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise SpecError(f"{path} cannot be loaded", fix="give a .py file")
    module = importlib.util.module_from_spec(module_spec)
    # Targets are looked for in loaded modules, and the spec's own may be among them.
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except ImportError as error:
        del sys.modules[name]
        raise SpecError(
            f"{path} cannot be imported: {error}",
            fix="install what the spec file imports (pip install specgraph[models] for those in specs/)",
        ) from error
    except BaseException:
        del sys.modules[name]
        raise
    spec = getattr(module, "SPEC", None)
    if not isinstance(spec, ModelSpec):
        raise SpecError(
            f"{path} has no SPEC",
            expected="a module-level SPEC: ModelSpec",
            actual=f"SPEC is {type(spec).__name__}",
            fix="assign the ModelSpec to SPEC",
        )
    return spec
