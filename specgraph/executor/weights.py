"""Noticing that a parameter has moved: a graph reads the address it was captured with.

Offloaders and reloads give a parameter other memory (`param.data = ...`, `module.to(...)`, a new
`Parameter`). A replay must not read the old memory, and must not pay for looking at every parameter.

So the watch holds no parameter's memory. When the old memory is freed, which is what moving a parameter is
for, a callback says so at once, and a replay has one name to look at. Where something else keeps the old
memory (a `state_dict` held by the caller), a graph would read stale weights, never freed memory; for that
every replay also looks at a few parameters in turn, and at all of them every `len / PER_REPLAY` replays.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

import attrs
import torch

from ..errors import MovedWeightError
from ..planner.provenance import StateTensor

PER_REPLAY = 4
"""Parameters that each replay looks at."""


@attrs.frozen(eq=False)
class WatchedTensor:
    """A parameter or buffer, where it is found, and where it was at capture.

    Args:
        name: its dotted name.
        owner: the module it belongs to.
        attribute: its name there.
        address: of its first element.
    """

    name: str
    owner: torch.nn.Module
    attribute: str
    address: int

    def has_moved(self) -> bool:
        """True where the module now has other memory under that name."""
        current = getattr(self.owner, self.attribute, None)
        return not isinstance(current, torch.Tensor) or current.data_ptr() != self.address


class WeightWatch:
    """Watches the parameters and buffers that a capture read."""

    def __init__(self, model: str, tensors: Iterable[tuple[WatchedTensor, torch.Tensor]]) -> None:
        self._model = model
        self._freed: list[str] = []
        self._watched: list[WatchedTensor] = []
        self._storages = []
        for watched, tensor in tensors:
            if tensor.untyped_storage().nbytes():
                self._watched.append(watched)
                self._storages.append(self._follow(watched.name, tensor))
        self._turn = itertools.cycle(self._watched)
        self._per_replay = min(PER_REPLAY, len(self._watched))

    @classmethod
    def over(cls, model: str, state: Iterable[StateTensor]) -> WeightWatch:
        """A watch over these parameters and buffers of the model."""
        return cls(
            model,
            (
                (WatchedTensor(each.name, each.owner, each.attribute, each.tensor.data_ptr()), each.tensor)
                for each in state
            ),
        )

    def _follow(self, name: str, tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
        freed = self._freed
        return weakref.ref(tensor.untyped_storage(), lambda _: freed.append(name))

    def check(self) -> None:
        """Look whether anything has moved.

        Raises:
            MovedWeightError: a parameter or buffer is no longer where it was captured.
        """
        if self._freed:
            self._refuse(self._freed[0])
        for watched in itertools.islice(self._turn, self._per_replay):
            if watched.has_moved():
                self._refuse(watched.name)

    def _refuse(self, name: str) -> None:
        raise MovedWeightError(
            "has other memory than when it was captured, and the graph would read the old",
            spec=self._model,
            tensor=f"parameter {name!r}",
            fix="capture again after moving, loading or replacing weights; write new values in place "
            "(param.copy_(...)) to keep the graph",
        )
