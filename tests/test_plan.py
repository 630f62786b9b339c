"""Planning: what a plan says of a model, and the models it refuses. No device is needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import specgraph as sg
from specgraph.layout import ConcreteLayout, contiguous_strides
from specgraph.planner import Buffer, Memory, Origin, Provenance, TensorUse, ValueUse

ROWS = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", dtype=sg.like("x"))
EMPTY = sg.ModelSpec("empty", ())
ONES = torch.ones(8, 4)


def rows_break(target: Callable[..., Any] | str, **fields: Any) -> sg.BreakSpec:
    """A break on one [S D] tensor `x` that returns another."""
    return sg.BreakSpec(target, ROWS_OUT, inputs={"x": ROWS}, **fields)


def laid(*shape: int, strides: tuple[int, ...] | None = None) -> ConcreteLayout:
    """A float32 layout, contiguous unless strides are given."""
    return ConcreteLayout(shape, strides or contiguous_strides(shape), torch.float32)


def made_by(origin: str, source: str) -> Provenance:
    return Provenance(Origin(origin), source)


def line_of(function: Callable[..., Any], text: str) -> str:
    """The line of `function` with `text` in it, as plans and messages write it."""
    lines, start = inspect.getsourcelines(function)
    (index,) = [index for index, line in enumerate(lines) if text in line]
    return f"tests/test_plan.py:{start + index} in {function.__name__}"


# A model with two breaks, whose bodies are handed tensors of all five origins, most of them views.

ran: list[str] = []
GAINS = torch.ones(2, 30)


def mix(x: Tensor, weight: Tensor, scale: float, *, length: int = 0) -> tuple[Tensor, Tensor]:
    ran.append("mix")
    return x * scale, x.sum(1)


def join(x: Tensor, previous: Tensor, skip: Tensor, gain: Tensor, out: Tensor | None = None) -> Tensor:
    ran.append("join")
    return torch.add(x, skip, out=out)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(30, 30))
        self.register_buffer("bias", torch.ones(30))

    def forward(self, x: Tensor, scale: float = 0.5) -> dict[str, Tensor]:
        hidden = x @ self.weight
        skip, transposed = x[2:6], self.weight.t()
        first, total = mix(hidden[1:], transposed, scale, length=7)
        hidden = torch.addcmul(self.get_buffer("bias"), first, GAINS[1])
        last = join(hidden[:4], first.t(), skip, GAINS[0])
        return {"rows": last * total[0], "skip": skip}


MIX = sg.BreakSpec(
    mix,
    (ROWS_OUT, sg.TensorLayout("S", sg.like("x"))),
    inputs={"x": ROWS, "weight": sg.TensorLayout("D D")},
    live={"length": "n"},
)
JOIN = rows_break(join, ownership=sg.Ownership.PASS_THROUGH, out="out", mutates="skip")
NET = sg.ModelSpec("net", (MIX, JOIN), inputs={"x": sg.TensorLayout("rows D", "float32")}, live="n")


def plan_net(spec: sg.ModelSpec = NET, rows: int = 10, device: str = "cpu") -> sg.CapturePlan:
    return sg.plan(Net().to(device), spec, {"x": torch.ones(rows, 30, device=device), "scale": 0.5})


X, WEIGHT, BIAS = (made_by("input", "x"), made_by("parameter", "weight"), made_by("parameter", "bias"))
MIXED, TOTAL = made_by("break output", "mix: output[0]"), made_by("break output", "mix: output[1]")
JOINED, TABLE = made_by("break output", "join: output"), made_by("external", "tensor 0")
SEGMENTS = [made_by("segment", f"segment {index}") for index in range(5)]


def test_segments_give_op_counts_allocated_bytes_and_what_they_read() -> None:
    plan = plan_net()
    assert [step.kind for step in plan.steps] == ["segment", "break", "segment", "break", "segment"]
    assert plan.segments == (
        sg.SegmentStep(
            1, 1200, (TensorUse("input x", laid(10, 30), X), TensorUse(str(WEIGHT), laid(30, 30), WEIGHT))
        ),
        sg.SegmentStep(
            1,
            1080,
            (
                TensorUse("parameter bias", laid(30), BIAS),
                TensorUse("mix: output[0]", laid(9, 30), MIXED),
                TensorUse("external tensor 0", laid(30), TABLE),
            ),
        ),
        sg.SegmentStep(
            1,
            480,
            (TensorUse("join: output", laid(4, 30), JOINED), TensorUse("mix: output[1]", laid(), TOTAL)),
        ),
    )


def test_breaks_give_dims_provenance_through_views_values_and_copied_bytes() -> None:
    copying, passing = plan_net().breaks
    assert copying == sg.BreakStep(
        name="mix",
        target="tests.test_plan:mix",
        ownership=sg.Ownership.COPY,
        dims={"S": 9, "D": 30},
        tensors=(
            TensorUse("x", laid(9, 30), SEGMENTS[0]),
            TensorUse("weight", laid(30, 30, strides=(1, 30)), WEIGHT),
        ),
        values=(ValueUse("length", live="n"), ValueUse("scale", "0.5")),
        outputs={"output[0]": laid(9, 30), "output[1]": laid(9)},
        copied_nbytes=1080 + 36,
        where=line_of(Net.forward, "mix("),
    )
    assert passing == sg.BreakStep(
        name="join",
        target="tests.test_plan:join",
        ownership=sg.Ownership.PASS_THROUGH,
        dims={"S": 4, "D": 30},
        tensors=(
            TensorUse("x", laid(4, 30), SEGMENTS[2]),
            TensorUse("previous", laid(30, 9, strides=(1, 30)), MIXED),
            TensorUse("skip", laid(4, 30), X, mutated=True),
            TensorUse("gain", laid(30), TABLE),
        ),
        values=(),
        outputs={"output": laid(4, 30)},
        copied_nbytes=0,
        where=line_of(Net.forward, "join("),
    )


def test_a_plan_lists_inputs_outputs_and_the_life_of_every_buffer() -> None:
    plan = plan_net()
    assert (plan.model, plan.device, plan.dims) == ("net", "cpu", {"rows": 10, "D": 30})
    assert (plan.inputs, plan.values, plan.live) == (
        {"x": laid(10, 30)},
        (ValueUse("scale", "0.5"),),
        ("n",),
    )
    assert plan.outputs == (
        TensorUse("output['rows']", laid(4, 30), SEGMENTS[4]),
        TensorUse("output['skip']", laid(4, 30), X),
    )
    assert plan.buffers == (
        Buffer("x", X, laid(10, 30), birth=-1, last_use=5),
        Buffer("segment 0", SEGMENTS[0], laid(10, 30), birth=0, last_use=1),
        Buffer("mix: output[0]", MIXED, laid(9, 30), birth=1, last_use=3),
        Buffer("mix: output[1]", TOTAL, laid(9), birth=1, last_use=4),
        Buffer("segment 2", SEGMENTS[2], laid(9, 30), birth=2, last_use=3),
        Buffer("join: output", JOINED, laid(4, 30), birth=3, last_use=4),
        Buffer("segment 4", SEGMENTS[4], laid(4, 30), birth=4, last_use=5),
    )


def test_memory_is_summed_by_what_it_is_for() -> None:
    assert plan_net().memory == Memory(
        static_inputs=1200,
        parameters=30 * 30 * 4 + 30 * 4,
        externals=2 * 30 * 4,
        # In segment 2 what segment 0 made, both results of mix and the new result are alive.
        pool_allocated=1536 + 1536 + 512 + 1536,
        pool_peak=2 << 20,
        copied_in=1200,
        copied_at_breaks=1080 + 36,
        copied_out=480 + 480,
    )


def test_diagnostics_name_external_tensors_and_written_inputs_with_their_lines() -> None:
    external, mutated = plan_net().diagnostics
    assert (external.code, external.step) == ("external-tensor", 2)
    assert external.message.startswith("float32[2 30] (240 bytes) is neither an input nor a parameter")
    assert external.where == line_of(Net.forward, "GAINS[1]")
    assert (mutated.code, mutated.step) == ("mutated-input", 3)
    assert mutated.message.startswith("join writes skip, which is input x")
    assert mutated.where == line_of(Net.forward, "join(")


def dropping(x: Tensor) -> Tensor:
    a = x + 1
    b = a * 2
    del a
    return torch.cat([b, b, b]).sum(0)


def holding(x: Tensor) -> Tensor:
    a = x + 1
    b = a * 2
    return torch.cat([b, b, b]).sum(0) + a[0]


def test_what_is_in_use_at_once_counts_in_blocks_of_512_bytes() -> None:
    dropped = sg.plan(dropping, EMPTY, {"x": torch.ones(10, 30)})
    held = sg.plan(holding, EMPTY, {"x": torch.ones(10, 30)})
    assert dropped.memory.pool_allocated == 1536 + 4096 + 512
    assert held.memory.pool_allocated == 1536 + 1536 + 4096 + 512
    assert dropped.segments[0].allocated_nbytes == 1200 + 1200 + 3600 + 120


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
def double(x: Tensor) -> Tensor:
    ran.append("double")
    return x * 2


def other_body(x: Tensor) -> Tensor:
    ran.append("other_body")
    return x


def stub(x: Tensor) -> Tensor:
    ran.append("stub")
    return x


@sg.graph_break(ROWS_OUT, inputs={"x": ROWS}, body=other_body, capture_stub=stub)
def halve(x: Tensor) -> Tensor:
    ran.append("halve")
    return x / 2


def adjacent(x: Tensor) -> Tensor:
    return halve(double(x)[:4].t().t())


def test_a_segment_that_launches_nothing_is_not_kept() -> None:
    plan = sg.plan(adjacent, sg.ModelSpec("adjacent", (double.spec, halve.spec)), {"x": ONES})
    assert [step.kind for step in plan.steps] == ["break", "break"]
    origin = made_by("break output", "double: output")
    assert plan.breaks[1].tensors == (TensorUse("x", laid(4, 4), origin),)


def test_no_target_body_or_stub_runs_while_planning() -> None:
    ran.clear()
    assert len(plan_net().breaks) == 2
    assert len(sg.plan(adjacent, EMPTY, {"x": ONES}).breaks) == 2
    assert ran == []


# Provenance belongs to the storage.

GAIN = GAINS[1]


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))
        self.rows = self.weight.detach()[:4]

    def forward(self, x: Tensor) -> Tensor:
        return double(self.rows) + x


def test_a_view_of_a_parameter_that_the_model_keeps_is_that_parameter() -> None:
    plan = sg.plan(Sliced(), EMPTY, {"x": torch.ones(4, 4)})
    assert plan.breaks[0].tensors == (TensorUse("x", laid(4, 4), WEIGHT),)
    assert plan.diagnostics == ()


def gaining(x: Tensor) -> Tensor:
    return (x * GAINS).add(GAIN)


def test_two_external_tensors_over_one_storage_are_one_piece_of_memory() -> None:
    assert sg.plan(gaining, EMPTY, {"x": torch.ones(2, 30)}).memory.externals == 240


# JSON, digest, text.


def many_dims(x: Tensor) -> Tensor:
    return double(x.flatten(0, 1)) + 1


def test_a_plan_survives_json_with_its_digest() -> None:
    spec = sg.ModelSpec("many", (), inputs={"x": sg.TensorLayout("*batch D")})
    many = sg.plan(many_dims, spec, {"x": torch.ones(2, 3, 4)})
    assert many.dims == {"batch": (2, 3), "D": 4}
    for plan in (plan_net(), many):
        loaded = sg.CapturePlan.from_json(plan.to_json())
        assert loaded == plan
        assert loaded.digest == plan.digest


def test_the_digest_does_not_depend_on_the_device_type() -> None:
    here, on_meta = plan_net(), plan_net(device="meta")
    assert (here.device, on_meta.device) == ("cpu", "meta")
    assert on_meta.digest == here.digest


def called_here(x: Tensor) -> Tensor:
    return double(x + 1)


def called_there(x: Tensor) -> Tensor:
    return double(x + 1)


def test_the_digest_does_not_depend_on_where_a_break_is_called() -> None:
    here, there = (sg.plan(fn, EMPTY, {"x": ONES}) for fn in (called_here, called_there))
    assert here.breaks[0].where != there.breaks[0].where
    assert here.digest == there.digest


@pytest.mark.parametrize(
    ("rows", "change"),
    [
        pytest.param(11, {}, id="a dim"),
        pytest.param(10, {"outputs": (ROWS_OUT, sg.TensorLayout("S", "float64"))}, id="a dtype"),
        pytest.param(
            10, {"outputs": (ROWS_OUT, sg.TensorLayout("S", sg.like("x"), strides="2"))}, id="a stride"
        ),
        pytest.param(10, {"name": "blend"}, id="a name"),
        pytest.param(10, {"live": {}}, id="a live value that is frozen instead"),
        pytest.param(10, {"mutates": "x"}, id="an argument that is written"),
    ],
)
def test_the_digest_tells_plans_apart(rows: int, change: dict[str, Any]) -> None:
    changed = attrs.evolve(NET, breaks=(attrs.evolve(MIX, **change), JOIN))
    assert plan_net(changed, rows).digest == plan_net(changed, rows).digest
    assert plan_net(changed, rows).digest != plan_net().digest


def words(plan: sg.CapturePlan) -> list[str]:
    """The lines of a plan's text, blanks squeezed."""
    return [" ".join(line.split()) for line in str(plan).splitlines()]


