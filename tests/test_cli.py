"""The command line, as a person or a script meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specgraph.planner import CapturePlan

SPEC = """
import torch
import specgraph as sg

@sg.graph_break(sg.TensorLayout("S D", dtype=sg.like("x")), inputs={"x": sg.TensorLayout("S D")},
                live={"factor": "factor"})
def scale(x, factor=1.0):
    return x * factor * DRIFT[0]

DRIFT = [1.0]

def model(x):
    return scale(x + 1) * 2

def build():
    return model

def example(S=8):
    EXTRA
    return sg.Example({"x": torch.randn(S, 4)}, live={"factor": float(torch.rand(()))})

SPEC = sg.ModelSpec("scaled", (scale.spec,), inputs={"x": sg.TensorLayout("S D")}, live=("factor",),
                    presets={"tiny": sg.Preset(build, example), "meta": sg.Preset(
                        build, lambda: {"x": torch.empty(4, 4)}, device_dtype=("meta", "bfloat16"))})
"""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    file = tmp_path / "scaled.py"
    file.write_text(SPEC.replace("EXTRA", "pass"))
    return file


def specgraph(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specgraph", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_answers_without_importing_torch() -> None:
    code = (
        "import sys; from specgraph.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: print('torch' in sys.modules, end.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "plan" in done.stdout
    assert "verify" in done.stdout
    assert done.stdout.strip().endswith("False 0")


def test_plan_prints_plain_text_when_piped_and_the_time_on_stderr(spec_file: Path) -> None:
    done = specgraph("plan", spec_file, "--preset", "tiny", "--dim", "S=16")
    assert done.returncode == 0
    assert done.stdout.startswith("scaled: 2 segments, 1 break, for cpu\n")
    assert "dims S=16 D=4" in done.stdout
    assert "\x1b" not in done.stdout
    assert all(line == line.rstrip() for line in done.stdout.splitlines())
    assert done.stderr.startswith("planned in ")


def test_plan_as_json_loads_back(spec_file: Path) -> None:
    done = specgraph("plan", spec_file, "--preset", "meta", "--format", "json")
    plan = CapturePlan.from_json(done.stdout)
    assert plan.dims == {"S": 4, "D": 4}
    assert plan.device == "meta"
    assert json.loads(done.stdout)["steps"][1]["outputs"]["output"]["dtype"] == "bfloat16"


def test_verify_passes_and_says_what_it_compared(spec_file: Path) -> None:
    done = specgraph("verify", spec_file, "--preset", "tiny", "--backend", "cpu", "--replays", "2")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("replay 1  equal  factor=0.")
    assert lines[2] == ("passed: scaled on cpu, 2 segments and 1 break, replays against eager, rtol=0 atol=0")


def test_a_wrong_preset_a_wrong_dim_and_a_missing_file_are_refused(spec_file: Path) -> None:
    done = specgraph("plan", spec_file, "--preset", "large")
    assert done.returncode == 1
    assert "there is no preset 'large'" in done.stderr
    assert "one of: tiny, meta" in done.stderr
    assert "Traceback" not in done.stderr
    assert specgraph("plan", spec_file, "--dim", "S").returncode == 2
    assert specgraph("plan", spec_file.with_name("none.py")).returncode == 2


def test_verify_refuses_a_preset_without_weights(spec_file: Path) -> None:
    done = specgraph("verify", spec_file, "--preset", "meta", "--backend", "cpu")
    assert done.returncode == 1
    assert "this one is for planning" in done.stderr


def test_a_dim_that_example_does_not_take_is_named(spec_file: Path) -> None:
    done = specgraph("plan", spec_file, "--preset", "tiny", "--dim", "Q=3")
    assert done.returncode == 1
    assert "example takes no 'Q'" in done.stderr
    assert "one of: S" in done.stderr


def test_a_spec_file_without_spec_or_with_an_import_error_is_explained(tmp_path: Path) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("")
    assert "has no SPEC" in specgraph("plan", empty).stderr
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package")
    assert "No module named 'no_such_package'" in specgraph("plan", broken).stderr
