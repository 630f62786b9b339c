"""specgraph against eager, one whole graph, the published packages of broken graphs, and torch.compile.

One process, the same inputs for all, results compared with eager's before anything is timed; see
`specgraph.bench` for how. Writes its JSON anew after every work.

    python -m benchmarks.compare --out results.json
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from benchmarks.about import about
from benchmarks.peers import PEERS
from benchmarks.works import WORKS
from specgraph.bench import OWN, Protocol, bench

PACKAGES = ("breakable-cuda-graphs", "piecewise-cuda-graphs", "diffusers", "cuda-bindings")


def versions() -> dict[str, str | None]:
    """Of the packages that take part; None where one is missing."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def say(line: str) -> None:
    """To standard error, at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def measured(works: Sequence[str], batches: int, without: Sequence[str]) -> Any:
    """Each work's rows, as they come."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    contenders = [each for each in (*OWN, *PEERS) if each.name not in without]
    for name in works:
        protocol = Protocol(batches=batches, calls=WORKS[name].calls)
        say(name)
        rows = bench(WORKS[name].build(device), contenders, protocol, on_step=lambda step: say(f"  {step}"))
        for row in rows:
            say(f"  {row}")
        yield {"work": name, "protocol": attrs.asdict(protocol), "rows": [attrs.asdict(row) for row in rows]}
        gc.collect()


def main() -> None:
    """Measure, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", action="append", choices=list(WORKS))
    parser.add_argument("--without", action="append", default=[], metavar="CONTENDER")
    parser.add_argument("--batches", type=int, default=9)
    arguments = parser.parse_args()
    works: list[Any] = []
    for each in measured(arguments.work or list(WORKS), arguments.batches, arguments.without):
        works.append(each)
        result = {**about(), "versions": versions(), "works": works}
        arguments.out.write_text(f"{json.dumps(result, indent=1)}\n")


if __name__ == "__main__":
    main()
