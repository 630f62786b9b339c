"""Targets: every way to say what a break is, seen through a capture and a replay equal to eager."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import specgraph as sg

ROWS = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", dtype=sg.like("x"))
HEADS = sg.TensorLayout("B H S D")
HERE = __name__


def rows_break(target: Callable[..., Any] | str, parameter: str = "x", **fields: Any) -> sg.BreakSpec:
    """A break on one [S D] tensor that returns another."""
    output = sg.TensorLayout("S D", dtype=sg.like(parameter))
    return sg.BreakSpec(target, output, inputs={parameter: ROWS}, **fields)


def model_of(*breaks: sg.BreakSpec) -> sg.ModelSpec:
    return sg.ModelSpec("m", breaks)


def captured_breaks(
    fn: Callable[..., Any], spec: sg.ModelSpec, device: torch.device, shape: tuple[int, ...] = (8, 4)
) -> list[str]:
    """Names of the breaks, in order, once two replays have been equal to eager."""
    captured = sg.capture(fn, spec, {"x": torch.randn(shape, device=device)})
    for _ in range(2):
        x = torch.randn(shape, device=device)
        with torch.no_grad():
            assert torch.equal(captured(x=x), fn(x))
    return [step.name for step in captured.plan.breaks]


# Functions, by reference and by import path.


def shift(x: Tensor) -> Tensor:
    return x + 1


def shift_twice(x: Tensor) -> Tensor:
    other: Any = sys.modules["specgraph_other"]
    return shift(x * 2) * other.renamed(x)  # type: ignore[no-any-return]  # the module is made at run time


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A second module, in which `shift` has another name."""
    module = types.ModuleType("specgraph_other")
    vars(module)["renamed"] = shift
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("target", [shift, f"{HERE}:shift", "specgraph_other:renamed"])
def test_a_function_breaks_under_every_module_level_name(
    device: torch.device, other: types.ModuleType, target: Callable[..., Any] | str
) -> None:
    original = shift
    names = captured_breaks(shift_twice, model_of(rows_break(target, name="shift")), device)
    assert names == ["shift", "shift"]
    assert shift is original
    assert vars(other)["renamed"] is original


# Methods.


class Worker:
    offset = 3.0

    def scale(self, x: Tensor) -> Tensor:
        return x * self.offset

    @staticmethod
    def halve(x: Tensor) -> Tensor:
        return x / 2

    @classmethod
    def move(cls, x: Tensor) -> Tensor:
        return x + cls.offset


class Heir(Worker):
    offset = 5.0


def scaling(x: Tensor) -> Tensor:
    return Heir().scale(x + 1) - 1


def halving(x: Tensor) -> Tensor:
    return Heir.halve(x + 1) - Heir().halve(x)


def moving(x: Tensor) -> Tensor:
    return Heir.move(x * 2) * 2


@pytest.mark.parametrize(
    ("target", "fn", "names"),
    [
        (f"{HERE}:Worker.scale", scaling, ["scale"]),
        (f"{HERE}:Heir.scale", scaling, ["scale"]),
        (Worker.scale, scaling, ["scale"]),
        (f"{HERE}:Worker.halve", halving, ["halve", "halve"]),
        (f"{HERE}:Heir.halve", halving, ["halve", "halve"]),
        (Worker.halve, halving, ["halve", "halve"]),
        (f"{HERE}:Worker.move", moving, ["move"]),
        (f"{HERE}:Heir.move", moving, ["move"]),
        (Worker.move, moving, ["move"]),
    ],
)
def test_a_method_breaks_also_where_it_is_inherited(
    device: torch.device, target: Any, fn: Callable[..., Any], names: list[str]
) -> None:
    found = dict(vars(Worker)), dict(vars(Heir))
    assert captured_breaks(fn, model_of(rows_break(target)), device) == names
    assert (dict(vars(Worker)), dict(vars(Heir))) == found


