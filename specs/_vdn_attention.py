"""Windowed attention with a delta rule for the rest, as a processor of MiniMax-H3's attention modules.

A reference of our own, with random weights. Every video frame attends by softmax to the frames of a window
around it and to a few anchor frames. What lies outside is summed up in two states, one of the past and one
of the future, that the delta rule writes token by token. Where the window covers everything there is
nothing outside, and no second result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3Attention,
    MiniMaxH3RotaryPosEmbed,
    _apply_rotary_emb,
)
from torch import Tensor, nn


def visible_frames(frame: int, frames: int, window: int, anchors: Sequence[int]) -> list[int]:
    """Frames that `frame` attends to by softmax: those up to `window` away, and the anchors."""
    near = range(max(0, frame - window), min(frames, frame + window + 1))
    return sorted({*near, *anchors})


def windowed_softmax(
    query: Tensor, key: Tensor, value: Tensor, frames: int, window: int, anchors: Sequence[int]
) -> Tensor:
    """Softmax attention of each frame over its visible frames; all tensors [B T H D], T a multiple of F."""
    by_frame = [tensor.unflatten(1, (frames, -1)) for tensor in (query, key, value)]
    queries, keys, values = by_frame
    attended = []
    for frame in range(frames):
        seen = visible_frames(frame, frames, window, anchors)
        attended.append(
            dispatch_attention_fn(
                queries[:, frame], keys[:, seen].flatten(1, 2), values[:, seen].flatten(1, 2)
            )
        )
    return torch.cat(attended, dim=1)


def delta_rule(state: Tensor, key: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    """The state after one frame, token by token: S (I - beta k k^T) + beta v k^T.

    Args:
        state: [B H D D], rows by value and columns by key.
        key, value: of the frame, keys of length one, [B R H D].
        beta: how much of what the state holds for a key is replaced, [B R H].
    """
    for row in range(key.shape[1]):
        k, v, b = key[:, row], value[:, row], beta[:, row, :, None]
        held = (state @ k[..., None])[..., 0]
        state = state + (b * (v - held))[..., None] * k[..., None, :]
    return state


def linear_outside(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, frames: int, window: int, anchors: Sequence[int]
) -> Tensor:
    """What the delta rule remembers of the frames that `windowed_softmax` leaves out.

    Args:
        query, key, value: [B T H D].
        beta: in [0, 1], [B T H].
        frames, window, anchors: as for `vdn_attention`.

    Returns:
        [B T H D], in the dtype of `query`; computed in float32.
    """
    q, k, v, b = (each.float().unflatten(1, (frames, -1)) for each in (query, key, value, beta))
    q, k = (nn.functional.normalize(each, dim=-1) for each in (q, k))
    out = torch.zeros_like(q)
    for order in (range(frames), range(frames - 1, -1, -1)):
        state = q.new_zeros(q.shape[0], q.shape[3], q.shape[4], q.shape[4])
        for step, frame in enumerate(order):
            left = order[step - window - 1] if step > window else None
            if left is not None and left not in anchors:
                state = delta_rule(state, k[:, left], v[:, left], b[:, left])
            out[:, frame] += torch.einsum("bhvk,brhk->brhv", state, q[:, frame])
    return out.flatten(1, 2).to(query.dtype)


def vdn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    frames: int,
    window: int,
    anchors: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """Attend by softmax inside the window, by the delta rule outside.

    Args:
        query, key, value: frame by frame, [B T H D].
        beta: write strength of the delta rule, in [0, 1], [B T H].
        frames: number of frames; T is a multiple of it.
        window: frames that are visible on each side of a frame.
        anchors: frames that are visible to all.

    Returns:
        The softmax attention, and, unless the window covers everything, the linear branch, [B T H D] each.
    """
    if window >= frames - 1:
        dense: Tensor = dispatch_attention_fn(query, key, value)
        return (dense.contiguous(),)
    return (
        windowed_softmax(query, key, value, frames, window, anchors),
        linear_outside(query, key, value, beta, frames, window, anchors),
    )


class VdnProcessor(nn.Module):
    """Stands in for `MiniMaxH3AttnProcessor`.

    Args:
        hidden_size, heads: of the attention module.
        frames, window: see `vdn_attention`.
    """

    def __init__(self, hidden_size: int, heads: int, frames: int, window: int) -> None:
        super().__init__()
        self.frames, self.window = frames, window
        self.to_beta = nn.Linear(hidden_size, heads)
        self.to_gate = nn.Linear(hidden_size, heads)

    def forward(
        self,
        attn: MiniMaxH3Attention,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend; [B T C] to [B T C]."""
        to_heads = (attn.heads, -1)
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, to_heads))
        key = attn.norm_k(attn.to_k(hidden_states).unflatten(-1, to_heads))
        value = attn.to_v(hidden_states).unflatten(-1, to_heads)
        query, key = _apply_rotary_emb(query, *rotary_emb), _apply_rotary_emb(key, *rotary_emb)
        beta = self.to_beta(hidden_states).sigmoid()
        attended, *outside = vdn_attention(query, key, value, beta, self.frames, self.window)
        for linear in outside:
            attended = attended + self.to_gate(hidden_states).sigmoid()[..., None] * linear
        out: Tensor = attn.to_out[0](attended.flatten(2, 3))
        return out


class AttentionStep(nn.Module):
    """One attention module of MiniMax-H3 with its rotary embedding.

    Args:
        hidden_size, heads, head_dim: of the module.
        rope_freq_dim: rotary frequencies for each of the three axes.
        processor: None for diffusers' own dense one.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        head_dim: int,
        rope_freq_dim: int,
        processor: VdnProcessor | None = None,
    ) -> None:
        super().__init__()
        self.rope = MiniMaxH3RotaryPosEmbed(rope_freq_dim)
        self.attn = MiniMaxH3Attention(hidden_size, heads, head_dim, processor=processor)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """Attend.

        Args:
            hidden: [B T C].
            position_ids: (t, h, w) of every row, [T 3].

        Returns:
            [B T C].
        """
        out: Tensor = self.attn(hidden, self.rope(position_ids))
        return out


HIDDEN, HEADS, HEAD_DIM, ROPE_FREQ_DIM = 48, 4, 32, 4
FRAMES, SIDE = 6, 2
"""Sizes of the tiny presets; a frame has SIDE x SIDE rows."""


def build_tiny(window: int | None) -> AttentionStep:
    """Random weights; dense where `window` is None."""
    processor = None if window is None else VdnProcessor(HIDDEN, HEADS, FRAMES, window)
    return AttentionStep(HIDDEN, HEADS, HEAD_DIM, ROPE_FREQ_DIM, processor).eval()


def inputs_tiny(batch: int) -> dict[str, Tensor]:
    """Inputs for `build_tiny`."""
    grid = torch.cartesian_prod(torch.arange(FRAMES), torch.arange(SIDE), torch.arange(SIDE))
    return {"hidden": torch.randn(batch, len(grid), HIDDEN), "position_ids": grid.float()}
