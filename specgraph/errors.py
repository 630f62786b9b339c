"""One hierarchy of errors.

Every error says where it happened (spec, break, tensor, line of the model), what was expected, what
was seen, and what to do about it. Code that raises knows the tensor; code further out knows the break
and the spec, and adds them with `within`.
"""

from __future__ import annotations

from typing import Self


class SpecGraphError(Exception):
    """Base of all errors specgraph raises on purpose.

    Args:
        problem: what is wrong, as a clause without a full stop.
        fix: what the reader should do.
        spec: name of the `ModelSpec`.
        break_name: name of the break.
        tensor: the argument, output, input or parameter concerned.
        expected: what should have been there.
        actual: what was there.
        where: the line of the user's code, as `file:line in function`.
        code: the rule that is broken, where it is one of docs/rules.md.
    """

    def __init__(
        self,
        problem: str,
        *,
        fix: str,
        spec: str = "",
        break_name: str = "",
        tensor: str = "",
        expected: str = "",
        actual: str = "",
        where: str = "",
        code: str = "",
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix
        self.spec = spec
        self.break_name = break_name
        self.tensor = tensor
        self.expected = expected
        self.actual = actual
        self.where = where
        self.code = code

    def within(self, *, spec: str = "", break_name: str = "", where: str = "") -> Self:
        """Fill in what an outer level knows; what an inner level already said stands."""
        self.spec = self.spec or spec
        self.break_name = self.break_name or break_name
        self.where = self.where or where
        return self

    def __str__(self) -> str:
        place = [
            f"spec {self.spec!r}" if self.spec else "",
            f"break {self.break_name!r}" if self.break_name else "",
            self.tensor,
        ]
        head = ", ".join(part for part in place if part)
        lines = [f"{head}: {self.problem}" if head else self.problem]
        details = (
            ("expected", self.expected),
            ("actual", self.actual),
            ("at", self.where),
            ("fix", self.fix),
        )
        lines += [f"  {label + ':':<10}{text}" for label, text in details if text]
        return "\n".join(lines)


class SpecError(SpecGraphError):
    """A spec that cannot mean anything."""


class LayoutError(SpecGraphError):
    """A tensor is not what its layout says. Nothing has been written when this is raised."""


class PlanError(SpecGraphError):
    """The plan is refused, or a capture does not follow its plan."""


class CaptureError(SpecGraphError):
    """The capture failed; the process can capture again."""


class HostSyncError(PlanError, CaptureError):
    """An op inside a segment needs a value on the host, which no graph can replay.

    Found while planning, or while capturing when planning could not see it; hence both bases.
    """


class ReplayError(SpecGraphError):
    """The replay is refused before anything was launched."""


class MovedWeightError(ReplayError):
    """A parameter or buffer that a graph reads has other memory than at capture."""
