"""Layouts: names bind to sizes, expressions are compared and resolved, all else is refused."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specgraph import LayoutError, SpecError, TensorLayout, like
from specgraph.dims import BinOp, Const, Dim, Expr, Name, Rest, World, evaluate, format_dim, parse_dims
from specgraph.layout import ConcreteLayout, bind

IDENTIFIERS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,3}", fullmatch=True)
LANGUAGE = st.text(alphabet="AB_19 +-*/()", max_size=20)
LANGUAGE |= st.lists(st.sampled_from(["A", "world", "(", ")", '"g"', "'g'", '"', "*", " "])).map("".join)
GROUPS = st.from_regex(r"[A-Za-z0-9_.:-]{1,4}", fullmatch=True)
SIZES = st.integers(0, 4)
Shape: TypeAlias = tuple[int, ...]
Sizes: TypeAlias = dict[str, int | Shape]
Sized: TypeAlias = tuple[TensorLayout, Sizes, Shape]


def expressions(names: st.SearchStrategy[str], *others: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    leaves: st.SearchStrategy[Expr] = st.builds(Const, SIZES | st.integers(min_value=0))
    leaves |= st.one_of(st.builds(Name, names), *others)
    ops = st.sampled_from(["+", "-", "*", "//"])
    return st.recursive(leaves, lambda inner: st.builds(BinOp, ops, inner, inner), max_leaves=8)


def python_value(expr: Expr, sizes: Sizes) -> int | None:
    """What Python makes of the printed expression; None where it divides by zero."""
    try:
        value: int = eval(format_dim(expr), {}, sizes)
    except ZeroDivisionError:
        return None
    return value


@st.composite
def sized_layouts(draw: st.DrawFn) -> Sized:
    """A random layout, a size for each of its names, and the shape that follows."""
    names = draw(st.lists(st.sampled_from("ABCD"), unique=True, max_size=3))
    sizes: Sizes = {name: draw(SIZES) for name in names}
    exprs = expressions(st.sampled_from(names)) if names else st.builds(Const, SIZES)
    small = exprs.filter(lambda expr: python_value(expr, sizes) in range(50))
    dims: list[Dim] = [*map(Name, names), *draw(st.lists(small, max_size=3))]
    if draw(st.booleans()):
        dims.append(Rest("rest"))
        sizes["rest"] = tuple(draw(st.lists(SIZES, max_size=3)))
    dims = draw(st.permutations(dims))
    shape: list[int] = []
    for dim in dims:
        value = sizes["rest"] if isinstance(dim, Rest) else python_value(dim, sizes)
        shape += value if isinstance(value, tuple) else [value or 0]
    return TensorLayout(" ".join(map(format_dim, dims)), torch.float32), sizes, tuple(shape)


def meta(shape: Shape) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def assert_dims_or_spec_error(text: str) -> None:
    try:
        dims = parse_dims(text)
    except SpecError:
        return
    assert parse_dims(" ".join(map(format_dim, dims))) == dims


# The dim language.


@settings(deadline=None)
@given(st.lists(expressions(IDENTIFIERS, st.builds(World, GROUPS)), max_size=4), st.integers(0, 4))
def test_dims_print_to_text_that_parses_to_the_same_dims(exprs: list[Expr], at: int) -> None:
    dims: list[Dim] = [*exprs[:at], Rest("the_rest"), *exprs[at:]]
    assert parse_dims(" ".join(map(format_dim, dims))) == tuple(dims)


@settings(deadline=None)
@given(st.text() | LANGUAGE)
def test_any_text_is_dims_or_a_spec_error(text: str) -> None:
    assert_dims_or_spec_error(text)


OVERLONG = {"number": "9" * 5000, "nesting": "(" * 5000, "sum": "1" + "+1" * 5000}


@pytest.mark.parametrize("text", OVERLONG.values(), ids=OVERLONG)
def test_text_of_any_length_is_dims_or_a_spec_error(text: str) -> None:
    assert_dims_or_spec_error(text)


@settings(deadline=None)
@given(st.sampled_from(["any", "int8", "torch.half", "like(x)", "like()", ""]), LANGUAGE, LANGUAGE)
def test_any_text_is_a_layout_or_a_spec_error(dtype: str, dims: str, strides: str) -> None:
    try:
        layout = TensorLayout.parse(f"{dtype}[{dims}]{strides and f' strides ({strides})'}")
    except SpecError:
        return
    assert TensorLayout.parse(str(layout)) == layout


@settings(deadline=None)
@given(expressions(st.sampled_from("ABCD")), st.tuples(SIZES, SIZES, SIZES, SIZES))
def test_an_expression_has_the_value_that_python_gives_its_text(expr: Expr, values: Shape) -> None:
    sizes: Sizes = dict(zip("ABCD", values, strict=True))
    expected = python_value(expr, sizes)
    if expected is None:
        with pytest.raises(LayoutError, match="divides by zero"):
            evaluate(expr, sizes)
    else:
        assert evaluate(expr, sizes) == expected


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("(A*B)+C", "A*B+C"),
        ("A*(B+C)", "A*(B+C)"),
        ("(A-B)-C", "A-B-C"),
        ("A-(B-C)", "A-(B-C)"),
        ("A*(B//C)", "A*(B//C)"),
        ("((A))  \t 007\n*rest", "A 7 *rest"),
        ("world('tp.0')*(S) world", 'world("tp.0")*S world'),
    ],
)
def test_dims_print_without_needless_blanks_and_parentheses(written: str, printed: str) -> None:
    assert TensorLayout(written) == TensorLayout(printed)
    assert TensorLayout(written).dims == printed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("B, Q", "dim 'B,' of 'B, Q' has a character that no dim has"),
        ("H *", "dim '*' of 'H *' must be *name and nothing more"),
        ("A**2", "dim 'A**2' of 'A**2' has '*' where a size should be"),
        ("2A", "dim '2A' of '2A' has 'A' where it should end"),
        ("A+", "dim 'A+' of 'A+' ends too early"),
        ("(A+1", "dim '(A+1' of '(A+1' lacks a closing parenthesis"),
        ("world(tp)", """dim 'world(tp)' of 'world(tp)' must name the group as world("group")"""),
        ("*a B *c", "'*a B *c' has more than one *rest"),
        ("a+1 *a", "'a+1 *a' uses 'a' both for one dim and for *a"),
    ],
)
def test_text_outside_the_dim_language_is_refused(text: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        TensorLayout(text)
    assert (caught.value.problem, caught.value.code) == (problem, "SG103")


# Layouts as text and data.


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (TensorLayout("B Q H*D", "torch.bfloat16"), "bfloat16[B Q H*D]"),
        (TensorLayout("B *rest", like("q")), "like(q)[B *rest]"),
        (TensorLayout("S D", strides="D 1"), "any[S D] strides (D 1)"),
        (TensorLayout("", torch.int64), "int64[]"),
    ],
)
def test_a_layout_prints_to_text_that_parses_to_it(layout: TensorLayout, text: str) -> None:
    assert str(layout) == text
    assert TensorLayout.parse(text) == layout


@pytest.mark.parametrize("text", ["B Q", "[B]", "float32", "Tensor[B]", "any[B] strides 1"])
def test_text_that_no_layout_prints_as_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match='"bfloat16') as caught:
        TensorLayout.parse(text)
    assert caught.value.code == "SG103"


def test_a_concrete_layout_prints_strides_only_where_they_are_not_row_major() -> None:
    matrix = torch.zeros(2, 3)
    assert str(ConcreteLayout.of(matrix)) == "float32[2 3]"
    assert str(ConcreteLayout.of(matrix.t())) == "float32[3 2] strides (1 3)"
    assert str(ConcreteLayout.of(matrix[:1].t())) == "float32[3 1]"


def test_plain_dims_plain_strides_and_rests_bind_and_expressions_only_use() -> None:
    assert TensorLayout("2*B Q *R").binding_names == {"Q", "R"}
    assert TensorLayout("2*B Q *R").names == {"B", "Q", "R"}
    assert TensorLayout("B 3", strides="S B*2").binding_names == {"B", "S"}


@pytest.mark.parametrize("text", ["A B / 1", "A / A 1", "*R / 1", "A / *R"])
def test_strides_that_do_not_pair_up_with_dims_are_refused(text: str) -> None:
    dims, strides = text.split(" / ")
    with pytest.raises(SpecError, match="give one stride for each dim") as caught:
        TensorLayout(dims, strides=strides)
    assert caught.value.problem == f"strides {strides!r} do not pair up with dims {dims!r}"


@pytest.mark.parametrize(
    ("tensor", "nbytes", "span_nbytes"),
    [
        (torch.zeros(2, 3), 24, 24),
        (torch.zeros(2, 3, dtype=torch.bfloat16)[:, :2], 8, 10),
        (torch.zeros(1, 3).expand(5, 3), 60, 12),
        (torch.zeros(3, 0), 0, 0),
        (torch.zeros(()), 4, 4),
    ],
)
def test_nbytes_counts_elements_and_span_nbytes_what_they_lie_in(
    tensor: torch.Tensor, nbytes: int, span_nbytes: int
) -> None:
    layout = ConcreteLayout.of(tensor)
    assert (layout.nbytes, layout.span_nbytes) == (nbytes, span_nbytes)


# Binding, resolving, checking.


@settings(deadline=None)
@given(sized_layouts())
def test_a_tensor_binds_its_sizes_and_its_layout_resolves_to_it(sized: Sized) -> None:
    layout, sizes, shape = sized
    bound = bind({"x": layout}, {"x": meta(shape)})
    assert bound == sizes
    assert layout.resolve(bound, {}) == ConcreteLayout.of(meta(shape))


@settings(deadline=None)
@given(sized_layouts(), st.data())
def test_a_tensor_with_one_other_size_is_refused(sized: Sized, data: st.DataObject) -> None:
    layout, _, shape = sized
    assume(shape)
    changed = list(shape)
    changed[data.draw(st.integers(0, len(shape) - 1))] += data.draw(st.integers(1, 3))
    x, y = meta(shape), meta(tuple(changed))
    with pytest.raises(LayoutError) as bound:
        bind({"x": layout, "y": layout}, {"x": x, "y": y})
    with pytest.raises(LayoutError) as checked:
        ConcreteLayout.of(x).check(y, "y", "as it says")
    assert bound.value.tensor == checked.value.tensor == "y"
    assert bound.value.expected.partition(" with ")[0] == str(layout)
    assert checked.value.expected == str(ConcreteLayout.of(x))
    assert bound.value.actual == checked.value.actual == str(ConcreteLayout.of(y))


def test_a_name_bound_by_a_later_tensor_checks_an_earlier_expression() -> None:
    layouts = {"flat": TensorLayout("B H*D"), "q": TensorLayout("B H D")}
    q = torch.zeros(2, 3, 4)
    assert bind(layouts, {"flat": torch.zeros(2, 12), "q": q}) == {"B": 2, "H": 3, "D": 4}
    with pytest.raises(LayoutError) as caught:
        bind(layouts, {"flat": torch.zeros(2, 13), "q": q})
    assert str(caught.value) == (
        "flat: dim H*D is 13, not 12\n"
        "  expected: any[B H*D] with B=2 H=3 D=4\n"
        "  actual:   float32[2 13]\n"
        "  fix:      pass a tensor of that layout, or correct the layout"
    )


@pytest.mark.parametrize(
    ("layout", "problem", "bound"),
    [
        ("any[B A]", "dim B is 2, not 4", "A=3 B=4 *R=5x6"),
        ("any[2 4]", "dim 4 is 3, not 4", "A=3 B=4 *R=5x6"),
        ("any[C]", "has 2 dims, not 1", ""),
        ("any[C D E *F]", "has 2 dims, not 3 or more", ""),
        ("any[*R]", "*R differs", "A=3 B=4 *R=5x6"),
        ("any[*A]", "*A differs", "A=3 B=4 *R=5x6"),
        ("bfloat16[C A]", "has another dtype", "A=3 B=4 *R=5x6 C=2"),
        ("like(x)[C A]", "has another dtype", "A=3 B=4 *R=5x6 C=2"),
        ("any[C A] strides (1 C)", "stride 1 is 3, not 1", "A=3 B=4 *R=5x6 C=2"),
    ],
)
def test_a_tensor_unlike_its_layout_is_refused(layout: str, problem: str, bound: str) -> None:
    layouts = {"x": TensorLayout("A B *R"), "y": TensorLayout.parse(layout)}
    tensors = {"x": torch.zeros(3, 4, 5, 6, dtype=torch.int64), "y": torch.zeros(2, 3)}
    with pytest.raises(LayoutError) as caught:
        bind(layouts, tensors)
    assert (caught.value.tensor, caught.value.problem) == ("y", problem)
    assert caught.value.expected == (f"{layout} with {bound}" if bound else layout)
    assert caught.value.actual == "float32[2 3]"


BIND_C = "name 'C' as a plain dim in the layout of one of the break's inputs"


@pytest.mark.parametrize(
    ("layout", "problem", "fix"),
    [
        ("any[2*C]", "dim 'C' is not bound", BIND_C),
        ("any[A//(A-3)]", "A//(A-3) divides by zero", "correct the expression"),
        ("any[R]", "*R stands for several dims and cannot be a number", "name the single dim"),
    ],
)
def test_a_dim_without_a_value_names_tensor_and_fix(layout: str, problem: str, fix: str) -> None:
    layouts = {"x": TensorLayout("A *R"), "y": TensorLayout.parse(layout)}
    with pytest.raises(LayoutError) as caught:
        bind(layouts, {"x": torch.zeros(3, 4), "y": torch.zeros(2)})
    assert (caught.value.tensor, caught.value.problem) == ("y", problem)
    assert caught.value.fix.startswith(fix)


@pytest.mark.parametrize(
    ("layout", "problem", "actual"),
    [
        ("float32[A*D]", "dim 'D' is not bound", "bound here: A"),
        ("float32[*R]", "*R is not bound", ""),
        ("float32[(1-A)//2]", "(1-A)//2 is negative", "(1-A)//2 = -1 with A=2"),
        ("float32[A] strides (1-A)", "1-A is negative", "1-A = -1 with A=2"),
        ("float32[A//0]", "A//0 divides by zero", "0 = 0"),
        ("any[A]", "has no dtype", ""),
    ],
)
def test_what_has_no_size_or_dtype_does_not_resolve(layout: str, problem: str, actual: str) -> None:
    with pytest.raises(LayoutError) as caught:
        TensorLayout.parse(layout).resolve({"A": 2}, {})
    assert (caught.value.problem, caught.value.actual) == (problem, actual)


def test_like_is_the_dtype_of_an_argument_with_or_without_a_layout() -> None:
    layout = TensorLayout("A", like("q"))
    half, q = torch.zeros(2, dtype=torch.half), torch.zeros(5, dtype=torch.half)
    assert bind({"x": layout, "absent": layout}, {"x": half, "q": q}) == {"A": 2}
    with pytest.raises(LayoutError, match="x: has another dtype"):
        bind({"x": layout}, {"x": half.float(), "q": q})
    assert layout.resolve({"A": 3}, {"q": q.dtype}) == ConcreteLayout((3,), (1,), torch.half)
    with pytest.raises(LayoutError, match="tensor arguments: x"):
        layout.resolve({"A": 3}, {"x": q.dtype})


def test_a_tensor_without_dims_binds_an_empty_rest() -> None:
    layout = TensorLayout("*R", torch.float32)
    bound = bind({"x": TensorLayout(""), "y": layout}, dict.fromkeys("xy", torch.zeros(())))
    assert bound == {"R": ()}
    assert layout.resolve(bound, {}) == ConcreteLayout((), (), torch.float32)


def test_strides_bind_on_inputs_and_resolve_on_outputs() -> None:
    rows = TensorLayout("S D", torch.float32, strides="P 1")
    bound = bind({"x": rows}, {"x": torch.zeros(4, 6)[:, :3]})
    assert bound == {"S": 4, "D": 3, "P": 6}
    assert rows.resolve(bound, {}) == ConcreteLayout((4, 3), (6, 1), torch.float32)


@pytest.mark.parametrize("shape", [(1, 3), (0, 3)])
def test_strides_that_address_nothing_neither_bind_nor_count(shape: Shape) -> None:
    tensor = torch.zeros(5, 3).as_strided(shape, (7, 1))
    layouts = {name: TensorLayout("S D", strides=f"{name} 1") for name in ("P", "9")}
    assert bind(layouts, {"P": tensor, "9": tensor}) == {"S": shape[0], "D": 3}
    assert ConcreteLayout.of(tensor).is_contiguous
    ConcreteLayout(shape, (3, 1), torch.float32).check(tensor, "x", "pass another")
