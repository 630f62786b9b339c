"""MiniMax-H3 (diffusers 0.42): one denoising step, broken at its embedding and at attention.

Text, audio and video share one packed sequence, in the order in which diffusers' pipeline packs them. The
text rows come first and are left-padded to a bucket, so that one capture serves every prompt up to the
bucket: the embedding takes the live rows of the text alone, and attention drops the keys of the others.

The embedding is PASS_THROUGH: it writes the rows of each modality, and the time embedding, where the
segments after it read them.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_minimax_h3
from torch import Tensor, nn

import specgraph as sg

VIDEO, TEXT, AUDIO = 0, 1, 2
"""Tags that the model's modulation tables go by."""


@sg.graph_break(
    (
        sg.TensorLayout("B T+A+V C", dtype=sg.like("hidden_like")),
        sg.TensorLayout("N E", dtype=sg.like("time_like")),
    ),
    inputs={
        "text": sg.TensorLayout("B T X"),
        "audio": sg.TensorLayout("B A Y"),
        "video": sg.TensorLayout("B V P"),
        "timestep": sg.TensorLayout("N"),
        "hidden_like": sg.TensorLayout("C"),
        "time_like": sg.TensorLayout("E"),
    },
    ownership=sg.Ownership.PASS_THROUGH,
    out=("packed", "temb"),
    live={"text_pad": "text_pad"},
    fusable=True,
    fills_padding=True,
)
def embed(
    model: MiniMaxH3Transformer3DModel,
    text: Tensor,
    audio: Tensor,
    video: Tensor,
    timestep: Tensor,
    hidden_like: Tensor,
    time_like: Tensor,
    *,
    text_pad: int = 0,
    packed: Tensor | None = None,
    temb: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Project each modality into its rows of the packed sequence, and embed the timesteps.

    Args:
        model: whose projections embed.
        text: left-padded, [B T X].
        audio: [B A Y].
        video: patchified latents, [B V P].
        timestep: the distinct timesteps, in [0, 1], [N].
        hidden_like: any parameter [C] of the block stack; gives the packed rows their size and dtype.
        time_like: any parameter [E] of the time embedder; gives its result its size and dtype.
        text_pad: rows of padding before the text; what they hold does not matter.
        packed: receives the rows, [B T+A+V C]; those of the padding are zero.
        temb: receives the time embedding, [N E].

    Returns:
        `packed` and `temb`; fresh tensors where they are None.
    """
    batch, num_text, _ = text.shape
    first_video = num_text + audio.shape[1]
    if packed is None or temb is None:
        packed = hidden_like.new_empty(batch, first_video + video.shape[1], len(hidden_like))
        temb = time_like.new_empty(len(timestep), len(time_like))
    live_text = model.context_embedder(text[:, text_pad:].to(model.context_embedder.weight.dtype))
    packed[:, :text_pad].zero_()
    packed[:, text_pad:num_text].copy_(model.token_refiner(live_text))
    packed[:, num_text:first_video].copy_(model.audio_proj_in(audio.to(model.audio_proj_in.weight.dtype)))
    packed[:, first_video:].copy_(model.proj_in(video.to(model.proj_in.weight.dtype)))
    temb.copy_(model.time_embedder(model.time_proj(timestep).to(time_like.dtype)))
    return packed, temb


class PackedStep(nn.Module):
    """The model's `forward`, through the same submodules, with the embedding as one call."""

    def __init__(self, model: MiniMaxH3Transformer3DModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        text: Tensor,
        audio: Tensor,
        video: Tensor,
        timestep: Tensor,
        timestep_indices: Tensor,
        token_tags: Tensor,
        position_ids: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Predict the velocities of the video and the audio rows.

        Args:
            text, audio, video, timestep: as `embed` takes them.
            timestep_indices: into `timestep`, of every packed row, int64 [S], S = T+A+V.
            token_tags: modality of every packed row, int64 [S].
            position_ids: (t, h, w) of every packed row, [S 3].

        Returns:
            Those of the video, [B V P], and of the audio, [B A Y].
        """
        model = self.model
        rotary_emb = model.rope(position_ids)
        hidden, temb = embed(
            model,
            text,
            audio,
            video,
            timestep,
            hidden_like=model.context_embedder.bias,
            time_like=model.time_embedder.linear_2.bias,
        )
        table_rows = timestep_indices * transformer_minimax_h3.MINIMAX_H3_MODALITY_NUM + token_tags
        for block in model.transformer_blocks:
            hidden = block(hidden, temb, table_rows, rotary_emb)
        hidden = model.norm_out(hidden, temb, timestep_indices).to(model.proj_out.weight.dtype)
        first_audio, first_video = text.shape[1], text.shape[1] + audio.shape[1]
        velocities: Tensor = model.proj_out(hidden)
        audio_velocities: Tensor = model.audio_proj_out(hidden)
        return velocities[:, first_video:], audio_velocities[:, first_audio:first_video]


def attention_without_padding(
    query: Tensor, key: Tensor, value: Tensor, *args: object, text_pad: int, **kwargs: object
) -> Tensor:
    """diffusers' attention over all keys but the first `text_pad`."""
    out: Tensor = dispatch_attention_fn(query, key[:, text_pad:], value[:, text_pad:], *args, **kwargs)
    return out.contiguous()


ATTENTION = sg.BreakSpec(
    dispatch_attention_fn,
    sg.TensorLayout("B S H D", dtype=sg.like("query")),
    inputs={
        "query": sg.TensorLayout("B S H D"),
        "key": sg.TensorLayout("B S H D", dtype=sg.like("query")),
        "value": sg.TensorLayout("B S H D", dtype=sg.like("query")),
    },
    body=attention_without_padding,
    live={"text_pad": "text_pad"},
    fusable=True,
    name="attention",
)


def as_published(model: MiniMaxH3Transformer3DModel) -> PackedStep:
    """The step of a model whose dtypes are mixed the way the checkpoint's are."""
    for name, module in model.named_children():
        if name in model._keep_in_fp32_modules:
            module.float()
    return PackedStep(model.eval())


def build_tiny() -> PackedStep:
    """Random weights, three layers."""
    return as_published(
        MiniMaxH3Transformer3DModel(
            num_attention_heads=4,
            attention_head_dim=32,
            hidden_size=64,
            num_layers=3,
            num_refiner_layers=2,
            ffn_dim=96,
            in_channels=4,
            audio_in_channels=8,
            text_dim=48,
            freq_dim=32,
            time_embed_hidden_dim=64,
            time_embed_dim=40,
            rope_freq_dim=4,
        )
    )


def build_full() -> PackedStep:
    """The published size; run under the meta device it has no weights."""
    return as_published(MiniMaxH3Transformer3DModel())


def packed_layout(text: int, text_pad: int, audio: int, frames: int, side: int) -> dict[str, Tensor]:
    """What describes the packed rows: the target's video at timestep 0 of the step, the audio at timestep 1.

    Args:
        text: rows of text, padding included.
        text_pad: rows of padding among them, the first ones.
        audio: rows of audio.
        frames, side: of the video, in patches; a frame has side x side rows.
    """
    num_video = frames * side * side
    tags = torch.tensor([TEXT, AUDIO, VIDEO]).repeat_interleave(torch.tensor([text, audio, num_video]))
    start = text - text_pad
    text_grid = torch.zeros(text, 3)
    text_grid[:, 0] = torch.arange(-text_pad, start)
    audio_grid = torch.zeros(audio, 3)
    audio_grid[:, 0] = torch.arange(start, start + audio)
    axes = (torch.arange(start, start + frames), torch.arange(side), torch.arange(side))
    video_grid = torch.cartesian_prod(*axes).to(text_grid.dtype)
    return {
        "timestep_indices": (tags == AUDIO).to(torch.int64),
        "token_tags": tags,
        "position_ids": torch.cat([text_grid, audio_grid, video_grid]).float(),
    }


def run_unedited(
    model: MiniMaxH3Transformer3DModel, inputs: dict[str, Tensor], text_pad: int
) -> tuple[Tensor, Tensor]:
    """What diffusers' own `forward` predicts over the same packed rows.

    It is given the live rows of the text, and leaves the rows before them zero; all that stands in for
    anything of diffusers' is an attention call over the packed rows without the first `text_pad` keys.
    """
    text, audio, num_rows = inputs["text"], inputs["audio"], len(inputs["token_tags"])
    rows = torch.arange(num_rows, device=text.device)
    first_audio, first_video = text.shape[1], text.shape[1] + audio.shape[1]

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:
        # The refiner attends to the live rows of the text alone.
        pad = text_pad if key.shape[1] == num_rows else 0
        out: Tensor = dispatch_attention_fn(query, key[:, pad:], value[:, pad:], *args, **kwargs)
        return out

    with mock.patch.object(transformer_minimax_h3, "dispatch_attention_fn", attention):
        video_velocities, audio_velocities = model(
            hidden_states=inputs["video"],
            audio_hidden_states=audio,
            encoder_hidden_states=text[:, text_pad:],
            timestep=inputs["timestep"],
            timestep_indices=inputs["timestep_indices"],
            token_tags=inputs["token_tags"],
            position_ids=inputs["position_ids"],
            text_indices=rows[text_pad:first_audio],
            audio_indices=rows[first_audio:first_video],
            video_indices=rows[first_video:],
            return_dict=False,
        )
    return video_velocities, audio_velocities


def example_tiny(
    *, B: int = 1, text: int | None = None, bucket: int = 24, audio: int = 10, frames: int = 3, side: int = 4
) -> sg.Example:
    """Inputs for `build_tiny`.

    Args:
        B: batch size.
        text: rows of the text; drawn at random where it is None.
        bucket: rows the text is padded to.
        audio: rows of the audio.
        frames, side: of the video, in patches.
    """
    rows = int(torch.randint(1, bucket + 1, ())) if text is None else text
    pad = bucket - rows
    inputs = {
        # What the padding holds must not matter.
        "text": torch.cat([torch.full((B, pad, 48), float("nan")), torch.randn(B, rows, 48)], dim=1),
        "audio": torch.randn(B, audio, 8),
        "video": torch.randn(B, frames * side * side, 16),
        "timestep": torch.rand(2, dtype=torch.float32),
        **packed_layout(bucket, pad, audio, frames, side),
    }

    def reference(step: Callable[..., object]) -> tuple[Tensor, Tensor]:
        assert isinstance(step, PackedStep)
        return run_unedited(step.model, inputs, pad)

    return sg.Example(inputs, live={"text_pad": pad}, reference=reference)


def example_full(
    *, B: int = 1, bucket: int = 512, audio: int = 256, frames: int = 16, side: int = 16
) -> sg.Example:
    """Layouts for `build_full`: 4864 packed rows."""
    return sg.Example(
        {
            "text": torch.empty(B, bucket, 5120),
            "audio": torch.empty(B, audio, 32),
            "video": torch.empty(B, frames * side * side, 96),
            "timestep": torch.empty(2, dtype=torch.float32),
            "timestep_indices": torch.empty(bucket + audio + frames * side * side, dtype=torch.int64),
            "token_tags": torch.empty(bucket + audio + frames * side * side, dtype=torch.int64),
            "position_ids": torch.empty(bucket + audio + frames * side * side, 3, dtype=torch.float32),
        },
        live={"text_pad": 0},
    )


SPEC = sg.ModelSpec(
    "minimax_h3",
    (embed.spec, ATTENTION),
    inputs={
        "text": sg.TensorLayout("B T X"),
        "audio": sg.TensorLayout("B A Y", sg.like("text")),
        "video": sg.TensorLayout("B V P", sg.like("text")),
        "timestep": sg.TensorLayout("N", torch.float32),
        "timestep_indices": sg.TensorLayout("T+A+V", torch.int64),
        "token_tags": sg.TensorLayout("T+A+V", torch.int64),
        "position_ids": sg.TensorLayout("T+A+V 3", torch.float32),
    },
    outputs=(sg.TensorLayout("B V P", torch.float32), sg.TensorLayout("B A Y", torch.float32)),
    live=("text_pad",),
    eager_only=("aten::*scaled_dot_product*",),
    presets={
        "tiny": sg.Preset(build_tiny, example_tiny, device_dtype=("cpu", torch.bfloat16)),
        "full": sg.Preset(build_full, example_full, device_dtype=("meta", torch.bfloat16)),
    },
)
