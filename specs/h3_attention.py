"""One attention module of MiniMax-H3 (diffusers 0.42), dense: two segments and the attention between them."""

from __future__ import annotations

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

import specgraph as sg

from ._vdn_attention import AttentionStep, build_tiny, inputs_tiny


def contiguous_attention(
    query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object
) -> Tensor:
    """diffusers' attention, in the memory layout the break declares."""
    out: Tensor = dispatch_attention_fn(query, key, value, *args, **kwargs)
    return out.contiguous()


ATTENTION = sg.BreakSpec(
    dispatch_attention_fn,
    sg.TensorLayout("B T H D", dtype=sg.like("query")),
    inputs={
        "query": sg.TensorLayout("B T H D"),
        "key": sg.TensorLayout("B T H D", dtype=sg.like("query")),
        "value": sg.TensorLayout("B T H D", dtype=sg.like("query")),
    },
    body=contiguous_attention,
    name="attention",
)


def build_dense() -> AttentionStep:
    """The module with diffusers' own processor."""
    return build_tiny(None)


def example(*, B: int = 1) -> dict[str, Tensor]:
    """Inputs for `build_dense`."""
    return inputs_tiny(B)


SPEC = sg.ModelSpec(
    "h3_attention",
    (ATTENTION,),
    inputs={
        "hidden": sg.TensorLayout("B T C"),
        "position_ids": sg.TensorLayout("T 3", torch.float32),
    },
    outputs=sg.TensorLayout("B T C", sg.like("hidden")),
    eager_only=("aten::*scaled_dot_product*",),
    presets={"tiny": sg.Preset(build_dense, example, device_dtype=("cpu", torch.bfloat16))},
)
