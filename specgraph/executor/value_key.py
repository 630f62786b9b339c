"""Values that are no tensors as keys: equal keys mean equal behaviour.

`1`, `1.0` and `True` are equal in Python and mean different work; an object that is compared by identity may
change and still be equal to itself. The first get keys that differ, the second get none.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Hashable
from typing import TypeAlias

import torch

Key: TypeAlias = tuple[type, Hashable]

ATOMS = frozenset({type(None), bool, int, str, bytes})
"""Of these, a type and a value are a key."""

_SAME_FOREVER = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.EllipsisType,
    enum.Enum,
    torch.dtype,
    torch.layout,
    torch.memory_format,
)
"""Compared by identity, and the same object always means the same."""


def value_key(value: object) -> Key:
    """The key of a value.

    Raises:
        TypeError: the value has none; the message says why.
    """
    kind = type(value)
    if kind in ATOMS or isinstance(value, _SAME_FOREVER):
        return kind, value
    if isinstance(value, float):
        return kind, value.hex()  # a NaN is itself, and -0.0 is not 0.0
    if isinstance(value, tuple | frozenset):
        parts = map(value_key, value)
        return kind, tuple(parts) if isinstance(value, tuple) else frozenset(parts)
    if kind.__eq__ is object.__eq__ or isinstance(value, torch.Tensor):
        raise TypeError(f"a {kind.__qualname__} compares by identity, and what is in it may change unseen")
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"a {kind.__qualname__} is not hashable") from None
    return kind, value
