"""Windowed attention in a MiniMax-H3 attention module, under a window that covers everything.

Nothing is outside the window, so the break has one result where `vdn_h3`'s has two, and the module computes
what diffusers' own dense one does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor
from torch import Tensor

import specgraph as sg

from ._vdn_attention import FRAMES, AttentionStep, build_tiny, inputs_tiny, vdn_attention
from .vdn_h3 import INPUTS, RESULT, vdn_spec


def build_full_cover() -> AttentionStep:
    """A window as wide as the video."""
    return build_tiny(FRAMES)


def example(*, B: int = 1) -> sg.Example:
    """Inputs for `build_full_cover`."""
    inputs = inputs_tiny(B)

    def reference(step: Callable[..., object]) -> Tensor:
        assert isinstance(step, AttentionStep)
        dense = MiniMaxH3AttnProcessor()
        out: Tensor = dense(step.attn, inputs["hidden"], step.rope(inputs["position_ids"]))
        return out

    return sg.Example(inputs, reference=reference)


SPEC = vdn_spec(
    "vdn_h3_full_cover",
    sg.BreakSpec(vdn_attention, (RESULT,), inputs=INPUTS),
    (),
    sg.Preset(build_full_cover, example, device_dtype=("cpu", torch.bfloat16)),
)
