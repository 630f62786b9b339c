"""Spec files: Python, TOML and JSON load to equal specs; everything else is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import tomlkit
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import specgraph as sg
from specgraph.planner import CapturePlan
from specgraph.specfile import line_of, read_spec
from specgraph.verify import build_preset, plan_preset

SPECS = sorted((Path(__file__).parents[1] / "specs").glob("[a-z]*.py"))


def scale(x: Tensor, factor: float = 1.0, out: Tensor | None = None) -> Tensor:
    return x * factor


def body(x: Tensor, factor: float = 1.0, out: Tensor | None = None, *, length: int = 0) -> Tensor:
    return x * factor


def build() -> object:
    return scale


def example(S: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(S, 4)}


WRITTEN = """\
name = "scaled"
outputs = ["like(x)[S D]", "float32[]"]
live = ["n"]
eager_only = ["aten::mm"]

[[breaks]]
target = "tests.test_specfile:scale"
outputs = "like(x)[S D]"
body = "tests.test_specfile:body"
fusable = true

[breaks.inputs]
x = "any[S D] strides (D 1)"

[breaks.live]
length = "n"

[[breaks]]
target = "module:blocks.*.attn"
ownership = "pass_through"
out = ["out"]
name = "attn"

[breaks.outputs]
a = "bfloat16[2*Q *rest]"

[breaks.inputs]
q = "bfloat16[Q *rest]"

[inputs]
x = "any[S D]"

[buckets]
S = [4, 8]

[pad]
x = 1.5

[presets.tiny]
build = "tests.test_specfile:build"
example = "tests.test_specfile:example"
device_dtype = ["cpu", "float64"]

