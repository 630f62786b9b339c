"""`specgraph check`, lock files and `specgraph diff`: what is said of a spec without running its model."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import specgraph as sg
from specgraph.check import check_file, formatted
from specgraph.lock import lock_path, read_lock, write_lock
from specgraph.rules import check_spec, misfit
from specgraph.verify import build_preset, plan_preset

ROOT = Path(__file__).parents[1]
ROWS = sg.TensorLayout("S D")
ROWS_OUT = sg.TensorLayout("S D", dtype=sg.like("x"))


def one(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def many(x: Tensor) -> list[Tensor]:
    return [x, x]


def mapping(x: Tensor) -> dict[str, Tensor]:
    return {"a": x}


def nothing(x: Tensor) -> None:
    x.add_(1)


def untyped(x: Tensor) -> Any:
    return x


def codes(*breaks: sg.BreakSpec, **fields: Any) -> list[str]:
    return [error.code for error in check_spec(sg.ModelSpec("m", breaks, **fields))]


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (one, ROWS_OUT, (ROWS_OUT, ROWS_OUT)),
        (pair, (ROWS_OUT, ROWS_OUT), ROWS_OUT),
        (pair, (ROWS_OUT, ROWS_OUT), (ROWS_OUT,)),
        (many, (ROWS_OUT, ROWS_OUT), ROWS_OUT),
        (mapping, {"a": ROWS_OUT}, ROWS_OUT),
        (nothing, None, ROWS_OUT),
        (one, ROWS_OUT, None),
    ],
)
def test_outputs_are_compared_with_what_the_function_says_it_returns(
    function: Callable[..., Any], right: Any, wrong: Any
) -> None:
    assert codes(sg.BreakSpec(function, right, inputs={"x": ROWS})) == []
    assert codes(sg.BreakSpec(function, wrong, inputs={"x": ROWS})) == ["SG104"]
    assert codes(sg.BreakSpec(untyped, wrong, inputs={"x": ROWS})) == []


def test_a_pass_through_body_may_say_it_returns_nothing() -> None:
    spec = sg.BreakSpec(nothing, ROWS_OUT, inputs={"x": ROWS}, ownership=sg.Ownership.PASS_THROUGH, out="x")
    assert codes(spec) == []


# mypy sees these faults too; here it is not to look.
UNSEEN: Any = sg.BreakSpec


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (UNSEEN("no.such.module:f", None), "SG106"),
        (UNSEEN("torch.nn.functional:relued", None), "SG106"),
        (UNSEEN("just words", None), "SG106"),
        (UNSEEN("op:aten::no_such_op", None), "SG106"),
        (UNSEEN(torch.nn.functional.scaled_dot_product_attention, None), "SG106"),
        (UNSEEN(one, ROWS_OUT, inputs={"x": ROWS, "y": ROWS}), "SG101"),
        (UNSEEN("tests.test_check:one", ROWS_OUT, inputs={"y": ROWS, "x": ROWS}), "SG101"),
        (UNSEEN("op:aten::mm", None, inputs={"selff": ROWS}), "SG101"),
        (UNSEEN(one, ROWS_OUT, inputs={"x": ROWS}, mutates="z"), "SG101"),
        (UNSEEN(one, ROWS_OUT, inputs={"x": ROWS}, body=nothing), "SG107"),
        (UNSEEN(one, ROWS_OUT, inputs={"x": ROWS}, capture_stub=pair), "SG107"),
    ],
)
def test_what_is_wrong_with_a_break_has_a_code_and_a_fix(spec: sg.BreakSpec, code: str) -> None:
    errors = check_spec(sg.ModelSpec("m", (spec,)))
    assert errors[0].code == code
    assert errors[0].fix
    assert (errors[0].spec, errors[0].break_name) == ("m", spec.name)


def test_right_breaks_of_every_kind_are_clean() -> None:
    assert (
        codes(
            UNSEEN("module:blocks.*.attn", None),
            UNSEEN("op:aten::mm", None, inputs={"self": ROWS}),
            UNSEEN("tests.test_check:one", ROWS_OUT, inputs={"x": ROWS}),
            UNSEEN("torch.nn:Module.zero_grad", None),
        )
        == []
    )


# Which functions may stand in for which.


def signature(text: str) -> inspect.Signature:
    names: dict[str, Any] = {}
    exec(f"def f({text}): ...", names)
    return inspect.signature(names["f"])


@pytest.mark.parametrize(
    ("target", "stand_in", "problem"),
    [
        ("q, k", "q, k", None),
        ("q, k=1", "q, k=2", None),
        ("q, k", "*args, **kwargs", None),
        ("q, k, *, m", "q, *args, n, **kwargs", None),
        ("q, /, k", "x, k", None),
        ("q, k", "q, k, n", None),
        ("q, k", "k, q", "its parameter 1 is 'k', not 'q'"),
        ("q, k", "q", "it does not take 'k' by position"),
        ("q, k", "q, *k", "it does not take 'k' by name"),
        ("q, k=1", "q, k", "its 'k' needs a value, the target's does not"),
        ("q, *, k", "q, k, /", "it does not take 'q' by name"),
        ("q, *rest", "q", "it takes no *rest"),
        ("q, **rest", "q", "it takes no **rest"),
        ("q", "q, k", "nothing gives its 'k' a value"),
    ],
)
def test_a_stand_in_takes_every_call_the_target_takes(
    target: str, stand_in: str, problem: str | None
) -> None:
    assert misfit(signature(target), signature(stand_in), ("n",)) == problem


# Files, formats and locks.

FILE = """\
name = "locked"

