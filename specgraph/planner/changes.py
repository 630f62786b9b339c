"""What moved between two plans, in words.

Breaks are aligned by name, so that one that is inserted does not shift the rest; steps between the same
two breaks are compared with each other. What many steps have in common is said once. Plans with different
digests always differ in words: where nothing more telling is found, the fields that differ are named.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from ..converter import plan_converter
from ..dims import Dims
from .model import BreakStep, CapturePlan, Memory, SegmentStep, TensorUse, ValueUse
from .provenance import Origin, Provenance
from .text import counted, format_bytes


@attrs.frozen
class Change:
    """One thing that moved.

    Args:
        kind: stable name of the kind of change.
        message: what moved, with old and new values.
        count: how many steps changed the same way.
    """

    kind: str
    message: str
    count: int = 1


def compare(old: CapturePlan, new: CapturePlan) -> tuple[Change, ...]:
    """What moved from `old` to `new`, most important first; nothing where the digests are equal."""
    if old.digest == new.digest:
        return ()
    pairs = _aligned(old, new)
    same = [(old.breaks[i], new.breaks[j]) for i, j in pairs]
    found = [
        *_grouped(_lost_and_found(old, new, pairs)),
        *_model(old, new),
        *_grouped(change for before, after in same for change in _break(before, after)),
        *_grouped(_segments(old, new, pairs)),
        *_memory(old.memory, new.memory),
    ]
    return tuple(found or _fields(old, new))


def _aligned(old: CapturePlan, new: CapturePlan) -> list[tuple[int, int]]:
    """Indices of the breaks that are the same break in both plans."""
    before, after = ([step.name for step in plan.breaks] for plan in (old, new))
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]


def _grouped(changes: Iterable[Change]) -> list[Change]:
    """Equal changes as one, with their count."""
    counts: dict[tuple[str, str], int] = {}
    for change in changes:
        key = (change.kind, change.message)
        counts[key] = counts.get(key, 0) + change.count
    return [
        Change(kind, message if count == 1 else f"{count} times: {message}", count)
        for (kind, message), count in counts.items()
    ]


def _plain(name: str) -> str:
    """A break's name without the submodule it stands at."""
    return name.partition("[")[0]


def _lost_and_found(old: CapturePlan, new: CapturePlan, pairs: list[tuple[int, int]]) -> Iterator[Change]:
    sides = (
        (new, {j for _, j in pairs}, "break-added", "appeared"),
        (old, {i for i, _ in pairs}, "break-removed", "went away"),
    )
    for plan, matched, kind, verb in sides:
        for index, step in enumerate(plan.breaks):
            if index not in matched:
                where = f", called at {step.where}" if step.where else ""
                yield Change(kind, f"break {_plain(step.name)} {verb}{where}")


def _model(old: CapturePlan, new: CapturePlan) -> Iterator[Change]:
    if old.model != new.model:
        yield Change("model", f"the model is called {new.model} (was {old.model})")
    if text := _dims_moved(old.dims, new.dims):
        yield Change("dims", f"the model's dims: {text}")
    yield from _entries("inputs", "input", old.inputs, new.inputs)
    layouts = [{use.name: use.layout for use in plan.outputs} for plan in (old, new)]
    yield from _entries("outputs", "the model's", layouts[0], layouts[1])
    sources = [{use.name: _source(use.provenance) for use in plan.outputs} for plan in (old, new)]
    kept = sources[0].keys() & sources[1].keys()
    before, after = ({name: each[name] for name in each if name in kept} for each in sources)
    yield from _entries("outputs", "where the model's output comes from:", before, after)
    yield from _values("frozen input", old.values, new.values)
    for name in sorted(set(old.live) ^ set(new.live)):
        yield Change("live", f"live value {name} {'appeared' if name in new.live else 'went away'}")


def _dims_moved(old: Dims, new: Dims) -> str:
    names = [*old, *(name for name in new if name not in old)]
    return ", ".join(
        f"{name} {_size(old.get(name))} -> {_size(new.get(name))}"
        for name in names
        if old.get(name) != new.get(name)
    )


