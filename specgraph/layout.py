"""Tensor layouts and the dim language.

A layout says what a tensor must look like without saying how large it is: `TensorLayout("B Q H*D",
"bfloat16")` names its dims. Layouts of a call's inputs *bind* the names to sizes, layouts of its outputs
are *resolved* from them, and a tensor is *checked* against what was resolved. All three are exact: no
broadcasting, no casting, no guessing.

A plain name binds where an input first shows it; an expression never binds, it is compared.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping

import attrs
import torch

from .dims import (
    Dim,
    Dims,
    Expr,
    GroupSizes,
    Name,
    Rest,
    dim_names,
    evaluate,
    format_dim,
    format_dims,
    group_dims,
    group_names,
    parse_dims,
    size_of,
)
from .errors import LayoutError, SpecError


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
        raise SpecError(
            f"torch has no dtype named {value!r}", code="SG103", fix='write one such as "bfloat16"'
        )
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


_LAYOUT = re.compile(r"(like\((\w+)\)|\w+)\[([^\[\]]*)\](?: strides \((.*)\))?")


def _dims_text(value: str) -> str:
    return " ".join(format_dim(dim) for dim in parse_dims(value))


def _optional_dims_text(value: str | None) -> str | None:
    return None if value is None else _dims_text(value)


@attrs.frozen
class TensorLayout:
    """A tensor's layout in named dims.

    Args:
        dims: a dim string, in the language of `dims`; `""` is a tensor without dims.
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
                code="SG103",
                fix="give one stride for each dim; a layout with *rest cannot have strides",
            )
        return strides

    @classmethod
    def parse(cls, text: str) -> TensorLayout:
        """The layout that prints as `text`: `bfloat16[B Q H*D]`, `like(q)[B Q]`, `any[S D] strides (S 1)`.

        Raises:
            SpecError: no layout prints so.
        """
        match = _LAYOUT.fullmatch(text)
        if match is None:
            raise SpecError(
                f"{text!r} is no layout",
                code="SG103",
                fix='write dtype[dims], as "bfloat16[B Q H*D]", "like(query)[B Q]" or "any[B S]"',
            )
        dtype, arg, dims, strides = match.groups()
        return cls(dims, Like(arg) if arg else None if dtype == "any" else dtype, strides)

    @property
    def names(self) -> frozenset[str]:
        """All names the layout mentions."""
        return frozenset().union(*map(dim_names, self.parsed + self.parsed_strides))

    @property
    def plain_dims(self) -> frozenset[str]:
        """Names that stand alone as a dim."""
        return frozenset(dim.name for dim in self.parsed if isinstance(dim, Name))

    @property
    def binding_names(self) -> frozenset[str]:
        """Names the layout binds when it is an input's: plain dims, plain strides and *rest."""
        return frozenset(
            dim.name for dim in self.parsed + self.parsed_strides if isinstance(dim, Name | Rest)
        )

    @property
    def groups(self) -> frozenset[str]:
        """Process groups whose sizes the layout computes with."""
        return frozenset().union(*map(group_names, self.parsed + self.parsed_strides))

    def resolve(self, dims: Dims, dtypes: Mapping[str, torch.dtype]) -> ConcreteLayout:
        """Sizes, strides and dtype of an output.

        Args:
            dims: sizes bound by the call's inputs, and those of `groups`.
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
                shape.append(size_of(dim, dims))
        strides = tuple(size_of(dim, dims) for dim in self.parsed_strides if not isinstance(dim, Rest))
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


def bind(
    layouts: Mapping[str, TensorLayout],
    tensors: Mapping[str, torch.Tensor],
    groups: GroupSizes = types.MappingProxyType({}),
) -> Dims:
    """Bind the dims of `layouts` to the sizes of `tensors` of the same names, and check the rest.

    Plain names bind over all tensors first, so that an expression may use a name that a later tensor
    binds. A layout whose tensor is absent is skipped; groups that only such layouts name are not looked up.

    Raises:
        LayoutError: rank, size, stride or dtype differs, or a name is never bound.
    """
    pairs = [(name, layout, tensors[name]) for name, layout in layouts.items() if name in tensors]
    dims: dict[str, int | tuple[int, ...]] = {}
    for name, layout, _ in pairs:
        try:
            dims.update(group_dims(layout.groups, groups))
        except LayoutError as error:
            error.tensor = name
            raise
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
            expected = evaluate(expr, dims)
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


def empty(layout: ConcreteLayout, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor of that layout."""
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=device)