# Submodules.


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x * 2)  # type: ignore[no-any-return]  # a module's call gives Any


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for block in stage:  # type: ignore[attr-defined]  # ModuleList gives Module
                x = block(x)
        return x * 1


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Attention()
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x * 2) * 1  # type: ignore[no-any-return]  # a module's call gives Any


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("stages.*.*.attn", ["0.0.attn", "0.1.attn", "1.0.attn"]),
        ("stages.0.*.attn", ["0.0.attn", "0.1.attn"]),
        ("stages.*.0.*", ["0.0.attn", "1.0.attn"]),
        ("stages.1.0.attn", ["1.0.attn"]),
        ("stages.*.*", ["0.0", "0.1", "1.0"]),
    ],
)
def test_a_glob_breaks_at_every_submodule_it_matches(
    device: torch.device, glob: str, names: list[str]
) -> None:
    net = Net()
    spec = model_of(rows_break(f"module:{glob}", name="part"))
    assert captured_breaks(net, spec, device) == [f"part[stages.{name}]" for name in names]
    assert not any("forward" in vars(module) for module in net.modules())


def test_a_star_stands_for_a_submodule_and_not_for_the_model_itself(device: torch.device) -> None:
    spec = model_of(rows_break("module:*", name="part"))
    assert captured_breaks(Block(), spec, device) == ["part[attn]"]


def test_a_submodule_under_two_names_breaks_under_either(device: torch.device) -> None:
    assert len(captured_breaks(Twice(), model_of(rows_break("module:second")), device)) == 1


def add_one(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + 1,)


def triple(module: nn.Module, args: tuple[Tensor], result: Tensor) -> Tensor:
    return result * 3


def test_hooks_of_a_submodule_still_run(device: torch.device) -> None:
    net = Block()
    net.attn.register_forward_pre_hook(add_one)
    net.attn.register_forward_hook(triple)
    assert captured_breaks(net, model_of(rows_break("module:attn")), device) == ["attn[attn]"]
    x = torch.randn(8, 4, device=device)
    captured = sg.capture(net, model_of(rows_break("module:attn")), {"x": x})
    assert torch.equal(captured(x=x), x + (x * 2 + 1).softmax(1) * 3)


def subtract_seven(self: nn.Module, x: Tensor) -> Tensor:
    return x - 7


def test_a_forward_set_on_the_instance_is_what_runs_and_is_put_back(device: torch.device) -> None:
    net = Block()
    forward = types.MethodType(subtract_seven, net.attn)
    net.attn.forward = forward  # type: ignore[method-assign]  # as offloading hooks do
    assert captured_breaks(net, model_of(rows_break("module:attn")), device) == ["attn[attn]"]
    assert vars(net.attn)["forward"] is forward


# Dispatcher ops.


@torch.library.custom_op("specgraph_test_targets::move", mutates_args=())
def move_op(x: Tensor, by: float) -> Tensor:
    return x + by


@move_op.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


def moving_by_op(x: Tensor) -> Any:
    return torch.ops.specgraph_test_targets.move(move_op(x * 2, 1.0), by=2.0) * 2


def attending(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x * 2, x, x + 1, is_causal=True) * 2


def contiguous_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The op's kernels differ in the strides of what they return."""
    return F.scaled_dot_product_attention(query, key, value, *args, **kwargs).contiguous()


ATTENTION = sg.BreakSpec(
    "op:aten::scaled_dot_product_attention",
    sg.TensorLayout("B H S D", dtype=sg.like("query")),
    inputs={"query": HEADS, "key": HEADS, "value": HEADS},
    body=contiguous_attention,
)


@pytest.mark.parametrize("name", ["move", "move.default"])
def test_a_custom_op_breaks_however_it_is_called(device: torch.device, name: str) -> None:
    spec = rows_break(f"op:specgraph_test_targets::{name}", name="move")
    assert captured_breaks(moving_by_op, model_of(spec), device) == ["move", "move"]


