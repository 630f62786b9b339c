"""Wan 2.1 text-to-video (diffusers 0.42): one step of the unedited transformer, broken at attention.

A block attends twice: over the video's own rows, and from them to the prompt's. Nothing in the forward pass
depends on values. The rotary factors are cut from the model's tables by the video's size, which the capture
freezes.
"""

from __future__ import annotations

import torch
from diffusers import WanTransformer3DModel
from torch import nn

import specgraph as sg

from ._diffusion_attention import ATTENTION, EAGER_ONLY


def as_published(model: nn.Module, float32: list[str]) -> nn.Module:
    """The model for inference, with the parts named in `float32` in that dtype, as `from_pretrained` does."""
    for name, parameter in model.named_parameters():
        if not set(float32).isdisjoint(name.split(".")):
            parameter.data = parameter.data.float()
    return model.eval()


def build_tiny() -> nn.Module:
    """Random weights, three blocks."""
    model = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=8,
        out_channels=8,
        text_dim=48,
        freq_dim=32,
        ffn_dim=160,
        num_layers=3,
        rope_max_seq_len=32,
    )
    return as_published(model, model._keep_in_fp32_modules)


def build_full() -> nn.Module:
    """The size of Wan2.1-T2V-14B; run under the meta device it has no weights."""
    model = WanTransformer3DModel()
    return as_published(model, model._keep_in_fp32_modules)


def example_tiny(
    *, B: int = 1, text: int = 10, frames: int = 3, height: int = 8, width: int = 4
) -> dict[str, object]:
    """Inputs for `build_tiny`.

    Args:
        B: batch size.
        text: rows of the prompt.
        frames, height, width: of the latents; height and width are multiples of two.
    """
    return {
        "hidden_states": torch.randn(B, 8, frames, height, width),
        "timestep": torch.randint(0, 1000, (B,)),
        "encoder_hidden_states": torch.randn(B, text, 48),
        "return_dict": False,
    }


def example_full(
    *, B: int = 1, text: int = 512, frames: int = 21, height: int = 60, width: int = 104
) -> dict[str, object]:
    """Layouts for `build_full`; 21 x 60 x 104 latents are a video of 81 frames of 832 x 480 pixels."""
    return {
        "hidden_states": torch.empty(B, 16, frames, height, width),
        "timestep": torch.empty(B, dtype=torch.int64),
        "encoder_hidden_states": torch.empty(B, text, 4096),
        "return_dict": False,
    }


SPEC = sg.ModelSpec(
    "wan",
    (ATTENTION,),
    inputs={
        "hidden_states": sg.TensorLayout("B C F H W"),
        "timestep": sg.TensorLayout("B", torch.int64),
        "encoder_hidden_states": sg.TensorLayout("B T X", sg.like("hidden_states")),
    },
    outputs=(sg.TensorLayout("B C F H W", sg.like("hidden_states")),),
    eager_only=EAGER_ONLY,
    presets={
        "tiny": sg.Preset(build_tiny, example_tiny, device_dtype=("cpu", torch.bfloat16)),
        "full": sg.Preset(build_full, example_full, device_dtype=("meta", torch.bfloat16)),
    },
)
