"""Qwen-Image 2.1 (diffusers 0.42): the cached denoising step, broken at attention.

The keys and values of the prompt prefix are left-padded to a bucket and handed in as one static tensor,
so that one capture serves every prompt up to the bucket. The attention call is the break; its body drops
the padded rows, so that a padded replay computes what the unedited model computes without padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21KVCache,
    QwenImage21Rope,
)
from torch import Tensor, nn

import specgraph as sg

TOKENS_PER_SLOT = 4
"""Latent tokens that one image slot of the vision-language encoder stands for."""


class CachedStep(nn.Module):
    """The model's cached denoising step without the parts that sync with the host.

    The model's own `forward` builds token metadata from masks on the host first; what it computes for
    the target image afterwards is this, through the same submodules.
    """

    def __init__(self, model: QwenImage21Transformer2DModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, latents: Tensor, timestep: Tensor, rotary_emb: Tensor, prefix_kv: Tensor) -> Tensor:
        """Predict the target image's latents.

        Args:
            latents: target latents, [B T C].
            timestep: in [0, 1], [B].
            rotary_emb: complex rotary factors of the target tokens, [T D/2].
            prefix_kv: post-RoPE keys and values of the prefix by layer, left-padded, [L 2 B P H D].

        Returns:
            The prediction, [B T C].
        """
        model = self.model
        hidden = model.img_in(latents)
        timestep = timestep.to(hidden.dtype)
        # Prefix tokens are modulated from t=0, in the last row; all tokens here are the target's.
        temb = model.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]), hidden)
        modulation = model.modulation(temb)
        is_target = torch.ones(latents.shape[1], dtype=torch.bool, device=latents.device)
        cache = QwenImage21KVCache(len(model.transformer_blocks))
        for index, block in enumerate(model.transformer_blocks):
            layer = cache.get_layer(index)
            layer.store(prefix_kv[index, 0], prefix_kv[index, 1])
            hidden = block(
                hidden_states=hidden,
                modulation=modulation,
                rotary_emb=rotary_emb,
                target_token_mask=is_target,
                layer_cache=layer,
                kv_cache_mode="cached",
            )
        prediction: Tensor = model.proj_out(model.norm_out(hidden, temb, is_target))
        return prediction


def attention_without_padding(
    query: Tensor, key: Tensor, value: Tensor, *args: object, prefix_pad: int, **kwargs: object
) -> Tensor:
    """diffusers' attention over all keys but the first `prefix_pad`."""
    out: Tensor = dispatch_attention_fn(query, key[:, prefix_pad:], value[:, prefix_pad:], *args, **kwargs)
    return out.contiguous()


ATTENTION = sg.BreakSpec(
    dispatch_attention_fn,
    sg.TensorLayout("B T H D", dtype=sg.like("query")),
    inputs={
        "query": sg.TensorLayout("B T H D"),
        "key": sg.TensorLayout("B KV H D", dtype=sg.like("query")),
        "value": sg.TensorLayout("B KV H D", dtype=sg.like("query")),
    },
    body=attention_without_padding,
    live={"prefix_pad": "prefix_pad"},
    fusable=True,
    name="attention",
)


def build_tiny() -> CachedStep:
    """Random weights, four layers."""
    model = QwenImage21Transformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        context_in_dim=64,
        axes_dims_rope=(8, 12, 12),
    )
    return CachedStep(model.eval())


def build_full() -> CachedStep:
    """The published size; run under the meta device it has no weights."""
    return CachedStep(QwenImage21Transformer2DModel().eval())


