"""The dim language: how layouts give sizes names.

Dims are separated by blanks; a dim is an integer, a name, `world("group")` (the number of processes in a
group), an expression of these with `+ - * //` and parentheses (no blanks inside), or, at most once, `*rest`,
which stands for any number of dims. Text parses to a small syntax tree and prints back without loss; nothing
is ever evaluated as Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import attrs

from .errors import LayoutError, SpecError

Dims: TypeAlias = Mapping[str, int | tuple[int, ...]]
"""Sizes bound to names; a `*rest` name binds a tuple of sizes, and `world("group")` is a name too."""

GroupSizes: TypeAlias = Mapping[str, int | Callable[[], int]]
"""The number of processes in each group, or what returns it."""


@attrs.frozen
class Const:
    """An integer."""

    value: int


@attrs.frozen
class Name:
    """A named size."""

    name: str


@attrs.frozen
class Rest:
    """`*name`: any number of consecutive dims."""

    name: str


@attrs.frozen
class World:
    """`world("group")`: the number of processes in a group."""

    group: str


@attrs.frozen
class BinOp:
    """`left op right`, with op one of `+ - * //`."""

    op: str
    left: Expr
    right: Expr


Expr: TypeAlias = Const | Name | World | BinOp
Dim: TypeAlias = Const | Name | World | BinOp | Rest

_TOKEN = re.compile(r"""[0-9]+|[A-Za-z_][A-Za-z0-9_]*|//|[-+*()]|"[\w.:-]+"|'[\w.:-]+'""", re.ASCII)
_MAX_TOKENS = 200
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "//": 2}
_LANGUAGE = (
    'write dims separated by blanks; each an int, a name, world("group"), an expression with + - * // and '
    "parentheses but no blanks, or one *rest"
)


class _Parser:
    """Precedence climbing over the tokens of one dim."""

    def __init__(self, word: str, text: str) -> None:
        self.text = text
        self.word = word
        self.tokens = _TOKEN.findall(word)
        self.at = 0
        if "".join(self.tokens) != word:
            raise self.error("has a character that no dim has")
        if len(self.tokens) > _MAX_TOKENS or any(len(token) > _MAX_TOKENS for token in self.tokens):
            raise self.error("is too long")

    def error(self, problem: str) -> SpecError:
        word = self.word if len(self.word) <= _MAX_TOKENS else f"{self.word[:20]}..."
        return SpecError(
            f"dim {word!r} of {self.text[:_MAX_TOKENS]!r} {problem}", code="SG103", fix=_LANGUAGE
        )

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def dim(self) -> Dim:
        if self.peek() == "*":
            self.take()
            name = self.take()
            if not _is_name(name) or self.peek():
                raise self.error("must be *name and nothing more")
            return Rest(name)
        expr = self.expr(1)
        if self.peek():
            raise self.error(f"has {self.peek()!r} where it should end")
        return expr

    def expr(self, lowest: int) -> Expr:
        left = self.atom()
        while _PRECEDENCE.get(self.peek(), 0) >= lowest:
            op = self.take()
            left = BinOp(op, left, self.expr(_PRECEDENCE[op] + 1))
        return left

    def atom(self) -> Expr:
        token = self.take()
        if token == "(":
            inner = self.expr(1)
            if self.take() != ")":
                raise self.error("lacks a closing parenthesis")
            return inner
        if token.isdigit():
            return Const(int(token))
        if token == "world" and self.peek() == "(":
            return self.world()
        if _is_name(token):
            return Name(token)
        raise self.error(f"has {token!r} where a size should be" if token else "ends too early")

    def world(self) -> World:
        _, group, closing = self.take(), self.take(), self.take()
        if group[:1] not in ("'", '"') or closing != ")":
            raise self.error('must name the group as world("group")')
        return World(group[1:-1])


def _is_name(token: str) -> bool:
    return token.isidentifier() and token.isascii()


def parse_dims(text: str) -> tuple[Dim, ...]:
    """Parse a dim string.

    Raises:
        SpecError: the text is not in the dim language.
    """
    dims = tuple(_Parser(word, text).dim() for word in text.split())
    rests = [dim for dim in dims if isinstance(dim, Rest)]
    if len(rests) > 1:
        raise SpecError(
            f"{text!r} has more than one *rest", code="SG103", fix="keep one; name the other dims"
        )
    if rests and any(rests[0].name in dim_names(dim) for dim in dims if not isinstance(dim, Rest)):
        raise SpecError(
            f"{text!r} uses {rests[0].name!r} both for one dim and for *{rests[0].name}",
            code="SG103",
            fix="give the *rest a name of its own",
        )
    return dims


