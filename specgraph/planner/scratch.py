"""Memory that CUDA kernels take while they run, beyond their results.

A trace sees what ops return. A few kernels also take scratch memory from the same pool and give it back at
once: copies of inputs whose strides they cannot read, layouts that cuDNN wants, partial sums of reductions
over few but long columns, buffers of sorts. The sizes here were measured on an H200 with torch 2.11 and
cover what was measured (tests/test_pool_peak.py holds each against the device); other ops count as taking
none. Where a size depends on which kernel is chosen it is the larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

Scratch: TypeAlias = Callable[..., Iterable[int]]

_SPLIT_FROM = 256
"""Length from which a reduction is split over several thread blocks."""

_MAX_PARTIALS = 132 * 256
"""Partial results a reduction keeps for an output at most."""

_MIN_COLUMNS = 32
_SEMAPHORES_NBYTES = 512
_SCALAR_NBYTES = 16 << 10
_SMALL_SORT = 4096
_SORT_NBYTES = 21
"""Bytes an element that a sort of a long row takes."""

_LONG_SELECTION = 1024
_SELECTION_BLOCK_NBYTES = 400 << 10


def scratch_nbytes(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Sizes of the blocks that `func` takes while it runs, in bytes."""
    rule = _RULES.get(func.name().partition(".")[0])
    return [] if rule is None else [nbytes for nbytes in rule(*args, **kwargs) if nbytes]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy_of_strided(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> list[int]:
    return [] if tensor.is_contiguous() else [_nbytes(tensor)]


def _copies_for_blas(*matrices: Any, **kwargs: Any) -> list[int]:
    """BLAS reads rows or columns with a unit stride."""
    return [
        _nbytes(each)
        for each in matrices
        if isinstance(each, torch.Tensor) and each.dim() >= 2 and 1 not in each.stride()[-2:]
    ]


def _reduction(accumulator_nbytes: int | None) -> Scratch:
    """Partial results of so many bytes; None: of the tensor's dtype."""

    def rule(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> list[int]:
        dims = _reduced_dims(tensor, args, kwargs)
        length = math.prod(tensor.shape[dim] for dim in dims)
        if not length or length < _SPLIT_FROM:
            return []
        outputs = tensor.numel() // length
        if outputs == 1:
            return [_SCALAR_NBYTES, _SEMAPHORES_NBYTES]
        if tensor.stride(dims[-1]) == 1:
            return []
        each = accumulator_nbytes or tensor.element_size()
        partials = 2 * length if outputs >= _MIN_COLUMNS else max(length // 32, _SPLIT_FROM)
        return [outputs * each * min(partials, _MAX_PARTIALS), _SEMAPHORES_NBYTES]

    return rule


def _reduced_dims(tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    given = kwargs.get("dim", args[0] if args else None)
    if isinstance(given, int) and not isinstance(given, bool):
        given = [given]
    if not isinstance(given, list | tuple) or not given:
        given = range(tensor.dim())
    return sorted(dim % max(tensor.dim(), 1) for dim in given) if tensor.dim() else []


def _norm(tensor: torch.Tensor, ord: Any = 2, dim: Any = None, *args: Any, **kwargs: Any) -> Iterable[int]:
    return _reduction(4)(tensor, dim)


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, *args: Any) -> list[int]:
    """cuDNN works channels last: copies of the input, the weight, and the result."""
    steps = list(stride) * (x.dim() - 2) if len(stride) == 1 else list(stride)
    positions = math.prod(-(-size // step) + 1 for size, step in zip(x.shape[2:], steps, strict=True))
    result = x.shape[0] * weight.shape[0] * positions * x.element_size()
    return [_nbytes(x), result, _nbytes(weight)]


def _sort(tensor: torch.Tensor, *args: Any, dim: int | None = None, **kwargs: Any) -> list[int]:
    given = next((arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)), -1)
    length = tensor.shape[given if dim is None else dim] if tensor.dim() else 1
    return [32 << 10] if length <= _SMALL_SORT else [_SORT_NBYTES * tensor.numel()]


def _topk(tensor: torch.Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> list[int]:
    """Counters of a radix selection over several thread blocks, in several small blocks."""
    length = max(tensor.shape[dim], 1) if tensor.dim() else 1
    rows = tensor.numel() // length
    needed = max(_SELECTION_BLOCK_NBYTES, 1600 * rows if length >= _LONG_SELECTION else 0)
    return [_SELECTION_BLOCK_NBYTES] * -(-needed // _SELECTION_BLOCK_NBYTES)


def _index_put(tensor: torch.Tensor, indices: Any, values: Any, accumulate: bool = False) -> list[int]:
    longest = max((each.numel() for each in indices if each is not None), default=0)
    return [64 * longest] if accumulate else []


_RULES: dict[str, Scratch] = {
    **dict.fromkeys(
        ("aten::_softmax", "aten::_log_softmax", "aten::native_layer_norm", "aten::native_group_norm"),
        _copy_of_strided,
    ),
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"), _copies_for_blas),
    **dict.fromkeys(("aten::sum", "aten::mean", "aten::prod"), _reduction(4)),
    **dict.fromkeys(("aten::amax", "aten::amin"), _reduction(None)),
    **dict.fromkeys(("aten::argmax", "aten::argmin", "aten::max", "aten::min"), _reduction(16)),
    **dict.fromkeys(("aten::var", "aten::std", "aten::var_mean", "aten::std_mean"), _reduction(16)),
    "aten::any": _reduction(1),
    "aten::all": _reduction(1),
    "aten::linalg_vector_norm": _norm,
    "aten::convolution": _convolution,
    "aten::sort": _sort,
    "aten::argsort": _sort,
    "aten::topk": _topk,
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put,
}
