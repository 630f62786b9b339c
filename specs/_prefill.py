"""What the prefill specs share: a Hugging Face causal model over a static cache, broken at attention.

transformers calls attention through its registry, by the name in the model's config; the function that is
registered here breaks the graph. The prompt is padded to a bucket, its true length is a live value, and
attention runs over the live rows alone. Nothing of transformers is edited.

The static cache is state: its tensors are buffers of the captured module, the segments write them in place,
and what reads them next (a decoding step) finds the prompt's keys and values in their first rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel, StaticCache

import specgraph as sg

BUCKETS = (32, 64, 128, 256, 512, 1024, 2048)
"""Captured prompt lengths."""


@sg.graph_break(
    sg.TensorLayout("B S H D", dtype=sg.like("query")),
    inputs={
        "query": sg.TensorLayout("B H S D"),
        "key": sg.TensorLayout("B G M D", dtype=sg.like("query")),
        "value": sg.TensorLayout("B G M D", dtype=sg.like("query")),
    },
    ownership=sg.Ownership.PASS_THROUGH,
    out="out",
    live={"length": "S"},
    fusable=True,
    name="attention",
)
def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    *,
    length: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of a prompt over the first rows of the cache.

    Args:
        query: [B H S D].
        key, value: the cache, the prompt's rows first, [B G M D]; G divides H.
        scaling: factor of the scores; None: D**-0.5.
        length: live rows of the prompt; None: all.
        out: receives the live rows, [B S H D].

    Returns:
        `out`; a fresh tensor where it is None.
    """
    if out is None:
        out = query.new_zeros(query.transpose(1, 2).shape)
    rows = slice(query.shape[2] if length is None else length)
    attended = scaled_dot_product_attention(
        query[:, :, rows],
        key[:, :, rows],
        value[:, :, rows],
        is_causal=True,
        scale=scaling,
        enable_gqa=True,
    )
    out[:, rows].copy_(attended.transpose(1, 2))
    return out


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """`causal_attention` in the signature that transformers calls attention functions with."""
    return causal_attention(query, key, value, scaling), None


ATTENTION_NAME = "specgraph_prefill"
"""`attn_implementation` of a model that breaks at attention; it makes transformers build no mask."""

AttentionInterface.register(ATTENTION_NAME, attention_forward)


class Prefill(nn.Module):
    """A causal model and its static cache.

    Args:
        model: built with `attn_implementation=ATTENTION_NAME`.
        batch: prompts at a time.
        max_cache_len: rows of the cache.
    """

    def __init__(self, model: PreTrainedModel, *, batch: int, max_cache_len: int) -> None:
        super().__init__()
        self.model = model
        config, weight = model.config, model.get_input_embeddings().weight
        self.cache = StaticCache(config=config, max_cache_len=max_cache_len)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # Made on the first call, the cache would be made under capture.
        self.cache.early_initialization(
            batch, config.num_key_value_heads, head_dim, weight.dtype, weight.device
        )
        for index, layer in enumerate(self.cache.layers):
            for name, each in vars(layer).items():
                if isinstance(each, Tensor):
                    self.register_buffer(f"cache_{index}_{name}", each, persistent=False)

    def forward(self, input_ids: Tensor, last: Tensor) -> Tensor:
        """Fill the cache from its first row on.

        Args:
            input_ids: int64 [B S].
            last: row whose logits are wanted, int64 [1].

        Returns:
            Logits of the next token, [B 1 V].
        """
        self.cache.reset()
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        # The cache's keyword is another one in other versions, its position is not.
        logits: Tensor = self.model(input_ids, None, positions, self.cache, logits_to_keep=last).logits
        return logits


def example(vocab_size: int, bucket: int, length: int | None) -> sg.Example:
    """A prompt of `length` tokens, drawn at random where that is None, padded to `bucket`.

    Where there is no padding, the unedited model runs the same shapes, and is the reference.
    """
    rows = int(torch.randint(1, bucket + 1, ())) if length is None else length
    prompt = torch.randint(1, vocab_size, (1, rows))
    input_ids = torch.cat([prompt, prompt.new_zeros(1, bucket - rows)], dim=1)

    def reference(step: Callable[..., object]) -> Tensor:
        assert isinstance(step, Prefill)
        return run_unedited(step.model, prompt)

    return sg.Example(
        {"input_ids": input_ids, "last": torch.tensor([rows - 1])},
        live={"S": rows},
        reference=reference if rows == bucket else None,
    )


def run_unedited(model: PreTrainedModel, prompt: Tensor) -> Tensor:
    """Logits of the last token by the model with transformers' own attention and no static cache."""
    model.set_attn_implementation("sdpa")
    try:
        logits: Tensor = model(prompt, use_cache=False, logits_to_keep=1).logits
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return logits


def prefill_spec(name: str, presets: Mapping[str, sg.Preset]) -> sg.ModelSpec:
    """The spec of a model under `Prefill`."""
    return sg.ModelSpec(
        name,
        (causal_attention.spec,),
        inputs={
            "input_ids": sg.TensorLayout("B S", torch.int64),
            "last": sg.TensorLayout("1", torch.int64),
        },
        outputs=sg.TensorLayout("B 1 V", torch.bfloat16),
        buckets={"S": BUCKETS},
        eager_only=("aten::*scaled_dot_product*",),
        presets=presets,
    )
