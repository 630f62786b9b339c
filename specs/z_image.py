"""Z-Image (diffusers 0.42): one denoising step of the unedited transformer, broken at attention.

Two refiner blocks attend over the image's rows, two over the prompt's, and the main blocks over both. The
model takes lists of images and prompts, an entry for each item of the batch, and pads each to a multiple of
32 rows on the host, by what `len` says. Lengths are therefore frozen: a prompt or an image of another size
needs a capture of its own.

`BatchStep` takes tensors in place of the lists. It also holds the model's rotary tables as buffers: the
model makes them on its first call and keeps them in an object that is no module, where a trace would leave
its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import ZImageTransformer2DModel
from torch import Tensor, nn

import specgraph as sg

from ._diffusion_attention import ATTENTION, EAGER_ONLY


class BatchStep(nn.Module):
    """The model on a batch of images of one size and prompts of one length."""

    def __init__(self, model: ZImageTransformer2DModel) -> None:
        super().__init__()
        self.model = model
        rope = model.rope_embedder
        tables: list[Tensor] = rope.precompute_freqs_cis(rope.axes_dims, rope.axes_lens, theta=rope.theta)
        for axis, table in enumerate(tables):
            # Made on the host, wherever the model is.
            self.register_buffer(f"rope_{axis}", table.to(model.x_pad_token.device), persistent=False)

    def forward(self, latents: Tensor, timestep: Tensor, prompt: Tensor) -> Tensor:
        """Predict the images' latents.

        Args:
            latents: [B C F H W].
            timestep: in [0, 1], 1 the clean image, [B].
            prompt: embeddings of the prompts, [B T X].

        Returns:
            The prediction, [B C F H W].
        """
        rope = self.model.rope_embedder
        rope.freqs_cis = [self.get_buffer(f"rope_{axis}") for axis in range(len(rope.axes_dims))]
        (images,) = self.model(list(latents.unbind()), timestep, list(prompt.unbind()), return_dict=False)
        rope.freqs_cis = None
        return torch.stack(images)


def build_tiny() -> BatchStep:
    """Random weights, two blocks after two refiner blocks each for image and prompt."""
    model = ZImageTransformer2DModel(
        in_channels=4,
        dim=96,
        n_layers=2,
        n_refiner_layers=2,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=40,
        axes_dims=[8, 12, 12],
        axes_lens=[128, 32, 32],
    )
    for name, parameter in model.named_parameters():
        if name.endswith("pad_token"):
            nn.init.normal_(parameter)
    return BatchStep(model.eval())


def build_full() -> BatchStep:
    """The published size, 6 B parameters; run under the meta device it has no weights."""
    return BatchStep(ZImageTransformer2DModel().eval())


def example_tiny(*, B: int = 2, text: int = 20, height: int = 8, width: int = 12) -> sg.Example:
    """Inputs for `build_tiny`.

    Args:
        B: batch size.
        text: rows of the prompts.
        height, width: of the latents; multiples of two.
    """
    latents, timestep, prompt = torch.randn(B, 4, 1, height, width), torch.rand(B), torch.randn(B, text, 40)

    def reference(step: Callable[..., object]) -> Tensor:
        assert isinstance(step, BatchStep)
        # With rotary tables that the model makes itself.
        (images,) = step.model([*latents], timestep, [*prompt], return_dict=False)
        return torch.stack(images)

    return sg.Example({"latents": latents, "timestep": timestep, "prompt": prompt}, reference=reference)


def example_full(*, B: int = 1, text: int = 512, height: int = 128, width: int = 128) -> dict[str, Tensor]:
    """Layouts for `build_full`; 128 x 128 latents are an image of 1024 x 1024 pixels."""
    return {
        "latents": torch.empty(B, 16, 1, height, width),
        "timestep": torch.empty(B),
        "prompt": torch.empty(B, text, 2560),
    }


SPEC = sg.ModelSpec(
    "z_image",
    (ATTENTION,),
    inputs={
        "latents": sg.TensorLayout("B C F H W"),
        "timestep": sg.TensorLayout("B"),
        "prompt": sg.TensorLayout("B T X", sg.like("latents")),
    },
    outputs=sg.TensorLayout("B C F H W", sg.like("latents")),
    eager_only=EAGER_ONLY,
    presets={
        "tiny": sg.Preset(build_tiny, example_tiny, device_dtype=("cpu", torch.bfloat16)),
        "full": sg.Preset(build_full, example_full, device_dtype=("meta", torch.bfloat16)),
    },
)
