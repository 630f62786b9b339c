"""Windowed attention with a delta rule in a MiniMax-H3 attention module: the partial window.

The break has two results. The anchor frames are live: which frames all others attend to is chosen anew for
every replay. See `_vdn_attention`; `vdn_h3_full_cover` is the same module under a window that leaves nothing
out.
"""

from __future__ import annotations

import torch

import specgraph as sg

from ._vdn_attention import FRAMES, AttentionStep, build_tiny, inputs_tiny, vdn_attention

WINDOW = 1
"""Frames visible on each side of a frame."""

RESULT = sg.TensorLayout("B T H D", dtype=sg.like("query"))
INPUTS = {
    "query": sg.TensorLayout("B T H D"),
    "key": sg.TensorLayout("B T H D", dtype=sg.like("query")),
    "value": sg.TensorLayout("B T H D", dtype=sg.like("query")),
    "beta": sg.TensorLayout("B T H", dtype=sg.like("query")),
}


def build_partial() -> AttentionStep:
    """A window that covers half of the frames or less."""
    return build_tiny(WINDOW)


def example(*, B: int = 1) -> sg.Example:
    """Inputs for `build_partial`, with one or two anchors drawn at random."""
    count = int(torch.randint(1, 3, ()))
    anchors: tuple[int, ...] = tuple(sorted(torch.randperm(FRAMES)[:count].tolist()))
    return sg.Example(inputs_tiny(B), live={"anchors": anchors})


def vdn_spec(name: str, attention: sg.BreakSpec, live: tuple[str, ...], preset: sg.Preset) -> sg.ModelSpec:
    """The spec of one attention module that breaks at `attention`."""
    return sg.ModelSpec(
        name,
        (attention,),
        inputs={
            "hidden": sg.TensorLayout("B T C"),
            "position_ids": sg.TensorLayout("T 3", torch.float32),
        },
        outputs=sg.TensorLayout("B T C", sg.like("hidden")),
        live=live,
        eager_only=("aten::*scaled_dot_product*",),
        presets={"tiny": preset},
    )


SPEC = vdn_spec(
    "vdn_h3",
    sg.BreakSpec(vdn_attention, (RESULT, RESULT), inputs=INPUTS, live={"anchors": "anchors"}),
    ("anchors",),
    sg.Preset(build_partial, example, device_dtype=("cpu", torch.bfloat16)),
)
