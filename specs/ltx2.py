"""LTX-2 (diffusers 0.42): one denoising step of the unedited transformer, broken at attention.

Video and audio have a tower each. A block attends six times: each tower over its own rows, each from its
rows to its prompt's, from the video to the audio and from the audio to the video.

Timesteps, masks and positions are inputs. The positions are handed in, as the pipeline does: left to itself
the model would compute them from its sizes through literals copied from the host, which CUDA refuses to
capture.
"""

from __future__ import annotations

import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor, nn

import specgraph as sg

from ._diffusion_attention import ATTENTION, EAGER_ONLY

VIDEO_SCALE = (8, 32, 32)
"""Pixels that a video latent stands for: frames, rows, columns."""

AUDIO_LATENTS_PER_SECOND = 25


def build_tiny() -> nn.Module:
    """Random weights, two blocks; the video tower is twice as wide as the audio tower."""
    model: nn.Module = LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=32,
        cross_attention_dim=128,
        audio_in_channels=6,
        audio_out_channels=6,
        audio_num_attention_heads=4,
        audio_attention_head_dim=16,
        audio_cross_attention_dim=64,
        num_layers=2,
        caption_channels=40,
        rope_type="split",
    )
    return model.eval()


def build_full(num_layers: int = 48) -> nn.Module:
    """The published size, 19 B parameters in 48 blocks; run under the meta device it has no weights."""
    model: nn.Module = LTX2VideoTransformer3DModel(num_layers=num_layers, rope_type="split")
    return model.eval()


def video_positions(frames: int, height: int, width: int, fps: float) -> Tensor:
    """Where each video row starts and ends, in seconds and pixels, [3 frames*height*width 2]."""
    axes = (torch.arange(frames), torch.arange(height), torch.arange(width))
    first = torch.cartesian_prod(*axes).T.float()
    scale = torch.tensor(VIDEO_SCALE).reshape(3, 1, 1)
    positions = torch.stack([first, first + 1], dim=-1) * scale
    # The first latent frame stands for a single frame of the video.
    positions[0] = (positions[0] + 1 - VIDEO_SCALE[0]).clamp(min=0) / fps
    return positions


def audio_positions(rows: int) -> Tensor:
    """Where each audio row starts and ends, in seconds, [1 rows 2]."""
    ends = torch.arange(rows + 1, dtype=torch.float32) / AUDIO_LATENTS_PER_SECOND
    return torch.stack([ends[:-1], ends[1:]], dim=-1)[None]


def prompt_bias_mask(B: int, text: int) -> Tensor:
    """1 in the rows of left-padded prompts of random lengths, 0 in their padding, int64 [B text]."""
    padding = torch.randint(0, text, (B, 1))
    return (torch.arange(text) >= padding).to(torch.int64)


def example_tiny(
    *, B: int = 2, text: int = 12, frames: int = 3, height: int = 2, width: int = 4, audio: int = 10
) -> dict[str, object]:
    """Inputs for `build_tiny`.

    Args:
        B: batch size.
        text: rows of the prompt, padding included.
        frames, height, width: of the video latents.
        audio: rows of the audio latents.
    """
    video = frames * height * width
    timestep = torch.rand(B) * 1000
    mask = prompt_bias_mask(B, text)
    fps = float(torch.randint(12, 31, ()))
    return {
        "hidden_states": torch.randn(B, video, 8),
        "audio_hidden_states": torch.randn(B, audio, 6),
        "encoder_hidden_states": torch.randn(B, text, 40),
        "audio_encoder_hidden_states": torch.randn(B, text, 40),
        "timestep": timestep,
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask.clone(),
        "video_coords": video_positions(frames, height, width, fps).expand(B, -1, -1, -1),
        "audio_coords": audio_positions(audio).expand(B, -1, -1, -1),
        "return_dict": False,
    }


def example_full(
    *, B: int = 1, text: int = 1024, frames: int = 16, height: int = 16, width: int = 24, audio: int = 126
) -> dict[str, object]:
    """Layouts for `build_full`: a video of 121 frames of 768 x 512 pixels, and its 5 seconds of sound."""
    video = frames * height * width
    return {
        "hidden_states": torch.empty(B, video, 128),
        "audio_hidden_states": torch.empty(B, audio, 128),
        "encoder_hidden_states": torch.empty(B, text, 3840),
        "audio_encoder_hidden_states": torch.empty(B, text, 3840),
        "timestep": torch.empty(B),
        "encoder_attention_mask": torch.empty(B, text, dtype=torch.int64),
        "audio_encoder_attention_mask": torch.empty(B, text, dtype=torch.int64),
        "video_coords": torch.empty(B, 3, video, 2, dtype=torch.float32),
        "audio_coords": torch.empty(B, 1, audio, 2, dtype=torch.float32),
        "return_dict": False,
    }


SPEC = sg.ModelSpec(
    "ltx2",
    (ATTENTION,),
    inputs={
        "hidden_states": sg.TensorLayout("B V C"),
        "audio_hidden_states": sg.TensorLayout("B A E", sg.like("hidden_states")),
        "encoder_hidden_states": sg.TensorLayout("B T X", sg.like("hidden_states")),
        "audio_encoder_hidden_states": sg.TensorLayout("B T X", sg.like("hidden_states")),
        "timestep": sg.TensorLayout("B"),
        "encoder_attention_mask": sg.TensorLayout("B T"),
        "audio_encoder_attention_mask": sg.TensorLayout("B T"),
        "video_coords": sg.TensorLayout("B 3 V 2", torch.float32),
        "audio_coords": sg.TensorLayout("B 1 A 2", torch.float32),
    },
    outputs=(
        sg.TensorLayout("B V C", sg.like("hidden_states")),
        sg.TensorLayout("B A E", sg.like("hidden_states")),
    ),
    eager_only=EAGER_ONLY,
    presets={
        "tiny": sg.Preset(build_tiny, example_tiny, device_dtype=("cpu", torch.bfloat16)),
        "full": sg.Preset(build_full, example_full, device_dtype=("meta", torch.bfloat16)),
    },
)
