"""Running a model eagerly through its spec: every break's body, every check, no graphs.

This is the warm-up before a capture, and what a replay is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from ..calls import BreakCall
from ..intercept import Session
from ..layout import ConcreteLayout, empty
from ..planner.trace import structured
from ..spec import ModelSpec
from .body import ResultWriter, place_body

BreakObserver: TypeAlias = Callable[[BreakCall, Mapping[str, torch.Tensor]], None]
"""Told about every break of a checked eager run, with its outputs, once they are written."""


class _Checked:
    """A session's handler that runs bodies and checks what they return."""

    segment_name = ""

    def __init__(
        self,
        spec: ModelSpec,
        live: Mapping[str, Any],
        device: torch.device,
        observer: BreakObserver | None,
    ) -> None:
        self.spec = spec
        self.live = live
        self.device = device
        self.observer = observer

    def on_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return func(*args, **kwargs)

    def on_op(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return func(*args, **kwargs)

    def on_break(self, call: BreakCall) -> object:
        buffers = [self._allocate(layout) for layout in call.outputs.values()]
        outputs = dict(zip(call.outputs, buffers, strict=True))
        result = place_body(call, None, buffers).run(self.live)
        ResultWriter(self.spec, call, buffers).write(result, self.live)
        if self.observer is not None:
            self.observer(call, outputs)
        return structured(call.site.spec.outputs, outputs)

    def _allocate(self, layout: ConcreteLayout) -> torch.Tensor:
        return empty(layout, self.device)


def run_checked(
    fn: Callable[..., Any],
    spec: ModelSpec,
    inputs: Mapping[str, Any],
    live: Mapping[str, Any],
    device: torch.device,
    observer: BreakObserver | None = None,
) -> Any:
    """Run `fn` eagerly, each break through its body and its checks.

    Raises:
        SpecError: a target cannot be resolved.
        LayoutError: a break's arguments or results are not what the spec says.
    """
    session = Session(spec, fn, _Checked(spec, live, device, observer))
    with torch.inference_mode(False), torch.no_grad(), session:
        return fn(**inputs)
