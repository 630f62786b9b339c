"""What a capture makes and the model keeps is reported, and warm-up runs before anything is recorded."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

import specgraph as sg

ROWS = sg.TensorLayout("S D")
cache: dict[str, Tensor] = {}


@sg.graph_break(sg.TensorLayout("S D", dtype=sg.like("x")), inputs={"x": ROWS})
def double(x: Tensor) -> Tensor:
    return x * 2


SPEC = sg.ModelSpec("cached", ())


def lazy_model(x: Tensor) -> Tensor:
    if "table" not in cache:
        cache["table"] = torch.arange(16.0, device=x.device).sqrt()
    return double(x + cache["table"]) - 1


def keeping_model(x: Tensor) -> Tensor:
    cache["last"] = x + 1
    return double(cache["last"]) - 1


def test_a_table_built_on_the_first_call_is_built_in_the_warm_up(device: torch.device) -> None:
    cache.clear()
    x = torch.randn(8, 16, device=device)
    first = sg.capture(lazy_model, SPEC, {"x": x})
    second = sg.capture(lazy_model, SPEC, {"x": x}, pool=first.pool)
    assert first.leaks == ()
    expected = (x + torch.arange(16.0, device=device).sqrt()) * 2 - 1
    assert torch.equal(second(x=x), expected)
    assert torch.equal(first(x=x), expected)
    (diagnostic,) = first.plan.diagnostics
    assert diagnostic.code == "external-tensor"


def test_a_tensor_kept_from_a_segment_is_reported_with_size_and_line(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    cache.clear()
    x = torch.randn(8, 16, device=device)
    with caplog.at_level(logging.WARNING, logger="specgraph"):
        captured = sg.capture(keeping_model, SPEC, {"x": x})
    (leak,) = captured.leaks
    assert (leak.nbytes, leak.made_in) == (512, "segment 0")
    assert leak.where.endswith("in keeping_model")
    assert "512 bytes" in caplog.text
    assert "in keeping_model" in caplog.text
    assert torch.equal(captured(x=x), (x + 1) * 2 - 1)
    assert torch.equal(cache["last"], x + 1)


def test_outputs_and_what_the_model_drops_are_no_leaks(device: torch.device) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = double(x * 3)
        return y, (y + 1)[:2]

    assert sg.capture(model, SPEC, {"x": torch.randn(8, 16, device=device)}).leaks == ()
