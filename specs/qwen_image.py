"""Qwen-Image (diffusers 0.42): one denoising step, broken at attention.

Every block attends once over the prompt's rows followed by the image's. The prompt is right-padded, and its
mask and the rotary factors are inputs, so that one capture serves every prompt up to the captured length, in
a batch too, and every image of as many rows.

The model's own `forward` is not captured. Of the image's size, which is no tensor, it computes rotary
factors that it keeps in a cache of its own, and with a mask it copies a number from the host, which CUDA
refuses to capture. What it computes besides is this, through the same submodules; every verified replay is
compared with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from torch import Tensor, nn

import specgraph as sg

from ._diffusion_attention import ATTENTION, EAGER_ONLY

TINY_AXES = (8, 12, 12)
"""Rotary dims of frame, height and width in `build_tiny`."""


class DenoisingStep(nn.Module):
    """The model's `forward` on rotary factors that are handed in."""

    def __init__(self, model: QwenImageTransformer2DModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        latents: Tensor,
        prompt: Tensor,
        prompt_mask: Tensor,
        timestep: Tensor,
        image_rotary_emb: Tensor,
        prompt_rotary_emb: Tensor,
    ) -> Tensor:
        """Predict the image's latents.

        Args:
            latents: packed latents of the image, [B S C].
            prompt: embeddings of the prompt, right-padded, [B T X]; the padding is finite.
            prompt_mask: True in rows of the prompt, bool [B T].
            timestep: in [0, 1], [B].
            image_rotary_emb, prompt_rotary_emb: complex rotary factors, [S D/2] and [T D/2].

        Returns:
            The prediction, [B S C].
        """
        model = self.model
        hidden = model.img_in(latents)
        text = model.txt_in(model.txt_norm(prompt))
        temb = model.time_text_embed(timestep.to(hidden.dtype), hidden)
        for block in model.transformer_blocks:
            text, hidden = block(
                hidden_states=hidden,
                encoder_hidden_states=text,
                encoder_hidden_states_mask=prompt_mask,
                temb=temb,
                image_rotary_emb=(image_rotary_emb, prompt_rotary_emb),
            )
        prediction: Tensor = model.proj_out(model.norm_out(hidden, temb))
        return prediction


def build_tiny() -> DenoisingStep:
    """Random weights, three blocks."""
    model = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=48,
        axes_dims_rope=TINY_AXES,
    )
    return DenoisingStep(model.eval())


def build_full() -> DenoisingStep:
    """The published size, 20 B parameters; run under the meta device it has no weights."""
    return DenoisingStep(QwenImageTransformer2DModel().eval())


@functools.cache
def tiny_rope(device: torch.device) -> QwenEmbedRope:
    """The tables of `build_tiny`'s rotary factors."""
    with device:
        return QwenEmbedRope(theta=10000, axes_dim=list(TINY_AXES), scale_rope=True)


def example_tiny(*, B: int = 2, text: int = 12, height: int = 4, width: int = 6) -> sg.Example:
    """Inputs for `build_tiny`, with prompts of random lengths.

    Args:
        B: batch size.
        text: rows that prompts are padded to.
        height, width: of the image, in patches of 2 x 2 latents; height and width are swapped at random.
    """
    if torch.rand(()) < 0.5:
        height, width = width, height
    latents, prompt, timestep = torch.randn(B, height * width, 16), torch.randn(B, text, 48), torch.rand(B)
    prompt_mask = torch.arange(text) < torch.randint(1, text + 1, (B, 1))
    device = latents.device
    image_rotary_emb, prompt_rotary_emb = tiny_rope(device)([(1, height, width)], device, text)

    def reference(step: Callable[..., object]) -> Tensor:
        assert isinstance(step, DenoisingStep)
        (prediction,) = step.model(
            hidden_states=latents,
            encoder_hidden_states=prompt,
            encoder_hidden_states_mask=prompt_mask,
            timestep=timestep,
            img_shapes=[[(1, height, width)]] * B,
            return_dict=False,
        )
        result: Tensor = prediction
        return result

    return sg.Example(
        {
            "latents": latents,
            "prompt": prompt,
            "prompt_mask": prompt_mask,
            "timestep": timestep,
            "image_rotary_emb": image_rotary_emb,
            "prompt_rotary_emb": prompt_rotary_emb,
        },
        reference=reference,
    )


def example_full(*, B: int = 1, text: int = 512, S: int = 4096) -> dict[str, Tensor]:
    """Layouts for `build_full`; 4096 rows are an image of 1024 x 1024 pixels."""
    return {
        "latents": torch.empty(B, S, 64),
        "prompt": torch.empty(B, text, 3584),
        "prompt_mask": torch.empty(B, text, dtype=torch.bool),
        "timestep": torch.empty(B),
        "image_rotary_emb": torch.empty(S, 64, dtype=torch.complex64),
        "prompt_rotary_emb": torch.empty(text, 64, dtype=torch.complex64),
    }


SPEC = sg.ModelSpec(
    "qwen_image",
    (ATTENTION,),
    inputs={
        "latents": sg.TensorLayout("B S C"),
        "prompt": sg.TensorLayout("B T X", sg.like("latents")),
        "prompt_mask": sg.TensorLayout("B T", torch.bool),
        "timestep": sg.TensorLayout("B"),
        "image_rotary_emb": sg.TensorLayout("S R", torch.complex64),
        "prompt_rotary_emb": sg.TensorLayout("T R", torch.complex64),
    },
    outputs=sg.TensorLayout("B S C", sg.like("latents")),
    eager_only=EAGER_ONLY,
    presets={
        "tiny": sg.Preset(build_tiny, example_tiny, device_dtype=("cpu", torch.bfloat16)),
        "full": sg.Preset(build_full, example_full, device_dtype=("meta", torch.bfloat16)),
    },
)
