"""Fake CPU tensors that stand in for the real ones a model brings into a trace.

Real tensors (parameters, caches, globals) may be on any device, `meta` included. Each gets a fake of the same
layout; two that share a storage get two that share one, so that a view keeps the provenance of what it views.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..layout import ConcreteLayout
from .provenance import Origin, Provenance, StateTensor

HOST = torch.device("cpu")


class StandIns:
    """Fake CPU tensors that stand in for the real ones a model brings in: one storage for one storage."""

    def __init__(self, fake_mode: FakeTensorMode, state: Iterable[StateTensor]) -> None:
        self._fake_mode = fake_mode
        self._state = {each.tensor.untyped_storage()._cdata: each for each in state}
        self._fakes: dict[tuple[int, ConcreteLayout, int], torch.Tensor] = {}
        # The real tensor is kept, so that its storage's identity stays its own.
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor, Provenance]] = {}

    def of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Provenance]:
        """The stand-in for a real tensor, and where the real one comes from."""
        storage = tensor.untyped_storage()
        layout = ConcreteLayout.of(tensor)
        offset = int(tensor.storage_offset())
        with self._fake_mode, torch.inference_mode(False):
            if storage._cdata not in self._storages:
                base = torch.empty(storage.nbytes(), dtype=torch.uint8, device=HOST)
                self._storages[storage._cdata] = (tensor, base, self._provenance(tensor))
            _, base, provenance = self._storages[storage._cdata]
            key = (int(storage._cdata), layout, offset)
            if key not in self._fakes:
                fake = torch.empty(0, dtype=layout.dtype, device=HOST)
                self._fakes[key] = fake.set_(base.untyped_storage(), offset, layout.shape, layout.strides)
        return self._fakes[key], provenance

    def _provenance(self, tensor: torch.Tensor) -> Provenance:
        known = self._state.get(tensor.untyped_storage()._cdata)
        if known is not None:
            return Provenance(Origin.PARAMETER, known.name)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        origin = Origin.PARAMETER if is_parameter else Origin.EXTERNAL
        count = sum(each.origin is origin for _, _, each in self._storages.values())
        return Provenance(origin, f"tensor {count}")

    def nbytes(self) -> dict[Origin, int]:
        """Bytes of the storages stood in for, by origin."""
        sizes = dict.fromkeys((Origin.PARAMETER, Origin.EXTERNAL), 0)
        for real, _, provenance in self._storages.values():
            sizes[provenance.origin] += real.untyped_storage().nbytes()
        return sizes