[[breaks]]
target = "tests.test_check:one"
outputs = "like(x)[S D]"

[breaks.inputs]
x = "any[S D]"

[presets.tiny]
build = "tests.test_check:build"
example = "tests.test_check:example"
"""


def model(x: Tensor) -> Tensor:
    return one(x + 1) * 2


def build() -> Callable[[Tensor], Tensor]:
    return model


def example(S: int = 4) -> dict[str, Tensor]:
    return {"x": torch.zeros(S, 4)}


def specgraph(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specgraph", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    file = tmp_path / "locked.toml"
    file.write_text(FILE)
    return file


def lock(file: Path, **dims: int) -> None:
    spec = sg.load_spec(file)
    plan = plan_preset(spec, build_preset(spec.presets["tiny"], dims))
    write_lock(lock_path(file), "tiny", dims, plan)


def test_a_plan_that_is_the_locked_one_is_clean(spec_file: Path) -> None:
    lock(spec_file, S=16)
    assert check_file(str(spec_file), locked=True) == []
    assert read_lock(lock_path(spec_file)).dims == {"S": 16}


def test_a_plan_that_moved_is_said_in_words(spec_file: Path) -> None:
    lock(spec_file)
    spec_file.write_text(
        FILE.replace('outputs = "like(x)[S D]"', 'outputs = "like(x)[S D]"\nfills_padding = true').replace(
            'name = "locked"', 'name = "locked"\nlive = ["n"]'
        )
    )
    findings = check_file(str(spec_file), locked=True)
    assert {finding.code for finding in findings} == {"SG202"}
    assert any("n" in finding.message for finding in findings)
    assert "specgraph plan SPEC --preset tiny --lock" in findings[0].message


def test_a_missing_lock_and_a_plan_without_a_lock_entry_are_findings(spec_file: Path) -> None:
    (finding,) = check_file(str(spec_file), locked=True)
    assert finding.code == "SG201"
    lock(spec_file)
    plan = read_lock(lock_path(spec_file)).plan
    lock_path(spec_file).write_text(plan.to_json())
    (finding,) = check_file(str(spec_file), locked=True)
    assert finding.code == "SG201"


def test_a_spec_that_can_no_longer_be_planned_is_a_finding(spec_file: Path) -> None:
    lock(spec_file)
    spec_file.write_text(FILE.replace("any[S D]", "any[S D E]"))
    (finding,) = check_file(str(spec_file), locked=True)
    assert finding.code == "SG200"
    assert "has 2 dims, not 3" in finding.message


def test_findings_come_as_text_json_and_workflow_commands(spec_file: Path) -> None:
    spec_file.write_text(FILE.replace("outputs", "output"))
    findings = check_file(str(spec_file), locked=False)
    assert formatted(findings, "text").startswith(f"{spec_file}:5: SG100 unknown key 'output'")
    (entry,) = json.loads(formatted(findings, "json"))
    assert (entry["file"], entry["line"], entry["code"]) == (str(spec_file), 5, "SG100")
    assert formatted(findings, "github").startswith(
        f"::error file={spec_file},line=5,title=SG100::unknown key 'output'"
    )
    assert formatted(findings, "github").count("\n") == 1
    assert formatted([], "text") == ""


def test_the_commands_lock_check_and_diff(spec_file: Path, tmp_path: Path) -> None:
    done = specgraph("plan", spec_file, "--dim", "S=8", "--lock")
    assert done.returncode == 0, done.stderr
    assert f"locked in {tmp_path / 'locked.plan.json'}" in done.stderr.replace("\n", "")
    done = specgraph("check", spec_file, "--locked")
    assert (done.returncode, done.stdout) == (0, "")
    assert "1 of 1 clean" in done.stderr
    done = specgraph("diff", lock_path(spec_file), spec_file)
    assert done.returncode == 1
    assert re.search(r"S 8 -> 4", done.stdout)
    done = specgraph("diff", spec_file, spec_file)
    assert (done.returncode, done.stdout) == (0, "the plans are the same\n")
    spec_file.write_text("name = ")
    done = specgraph("check", spec_file)
    assert done.returncode == 1
    assert "SG100" in done.stdout
    assert "0 of 1 clean" in done.stderr


@pytest.mark.parametrize("file", sorted((ROOT / "specs").glob("[a-z]*.py")), ids=lambda file: file.stem)
def test_every_spec_is_clean_and_its_plan_is_the_locked_one(file: Path) -> None:
    assert check_file(str(file), locked=True) == []


def test_every_code_has_a_section_and_no_section_lacks_a_code() -> None:
    source = "".join(file.read_text() for file in (ROOT / "specgraph").rglob("*.py"))
    used = set(re.findall(r"\"(SG\d{3})\"", source))
    rules = (ROOT / "docs" / "rules.md").read_text()
    assert set(re.findall(r"^## (SG\d{3})", rules, re.MULTILINE)) == used
    assert set(re.findall(r"^\| (SG\d{3})", rules, re.MULTILINE)) == used
