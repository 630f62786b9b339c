"""mypy plugin: declared breaks are checked against the functions they stand for.

With `plugins = specgraph.mypy_plugin` in mypy's configuration, every call of `BreakSpec`, `graph_break` and
`TensorLayout` is held against what mypy knows of the target, the body and the stub. What is reported is
certain to fail when the spec is built or used; a value that is not written down where the call is, in a
literal, an annotation or a module-level layout, is left alone. Types stay as they are without the plugin.

Error codes: specgraph-parameter, specgraph-unbound-dim, specgraph-dim-syntax, specgraph-outputs,
specgraph-out, specgraph-target, specgraph-signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
from mypy import nodes, types
from mypy.checker import TypeChecker
from mypy.messages import format_type_bare
from mypy.options import Options
from mypy.plugin import DynamicClassDefContext, FunctionContext, Plugin
from mypy.subtypes import is_subtype
from mypy.types import get_proper_type

from .mypy_facts import (
    LAYOUT,
    callee_of,
    decorated_type,
    layout_of,
    note_layout_constant,
    structure_of_outputs,
    structure_of_results,
)
from .mypy_rules import (
    SIGNATURE,
    TARGET,
    Callee,
    Layout,
    Problem,
    misfit,
    out_problems,
    outputs_problems,
    parameter_problems,
    syntax_problems,
    unbound_problems,
)
from .mypy_targets import find_target

BREAK_SPEC = "specgraph.spec.BreakSpec"
GRAPH_BREAK = "specgraph.intercept.graph_break"
OWNERSHIP = "specgraph.spec.Ownership"
_MAPPINGS = ("inputs", "live")


def _digest() -> str:
    """Of all modules of the plugin, so that mypy drops its cache when one changes."""
    rooms = ("plugin", "facts", "rules", "targets")
    files = [Path(__file__).with_name(f"mypy_{room}.py") for room in rooms]
    files.append(Path(__file__).with_name("dims.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


__version__ = _digest()


@attrs.frozen(eq=False)
class Argument:
    """What a call passes for one parameter.

    Args:
        node: the expression; None where the parameter is left out.
        type: its type, NoneType where the parameter is left out.
        is_known: False where it is passed in a way that does not tell, by `*args` or `**kwargs`.
    """

    node: nodes.Expression | None
    type: types.ProperType
    is_known: bool = True

    @property
    def is_none(self) -> bool:
        """True where the parameter is left out or passed None."""
        return self.is_known and isinstance(self.type, types.NoneType)


class BreakCall:
    """One call of `BreakSpec` or `graph_break`, and the facts it states."""

    def __init__(self, ctx: FunctionContext, api: TypeChecker) -> None:
        self.ctx = ctx
        self.api = api

    def argument(self, name: str) -> Argument:
        """What is passed for the parameter `name`."""
        unknown = types.AnyType(types.TypeOfAny.special_form)
        if name not in self.ctx.callee_arg_names:
            return Argument(None, unknown, is_known=False)
        index = self.ctx.callee_arg_names.index(name)
        kinds = self.ctx.arg_kinds[index]
        if not kinds:
            return Argument(None, types.NoneType())
        if kinds not in ([nodes.ARG_POS], [nodes.ARG_NAMED]):
            return Argument(None, unknown, is_known=False)
        return Argument(self.ctx.args[index][0], get_proper_type(self.ctx.arg_types[index][0]))

    def node(self, name: str) -> nodes.Context:
        """Where to report what is wrong with an argument."""
        return self.argument(name).node or self.ctx.context

    def callee(self, field: str) -> Callee | None:
        """The callable passed for `body` or `capture_stub`."""
        argument = self.argument(field)
        return None if argument.is_none else callee_of(argument.type, field)

    def items(self, field: str) -> list[nodes.Expression | None] | None:
        """The names in `out` or `mutates`, the keys of `inputs` or `live`; None where they are not written.

        A `*` or `**` in a display is an item that is None.
        """
        argument = self.argument(field)
        if argument.is_none:
            return []
        node = argument.node
        if isinstance(node, nodes.DictExpr) and field in _MAPPINGS:
            return [key for key, _ in node.items]
        if isinstance(node, nodes.TupleExpr | nodes.ListExpr) and field not in _MAPPINGS:
            return [None if isinstance(item, nodes.StarExpr) else item for item in node.items]
        return [node] if isinstance(node, nodes.StrExpr) and field not in _MAPPINGS else None

    def names(self, field: str) -> list[nodes.StrExpr]:
        """Those of `items` that are literals."""
        return [item for item in self.items(field) or () if isinstance(item, nodes.StrExpr)]

    @property
    def num_out(self) -> int | None:
        """How many names `out` has."""
        items = self.items("out")
        return None if items is None or None in items else len(items)

    @property
    def added(self) -> list[str] | None:
        """Parameters that the executor fills; None where not all of their names are literals."""
        fields = ("live",) if self.passes is False else ("live", "out")
        names = [name.value for field in fields for name in self.names(field)]
        items = [self.items(field) for field in fields]
        num_items = sum(len(each) for each in items if each is not None)
        return None if None in items or num_items > len(names) else names

    @property
    def passes(self) -> bool | None:
        """True for PASS_THROUGH."""
        argument = self.argument("ownership")
        if argument.is_known and argument.node is None:
            return False
        typ = argument.type
        literal = typ.last_known_value if isinstance(typ, types.Instance) else typ
        if not isinstance(literal, types.LiteralType) or literal.fallback.type.fullname != OWNERSHIP:
            return None
        return literal.value == "PASS_THROUGH"

    def input_layouts(self) -> list[Layout | None]:
        """The layouts in `inputs`; None for each that is not known."""
        argument = self.argument("inputs")
        if argument.is_none:
            return []
        if not isinstance(argument.node, nodes.DictExpr):
            return [None]
        return [
            None if key is None else layout_of(value, self.api.modules) for key, value in argument.node.items
        ]

    def output_layouts(self) -> Iterator[tuple[nodes.Context, Layout | None]]:
        """The layouts in `outputs`, each with the expression that gives it."""
        node = self.argument("outputs").node
        items = [node]
        if isinstance(node, nodes.TupleExpr | nodes.ListExpr):
            items = list(node.items)
        elif isinstance(node, nodes.DictExpr):
            items = [value for _, value in node.items]
        return ((item, layout_of(item, self.api.modules)) for item in items if item is not None)

    def refused(self, argument: types.Type, parameter: types.Type) -> tuple[str, str] | None:
        """Both types as text where the first may not be passed for the second."""
        if is_subtype(argument, parameter, options=self.api.options):
            return None
        options = self.api.options
        return format_type_bare(argument, options), format_type_bare(parameter, options)


def break_problems(call: BreakCall, target: Callee | None) -> Iterator[Problem]:
    """Everything that is certainly wrong with a break whose target has been looked up."""
    has_body = not call.argument("body").is_none
    body = call.callee("body") if has_body else target
    yield from parameter_problems("inputs", call.names("inputs"), target)
    for field in ("mutates", "live", "out"):
        yield from parameter_problems(field, call.names(field), body)
    yield from unbound_problems(call.output_layouts(), call.input_layouts())
    yield from _outputs_problems(call, body)
    yield from _signature_problems(call, target)


def _outputs_problems(call: BreakCall, body: Callee | None) -> Iterator[Problem]:
    argument, node = call.argument("outputs"), call.node("outputs")
    outputs = None if argument.node is None else structure_of_outputs(argument.node, argument.type)
    if body is not None:
        returns = format_type_bare(body.returns, call.api.options)
        whose = f'{body.label} returns "{returns}"'
        yield from outputs_problems(node, outputs, structure_of_results(body.returns), call.passes, whose)
    yield from out_problems(call.passes, call.node("ownership"), call.node("out"), call.num_out, outputs)


def _signature_problems(call: BreakCall, target: Callee | None) -> Iterator[Problem]:
    added = call.added
    for field in ("body", "capture_stub"):
        stand_in = call.callee(field)
        if target is None or added is None or stand_in is None or not stand_in.kinds_known:
            continue
        if field == "body" and _lacks_added(call, stand_in):
            continue
        problem = misfit(target, stand_in, added, call.refused)
        if problem is not None:
            yield Problem(SIGNATURE, call.node(field), problem)


def _lacks_added(call: BreakCall, body: Callee) -> bool:
    """True where `parameter_problems` already says why the body cannot be called."""
    fields = ("live", "out")
    return any(True for field in fields for _ in parameter_problems(field, call.names(field), body))


def _report(problems: Iterator[Problem], api: TypeChecker) -> None:
    for problem in problems:
        api.fail(problem.message, problem.node, code=problem.code)


def _check_layout(ctx: FunctionContext) -> types.Type:
    if isinstance(ctx.api, TypeChecker):
        call = BreakCall(ctx, ctx.api)
        dims, strides = call.argument("dims").node, call.argument("strides").node
        texts = [each if isinstance(each, nodes.StrExpr) else None for each in (dims, strides)]
        _report(syntax_problems(*texts), ctx.api)
    return ctx.default_return_type


def _check_graph_break(ctx: FunctionContext) -> types.Type:
    if isinstance(ctx.api, TypeChecker) and isinstance(ctx.context, nodes.Expression):
        target = callee_of(decorated_type(ctx.context, ctx.api), "target")
        _report(break_problems(BreakCall(ctx, ctx.api), target), ctx.api)
    return ctx.default_return_type


class SpecgraphPlugin(Plugin):
    """Checks breaks where they are declared; see the module's docstring."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._looked_into: dict[str, set[str]] = {}

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], types.Type] | None:
        """Check the calls of the names that declare breaks."""
        hooks = {LAYOUT: _check_layout, GRAPH_BREAK: _check_graph_break, BREAK_SPEC: self._check_break_spec}
        return hooks.get(fullname)

    def get_dynamic_class_hook(self, fullname: str) -> Callable[[DynamicClassDefContext], None] | None:
        """Note the layouts that modules assign to names."""
        return note_layout_constant if fullname == LAYOUT else None

    def get_additional_indirect_deps(self, file: nodes.MypyFile) -> set[str]:
        """The modules that string targets were looked up in."""
        return self._looked_into.pop(file.fullname, set())

    def _check_break_spec(self, ctx: FunctionContext) -> types.Type:
        if isinstance(ctx.api, TypeChecker):
            call = BreakCall(ctx, ctx.api)
            target = self._target(call, ctx.api)
            _report(break_problems(call, target), ctx.api)
        return ctx.default_return_type

    def _target(self, call: BreakCall, api: TypeChecker) -> Callee | None:
        argument = call.argument("target")
        if not isinstance(argument.node, nodes.StrExpr):
            return callee_of(argument.type, "target")
        found = find_target(argument.node.value, api)
        if found.module is not None:
            self._looked_into.setdefault(api.tree.fullname, set()).add(found.module)
        if found.problem is not None:
            api.fail(found.problem, argument.node, code=TARGET)
        return callee_of(found.type, "target")


def plugin(version: str) -> type[Plugin]:
    """mypy's entry point."""
    return SpecgraphPlugin
