"""Tensor layouts and the dim language.

A layout says what a tensor must look like without saying how large it is: `TensorLayout("B Q H*D",
"bfloat16")` names its dims. Layouts of a call's inputs *bind* the names to sizes, layouts of its outputs
are *resolved* from them, and a tensor is *checked* against what was resolved. All three are exact: no
broadcasting, no casting, no guessing.

The language: dims are separated by blanks; a dim is an integer, a name, an expression of both with
`+ - * //` and parentheses (no blanks inside), or, at most once, `*rest`, which stands for any number of
dims. A plain name binds where an input first shows it; an expression never binds, it is compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

import attrs
import torch

from .errors import LayoutError, SpecError

Dims: TypeAlias = Mapping[str, int | tuple[int, ...]]
"""Sizes bound to names; a `*rest` name binds a tuple of sizes."""


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
class BinOp:
    """`left op right`, with op one of `+ - * //`."""

    op: str
    left: Expr
    right: Expr


Expr: TypeAlias = Const | Name | BinOp
Dim: TypeAlias = Const | Name | BinOp | Rest

_TOKEN = re.compile(r"[0-9]+|[A-Za-z_][A-Za-z0-9_]*|//|[-+*()]")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "//": 2}
_LANGUAGE = (
    "write dims separated by blanks; each an int, a name, an expression with + - * // and parentheses "
    "but no blanks, or one *rest"
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

    def error(self, problem: str) -> SpecError:
        return SpecError(f"dim {self.word!r} of {self.text!r} {problem}", fix=_LANGUAGE)

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
        if _is_name(token):
            return Name(token)
        raise self.error(f"has {token!r} where a size should be" if token else "ends too early")


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
        raise SpecError(f"{text!r} has more than one *rest", fix="keep one; name the other dims")
    if rests and any(rests[0].name in dim_names(dim) for dim in dims if not isinstance(dim, Rest)):
        raise SpecError(
            f"{text!r} uses {rests[0].name!r} both for one dim and for *{rests[0].name}",
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
        case BinOp(op, left, right):
            return f"{_operand(left, _PRECEDENCE[op])}{op}{_operand(right, _PRECEDENCE[op] + 1)}"


def _operand(expr: Expr, lowest: int) -> str:
    text = format_dim(expr)
    return f"({text})" if isinstance(expr, BinOp) and _PRECEDENCE[expr.op] < lowest else text


def dim_names(dim: Dim) -> frozenset[str]:
    """The names a dim mentions."""
    match dim:
        case Const():
            return frozenset()
        case Name(name) | Rest(name):
            return frozenset({name})
        case BinOp(_, left, right):
            return dim_names(left) | dim_names(right)


def _evaluate(expr: Expr, dims: Dims) -> int:
    match expr:
        case Const(value):
            return value
        case Name(name):
            if name not in dims:
                known = ", ".join(sorted(dims)) or "none"
                raise LayoutError(
                    f"dim {name!r} is not bound",
                    actual=f"bound here: {known}",
                    fix=f"name {name!r} as a plain dim in the layout of one of the break's inputs",
                )
            size = dims[name]
            if isinstance(size, tuple):
                raise LayoutError(
                    f"*{name} stands for several dims and cannot be a number",
                    fix="name the single dim that is meant",
                )
            return size
        case BinOp(op, left, right):
            a, b = _evaluate(left, dims), _evaluate(right, dims)
            if op == "//" and b == 0:
                raise LayoutError(
                    f"{format_dim(expr)} divides by zero",
                    actual=f"{format_dim(right)} = 0",
                    fix="correct the expression",
                )
            return {"+": a + b, "-": a - b, "*": a * b, "//": a // (b or 1)}[op]


@attrs.frozen
class Like:
    """A dtype that is the dtype of the argument bound to `arg`."""

    arg: str

    def __str__(self) -> str:
        return f"like({self.arg})"


def like(arg: str) -> Like:
    """Dtype of the argument bound to parameter `arg`, for `TensorLayout(dtype=...)`."""
    return Like(arg)


def as_dtype(value: torch.dtype | str) -> torch.dtype:
    """A dtype from itself or from its name (`"bfloat16"`, `"torch.bfloat16"`).

    Raises:
        SpecError: torch has no dtype of that name.
    """
    if isinstance(value, torch.dtype):
        return value
    found = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise SpecError(f"torch has no dtype named {value!r}", fix='write one such as "bfloat16"')
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _dtype_or_like(value: torch.dtype | str | Like | None) -> torch.dtype | Like | None:
    return value if value is None or isinstance(value, Like) else as_dtype(value)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@attrs.frozen
class ConcreteLayout:
    """What one tensor looks like: sizes and strides in elements, and its dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ConcreteLayout:
        """The layout `tensor` has."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def is_contiguous(self) -> bool:
        """True where the strides that address anything are row-major."""
        return self.same_strides(contiguous_strides(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; gaps between strides do not count."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    @property
    def span_nbytes(self) -> int:
        """Bytes from the first element to the last, both included."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    def same_strides(self, strides: tuple[int, ...]) -> bool:
        """Equal strides; those of dims of size one, and of empty tensors, address nothing."""
        if strides == self.strides or 0 in self.shape:
            return True
        return all(
            mine == theirs or size == 1
            for size, mine, theirs in zip(self.shape, self.strides, strides, strict=True)
        )

    def check(self, tensor: torch.Tensor, name: str, fix: str) -> None:
        """Check shape, dtype and strides.

        Raises:
            LayoutError: `tensor` differs; nothing is converted.
        """
        actual = ConcreteLayout.of(tensor)
        if actual.shape == self.shape and actual.dtype is self.dtype and self.same_strides(actual.strides):
            return
        raise LayoutError(
            "does not have the expected layout",
            tensor=name,
            expected=str(self),
            actual=str(actual),
            fix=fix,
        )

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)}[{' '.join(map(str, self.shape))}]"
        return text if self.is_contiguous else f"{text} strides ({' '.join(map(str, self.strides))})"


