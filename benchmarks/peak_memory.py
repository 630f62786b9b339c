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

REPLAYS = 3
WARM_UPS = 3


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
    from breakable_cuda_graphs import BreakableCUDAGraph, breakable_graph, no_graph

    @no_graph  # type: ignore[untyped-decorator]  # the package is not installed for the checks
    def attend_into(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        out.copy_(chains.attention(query, key, value))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        attend_into(query, key, value, out)
        return out

    chain.attend_with(attend)
    static = x.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            chain(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = BreakableCUDAGraph()
    with torch.no_grad(), breakable_graph(graph):
        output: Tensor = chain(static)

    def replay(static: Tensor = static) -> Tensor:
        # The default argument keeps the graph's input alive, which the package leaves to its caller.
        with torch.no_grad():
            graph.replay()
        return output

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
    chain.attend_with(None)
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
