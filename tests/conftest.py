"""Both backends run the same tests: a test that takes `device` runs on each."""

from __future__ import annotations

import pytest
import torch

_CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


@pytest.fixture(params=["cpu", _CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of the backend under test."""
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(skip)