def test_the_text_shows_steps_dims_layouts_provenance_and_values() -> None:
    plan = plan_net()
    lines = words(plan)
    assert lines[:3] == ["net: 3 segments, 2 breaks, for cpu", f"digest {plan.digest}", "dims rows=10 D=30"]
    assert lines[lines.index("inputs") + 1 : lines.index("steps") - 1] == [
        "x float32[10 30] 1.2 KiB",
        "scale 0.5 frozen",
        "n live handed in at every replay",
    ]
    assert lines[lines.index("steps") + 1 : lines.index("outputs") - 1] == [
        "0 segment 1 op, allocates 1.2 KiB; reads 1 input, 1 parameter",
        "1 break mix COPY, copies 1.1 KiB",
        "S=9 D=30",
        "x float32[9 30] from segment 0",
        "weight float32[30 30] strides (1 30) from parameter weight",
        "output[0] float32[9 30]",
        "output[1] float32[9]",
        "length live n",
        "scale frozen 0.5",
        line_of(Net.forward, "mix("),
        "2 segment 1 op, allocates 1.1 KiB; reads 1 parameter, 1 break output, 1 external",
        "3 break join PASS_THROUGH, copies nothing",
        "S=4 D=30",
        "x float32[4 30] from segment 2",
        "previous float32[30 9] strides (1 30) from mix: output[0]",
        "skip float32[4 30] from input x, written in place",
        "gain float32[30] from external tensor 0",
        "output float32[4 30]",
        line_of(Net.forward, "join("),
        "4 segment 1 op, allocates 480 B; reads 2 break outputs",
    ]
    assert "output['skip'] float32[4 30] from input x" in lines
    assert "graph pool 2.0 MiB predicted; 5.0 KiB in use at once" in lines


