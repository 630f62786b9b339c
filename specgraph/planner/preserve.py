"""Leaving a model as it was found: a trace must not leave fake tensors in a module's attributes."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def unchanged(modules: list[torch.nn.Module]) -> Iterator[None]:
    """Put back what running the modules changes in them: a trace must not leave fakes in a model."""
    containers: dict[int, tuple[Any, Any]] = {}
    for module in {id(each): each for root in modules for each in root.modules()}.values():
        _collect(vars(module), containers)
    try:
        yield
    finally:
        for container, content in containers.values():
            _restore(container, content)


def _collect(container: Any, found: dict[int, tuple[Any, Any]]) -> None:
    """A copy of a container, and of those in it, beside each itself."""
    if id(container) in found or not isinstance(container, dict | list | set):
        return
    found[id(container)] = (container, container.copy())
    for each in container.values() if isinstance(container, dict) else container:
        _collect(each, found)


def _restore(container: Any, content: Any) -> None:
    if isinstance(container, set):
        container.intersection_update(content)
        container.update(content)
    elif isinstance(container, list):
        if len(container) != len(content) or any(map(operator.is_not, container, content)):
            container[:] = content
    elif list(container) != list(content) or any(container[k] is not v for k, v in content.items()):
        container.clear()
        container.update(content)