def _size(value: int | tuple[int, ...] | None) -> str:
    if value is None:
        return "none"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _entries(kind: str, what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in old:
            yield Change(kind, f"{what} {name} appeared: {new[name]}")
        elif name not in new:
            yield Change(kind, f"{what} {name} went away: {old[name]}")
        elif old[name] != new[name]:
            yield Change(kind, f"{what} {name}: {old[name]} -> {new[name]}")


def _values(what: str, old: tuple[ValueUse, ...], new: tuple[ValueUse, ...]) -> Iterator[Change]:
    before, after = (
        {each.name: f"live {each.live}" if each.live else f"frozen {each.value}" for each in values}
        for values in (old, new)
    )
    yield from _entries("value", what, before, after)


def _source(provenance: Provenance) -> str:
    """Where a tensor comes from, without what shifts when a step is inserted."""
    if provenance.origin is Origin.SEGMENT:
        return "a segment"
    return re.sub(r"\[[^\]:]*\](?=: )", "", str(provenance))


def _break(old: BreakStep, new: BreakStep) -> Iterator[Change]:
    name = _plain(new.name)
    if old.target != new.target:
        yield Change("target", f"break {name}: target {old.target} -> {new.target}")
    if old.ownership is not new.ownership:
        yield Change("ownership", f"break {name}: {old.ownership.name} -> {new.ownership.name}")
    if text := _dims_moved(old.dims, new.dims):
        yield Change("dims", f"break {name}: {text}")
    before, after = ({use.name: use for use in step.tensors} for step in (old, new))
    layouts = [{key: use.layout for key, use in uses.items()} for uses in (before, after)]
    yield from _entries("argument", f"break {name}: argument", layouts[0], layouts[1])
    for key in before:
        if key in after:
            yield from _argument(f"break {name}: {key}", before[key], after[key])
    yield from _values(f"break {name}:", old.values, new.values)
    yield from _entries("layout", f"break {name}:", old.outputs, new.outputs)
    if old.copied_nbytes != new.copied_nbytes:
        moved = _moved("copies", old.copied_nbytes, new.copied_nbytes)
        yield Change("copied", f"break {name} {moved}")


def _argument(place: str, old: TensorUse, new: TensorUse) -> Iterator[Change]:
    before, after = _source(old.provenance), _source(new.provenance)
    if before != after:
        became_external = (
            new.provenance.origin is Origin.EXTERNAL and old.provenance.origin is not Origin.EXTERNAL
        )
        hazard = "; replays read that very tensor from now on" if became_external else ""
        yield Change("provenance", f"{place} now comes from {after} (was {before}){hazard}")
    if old.mutated != new.mutated:
        yield Change("argument", f"{place} is {'now' if new.mutated else 'no longer'} written in place")


def _segments(old: CapturePlan, new: CapturePlan, pairs: list[tuple[int, int]]) -> Iterator[Change]:
    """Segments that follow the same break, or the start, compared."""
    before, after = _by_break(old), _by_break(new)
    for i, j in [(-1, -1), *pairs]:
        place = f"the segment after {_plain(new.breaks[j].name)}" if j >= 0 else "the first segment"
        one, two = before.get(i), after.get(j)
        if one is not None and two is not None:
            yield from _segment(place, one, two)
        elif one is not two:
            yield Change("segment", f"{place} {'appeared' if one is None else 'went away'}")


def _by_break(plan: CapturePlan) -> dict[int, SegmentStep]:
    """Segments by the index of the break before them; -1 for the first."""
    found = {}
    index = -1
    for step in plan.steps:
        if isinstance(step, SegmentStep):
            found[index] = step
        else:
            index += 1
    return found


def _segment(place: str, old: SegmentStep, new: SegmentStep) -> Iterator[Change]:
    if old.num_ops != new.num_ops:
        verb = "grew" if new.num_ops > old.num_ops else "shrank"
        yield Change("segment", f"{place} {verb} from {counted(old.num_ops, 'op')} to {new.num_ops}")
    if old.allocated_nbytes != new.allocated_nbytes:
        text = _moved("allocates", old.allocated_nbytes, new.allocated_nbytes)
        yield Change("segment", f"{place} {text}")
    before, after = ({_source(use.provenance) for use in step.reads} for step in (old, new))
    for source in sorted(after - before):
        yield Change("segment", f"{place} now reads {source}")
    for source in sorted(before - after):
        yield Change("segment", f"{place} no longer reads {source}")


_MEMORY: tuple[tuple[str, str, Callable[[Memory], int]], ...] = (
    ("pool-peak", "pool peak", lambda memory: memory.pool_peak),
    ("pool-peak", "in use at once in the pool", lambda memory: memory.pool_allocated),
    ("copied", "copied at breaks", lambda memory: memory.copied_at_breaks),
    ("copied", "copied in", lambda memory: memory.copied_in),
    ("copied", "copied out", lambda memory: memory.copied_out),
    ("memory", "static inputs", lambda memory: memory.static_inputs),
    ("memory", "parameters", lambda memory: memory.parameters),
    ("memory", "externals", lambda memory: memory.externals),
)


def _memory(old: Memory, new: Memory) -> Iterator[Change]:
    for kind, what, get in _MEMORY:
        if get(old) != get(new):
            yield Change(kind, _moved(what, get(old), get(new)))


def _moved(what: str, old: int, new: int) -> str:
    """`copied in doubled: 1.0 KiB -> 2.0 KiB`, `pool peak +18 %: ...`."""
    values = f"{format_bytes(old)} -> {format_bytes(new)}"
    if format_bytes(old) == format_bytes(new):
        values = f"{old} -> {new} bytes"
    if old and new == 2 * old:
        return f"{what} doubled: {values}"
    if new and old == 2 * new:
        return f"{what} halved: {values}"
    share = f" {100 * (new - old) / old:+.0f} %" if old and new else ""
    return f"{what}{share}: {values}"


def _fields(old: CapturePlan, new: CapturePlan) -> Iterator[Change]:
    """The last resort: names of the fields that differ."""
    before, after = (plan_converter.unstructure(plan) for plan in (old, new))
    for name in before:
        if before[name] != after[name] and name not in ("device", "diagnostics"):
            yield Change("other", f"{name} differ in detail; see the plans' JSON")
