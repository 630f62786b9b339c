"""One call of a break's target, bound to its spec.

The call's arguments are bound to the target's signature, the dims of the input layouts to their sizes, and
the output layouts are resolved. Planning, capture and checked eager runs all see a call through this.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from .callsite import user_line
from .dims import Dims, GroupSizes, group_dims
from .errors import LayoutError
from .inputs import leaf_name
from .layout import ConcreteLayout, TensorLayout, bind
from .spec import named_outputs
from .targets import BreakSite


@attrs.frozen(eq=False)
class BreakCall:
    """One call of a break's target, bound to its spec.

    Args:
        site: the target.
        signature: of the overload that takes the arguments.
        args, kwargs: as the model passed them.
        leaves: what the body is handed that is neither live nor a buffer to write, nested structures taken
            apart, by leaf name (`query`, `masks[0]`).
        dims: bound by the input layouts, and the sizes of the groups that layouts of the call name.
        outputs: resolved layouts by output name.
    """

    site: BreakSite
    signature: inspect.Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Mapping[str, Any]
    dims: Dims
    outputs: Mapping[str, ConcreteLayout]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors among the leaves."""
        return {name: leaf for name, leaf in self.leaves.items() if isinstance(leaf, torch.Tensor)}


def bind_call(
    site: BreakSite, args: tuple[Any, ...], kwargs: dict[str, Any], groups: GroupSizes
) -> BreakCall:
    """Bind a call to its target's signature and layouts.

    Raises:
        LayoutError: an argument is not what its layout says, or an output cannot be resolved.
    """
    spec = site.spec
    try:
        signature, bound = site.bind(args, kwargs)
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            is_extra = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            arguments.update(value if is_extra else {name: value})
        for name in spec.inputs:
            _check_is_tensor(name, arguments.get(name))
        tensors = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
        dims = dict(bind(spec.inputs, tensors, groups))
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        outputs = {}
        for name, layout in named_outputs(spec.outputs).items():
            outputs[name] = _resolve(name, layout, dims, dtypes, groups)
    except LayoutError as error:
        raise error.within(break_name=site.label, where=user_line()) from None
    replaced = (*spec.live, *spec.out)
    handed = {name: value for name, value in arguments.items() if name not in replaced}
    leaves = {leaf_name(path): leaf for path, leaf in pytree.tree_flatten_with_path(handed)[0]}
    return BreakCall(site, signature, args, kwargs, leaves, dims, outputs)


def _check_is_tensor(name: str, value: object) -> None:
    if value is not None and not isinstance(value, torch.Tensor):
        raise LayoutError(
            "has a layout but is no tensor",
            tensor=name,
            actual=f"{type(value).__name__}",
            fix=f"drop {name!r} from the break's inputs=; only tensors have layouts",
        )


def _resolve(
    name: str,
    layout: TensorLayout,
    dims: dict[str, int | tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    groups: GroupSizes,
) -> ConcreteLayout:
    try:
        dims.update(group_dims(layout.groups, groups))
        return layout.resolve(dims, dtypes)
    except LayoutError as error:
        error.tensor = name
        raise
