"""Examples in the documents run, and do what they say."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]


def test_the_readme_example_runs_and_attends_to_the_live_length() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(example, "README.md", "exec"), names)
    x = names["x"]
    query, key = x + 1, (x * 2)[:, :5]
    assert torch.equal(names["y"], torch.softmax(query @ key.mT, -1) @ key * 3)


def test_the_migration_guides_examples_run_and_hold_what_they_assert(monkeypatch: pytest.MonkeyPatch) -> None:
    # Targets of breaks are found by module-level names, so the examples run in a module.
    module = types.ModuleType("migrating")
    monkeypatch.setitem(sys.modules, "migrating", module)
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "migrating.md").read_text(), re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        assert "assert" in example
        exec(compile(example, "migrating.md", "exec"), vars(module))


def test_the_runners_examples_run_and_hold_what_they_assert(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("runner_examples")
    monkeypatch.setitem(sys.modules, "runner_examples", module)
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "runner.md").read_text(), re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        assert "assert" in example
        exec(compile(example, "runner.md", "exec"), vars(module))


def test_files_that_documents_name_exist() -> None:
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for name in re.findall(r"`((?:docs|specs|benchmarks|scripts)/[\w./]+)`", document.read_text()):
            assert (ROOT / name).exists(), f"{document.name} names {name}"
