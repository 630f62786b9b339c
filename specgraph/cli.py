"""The command line. torch is imported by the commands that need it, not by `--help`.

Results go to standard output, plain where that is no terminal; progress and errors go to standard error.
Exit codes: 0, all is well; 1, the plan is refused or a replay differs; 2, the command was not understood.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import torch

    from .bench import Row

F = TypeVar("F", bound=Callable[..., Any])

PLAIN_WIDTH = 110
"""Columns of output that goes to no terminal."""


def _console(stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False)


@contextlib.contextmanager
def _errors_in_words() -> Iterator[None]:
    """Print a SpecGraphError and leave with exit code 1."""
    from .errors import SpecGraphError

    try:
        yield
    except SpecGraphError as error:
        kind = type(error).__name__
        _console(stderr=True).print(Text.assemble((kind, "bold red"), f": {error}"), soft_wrap=True)
        sys.exit(1)


def _parse_dims(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    dims = {}
    for value in values:
        name, _sign, number = value.partition("=")
        if not name.isidentifier() or not number.isdigit():
            raise click.BadParameter(f"{value!r} is not of the form NAME=N")
        dims[name] = int(number)
    return dims


def _common(command: F) -> F:
    """The arguments that all commands on one spec share."""
    for option in (
        click.option(
            "dims",
            "--dim",
            metavar="NAME=N",
            multiple=True,
            callback=_parse_dims,
            help="A dim of the preset's example; may be repeated.",
        ),
        click.option("--preset", help="Which preset; may be left out where there is one."),
        click.argument("spec", type=click.Path(exists=True, dir_okay=False)),
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specgraph")
def main() -> None:
    """CUDA graphs for models that cannot be captured whole: plan them, check them, verify them."""


@main.command()
@_common
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--lock", is_flag=True, help="Also write the plan beside SPEC, as <spec>.plan.json.")
def plan(spec: str, preset: str | None, dims: dict[str, int], form: str, lock: bool) -> None:
    """Print the capture plan of SPEC. No GPU, no weights and no body of a break is needed."""
    status = _console(stderr=True)
    with _errors_in_words():
        with status.status("loading the spec and building the model"):
            from .specfile import load_spec
            from .verify import build_preset, name_of_preset, plan_preset

            loaded = load_spec(spec)
            preset = name_of_preset(loaded, preset)
            built = build_preset(loaded.presets[preset], dims)
        with status.status("planning"):
            start = time.perf_counter()
            made = plan_preset(loaded, built)
            seconds = time.perf_counter() - start
    if form == "json":
        sys.stdout.write(f"{made.to_json()}\n")
    elif sys.stdout.isatty():
        from .planner.text import renderable

        _console().print(renderable(made))
    else:
        sys.stdout.write(f"{made}\n")
    status.print(f"planned in {seconds:.2f} s")
    if lock:
        from .lock import lock_path, write_lock

        write_lock(lock_path(spec), preset, dims, made)
        status.print(f"locked in {lock_path(spec)}", soft_wrap=True)


@main.command()
@click.argument("specs", metavar="SPEC...", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option("--locked", is_flag=True, help="Also plan each spec, and compare with its lock file.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json", "github"]), default="text", show_default=True
)
def check(specs: tuple[str, ...], locked: bool, form: str) -> None:
    """Say what is wrong with each SPEC, without running its model.

    Exit code 1 where anything is wrong. Each finding has the code of a rule in docs/rules.md.
    """
    status = _console(stderr=True)
    findings = []
    with status.status("loading"):
        from .check import check_file, formatted
    for spec in specs:
        with status.status(f"checking {spec}"):
            findings += check_file(spec, locked)
    sys.stdout.write(formatted(findings, form))
    clean = len(specs) - len({finding.file for finding in findings})
    status.print(f"{clean} of {len(specs)} clean")
    sys.exit(1 if findings else 0)


@main.command()
@click.argument("old", type=click.Path(exists=True, dir_okay=False))
@click.argument("new", type=click.Path(exists=True, dir_okay=False))
@click.option("--preset", help="Which preset to plan, where OLD or NEW is a spec.")
def diff(old: str, new: str, preset: str | None) -> None:
    """Say in words what moved between two plans: plan JSON, lock files, or specs.

    Exit code 1 where the plans differ.
    """
    with _errors_in_words(), _console(stderr=True).status("reading the plans"):
        from .check import plan_of
        from .planner.changes import compare

        changes = compare(plan_of(old, preset), plan_of(new, preset))
    console = _console()
    for change in changes:
        console.print(Text(change.message), soft_wrap=not console.is_terminal)
    if not changes:
        console.print("the plans are the same")
    sys.exit(1 if changes else 0)


_backend = click.option(
    "--backend", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
    help="auto is cuda where there is a GPU.",
)  # fmt: skip


@main.command()
@_common
@_backend
@click.option("--replays", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--poison", is_flag=True, help="Fill memory that nothing may read with NaN.")
def verify(
    spec: str, preset: str | None, dims: dict[str, int], backend: str, replays: int, poison: bool
) -> None:
    """Capture SPEC and compare replays with eager runs, bit for bit, on fresh inputs each time."""
    status = _console(stderr=True)
    with _errors_in_words(), _progress(status) as progress:
        bar = progress.add_task("loading the spec", total=replays)
        from .specfile import load_spec
        from .verify import choose_preset
        from .verify import verify as run

        loaded = load_spec(spec)
        progress.update(bar, description="building, capturing, replaying")
        report = run(
            loaded,
            choose_preset(loaded, preset),
            dims=dims,
            device=_device(backend),
            replays=replays,
            poison=poison,
            on_round=lambda: progress.advance(bar),
        )
    _print_report(report)
    sys.exit(0 if report.passed else 1)


def _device(backend: str) -> torch.device:
    import torch

    is_cuda = backend == "cuda" or (backend == "auto" and torch.cuda.is_available())
    return torch.device("cuda", 0) if is_cuda else torch.device("cpu")


@main.command()
@_common
@_backend
@click.option("--calls", type=click.IntRange(min=1), default=200, show_default=True, help="Calls a batch.")
@click.option("--batches", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def bench(
    spec: str, preset: str | None, dims: dict[str, int], backend: str, calls: int, batches: int, form: str
) -> None:
    """Time SPEC eagerly, as one whole graph, segmented and fused, once all agree bit for bit.

    Exit code 1 where one of them returns other results than eager.
    """
    status = _console(stderr=True)
    with _errors_in_words(), status.status("loading the spec and building the model") as spinner:
        from . import bench as timing
        from .specfile import load_spec
        from .verify import choose_preset

        loaded = load_spec(spec)
        rows = timing.bench_preset(
            loaded,
            choose_preset(loaded, preset),
            dims=dims,
            device=_device(backend),
            protocol=timing.Protocol(batches=batches, calls=calls),
            on_step=spinner.update,
        )
    if form == "json":
        sys.stdout.write(f"{timing.to_json(rows)}\n")
    else:
        _print_rows(rows)
    sys.exit(1 if any(row.is_wrong for row in rows) else 0)


def _print_rows(rows: Sequence[Row]) -> None:
    console = _console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for heading in ("us a call", "of eager", "host us", "capture ms", "pool MiB"):
        table.add_column(heading, justify="right")
    eager = next((row.wall_us for row in rows if row.wall_us is not None), None)
    for row in rows:
        of_eager = row.wall_us / eager if row.wall_us and eager else None
        table.add_row(
            row.name,
            _figure(row.wall_us, 1, ".1f"),
            _figure(of_eager, 1, ".2f"),
            _figure(row.host_us, 1, ".1f"),
            _figure(row.capture_s, 1e3, ".1f"),
            _figure(row.pool_nbytes, 2**-20, ".1f"),
        )
    console.print(table)
    for row in rows:
        for reason in filter(None, (row.problem, row.difference)):
            console.print(Text(f"{row.name}: {reason}"), soft_wrap=not console.is_terminal)


def _figure(value: float | None, scale: float, form: str) -> str:
    return "-" if value is None else format(value * scale, form)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print_report(report: Any) -> None:
    from .planner.text import counted

    console = _console()
    for number, each in enumerate(report.rounds, 1):
        live = ", ".join(f"{name}={value}" for name, value in each.live.items())
        mark = ("differs", "bold red") if each.difference else ("equal", "green")
        console.print(Text.assemble(f"replay {number}  ", mark, f"  {live}"))
        if each.difference:
            console.print(Text(f"  {each.difference}"))
    plan = report.plan
    against = "eager and the unedited model" if report.has_reference else "eager"
    verdict = ("passed", "bold green") if report.passed else ("failed", "bold red")
    console.print(
        Text.assemble(
            verdict,
            f": {plan.model} on {report.device}, {counted(report.num_segments, 'segment')} and "
            f"{counted(len(plan.breaks), 'break')}, replays against {against}, rtol=0 atol=0",
        ),
        soft_wrap=not console.is_terminal,
    )
