"""The mypy plugin: every rule fires on the wrong line, with its code, and on no other.

`SNIPPETS` are files of one package that mypy checks in one run. A line that must be reported ends with
`# E: code`, several codes separated by blanks; every other line must pass.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import attrs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mypy.types import NoneType, Type

from specgraph.mypy_rules import Callee, misfit

ROOT = Path(__file__).resolve().parents[1]

Report: TypeAlias = tuple[int, str]
"""Line and error code."""

CONFIG = f"""\
[mypy]
strict = True
{{plugins}}
mypy_path = {ROOT}
untyped_calls_exclude = torch

[mypy-specgraph.*]
follow_imports = silent

[mypy-cuda.*]
ignore_missing_imports = True
"""

PRELUDE = """\
from typing import Any, Final, NamedTuple, TypedDict
from collections.abc import Callable, Mapping
import torch
from torch import Tensor
import specgraph as sg
from specgraph import BreakSpec, Ownership, TensorLayout, graph_break
from snippets import layouts, model
from snippets.layouts import ROWS, ROWS_OUT, TWICE
from snippets.model import Block, attention, rows

"""

MODEL = """
import torch
from torch import Tensor


def rows(x: Tensor) -> Tensor:
    return x


def attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float = 1.0) -> Tensor:
    return query