def blocks(x: Tensor) -> Tensor:
    for _ in range(5):
        x = double(x + 1)
    return x * 3 - 1


def test_the_text_folds_steps_that_repeat() -> None:
    lines = words(sg.plan(blocks, EMPTY, {"x": ONES}))
    assert [line for line in lines if " break double" in line] == ["1 break double COPY, copies 128 B"]
    assert "2-9 ... the same 2 steps, 4 more times" in lines
    assert "10 segment 2 ops, allocates 256 B; reads 1 break output" in lines


def tagged(x: Tensor, tag: str) -> Tensor:
    return x * 2


def test_the_text_shows_a_frozen_value_letter_by_letter() -> None:
    lines = words(sg.plan(tagged, EMPTY, {"x": ONES, "tag": "[bold] :warning:"}))
    assert "tag '[bold] :warning:' frozen" in lines


# The model is left as it was found.


class Messy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0
        self.cache: dict[str, Any] = {"size": 4}
        self.history: list[Tensor] = []
        self.layers: dict[str, list[Tensor]] = {"key": []}
        self.seen: set[str] = set()
        self.obsolete = "still here"

    def forward(self, x: Tensor, change: str, fail: bool = False) -> Tensor:
        y = double(self.inner(x))
        match change:
            case "attributes":
                self.calls += 1
                self.inner.last = y
                del self.obsolete
            case "containers":
                self.history.append(y)
                self.cache["table"] = y
                del self.cache["size"]
                self.seen.add("x")
            case "buffers":
                self.register_buffer("table", y)
            case "nested":
                self.layers["key"].append(y)
        if fail:
            raise ValueError("the model's own error")
        return y


