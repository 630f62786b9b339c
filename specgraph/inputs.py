"""A model's inputs: keyword arguments, taken apart into tensors and values that are no tensors.

Planning, capture and replay agree here on what an input is called and on the layout of its static
buffer: the input's own strides where the spec gives strides, contiguous otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from .dims import Dims
from .errors import LayoutError, PlanError, SpecGraphError
from .layout import ConcreteLayout, bind, contiguous_strides
from .spec import ModelSpec


def leaf_name(path: tuple[Any, ...]) -> str:
    """`hidden_states`, `cache['k'][0]`: a key path whose first key is a plain name."""
    first, *rest = path
    return f"{getattr(first, 'key', first)}{pytree.keystr(tuple(rest))}"


@attrs.frozen(eq=False)
class ModelInputs:
    """Inputs taken apart.

    Args:
        tensors: tensors by leaf name.
        values: everything else by leaf name.
        order: leaf names in the order of the structure.
        structure: how the leaves make up the keyword arguments.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    order: tuple[str, ...]
    structure: pytree.TreeSpec

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> ModelInputs:
        """Take keyword arguments apart."""
        pairs, structure = pytree.tree_flatten_with_path(dict(inputs))
        leaves = {leaf_name(path): leaf for path, leaf in pairs}
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        values = {name: leaf for name, leaf in leaves.items() if name not in tensors}
        return cls(tensors, values, tuple(leaves), structure)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The keyword arguments, with other tensors."""
        leaves = [tensors[name] if name in tensors else self.values[name] for name in self.order]
        kwargs: dict[str, Any] = pytree.tree_unflatten(leaves, self.structure)
        return kwargs

    def static_layouts(self, spec: ModelSpec) -> dict[str, ConcreteLayout]:
        """Layouts of the static input buffers."""
        layouts = {}
        for name, tensor in self.tensors.items():
            declared = spec.inputs.get(name)
            shape = tuple(tensor.shape)
            keeps_strides = declared is not None and declared.strides is not None
            strides = tuple(tensor.stride()) if keeps_strides else contiguous_strides(shape)
            layouts[name] = ConcreteLayout(shape, strides, tensor.dtype)
        return layouts


def check_inputs(spec: ModelSpec, fn: Callable[..., Any], inputs: ModelInputs) -> Dims:
    """Check inputs against the spec and the callable's parameters; bind the model's dims.

    Raises:
        PlanError: an input is missing, unknown, or needs a gradient.
        LayoutError: an input is not what its layout says.
    """
    _check_names(spec, fn, inputs)
    for name, tensor in inputs.tensors.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise PlanError(
                "requires a gradient, which a captured graph does not compute",
                spec=spec.name,
                tensor=f"input {name!r}",
                fix="call under torch.no_grad() or torch.inference_mode(), or pass input.detach()",
            )
    for name in spec.inputs:
        value = inputs.values.get(name)
        if name in inputs.values:
            raise LayoutError(
                "is no tensor but has a layout",
                spec=spec.name,
                tensor=f"input {name!r}",
                expected=str(spec.inputs[name]),
                actual=type(value).__name__,
                fix="pass a tensor",
            )
    try:
        return bind(spec.inputs, inputs.tensors, spec.groups)
    except LayoutError as error:
        error.tensor = f"input {error.tensor!r}"
        raise error.within(spec=spec.name) from None


def check_live(spec: ModelSpec, live: Mapping[str, Any], error: type[SpecGraphError]) -> dict[str, Any]:
    """The live values, all those of the spec and no others; lengths of bucketed dims may be left out."""
    missing = sorted(set(spec.live) - set(live))
    unknown = sorted(set(live) - spec.live_names)
    if not missing and not unknown:
        return dict(live)
    raise error(
        f"live value {missing[0]!r} is missing" if missing else f"live value {unknown[0]!r} is not declared",
        spec=spec.name,
        expected=f"live values {', '.join(sorted(spec.live_names)) or 'none'}",
        actual=f"live values {', '.join(sorted(live)) or 'none'}",
        fix="hand in live={...} with the names that ModelSpec.live declares",
    )


def _check_names(spec: ModelSpec, fn: Callable[..., Any], inputs: ModelInputs) -> None:
    given = set(inputs.order)
    missing = sorted(set(spec.inputs) - given)
    extra = sorted(set(inputs.tensors) - set(spec.inputs)) if spec.inputs else []
    # The structure of a dict lists its keys, those of empty containers too.
    keywords = list(inputs.structure.context)
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        inspect.signature(target).bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise PlanError(
            f"the inputs do not fit the model's parameters: {error}",
            spec=spec.name,
            expected=f"parameters {inspect.signature(target)}",
            actual=f"inputs {', '.join(keywords) or 'none'}",
            fix="pass the model's inputs by its parameters' names",
        ) from None
    if missing or extra:
        raise PlanError(
            f"input {missing[0]!r} is missing" if missing else f"input {extra[0]!r} has no layout",
            spec=spec.name,
            expected=f"inputs {', '.join(spec.inputs)}",
            actual=f"inputs {', '.join(inputs.tensors) or 'none'}",
            fix="pass exactly the tensors that ModelSpec.inputs names, or add a layout there",
        )
