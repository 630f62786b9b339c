"""What moved between two plans is said in words, once, and never goes unsaid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import specgraph as sg
from specgraph.converter import plan_converter
from specgraph.planner import CapturePlan
from specgraph.planner.changes import Change, compare

ROWS = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", dtype=sg.like("x"))


def first(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


def second(x: Tensor, table: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    return x + 1


def break_of(target: Callable[..., Any], **fields: Any) -> sg.BreakSpec:
    return sg.BreakSpec(target, ROWS_OUT, inputs={"x": ROWS}, **fields)


def chain(x: Tensor) -> Tensor:
    for _ in range(4):
        x = first(x + 1) * 2
    return x


def longer_chain(x: Tensor) -> Tensor:
    for index in range(4):
        x = first(x + 1) * 2
        if index == 1:
            x = second(x.relu())
    return x


def plan_of(fn: Callable[..., Any], *breaks: sg.BreakSpec, size: int = 8, **fields: Any) -> CapturePlan:
    spec = sg.ModelSpec("m", breaks, inputs={"x": ROWS}, **fields)
    return sg.plan(fn, spec, {"x": torch.zeros(size, 128)})


def messages(old: CapturePlan, new: CapturePlan) -> list[str]:
    return [change.message for change in compare(old, new)]


CHAIN = plan_of(chain, break_of(first))


def test_equal_plans_have_no_changes() -> None:
    assert compare(CHAIN, plan_of(chain, break_of(first))) == ()
    assert compare(CHAIN, attrs.evolve(CHAIN, device="cuda", diagnostics=())) == ()


def test_a_break_that_appears_is_named_and_shifts_nothing() -> None:
    longer = plan_of(longer_chain, break_of(first), break_of(second))
    said = messages(CHAIN, longer)
    assert said[0].startswith("break second appeared, called at tests/test_changes.py:")
    assert said[1:] == [
        "copied at breaks +25 %: 16.0 KiB -> 20.0 KiB",
    ]
    back = messages(longer, CHAIN)
    assert back[0].startswith("break second went away, called at")


def test_what_many_steps_share_is_said_once() -> None:
    wider = plan_of(chain, break_of(first), size=16)
    changes = compare(CHAIN, wider)
    assert Change("dims", "the model's dims: S 8 -> 16") in changes
    assert Change("dims", "4 times: break first: S 8 -> 16", 4) in changes
    said = [change.message for change in changes]
    assert "copied at breaks doubled: 16.0 KiB -> 32.0 KiB" in said
    assert "in use at once in the pool doubled: 12.0 KiB -> 24.0 KiB" in said
    assert len(changes) < 16


def test_ownership_and_what_it_saves() -> None:
    def model(x: Tensor) -> Tensor:
        return second(x * 2)

    passing = break_of(second, ownership=sg.Ownership.PASS_THROUGH, out="out")
    assert messages(plan_of(model, break_of(second)), plan_of(model, passing)) == [
        "break second: COPY -> PASS_THROUGH",
        "break second copies: 4.0 KiB -> 0 B",
        "copied at breaks: 4.0 KiB -> 0 B",
    ]


TABLE = torch.ones(8, 128)


def test_an_argument_that_becomes_external_is_named_with_the_hazard() -> None:
    def own(x: Tensor) -> Tensor:
        return second(x * 2, x * 3)

    def cached(x: Tensor) -> Tensor:
        return second(x * 2, TABLE)

    said = messages(plan_of(own, break_of(second)), plan_of(cached, break_of(second)))
    assert said[0] == (
        "break second: table now comes from external tensor 0 (was a segment); "
        "replays read that very tensor from now on"
    )
    assert "externals: 0 B -> 4.0 KiB" in said


def test_values_live_names_and_layouts() -> None:
    def scaled(x: Tensor) -> Tensor:
        return first(x * 1, scale=2.0)

    frozen = plan_of(scaled, break_of(first))
    live = plan_of(scaled, break_of(first, live={"scale": "s"}), live=("s",))
    assert messages(frozen, live) == [
        "live value s appeared",
        "break first: scale: frozen 2.0 -> live s",
    ]
    halved = sg.BreakSpec(first, sg.TensorLayout("S D//2", "bfloat16"), inputs={"x": ROWS})
    said = messages(frozen, plan_of(scaled, halved))
    assert "break first: output: float32[8 128] -> bfloat16[8 64]" in said
    assert "the model's output: float32[8 128] -> bfloat16[8 64]" in said


def leaves(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in plain data that is no container."""
    if isinstance(data, dict):
        return [leaf for key, each in data.items() for leaf in leaves(each, (*path, key))]
    if isinstance(data, list | tuple):
        return [leaf for index, each in enumerate(data) for leaf in leaves(each, (*path, index))]
    return [path]


def changed(data: Any, path: tuple[Any, ...]) -> Any:
    """The data with another value at a path."""
    if not path:
        if isinstance(data, bool):
            return not data
        return data + 1 if isinstance(data, int) else OTHER.get(data, f"{data}!")
    key, *rest = path
    if isinstance(data, dict):
        return {**data, key: changed(data[key], tuple(rest))}
    return [changed(each, tuple(rest)) if index == key else each for index, each in enumerate(data)]


OTHER = {"copy": "pass_through", "float32": "float64", "input": "external", "segment": "input"} | {
    "parameter": "input",
    "break output": "external",
    "external": "parameter",
}


def mixed(x: Tensor) -> Tensor:
    y = second(first(x * 2, scale=0.5), TABLE)
    return y.relu() + x


def test_whatever_the_digest_covers_is_said_when_it_changes() -> None:
    plan = plan_of(mixed, break_of(first), break_of(second, mutates="table"))
    data = plan_converter.unstructure(plan)
    paths = [path for path in leaves(data) if path[-1] != "kind"]
    assert len(paths) > 150
    for path in paths:
        moved = plan_converter.structure(changed(data, path), CapturePlan)
        assert (moved.digest == plan.digest) == (compare(plan, moved) == ()), path


@pytest.mark.parametrize("field", ["steps", "buffers", "outputs"])
def test_a_missing_entry_is_said_too(field: str) -> None:
    plan = plan_of(mixed, break_of(first), break_of(second))
    shorter = attrs.evolve(plan, **{field: getattr(plan, field)[:-1]})
    assert compare(plan, shorter) != ()
