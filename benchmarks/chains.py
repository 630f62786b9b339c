"""Chains of transformer blocks, a break at every attention: the work that implementations are compared on.

A block is pre-norm attention (16 heads of 64 at width 1024) and a GELU MLP of four times the width, bf16,
random weights. `Chain` is the same module for everyone; what differs is what `attention` is bound to.
"""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import specgraph as sg

HEAD_DIM = 64


@attrs.frozen
class Size:
    """A chain's size.

    Args:
        blocks: transformer blocks.
        rows: tokens.
        width: of a token.
    """

    blocks: int
    rows: int
    width: int = 1024


SIZES = {"28 blocks": Size(28, 256), "60 blocks": Size(60, 512)}


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain attention; [B S H D] each."""
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


HEADS = sg.TensorLayout("B S H D")
ATTENTION = sg.BreakSpec(
    attention,
    sg.TensorLayout("B S H D", dtype=sg.like("query")),
    inputs={"query": HEADS, "key": HEADS, "value": HEADS},
    fusable=True,
)
SPEC = sg.ModelSpec("chain", (ATTENTION,))


class Block(nn.Module):
    """A pre-norm transformer block over [B S C]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B S C] to [B S C]."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_DIM))
        x = x + self.out(attention(*qkv.unbind(2)).flatten(2))
        hidden: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + hidden


class Chain(nn.Module):
    """Blocks, one after another."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.blocks))

    def forward(self, x: Tensor) -> Tensor:
        """[B S C] to [B S C]."""
        for block in self.blocks:
            x = block(x)
        return x


def build(size: Size, device: torch.device) -> tuple[Chain, Tensor]:
    """A chain and an input for it, the same for the same size."""
    torch.manual_seed(0)
    chain = Chain(size).eval().to(device, torch.bfloat16)
    return chain, torch.randn(1, size.rows, size.width, device=device, dtype=torch.bfloat16)