def test_a_composite_op_breaks_before_it_is_taken_apart(device: torch.device) -> None:
    names = captured_breaks(attending, model_of(ATTENTION), device, (1, 2, 8, 4))
    assert names == ["scaled_dot_product_attention"]


def test_a_composite_op_breaks_in_a_model_under_inference_mode(device: torch.device) -> None:
    fn = torch.inference_mode()(attending)
    names = captured_breaks(fn, model_of(ATTENTION), device, (1, 2, 8, 4))
    assert names == ["scaled_dot_product_attention"]


@pytest.mark.parametrize(
    ("op", "fn"),
    [
        pytest.param("softmax", lambda x: (x * 2).softmax(1), id="method"),
        pytest.param("softmax", lambda x: torch.softmax(x * 2, dim=1), id="function"),
        pytest.param("softmax", lambda x: torch.softmax(input=x * 2, dim=1), id="input by keyword"),
        pytest.param("softmax", lambda x: F.softmax(x * 2, dim=1), id="python wrapper"),
        pytest.param("flip", lambda x: (x * 2).flip(0), id="only overload"),
        pytest.param("clamp", lambda x: (x * 2).clamp(torch.zeros_like(x)), id="second overload"),
        pytest.param("round", lambda x: (x * 2).round(decimals=1), id="overload with another parameter"),
    ],
)
def test_an_op_breaks_through_each_of_torchs_ways_to_call_it(
    device: torch.device, op: str, fn: Callable[[Tensor], Tensor]
) -> None:
    spec = rows_break(f"op:aten::{op}", "self", name="op")
    assert captured_breaks(fn, model_of(spec), device) == ["op"]


# Functions under @graph_break.


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def declared(x: Tensor) -> Tensor:
    return x * 3


class Owner:
    factor = 2.0

    @sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
    def grow(self, x: Tensor) -> Tensor:
        return x * self.factor

    @staticmethod
    @sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
    def shrink(x: Tensor) -> Tensor:
        return x / 4


def declared_everywhere(x: Tensor) -> Tensor:
    return Owner.shrink(Owner().grow(declared(x + 1) + 1) + 1) + 1


@pytest.mark.parametrize("listed", [(), (declared.spec,), (declared.spec, Owner.grow.spec)])
def test_graph_break_functions_and_methods_break_listed_or_not(
    device: torch.device, listed: tuple[sg.BreakSpec, ...]
) -> None:
    names = captured_breaks(declared_everywhere, model_of(*listed), device)
    assert names == ["declared", "grow", "shrink"]


# Calls that are no breaks.


