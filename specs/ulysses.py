"""Sequence-parallel attention (Ulysses) in a MiniMax-H3 attention module (diffusers 0.42).

Each process holds a shard of the rows. The break is around everything that crosses processes: diffusers'
attention exchanges rows for heads in an all-to-all, attends over all rows, and exchanges back. What goes in
and what comes out are the process's own rows, so that the break's layouts need no process group: one process
plans for any number of them, and without a group the module attends over the rows it has.
"""

from __future__ import annotations

import torch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

import specgraph as sg

from ._vdn_attention import AttentionStep, build_tiny, inputs_tiny
from .h3_attention import ATTENTION


def ulysses_config(device: torch.device) -> ParallelConfig | None:
    """diffusers' configuration for Ulysses over all processes; None where there is one, or no group."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    degree = distributed.get_world_size()
    config = ParallelConfig(ContextParallelConfig(ulysses_degree=degree))
    mesh = init_device_mesh(device.type, (1, degree), mesh_dim_names=("ring", "ulysses"))
    config.setup(distributed.get_rank(), degree, device, mesh=mesh)
    return config


def build_sharded() -> AttentionStep:
    """The module, of which every process attends over its own shard of the rows."""
    step = build_tiny(None)
    processor = MiniMaxH3AttnProcessor()
    processor._parallel_config = ulysses_config(next(step.parameters()).device)
    step.attn.set_processor(processor)
    return step


def example(*, B: int = 1) -> dict[str, Tensor]:
    """One process's rows."""
    inputs = inputs_tiny(B)
    if not distributed.is_initialized():
        return inputs
    rank, degree = distributed.get_rank(), distributed.get_world_size()
    shards = {name: tensor.chunk(degree, tensor.dim() - 2) for name, tensor in inputs.items()}
    return {name: chunks[rank].contiguous() for name, chunks in shards.items()}


SPEC = sg.ModelSpec(
    "ulysses",
    (ATTENTION,),
    inputs={
        "hidden": sg.TensorLayout("B T C"),
        "position_ids": sg.TensorLayout("T 3", torch.float32),
    },
    outputs=sg.TensorLayout("B T C", sg.like("hidden")),
    eager_only=("aten::*scaled_dot_product*", "_c10d_functional::*"),
    presets={"tiny": sg.Preset(build_sharded, example, device_dtype=("cpu", torch.bfloat16))},
)