def _dims_text(value: str) -> str:
    return " ".join(format_dim(dim) for dim in parse_dims(value))


def _optional_dims_text(value: str | None) -> str | None:
    return None if value is None else _dims_text(value)


@attrs.frozen
class TensorLayout:
    """A tensor's layout in named dims.

    Args:
        dims: a dim string, as in the module's docstring; `""` is a tensor without dims.
        dtype: a `torch.dtype`, its name, `like("arg")`, or None for any (inputs only).
        strides: None (contiguous for outputs, anything for inputs) or a dim string, in elements.

    Raises:
        SpecError: a string is not in the dim language, or strides and dims do not pair up.
    """

    dims: str = attrs.field(converter=_dims_text)
    dtype: torch.dtype | Like | None = attrs.field(default=None, converter=_dtype_or_like)
    strides: str | None = attrs.field(default=None, converter=_optional_dims_text)
    parsed: tuple[Dim, ...] = attrs.field(init=False, repr=False, eq=False)
    parsed_strides: tuple[Dim, ...] = attrs.field(init=False, repr=False, eq=False)

    @parsed.default
    def _parse_dims(self) -> tuple[Dim, ...]:
        return parse_dims(self.dims)

    @parsed_strides.default
    def _parse_strides(self) -> tuple[Dim, ...]:
        if self.strides is None:
            return ()
        strides = parse_dims(self.strides)
        has_rest = any(isinstance(dim, Rest) for dim in strides + self.parsed)
        if len(strides) != len(self.parsed) or has_rest:
            raise SpecError(
                f"strides {self.strides!r} do not pair up with dims {self.dims!r}",
                fix="give one stride for each dim; a layout with *rest cannot have strides",
            )
        return strides

    @property
    def names(self) -> frozenset[str]:
        """All names the layout mentions."""
        return frozenset().union(*map(dim_names, self.parsed + self.parsed_strides))

    @property
    def binding_names(self) -> frozenset[str]:
        """Names the layout binds when it is an input's: plain dims, plain strides and *rest."""
        return frozenset(
            dim.name for dim in self.parsed + self.parsed_strides if isinstance(dim, Name | Rest)
        )

    def resolve(self, dims: Dims, dtypes: Mapping[str, torch.dtype]) -> ConcreteLayout:
        """Sizes, strides and dtype of an output.

        Args:
            dims: sizes bound by the call's inputs.
            dtypes: dtypes of the call's tensor arguments, for `like`.

        Raises:
            LayoutError: a name is not bound, a size is negative, or there is no dtype.
        """
        shape: list[int] = []
        for dim in self.parsed:
            if isinstance(dim, Rest):
                sizes = dims.get(dim.name)
                if not isinstance(sizes, tuple):
                    raise LayoutError(
                        f"*{dim.name} is not bound",
                        fix=f"use *{dim.name} in the layout of one of the break's inputs",
                    )
                shape += sizes
            else:
                shape.append(_size(dim, dims))
        strides = tuple(_size(dim, dims) for dim in self.parsed_strides if not isinstance(dim, Rest))
        if self.strides is None:
            strides = contiguous_strides(tuple(shape))
        return ConcreteLayout(tuple(shape), strides, self._resolve_dtype(dtypes))

    def _resolve_dtype(self, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        if self.dtype is None:
            raise LayoutError("has no dtype", fix='give one, or like("argument")')
        if self.dtype.arg not in dtypes:
            raise LayoutError(
                f"dtype {self.dtype} names an argument that is no tensor in this call",
                actual=f"tensor arguments: {', '.join(sorted(dtypes)) or 'none'}",
                fix="name a tensor argument of the call",
            )
        return dtypes[self.dtype.arg]

    def __str__(self) -> str:
        dtype = dtype_name(self.dtype) if isinstance(self.dtype, torch.dtype) else self.dtype or "any"
        text = f"{dtype}[{self.dims}]"
        return text if self.strides is None else f"{text} strides ({self.strides})"


def _size(expr: Expr, dims: Dims) -> int:
    size = _evaluate(expr, dims)
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


def bind(layouts: Mapping[str, TensorLayout], tensors: Mapping[str, torch.Tensor]) -> Dims:
    """Bind the dims of `layouts` to the sizes of `tensors` of the same names, and check the rest.

    Plain names bind over all tensors first, so that an expression may use a name that a later tensor
    binds. A layout whose tensor is absent is skipped.

    Raises:
        LayoutError: rank, size, stride or dtype differs, or a name is never bound.
    """
    dims: dict[str, int | tuple[int, ...]] = {}
    pairs = [(name, layout, tensors[name]) for name, layout in layouts.items() if name in tensors]
    compared: list[tuple[str, TensorLayout, torch.Tensor, Expr, int, str]] = []
    for name, layout, tensor in pairs:
        for dim, size, what in _pair_dims(name, layout, tensor):
            if isinstance(dim, Rest):
                if dims.setdefault(dim.name, size) != size:
                    raise _mismatch(name, layout, tensor, f"*{dim.name} differs", dims)
            elif isinstance(size, int):
                if isinstance(dim, Name) and dim.name not in dims:
                    dims[dim.name] = size
                else:
                    compared.append((name, layout, tensor, dim, size, what))
    for name, layout, tensor, expr, size, what in compared:
        try:
            expected = _evaluate(expr, dims)
        except LayoutError as error:
            error.tensor = name
            raise
        if expected != size:
            problem = f"{what} {format_dim(expr)} is {size}, not {expected}"
            raise _mismatch(name, layout, tensor, problem, dims)
    _check_dtypes(pairs, {name: tensor.dtype for name, tensor in tensors.items()}, dims)
    return dims


def _pair_dims(
    name: str, layout: TensorLayout, tensor: torch.Tensor
) -> list[tuple[Dim, int | tuple[int, ...], str]]:
    """Each dim of the layout with the size (or sizes) it stands for, then each stride."""
    shape = tuple(tensor.shape)
    rest = next((i for i, dim in enumerate(layout.parsed) if isinstance(dim, Rest)), None)
    fixed = len(layout.parsed) - (rest is not None)
    if len(shape) < fixed or (rest is None and len(shape) > fixed):
        problem = f"has {len(shape)} dims, not {fixed}{' or more' if rest is not None else ''}"
        raise _mismatch(name, layout, tensor, problem, {})
    sizes: list[int | tuple[int, ...]] = list(shape)
    if rest is not None:
        width = len(shape) - fixed
        sizes[rest : rest + width] = [shape[rest : rest + width]]
    pairs = [(dim, size, "dim") for dim, size in zip(layout.parsed, sizes, strict=True)]
    strides = zip(layout.parsed_strides, tensor.stride(), strict=bool(layout.parsed_strides))
    used = [size != 1 and tensor.numel() > 0 for size in shape]
    pairs += [
        (dim, stride, "stride") for (dim, stride), is_used in zip(strides, used, strict=False) if is_used
    ]
    return pairs


def _check_dtypes(
    pairs: list[tuple[str, TensorLayout, torch.Tensor]],
    dtypes: Mapping[str, torch.dtype],
    dims: Dims,
) -> None:
    for name, layout, tensor in pairs:
        if layout.dtype is None:
            continue
        expected = layout.dtype if isinstance(layout.dtype, torch.dtype) else dtypes.get(layout.dtype.arg)
        if expected is not tensor.dtype:
            raise _mismatch(name, layout, tensor, "has another dtype", dims)


def _mismatch(name: str, layout: TensorLayout, tensor: torch.Tensor, problem: str, dims: Dims) -> LayoutError:
    bound = format_dims(dims)
    return LayoutError(
        problem,
        tensor=name,
        expected=f"{layout}{f' with {bound}' if bound else ''}",
        actual=str(ConcreteLayout.of(tensor)),
        fix="pass a tensor of that layout, or correct the layout",
    )