def contents(value: object) -> object:
    if isinstance(value, dict):
        return [(key, id(held), contents(held)) for key, held in value.items()]
    return [*map(id, value)] if isinstance(value, list | set) else None


@pytest.mark.parametrize("change", ["attributes", "containers", "buffers", "nested"])
@pytest.mark.parametrize("fail", [False, True])
def test_the_model_is_left_as_found_also_when_it_raises(change: str, fail: bool) -> None:
    model = Messy()
    inner = sg.BreakSpec("module:inner", sg.TensorLayout("S D", "float32"), inputs={"input": ROWS})
    found = [contents(vars(module)) for module in model.modules()]
    if fail:
        with pytest.raises(ValueError, match="the model's own error"):
            sg.plan(model, sg.ModelSpec("messy", (inner,)), {"x": ONES, "change": change, "fail": True})
    else:
        sg.plan(model, sg.ModelSpec("messy", (inner,)), {"x": ONES, "change": change})
    assert [contents(vars(module)) for module in model.modules()] == found


KEPT: dict[str, Tensor] = {}


def keeping(x: Tensor) -> Tensor:
    h = x * 2
    KEPT["table"] = h[1:]
    return h + 1


def test_a_tensor_that_the_model_keeps_is_reported_with_its_line() -> None:
    try:
        (kept,) = sg.plan(keeping, EMPTY, {"x": ONES}).diagnostics
    finally:
        KEPT.clear()
    assert (kept.code, kept.step, kept.where) == ("kept-tensor", 0, line_of(keeping, "x * 2"))
    assert kept.message.startswith("the model keeps float32[8 4] (128 bytes) made in segment 0")


