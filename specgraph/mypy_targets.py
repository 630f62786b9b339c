"""Looking up a target that is an import path, without importing anything.

A module that mypy has analysed is looked into. One that it has only parsed, because its turn is yet to come,
is read for what its text settles; of any other module only its existence is looked up. What may be defined
in a way that cannot be seen counts as there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import attrs
from mypy import nodes, types
from mypy.checker import TypeChecker
from mypy.modulefinder import get_search_dirs, mypy_path

from .mypy_rules import form_problem, import_path, nearest

_HIDES_NAMES = re.compile(r"import\s*\*|\b(globals|vars|setattr|exec)\(|not TYPE_CHECKING|\b__getattr__\b")
_HIDES_MODULES = re.compile(r"\b__path__\b|\bmeta_path\b|sys\.modules(?!\[__name__\]|\.get\()")


@attrs.frozen(eq=False)
class Target:
    """What is known of a target string.

    Args:
        problem: why there is no such target, if so.
        type: the type of the function or method, `self` and `cls` included.
        module: the module that was looked into, for mypy to check its users anew when it changes.
    """

    problem: str | None = None
    type: types.Type | None = None
    module: str | None = None


def find_target(target: str, api: TypeChecker) -> Target:
    """Look up `"pkg.mod:fn"` or `"pkg.mod:Class.method"`; of other targets check the form."""
    path = import_path(target)
    if path is None:
        return Target(form_problem(target))
    module_name, qualname = path
    module = api.modules.get(module_name)
    if module is None:
        advice = "correct the name before the colon, or install the package it belongs to"
        problem = f'target "{target}": there is no module "{module_name}"; {advice}'
        return Target(None if _module_may_exist(module_name, api) else problem)
    names = qualname.split(".")
    if "__name__" not in module.names:
        return _find_in_text(module, names, api)
    owner: nodes.SymbolNode | None = module
    for name in names:
        known = _known_names(owner, api)
        if name in known:
            owner = known[name].node
        elif _may_have_more(owner, name):
            return Target(module=module_name)
        else:
            advice = nearest(name, known) or "; correct the name after the colon"
            problem = f'target "{target}": "{_label(owner)}" has no "{name}"{advice}'
            return Target(problem, module=module_name)
    return Target(type=_type_of(owner, api), module=module_name)


def _label(owner: nodes.SymbolNode | None) -> str:
    return "" if owner is None else owner.fullname


def _known_names(owner: nodes.SymbolNode | None, api: TypeChecker) -> dict[str, nodes.SymbolTableNode]:
    if isinstance(owner, nodes.TypeInfo):
        return {name: symbol for base in reversed(owner.mro) for name, symbol in base.names.items()}
    if not isinstance(owner, nodes.MypyFile):
        return {}
    start = f"{owner.fullname}."
    submodules = {
        name.removeprefix(start): nodes.SymbolTableNode(nodes.GDEF, module)
        for name, module in api.modules.items()
        if name.startswith(start)
    }
    return submodules | owner.names


def _may_have_more(owner: nodes.SymbolNode | None, name: str) -> bool:
    """True where `owner` may have a name that mypy does not know of."""
    if isinstance(owner, nodes.TypeInfo):
        is_plain = owner.metaclass_type is None or owner.metaclass_type.type.fullname == "builtins.type"
        return owner.fallback_to_any or not is_plain or name.startswith("__")
    if isinstance(owner, nodes.MypyFile):
        hides = owner.is_partial_stub_package or _HIDES_NAMES.search(_text(owner.path))
        return bool(hides) or "__getattr__" in owner.names
    return True


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def _type_of(node: nodes.SymbolNode | None, api: TypeChecker) -> types.Type | None:
    if isinstance(node, nodes.FuncDef):
        return api.function_type(node)
    if isinstance(node, nodes.Decorator) and not node.func.is_property:
        return node.var.type
    return node.type if isinstance(node, nodes.Var) else None


def _find_in_text(module: nodes.MypyFile, names: Sequence[str], api: TypeChecker) -> Target:
    """Look into a module whose names mypy has yet to collect; types are not known there."""
    text = _text(module.path)
    if text and not re.search(rf"\b{names[0]}\b", text) and not _HIDES_NAMES.search(text):
        target, advice = f"{module.fullname}:{'.'.join(names)}", "correct the name after the colon"
        return Target(
            f'target "{target}": "{module.fullname}" has no "{names[0]}"; {advice}', None, module.fullname
        )
    body: Sequence[nodes.Statement] = module.defs
    for name in names[:-1]:
        classes = [each for each in body if isinstance(each, nodes.ClassDef) and each.name == name]
        body = classes[0].defs.body if len(classes) == 1 else ()
    functions = [each for each in body if isinstance(each, nodes.FuncDef) and each.name == names[-1]]
    if len(functions) != 1:
        return Target(module=module.fullname)
    (function,) = functions
    anything = types.AnyType(types.TypeOfAny.special_form)
    signature = types.CallableType(
        [anything] * len(function.arg_kinds),
        function.arg_kinds,
        function.arg_names,
        anything,
        api.named_type("builtins.function"),
        name=function.name,
    )
    return Target(type=signature, module=module.fullname)


def _module_may_exist(name: str, api: TypeChecker) -> bool:
    """False where no module of that name can be found on the paths that are known."""
    first, *rest = name.split(".")
    if api.options.python_executable is None or first in sys.stdlib_module_names:
        return True
    sys_path, site_packages = get_search_dirs(api.options.python_executable)
    if any(_is_hooked(first, Path(site)) for site in site_packages):
        return True
    roots = [_root(api), str(Path.cwd()), *mypy_path(), *api.options.mypy_path]
    spec = PathFinder.find_spec(first, [*roots, *sys_path, *site_packages])
    for part in rest:
        if spec is None:
            return False
        parent, locations = spec, spec.submodule_search_locations
        spec = None if locations is None else PathFinder.find_spec(part, list(locations))
        if spec is None and _may_make_modules(parent):
            return True
    return spec is not None


def _root(api: TypeChecker) -> str:
    """The directory from which the file that is checked would be imported."""
    path = Path(api.path).resolve()
    depth = api.tree.fullname.count(".") + (path.stem == "__init__")
    return str(path.parents[min(depth, len(path.parents) - 1)])


def _is_hooked(name: str, site: Path) -> bool:
    """True where an import hook installed by a .pth file (an editable install) mentions the package."""
    hooks = [
        hook for pth in site.glob("*.pth") for hook in re.findall(r"^import (\w+)", _text(str(pth)), re.M)
    ]
    return any(re.search(rf"\b{name}\b", _text(str(site / f"{hook}.py"))) for hook in hooks)


def _may_make_modules(spec: ModuleSpec) -> bool:
    """True for a module that may register submodules which are no files."""
    if spec.origin is None:
        return False
    return not spec.origin.endswith(".py") or bool(_HIDES_MODULES.search(_text(spec.origin)))
