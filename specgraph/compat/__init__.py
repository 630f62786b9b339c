"""Published decorator APIs for breakable graphs, over specgraph's executor and its checks.

Code that is written for SGLang's breakable graph (`eager_on_graph`, `BreakableCUDAGraphCapture`) or for the
package breakable-cuda-graphs 0.1.0 (`no_graph`, `breakable_graph`) runs on specgraph by changing its imports
to this module. There is no spec and no plan: what a decorated call returned at capture is what every replay
must return again, and that is checked before anything is written. `docs/migrating.md` says what each name
does here, and how to go on from a decorator to a `BreakSpec`.

The names keep their "CUDA"; where there is no GPU the graphs are the reference backend's.
"""

from .capture import BreakableCUDAGraphCapture, breakable_graph, is_in_breakable_graph
from .decorators import EagerFunction, break_graph, eager_on_graph, force_no_graph, no_graph
from .graph import BreakableCUDAGraph

__all__ = [
    "BreakableCUDAGraph",
    "BreakableCUDAGraphCapture",
    "EagerFunction",
    "break_graph",
    "breakable_graph",
    "eager_on_graph",
    "force_no_graph",
    "is_in_breakable_graph",
    "no_graph",
]