def test_a_tensor_that_the_model_returns_is_not_reported() -> None:
    assert sg.plan(blocks, EMPTY, {"x": ONES}).diagnostics == ()


# What a plan refuses.


def refused(
    error: type[sg.SpecGraphError], fn: Callable[..., Any], spec: sg.ModelSpec, **inputs: Any
) -> sg.SpecGraphError:
    """The error that planning `fn` raises; it names the spec and says what to do."""
    with pytest.raises(error) as caught:
        sg.plan(fn, spec, inputs)
    assert caught.value.spec == spec.name
    assert caught.value.fix
    return caught.value


def rescale(x: Tensor) -> Tensor:
    return x * 2


def rescaling(x: Tensor) -> Tensor:
    return rescale(x + 1)


def test_a_declared_break_that_is_never_reached_is_refused() -> None:
    error = refused(sg.PlanError, blocks, sg.ModelSpec("m", (double.spec, rows_break(rescale))), x=ONES)
    assert (error.problem, error.break_name) == ("is declared but never reached", "rescale")
    assert "tests.test_plan:rescale is not called" in error.actual
    assert "@graph_break" in error.fix


def test_a_call_that_does_not_fit_its_layouts_is_refused() -> None:
    spec = sg.BreakSpec(rescale, ROWS_OUT, inputs={"x": sg.TensorLayout("S 4 D")})
    error = refused(sg.LayoutError, rescaling, sg.ModelSpec("m", (spec,)), x=torch.ones(8, 5, 2))
    assert error.problem == "dim 4 is 5, not 4"
    assert (error.break_name, error.tensor) == ("rescale", "x")
    assert (error.expected, error.actual) == ("any[S 4 D] with S=8 D=2", "float32[8 5 2]")
    assert error.where == line_of(rescaling, "rescale(")


