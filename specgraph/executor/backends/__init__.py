"""Where segments are recorded and replayed: one protocol, two backends."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import CaptureError
from .base import Backend, Pool
from .cpu import CpuBackend
from .cuda import CudaBackend

__all__ = ["Backend", "Pool", "make_backend"]


def make_backend(name: str, tensors: Mapping[str, torch.Tensor]) -> Backend:
    """The backend called `name`; `"auto"` is the one of the inputs' device.

    Raises:
        CaptureError: there is no such backend, or an input is on another device.
    """
    devices = {tensor.device for tensor in tensors.values()}
    if name == "auto":
        name = "cuda" if any(device.type == "cuda" for device in devices) else "cpu"
    if name not in ("cpu", "cuda"):
        raise CaptureError(f"there is no backend {name!r}", fix='use "auto", "cpu" or "cuda"')
    if name == "cpu":
        backend: Backend = CpuBackend()
    else:
        on_cuda = [device for device in devices if device.type == "cuda"]
        backend = CudaBackend(on_cuda[0] if on_cuda else None)
    for input_name, tensor in tensors.items():
        if tensor.device != backend.device:
            raise CaptureError(
                f"is on {tensor.device}, the capture is on {backend.device}",
                tensor=f"input {input_name!r}",
                expected=f"a tensor on {backend.device}",
                actual=f"a tensor on {tensor.device}",
                fix=f'move it with .to("{backend.device}"), or choose another backend',
            )
    return backend
