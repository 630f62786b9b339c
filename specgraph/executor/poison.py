"""Poison: every byte of the pool that nothing may read is filled with a pattern before something could.

At a step boundary the pool holds memory that is live, because a later step of the same replay reads it, and
memory that is dead. A correct program never reads the dead part, and a body that is handed a buffer writes
all of it. With `validate="poison"` a replay fills the dead part, and the outputs of the next body, with bytes
of 0xFF (NaN in every floating type), so that a read of either shows as a difference from eager, at the step
where it happens; and after each body it looks for the pattern in the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from ..errors import ReplayError

Span: TypeAlias = tuple[int, int]
"""Memory from an address on: first byte, and the byte after the last."""

PATTERN = 0xFF

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def merged(spans: Sequence[Span]) -> list[Span]:
    """The same bytes as spans that neither touch nor overlap, in order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif end > start:
            result.append((start, end))
    return result


def without(spans: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """The bytes of `spans` that are not in `taken`."""
    result = []
    gaps = merged(taken)
    for start, end in merged(spans):
        for gap_start, gap_end in gaps:
            if gap_end <= start or gap_start >= end:
                continue
            if gap_start > start:
                result.append((start, gap_start))
            start = max(start, gap_end)
        if start < end:
            result.append((start, end))
    return result


@attrs.frozen(eq=False)
class PoisonFill:
    """Fills memory that is dead at this point of a replay.

    Args:
        regions: uint8 tensors over it.
    """

    regions: tuple[torch.Tensor, ...]

    def bind(self, live: Mapping[str, Any]) -> Callable[[], object]:
        """The step as a callable."""

        def step() -> None:
            for region in self.regions:
                region.fill_(PATTERN)

        return step


@attrs.frozen(eq=False)
class UnwrittenCheck:
    """Looks for the pattern in what a body has written.

    Integers are left out: in them the pattern is a value like any other.

    Args:
        model: name of the `ModelSpec`.
        label: the break.
        outputs: its outputs, by name.
    """

    model: str
    label: str
    outputs: Mapping[str, torch.Tensor]

    def bind(self, live: Mapping[str, Any]) -> Callable[[], object]:
        """The step as a callable."""
        checked = [
            (name, output)
            for name, output in self.outputs.items()
            if output.is_floating_point() or output.is_complex() or output.dtype is torch.bool
        ]

        def step() -> None:
            for name, output in checked:
                count = unwritten(output)
                if count:
                    self._refuse(name, output, count)

        return step

    def _refuse(self, name: str, output: torch.Tensor, count: int) -> None:
        raise ReplayError(
            f"{count} of {output.numel()} elements were left as they were before the body ran",
            spec=self.model,
            break_name=self.label,
            tensor=name,
            expected="every element written",
            actual="the poison pattern, which stands for whatever the pool held",
            fix="write the whole buffer in the body; rows past a live length may be left where the dim is in "
            "ModelSpec.buckets",
        )


def unwritten(tensor: torch.Tensor) -> int:
    """Elements whose bytes are all the pattern."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = real.contiguous().view(_WORDS[real.element_size()])
    pattern = PATTERN if words.dtype is torch.uint8 else -1
    return int((words == pattern).sum())
