"""Other ways to run the same work: the two published packages of broken graphs, and torch.compile.

The packages want a break to write into memory that the caller has made, so each break's outputs are
predicted here by hand, as their users do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specgraph.bench import Case, Contender, NotMeasured, Ready, pool_nbytes, warm_up
from specgraph.executor.stats import CaptureTimes
from specgraph.spec import BreakSpec
from specgraph.substitution import Body, substituted


def attention_output(query: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Where an attention's result goes, [B S H D]."""
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def embedding_outputs(
    text: Tensor, audio: Tensor, video: Tensor, timestep: Tensor, hidden_like: Tensor, time_like: Tensor
) -> dict[str, Tensor]:
    """Where the results of MiniMax-H3's embedding go, by the names of its parameters."""
    rows = text.shape[1] + audio.shape[1] + video.shape[1]
    return {
        "packed": hidden_like.new_empty(text.shape[0], rows, len(hidden_like)),
        "temb": time_like.new_empty(len(timestep), len(time_like)),
    }


def broken_at(no_graph: Callable[[Callable[..., None]], Callable[..., None]]) -> Callable[..., Body]:
    """The substitute that breaks the graph at a body, through a package's decorator."""

    def substitute(spec: BreakSpec, body: Body) -> Body:
        @no_graph
        def write_into(out: Tensor, *args: Any, **kwargs: Any) -> None:
            out.copy_(body(*args, **kwargs))

        @no_graph
        def write(*args: Any, **kwargs: Any) -> None:
            body(*args, **kwargs)

        def attention(*args: Any, **kwargs: Any) -> Tensor:
            out = attention_output(*args, **kwargs)
            write_into(out, *args, **kwargs)
            return out

        def embedding(model: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            outputs = embedding_outputs(*args, **kwargs)
            write(model, *args, **kwargs, **outputs)
            return tuple(outputs.values())

        return embedding if spec.name == "embed" else attention

    return substitute


def _prepare_broken(case: Case, no_graph: Any, new: Callable[[], Any], capturing: Any) -> Ready:
    if case.device.type != "cuda":
        raise NotMeasured("needs a GPU")
    static = case.static_inputs()
    graph = new()
    with substituted(case.spec, case.fn, case.live, broken_at(no_graph)):
        warm = warm_up(case, static)
        start = time.perf_counter()
        with torch.no_grad(), capturing(graph):
            outputs = case.fn(**static)
        times = CaptureTimes(warm, 0.0, time.perf_counter() - start)

    def call() -> Any:
        with torch.no_grad():
            graph.replay()
        return outputs

    # The names are bound no longer: what was captured holds what it calls.
    return Ready(static, call, pool_nbytes=pool_nbytes(graph.pool()), times=times)


def prepare_breakable(case: Case) -> Ready:
    """breakable-cuda-graphs, as its README says."""
    from breakable_cuda_graphs import BreakableCUDAGraph, breakable_graph, no_graph

    return _prepare_broken(case, no_graph, BreakableCUDAGraph, breakable_graph)


def prepare_piecewise(case: Case) -> Ready:
    """piecewise-cuda-graphs, as its README says."""
    from piecewise_cuda_graphs import CUDAGraphSequence, no_graph, piecewise_graph

    return _prepare_broken(case, no_graph, CUDAGraphSequence, piecewise_graph)


def prepare_compiled(case: Case) -> Ready:
    """torch.compile with its own graphs; what breaks elsewhere is left out of compilation here."""
    if case.device.type != "cuda":
        raise NotMeasured("needs a GPU")
    torch._dynamo.reset()
    static = case.static_inputs()
    compiled = torch.compile(case.fn, mode="reduce-overhead")

    def active() -> Any:
        return substituted(case.spec, case.fn, case.live, decorate=disabled)

    def call() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return compiled(**static)

    start = time.perf_counter()
    with active():
        for _ in range(5):
            call()
    torch.cuda.synchronize(case.device)
    return Ready(static, call, active, times=CaptureTimes(time.perf_counter() - start, 0.0, 0.0))


def disabled(body: Body) -> Body:
    """Left out of compilation."""
    result: Body = torch.compiler.disable(body)
    return result


PEERS = (
    Contender("breakable-cuda-graphs", prepare_breakable),
    Contender("piecewise-cuda-graphs", prepare_piecewise),
    Contender("torch.compile", prepare_compiled, is_exact=False),
)
