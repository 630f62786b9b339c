"""A plan as a person reads it: one rendering, for a terminal of any width and for plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..dims import format_dims
from .provenance import Origin

if TYPE_CHECKING:
    from .model import BreakStep, CapturePlan, SegmentStep

PLAIN_WIDTH = 110
"""Columns of text that goes to no terminal."""


def render(plan: CapturePlan) -> str:
    """The plan as plain text."""
    console = Console(file=io.StringIO(), width=PLAIN_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(renderable(plan))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def renderable(plan: CapturePlan) -> RenderableType:
    """The plan for a rich console."""
    parts: list[RenderableType] = [
        Text.assemble(
            (plan.model, "bold"),
            f": {counted(len(plan.segments), 'segment')}, {counted(len(plan.breaks), 'break')}, "
            f"for {plan.device}",
        ),
        Text(f"digest {plan.digest}", style="dim"),
    ]
    if plan.dims:
        parts.append(Text(f"dims {format_dims(plan.dims)}"))
    inputs = _grid()
    for name, layout in plan.inputs.items():
        _add_row(inputs, name, str(layout), format_bytes(layout.nbytes))
    for value in plan.values:
        _add_row(inputs, value.name, value.value, "frozen")
    for name in plan.live:
        _add_row(inputs, name, "live", "handed in at every replay")
    parts += _section("inputs", inputs)
    parts += _section("steps", _steps(plan))
    outputs = _grid()
    for output in plan.outputs:
        _add_row(outputs, output.name, str(output.layout), f"from {output.provenance}")
    parts += _section("outputs", outputs)
    parts += _section("memory", _memory(plan))
    if plan.diagnostics:
        parts += _section("diagnostics", _diagnostics(plan))
    return Group(*parts)


def counted(count: int, noun: str) -> str:
    """`1 segment`, `2 segments`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_bytes(nbytes: int) -> str:
    """`1536` as `1.5 KiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _add_row(table: Table, *cells: RenderableType) -> None:
    """Add a row; text in it is shown letter by letter, never read as markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _grid() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    return table


def _section(title: str, content: RenderableType) -> list[RenderableType]:
    return [Text(""), Text(title, style="bold"), Padding(content, (0, 0, 0, 2))]


def _steps(plan: CapturePlan) -> RenderableType:
    table = _grid()
    shapes = [_shape(step) for step in plan.steps]
    at = 0
    while at < len(plan.steps):
        period, times = _repeat(shapes, at)
        for index in range(at, at + period):
            for row in _step_rows(index, plan.steps[index]):
                _add_row(table, *row)
        at += period
        if times > 1:
            last = at + period * (times - 1) - 1
            those = "step" if period == 1 else f"{period} steps"
            _add_row(
                table,
                Text(f"{at}-{last}", style="dim"),
                Text("...", style="dim"),
                Text(f"the same {those}, {counted(times - 1, 'more time')}", style="dim"),
            )
            at = last + 1
    return table


def _shape(step: SegmentStep | BreakStep) -> tuple[object, ...]:
    """What two steps have in common when a reader would call them the same."""
    if step.kind == "segment":
        return step.kind, step.num_ops, step.allocated_nbytes
    tensors = tuple((use.name, use.layout, use.provenance.origin) for use in step.tensors)
    name = step.name.partition("[")[0]
    return step.kind, name, tensors, step.values, tuple(step.outputs.values())


def _repeat(shapes: list[tuple[object, ...]], at: int) -> tuple[int, int]:
    """Length of the shortest run of up to eight steps that repeats from `at` on, and how often it stands."""
    for period in range(1, 9):
        times = 1
        run = shapes[at : at + period]
        while shapes[at + times * period : at + (times + 1) * period] == run:
            times += 1
        if times > 1:
            return period, times
    return 1, 1


Row = tuple[RenderableType, RenderableType, RenderableType]


def _step_rows(index: int, step: SegmentStep | BreakStep) -> Iterator[Row]:
    number = Text(str(index), style="dim")
    if step.kind == "segment":
        text = f"{counted(step.num_ops, 'op')}, allocates {format_bytes(step.allocated_nbytes)}"
        yield number, Text("segment", style="green"), Text(f"{text}; reads {_reads(step)}")
        return
    copies = f"copies {format_bytes(step.copied_nbytes)}" if step.copied_nbytes else "copies nothing"
    yield (
        number,
        Text("break", style="yellow"),
        Text.assemble((step.name, "bold"), f" {step.ownership.name}, {copies}"),
    )
    details = _grid()
    for use in step.tensors:
        origin = f"from {use.provenance}{', written in place' if use.mutated else ''}"
        style = "red" if use.provenance.origin is Origin.EXTERNAL else ""
        _add_row(details, use.name, str(use.layout), Text(origin, style=style))
    for name, layout in step.outputs.items():
        _add_row(details, Text(name, style="cyan"), str(layout), "")
    for value in step.values:
        how = f"live {value.live}" if value.live else f"frozen {value.value}"
        _add_row(details, Text(value.name, style="dim"), Text(how, style="dim"), "")
    if step.dims:
        yield "", "", Text(format_dims(step.dims))
    yield "", "", details
    if step.where:
        yield "", "", Text(step.where, style="dim")


def _reads(step: SegmentStep) -> str:
    """`2 inputs, 14 parameters, attention: output`."""
    by_origin: dict[Origin, int] = {}
    for use in step.reads:
        by_origin[use.provenance.origin] = by_origin.get(use.provenance.origin, 0) + 1
    parts = [
        counted(count, origin.value if origin is not Origin.SEGMENT else "earlier segment")
        for origin, count in by_origin.items()
    ]
    return ", ".join(parts) or "nothing from outside"


def _memory(plan: CapturePlan) -> Table:
    memory = plan.memory
    rows: Iterable[tuple[str, int, str]] = (
        ("graph pool", memory.pool_peak, f"predicted; {format_bytes(memory.pool_allocated)} in use at once"),
        ("static inputs", memory.static_inputs, "outside the pool"),
        ("parameters", memory.parameters, "read by segments and bodies"),
        ("externals", memory.externals, "kept alive by the capture"),
        ("copied in", memory.copied_in, "every replay"),
        ("copied at breaks", memory.copied_at_breaks, "every replay"),
        ("copied out", memory.copied_out, "every replay"),
    )
    table = _grid()
    for name, nbytes, note in rows:
        _add_row(table, name, format_bytes(nbytes), Text(note, style="dim"))
    return table


def _diagnostics(plan: CapturePlan) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for each in plan.diagnostics:
        step = f"step {each.step}" if each.step >= 0 else ""
        where = f"\n{each.where}" if each.where else ""
        _add_row(table, step, Text(each.code, style="red"), Text(f"{each.message}{where}"))
    return table