def run_unedited(
    model: QwenImage21Transformer2DModel,
    latents: Tensor,
    timestep: Tensor,
    prefix_kv: Tensor,
    height: int,
    width: int,
) -> Tensor:
    """What diffusers' own `forward` predicts, with the prefix unpadded."""
    batch, device = latents.shape[0], latents.device
    num_layers, rows = prefix_kv.shape[0], prefix_kv.shape[3]
    cache = QwenImage21KVCache(num_layers)
    for index in range(num_layers):
        cache.get_layer(index).store(prefix_kv[index, 0], prefix_kv[index, 1])
    slots = torch.arange(rows + height * width // TOKENS_PER_SLOT, device=device)
    (prediction,) = model(
        hidden_states=latents,
        # Projected, then dropped in favour of the cache.
        encoder_hidden_states=latents.new_zeros(batch, rows, model.config.context_in_dim),
        timestep=timestep,
        img_shapes=[[(1, height, width)]] * batch,
        img_mask=(slots >= rows).expand(batch, -1),
        kv_cache=cache,
        kv_cache_mode="cached",
        return_dict=False,
    )
    result: Tensor = prediction
    return result


def target_rotary_emb(rows: int, height: int, width: int, axes: tuple[int, int, int]) -> Tensor:
    """The target image's rotary factors after a prefix of `rows`, complex [T D/2], on the host's terms."""
    rope = QwenImage21Rope(10000, list(axes))
    is_image = torch.arange(rows + height * width) >= rows
    factors: Tensor = rope([(1, height, width)], is_image, is_image.device)
    return factors[rows:]


def example_tiny(
    *, B: int = 1, height: int = 8, width: int = 8, prefix: int | None = None, bucket: int = 128
) -> sg.Example:
    """Inputs for `build_tiny`.

    Args:
        B: batch size.
        height, width: of the target image, in latent tokens; multiples of two.
        prefix: rows of the prefix; drawn at random where it is None.
        bucket: rows the prefix is padded to.
    """
    rows = int(torch.randint(1, bucket + 1, ())) if prefix is None else prefix
    latents = torch.randn(B, height * width, 16)
    timestep = torch.rand(B)
    prefix_kv = torch.randn(4, 2, B, rows, 4, 32)
    # What the padding holds must not matter.
    padding = torch.full((4, 2, B, bucket - rows, 4, 32), float("nan"))

    def reference(step: Callable[..., object]) -> Tensor:
        assert isinstance(step, CachedStep)
        return run_unedited(step.model, latents, timestep, prefix_kv, height, width)

    return sg.Example(
        {
            "latents": latents,
            "timestep": timestep,
            "rotary_emb": target_rotary_emb(rows, height, width, (8, 12, 12)),
            "prefix_kv": torch.cat([padding, prefix_kv], dim=3),
        },
        live={"prefix_pad": bucket - rows},
        reference=reference,
    )


def example_full(*, B: int = 1, T: int = 4096, bucket: int = 128) -> sg.Example:
    """Layouts for `build_full`; 4096 target tokens are an image of 1024 x 1024 pixels."""
    return sg.Example(
        {
            "latents": torch.empty(B, T, 64),
            "timestep": torch.empty(B),
            "rotary_emb": torch.empty(T, 64, dtype=torch.complex64),
            "prefix_kv": torch.empty(32, 2, B, bucket, 32, 128),
        },
        live={"prefix_pad": 0},
    )


SPEC = sg.ModelSpec(
    "qwen_image21",
    (ATTENTION,),
    inputs={
        "latents": sg.TensorLayout("B T C"),
        "timestep": sg.TensorLayout("B"),
        "rotary_emb": sg.TensorLayout("T R", torch.complex64),
        "prefix_kv": sg.TensorLayout("L 2 B P H D", sg.like("latents")),
    },
    outputs=sg.TensorLayout("B T C", sg.like("latents")),
    live=("prefix_pad",),
    eager_only=("aten::*scaled_dot_product*",),
    presets={
        "tiny": sg.Preset(build_tiny, example_tiny, device_dtype=("cpu", torch.bfloat16)),
        "full": sg.Preset(build_full, example_full, device_dtype=("meta", torch.bfloat16)),
    },
)
