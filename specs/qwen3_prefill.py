"""Qwen3 (transformers): bucketed prefill into a static cache, broken at attention; see `_prefill`."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import specgraph as sg

from . import _prefill as prefill


def build_tiny() -> prefill.Prefill:
    """Random weights, three layers, four query heads a key head, heads of 128 channels together."""
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        attn_implementation=prefill.ATTENTION_NAME,
    )
    return prefill.Prefill(Qwen3ForCausalLM(config).eval(), batch=1, max_cache_len=96)


def build_full() -> prefill.Prefill:
    """The size of Qwen3 8B; run under the meta device it has no weights."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        attn_implementation=prefill.ATTENTION_NAME,
    )
    return prefill.Prefill(Qwen3ForCausalLM(config).eval(), batch=1, max_cache_len=4096)


def example_tiny(*, length: int | None = None, bucket: int = 64) -> sg.Example:
    """A prompt for `build_tiny`; see `prefill.example`."""
    return prefill.example(320, bucket, length)


def example_full(*, bucket: int = 2048) -> sg.Example:
    """Layouts for `build_full`."""
    return sg.Example(
        {"input_ids": torch.empty(1, bucket, dtype=torch.int64), "last": torch.empty(1, dtype=torch.int64)}
    )


SPEC = prefill.prefill_spec(
    "qwen3_prefill",
    {
        "tiny": sg.Preset(build_tiny, example_tiny, device_dtype=("cpu", torch.bfloat16)),
        "full": sg.Preset(build_full, example_full, device_dtype=("meta", torch.bfloat16)),
    },
)
