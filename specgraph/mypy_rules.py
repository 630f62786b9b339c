"""What is certainly wrong with a break, told from facts about its source.

The facts (names, layouts, signatures, structures) come from `mypy_facts`; a fact that the source does not
settle is None, and a rule that needs it then finds nothing. So every `Problem` is one that building the
spec, resolving its target or calling its body would meet.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator

import attrs
from mypy.errorcodes import ErrorCode
from mypy.nodes import Context, StrExpr
from mypy.types import ProperType, Type

from .dims import Dim, Name, Rest, dim_names, parse_dims
from .errors import SpecError


def _code(name: str, description: str) -> ErrorCode:
    return ErrorCode(f"specgraph-{name}", description, "specgraph")


PARAMETER = _code("parameter", "Check that names in a break's fields are parameters")
UNBOUND_DIM = _code("unbound-dim", "Check that dims of output layouts are bound by input layouts")
DIM_SYNTAX = _code("dim-syntax", "Check that dim strings are in the dim language")
OUTPUTS = _code("outputs", "Check outputs against the return annotation")
OUT = _code("out", "Check that out= names one parameter an output, and only with PASS_THROUGH")
TARGET = _code("target", "Check that a target given as a string exists")
SIGNATURE = _code("signature", "Check that a body or stub can be called as the target is")


@attrs.frozen(eq=False)
class Problem:
    """Something certainly wrong, and the node of the wrong argument."""

    code: ErrorCode
    node: Context
    message: str


@attrs.frozen(eq=False)
class Layout:
    """A layout whose dim strings are literals that parse.

    Args:
        text, strides_text: its dim strings, as written.
        dims, strides: the same, parsed.
        dims_node, strides_node: the literals, where they are written in the call itself.
    """

    text: str
    strides_text: str | None
    dims: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    dims_node: Context | None = None
    strides_node: Context | None = None

    @property
    def binding_names(self) -> frozenset[str]:
        """As `TensorLayout.binding_names`."""
        return frozenset(dim.name for dim in self.dims + self.strides if isinstance(dim, Name | Rest))


@attrs.frozen(eq=False)
class Callee:
    """A callable as its annotations describe it.

    Args:
        label: what messages call it, `target "attention"`.
        signature: its parameters; an annotation is a mypy type, or empty where it says nothing.
        names_known: False where a parameter may have a name that the type does not keep.
        kinds_known: False where such a parameter may also take an argument by name, as of a `Callable`.
        returns: its return type.
    """

    label: str
    signature: inspect.Signature
    names_known: bool
    kinds_known: bool
    returns: ProperType


@attrs.frozen
class Structure:
    """How results, or layouts of them, nest.

    Args:
        kind: `"tensor"`, `"tuple"`, `"mapping"` or `"nothing"`.
        count: how many there are, where that is fixed.
        keys: a mapping's keys, where they are fixed.
    """

    kind: str
    count: int | None = None
    keys: frozenset[str] | None = None

    def fits(self, other: Structure) -> bool:
        """False where no value has both structures."""
        return (
            self.kind == other.kind
            and (self.count is None or other.count is None or self.count == other.count)
            and (self.keys is None or other.keys is None or self.keys == other.keys)
        )

    def __str__(self) -> str:
        if self.kind == "tensor":
            return "one TensorLayout"
        if self.kind == "nothing":
            return "None"
        if self.keys is not None:
            return f"a mapping with the keys {', '.join(map(repr, sorted(self.keys)))}"
        if self.kind == "mapping":
            return "a mapping of TensorLayouts"
        return f"a tuple of {'' if self.count is None else f'{self.count} '}TensorLayouts"


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean "q"?` where a known name is near, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f'; did you mean "{close[0]}"?' if close else ""


def parameter_problems(field: str, names: Iterable[StrExpr], callee: Callee | None) -> Iterator[Problem]:
    """Names that are no parameter of `callee`; `**kwargs` takes any name."""
    if callee is None or not callee.names_known:
        return
    parameters = callee.signature.parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    for name in names:
        if name.value not in parameters:
            advice = (
                nearest(name.value, parameters) or f"; correct it, or add the parameter to {callee.label}"
            )
            yield Problem(
                PARAMETER,
                name,
                f'{field}= names "{name.value}", which is no parameter of {callee.label} '
                f"(it has: {', '.join(parameters) or 'none'}){advice}",
            )


def syntax_problems(dims: StrExpr | None, strides: StrExpr | None) -> Iterator[Problem]:
    """Dim strings that do not parse, and strides that do not pair up with dims."""
    parsed: list[tuple[Dim, ...]] = []
    for text in (dims, strides):
        if text is None:
            continue
        try:
            parsed.append(parse_dims(text.value))
        except SpecError as error:
            yield Problem(DIM_SYNTAX, text, f"{error.problem}; {error.fix}")
    if len(parsed) == 2 and strides is not None and not pair_up(*parsed):
        yield Problem(
            DIM_SYNTAX,
            strides,
            f"{len(parsed[1])} strides do not pair up with {len(parsed[0])} dims; give one stride for each "
            "dim, and none where there is a *rest",
        )


def pair_up(dims: tuple[Dim, ...], strides: tuple[Dim, ...]) -> bool:
    """True where each dim has a stride; a `*rest` has none."""
    return len(dims) == len(strides) and not any(isinstance(dim, Rest) for dim in dims + strides)


def unbound_problems(
    outputs: Iterable[tuple[Context, Layout | None]], inputs: Iterable[Layout | None]
) -> Iterator[Problem]:
    """Names in output layouts that no input layout binds."""
    bound: frozenset[str] = frozenset()
    for layout in inputs:
        if layout is None:
            return
        bound |= layout.binding_names
    for node, layout in outputs:
        if layout is None:
            continue
        parts = ((layout.dims, layout.dims_node, "dim"), (layout.strides, layout.strides_node, "stride"))
        for dims, literal, what in parts:
            for name in sorted(frozenset().union(*map(dim_names, dims)) - bound):
                yield Problem(
                    UNBOUND_DIM,
                    literal or node,
                    f'"{name}" in a {what} of the output layout "{layout.text}" is bound by no input '
                    f"(bound: {', '.join(sorted(bound)) or 'nothing'})"
                    f"{nearest(name, bound) or f'; make {name} a plain dim of a layout in inputs='}",
                )


def outputs_problems(
    node: Context, outputs: Structure | None, returned: Structure | None, passes: bool | None, whose: str
) -> Iterator[Problem]:
    """Layouts whose number or nesting is not that of what is returned."""
    if outputs is None or returned is None or outputs.fits(returned):
        return
    if returned.kind == "nothing" and passes is not False:
        return
    yield Problem(
        OUTPUTS,
        node,
        f"outputs= is {outputs}, but {whose}; give {returned}, or correct the return annotation",
    )


def out_problems(
    passes: bool | None, ownership: Context, out: Context, num_names: int | None, outputs: Structure | None
) -> Iterator[Problem]:
    """PASS_THROUGH without one name an output, COPY with names."""
    if passes is None or num_names is None:
        return
    num_outputs = _num_outputs(outputs)
    if not passes:
        if num_names:
            yield Problem(
                OUT,
                out,
                "out= is given, but ownership is COPY and the body is handed no buffers; drop out=, or set "
                "ownership=Ownership.PASS_THROUGH",
            )
    elif num_outputs == 0:
        yield Problem(
            OUT,
            ownership,
            "PASS_THROUGH with outputs=None hands the body no buffers; give the layouts in outputs=, or "
            "drop ownership= and list what the body writes in mutates=",
        )
    elif num_names == 0:
        yield Problem(
            OUT,
            ownership,
            "PASS_THROUGH hands the body its buffers, but out= names no parameters for them; name "
            f"{num_outputs or 'one'} in out=, one an output, in order",
        )
    elif num_outputs is not None and num_outputs != num_names:
        yield Problem(
            OUT,
            out,
            f"out= and outputs= differ in length, {num_names} and {num_outputs}; name one parameter of the "
            "body for each output, in order",
        )


def _num_outputs(outputs: Structure | None) -> int | None:
    if outputs is None:
        return None
    return {"tensor": 1, "nothing": 0}.get(outputs.kind, outputs.count)


_DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_PATH = re.compile(f"({_DOTTED}):({_DOTTED})")
_OP = re.compile(r"op:\w+::\w+(?:\.\w+)?")
_GLOB = re.compile(r"module:[^\s.:]+(?:\.[^\s.:]+)*")


def import_path(target: str) -> tuple[str, str] | None:
    """Module and qualified name of `"pkg.mod:Class.method"`; None for a target of another form."""
    found = None if target.startswith(("op:", "module:")) else _PATH.fullmatch(target)
    return None if found is None else (found[1], found[2])


def form_problem(target: str) -> str | None:
    """What is wrong with the form of a target string, if anything is."""
    if import_path(target) or _OP.fullmatch(target) or _GLOB.fullmatch(target):
        return None
    return (
        f'target "{target}" has no known form; write "pkg.mod:fn", "pkg.mod:Class.method", '
        '"module:blocks.*.attn" or "op:ns::name"'
    )


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_STARS = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
_EMPTY = inspect.Parameter.empty
_ANYTHING = inspect.Parameter("anything", inspect.Parameter.KEYWORD_ONLY)


def misfit(
    target: Callee,
    stand_in: Callee,
    added: Collection[str],
    refused: Callable[[Type, Type], tuple[str, str] | None],
) -> str | None:
    """Why some call that `target` takes is not taken by what stands in for it, if so.

    Everything fits a target that has `*args: Any, **kwargs: Any` only; it may wrap what takes less.

    Args:
        target: what is called.
        stand_in: what runs instead, on the same arguments.
        added: parameters handed over as well, by name unless the call passed them by position.
        refused: names an argument's type and a parameter's type where the first may not be passed for the
            second.
    """
    parameters = target.signature.parameters.values()
    if [each.kind for each in parameters] == _STARS and not any(map(_says_type, parameters)):
        return None
    name = stand_in.label.rpartition(" ")[2].strip('"')
    for args, kwargs in _calls(target.signature, stand_in.signature, added):
        try:
            bound = stand_in.signature.bind(*args, **kwargs)
        except TypeError as error:
            call = ", ".join(dict.fromkeys([*map(_argument, args), *(f"{key}=..." for key in kwargs)]))
            by_name = f", and take {', '.join(added)} by keyword" if added else ""
            return (
                f"{stand_in.label} does not take every call that {target.label} takes: {name}({call}) fails, "
                f"{error}; give it the parameters of {target.label}{by_name}"
            )
        for key, argument in bound.arguments.items():
            parameter = stand_in.signature.parameters[key]
            is_one = isinstance(argument, inspect.Parameter)
            if not (is_one and _says_type(argument) and _says_type(parameter)):
                continue
            types = refused(argument.annotation, parameter.annotation)
            if types is not None:
                return (
                    f'{stand_in.label} takes "{types[1]}" for "{key}", but {target.label} takes '
                    f'"{types[0]}"; widen the annotation of "{key}"'
                )
    return None


def _says_type(parameter: inspect.Parameter) -> bool:
    return parameter.annotation is not _EMPTY


def _argument(parameter: inspect.Parameter) -> str:
    return str(parameter.replace(annotation=_EMPTY, default=_EMPTY))


def _calls(
    target: inspect.Signature, stand_in: inspect.Signature, added: Collection[str]
) -> Iterator[tuple[list[inspect.Parameter], dict[str, inspect.Parameter]]]:
    """Calls that `target` takes such that `stand_in`, if it takes them, takes every call of `target`.

    Each parameter is passed by position, by name and not at all, as far as it can be; of what `*args` and
    `**kwargs` take there is more than the stand-in has parameters for.
    """
    parameters = [
        each.replace(annotation=_EMPTY, default=_EMPTY) if each.name in added else each
        for each in target.parameters.values()
    ]
    by_position = [each for each in parameters if each.kind in _BY_POSITION]
    by_name = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    always = {name: _ANYTHING for name in added if name not in target.parameters}
    fixed = [index for index, each in enumerate(by_position) if _is_fixed(each)]
    for count in range(len(by_position), fixed[-1] if fixed else -1, -1):
        rest = [each for each in by_position[count:] + by_name if each.kind in _BY_NAME]
        required = [each for each in rest if each.default is _EMPTY]
        for given in (rest, required):
            yield by_position[:count], {each.name: each for each in given} | always
    kinds = [each.kind for each in parameters]
    longest = list(by_position)
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        rest = [parameters[kinds.index(inspect.Parameter.VAR_POSITIONAL)]]
        longest += rest * (len(stand_in.parameters) + 1)
    names = ["other_name", *stand_in.parameters] if inspect.Parameter.VAR_KEYWORD in kinds else []
    own = {each.name for each in by_position + by_name}
    free = [name for name in names if name not in own and not _is_by_position_only(stand_in, name)]
    for args in (by_position, longest):
        yield args, {each.name: each for each in by_name} | always
        for name in free:
            yield args, {name: _ANYTHING} | {each.name: each for each in by_name} | always


def _is_by_position_only(signature: inspect.Signature, name: str) -> bool:
    parameter = signature.parameters.get(name)
    return parameter is not None and parameter.kind is inspect.Parameter.POSITIONAL_ONLY


def _is_fixed(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.POSITIONAL_ONLY and parameter.default is _EMPTY
