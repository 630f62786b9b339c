"""The README's example runs and does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def test_the_readme_example_runs_and_attends_to_the_live_length() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(example, "README.md", "exec"), names)
    x = names["x"]
    query, key = x + 1, (x * 2)[:, :5]
    assert torch.equal(names["y"], torch.softmax(query @ key.mT, -1) @ key * 3)


def test_files_that_documents_name_exist() -> None:
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for name in re.findall(r"`((?:docs|specs|benchmarks|scripts)/[\w./]+)`", document.read_text()):
            assert (ROOT / name).exists(), f"{document.name} names {name}"
