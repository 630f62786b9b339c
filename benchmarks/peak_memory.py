"""Peak memory of capture and replay, specgraph against breakable-cuda-graphs 0.1.0, on the same chains.

Each row runs in a process of its own: weights and input are made, then the CUDA allocator's peaks are reset,
the chain is warmed up, captured, and replayed three times, and the result is compared with eager bit for bit.
Reported in bytes, above what was there before: the peak of allocated and of reserved memory.

    python -m benchmarks.peak_memory --out results.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import specgraph as sg
from benchmarks import chains
from benchmarks.about import about
from benchmarks.chains import Chain
from benchmarks.peers import prepare_breakable
from specgraph.bench import Case

REPLAYS = 3


def with_specgraph(chain: Chain, x: Tensor) -> Callable[[], Tensor]:
    """Capture; returns a replay."""
    captured = sg.capture(chain, chains.SPEC, {"x": x})

    def replay() -> Tensor:
        captured.replay()
        output: Tensor = captured.outputs
        return output

    return replay


def with_breakable_cuda_graphs(chain: Chain, x: Tensor) -> Callable[[], Tensor]:
    """Capture as its README says; returns a replay."""
    ready = prepare_breakable(Case(chain, chains.SPEC, sg.Example({"x": x}), x.device))
    replay: Callable[[], Tensor] = ready.call
    return replay


IMPLEMENTATIONS = {
    "specgraph": with_specgraph,
    "breakable-cuda-graphs": with_breakable_cuda_graphs,
}


def measure(implementation: str, work: str) -> dict[str, int]:
    """Peaks in bytes, in this process."""
    device = torch.device("cuda", 0)
    chain, x = chains.build(chains.SIZES[work], device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    replay = IMPLEMENTATIONS[implementation](chain, x)
    for _ in range(REPLAYS):
        output = replay()
    torch.cuda.synchronize()
    peaks = {
        "allocated_nbytes": torch.cuda.max_memory_allocated() - allocated,
        "reserved_nbytes": torch.cuda.max_memory_reserved() - reserved,
    }
    with torch.no_grad():
        if not torch.equal(output, chain(x)):
            raise AssertionError(f"{implementation} differs from eager on {work}")
    return peaks


def main() -> None:
    """Measure every row in a process of its own, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", nargs=2, metavar=("IMPLEMENTATION", "WORK"))
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure(*arguments.row)))  # noqa: T201  # read by the parent process
        return
    rows = []
    for work in chains.SIZES:
        for implementation in IMPLEMENTATIONS:
            command = [sys.executable, "-m", "benchmarks.peak_memory", "--row", implementation, work]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append({"work": work, "implementation": implementation, **json.loads(done.stdout)})
    text = json.dumps({**about(), "replays": REPLAYS, "rows": rows}, indent=1)
    print(text)  # noqa: T201  # a script's output
    if arguments.out is not None:
        arguments.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