def attending(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x, x * 2, x)


def projecting(x: Tensor) -> Tensor:
    return double(x) @ x.t()


@pytest.mark.parametrize(
    ("fn", "glob", "op", "segment", "shape"),
    [
        (attending, "aten::*dot_product*", "aten::scaled_dot_product_attention", "segment 0", (1, 8, 4)),
        (projecting, "aten::mm", "aten::mm", "segment 1", (8, 4)),
        (projecting, "aten::matmul", "aten::matmul", "segment 1", (8, 4)),
    ],
)
def test_an_eager_only_op_in_a_segment_is_refused(
    fn: Callable[[Tensor], Tensor], glob: str, op: str, segment: str, shape: tuple[int, ...]
) -> None:
    error = refused(sg.PlanError, fn, sg.ModelSpec("m", (), eager_only=glob), x=torch.ones(shape))
    assert error.problem == f"{op} is eager_only but would be captured in {segment}"
    assert error.where == line_of(fn, "return")


def test_an_eager_only_op_that_is_a_break_is_welcome() -> None:
    layouts = {"query": sg.TensorLayout("B S D")}
    op = "op:aten::scaled_dot_product_attention"
    spec = sg.BreakSpec(op, sg.TensorLayout("B S D", sg.like("query")), inputs=layouts)
    model = sg.ModelSpec("m", (spec,), eager_only="aten::*dot_product*")
    plan = sg.plan(attending, model, {"x": torch.ones(1, 8, 4)})
    assert [step.kind for step in plan.steps] == ["segment", "break"]


@torch.library.custom_op("specgraph_test_plan::custom", mutates_args=())
def custom_op(x: Tensor) -> Tensor:
    return x * 2


LIBRARY = torch.library.Library("specgraph_test_plan", "FRAGMENT")
LIBRARY.define("defined(Tensor x) -> Tensor")
LIBRARY.impl("defined", lambda x: x * 2, "CPU")


def calling_custom(x: Tensor) -> Any:
    return custom_op(x + 1)


def calling_defined(x: Tensor) -> Any:
    return torch.ops.specgraph_test_plan.defined(x + 1)


@pytest.mark.parametrize(("fn", "name"), [(calling_custom, "custom"), (calling_defined, "defined")])
def test_an_op_without_a_fake_implementation_is_named_with_advice(fn: Callable[..., Any], name: str) -> None:
    error = refused(sg.PlanError, fn, EMPTY, x=ONES)
    op = f"specgraph_test_plan::{name}"
    assert error.problem == f"{op} in segment 0 cannot be traced with fake tensors"
    assert "fake impl" in error.actual
    assert "torch.library.register_fake" in error.fix
    assert f'"op:{op}"' in error.fix
    assert error.where == line_of(fn, "return")


def reading_item(x: Tensor) -> Tensor:
    return x * double(x).sum().item()


def reading_mask(x: Tensor) -> Tensor:
    return x[double(x) > 0]


def reading_numpy(x: Tensor) -> Any:
    return double(x).exp().cpu().numpy()


def branching(x: Tensor) -> Tensor:
    return x if double(x).sum() > 0 else -x


@pytest.mark.parametrize("fn", [reading_item, reading_mask, reading_numpy, branching])
def test_a_host_sync_in_a_segment_is_refused_as_plan_and_as_capture_error(fn: Callable[..., Any]) -> None:
    error = refused(sg.HostSyncError, fn, EMPTY, x=ONES)
    assert isinstance(error, sg.PlanError)
    assert isinstance(error, sg.CaptureError)
    assert "in segment 1 needs a value on the host" in error.problem
    assert error.where == line_of(fn, "double(")


