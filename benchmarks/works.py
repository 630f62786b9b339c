"""The work that contenders are timed on: models with specs, of known sizes, on random data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from diffusers import MiniMaxH3Transformer3DModel, QwenImage21Transformer2DModel
from torch import Tensor

import specgraph as sg
from benchmarks import chains
from specgraph.bench import Case
from specgraph.verify import BuiltPreset, build_preset
from specs import minimax_h3, qwen_image21

HEADS, HEAD_DIM = 16, 64
PREFIX, PREFIX_PAD = 384, 128
"""Rows of keys and values before those of the queries, and how many of them are padding."""


def attention_without_prefix_padding(
    query: Tensor, key: Tensor, value: Tensor, *, prefix_pad: int = 0
) -> Tensor:
    """Attention over all keys but the first `prefix_pad`; [B S H D] each."""
    return chains.attention(query, key[:, prefix_pad:], value[:, prefix_pad:])


def prefix_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over a padded prefix; [B S H D] each. The body drops the padding."""
    return chains.attention(query, key, value)


def attention_plus_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The smallest model with a break in it."""
    return prefix_attention(query, key, value) + 1


KEYS = sg.TensorLayout("B KV H D", dtype=sg.like("query"))
PREFIX_SPEC = sg.ModelSpec(
    "prefix_attention",
    (
        sg.BreakSpec(
            prefix_attention,
            sg.TensorLayout("B Q H D", dtype=sg.like("query")),
            inputs={"query": sg.TensorLayout("B Q H D"), "key": KEYS, "value": KEYS},
            body=attention_without_prefix_padding,
            live={"prefix_pad": "prefix_pad"},
            fusable=True,
        ),
    ),
    live=("prefix_pad",),
)


def prefix_case(rows: int, device: torch.device) -> Case:
    """Prefix attention of `rows` queries."""
    torch.manual_seed(0)

    def randn(length: int) -> Tensor:
        return torch.randn(1, length, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)

    inputs = {"query": randn(rows), "key": randn(rows + PREFIX), "value": randn(rows + PREFIX)}
    return Case(attention_plus_one, PREFIX_SPEC, sg.Example(inputs, {"prefix_pad": PREFIX_PAD}), device)


def chain_case(size: chains.Size, device: torch.device) -> Case:
    """A chain of transformer blocks."""
    chain, x = chains.build(size, device)
    return Case(chain, chains.SPEC, sg.Example({"x": x}), device)


def tiny_case(spec: sg.ModelSpec, device: torch.device, **dims: int) -> Case:
    """The tiny preset of one of the specs."""
    built = build_preset(spec.presets["tiny"], dims, device)
    return Case(built.fn, spec, built.example(seed=0), built.device)


def preset_case(spec: sg.ModelSpec, build: Callable[[], Any], example: Any, device: torch.device) -> Case:
    """A size of a spec's model that is none of its presets."""
    preset = sg.Preset(build, example, device_dtype=(device, torch.bfloat16))
    built: BuiltPreset = build_preset(preset, {}, device)
    return Case(built.fn, spec, built.example(seed=0), device)


QWEN_LAYERS, QWEN_HEADS, QWEN_HEAD_DIM, QWEN_SIDE, QWEN_BUCKET = 8, 24, 128, 32, 128


def build_mid_qwen() -> qwen_image21.CachedStep:
    """8 layers at width 3072: 1.06 B parameters, random."""
    model = QwenImage21Transformer2DModel(num_layers=QWEN_LAYERS, num_attention_heads=QWEN_HEADS)
    return qwen_image21.CachedStep(model.eval())


def example_mid_qwen() -> sg.Example:
    """An image of 1024 latent tokens after a prefix of 96 in a bucket of 128."""
    rows = 96
    shape = (QWEN_LAYERS, 2, 1, QWEN_BUCKET, QWEN_HEADS, QWEN_HEAD_DIM)
    inputs = {
        "latents": torch.randn(1, QWEN_SIDE * QWEN_SIDE, 64),
        "timestep": torch.rand(1),
        "rotary_emb": qwen_image21.target_rotary_emb(rows, QWEN_SIDE, QWEN_SIDE, (16, 56, 56)),
        "prefix_kv": torch.randn(shape),
    }
    return sg.Example(inputs, live={"prefix_pad": QWEN_BUCKET - rows})


def build_mid_h3() -> minimax_h3.PackedStep:
    """24 blocks at width 1536: 1.0 B parameters, random."""
    return minimax_h3.as_published(
        MiniMaxH3Transformer3DModel(
            num_attention_heads=12,
            hidden_size=1536,
            num_layers=24,
            ffn_dim=4096,
            time_embed_hidden_dim=1536,
            time_embed_dim=384,
        )
    )


def example_mid_h3() -> sg.Example:
    """1408 packed rows: 96 of text in a bucket of 128, 256 of audio, 4 frames of 16 x 16."""
    bucket, pad, audio, frames, side = 128, 32, 256, 4, 16
    inputs = {
        "text": torch.randn(1, bucket, 5120),
        "audio": torch.randn(1, audio, 32),
        "video": torch.randn(1, frames * side * side, 96),
        "timestep": torch.rand(2, dtype=torch.float32),
        **minimax_h3.packed_layout(bucket, pad, audio, frames, side),
    }
    return sg.Example(inputs, live={"text_pad": pad})


@attrs.frozen(eq=False)
class Work:
    """A case that is built when it is wanted.

    Args:
        build: builds it on a device.
        calls: in a batch: 200, fewer where a call takes many milliseconds.
    """

    build: Callable[[torch.device], Case]
    calls: int = 200


WORKS = {
    "prefix attention, Q=256": Work(lambda device: prefix_case(256, device)),
    "prefix attention, Q=2048": Work(lambda device: prefix_case(2048, device)),
    "28 blocks": Work(lambda device: chain_case(chains.SIZES["28 blocks"], device)),
    "60 blocks": Work(lambda device: chain_case(chains.SIZES["60 blocks"], device)),
    "Qwen-Image 2.1, tiny": Work(lambda device: tiny_case(qwen_image21.SPEC, device, prefix=96)),
    "MiniMax-H3, tiny": Work(lambda device: tiny_case(minimax_h3.SPEC, device, text=16)),
    "Qwen-Image 2.1, 1.06 B": Work(
        lambda device: preset_case(qwen_image21.SPEC, build_mid_qwen, example_mid_qwen, device), calls=50
    ),
    "MiniMax-H3, 1.0 B": Work(
        lambda device: preset_case(minimax_h3.SPEC, build_mid_h3, example_mid_h3, device), calls=50
    ),
}
