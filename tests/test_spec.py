"""Specs are frozen data, refused where they contradict themselves; `graph_break` declares one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import specgraph as sg
from specgraph.spec import named_outputs

PASS_THROUGH = sg.Ownership.PASS_THROUGH
ROWS = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", torch.float32)
HERE = __name__


def scale(x: Tensor, factor: float = 2.0, *, out: Tensor | None = None) -> Tensor:
    """Rows, scaled."""
    return x * factor


class Scaler:
    def __call__(self, x: Tensor) -> Tensor:
        return x

    @sg.graph_break(ROWS_OUT, inputs={"x": ROWS})
    def plus(self, x: Tensor, *, times: float = 3.0) -> Tensor:
        """Rows, scaled and moved."""
        return x * times + 1


def rows_break(**fields: Any) -> sg.BreakSpec:
    """A break on one [S D] tensor that returns another."""
    defaults: dict[str, Any] = {"target": scale, "outputs": ROWS_OUT, "inputs": {"x": ROWS}}
    return sg.BreakSpec(**defaults | fields)


def rows_model(**fields: Any) -> sg.ModelSpec:
    defaults: dict[str, Any] = {"name": "rows", "breaks": (), "inputs": {"x": ROWS}}
    return sg.ModelSpec(**defaults | fields)


def build() -> Callable[..., Tensor]:
    return scale


def example(S: int = 4) -> sg.Example:
    return sg.Example({"x": torch.zeros(S, 2)})


def refusal(make: Callable[..., object], **fields: Any) -> sg.SpecError:
    with pytest.raises(sg.SpecError) as caught:
        make(**fields)
    return caught.value


# Data.


@pytest.mark.parametrize(
    "data",
    [rows_break(), rows_model(), sg.Preset(build, example), sg.Example({}), ROWS],
    ids=lambda data: type(data).__name__,
)
def test_no_field_can_be_set_or_added(data: Any) -> None:
    for name in (*attrs.fields_dict(type(data)), "another"):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(data, name, None)


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (rows_break, "inputs", ROWS),
        (rows_break, "outputs", ROWS_OUT),
        (rows_break, "live", "n"),
        (rows_model, "inputs", ROWS),
        (rows_model, "outputs", ROWS_OUT),
        (rows_model, "buckets", (4, 8)),
        (rows_model, "pad", 1.5),
        (rows_model, "presets", sg.Preset(build, example)),
        (functools.partial(sg.Preset, build, example), "dims", 4),
        (sg.Example, "inputs", 1),
        (functools.partial(sg.Example, {}), "live", 1),
    ],
)
def test_a_mapping_is_copied_and_cannot_be_changed(
    make: Callable[..., object], field: str, value: object
) -> None:
    handed = {"S": value}
    held = getattr(make(**{field: handed}), field)
    handed.clear()
    assert dict(held) == {"S": value}
    with pytest.raises(TypeError, match="does not support item assignment"):
        held["another"] = value
    with pytest.raises(TypeError, match="does not support item deletion"):
        del held["S"]


def test_what_is_not_given_has_a_default() -> None:
    spec = sg.BreakSpec("op:aten::mm", None)
    assert (spec.inputs, spec.live, spec.out, spec.mutates) == ({}, {}, (), ())
    assert (spec.ownership, spec.body, spec.capture_stub) == (sg.Ownership.COPY, None, None)
    assert (spec.fusable, spec.fills_padding, spec.name) == (False, False, "mm")
    model = sg.ModelSpec("rows", ())
    assert (model.inputs, model.outputs, model.live, model.buckets) == ({}, None, (), {})
    assert (model.pad, model.eager_only, model.presets) == ({}, (), {})
    assert sg.Preset(build, example) == sg.Preset(build, example, {}, None)
    assert sg.Example({"x": 1}) == sg.Example({"x": 1}, {}, None)


def test_lists_and_single_names_become_tuples() -> None:
    spec = rows_break(ownership=PASS_THROUGH, out="out", mutates=["x", "out"])
    assert (spec.out, spec.mutates) == (("out",), ("x", "out"))
    assert rows_break(outputs=[ROWS_OUT, ROWS_OUT]).outputs == (ROWS_OUT, ROWS_OUT)
    model = rows_model(breaks=[spec], live="n", eager_only=["aten::mm"], buckets={"S": [4, 8]})
    assert (model.breaks, model.live, model.eager_only) == ((spec,), ("n",), ("aten::mm",))
    assert model.buckets == {"S": (4, 8)}


def test_a_preset_takes_a_device_and_a_dtype_by_name() -> None:
    preset = sg.Preset(build, example, device_dtype=("meta", "bfloat16"))
    assert preset.device_dtype == (torch.device("meta"), torch.bfloat16)
    error = refusal(sg.Preset, build=build, example=example, device_dtype=("cpu", "float33"))
    assert error.problem == "torch has no dtype named 'float33'"


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (None, []),
        (ROWS_OUT, ["output"]),
        ((ROWS_OUT, ROWS_OUT), ["output[0]", "output[1]"]),
        ({"y": ROWS_OUT, "z": ROWS_OUT}, ["output['y']", "output['z']"]),
    ],
)
def test_outputs_of_every_form_have_names(outputs: Any, names: list[str]) -> None:
    assert named_outputs(rows_break(outputs=outputs).outputs) == dict.fromkeys(names, ROWS_OUT)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (scale, "scale"),
        (Scaler.__call__, "__call__"),
        (Scaler(), "Scaler"),
        (nn.Linear(1, 1), "Linear"),
        ("pkg.mod:fn", "fn"),
        ("pkg.mod:Class.method", "method"),
        ("module:blocks.*.attn", "attn"),
        ("module:blocks.*", "blocks"),
        ("op:aten::mm", "mm"),
        ("op:aten::add.Tensor", "add"),
    ],
)
def test_a_break_is_called_after_its_target_unless_it_has_a_name(target: Any, name: str) -> None:
    assert sg.BreakSpec(target, None).name == name
    assert sg.BreakSpec(target, None, name="mine").name == "mine"


def test_a_callable_and_its_import_path_make_equal_breaks() -> None:
    assert rows_break() == rows_break(target=f"{HERE}:scale")
    assert rows_break(target=Scaler.__call__) == rows_break(target=f"{HERE}:Scaler.__call__")
    assert rows_break() != rows_break(target=f"{HERE}:scaled", name="scale")
    assert rows_break() != rows_break(fusable=True)


# What a break cannot be.


@pytest.mark.parametrize("field", ["inputs", "outputs"])
@pytest.mark.parametrize("make", [rows_break, rows_model])
def test_a_layout_of_another_type_is_refused(make: Callable[..., object], field: str) -> None:
    error = refusal(make, **{field: {"x": "S D"}})
    assert error.problem == f"{field}['x'] is 'S D', which is no TensorLayout"
    assert error.fix == 'write TensorLayout("B Q H D", dtype)'
    owner = ("rows", "") if make is rows_model else ("", "scale")
    assert (error.spec, error.break_name) == owner


def test_an_output_dim_that_no_input_binds_is_refused() -> None:
    error = refusal(rows_break, inputs={"x": sg.TensorLayout("2*S D"), "y": sg.TensorLayout("B")})
    assert error.code == "SG102"
    assert str(error) == (
        "break 'scale', output: dim 'S' of float32[S D] is bound by no input\n"
        "  expected: one of: B, D\n"
        "  fix:      name 'S' as a plain dim of a layout in inputs="
    )
    assert refusal(rows_break, inputs={}).expected == "one of: none, inputs has no layouts"


@pytest.mark.parametrize("layout", ["any[S D]", "any[*S D]", "any[D 1] strides (S 1)"])
def test_dims_rests_and_strides_of_inputs_bind_dims_of_outputs(layout: str) -> None:
    outputs = {"y": sg.TensorLayout("D*D *S" if "*S" in layout else "S*D", torch.int8)}
    spec = rows_break(inputs={"x": sg.TensorLayout.parse(layout)}, outputs=outputs)
    assert spec.outputs == outputs


def test_an_output_without_a_dtype_is_refused() -> None:
    error = refusal(rows_break, outputs={"y": ROWS_OUT, "z": ROWS})
    assert error.code == "SG104"
    assert str(error) == (
        "break 'scale', output['z']: any[S D] has no dtype\n"
        '  fix:      an output needs a dtype: torch.bfloat16, "bfloat16" or like("argument")'
    )
    like = sg.TensorLayout("S D", sg.like("x"))
    assert rows_break(outputs=like).outputs == like


@pytest.mark.parametrize(
    ("outputs", "ownership", "out", "expected"),
    [
        (ROWS_OUT, "COPY", ("out",), "no out="),
        (None, "COPY", ("out",), "no out="),
        (ROWS_OUT, "PASS_THROUGH", (), "1 names in out=, one an output"),
        ((ROWS_OUT, ROWS_OUT), "PASS_THROUGH", ("out",), "2 names in out=, one an output"),
    ],
)
def test_out_that_does_not_fit_the_ownership_is_refused(
    outputs: Any, ownership: str, out: tuple[str, ...], expected: str
) -> None:
    error = refusal(rows_break, outputs=outputs, ownership=sg.Ownership[ownership], out=out)
    assert (error.code, error.break_name) == ("SG105", "scale")
    assert error.problem == f"{ownership} with {len(out)} parameters in out="
    assert error.expected == expected
    assert error.fix.startswith("PASS_THROUGH names one body parameter an output, in order")


def test_a_pass_through_break_without_outputs_is_told_to_have_some() -> None:
    error = refusal(rows_break, ownership=PASS_THROUGH, outputs=None)
    assert (error.code, error.break_name) == ("SG105", "scale")
    assert "outputs" in error.expected


def test_out_names_one_parameter_an_output_where_it_passes_through() -> None:
    two = {"outputs": {"y": ROWS_OUT, "z": ROWS_OUT}, "out": ("a", "b")}
    assert rows_break(ownership=PASS_THROUGH, out="a").out == ("a",)
    assert rows_break(ownership=PASS_THROUGH, **two).out == ("a", "b")


# What a model cannot be.


def test_a_function_in_place_of_its_break_is_refused() -> None:
    error = refusal(rows_model, breaks=[scale])
    assert error.problem == f"breaks holds {scale!r}, which is no BreakSpec"
    assert (error.spec, error.fix) == ("rows", "of a function under @graph_break, list its .spec")


def test_a_live_value_that_the_model_does_not_declare_is_refused() -> None:
    spec = rows_break(live={"factor": "n", "x": "S"})
    error = refusal(rows_model, breaks=[spec], live="m", buckets={"S": (4,)})
    assert error.code == "SG108"
    assert (error.spec, error.break_name) == ("rows", "scale")
    assert error.problem == "parameter 'factor' takes live value 'n', which is not declared"
    assert (error.expected, error.fix) == ("one of: S, m", "add 'n' to ModelSpec.live")
    assert refusal(rows_model, breaks=[spec]).expected == "one of: none declared"
    assert rows_model(breaks=[spec], live="n", buckets={"S": (4,)}).live_names == {"S", "n"}


def test_two_breaks_of_one_name_are_refused() -> None:
    error = refusal(rows_model, breaks=[rows_break(), rows_break(target="pkg.mod:scale")])
    assert error.code == "SG109"
    assert str(error) == "spec 'rows': two breaks are called 'scale'\n  fix:      give them name="
    named = [rows_break(), rows_break(target="pkg.mod:scale", name="other")]
    assert [each.name for each in rows_model(breaks=named).breaks] == ["scale", "other"]


@pytest.mark.parametrize("layout", ["any[2*S D]", "any[D]", "any[*S D]", "any[D D] strides (S 1)"])
def test_a_bucketed_dim_that_is_no_plain_dim_of_an_input_is_refused(layout: str) -> None:
    inputs = {"x": sg.TensorLayout.parse(layout)}
    error = refusal(rows_model, inputs=inputs, buckets={"D": (2,), "S": (4, 8)})
    assert (error.code, error.spec) == ("SG110", "rows")
    assert error.problem == "bucketed dim 'S' is a dim of no input"
    assert error.fix == "name 'S' as a plain dim in ModelSpec.inputs"
    assert rows_model(inputs=inputs, buckets={"D": (2,)}).buckets == {"D": (2,)}


def test_an_output_that_computes_with_a_bucketed_dim_must_fill_its_padding() -> None:
    flat = {"outputs": sg.TensorLayout("S*D", torch.int8)}
    error = refusal(rows_model, breaks=[rows_break(**flat)], buckets={"S": (4,)})
    assert error.code == "SG110"
    assert (error.spec, error.break_name, error.tensor) == ("rows", "scale", "output")
    assert error.problem.startswith("int8[S*D] computes with a bucketed dim")
    assert error.fix == "give the bucketed dim an axis of its own, or set fills_padding=True"
    twins = [rows_break(), rows_break(**flat, fills_padding=True, name="flat")]
    assert rows_model(breaks=twins, buckets={"S": (4,)}).breaks == tuple(twins)
    assert rows_model(breaks=[rows_break(**flat)]).buckets == {}


# Functions that are breaks.


def test_a_break_function_keeps_name_docstring_and_signature() -> None:
    function = sg.graph_break(ROWS_OUT, inputs={"x": ROWS})(scale)
    for name in functools.WRAPPER_ASSIGNMENTS:
        assert getattr(function, name) == getattr(scale, name)
    assert inspect.signature(function) == inspect.signature(scale)
    assert inspect.unwrap(function) is scale


def test_a_method_that_is_a_break_stays_a_method() -> None:
    x = torch.ones(2, 2)
    assert list(inspect.signature(Scaler().plus).parameters) == ["x", "times"]
    assert Scaler().plus.__doc__ == "Rows, scaled and moved."
    assert Scaler.plus.spec.name == "plus"
    assert torch.equal(Scaler().plus(x, times=4.0), x * 5)
    assert torch.equal(Scaler.plus(Scaler(), x), x * 4)


def test_outside_captures_a_break_function_is_an_ordinary_function() -> None:
    calls: list[object] = []

    @sg.graph_break(ROWS_OUT, inputs={"x": ROWS}, body=scale)
    def halved(x: Tensor, factor: float = 2.0) -> Tensor:
        calls.append(x)
        if x.dtype is torch.int8:
            raise ValueError("int8 is refused")
        return x / factor

    unlike_its_layout = torch.tensor([6.0])
    assert halved(unlike_its_layout, factor=3.0).tolist() == [2.0]
    with pytest.raises(ValueError, match="int8 is refused"):
        halved(torch.zeros(2, 2, dtype=torch.int8))
    assert len(calls) == 2


def test_the_spec_of_a_break_function_is_what_the_decorator_was_given() -> None:
    fields: dict[str, Any] = {"outputs": {"y": ROWS_OUT}, "inputs": {"x": ROWS}, "out": "out"}
    fields |= {"ownership": PASS_THROUGH, "mutates": ("x",), "body": build, "fusable": True}
    fields |= {"live": {"factor": "n"}, "capture_stub": example, "fills_padding": True, "name": "s"}
    function = sg.graph_break(**fields)(scale)
    assert function.spec == sg.BreakSpec(scale, **fields)
    assert function.spec.target is function
    assert sg.graph_break(ROWS_OUT, inputs={"x": ROWS})(scale).spec == rows_break()


def test_a_decorator_that_contradicts_itself_is_refused_at_the_function() -> None:
    fields: dict[str, Any] = {"outputs": ROWS_OUT}
    error = refusal(sg.graph_break(**fields), fn=scale)
    assert (error.code, error.break_name) == ("SG102", "scale")
