"""Lock files: the plan of a spec's preset, committed beside the spec so that a change shows in review.

A lock file is a plan's JSON with a `lock` entry that says how the plan was made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import attrs
import torch

from .errors import PlanError
from .planner import CapturePlan
from .planner.changes import compare
from .spec import ModelSpec
from .verify import build_preset, choose_preset, plan_preset


@attrs.frozen
class Lock:
    """A locked plan.

    Args:
        preset: name of the preset it is of.
        dims: dims that stood in for the preset's own.
        torch: version of torch it was made with.
        plan: the plan.
    """

    preset: str
    dims: Mapping[str, int]
    torch: str
    plan: CapturePlan


def lock_path(spec_path: str | Path) -> Path:
    """Where a spec's lock file is: `specs/x.plan.json` for `specs/x.py`."""
    return Path(spec_path).with_suffix(".plan.json")


def write_lock(path: Path, preset: str, dims: Mapping[str, int], plan: CapturePlan) -> None:
    """Write a lock file."""
    entry = {"preset": preset, "dims": dict(dims), "torch": _release(torch.__version__)}
    text = plan.to_json()
    path.write_text(f'{{\n "lock": {json.dumps(entry)},{text.removeprefix("{")}\n')


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        PlanError: there is none, or it is none.
    """
    fix = "run `specgraph plan SPEC --preset NAME --lock` and commit the file"
    if not path.is_file():
        raise PlanError(f"there is no lock file {path}", code="SG201", fix=fix)
    text = path.read_text()
    plan = CapturePlan.from_json(text)
    entry = json.loads(text).get("lock")
    if entry is None:
        raise PlanError(f"{path} is a plan, but no lock file", code="SG201", fix=fix)
    return Lock(entry["preset"], entry["dims"], entry["torch"], plan)


def check_lock(spec: ModelSpec, path: Path) -> list[PlanError]:
    """How a spec's plan differs from the locked one, a finding a change.

    Raises:
        SpecGraphError: there is no lock file, or the spec can no longer be planned.
    """
    lock = read_lock(path)
    preset = choose_preset(spec, lock.preset)
    plan = plan_preset(spec, build_preset(preset, lock.dims))
    if plan.digest == lock.plan.digest:
        return []
    release = _release(torch.__version__)
    other = f"; it was locked with torch {lock.torch}, this is {release}" if lock.torch != release else ""
    return [
        PlanError(
            change.message,
            spec=spec.name,
            code="SG202",
            fix=f"if that is meant, run `specgraph plan SPEC --preset {lock.preset} --lock`{other}",
        )
        for change in compare(lock.plan, plan)
    ]


def _release(version: str) -> str:
    """`2.13.0` of `2.13.0+cpu`."""
    return version.partition("+")[0]
