"""The one cattrs converter: how specgraph's data becomes plain data, and back."""

from __future__ import annotations

from typing import Any

import torch
from cattrs.preconf.json import make_converter

from .layout import as_dtype, dtype_name

converter = make_converter()
converter.register_unstructure_hook(torch.dtype, dtype_name)
converter.register_structure_hook(torch.dtype, lambda value, _: as_dtype(value))


def _structure_size(value: Any, _: Any) -> int | tuple[int, ...]:
    return value if isinstance(value, int) else tuple(value)


converter.register_structure_hook(int | tuple[int, ...], _structure_size)