[presets.tiny.dims]
S = 8
"""

BUILT = sg.ModelSpec(
    "scaled",
    (
        sg.BreakSpec(
            scale,
            sg.TensorLayout("S D", sg.like("x")),
            inputs={"x": sg.TensorLayout("S D", strides="D 1")},
            body=body,
            live={"length": "n"},
            fusable=True,
        ),
        sg.BreakSpec(
            "module:blocks.*.attn",
            {"a": sg.TensorLayout("2*Q *rest", "bfloat16")},
            inputs={"q": sg.TensorLayout("Q *rest", torch.bfloat16)},
            ownership=sg.Ownership.PASS_THROUGH,
            out="out",
        ),
    ),
    inputs={"x": sg.TensorLayout("S D")},
    outputs=(sg.TensorLayout("S D", sg.like("x")), sg.TensorLayout("", torch.float32)),
    live=("n",),
    buckets={"S": (4, 8)},
    pad={"x": 1.5},
    eager_only=("aten::mm",),
    presets={"tiny": sg.Preset(build, example, {"S": 8}, ("cpu", "float64"))},  # type: ignore[arg-type]
)


def write(folder: Path, text: str, name: str = "spec.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_toml_json_and_python_load_to_equal_specs(tmp_path: Path) -> None:
    from_toml = sg.load_spec(write(tmp_path, WRITTEN))
    from_json = sg.load_spec(write(tmp_path, json.dumps(tomlkit.parse(WRITTEN).unwrap()), "spec.json"))
    assert from_toml == BUILT
    assert from_json == BUILT
    assert from_toml.breaks[0].body is body


def test_a_dumped_spec_reads_as_a_person_would_write_it(tmp_path: Path) -> None:
    file = tmp_path / "out.toml"
    sg.dump_spec(BUILT, file)
    assert file.read_text() == WRITTEN.replace('name = "attn"\n', "")


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@pytest.mark.parametrize("file", SPECS, ids=lambda file: file.stem)
def test_every_spec_survives_dump_and_load_with_the_same_plan(
    file: Path, suffix: str, tmp_path: Path
) -> None:
    spec = sg.load_spec(file)
    dumped = tmp_path / f"dumped{suffix}"
    sg.dump_spec(spec, dumped)
    loaded = sg.load_spec(dumped)
    assert loaded == spec
    digests = {plan_preset(each, build_preset(each.presets["tiny"], {})).digest for each in (spec, loaded)}
    assert len(digests) == 1


def test_a_python_spec_is_loaded_once_and_under_its_own_name() -> None:
    (file, *_) = SPECS
    first = sg.load_spec(file)
    assert sg.load_spec(file) is first
    assert first.presets["tiny"].build.__module__ == f"specs.{file.stem}"


def test_two_files_of_one_name_are_two_specs(tmp_path: Path) -> None:
    source = "import specgraph as sg\nSPEC = sg.ModelSpec({!r}, ())\n"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, source.format(name), "same.py")
    assert sg.load_spec(tmp_path / "a" / "same.py").name == "a"
    assert sg.load_spec(tmp_path / "b" / "same.py").name == "b"


def test_paths_in_a_file_are_found_beside_it(tmp_path: Path) -> None:
    write(tmp_path, "def attention_beside(x): return x\n", "beside_module.py")
    text = 'name = "m"\n[[breaks]]\ntarget = "op:aten::mm"\nbody = "beside_module:attention_beside"\n'
    spec = sg.load_spec(write(tmp_path, f'{text}outputs = "float32[]"\n'))
    assert spec.breaks[0].body is not None
    assert spec.breaks[0].body.__name__ == "attention_beside"


def test_a_break_that_returns_nothing_leaves_outputs_out(tmp_path: Path) -> None:
    spec = sg.ModelSpec("m", (sg.BreakSpec("op:aten::add_", None, mutates="self"),))
    for name in ("a.toml", "a.json"):
        sg.dump_spec(spec, tmp_path / name)
        assert "outputs" not in (tmp_path / name).read_text()
        assert sg.load_spec(tmp_path / name) == spec


def test_a_lambda_cannot_be_dumped(tmp_path: Path) -> None:
    spec = sg.ModelSpec("m", (sg.BreakSpec(scale, None, body=lambda *_, **__: None),))
    with pytest.raises(sg.SpecError) as caught:
        sg.dump_spec(spec, tmp_path / "spec.toml")
    assert "no import path leads to it" in caught.value.problem
    with pytest.raises(sg.SpecError, match="neither TOML nor JSON"):
        sg.dump_spec(BUILT, tmp_path / "spec.yaml")


# What is refused, and where it says it is.


@pytest.mark.parametrize(
    ("old", "new", "where", "problem"),
    [
        ("fusable = true", "fusible = true", "breaks[0].fusible", "did you mean 'fusable'?"),
        ('live = ["n"]', "live = [\n  3,\n]", "live", "3 is not a name"),
        ("[buckets]", "[bucket]", "bucket", "did you mean 'buckets'?"),
        ("S = [4, 8]", 'S = ["a"]', "buckets.S[0]", "'a' is not a whole number"),
        ('"pass_through"', '"passthrough"', "breaks[1].ownership", "'pass_through'?"),
        ('"any[S D]"', '"any(S D)"', "inputs.x", "is no layout"),
        ('"like(x)[S D]"\nb', '"like(x)[S +D]"\nb', "breaks[0].outputs", "where a size should be"),
        ("test_specfile:body", "test_specfile:bodi", "breaks[0].body", "did you mean 'body'?"),
        ("tests.test_specfile:build", "no.such:build", "presets.tiny.build", "cannot be imported"),
        ('"cpu", "float64"', '"cpo", "float64"', "presets.tiny.device_dtype", "'cpo' is no device"),
        ('"cpu", "float64"', '"cpu", "flat64"', "presets.tiny.device_dtype", "no dtype named"),
        ("fusable = true", "fusable = 1", "breaks[0].fusable", "1 is not true or false"),
        ('length = "n"', 'length = "m"', "the top", "takes live value 'm'"),
        ('name = "scaled"\n', "", "the top", "key 'name' is missing"),
    ],
)
def test_a_problem_is_named_with_file_line_and_key(
    tmp_path: Path, old: str, new: str, where: str, problem: str
) -> None:
    changed = WRITTEN.replace(old, new, 1)
    assert changed != WRITTEN
    file = write(tmp_path, changed)
    with pytest.raises(sg.SpecError) as caught:
        sg.load_spec(file)
    assert problem in caught.value.problem
    line = f":{1 + changed[: changed.index(new)].count(chr(10))}" if where != "the top" else ""
    assert caught.value.where == f"{file}{line} at {where}"
    assert caught.value.fix


def test_a_problem_of_a_whole_break_is_named_with_the_line_it_begins_on(tmp_path: Path) -> None:
    file = write(tmp_path, WRITTEN.replace('q = "bfloat16[Q *rest]"', 'q = "any[R]"'))
    with pytest.raises(sg.SpecError, match="is bound by no input") as caught:
        sg.load_spec(file)
    assert caught.value.where == f"{file}:18 at breaks[1]"


def test_all_problems_are_found_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = WRITTEN.replace("S = [4, 8]", "S = 4").replace("fusable = true", "fused = true")
    spec, problems = read_spec(write(tmp_path, text))
    assert spec is None
    assert [problem.where.rpartition(" ")[2] for problem in problems] == ["breaks[0].fused", "buckets.S"]


def test_syntax_errors_say_so(tmp_path: Path) -> None:
    for name, text in (("a.toml", "name = "), ("a.json", "{"), ("a.json", "[" * 100_000)):
        with pytest.raises(sg.SpecError, match=r"is no (TOML|JSON)"):
            sg.load_spec(write(tmp_path, text, name))
    with pytest.raises(sg.SpecError, match="is no spec file"):
        sg.load_spec(write(tmp_path, "", "a.yaml"))
    with pytest.raises(sg.SpecError, match="there is no spec file"):
        sg.load_spec(tmp_path / "none.toml")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(sg.SpecError, match="is no text"):
        sg.load_spec(tmp_path / "b.json")


def test_the_line_of_a_value_of_several_lines_is_its_first() -> None:
    text = 'a = 1\nb = [\n  1,\n  2,\n]\n\n[[c]]\nd = """\nx\n"""\n'
    assert line_of(("b",), text) == 2
    assert line_of(("b", 1), text) == 2
    assert line_of(("c", 0), text) == 7
    assert line_of(("c", 0, "d"), text) == 8
    assert line_of(("e",), text) == 0


# Whatever stands in a file, loading it gives a valid spec or a SpecError.

FIELDS = [*attrs.fields_dict(sg.ModelSpec), *attrs.fields_dict(sg.BreakSpec), *attrs.fields_dict(sg.Preset)]
KEYS = st.sampled_from([*FIELDS, "x", "S", "tiny", "other"])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.floats(allow_nan=False),
    st.text(max_size=6),
    st.sampled_from(
        ["any[S D]", "like(x)[S*2 D]", "float32[*r]", "bfloat16[", "tests.test_specfile:body", "op:a::b", "S"]
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A valid document with up to three values replaced, added or taken away."""
    document: dict[str, Any] = tomlkit.parse(WRITTEN).unwrap()
    for _ in range(draw(st.integers(0, 3))):
        place: Any = document
        while True:
            values = place.values() if isinstance(place, dict) else place
            inner = [each for each in values if isinstance(each, dict | list) and each]
            if not inner or draw(st.booleans()):
                break
            place = draw(st.sampled_from(inner))
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys) if keys else KEYS)
        if isinstance(place, dict) and draw(st.booleans()):
            key = draw(KEYS)
        if isinstance(place, dict) and key in place and draw(st.booleans()):
            del place[key]
        elif isinstance(place, dict) or key in range(len(place)):
            place[key] = draw(VALUES)
    return document


