"""What a dispatcher op does, as far as planning and recording care.

Ops describe themselves through their schema, tags and registered kernels; the two questions torch has no
public call for (`torch._C._dispatch_*`, seen in 2.11 and 2.13) are asked here and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .callsite import user_line
from .errors import HostSyncError

_DROPOUT_PROBABILITIES = ("dropout_p", "dropout")

_LAUNCHES_NOTHING = frozenset(
    {
        "aten::_unsafe_view",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::set_",
    }
)


@functools.cache
def launches(func: torch._ops.OpOverload) -> bool:
    """False for ops that only make views, allocate, or ask about a tensor."""
    name = func.name().partition(".")[0]
    return not (func.is_view or name.startswith("prim::") or name in _LAUNCHES_NOTHING)


@functools.cache
def makes_constant(func: torch._ops.OpOverload) -> bool:
    """True for the op through which a literal (`torch.tensor(1.0)`) enters a program."""
    return func.name() in ("aten::lift_fresh", "aten::lift_fresh_copy")


@functools.cache
def reads_on_host(func: torch._ops.OpOverload) -> bool:
    """True for ops whose result is a value on the host (`aten::item`, `aten::equal`)."""
    return torch.Tag.data_dependent_output in func.tags


def draws_random_numbers(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for ops that advance a generator (`aten::rand_like`, attention with dropout).

    An op that can drop elements draws only where it is asked to drop some.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in _DROPOUT_PROBABILITIES:
            given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            return given is None or given > 0
    return True


def written_by(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The arguments that an op writes in place."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among an op's arguments or results, which nest in lists and tuples only."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `change` applied to the tensors that `tensors_in` finds."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(change, each) for each in value)
    if isinstance(value, dict):
        return {key: map_tensors(change, each) for key, each in value.items()}
    return value


@functools.cache
def is_composite(func: torch._ops.OpOverload) -> bool:
    """True for ops that torch defines by other ops at every backend."""
    # Overloads that exist for TorchScript only (`aten::mul.left_t`) are unknown to the dispatcher.
    name = func.name()
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    )


@functools.cache
def composite_op_of(func: Callable[..., Any]) -> torch._ops.OpOverload | None:
    """The composite dispatcher op behind a function of torch's Python API, if it is one.

    Python bindings carry the op's name but no link to it, so the link is made by name.
    """
    if isinstance(func, torch._ops.OpOverload):
        packet = func.overloadpacket
    elif isinstance(func, torch._ops.OpOverloadPacket):
        packet = func
    else:
        packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    ops = [getattr(packet, name) for name in packet.overloads()]
    return next((op for op in ops if is_composite(op)), None)


def schema_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call of torch's Python API, as the op's schema names them.

    Python calls the schema's `self` `input`, and its wrappers pass a `_stacklevel` of their own.
    """
    renamed = {"self" if name == "input" else name: value for name, value in kwargs.items()}
    renamed.pop("_stacklevel", None)
    return args, renamed


def host_sync(op: str, segment: str = "a segment") -> HostSyncError:
    """The error for an op that needs a value on the host inside a segment."""
    return HostSyncError(
        f"{op} in {segment} needs a value on the host, which a graph cannot replay",
        where=user_line(),
        fix="declare a BreakSpec for the function that does this, or compute the value before the call "
        "and hand it in",
    )
