"""Group sizes in layouts: `world("group")` is looked up where a layout that names it is used, never else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import nn as collectives
from torch.multiprocessing.spawn import spawn

import specgraph as sg
from specgraph.dims import evaluate, parse_dims
from specgraph.verify import build_preset, plan_preset, verify
from specs._vdn_attention import AttentionStep, inputs_tiny

ULYSSES = sg.load_spec(Path(__file__).parents[1] / "specs" / "ulysses.py")


@sg.graph_break(
    sg.TensorLayout('B T*world("ulysses") H//world("ulysses") D', sg.like("x")),
    inputs={"x": sg.TensorLayout("B T H D")},
)
def rows_for_heads(x: Tensor) -> Tensor:
    """The first half of Ulysses: a share of the rows for a share of the heads."""
    degree = distributed.get_world_size()
    sent = [each.contiguous() for each in x.chunk(degree, 2)]
    received = collectives.all_to_all([torch.empty_like(each) for each in sent], sent)
    return torch.cat(list(received), 1)


def mean_over_rows(x: Tensor) -> Tensor:
    return rows_for_heads(x * 2).mean(1)


def build() -> Callable[[Tensor], Tensor]:
    return mean_over_rows


def example() -> dict[str, Tensor]:
    return {"x": torch.randn(1, 6, 8, 4)}


def exchange(size: int | Callable[[], int], **changed: object) -> sg.ModelSpec:
    spec = sg.ModelSpec(
        "exchange",
        (rows_for_heads.spec,),
        groups={"ulysses": size},
        presets={"eight": sg.Preset(build, example, groups={"ulysses": 8}), "own": sg.Preset(build, example)},
    )
    return attrs.evolve(spec, **changed)  # type: ignore[arg-type]  # fields of several types


def never() -> int:
    raise AssertionError("looked up")


def test_a_preset_gives_the_size_that_no_group_is_there_for() -> None:
    spec = exchange(never)
    (step,) = plan_preset(spec, build_preset(spec.presets["eight"], {})).breaks
    assert str(step.outputs["output"]) == "float32[1 48 1 4]"
    assert step.dims == {"B": 1, "T": 6, "H": 8, "D": 4, 'world("ulysses")': 8}


def test_a_group_is_looked_up_by_the_calls_whose_layouts_name_it_and_no_other() -> None:
    asked: list[int] = []
    plain = attrs.evolve(rows_for_heads.spec, outputs=sg.TensorLayout("B T H D", sg.like("x")))

    def size() -> int:
        asked.append(1)
        return 4

    spec = exchange(size)
    sg.plan(mean_over_rows, attrs.evolve(spec, breaks=(plain,)), example())
    assert asked == []
    sg.plan(mean_over_rows, spec, example())
    assert asked == [1]


def test_an_argument_that_is_absent_has_no_group_looked_up() -> None:
    @sg.graph_break(
        sg.TensorLayout("T D", sg.like("x")),
        inputs={"x": sg.TensorLayout("T D"), "mask": sg.TensorLayout('T*world("sp")', torch.bool)},
    )
    def masked(x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x.clone() if mask is None else torch.where(mask[: len(x), None], x, 0)

    def double(x: Tensor, mask: Tensor | None = None) -> Tensor:
        return masked(x, mask) * 2

    spec = sg.ModelSpec("masked", (masked.spec,), groups={"sp": never})
    x = torch.randn(3, 2)
    assert torch.equal(sg.capture(double, spec, {"x": x})(x=x), x * 2)
    two = attrs.evolve(spec, groups={"sp": 2})
    mask = torch.tensor([True, False, True, False, False, False])
    captured = sg.capture(double, two, {"x": x, "mask": mask})
    assert torch.equal(captured(x=x, mask=mask), x * torch.tensor([2.0, 0, 2])[:, None])
    with pytest.raises(sg.LayoutError) as caught:
        sg.plan(double, two, {"x": x, "mask": mask[:5]})
    assert caught.value.problem == 'dim T*world("sp") is 5, not 6'
    assert caught.value.expected == 'bool[T*world("sp")] with world("sp")=2 T=3 D=2'


def test_a_size_that_cannot_be_looked_up_says_what_to_do() -> None:
    """Without a process group, torch raises ValueError; with one that this process is not in, it says -1."""
    with pytest.raises(sg.LayoutError) as caught:
        sg.plan(mean_over_rows, exchange(distributed.get_world_size), example())
    assert caught.value.problem.startswith('world("ulysses") could not be looked up: Default process group')
    assert caught.value.fix == (
        'initialise the group first, or give its size: ModelSpec.groups={"ulysses": 8}'
    )
    assert (caught.value.break_name, caught.value.tensor) == ("rows_for_heads", "output")
    for size in (-1, 0, lambda: -1):
        with pytest.raises(sg.LayoutError, match=r'world\("ulysses"\) is no number of processes'):
            sg.plan(mean_over_rows, exchange(size), example())


def test_a_group_that_the_model_does_not_declare_is_refused() -> None:
    with pytest.raises(sg.SpecError) as caught:
        sg.ModelSpec("exchange", (rows_for_heads.spec,), groups={"tp": 2})
    assert (caught.value.code, caught.value.break_name, caught.value.tensor) == (
        "SG111",
        "rows_for_heads",
        "output",
    )
    assert caught.value.expected == "one of: tp"
    for field in ("inputs", "outputs"):
        with pytest.raises(sg.SpecError, match="names group 'sp', which is not declared"):
            exchange(2, **{field: {"x": sg.TensorLayout('world("sp")', torch.int8)}})
    with pytest.raises(sg.LayoutError, match=r"give the group's size in ModelSpec\.groups"):
        evaluate(parse_dims('2*world("sp")')[0], {"sp": 2})  # type: ignore[arg-type]  # no *rest


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_groups_are_written_as_sizes_and_import_paths(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"exchange.{suffix}"
    by_path = attrs.evolve(rows_for_heads.spec, target=f"{__name__}:rows_for_heads")
    spec = exchange(distributed.get_world_size, breaks=(by_path,))
    sg.dump_spec(spec, path)
    assert "torch.distributed.distributed_c10d:get_world_size" in path.read_text()
    loaded = sg.load_spec(path)
    assert loaded.groups == {"ulysses": distributed.get_world_size}
    assert loaded.presets["eight"].groups == {"ulysses": 8}
    path.write_text(
        path.read_text().replace("torch.distributed.distributed_c10d:get_world_size", "nowhere:size")
    )
    with pytest.raises(sg.SpecError, match="nowhere"):
        sg.load_spec(path)


def test_sequence_parallel_attention_is_planned_and_replayed_without_a_group(device: torch.device) -> None:
    """CASES 12."""
    assert not distributed.is_initialized()
    report = verify(ULYSSES, ULYSSES.presets["tiny"], device=device, replays=5)
    assert [each.difference for each in report.rounds] == [None] * 5
    assert (report.num_segments, len(report.plan.breaks)) == (2, 1)


def _in_each_process(rank: int, size: int, rendezvous: str, kind: str) -> None:
    backend = "nccl" if kind == "cuda" else "gloo"
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    distributed.init_process_group(backend, f"file://{rendezvous}", rank=rank, world_size=size)
    try:
        _attention_over_shards(rank, size, device)
        _exchange_of_rows_for_heads(rank, size, device)
    finally:
        distributed.destroy_process_group()


def _attention_over_shards(rank: int, size: int, device: torch.device) -> None:
    report = verify(ULYSSES, ULYSSES.presets["tiny"], device=device, replays=5)
    assert report.passed
    assert (report.num_segments, len(report.plan.breaks)) == (2, 1)
    assert not [name for name in report.plan.breaks[0].dims if name.startswith("world")]
    # The shards together are the attention of one process over all rows.
    built = build_preset(ULYSSES.presets["tiny"], {}, device)
    assert isinstance(built.fn, AttentionStep)
    torch.manual_seed(1)
    with device:
        whole = {name: each.bfloat16() for name, each in inputs_tiny(1).items()}
    whole["position_ids"] = whole["position_ids"].float()
    shard = {name: each.chunk(size, each.dim() - 2)[rank].contiguous() for name, each in whole.items()}
    with torch.no_grad():
        captured = sg.capture(built.fn, ULYSSES, shard)
        ours = captured(None, **shard)
        built.fn.attn.processor._parallel_config = None
        alone = built.fn(**whole)
    torch.testing.assert_close(ours, alone.chunk(size, 1)[rank], rtol=0.02, atol=0.02)
    assert not torch.allclose(ours, alone.chunk(size, 1)[1 - rank], rtol=0.02, atol=0.02)


def _exchange_of_rows_for_heads(rank: int, size: int, device: torch.device) -> None:
    spec = exchange(distributed.get_world_size)
    report = verify(spec, spec.presets["own"], device=device)
    assert report.passed
    assert str(report.plan.breaks[0].outputs["output"]) == "float32[1 12 4 4]"
    x = torch.arange(2 * 6 * 8 * 4.0, device=device).view(1, 12, 8, 4)
    captured = sg.capture(mean_over_rows, spec, {"x": x.chunk(size, 1)[rank].contiguous()})
    replayed = captured(x=x.chunk(size, 1)[rank].contiguous())
    assert torch.equal(replayed, (x * 2).mean(1).chunk(size, 1)[rank])


@pytest.mark.parametrize(
    "kind",
    ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)],
)
def test_two_processes_exchange_rows_at_a_break(tmp_path: Path, kind: str) -> None:
    if kind == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes one GPU a process")
    spawn(_in_each_process, (2, str(tmp_path / "rendezvous"), kind), nprocs=2)