def format_dim(dim: Dim) -> str:
    """The dim as text that parses to the same dim, with no needless parentheses."""
    match dim:
        case Const(value):
            return str(value)
        case Name(name):
            return name
        case Rest(name):
            return f"*{name}"
        case World(group):
            return f'world("{group}")'
        case BinOp(op, left, right):
            return f"{_operand(left, _PRECEDENCE[op])}{op}{_operand(right, _PRECEDENCE[op] + 1)}"


def _operand(expr: Expr, lowest: int) -> str:
    text = format_dim(expr)
    return f"({text})" if isinstance(expr, BinOp) and _PRECEDENCE[expr.op] < lowest else text


def dim_names(dim: Dim) -> frozenset[str]:
    """The names a dim mentions, groups aside."""
    match dim:
        case Const() | World():
            return frozenset()
        case Name(name) | Rest(name):
            return frozenset({name})
        case BinOp(_, left, right):
            return dim_names(left) | dim_names(right)


def group_names(dim: Dim) -> frozenset[str]:
    """The groups a dim mentions."""
    match dim:
        case World(group):
            return frozenset({group})
        case BinOp(_, left, right):
            return group_names(left) | group_names(right)
        case _:
            return frozenset()


def group_dims(names: Iterable[str], groups: GroupSizes) -> dict[str, int]:
    """The sizes of the groups called `names`, under the text by which a dim names them.

    No other group is looked up.

    Raises:
        LayoutError: a size is not known, cannot be looked up, or is no positive number.
    """
    return {format_dim(World(name)): _group_size(name, groups) for name in sorted(names)}


def _group_size(name: str, groups: GroupSizes) -> int:
    what = format_dim(World(name))
    fix = f'initialise the group first, or give its size: ModelSpec.groups={{"{name}": 8}}'
    if name not in groups:
        raise LayoutError(
            f"{what} has no size", actual=f"groups: {', '.join(sorted(groups)) or 'none'}", fix=fix
        )
    given = groups[name]
    try:
        size: object = given() if callable(given) else given
    except Exception as error:
        raise LayoutError(f"{what} could not be looked up: {error}", fix=fix) from error
    if not isinstance(size, int) or size < 1:
        raise LayoutError(f"{what} is no number of processes", actual=repr(size), fix=fix)
    return size


def evaluate(expr: Expr, dims: Dims) -> int:
    """The value of an expression.

    Raises:
        LayoutError: a name is not bound or stands for several dims, or a division is by zero.
    """
    match expr:
        case Const(value):
            return value
        case Name() | World():
            name = format_dim(expr)
            if name not in dims:
                known = ", ".join(sorted(dims)) or "none"
                fix = (
                    f"name {name!r} as a plain dim in the layout of one of the break's inputs"
                    if isinstance(expr, Name)
                    else "give the group's size in ModelSpec.groups"
                )
                raise LayoutError(f"dim {name!r} is not bound", actual=f"bound here: {known}", fix=fix)
            size = dims[name]
            if isinstance(size, tuple):
                raise LayoutError(
                    f"*{name} stands for several dims and cannot be a number",
                    fix="name the single dim that is meant",
                )
            return size
        case BinOp(op, left, right):
            a, b = evaluate(left, dims), evaluate(right, dims)
            if op == "//" and b == 0:
                raise LayoutError(
                    f"{format_dim(expr)} divides by zero",
                    actual=f"{format_dim(right)} = 0",
                    fix="correct the expression",
                )
            return {"+": a + b, "-": a - b, "*": a * b, "//": a // (b or 1)}[op]


def size_of(expr: Expr, dims: Dims) -> int:
    """The value of an expression that is a size or a stride.

    Raises:
        LayoutError: as `evaluate` does, or the value is negative.
    """
    size = evaluate(expr, dims)
    if size < 0:
        raise LayoutError(
            f"{format_dim(expr)} is negative",
            actual=f"{format_dim(expr)} = {size} with {format_dims(dims)}",
            fix="correct the expression or the input",
        )
    return size


def format_dims(dims: Dims) -> str:
    """`{"B": 1, "rest": (2, 3)}` as `B=1 *rest=2x3`."""
    return " ".join(
        f"{name}={size}" if isinstance(size, int) else f"*{name}={'x'.join(map(str, size)) or '()'}"
        for name, size in dims.items()
    )
