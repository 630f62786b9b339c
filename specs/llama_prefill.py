"""Llama (transformers): bucketed prefill into a static cache, broken at attention; see `_prefill`."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specgraph as sg

from . import _prefill as prefill


def build_tiny() -> prefill.Prefill:
    """Random weights, three layers, two query heads a key head."""
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation=prefill.ATTENTION_NAME,
    )
    return prefill.Prefill(LlamaForCausalLM(config).eval(), batch=1, max_cache_len=96)


def build_full() -> prefill.Prefill:
    """The size of Llama 3.1 8B; run under the meta device it has no weights."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        attn_implementation=prefill.ATTENTION_NAME,
    )
    return prefill.Prefill(LlamaForCausalLM(config).eval(), batch=1, max_cache_len=4096)


def example_tiny(*, length: int | None = None, bucket: int = 64) -> sg.Example:
    """A prompt for `build_tiny`; see `prefill.example`."""
    return prefill.example(320, bucket, length)


def example_full(*, bucket: int = 2048) -> sg.Example:
    """Layouts for `build_full`."""
    return sg.Example(
        {"input_ids": torch.empty(1, bucket, dtype=torch.int64), "last": torch.empty(1, dtype=torch.int64)}
    )


SPEC = prefill.prefill_spec(
    "llama_prefill",
    {
        "tiny": sg.Preset(build_tiny, example_tiny, device_dtype=("cpu", torch.bfloat16)),
        "full": sg.Preset(build_full, example_full, device_dtype=("meta", torch.bfloat16)),
    },
)
