"""Capturing every bucket before the first call: the largest first, so that the others fit in its memory."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import attrs

from ..errors import CaptureError
from ..spec import Example, ModelSpec
from .capturer import in_one_line
from .store import Capture

logger = logging.getLogger("specgraph")

ExampleLike: TypeAlias = Mapping[str, Any] | Example | Callable[..., Mapping[str, Any] | Example]
"""A call's inputs, with or without live values, or what makes them: `example(S=512, T=64)`."""


@attrs.frozen
class WarmedBucket:
    """What became of one bucket.

    Args:
        label: its sizes, as text.
        sizes: of the bucketed dims.
        seconds: that planning, warm-up and capture took.
        nbytes: that the pool and the static inputs took from the device.
        error: why it could not be captured; empty where it was.
    """

    label: str
    sizes: Mapping[str, int]
    seconds: float = 0.0
    nbytes: int = 0
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.label}: failed: {self.error}"
        return f"{self.label}: {self.seconds:.2f} s, {self.nbytes / 2**20:.1f} MiB"


@attrs.frozen
class WarmupReport:
    """What a warm-up captured, in order: the largest bucket first."""

    buckets: tuple[WarmedBucket, ...] = ()

    @property
    def failed(self) -> tuple[WarmedBucket, ...]:
        """Buckets that could not be captured."""
        return tuple(each for each in self.buckets if each.error)

    def __str__(self) -> str:
        return "\n".join(map(str, self.buckets))


def warm_up(
    spec: ModelSpec,
    products: list[dict[str, int]],
    attempt: Callable[[Mapping[str, int]], Capture],
    progress: bool | None,
) -> WarmupReport:
    """Capture each bucket with `attempt`.

    Args:
        spec: the model's spec.
        products: bucket sizes, in order.
        attempt: captures one.
        progress: show a bar on standard error; None: where that is a terminal.

    Raises:
        CaptureError: not one of several buckets could be captured.
        Exception: whatever the capture of an only bucket fails with.
    """
    done: list[WarmedBucket] = []
    with _bar(f"capturing {spec.name}", len(products), progress) as advance:
        for sizes in products:
            label = " ".join(f"{dim}={size}" for dim, size in sizes.items())
            try:
                made = attempt(sizes)
            except Exception as error:
                if len(products) == 1:
                    raise
                # One bucket's failure, of whatever kind, must not lose the others; it is reported.
                done.append(WarmedBucket(label, sizes, error=f"{type(error).__name__}: {error}"))
                logger.warning("%s: %s could not be captured: %s", spec.name, label, in_one_line(error))
            else:
                done.append(WarmedBucket(made.label, sizes, made.seconds, made.grown_nbytes))
            advance()
    if done and all(each.error for each in done):
        raise CaptureError(
            f"not one of {len(done)} buckets could be captured",
            spec=spec.name,
            actual=str(done[0]),
            fix="mend the first failure; the others are logged",
        )
    return WarmupReport(tuple(done))


def example_at(
    example: ExampleLike, live: Mapping[str, Any] | None, sizes: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs and live values of an example for one bucket; the bucketed dims live at full length."""
    made = example if isinstance(example, Mapping | Example) else example(**sizes)
    inputs, values = (made.inputs, made.live) if isinstance(made, Example) else (made, {})
    return dict(inputs), {**values, **(live or {}), **sizes}


@contextlib.contextmanager
def _bar(title: str, total: int, shown: bool | None) -> Iterator[Callable[[], object]]:
    if shown is None:
        shown = sys.stderr.isatty()
    if not shown:
        yield lambda: None
        return
    # Imported where it is shown: most processes never show one.
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