def attend_rows(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def outer(x: Tensor) -> Tensor:
    return attend_rows(shift(declared(x)))


def outer_then_inner(x: Tensor) -> Tensor:
    return attend_rows(shift(declared(outer(x * 2) * 2) * 2) * 2)


def test_a_target_inside_a_body_is_an_ordinary_call(device: torch.device) -> None:
    layouts = {"query": sg.TensorLayout("B S D")}
    op = "op:aten::scaled_dot_product_attention"
    attention = sg.BreakSpec(op, sg.TensorLayout("B S D", "float32"), inputs=layouts, name="attention")
    spec = model_of(rows_break(outer), rows_break(shift), declared.spec, attention)
    names = captured_breaks(outer_then_inner, spec, device)
    assert names == ["outer", "declared", "shift", "attention"]


from_threads: list[Tensor] = []


def call_from_thread() -> None:
    from_threads.append(declared(shift(torch.ones(2, 2))))


def starts_a_thread(x: Tensor) -> Tensor:
    thread = threading.Thread(target=call_from_thread)
    thread.start()
    thread.join()
    return shift(x * 2) * 2


def test_a_target_called_from_another_thread_is_an_ordinary_call(device: torch.device) -> None:
    from_threads.clear()
    captured = sg.capture(
        starts_a_thread, model_of(rows_break(shift)), {"x": torch.ones(8, 4, device=device)}
    )
    assert [step.name for step in captured.plan.breaks] == ["shift"]
    # One call while warming up, one while planning, one while capturing.
    assert len(from_threads) == 3
    assert all(torch.equal(each, torch.full((2, 2), 6.0)) for each in from_threads)


nested: list[Callable[[], object]] = []


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def capturing_body(x: Tensor) -> Tensor:
    for each in nested:
        each()
    return x * 2


def calls_capturing_body(x: Tensor) -> Tensor:
    return capturing_body(x + 1) * 2


@pytest.mark.parametrize("nest", [sg.plan, sg.capture])
def test_a_body_may_not_plan_or_capture(device: torch.device, nest: Callable[..., object]) -> None:
    x = torch.ones(8, 4, device=device)
    nested[:] = [lambda: nest(shift, model_of(), {"x": x})]
    try:
        with pytest.raises(sg.CaptureError, match="already in progress on this thread") as caught:
            sg.capture(calls_capturing_body, model_of(), {"x": x})
    finally:
        nested.clear()
    assert "may replay another graph, but not capture one" in caught.value.fix
    assert captured_breaks(calls_capturing_body, model_of(), device) == ["capturing_body"]


# Names are put back on every way out.

failing = ""


def raising_body(x: Tensor) -> Tensor:
    if failing == "body":
        raise ValueError("of the body")
    return x


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = Worker.move(Worker.halve(shift(self.attn(x * 2) * 2)))
        if failing == "model":
            raise ValueError("of the model")
        return raising_body(x)


@pytest.mark.parametrize(
    ("failure", "error"), [("", None), ("body", ValueError), ("model", ValueError), ("spec", sg.SpecError)]
)
def test_names_are_put_back_on_every_way_out(
    device: torch.device,
    other: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    failure: str,
    error: type[Exception] | None,
) -> None:
    def names() -> list[Any]:
        return [shift, vars(other)["renamed"], raising_body, vars(Worker)["halve"], vars(Worker)["move"]]

    net, before = Everything(), names()
    targets = (f"{HERE}:shift", f"{HERE}:Worker.halve", f"{HERE}:Worker.move", "module:attn")
    breaks = [*(rows_break(target) for target in targets), rows_break(raising_body)]
    if failure == "spec":
        breaks.append(rows_break(shift, name="again"))
    monkeypatch.setattr(f"{HERE}.failing", failure)
    x = torch.ones(8, 4, device=device)
    if error is None:
        assert len(sg.capture(net, model_of(*breaks), {"x": x}).plan.breaks) == 5
    else:
        with pytest.raises(error):
            sg.capture(net, model_of(*breaks), {"x": x})
    assert all(now is then for now, then in zip(names(), before, strict=True))
    assert "forward" not in vars(net.attn)


# Targets that cannot be.


def make_closure() -> Callable[[Tensor], Tensor]:
    def inner(x: Tensor) -> Tensor:
        return x

    return inner


NUMBER = 3


def relu_model(x: Tensor) -> Tensor:
    return declared(torch.relu(shift(x)))


@pytest.mark.parametrize(
    ("target", "problem", "fix"),
    [
        ("no_such_module:fn", "module 'no_such_module' cannot be imported", "install the package"),
        (f"{HERE}:missing", f"{HERE} has no 'missing'", "the name after the colon"),
        (f"{HERE}:Worker.missing", "Worker has no 'missing'", "the name after the colon"),
        (f"{HERE}:Missing.scale", f"{HERE} has no 'Missing'", "the name after the colon"),
        (f"{HERE}:NUMBER", "target 3 is not callable", "give a callable"),
        ("shift", "'shift' is no import path", '"pkg.mod:fn"'),
        (
            make_closure(),
            "make_closure.<locals>.inner, so its calls cannot be seen",
            "@specgraph.graph_break",
        ),
        (torch.relu, "is built in and has no signature", '"op:aten::relu"'),
        ("module:blocks.*", "relu_model is no nn.Module", "capture an nn.Module"),
        ("op:nowhere::nothing", "there is no such dispatcher op", '"op:namespace::name"'),
        ("op:aten::relu.nothing", "there is no such dispatcher op", '"op:namespace::name"'),
        ("op:relu", "there is no such dispatcher op", '"op:namespace::name"'),
    ],
)
def test_a_target_that_cannot_be_resolved_is_refused(target: Any, problem: str, fix: str) -> None:
    spec = sg.BreakSpec(target, ROWS_OUT, inputs={"x": ROWS}, name="lost")
    with pytest.raises(sg.SpecError) as caught:
        sg.plan(relu_model, model_of(spec), {"x": torch.ones(8, 4)})
    assert problem in caught.value.problem
    assert fix in caught.value.fix
    assert (caught.value.spec, caught.value.break_name) == ("m", "lost")


def test_a_glob_that_matches_nothing_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(sg.SpecError, match="matches no submodule of Net") as caught:
        sg.plan(Net(), model_of(rows_break("module:stages.*.attn")), {"x": torch.ones(8, 4)})
    assert caught.value.actual.startswith("submodules: stages, stages.0, stages.0.0, stages.0.0.attn")
    assert "* stands for one part" in caught.value.fix


@pytest.mark.parametrize(
    ("fn", "first", "second"),
    [
        pytest.param(relu_model, rows_break(shift), rows_break(f"{HERE}:shift"), id="function"),
        pytest.param(
            scaling, rows_break(f"{HERE}:Worker.scale"), rows_break(f"{HERE}:Heir.scale"), id="method"
        ),
        pytest.param(
            Net(), rows_break("module:stages.*.*.attn"), rows_break("module:stages.0.*.*"), id="glob"
        ),
        pytest.param(
            relu_model,
            rows_break("op:aten::relu", "self"),
            rows_break("op:aten::relu.default", "self"),
            id="op",
        ),
        pytest.param(relu_model, declared.spec, declared.spec, id="graph_break"),
    ],
)
def test_two_breaks_with_one_target_are_refused(
    fn: Callable[..., Any], first: sg.BreakSpec, second: sg.BreakSpec
) -> None:
    spec = model_of(attrs.evolve(first, name="first"), attrs.evolve(second, name="second"))
    with pytest.raises(sg.SpecError, match=r"breaks 'first.*' and 'second.*' have the same target") as caught:
        sg.plan(fn, spec, {"x": torch.ones(8, 4)})
    assert caught.value.fix == "keep one of them"


def shift_by(x: Tensor, by: float = 1.0) -> Tensor:
    return x + by


@pytest.mark.parametrize(
    ("fields", "problem", "parameters"),
    [
        ({"inputs": {"y": ROWS}}, "inputs names 'y', which is no parameter of the target", "x"),
        ({"live": {"length": "n"}}, "live names 'length', which is no parameter of the body", "x"),
        ({"mutates": ("x", "y")}, "mutates names 'y', which is no parameter of the body", "x"),
        (
            {"out": "out", "ownership": sg.Ownership.PASS_THROUGH},
            "out names 'out', which is no parameter of the body",
            "x",
        ),
        (
            {"body": shift_by, "live": {"length": "n"}},
            "live names 'length', which is no parameter of the body",
            "x, by",
        ),
    ],
)
def test_a_name_that_is_no_parameter_is_refused(fields: Any, problem: str, parameters: str) -> None:
    spec = sg.BreakSpec(shift, sg.TensorLayout("2", "float32"), **fields)
    with pytest.raises(sg.SpecError) as caught:
        sg.plan(relu_model, sg.ModelSpec("m", (spec,), live="n"), {"x": torch.ones(8, 4)})
    assert caught.value.problem == problem
    assert (caught.value.spec, caught.value.break_name) == ("m", "shift")
    assert caught.value.expected == f"one of: {parameters}"
    assert f"in {problem.partition(' ')[0]}=" in caught.value.fix