class Block(torch.nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x

    @classmethod
    def make(cls, x: Tensor) -> Tensor:
        return x
"""

LAYOUTS = """
from typing import Final
import specgraph as sg

ROWS: Final = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", "bfloat16")
STRIDED = sg.TensorLayout("S", "bfloat16", strides="Z")
TWICE = sg.TensorLayout("A")
TWICE = sg.TensorLayout("S D")
LOOPED = sg.TensorLayout("A")
for LOOPED in (ROWS, ROWS_OUT):
    pass
GLOBAL = sg.TensorLayout("A")


def change() -> None:
    global GLOBAL
    GLOBAL = ROWS
"""

SNIPPETS = {
    "parameter": """
def body(x: Tensor, *, length: int) -> Tensor:
    return x

def anything(*args: Any, **kwargs: Any) -> Tensor:
    return rows(args[0])

def by_position(x: Tensor, /) -> Tensor:
    return x

name = "y" + "z"
BreakSpec(rows, ROWS_OUT, inputs={"x": ROWS})
BreakSpec(
    rows,
    ROWS_OUT,
    inputs={
        "x": ROWS,
        "xs": ROWS,  # E: specgraph-parameter
        name: ROWS,
    },
    mutates=(
        "x",
        "y",  # E: specgraph-parameter
        name,
    ),
)
BreakSpec(rows, ROWS_OUT, inputs={"x": ROWS}, mutates="x")
BreakSpec(rows, ROWS_OUT, inputs={"x": ROWS}, mutates="z")  # E: specgraph-parameter
BreakSpec(rows, ROWS_OUT, inputs={"x": ROWS}, mutates=["x"])
BreakSpec(rows, ROWS_OUT, inputs={"x": ROWS}, body=body, live={"length": "S"}, mutates="length")
BreakSpec(rows, ROWS_OUT, inputs={"x": ROWS}, body=body, live={"lenght": "S"})  # E: specgraph-parameter
BreakSpec(
    rows,
    ROWS_OUT,
    inputs={"x": ROWS, "length": ROWS},  # E: specgraph-parameter
    body=body,
    live={"length": "S"},
)
BreakSpec(rows, ROWS_OUT, inputs={"x": ROWS}, live={"length": "S"})  # E: specgraph-parameter
BreakSpec(rows, ROWS_OUT, inputs={"x": ROWS}, body=anything, live={"length": "S"}, mutates="whatever")
BreakSpec(anything, ROWS_OUT, inputs={"y": ROWS})
BreakSpec(by_position, ROWS_OUT, inputs={"y": ROWS})
BreakSpec(Block.make, ROWS_OUT, inputs={"cls": ROWS, "x": ROWS})  # E: specgraph-parameter
BreakSpec("snippets.model:Block.make", ROWS_OUT, inputs={"cls": ROWS, "x": ROWS})
BreakSpec("snippets.model:Block.static", ROWS_OUT, inputs={"x": ROWS, "self": ROWS})  # E: specgraph-parameter
BreakSpec("snippets.model:Block.forward", (ROWS_OUT, ROWS_OUT), inputs={"x": ROWS, "self": ROWS})
BreakSpec("snippets.model:attention", ROWS_OUT, inputs={"q": ROWS, "key": ROWS})  # E: specgraph-parameter
BreakSpec("module:blocks.*", ROWS_OUT, inputs={"anything": ROWS})
BreakSpec(lambda x: x, ROWS_OUT, inputs={"x": ROWS})
BreakSpec(lambda x: x, ROWS_OUT, inputs={"y": ROWS})  # E: specgraph-parameter
BreakSpec(
    rows, ROWS_OUT, inputs={"x": ROWS}, ownership=Ownership.PASS_THROUGH,
    out="out",  # E: specgraph-parameter
)
""",
    "decorated": """
@graph_break(ROWS_OUT, inputs={"x": ROWS})
def right(x: Tensor) -> Tensor:
    return x

@sg.graph_break(
    ROWS_OUT,
    inputs={"x": ROWS, "y": ROWS},  # E: specgraph-parameter
)
def wrong(x: Tensor) -> Tensor:
    return x

class Holder:
    @graph_break(ROWS_OUT, inputs={"self": ROWS, "x": ROWS})
    def right(self, x: Tensor) -> Tensor:
        return x

    @graph_break(ROWS_OUT, inputs={"x": ROWS}, mutates="y")  # E: specgraph-parameter
    def wrong(self, x: Tensor) -> Tensor:
        return x

    @staticmethod
    @graph_break((ROWS_OUT, ROWS_OUT), inputs={"x": ROWS})  # E: specgraph-outputs
    def static(x: Tensor) -> Tensor:
        return x

    class Inner:
        def method(self) -> None:
            @graph_break(ROWS_OUT, inputs={"y": ROWS, "x": ROWS})  # E: specgraph-parameter
            def function(x: Tensor) -> Tensor:
                return x

@graph_break(ROWS_OUT, inputs={"x": ROWS, "y": ROWS})  # E: specgraph-parameter
@torch.no_grad()
def under_another(x: Tensor) -> Tensor:
    return x

def untyped(function: Any) -> Any:
    return function

@graph_break(ROWS_OUT, inputs={"x": ROWS, "y": ROWS})
@untyped
def under_an_untyped_one(x: Tensor) -> Tensor:
    return x

if torch.cuda.is_available():
    try:
        with torch.no_grad():
            @graph_break(None, inputs={"x": ROWS})  # E: specgraph-outputs
            def nested(x: Tensor) -> Tensor:
                return x
    finally:
        pass

applied = graph_break(ROWS_OUT, inputs={"y": ROWS, "x": ROWS})(rows)
""",
    "dims": """
BreakSpec(rows, TensorLayout("S D*2", "bfloat16"), inputs={"x": ROWS})
BreakSpec(
    rows,
    TensorLayout(
        "S H",  # E: specgraph-unbound-dim
        "bfloat16",
    ),
    inputs={"x": ROWS},
)
BreakSpec(rows, TensorLayout("S", "int8", strides="2*Z"), inputs={"x": ROWS})  # E: specgraph-unbound-dim
BreakSpec(rows, TensorLayout("S", "int8", strides="S"), inputs={"x": ROWS})
BreakSpec(rows, TensorLayout("S", "int8", strides="Z"), inputs={"x": TensorLayout("S D", strides="Z 1")})
BreakSpec(rows, TensorLayout("*rest", "bfloat16"), inputs={"x": TensorLayout("*rest D")})
BreakSpec(rows, TensorLayout("S", "int8"), inputs={"x": TensorLayout("S*2 D")})  # E: specgraph-unbound-dim
BreakSpec(rows, ROWS_OUT)  # E: specgraph-unbound-dim specgraph-unbound-dim
BreakSpec(rows, TensorLayout("4 2", "bfloat16"))
BreakSpec(rows, layouts.STRIDED, inputs={"x": ROWS})  # E: specgraph-unbound-dim
BreakSpec(
    Block.forward,
    (
        ROWS_OUT,
        layouts.STRIDED,  # E: specgraph-unbound-dim
    ),
    inputs={"x": layouts.ROWS},
)
LOCAL = TensorLayout("Q D", "bfloat16")
BreakSpec(rows, LOCAL, inputs={"x": ROWS})  # E: specgraph-unbound-dim
BreakSpec(rows, LOCAL, inputs={"x": LOCAL})

for LAYOUT in (ROWS, ROWS_OUT):
    BreakSpec(rows, TensorLayout("A", "bfloat16"), inputs={"x": LAYOUT})

def inside(text: str, layout: TensorLayout, inputs: dict[str, TensorLayout]) -> None:
    BreakSpec(rows, TensorLayout(text, "bfloat16"), inputs={"x": ROWS})
    BreakSpec(rows, TensorLayout("A", "bfloat16"), inputs={"x": TensorLayout(text)})
    BreakSpec(rows, TensorLayout("A", "bfloat16"), inputs={"x": layout})
    BreakSpec(rows, TensorLayout("A", "bfloat16"), inputs={"x": ROWS, **inputs})
    BreakSpec(rows, TensorLayout("A", "bfloat16"), inputs=inputs)
    BreakSpec(rows, TWICE, inputs={"x": TensorLayout("B")})
    BreakSpec(rows, layouts.LOOPED, inputs={"x": TensorLayout("B")})
    BreakSpec(rows, layouts.GLOBAL, inputs={"x": TensorLayout("B")})
    BreakSpec(rows, TensorLayout("A", "bfloat16"), inputs={"x": ROWS})  # E: specgraph-unbound-dim
""",
    "syntax": """
TensorLayout("B Q H*D *rest")
TensorLayout("")
TensorLayout("B Q+")  # E: specgraph-dim-syntax
TensorLayout(dims="B $")  # E: specgraph-dim-syntax
TensorLayout("*a *b")  # E: specgraph-dim-syntax
TensorLayout(
    "B Q",
    None,
    "1 (",  # E: specgraph-dim-syntax
)
TensorLayout("B Q", strides="Q 1")
TensorLayout("B Q", strides="1")  # E: specgraph-dim-syntax
TensorLayout("*rest", strides="1")  # E: specgraph-dim-syntax
TensorLayout("B Q" " )")  # E: specgraph-dim-syntax

def inside(text: str, rest: dict[str, Any]) -> TensorLayout:
    TensorLayout(text), TensorLayout(f"{text} ("), TensorLayout("B" + "("), TensorLayout(**rest)
    return TensorLayout("B (")  # E: specgraph-dim-syntax

BreakSpec(rows, TensorLayout("A("), inputs={"x": TensorLayout("A")})  # E: specgraph-dim-syntax
BreakSpec(rows, TensorLayout("A"), inputs={"x": TensorLayout("A(")})  # E: specgraph-dim-syntax
""",
    "outputs": """
class Pair(NamedTuple):
    first: Tensor
    second: Tensor

class Named(TypedDict):
    a: Tensor
    b: Tensor

def two(x: Tensor) -> tuple[Tensor, Tensor]: return x, x
def pair(x: Tensor) -> Pair: return Pair(x, x)
def some(x: Tensor) -> tuple[Tensor, ...]: return (x,)
def listed(x: Tensor) -> list[Tensor]: return [x]
def mapped(x: Tensor) -> Mapping[str, Tensor]: return {}
def in_dict(x: Tensor) -> dict[str, Tensor]: return {}
def named(x: Tensor) -> Named: return {"a": x, "b": x}
def nothing(x: Tensor) -> None: ...
def parameter(x: torch.nn.Parameter) -> torch.nn.Parameter: return x
def any_(x: Tensor) -> Any: ...
def object_(x: Tensor) -> object: ...
def union(x: Tensor) -> Tensor | None: ...
def mixed(x: Tensor) -> tuple[Tensor, int]: return x, 1
async def later(x: Tensor) -> Tensor: return x
OUT: Final = TensorLayout("4", "bfloat16")
PASS: Final = Ownership.PASS_THROUGH

BreakSpec(rows, OUT)
BreakSpec(rows, None)  # E: specgraph-outputs
BreakSpec(rows, (OUT,))  # E: specgraph-outputs
BreakSpec(rows, {"a": OUT})  # E: specgraph-outputs
BreakSpec(parameter, OUT)
BreakSpec(two, (OUT, OUT))
BreakSpec(two, [OUT, OUT])
BreakSpec(two, OUT)  # E: specgraph-outputs
BreakSpec(two, (OUT, OUT, OUT))  # E: specgraph-outputs
BreakSpec(two, [OUT])  # E: specgraph-outputs
BreakSpec(pair, (OUT, OUT))
BreakSpec(pair, (OUT,))  # E: specgraph-outputs
BreakSpec(some, (OUT, OUT, OUT))
BreakSpec(some, OUT)  # E: specgraph-outputs
BreakSpec(listed, (OUT,))
BreakSpec(listed, {"a": OUT})  # E: specgraph-outputs
BreakSpec(mapped, {"a": OUT})
BreakSpec(mapped, (OUT,))  # E: specgraph-outputs
BreakSpec(in_dict, {"a": OUT, "b": OUT})
BreakSpec(in_dict, OUT)  # E: specgraph-outputs
BreakSpec(named, {"b": OUT, "a": OUT})
BreakSpec(named, {"a": OUT})  # E: specgraph-outputs
BreakSpec(nothing, None)
BreakSpec(nothing, OUT)  # E: specgraph-outputs
BreakSpec(nothing, OUT, ownership=Ownership.PASS_THROUGH, out="x")
BreakSpec(nothing, OUT, ownership=PASS, out="x")
BreakSpec(two, OUT, body=rows)
BreakSpec(
    rows,
    OUT,  # E: specgraph-outputs
    body=two,
)
for silent in (any_, object_, union, mixed, later, lambda x: x):
    BreakSpec(silent, (OUT, OUT, OUT))
BreakSpec(any_, (OUT,)), BreakSpec(object_, (OUT,)), BreakSpec(union, (OUT,)), BreakSpec(mixed, OUT)
BreakSpec(later, (OUT,)), BreakSpec(lambda x: x, (OUT,)), BreakSpec(torch.nn.ReLU(), (OUT,))

def inside(outputs: Any, ownership: Ownership, layouts: tuple[TensorLayout, ...]) -> None:
    BreakSpec(two, outputs)
    BreakSpec(two, layouts)
    BreakSpec(two, (*layouts, OUT))
    BreakSpec(rows, layouts)  # E: specgraph-outputs
    BreakSpec(nothing, OUT, ownership=ownership, out="x")
""",
    "out": """
def into(x: Tensor, out: Tensor, more: Tensor) -> None: ...
def two(x: Tensor) -> tuple[Tensor, Tensor]: return x, x
OUT: Final = TensorLayout("4", "bfloat16")

BreakSpec(rows, OUT, ownership=Ownership.PASS_THROUGH, out="x")
BreakSpec(
    rows,
    OUT,
    ownership=Ownership.PASS_THROUGH,  # E: specgraph-out
)
BreakSpec(rows, OUT, ownership=Ownership.PASS_THROUGH, out=())  # E: specgraph-out
BreakSpec(
    into,
    (OUT, OUT),
    ownership=Ownership.PASS_THROUGH,
    out=("out", "more"),
)
BreakSpec(
    into,
    (OUT, OUT),
    ownership=Ownership.PASS_THROUGH,
    out="out",  # E: specgraph-out
)
BreakSpec(into, {"a": OUT}, ownership=Ownership.PASS_THROUGH, out=["out", "more"])  # E: specgraph-out
BreakSpec(into, None, ownership=Ownership.PASS_THROUGH)  # E: specgraph-out
BreakSpec(into, None, ownership=Ownership.COPY)
BreakSpec(
    into,
    None,
    out="out",  # E: specgraph-out
)
BreakSpec(rows, OUT, ownership=Ownership.COPY, out=("x",))  # E: specgraph-out
BreakSpec(rows, OUT, out=None)

@graph_break(OUT, ownership=Ownership.PASS_THROUGH, out="y")
def right(x: Tensor, y: Tensor) -> None: ...

@graph_break(OUT, ownership=Ownership.PASS_THROUGH)  # E: specgraph-out
def wrong(x: Tensor, y: Tensor) -> None: ...

def inside(ownership: Ownership, out: tuple[str, ...], fields: dict[str, Any]) -> None:
    BreakSpec(rows, OUT, ownership=ownership)
    BreakSpec(rows, OUT, ownership=ownership, out="x")
    BreakSpec(rows, OUT, out=out)
    BreakSpec(rows, OUT, ownership=Ownership.PASS_THROUGH, out=out)
    BreakSpec(rows, OUT, ownership=Ownership.PASS_THROUGH, **fields)
    BreakSpec(rows, OUT, out="x", **fields)
""",
    "target": """
BreakSpec("snippets.model:rows", None)  # E: specgraph-outputs
BreakSpec("snippets.model:row", None)  # E: specgraph-target
BreakSpec(
    "snippets.model:Block.forwards",  # E: specgraph-target
    None,
)
BreakSpec("snippets.model:rows.inner", None)
BreakSpec("snippets.model:Block.children", None)
BreakSpec("snippets.model:Tensor.relu_", TensorLayout("4", "bfloat16"))
BreakSpec("snippets:model.rows", TensorLayout("4", "bfloat16"))
BreakSpec("snippets:model.row", None)  # E: specgraph-target
BreakSpec("snippets.dynamic:made_up", None)
BreakSpec("snippets.hooked:anything", None)
BreakSpec("snippets.no_such_module:f", None)  # E: specgraph-target
BreakSpec("no_such_package.inner:f", None)  # E: specgraph-target
BreakSpec("explodes.inner:f", None)
BreakSpec("explodes.missing:f", None)  # E: specgraph-target
BreakSpec("spaces.inner.deep:f", None)
BreakSpec("spaces.inner.missing:f", None)  # E: specgraph-target
BreakSpec("specgraph.layout:anything.at.all", None)  # E: specgraph-target
BreakSpec("torch.ops.aten:mm", None)
BreakSpec("torch._C._nn:gelu", TensorLayout("4", "bfloat16"))
BreakSpec("hypothesis.strategies:not_looked_into", None)
BreakSpec("hypothesis.no_such_module:f", None)  # E: specgraph-target
BreakSpec("module:blocks.*.attn", None)
BreakSpec("module:blocks.[0-3].attn", None)
BreakSpec("module:*", None)
BreakSpec("module:blocks..attn", None)  # E: specgraph-target
BreakSpec("module:", None)  # E: specgraph-target
BreakSpec("op:aten::mm", None)
BreakSpec("op:aten::mm.out", None)
BreakSpec("op:aten.mm", None)  # E: specgraph-target
BreakSpec("op:aten::", None)  # E: specgraph-target
BreakSpec("snippets.model.rows", None)  # E: specgraph-target
BreakSpec("snippets.model:", None)  # E: specgraph-target
BreakSpec(":rows", None)  # E: specgraph-target
BreakSpec("", None)  # E: specgraph-target

def inside(target: str) -> None:
    BreakSpec(target, None)
    BreakSpec(f"{target}:", None)
""",
    "signature": """
T = Tensor

def body(query: T, key: T, value: T, *, scale: float = 1.0) -> T: return query
def renamed(q: T, key: T, value: T, *, scale: float = 1.0) -> T: return q
def swapped(key: T, query: T, value: T, *, scale: float = 1.0) -> T: return query
def shorter(query: T, key: T, *, scale: float = 1.0) -> T: return query
def without_scale(query: T, key: T, value: T) -> T: return query
def needs_scale(query: T, key: T, value: T, *, scale: float) -> T: return query
def needs_more(query: T, key: T, value: T, more: int, *, scale: float = 1.0) -> T: return query
def takes_more(query: T, key: T, value: T, more: int = 0, *, scale: float = 1.0) -> T: return query
def by_position(query: T, key: T, value: T, /, *, scale: float = 1.0) -> T: return query
def by_name(*, query: T, key: T, value: T, scale: float = 1.0) -> T: return query
def anything(*args: Any, **kwargs: Any) -> T: return torch.ones(1)
def rest(query: T, *args: T, **kwargs: Any) -> T: return query
def narrower(query: torch.nn.Parameter, key: T, value: T, *, scale: float = 1.0) -> T: return query
def wider(query: object, key: T | None, value: Any, *, scale: complex = 1.0) -> T: return torch.ones(1)
def untyped(query, key, value, *, scale=1.0): return query  # type: ignore[no-untyped-def]
def with_live(query: T, key: T, value: T, pad: int, *, scale: float = 1.0) -> T: return query
def live_first(pad: int, query: T, key: T, value: T, *, scale: float = 1.0) -> T: return query
def live_by_name(query: T, key: T, value: T, *, scale: float = 1.0, pad: int) -> T: return query
def into(query: T, key: T, value: T, *, scale: float = 1.0, out: T) -> None: ...
def many(*tensors: T, **options: int) -> T: return tensors[0]
def few(first: T, **options: int) -> T: return first

class Called:
    def __call__(self, query: T, key: T, value: T, *, scale: float = 1.0) -> T: return query
    def wrong(self, query: T) -> T: return query

OUT: Final = TensorLayout("4", "bfloat16")
PASS: Final = Ownership.PASS_THROUGH

BreakSpec(attention, OUT, body=body)
BreakSpec(
    attention,
    OUT,
    body=renamed,  # E: specgraph-signature
    capture_stub=renamed,  # E: specgraph-signature
)
BreakSpec(attention, OUT, body=swapped)  # E: specgraph-signature
BreakSpec(attention, OUT, body=shorter)  # E: specgraph-signature
BreakSpec(attention, OUT, body=without_scale)  # E: specgraph-signature
BreakSpec(attention, OUT, body=needs_scale)  # E: specgraph-signature
BreakSpec(attention, OUT, body=needs_more)  # E: specgraph-signature
BreakSpec(attention, OUT, body=takes_more)
BreakSpec(attention, OUT, body=by_position)  # E: specgraph-signature
BreakSpec(attention, OUT, body=by_name)  # E: specgraph-signature
BreakSpec(attention, OUT, body=anything, capture_stub=anything)
BreakSpec(attention, OUT, body=rest)
BreakSpec(attention, OUT, body=narrower)  # E: specgraph-signature
BreakSpec(attention, OUT, body=wider)
BreakSpec(attention, OUT, body=untyped)
BreakSpec(attention, OUT, body=with_live, live={"pad": "pad"})
BreakSpec(attention, OUT, body=live_by_name, live={"pad": "pad"})
BreakSpec(attention, OUT, body=live_first, live={"pad": "pad"})  # E: specgraph-signature
BreakSpec(attention, OUT, body=with_live)  # E: specgraph-signature
BreakSpec(attention, OUT, body=with_live, live={"pad": "pad"}, capture_stub=body)  # E: specgraph-signature
BreakSpec(attention, OUT, body=with_live, live={"pad": "pad"}, capture_stub=with_live)
BreakSpec(attention, OUT, body=into, ownership=PASS, out="out")
BreakSpec(attention, OUT, body=into, ownership=PASS, out="out", capture_stub=body)  # E: specgraph-signature
BreakSpec(many, OUT, body=anything)
BreakSpec(many, OUT, body=few)  # E: specgraph-signature
BreakSpec(few, OUT, body=many)
BreakSpec(attention, OUT, body=Called())
BreakSpec(attention, OUT, body=Called().wrong)  # E: specgraph-signature
BreakSpec(attention, OUT, body=lambda query, key, value, scale=1.0: query)
BreakSpec(attention, OUT, body=lambda query: query)  # E: specgraph-signature
BreakSpec("snippets.model:attention", OUT, body=shorter)  # E: specgraph-signature
BreakSpec("snippets.model:Block.forward", OUT, body=lambda self, x: x)
BreakSpec("snippets.model:Block.forward", OUT, body=lambda x: x)  # E: specgraph-signature
BreakSpec("module:blocks.*", OUT, body=shorter)

@graph_break(OUT, capture_stub=shorter)  # E: specgraph-signature
def wrong(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query

@graph_break(OUT, body=body, capture_stub=lambda query, key, value: query)
def right(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query

BreakSpec(right, OUT, body=body)
BreakSpec(right, OUT, body=shorter)  # E: specgraph-signature

def inside(body: Callable[..., Any], typed: Callable[[Tensor, Tensor, Tensor], Tensor], unknown: Any) -> None:
    BreakSpec(attention, OUT, body=body, capture_stub=unknown)
    BreakSpec(rows, OUT, body=typed)

def partly(live: dict[str, str], out: tuple[str, ...], fields: dict[str, Any]) -> None:
    BreakSpec(attention, OUT, body=with_live, live=live)
    BreakSpec(attention, OUT, body=with_live, live={**live})
    BreakSpec(attention, OUT, body=with_live, live={"p" + "ad": "pad"})
    BreakSpec(attention, OUT, body=into, ownership=PASS, out=out)
    BreakSpec(attention, OUT, body=into, ownership=PASS, out=(*out,))
    BreakSpec(attention, OUT, body=with_live, **fields)
    BreakSpec(attention, OUT, **fields)
    BreakSpec(attention, OUT, body=with_live, out=None, mutates="query")  # E: specgraph-signature
""",
    "unordered": """
OUT: Final = TensorLayout("4", "bfloat16")
BreakSpec("snippets.later:function", OUT, inputs={"x": ROWS})
BreakSpec("snippets.later:function", OUT, inputs={"y": ROWS})  # E: specgraph-parameter
BreakSpec("snippets.later:function", OUT, body=lambda x: x)
BreakSpec("snippets.later:function", OUT, body=lambda x, y: x)  # E: specgraph-signature
BreakSpec("snippets.later:Late.method", OUT, inputs={"self": ROWS, "y": ROWS})  # E: specgraph-parameter
BreakSpec("snippets.later:Late.children", OUT)
BreakSpec("snippets.later:Later", OUT)  # E: specgraph-target
""",
    "later": """
from snippets import unordered

def function(x: Tensor) -> Tensor:
    return x

class Late(Block):
    def method(self, x: Tensor) -> Tensor:
        return x
""",
    "dynamic": """
globals()["made_up"] = rows
""",
    "hooked": """
def __getattr__(name: str) -> Any: ...
""",
    "keeps": """
@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def function(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale

class Holder:
    @sg.graph_break(None)
    def method(self, x: Tensor) -> None: ...

reveal_type(function)
reveal_type(function(torch.ones(1), scale=2.0))
reveal_type(function.spec)
reveal_type(Holder().method)
function(1)  # E: arg-type
function(torch.ones(1), scales=2.0)  # E: call-arg
Holder().method()  # E: call-arg
count: int = function(torch.ones(1))  # E: assignment
""",
}


MESSAGES_PRELUDE = f"""{PRELUDE}
OUT: Final = TensorLayout("4", "bfloat16")
def int_rows(x: int) -> Tensor: ...  # type: ignore[empty-body]
"""

MESSAGES = [
    (
        'BreakSpec(attention, OUT, inputs={"querry": OUT})',
        'inputs= names "querry", which is no parameter of target "attention" '
        '(it has: query, key, value, scale); did you mean "query"?  [specgraph-parameter]',
    ),
    (
        'BreakSpec(attention, TensorLayout("B H*W", "bfloat16"), inputs={"query": TensorLayout("B H Ww")})',
        '"W" in a dim of the output layout "B H*W" is bound by no input (bound: B, H, Ww); '
        'did you mean "Ww"?  [specgraph-unbound-dim]',
    ),
    (
        'TensorLayout("B Q)")',
        "dim 'Q)' of 'B Q)' has ')' where it should end; write dims separated by blanks; each an int, a "
        'name, world("group"), an expression with + - * // and parentheses but no blanks, or one *rest'
        "  [specgraph-dim-syntax]",
    ),
    (
        "BreakSpec(attention, (OUT, OUT))",
        'outputs= is a tuple of 2 TensorLayouts, but target "attention" returns "Tensor"; give one '
        "TensorLayout, or correct the return annotation  [specgraph-outputs]",
    ),
    (
        "BreakSpec(attention, OUT, ownership=Ownership.PASS_THROUGH)",
        "PASS_THROUGH hands the body its buffers, but out= names no parameters for them; name 1 in out=, "
        "one an output, in order  [specgraph-out]",
    ),
    (
        'BreakSpec("snippets.model:Block.forwards", None)',
        'target "snippets.model:Block.forwards": "snippets.model.Block" has no "forwards"; '
        'did you mean "forward"?  [specgraph-target]',
    ),
    (
        "BreakSpec(attention, OUT, body=lambda query, key, value: query)",
        'body does not take every call that target "attention" takes: body(query, key, value, scale=...) '
        "fails, got an unexpected keyword argument 'scale'; give it the parameters of target \"attention\""
        "  [specgraph-signature]",
    ),
    (
        "BreakSpec(rows, OUT, body=int_rows)",
        'body "int_rows" takes "int" for "x", but target "rows" takes "Tensor"; widen the annotation of '
        '"x"  [specgraph-signature]',
    ),
]


def write(package: Path, name: str, source: str) -> None:
    """Put a module into a package."""
    path = package / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


class Mypy:
    """mypy over files in `root`, with one cache for all runs of a configuration."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("with_plugin", "without_plugin"):
            plugins = "plugins = specgraph.mypy_plugin" if name == "with_plugin" else ""
            (root / f"{name}.ini").write_text(CONFIG.format(plugins=plugins))

    def __call__(self, *names: str, config: str = "with_plugin") -> str:
        """What mypy prints; it must not crash."""
        options = ["--config-file", f"{config}.ini", "--cache-dir", config]
        command = [sys.executable, "-m", "mypy", *options, "--no-error-summary", "--show-traceback", *names]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        assert not done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


@pytest.fixture(scope="session")
def run(root: Path) -> Mypy:
    return Mypy(root)


@pytest.fixture(scope="session")
def output(root: Path, run: Mypy) -> str:
    """What mypy prints for the snippets."""
    package = root / "snippets"
    write(package, "__init__", "")
    write(package, "model", MODEL)
    write(package, "layouts", LAYOUTS)
    for name, source in SNIPPETS.items():
        write(package, name, PRELUDE + source)
    write(package, "messages", MESSAGES_PRELUDE + "\n".join(source for source, _ in MESSAGES))
    write(root / "explodes", "__init__", "raise AssertionError('imported')")
    write(root / "explodes", "inner", "raise AssertionError('imported')")
    write(root / "spaces" / "inner", "deep", "")
    return run("snippets")


def reports(output: str, name: str) -> list[Report]:
    """The errors in one module."""
    found = re.findall(rf"(?m)^.*\b{name}\.py:(\d+): error: .*\[([\w-]+)\]$", output)
    return sorted((int(line), code) for line, code in found)


def expected_reports(source: str) -> list[Report]:
    """What the comments of a source expect."""
    return sorted(
        (number, code)
        for number, line in enumerate(source.splitlines(), 1)
        for code in line.partition("# E: ")[2].split()
    )


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_rule_fires_on_the_wrong_lines_and_on_no_other(output: str, name: str) -> None:
    assert reports(output, name) == expected_reports(PRELUDE + SNIPPETS[name])


@pytest.mark.parametrize(("source", "message"), MESSAGES)
def test_a_message_says_what_is_wrong_what_was_expected_and_what_to_do(
    output: str, source: str, message: str
) -> None:
    line = (MESSAGES_PRELUDE + "\n".join(each for each, _ in MESSAGES)).splitlines().index(source) + 1
    (found,) = re.findall(rf"(?m)^.*\bmessages\.py:{line}: error: (.*)$", output)
    assert found == message


def test_looking_up_a_target_imports_nothing(root: Path, output: str) -> None:
    """`explodes` fails where it is imported, and mypy with it."""
    failing = subprocess.run([sys.executable, "-c", "import explodes"], cwd=root, capture_output=True)
    assert failing.returncode == 1
    assert "explodes.missing" in output


PARAMETERS = "x: torch._tensor.Tensor, *, scale: float ="
REVEALED = [
    f"specgraph.intercept.BreakFunction[[{PARAMETERS}], torch._tensor.Tensor]",
    "torch._tensor.Tensor",
    "specgraph.spec.BreakSpec",
    "def (x: torch._tensor.Tensor)",
]


def test_a_break_function_keeps_its_type_with_the_plugin_and_without(output: str, run: Mypy) -> None:
    without = run("snippets/keeps.py", config="without_plugin")
    for each in (output, without):
        assert re.findall(r'keeps\.py.*Revealed type is "(.*)"', each) == REVEALED
    assert reports(without, "keeps") == expected_reports(PRELUDE + SNIPPETS["keeps"])


def test_without_the_plugin_nothing_is_reported(run: Mypy) -> None:
    assert "specgraph-" not in run("snippets/parameter.py", config="without_plugin")


# Later runs, which find most modules in mypy's cache.


def test_a_changed_layout_is_seen_by_the_modules_that_use_it(root: Path, run: Mypy) -> None:
    package = root / "changing"
    write(package, "__init__", "")
    write(package, "layouts", LAYOUTS)
    uses = PRELUDE.replace("snippets.layouts", "changing.layouts")
    uses += 'BreakSpec(rows, ROWS_OUT, inputs={"x": TensorLayout("S D")})\n'
    write(package, "uses", uses)
    assert reports(run("changing"), "uses") == []
    write(package, "layouts", LAYOUTS.replace('"S D", "bfloat16"', '"S Dd", "bfloat16"'))
    line = len(uses.splitlines())
    for _ in range(2):
        assert reports(run("changing"), "uses") == [(line, "specgraph-unbound-dim")]
    write(package, "uses", f"{uses}\n")
    assert reports(run("changing"), "uses") == [(line, "specgraph-unbound-dim")]
    write(package, "layouts", LAYOUTS)
    assert reports(run("changing"), "uses") == []


def test_a_changed_target_is_seen_by_the_modules_that_name_it(root: Path, run: Mypy) -> None:
    package = root / "renaming"
    write(package, "__init__", "")
    write(package, "target", "def before(x: int) -> None: ...\n")
    write(package, "between", "import renaming.target\n")
    uses = "import renaming.between\nimport specgraph as sg\n"
    write(package, "uses", f'{uses}sg.BreakSpec("renaming.target:before", None)\n')
    assert reports(run("renaming"), "uses") == []
    write(package, "target", "def after(x: int) -> None: ...\n")
    assert reports(run("renaming"), "uses") == [(3, "specgraph-target")]


def test_a_code_can_be_ignored_and_disabled(root: Path, run: Mypy) -> None:
    source = 'from specgraph import TensorLayout\nTensorLayout("(")'
    write(root, "ignored", f"{source}  # type: ignore[specgraph-dim-syntax]\n")
    assert run("ignored.py") == ""
    write(root, "disabled", f"# mypy: disable-error-code=specgraph-dim-syntax\n{source}\n")
    assert run("disabled.py") == ""


# Any source at all.

FUNCTIONS = ["rows", "attention", "Block.forward", "Block.make", "Block().forward", "Block", "broken"]
LAYOUT_NAMES = ["ROWS", "ROWS_OUT", "TWICE", "layouts.STRIDED", "layouts.missing", "layouts"]
DIM_STRINGS = ["S D", "", "S*2 D//(2)", "*rest D", "S (", "*a *b", "é", "S\n\tD", "1" * 50, "-S"]
TARGETS = [
    *(f"snippets.model:{name}" for name in ("rows", "row", "Block.forward", "Block.x.y", "Tensor", "torch")),
    *("snippets:model.rows", "snippets.odd:overloaded", "snippets.odd:Odd.prop", "snippets.odd:broken"),
    *("snippets.odd:alias", "snippets.odd:Odd.field", "snippets.odd:decorated", "snippets.missing:f"),
    *("torch:nn", "torch.nn.functional:relu", "builtins:len", "sys:path.x", "fuzz:result0", "a.b:c"),
    *("module:a.*", "module:", "op:aten::mm", "op:", ":", "x", "", "x:y:z", "é:é", "..:..", "x\n:y"),
]
NAMES = ["x", "query", "self", "cls", "length", "x y", "", "é"]
WORDS = """
    ... None 1 -1.5 True b"x" Any int sg Tensor undefined undefined.attribute Ownership Ownership.COPY
    Ownership.PASS_THROUGH Ownership["COPY"] TensorLayout graph_break BreakSpec torch.nn.functional.relu
    torch.no_grad() rows(1) [].append f"{1}" (1)(2) ""[0] str.join overloaded partial decorated Odd
"""
PHRASES = [
    "lambda: 0",
    "lambda x, *args, k=1, **kwargs: x",
    "lambda x, /: x",
    "[each for each in (ROWS, ROWS)]",
    "{each: ROWS for each in 'ab'}",
    "(each for each in ())",
    "ROWS if rows else ROWS_OUT",
    "(walrus := ROWS)",
    "rows or None",
    "'x' 'y'",
    "{'x', 'y'}",
    "dict(x=ROWS)",
    "reveal_type(rows)",
]
STRINGS = [repr(each) for each in (*NAMES, *TARGETS, *DIM_STRINGS)]
LEAVES = [*FUNCTIONS, *LAYOUT_NAMES, *STRINGS, *WORDS.split(), *PHRASES]
FIELDS = ["inputs", "ownership", "out", "mutates", "body", "live", "capture_stub", "name", "nonsense"]
STATEMENTS = [
    "{break_spec}",
    "{layout}",
    "result{n} = {break_spec}",
    "result{n} = {layout}",
    "def inside{n}() -> None: {break_spec}",
    "class C{n}:\n    field = {break_spec}",
    "with {graph_break}: pass",
    "@{graph_break}\ndef function{n}(x: Tensor, *args: int, **kwargs: str) -> Tensor: return x",
    "@{graph_break}\nclass Decorated{n}: ...",
    """
class K{n}:
    @{graph_break}
    async def method(self, x, /): ...
    @staticmethod
    @{graph_break}
    @torch.no_grad()
    def static(): ...
    @property
    @{graph_break}
    @property
    def prop(self) -> int: ...
""",
    """
def outer{n}() -> None:
    @undefined
    @{graph_break}
    @{graph_break}
    def inner(query, key): ...
""",
]

ODD_MODULE = """
from typing import Any, overload
import functools
import specgraph as sg
from torch import Tensor
from missing_module import *  # type: ignore

@overload
def overloaded(x: int) -> int: ...
@overload
def overloaded(x: str) -> str: ...
def overloaded(x: Any) -> Any: return x

class Odd(Unknown):  # type: ignore
    field: int
    @property
    def prop(self) -> int: return 0

def broken(x: Undefined) -> Undefined: ...  # type: ignore
alias = overloaded
partial = functools.partial(overloaded, 1)

@sg.graph_break(None)
def decorated(x: Tensor) -> None: ...
"""


@attrs.frozen
class SourceText:
    """Draws source text that is grammatical and, half of the time, has the right shape."""

    draw: st.DrawFn

    def one_of(self, *options: str) -> str:
        return self.draw(st.sampled_from(options))

    def some(self, make: Callable[[], str], most: int = 3) -> list[str]:
        return [make() for _ in range(self.draw(st.integers(0, most)))]

    def expression(self, depth: int = 2) -> str:
        shape = self.one_of("leaf", "leaf", "leaf", "text", "tuple", "list", "dict", "layout", "walrus")
        if shape == "text":
            return repr(self.draw(st.text(max_size=6)))
        if shape == "leaf" or depth == 0:
            return self.one_of(*LEAVES)

        def inner(*before: str) -> str:
            return f"{self.one_of(*before)}({self.expression(depth - 1)})"

        if shape == "layout":
            return self.call("TensorLayout", ["dims", "dtype", "strides", "nonsense"], depth - 1)
        if shape == "dict":
            items = self.some(lambda: self.one_of(f"{inner('')}: {inner('')}", f"**{inner('')}"))
            return f"{{{', '.join(items)}}}"
        if shape == "walrus":
            return f"({self.expression(depth - 1)} if (yes := {inner('')}) else yes)"
        items = self.some(lambda: f"{inner('', '', '*')}, ")
        return f"({''.join(items)})" if shape == "tuple" else f"[{''.join(items)}]"

    def call(self, callee: str, fields: list[str], depth: int = 2) -> str:
        """A call with any mix of arguments."""
        args = self.some(lambda: f"{self.one_of('', '', '*')}({self.expression(depth)})", 2)
        keywords = self.draw(st.lists(st.sampled_from(fields), unique=True, max_size=5))
        args += [f"{keyword}={self.expression(depth)}" for keyword in keywords]
        args += self.some(lambda: f"**({self.expression(depth)})", 1)
        return f"{callee}({', '.join(args)})"

    def layout(self) -> str:
        return self.one_of(*LAYOUT_NAMES, f"TensorLayout({self.one_of(*DIM_STRINGS)!r}, 'int8')")

    def value(self, field: str) -> str:
        """An argument that mostly has the right shape."""
        names = [self.one_of(*NAMES) for _ in range(2)]
        match self.one_of(field, field, field, "any"):
            case "target":
                return self.one_of(*FUNCTIONS, *map(repr, TARGETS))
            case "outputs":
                return self.one_of(
                    self.layout(), "None", f"({''.join(f'{each}, ' for each in self.some(self.layout))})"
                )
            case "inputs" | "live":
                return f"{{{', '.join(f'{name!r}: {self.layout()}' for name in names)}}}"
            case "ownership":
                return self.one_of("Ownership.COPY", "Ownership.PASS_THROUGH")
            case "out" | "mutates":
                return self.one_of(repr(names[0]), repr(names))
            case "body" | "capture_stub":
                return self.one_of(*FUNCTIONS, "lambda *args, **kwargs: 0")
        return self.expression()

    def declaration(self, callee: str, required: list[str]) -> str:
        if self.draw(st.booleans()):
            return self.call(callee, [*required, *FIELDS])
        fields = self.draw(st.lists(st.sampled_from(FIELDS[:-1]), unique=True, max_size=5))
        return f"{callee}({', '.join(f'{field}={self.value(field)}' for field in [*required, *fields])})"

    def statement(self, n: int) -> str:
        return self.one_of(*STATEMENTS).format(
            n=n,
            break_spec=self.declaration("BreakSpec", ["target", "outputs"]),
            graph_break=self.declaration("sg.graph_break", ["outputs"]),
            layout=self.call("TensorLayout", ["dims", "dtype", "strides", "nonsense"]),
        )


def compiles(source: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, "source", "exec")
        except (SyntaxError, ValueError):
            return False
    return True


@st.composite
def sources(draw: st.DrawFn) -> str:
    """Twenty statements that declare breaks; those that Python's compiler refuses are left out."""
    text = SourceText(draw)
    return "\n".join(filter(compiles, (text.statement(n) for n in range(20))))


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking would take minutes
)
@given(sources())
def test_no_source_crashes_mypy(root: Path, output: str, run: Mypy, source: str) -> None:
    write(root / "snippets", "odd", ODD_MODULE)
    write(root, "fuzz", f"{PRELUDE}from snippets.odd import *\n{source}")
    run("fuzz.py")


# Which functions may stand in for which.

parameter_lists = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(list(inspect._ParameterKind)), st.booleans()),
    unique_by=lambda each: each[0],
    max_size=4,
)


def as_signature(parameters: list[tuple[str, inspect._ParameterKind, bool]]) -> inspect.Signature:
    """The nearest signature: in order of kind, one *args and **kwargs, no default before a required one."""
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found: dict[object, inspect.Parameter] = {}
    needs_default = False
    for name, kind, is_optional in sorted(parameters, key=lambda each: each[1]):
        needs_default = kind < inspect.Parameter.VAR_POSITIONAL and (needs_default or is_optional)
        has_default = needs_default or (kind is inspect.Parameter.KEYWORD_ONLY and is_optional)
        # Before Python 3.13 `bind` refuses a keyword that has the name of a positional-only parameter.
        name = f"{name}_" if kind is inspect.Parameter.POSITIONAL_ONLY else name
        default = 0 if has_default else inspect.Parameter.empty
        found[kind if kind in stars else name] = inspect.Parameter(name, kind, default=default)
    return inspect.Signature(list(found.values()))


def refuse_nothing(argument: Type, parameter: Type) -> None:
    """Any argument may be passed for any parameter."""


def takes(signature: inspect.Signature, num_args: int, keywords: set[str]) -> bool:
    try:
        signature.bind(*range(num_args), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(parameter_lists, parameter_lists)
def test_a_stand_in_fits_where_it_takes_every_call_of_the_target(
    targets: list[tuple[str, inspect._ParameterKind, bool]],
    stand_ins: list[tuple[str, inspect._ParameterKind, bool]],
) -> None:
    target, stand_in = as_signature(targets), as_signature(stand_ins)
    calls = [
        (num_args, {name for bit, name in enumerate("abcdz") if chosen >> bit & 1})
        for num_args in range(6)
        for chosen in range(32)
    ]
    fits = all(takes(stand_in, *call) for call in calls if takes(target, *call))
    callees = [Callee("f", each, True, True, NoneType()) for each in (target, stand_in)]
    is_wrapper = [each.kind for each in target.parameters.values()] == [
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ]
    problem = misfit(callees[0], callees[1], added=(), refused=refuse_nothing)
    assert (problem is None) == (fits or is_wrapper)
