"""Allocator churn: memory that was freed is handed out again and overwritten."""

from __future__ import annotations

import torch


def churn(like: torch.Tensor, count: int = 300) -> None:
    """Allocate and fill tensors the size of `like`, several hundred at once."""
    held = [torch.full_like(like, float(i % 7) - 3.0) for i in range(count)]
    del held
