"""Bucketed dims: which captured size serves a length, and how tensors get from one to the other.

Layouts drive all of it. Along every input axis that is a bucketed dim, a tensor is padded at its end up to
the bucket; along every output axis that is one, the result is cut back to the live length. An axis that is
computed from a bucketed dim (`T+A`, `S*H`) does not say where its padding would be, and is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

import attrs
import torch
from torch.utils import _pytree as pytree

from ..dims import Dim, Dims, Name, Rest, dim_names, group_dims
from ..errors import LayoutError, SpecError
from ..inputs import ModelInputs
from ..layout import ConcreteLayout, TensorLayout, bind, contiguous_strides, empty
from ..spec import ModelSpec, named_outputs

Cuts: TypeAlias = tuple[tuple[str, int], ...]
"""The bucketed axes of one tensor: name of the dim, and the axis."""


class Buckets:
    """The bucketed dims of one spec.

    Raises:
        SpecError: a bucketed dim has no sizes, is part of an expression, or no layout says where it is in the
            outputs.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.sizes = {dim: tuple(sorted(set(sizes))) for dim, sizes in spec.buckets.items()}
        for dim, sizes in self.sizes.items():
            if not sizes or sizes[0] < 1:
                raise SpecError(
                    f"bucketed dim {dim!r} has the sizes {sizes}",
                    spec=spec.name,
                    fix="list sizes of one or more",
                )
        if self.sizes and spec.outputs is None:
            raise SpecError(
                "has buckets but no layouts of its outputs, which must be cut back to the live length",
                spec=spec.name,
                fix="declare ModelSpec.outputs",
            )
        self._where = {name: self._axes(f"input {name!r}", each) for name, each in spec.inputs.items()}
        layouts = named_outputs(spec.outputs)
        self._cuts = {name: self._axes(name, each) for name, each in layouts.items()}

    def _axes(self, tensor: str, layout: TensorLayout) -> Cuts:
        """Bucketed dims of a layout, each with its axis; axes behind a *rest are counted from the end."""
        found = []
        rest = next((i for i, dim in enumerate(layout.parsed) if isinstance(dim, Rest)), len(layout.parsed))
        for index, dim in enumerate(layout.parsed):
            if isinstance(dim, Name) and dim.name in self.sizes:
                found.append((dim.name, index if index < rest else index - len(layout.parsed)))
            elif not isinstance(dim, Name):
                self._refuse_expression(tensor, layout, dim)
        return tuple(found)

    def _refuse_expression(self, tensor: str, layout: TensorLayout, dim: Dim) -> None:
        if computed := sorted(dim_names(dim) & set(self.sizes)):
            raise SpecError(
                f"{layout} computes with the bucketed dim {computed[0]!r}, so that where its padding belongs "
                "cannot be told",
                spec=self._spec.name,
                tensor=tensor,
                fix=f"give {computed[0]!r} an axis of its own, or leave it out of ModelSpec.buckets",
            )

    def lengths(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The size of each bucketed dim in inputs that have passed `check_inputs`."""
        return {
            dim: tensors[name].shape[axis]
            for name, axes in self._where.items()
            if name in tensors
            for dim, axis in axes
        }

    def smallest(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """The smallest bucket that fits, by dim; a length past the largest stands for itself."""
        return {
            dim: next((size for size in self.sizes[dim] if size >= length), length)
            for dim, length in lengths.items()
        }

    def products(self) -> list[dict[str, int]]:
        """Every combination of sizes, the largest first."""
        names = list(self.sizes)
        every = [dict(zip(names, sizes, strict=True)) for sizes in itertools.product(*self.sizes.values())]
        return sorted(every, key=lambda sizes: _product(sizes.values()), reverse=True)

    def too_long(self, lengths: Mapping[str, int]) -> str:
        """A dim whose length is past its largest bucket; empty where all fit."""
        return next((dim for dim, length in lengths.items() if length > self.sizes[dim][-1]), "")

    def layouts(self, inputs: ModelInputs, dims: Dims, sizes: Mapping[str, int]) -> dict[str, ConcreteLayout]:
        """Layouts of the static input buffers at these bucket sizes.

        Args:
            inputs: the inputs, at any lengths.
            dims: what they bind.
            sizes: the buckets.
        """
        layouts = {}
        for name, tensor in inputs.tensors.items():
            shape = list(tensor.shape)
            for dim, axis in self._where.get(name, ()):
                shape[axis] = sizes[dim]
            strides = contiguous_strides(tuple(shape))
            declared = self._spec.inputs.get(name)
            if declared is not None and declared.strides is not None:
                typed = attrs.evolve(declared, dtype=tensor.dtype)
                groups = group_dims(declared.groups, self._spec.groups)
                strides = typed.resolve({**dims, **sizes, **groups}, {}).strides
            layouts[name] = ConcreteLayout(tuple(shape), strides, tensor.dtype)
        return layouts

    def resized(self, inputs: ModelInputs, layouts: Mapping[str, ConcreteLayout]) -> dict[str, Any]:
        """The keyword arguments with tensors of these layouts: padded at the end, or cut, along each axis."""
        made = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, layout in layouts.items():
                value = inputs.tensors[name]
                for axis, size in enumerate(layout.shape):
                    value = value.narrow(axis, 0, min(size, value.shape[axis]))
                made[name] = empty(layout, value.device)
                fill(made[name], value, self.padding(name))
        return inputs.with_tensors(made)

    def padding(self, name: str) -> float:
        """What an input is padded with."""
        return self._spec.pad.get(name, 0)

    def cuts(self, result: Any) -> tuple[Cuts, ...]:
        """Where each leaf of a result has bucketed axes.

        Raises:
            LayoutError: the result does not have the tensors of the spec's outputs.
        """
        if not self.sizes:
            return ((),) * len(pytree.tree_leaves(result))
        return tuple(self._cuts.get(name, ()) for name, _ in self._named(result))

    def check_outputs(self, result: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare a result with the layouts of the spec's outputs, if it has any.

        Raises:
            LayoutError: they differ.
        """
        layouts = named_outputs(self._spec.outputs)
        if not layouts:
            return
        found = {name: leaf for name, leaf in self._named(result) if name}
        try:
            bind({**self._spec.inputs, **layouts}, {**tensors, **found}, self._spec.groups)
        except LayoutError as error:
            raise error.within(spec=self._spec.name) from None

    def _named(self, result: Any) -> list[tuple[str, Any]]:
        """The leaves of a result, tensors with the name of their layout, everything else with none."""
        outputs = self._spec.outputs
        pairs = pytree.tree_flatten_with_path(result)[0]
        if isinstance(outputs, Mapping):
            by_key = {key: f"output[{key!r}]" for key in outputs}
            named = [(by_key.get(_key(path), ""), leaf) for path, leaf in pairs]
        else:
            names = iter(named_outputs(outputs))
            named = [(next(names, "") if isinstance(leaf, torch.Tensor) else "", leaf) for _, leaf in pairs]
        expected = set(named_outputs(outputs))
        tensors = [name for name, leaf in named if isinstance(leaf, torch.Tensor)]
        if set(tensors) != expected or len(tensors) != len(expected):
            raise LayoutError(
                "the model's result does not have the tensors of the spec's outputs",
                spec=self._spec.name,
                expected=f"{len(expected)} tensors: {', '.join(expected)}",
                actual=f"{len(tensors)} tensors",
                fix="declare in ModelSpec.outputs what the model returns, in order",
            )
        return named


def _key(path: tuple[Any, ...]) -> Any:
    return getattr(path[0], "key", None) if path else None


def _product(sizes: Any) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def cut(leaf: torch.Tensor, cuts: Cuts, lengths: Mapping[str, Any]) -> torch.Tensor:
    """The live part of an output, a view; `lengths` are live values, those of bucketed dims among them."""
    for dim, axis in cuts:
        if lengths[dim] != leaf.shape[axis]:
            leaf = leaf.narrow(axis, 0, lengths[dim])
    return leaf


def fill(buffer: torch.Tensor, value: torch.Tensor, padding: float) -> int:
    """Write a tensor into the first rows of a buffer along each axis, and padding into the rest.

    Nothing is copied where the value already is the buffer, or its first rows.

    Returns:
        The bytes copied.
    """
    if value is buffer:
        return 0
    region = buffer
    if value.shape != buffer.shape:
        for axis, (length, size) in enumerate(zip(value.shape, buffer.shape, strict=True)):
            if length < size:
                buffer.narrow(axis, length, size - length).fill_(padding)
                region = region.narrow(axis, 0, length)
    if _is_same_memory(value, region):
        return 0
    region.copy_(value)
    return value.nbytes


def saved(
    tensors: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors, those copied that filling the buffers would overwrite before it has read them.

    That is what lies in a buffer, but not as the first rows of the buffer it is for.
    """
    storages = {buffer.untyped_storage().data_ptr() for buffer in buffers.values()}
    kept = dict(tensors)
    for name, value in tensors.items():
        if value.untyped_storage().data_ptr() in storages:
            region = buffers[name]
            for axis, length in enumerate(value.shape):
                region = region.narrow(axis, 0, length)
            if not _is_same_memory(value, region):
                kept[name] = value.clone()
    return kept


def _is_same_memory(value: torch.Tensor, region: torch.Tensor) -> bool:
    return (
        value.data_ptr() == region.data_ptr()
        and value.stride() == region.stride()
        and value.is_conj() == region.is_conj()
        and value.is_neg() == region.is_neg()
    )
