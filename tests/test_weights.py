"""Parameters that move between capture and replay are noticed before anything is launched."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import specgraph as sg
from specgraph.executor.weights import PER_REPLAY
from tests.churn import churn

ROWS = sg.TensorLayout("S D")


@sg.graph_break(sg.TensorLayout("S D", dtype=sg.like("x")), inputs={"x": ROWS})
def double(x: Tensor) -> Tensor:
    return x * 2


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.unused = nn.Linear(8, 8)
        self.offset: Tensor
        self.register_buffer("offset", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = double(layer(x) + self.offset)
        return x


def second_layer(net: Net) -> nn.Linear:
    layer = net.layers[1]
    assert isinstance(layer, nn.Linear)
    return layer


def capture_net(device: torch.device, layers: int = 3) -> tuple[Net, sg.CapturedGraph, Tensor]:
    torch.manual_seed(0)
    net = Net(layers).to(device)
    x = torch.randn(4, 8, device=device)
    return net, sg.capture(net, sg.ModelSpec("net", (double.spec,)), {"x": x}), x


def move_data(net: Net) -> None:
    second_layer(net).weight.data = second_layer(net).weight.data.clone()


def offload(net: Net) -> None:
    second_layer(net).weight.data = second_layer(net).weight.data.to("cpu", copy=True)


def replace(net: Net) -> None:
    second_layer(net).weight = nn.Parameter(torch.ones_like(second_layer(net).weight))


def convert(net: Net) -> None:
    second_layer(net).to(torch.float64)


@pytest.mark.parametrize("move", [move_data, offload, replace, convert])
def test_a_parameter_whose_memory_was_freed_is_refused_at_once(
    device: torch.device, move: Callable[[Net], None]
) -> None:
    net, captured, x = capture_net(device)
    with torch.no_grad():
        assert torch.equal(captured(x=x), net(x))
    before = captured.inputs["x"].clone()
    move(net)
    for use in (lambda: captured(x=x + 1), captured.replay):
        with pytest.raises(sg.ReplayError) as caught:
            use()
        assert caught.value.tensor == "parameter 'layers.1.weight'" or move is convert
        assert caught.value.tensor.startswith("parameter 'layers.1.")
        assert "capture again" in caught.value.fix
    assert torch.equal(captured.inputs["x"], before)
    assert captured.stats.replays == 1


def test_a_moved_buffer_is_refused_too(device: torch.device) -> None:
    net, captured, x = capture_net(device)
    net.offset = net.offset + 1
    with pytest.raises(sg.ReplayError, match="'offset'"):
        captured(x=x)


def test_a_parameter_whose_old_memory_is_kept_is_refused_within_a_round(device: torch.device) -> None:
    net, captured, x = capture_net(device)
    kept = net.state_dict()
    move_data(net)
    watched = 2 * 3 + 1

    def one_round() -> None:
        for _ in range(-(-watched // PER_REPLAY) + 1):
            captured(x=x)

    with pytest.raises(sg.ReplayError, match=r"layers\.1\.weight"):
        one_round()
    assert kept


def test_values_written_in_place_are_seen_by_the_next_replay(device: torch.device) -> None:
    net, captured, x = capture_net(device)
    for _ in range(4):
        with torch.no_grad():
            second_layer(net).weight.copy_(torch.randn(8, 8, device=device))
            net.offset.mul_(0.5)
            assert torch.equal(captured(x=x), net(x))


def test_a_parameter_that_the_capture_did_not_read_may_move(device: torch.device) -> None:
    net, captured, x = capture_net(device)
    net.unused.to(torch.float64)
    gc.collect()
    with torch.no_grad():
        expected = net(x)
    churn(x)
    assert torch.equal(captured(x=x), expected)


def test_a_second_capture_reads_the_moved_weights(device: torch.device) -> None:
    net, captured, x = capture_net(device)
    move_data(net)
    again = sg.capture(net, sg.ModelSpec("net", (double.spec,)), {"x": x}, pool=captured.pool)
    with torch.no_grad():
        assert torch.equal(again(x=x), net(x))
