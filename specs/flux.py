"""FLUX.1 (diffusers 0.42): one denoising step of the unedited transformer, broken at attention.

Every block, of two streams or of one, attends once over the text rows followed by the image's. Nothing in
the forward pass depends on values, so that latents, prompt, timestep, guidance and position ids are all
live.
"""

from __future__ import annotations

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

import specgraph as sg

from ._diffusion_attention import ATTENTION, EAGER_ONLY


def build_tiny() -> nn.Module:
    """Random weights, two blocks of two streams and two of one."""
    model: nn.Module = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=48,
        pooled_projection_dim=24,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    return model.eval()


def build_full() -> nn.Module:
    """The size of FLUX.1-dev, 12 B parameters; run under the meta device it has no weights."""
    model: nn.Module = FluxTransformer2DModel(guidance_embeds=True)
    return model.eval()


def position_ids(text: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Ids of the text rows, all zero, [text 3], and (0, y, x) of the image's, [height*width 3]."""
    axes = (torch.arange(1), torch.arange(height), torch.arange(width))
    return torch.zeros(text, 3), torch.cartesian_prod(*axes).to(torch.get_default_dtype())


def example_tiny(*, B: int = 1, text: int = 12, height: int = 4, width: int = 6) -> dict[str, object]:
    """Inputs for `build_tiny`.

    Args:
        B: batch size.
        text: rows of the prompt.
        height, width: of the image, in patches of 2 x 2 latents.
    """
    txt_ids, img_ids = position_ids(text, height, width)
    # Where the image lies is an input like any other.
    img_ids[:, 1:] += torch.randint(0, 8, (2,))
    return {
        "hidden_states": torch.randn(B, height * width, 16),
        "encoder_hidden_states": torch.randn(B, text, 48),
        "pooled_projections": torch.randn(B, 24),
        "timestep": torch.rand(B),
        "img_ids": img_ids,
        "txt_ids": txt_ids,
        "guidance": torch.rand(B, dtype=torch.float32) * 5,
        "return_dict": False,
    }


def example_full(*, B: int = 1, text: int = 512, height: int = 64, width: int = 64) -> dict[str, object]:
    """Layouts for `build_full`; 64 x 64 patches are an image of 1024 x 1024 pixels."""
    return {
        "hidden_states": torch.empty(B, height * width, 64),
        "encoder_hidden_states": torch.empty(B, text, 4096),
        "pooled_projections": torch.empty(B, 768),
        "timestep": torch.empty(B),
        "img_ids": torch.empty(height * width, 3),
        "txt_ids": torch.empty(text, 3),
        "guidance": torch.empty(B, dtype=torch.float32),
        "return_dict": False,
    }


SPEC = sg.ModelSpec(
    "flux",
    (ATTENTION,),
    inputs={
        "hidden_states": sg.TensorLayout("B S C"),
        "encoder_hidden_states": sg.TensorLayout("B T X", sg.like("hidden_states")),
        "pooled_projections": sg.TensorLayout("B P", sg.like("hidden_states")),
        "timestep": sg.TensorLayout("B"),
        "img_ids": sg.TensorLayout("S 3"),
        "txt_ids": sg.TensorLayout("T 3", sg.like("img_ids")),
        "guidance": sg.TensorLayout("B", torch.float32),
    },
    outputs=(sg.TensorLayout("B S C", sg.like("hidden_states")),),
    eager_only=EAGER_ONLY,
    presets={
        "tiny": sg.Preset(build_tiny, example_tiny, device_dtype=("cpu", torch.bfloat16)),
        "full": sg.Preset(build_full, example_full, device_dtype=("meta", torch.bfloat16)),
    },
)
