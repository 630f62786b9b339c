"""Random programs of segments and breaks, replayed in any order over one pool, fused or not, equal eager."""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs
import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from torch import Tensor

import specgraph as sg
from tests.churn import churn

ANY = sg.TensorLayout("*r")
SAME = sg.TensorLayout("*r", dtype=sg.like("x"))


@sg.graph_break(SAME, inputs={"x": ANY}, fusable=True)
def copies(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@sg.graph_break((SAME, sg.TensorLayout("", torch.int64)), inputs={"x": ANY}, fusable=True)
def gives_two(x: Tensor) -> tuple[Tensor, Tensor]:
    count = torch.full((), x.numel(), dtype=torch.int64, device=x.device)
    return x.clone(memory_format=torch.contiguous_format), count


@sg.graph_break(SAME, inputs={"x": ANY}, ownership=sg.Ownership.PASS_THROUGH, out="out", fusable=True)
def fills(x: Tensor, out: Tensor | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    return out.copy_(x)


@sg.graph_break(None, mutates="x")
def negates_in_place(x: Tensor) -> None:
    x.copy_(x.to(torch.float32).neg().to(x.dtype))


@sg.graph_break(SAME, inputs={"x": ANY}, live={"times": "times"}, fusable=True)
def repeats(x: Tensor, times: int = 1) -> Tensor:
    wide = x.to(torch.float32)
    for _ in range(times):
        wide = wide + 1
    return wide.to(x.dtype).clone(memory_format=torch.contiguous_format)


@sg.graph_break(SAME, inputs={"x": ANY}, fusable=True)
def adds(x: Tensor, others: list[Tensor]) -> Tensor:
    total = x.to(torch.float32)
    for other in others:
        total = total + other.to(torch.float32).sum()
    return total.to(x.dtype).contiguous()


SPEC = sg.ModelSpec("random", (), live=("times",))

DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.float8_e4m3fn)
OPS = (
    "relu", "shift", "cast", "transpose", "slice", "empty", "sum", "add", "in_place", "drop",
    "copies", "gives_two", "fills", "negates", "repeats", "adds",
)  # fmt: skip

Instruction: TypeAlias = tuple[str, int, int]


@attrs.frozen
class Program:
    """Instructions over a growing list of tensors; the numbers choose operands."""

    instructions: tuple[Instruction, ...]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x * 1]
        for instruction in self.instructions:
            self._step(values, *instruction)
        return tuple(values[-3:])

    def _step(self, values: list[Tensor], op: str, first: int, second: int) -> None:
        x = values[first % len(values)]
        y = values[second % len(values)]
        if op == "drop":
            if len(values) > 1:
                del values[first % len(values)]
        elif op == "in_place":
            x.copy_((x.to(torch.float32) * 0.5 + 1).to(x.dtype))
        elif op == "negates":
            negates_in_place(x)
        elif op == "gives_two":
            values += gives_two(x)
        else:
            values.append(self._value(op, x, y, second))

    def _value(self, op: str, x: Tensor, y: Tensor, number: int) -> Tensor:
        wide = x.to(torch.float32)
        match op:
            case "relu":
                return torch.relu(wide).to(x.dtype)
            case "shift":
                return (wide + number).to(x.dtype)
            case "cast":
                return x.to(torch.float32).to(DTYPES[number % len(DTYPES)])
            case "transpose":
                return x.transpose(0, -1) if x.dim() else x.view(())
            case "slice":
                return x[number % x.shape[0] :] if x.dim() and x.shape[0] else x.view(x.shape)
            case "empty":
                return x[:0] if x.dim() else x.expand(0)
            case "sum":
                return wide.sum().to(x.dtype)
            case "add":
                return (wide + y.to(torch.float32).sum()).to(x.dtype)
            case "copies":
                return copies(x)
            case "fills":
                return fills(x)
            case "repeats":
                return repeats(x)
        return adds(x, [y, x])


programs = st.lists(
    st.tuples(st.sampled_from(OPS), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12
).map(lambda instructions: Program(tuple(instructions)))


def same_bits(actual: Any, expected: Any) -> bool:
    """Equal shapes, dtypes and bytes."""

    def raw(tensor: Tensor) -> Tensor:
        flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
        return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)

    return all(
        (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype) and torch.equal(raw(mine), raw(theirs))
        for mine, theirs in zip(actual, expected, strict=True)
    )


class Machine(RuleBasedStateMachine):
    """Captures, replays and closes programs over one pool, with allocator churn in between."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[tuple[Program, sg.CapturedGraph, int]] = []

    @rule(program=programs, rows=st.sampled_from((1, 4, 16)), poison=st.booleans())
    def capture(self, program: Program, rows: int, poison: bool) -> None:
        x = torch.randn(rows, 6, device=self.device)
        pool = self.captured[0][1].pool if self.captured else None
        graph = sg.capture(
            program,
            SPEC,
            {"x": x},
            {"times": 1},
            pool=pool,
            validate="poison" if poison else "strict",
            max_fused=2,
        )
        assert graph.leaks == ()
        self.captured.append((program, graph, rows))

    @precondition(lambda self: self.captured)
    @rule(index=st.integers(0, 9), seed=st.integers(0, 99), times=st.integers(0, 3), prefuse=st.booleans())
    def replay(self, index: int, seed: int, times: int, prefuse: bool) -> None:
        program, graph, rows = self.captured[index % len(self.captured)]
        torch.manual_seed(seed)
        x = torch.randn(rows, 6, device=self.device)
        expected = self.eager(program, x, times)
        if prefuse:
            graph.prefuse(live={"times": times})
        assert same_bits(graph(x=x, live={"times": times}), expected)

    def eager(self, program: Program, x: Tensor, times: int) -> tuple[Tensor, ...]:
        """The program without specgraph, its live value in place."""
        patched = pytest.MonkeyPatch()
        original = repeats.fn
        with torch.no_grad(), patched.context() as patch:
            patch.setattr("tests.test_random_programs.repeats", lambda x: original(x, times))
            return program(x.clone())

    @rule(size=st.integers(1, 64))
    def churns(self, size: int) -> None:
        churn(torch.empty(size, 6, device=self.device), count=20)

    @precondition(lambda self: len(self.captured) > 1)
    @rule(index=st.integers(0, 9))
    def close(self, index: int) -> None:
        self.captured.pop(index % len(self.captured))[1].close()


def test_random_programs_replay_as_eager(device: torch.device) -> None:
    machine = type("MachineOn", (Machine,), {"device": device})
    settings = hypothesis.settings(
        max_examples=300 if device.type == "cpu" else 200,
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(machine, settings=settings)
