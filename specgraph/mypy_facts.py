"""Facts about a break, read from what mypy knows of its source.

Every function answers None where the source does not settle the question: a value that is no literal, a
callable whose parameters are not written down, a module that mypy has not loaded. Nothing is imported.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs
from mypy import nodes, types
from mypy.checker import TypeChecker
from mypy.maptype import map_instance_to_supertype
from mypy.plugin import DynamicClassDefContext
from mypy.subtypes import find_member
from mypy.types import get_proper_type

from .dims import parse_dims
from .errors import SpecError
from .mypy_rules import Callee, Layout, Structure, pair_up

LAYOUT = "specgraph.layout.TensorLayout"
TENSOR = "torch._tensor.Tensor"
_CONSTANT = "__specgraph_layout_"

Modules: TypeAlias = Mapping[str, nodes.MypyFile]


# Layouts.


def layout_of(node: nodes.Expression, modules: Modules) -> Layout | None:
    """The layout that an expression is: a call of TensorLayout, or a module-level constant."""
    if isinstance(node, nodes.CallExpr):
        return _literal_layout(node)
    if not isinstance(node, nodes.RefExpr) or not isinstance(node.node, nodes.Var):
        return None
    module_name, _, name = node.node.fullname.rpartition(".")
    module = modules.get(module_name)
    symbol = None if module is None else module.names.get(f"{_CONSTANT}{name}")
    noted = None if symbol is None or symbol.type is None else get_proper_type(symbol.type)
    if not isinstance(noted, types.LiteralType) or not isinstance(noted.value, str):
        return None
    dims, strides = json.loads(noted.value)
    return _parsed_layout(dims, strides)


def _literal_layout(call: nodes.CallExpr) -> Layout | None:
    if not isinstance(call.callee, nodes.RefExpr) or call.callee.fullname != LAYOUT:
        return None
    by_position = iter(("dims", "dtype", "strides"))
    given: dict[str | None, nodes.Expression] = {}
    for argument, kind, name in zip(call.args, call.arg_kinds, call.arg_names, strict=True):
        if kind not in (nodes.ARG_POS, nodes.ARG_NAMED):
            return None
        given[next(by_position, None) if kind is nodes.ARG_POS else name] = argument
    dims, strides = given.get("dims"), given.get("strides")
    if isinstance(strides, nodes.NameExpr) and strides.fullname == "builtins.None":
        strides = None
    if not isinstance(dims, nodes.StrExpr) or not (strides is None or isinstance(strides, nodes.StrExpr)):
        return None
    layout = _parsed_layout(dims.value, None if strides is None else strides.value)
    return None if layout is None else attrs.evolve(layout, dims_node=dims, strides_node=strides)


def _parsed_layout(dims: str, strides: str | None) -> Layout | None:
    try:
        parsed, parsed_strides = parse_dims(dims), parse_dims(strides or "")
    except SpecError:
        return None
    fits = strides is None or pair_up(parsed, parsed_strides)
    return Layout(dims, strides, parsed, parsed_strides) if fits else None


def _is_bound_once(name: str, value: nodes.Expression, module: nodes.MypyFile) -> bool:
    """True where `name` is a module-level name that only ever is assigned `value`."""
    count, is_value = 0, False
    for statement, in_module in _statements(module.defs):
        if isinstance(statement, nodes.GlobalDecl):
            count += name in statement.names
        elif in_module:
            count += sum(_mentions(target, name) for target in _assigned(statement))
            is_value |= isinstance(statement, nodes.AssignmentStmt) and statement.rvalue is value
    return is_value and count == 1


def _statements(body: Iterable[nodes.Statement]) -> Iterator[tuple[nodes.Statement, bool]]:
    """Every statement, in no order, and whether it is in the module's own scope.

    Nothing recurses: each `elif` is a level of its own, and generated code has thousands of them.
    """
    waiting = [(statement, True) for statement in body]
    while waiting:
        statement, in_module = waiting.pop()
        yield statement, in_module
        in_module = in_module and not isinstance(statement, nodes.FuncDef | nodes.ClassDef)
        waiting += ((part, in_module) for part in _parts(statement))


def _parts(statement: nodes.Statement) -> Iterator[nodes.Statement]:
    blocks: Sequence[nodes.Block | None] = ()
    if isinstance(statement, nodes.Decorator):
        yield statement.func
    elif isinstance(statement, nodes.OverloadedFuncDef):
        yield from statement.items
    elif isinstance(statement, nodes.Block):
        blocks = (statement,)
    elif isinstance(statement, nodes.FuncDef | nodes.WithStmt):
        blocks = (statement.body,)
    elif isinstance(statement, nodes.ClassDef):
        blocks = (statement.defs,)
    elif isinstance(statement, nodes.IfStmt):
        blocks = (*statement.body, statement.else_body)
    elif isinstance(statement, nodes.ForStmt | nodes.WhileStmt):
        blocks = (statement.body, statement.else_body)
    elif isinstance(statement, nodes.TryStmt):
        blocks = (statement.body, *statement.handlers, statement.else_body, statement.finally_body)
    elif isinstance(statement, nodes.MatchStmt):
        blocks = statement.bodies
    for block in blocks:
        yield from () if block is None else block.body


def _assigned(statement: nodes.Statement) -> Sequence[nodes.Expression | None]:
    if isinstance(statement, nodes.AssignmentStmt):
        return statement.lvalues
    if isinstance(statement, nodes.OperatorAssignmentStmt):
        return (statement.lvalue,)
    if isinstance(statement, nodes.ForStmt):
        return (statement.index,)
    if isinstance(statement, nodes.WithStmt):
        return statement.target
    if isinstance(statement, nodes.DelStmt):
        return (statement.expr,)
    return statement.vars if isinstance(statement, nodes.TryStmt) else ()


def _mentions(target: nodes.Expression | None, name: str) -> bool:
    if isinstance(target, nodes.TupleExpr | nodes.ListExpr):
        return any(_mentions(item, name) for item in target.items)
    if isinstance(target, nodes.StarExpr):
        return _mentions(target.expr, name)
    return isinstance(target, nodes.NameExpr) and target.name == name


def note_layout_constant(ctx: DynamicClassDefContext) -> None:
    """Keep the dim strings of a layout that a module assigns once, beside the module's names.

    When another module is checked, mypy has dropped the assignment, or never parsed it because the module
    came from its cache. A module's names it keeps: the text goes there, as the literal type of a name of
    its own, and modules that import the constant's are checked anew when the text changes.
    """
    layout = _literal_layout(ctx.call)
    module = ctx.api.modules.get(ctx.api.cur_mod_id)
    if layout is None or module is None or not _is_bound_once(ctx.name, ctx.call, module):
        return
    name = f"{_CONSTANT}{ctx.name}"
    text = json.dumps([layout.text, layout.strides_text])
    noted = nodes.Var(name, types.LiteralType(text, ctx.api.named_type("builtins.str")))
    noted._fullname = f"{module.fullname}.{name}"
    noted.is_ready = True
    module.names[name] = nodes.SymbolTableNode(nodes.GDEF, noted, module_public=False, plugin_generated=True)


# Callables.


def callee_of(typ: types.Type | None, whose: str) -> Callee | None:
    """A callable's parameters and return type; None where they are not all written down."""
    typ = get_proper_type(typ)
    is_instance = isinstance(typ, types.Instance)
    if isinstance(typ, types.Instance):
        typ = get_proper_type(find_member("__call__", typ, typ, is_operator=True))
    if not isinstance(typ, types.CallableType) or typ.is_ellipsis_args:
        return None
    typ = typ.with_unpacked_kwargs()
    formals = list(zip(typ.arg_kinds, typ.arg_names, map(get_proper_type, typ.arg_types), strict=True))
    if any(isinstance(each, types.ParamSpecType | types.UnpackType) for _, _, each in formals):
        return None
    try:
        signature = inspect.Signature([_parameter(i, *formal) for i, formal in enumerate(formals, 1)])
    except ValueError:
        return None
    names_known = all(name or kind.is_star() for kind, name, _ in formals)
    name = "" if is_instance else (typ.name or "").partition(" of ")[0]
    return Callee(
        label=f'{whose} "{name}"' if name else whose,
        signature=signature,
        names_known=names_known,
        kinds_known=names_known or typ.definition is not None,
        returns=get_proper_type(typ.ret_type),
    )


