"""Where a tensor's memory lives.

Provenance belongs to the storage, so that a view has the provenance of what it views. It decides what
the executor keeps of a tensor: a strong reference for an input, a parameter and an external tensor, a
non-owning alias for memory that the same replay wrote earlier in the graph pool.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Origin(enum.Enum):
    """The five places a tensor can come from."""

    INPUT = "input"
    """A static input buffer; kept strongly."""

    PARAMETER = "parameter"
    """A parameter or buffer of the model; kept strongly."""

    SEGMENT = "segment"
    """The graph pool, written earlier in the same replay; kept as a non-owning alias."""

    BREAK_OUTPUT = "break output"
    """The graph pool, written by an earlier break of the same replay; kept as a non-owning alias."""

    EXTERNAL = "external"
    """Anywhere else: made by eager code, a cache, a global; kept strongly, and reported."""

    @property
    def in_pool(self) -> bool:
        """True where the memory is the graph pool's."""
        return self in (Origin.SEGMENT, Origin.BREAK_OUTPUT)


@attrs.frozen
class Provenance:
    """Where a tensor comes from, and what it is called there.

    Args:
        origin: the kind of place.
        source: the input's or parameter's name, `segment N`, or `break: output`.
    """

    origin: Origin
    source: str

    def __str__(self) -> str:
        return self.source if self.origin.in_pool else f"{self.origin.value} {self.source}".rstrip()


CONSTANT = Provenance(Origin.EXTERNAL, "constant")
"""A literal that the model wrote as a tensor (`torch.tensor(1.0)`)."""


class StorageOrigins:
    """The provenance of every storage seen so far.

    Keys are storage identities; the weak reference kept beside each makes sure that no later storage
    gets the identity of one that has died.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, Provenance]] = {}

    def claim(self, tensor: torch.Tensor, provenance: Provenance) -> None:
        """Say where `tensor`'s storage comes from."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = (StorageWeakRef(storage), provenance)

    def find(self, tensor: torch.Tensor) -> Provenance | None:
        """Where `tensor`'s storage comes from, if it was claimed."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]


def modules_of(fn: Callable[..., Any]) -> list[torch.nn.Module]:
    """The modules that `fn` is, is a method of, or closes over."""
    candidates: list[Any] = [fn, getattr(fn, "__self__", None)]
    for cell in getattr(inspect.unwrap(fn), "__closure__", None) or ():
        candidates.append(cell.cell_contents if _is_filled(cell) else None)
    return [each for each in candidates if isinstance(each, torch.nn.Module)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@attrs.frozen(eq=False)
class StateTensor:
    """A parameter or buffer of a model.

    Args:
        name: its dotted name.
        owner: the module it belongs to.
        attribute: its name there.
        tensor: itself.
    """

    name: str
    owner: torch.nn.Module
    attribute: str
    tensor: torch.Tensor


def model_state(fn: Callable[..., Any]) -> Iterator[StateTensor]:
    """Parameters and buffers of the modules of `fn`."""
    for root in modules_of(fn):
        for path, module in root.named_modules():
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            for attribute, tensor in own:
                yield StateTensor(f"{path}.{attribute}" if path else attribute, module, attribute, tensor)