def masked(x: Tensor, mask: Tensor | None = None) -> Tensor:
    return x if mask is None else x * mask


PAIR = {"x": sg.TensorLayout("S D", "float32"), "mask": ROWS}


@pytest.mark.parametrize(
    ("layouts", "inputs", "error", "problem"),
    [
        ({}, {}, sg.PlanError, "missing a required argument: 'x'"),
        ({}, {"x": ONES, "z": ONES}, sg.PlanError, "unexpected keyword argument 'z'"),
        (PAIR, {"x": ONES}, sg.PlanError, "input 'mask' is missing"),
        ({"x": ROWS}, {"x": ONES, "mask": ONES}, sg.PlanError, "input 'mask' has no layout"),
        (PAIR, {"x": 3, "mask": ONES}, sg.LayoutError, "is no tensor but has a layout"),
        (PAIR, {"x": ONES.double(), "mask": ONES}, sg.LayoutError, "has another dtype"),
        (PAIR, {"x": ONES, "mask": ONES[:4]}, sg.LayoutError, "dim S is 4, not 8"),
        ({}, {"x": ONES.clone().requires_grad_()}, sg.PlanError, "requires a gradient"),
    ],
)
def test_inputs_that_do_not_fit_the_model_are_refused(
    layouts: Any, inputs: dict[str, Any], error: type[sg.SpecGraphError], problem: str
) -> None:
    assert problem in refused(error, masked, sg.ModelSpec("m", (), inputs=layouts), **inputs).problem


def test_an_input_that_requires_grad_is_planned_under_no_grad() -> None:
    with torch.no_grad():
        assert sg.plan(masked, EMPTY, {"x": ONES.clone().requires_grad_()}).inputs == {"x": laid(8, 4)}


def test_a_live_value_that_is_not_declared_is_refused() -> None:
    with pytest.raises(sg.PlanError, match="live value 'q' is not declared") as caught:
        sg.plan(masked, sg.ModelSpec("m", (), live="n"), {"x": ONES}, live={"q": 1})
    assert caught.value.expected == "of: n"
    assert "ModelSpec.live" in caught.value.fix


# Modes and devices around a plan.


class InferenceNet(Net):
    @torch.inference_mode()
    def forward(self, x: Tensor, scale: float = 0.5) -> dict[str, Tensor]:
        return super().forward(x, scale)


def test_inference_mode_around_a_plan_and_inference_tensors_make_no_difference() -> None:
    with torch.inference_mode():
        x, net, around = torch.ones(10, 30), Net(), plan_net()
    assert x.is_inference()
    assert around == plan_net()
    assert sg.plan(net, NET, {"x": x, "scale": 0.5}) == plan_net()


def test_inference_mode_in_the_model_makes_no_difference() -> None:
    plan = sg.plan(InferenceNet(), NET, {"x": torch.ones(10, 30), "scale": 0.5})
    assert plan.digest == plan_net().digest


def under_device(x: Tensor) -> Tensor:
    with torch.device("cuda"):
        return x + torch.zeros(4)


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: x.cuda() + torch.zeros(4, device="cuda"), id="text"),
        pytest.param(lambda x: x.to("cuda:0") + x.new_zeros(4, device="cuda:0"), id="to"),
        pytest.param(lambda x: x + torch.zeros(4, device=torch.device("cuda", 0)), id="device object"),
        pytest.param(lambda x: x.to(0) + torch.zeros(4, device=0), id="device number"),
        pytest.param(under_device, id="device context"),
    ],
)
def test_a_model_that_names_a_gpu_plans_without_one(fn: Callable[[Tensor], Tensor]) -> None:
    plan = sg.plan(fn, EMPTY, {"x": ONES})
    (segment,) = plan.segments
    assert (segment.num_ops, segment.allocated_nbytes) == (2, 16 + 128)
    assert plan.outputs == (TensorUse("output", laid(8, 4), SEGMENTS[0]),)
