"""Allocator churn: memory that was freed is handed out again and overwritten."""

from __future__ import annotations

import torch

SIDE_STREAMS = 32
"""Streams that torch makes side streams from, round robin; its allocator keeps free memory by stream."""


def churn(like: torch.Tensor, count: int = 300) -> None:
    """Allocate and fill tensors the size of `like`, several hundred at once, on every stream there is."""
    _fill(like, count)
    if like.is_cuda:
        torch.cuda.synchronize()
        for _ in range(SIDE_STREAMS):
            with torch.cuda.stream(torch.cuda.Stream()):
                _fill(like, 20)
        torch.cuda.synchronize()


def _fill(like: torch.Tensor, count: int) -> None:
    held = [torch.full_like(like, float(i % 7) - 3.0) for i in range(count)]
    del held
