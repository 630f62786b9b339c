"""`specgraph check`: what is wrong with spec files, as findings with stable codes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import attrs

from .errors import SpecGraphError
from .lock import check_lock, lock_path
from .planner import CapturePlan
from .rules import check_spec
from .specfile import load_spec, read_spec
from .verify import build_preset, choose_preset, plan_preset


@attrs.frozen
class Finding:
    """Something that is wrong with a spec file.

    Args:
        file: the file, as it was named.
        line: line in it, counted from 1; 0 where that is not known.
        code: the rule, as in docs/rules.md.
        message: the whole message.
    """

    file: str
    line: int
    code: str
    message: str


def check_file(path: str, locked: bool) -> list[Finding]:
    """Everything that is wrong with one spec file.

    Args:
        path: the file.
        locked: also plan it, and compare with its lock file.
    """
    spec, problems = read_spec(path)
    errors: list[SpecGraphError] = [*problems]
    if spec is not None:
        errors += check_spec(spec)
    if spec is not None and locked and not errors:
        try:
            errors += check_lock(spec, lock_path(path))
        except SpecGraphError as error:
            errors.append(error)
    return [_finding(path, error) for error in errors]


def _finding(path: str, error: SpecGraphError) -> Finding:
    located = re.match(rf"{re.escape(path)}:(\d+)", error.where)
    line = int(located.group(1)) if located else 0
    return Finding(path, line, error.code or "SG200", str(error))


def formatted(findings: Iterable[Finding], form: str) -> str:
    """Findings as `text`, `json` or `github` (workflow commands that annotate a pull request)."""
    if form == "json":
        return f"{json.dumps([attrs.asdict(each) for each in findings], indent=1)}\n"
    if form == "github":
        return "".join(map(_github, findings))
    return "".join(f"{_place(each)}: {each.code} {each.message}\n" for each in findings)


def _place(finding: Finding) -> str:
    return f"{finding.file}:{finding.line}" if finding.line else finding.file


def _github(finding: Finding) -> str:
    message = finding.message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    line = f",line={finding.line}" if finding.line else ""
    return f"::error file={finding.file}{line},title={finding.code}::{message}\n"


def plan_of(path: str, preset: str | None) -> CapturePlan:
    """The plan in a JSON file, or that of a spec's preset.

    Raises:
        SpecGraphError: the file holds neither, or the spec cannot be planned.
    """
    text = Path(path).read_text() if path.endswith(".json") else ""
    if '"steps"' in text:
        return CapturePlan.from_json(text)
    spec = load_spec(path)
    return plan_preset(spec, build_preset(choose_preset(spec, preset), {}))