def loads_or_is_refused(file: Path) -> None:
    spec, problems = read_spec(file)
    assert isinstance(spec, sg.ModelSpec) == (not problems)
    assert all(problem.problem and problem.fix and problem.where for problem in problems)


@settings(max_examples=1000, deadline=None)
@given(document=st.one_of(documents(), VALUES))
def test_any_json_loads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    loads_or_is_refused(write(folder, json.dumps(document), "fuzz.json"))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value if each is not None]
    return value


@settings(max_examples=1000, deadline=None)
@given(document=documents(), cut=st.none() | st.integers(0, 600))
def test_any_toml_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any], cut: int | None
) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = tomlkit.dumps(_without_none(document))
    loads_or_is_refused(write(folder, text[:cut], "fuzz.toml"))


def test_plans_load_back_and_refuse_another_format() -> None:
    spec = sg.load_spec(SPECS[0])
    plan = plan_preset(spec, build_preset(spec.presets["tiny"], {}))
    text = plan.to_json()
    assert CapturePlan.from_json(text) == plan
    with pytest.raises(sg.PlanError, match="format 99") as caught:
        CapturePlan.from_json(text.replace('"format": 1', '"format": 99'))
    assert "specgraph plan" in caught.value.fix
    with pytest.raises(sg.PlanError, match="is no capture plan"):
        CapturePlan.from_json("{}")