_KINDS = {
    nodes.ARG_POS: inspect.Parameter.POSITIONAL_OR_KEYWORD,
    nodes.ARG_OPT: inspect.Parameter.POSITIONAL_OR_KEYWORD,
    nodes.ARG_STAR: inspect.Parameter.VAR_POSITIONAL,
    nodes.ARG_NAMED: inspect.Parameter.KEYWORD_ONLY,
    nodes.ARG_NAMED_OPT: inspect.Parameter.KEYWORD_ONLY,
    nodes.ARG_STAR2: inspect.Parameter.VAR_KEYWORD,
}


def _parameter(
    number: int, kind: nodes.ArgKind, name: str | None, typ: types.ProperType
) -> inspect.Parameter:
    says_nothing = isinstance(typ, types.AnyType) or types.has_type_vars(typ)
    has_name = name is not None or kind.is_star()
    return inspect.Parameter(
        name or f"argument{number}",
        _KINDS[kind] if has_name else inspect.Parameter.POSITIONAL_ONLY,
        default=... if kind.is_optional() else inspect.Parameter.empty,
        annotation=inspect.Parameter.empty if says_nothing else typ,
    )


def decorated_type(call: nodes.Expression, api: TypeChecker) -> types.Type | None:
    """The type of what a decorator is applied to; `call` is the decorator."""
    decorators = [each for each, _ in _statements(api.tree.defs) if isinstance(each, nodes.Decorator)]
    found = next((each for each in decorators if any(one is call for one in each.decorators)), None)
    if found is None:
        return None
    typ: types.Type = api.function_type(found.func)
    for each in reversed(found.decorators):
        if each is call:
            return typ
        if not api.has_type(each):
            return None
        argument = api.temp_node(typ, each)
        with api.msg.filter_errors():
            typ, _ = api.expr_checker.check_call(api.lookup_type(each), [argument], [nodes.ARG_POS], each)
    return None


# Structures.


def structure_of_outputs(node: nodes.Expression, typ: types.Type) -> Structure | None:
    """How the layouts given as `outputs` nest."""
    if isinstance(node, nodes.DictExpr):
        keys = [key.value for key, _ in node.items if isinstance(key, nodes.StrExpr)]
        if len(keys) < len(node.items):
            return Structure("mapping")
        return Structure("mapping", len(set(keys)), frozenset(keys))
    if isinstance(node, nodes.ListExpr):
        has_star = any(isinstance(item, nodes.StarExpr) for item in node.items)
        return Structure("tuple", None if has_star else len(node.items))
    return _structure(typ, LAYOUT)


def structure_of_results(typ: types.Type) -> Structure | None:
    """How the tensors of a return type nest."""
    return _structure(typ, TENSOR)


def _structure(typ: types.Type, leaf: str) -> Structure | None:
    typ = get_proper_type(typ)
    if isinstance(typ, types.NoneType):
        return Structure("nothing")
    if isinstance(typ, types.TypedDictType):
        is_fixed = typ.required_keys == set(typ.items)
        keys = frozenset(typ.items) if is_fixed else None
        return Structure("mapping", None, keys) if _all_are(typ.items.values(), leaf) else None
    if isinstance(typ, types.TupleType):
        return Structure("tuple", len(typ.items)) if _all_are(typ.items, leaf) else None
    if not isinstance(typ, types.Instance):
        return None
    if typ.type.has_base(leaf):
        return Structure("tensor")
    if typ.type.fullname in ("builtins.tuple", "builtins.list") and _all_are(typ.args, leaf):
        return Structure("tuple")
    mapping = next((base for base in typ.type.mro if base.fullname == "typing.Mapping"), None)
    if mapping is not None and _all_are(map_instance_to_supertype(typ, mapping).args[1:], leaf):
        return Structure("mapping")
    return None


def _all_are(items: Iterable[types.Type], leaf: str) -> bool:
    proper = map(get_proper_type, items)
    return all(isinstance(item, types.Instance) and item.type.has_base(leaf) for item in proper)
