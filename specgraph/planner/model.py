"""The capture plan: frozen data, and nothing else.

A plan lists, in order, the segments that will be captured and the breaks between them, what every body
is handed and where that memory lives, the buffers with their lifetimes, and what it all costs. What is
printed, diffed, checked or executed is computed from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Literal

import attrs
import cattrs

from ..converter import plan_converter
from ..errors import PlanError
from ..layout import ConcreteLayout
from ..spec import Ownership
from .provenance import Provenance
from .text import render

FORMAT = 1
"""Version of the JSON that `CapturePlan.to_json` writes."""


@attrs.frozen
class TensorUse:
    """A tensor that a body is handed or a segment reads.

    Args:
        name: the parameter (`key`, `kwargs['mask'][0]`); for a segment's read, the source.
        layout: its layout.
        provenance: where its memory lives.
        mutated: the body writes it.
    """

    name: str
    layout: ConcreteLayout
    provenance: Provenance
    mutated: bool = False


@attrs.frozen
class ValueUse:
    """A value that is no tensor, handed to a body.

    Args:
        name: the body's parameter.
        value: its text where it is frozen at capture; empty where it is live.
        live: name of the live value it receives at every replay; empty where it is frozen.
    """

    name: str
    value: str = ""
    live: str = ""


@attrs.frozen
class SegmentStep:
    """Consecutive ops captured into one graph.

    Args:
        num_ops: dispatcher ops that launch work, as traced on the host; another device may run others.
        allocated_nbytes: bytes the segment's ops allocate, before any is freed.
        reads: what it reads from outside itself, one entry a storage.
    """

    num_ops: int
    allocated_nbytes: int
    reads: tuple[TensorUse, ...]
    kind: Literal["segment"] = "segment"


@attrs.frozen
class BreakStep:
    """A call that runs eagerly.

    Args:
        name: the break's name, with the submodule in brackets where the target is a glob.
        target: what is called, as text.
        ownership: who makes the outputs' memory.
        dims: sizes bound by the input layouts.
        tensors: tensor arguments.
        values: other arguments, frozen or live.
        outputs: layouts of the results, by output name.
        copied_nbytes: bytes copied into the executor's buffers at every replay.
        where: the line of the model that calls it.
    """

    name: str
    target: str
    ownership: Ownership
    dims: Mapping[str, int | tuple[int, ...]]
    tensors: tuple[TensorUse, ...]
    values: tuple[ValueUse, ...]
    outputs: Mapping[str, ConcreteLayout]
    copied_nbytes: int
    where: str
    kind: Literal["break"] = "break"


@attrs.frozen
class Buffer:
    """Memory that outlives the step it was made in.

    Args:
        name: what it is: an input's name, `break: output`, or `segment N`.
        provenance: where it lives.
        layout: of the tensor it was made as.
        birth: index of the step that makes it; -1 for a static input.
        last_use: index of the last step that reads it; the number of steps where it is an output.
    """

    name: str
    provenance: Provenance
    layout: ConcreteLayout
    birth: int
    last_use: int


@attrs.frozen
class Memory:
    """What the capture will hold and every replay will move, in bytes.

    Args:
        static_inputs: static input buffers, outside the pool.
        parameters: parameters and buffers that segments and bodies read.
        externals: external tensors kept alive by the capture.
        pool_allocated: predicted peak of what is in use at once in the graph pool, in whole blocks.
        pool_peak: predicted size of the graph pool: the segments that CUDA's caching allocator takes for it.
        copied_in: copied from the caller's inputs at every replay.
        copied_at_breaks: copied from bodies' results at every replay.
        copied_out: copied into the outputs handed to the caller at every replay.
    """

    static_inputs: int
    parameters: int
    externals: int
    pool_allocated: int
    pool_peak: int
    copied_in: int
    copied_at_breaks: int
    copied_out: int


@attrs.frozen
class Diagnostic:
    """Something worth knowing about the plan.

    Args:
        code: stable name of the kind of diagnostic.
        message: what is the case, and what to do.
        step: index of the step concerned; -1 for none.
        where: line of the user's code; empty where there is none.
    """

    code: str
    message: str
    step: int = -1
    where: str = ""


@attrs.frozen
class CapturePlan:
    """How a model will be captured.

    Args:
        model: name of the `ModelSpec`.
        device: type of the device the inputs are on.
        dims: sizes bound by the model's input layouts.
        inputs: layouts of the static input buffers, by input name.
        values: inputs that are no tensors; frozen.
        live: names of the live values every replay hands in.
        steps: segments and breaks, in order.
        outputs: what the model returns, one entry a tensor.
        buffers: memory that outlives the step it was made in.
        memory: bytes held and moved.
        diagnostics: what is worth knowing.
    """

    model: str
    device: str
    dims: Mapping[str, int | tuple[int, ...]]
    inputs: Mapping[str, ConcreteLayout]
    values: tuple[ValueUse, ...]
    live: tuple[str, ...]
    steps: tuple[SegmentStep | BreakStep, ...]
    outputs: tuple[TensorUse, ...]
    buffers: tuple[Buffer, ...]
    memory: Memory
    diagnostics: tuple[Diagnostic, ...]

    @property
    def breaks(self) -> tuple[BreakStep, ...]:
        """The breaks, in order."""
        return tuple(step for step in self.steps if isinstance(step, BreakStep))

    @property
    def segments(self) -> tuple[SegmentStep, ...]:
        """The segments, in order."""
        return tuple(step for step in self.steps if isinstance(step, SegmentStep))

    @property
    def digest(self) -> str:
        """SHA-256 over what the plan says, independent of device and of where files lie."""
        data = plan_converter.unstructure(self)
        del data["device"], data["diagnostics"]
        for step in data["steps"]:
            step.pop("where", None)
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON, one step or buffer a line; `from_json` reads it back."""
        return _lines_of_json({"format": FORMAT, **plan_converter.unstructure(self)})

    @classmethod
    def from_json(cls, text: str) -> CapturePlan:
        """A plan from what `to_json` wrote.

        Raises:
            PlanError: the text is no plan, or one of another format.
        """
        fix = "write it again with `specgraph plan --format json` or `--lock`"
        try:
            data = json.loads(text)
            found = data.pop("format", None)
            data.pop("lock", None)
            if found not in (None, FORMAT):
                raise PlanError(f"the plan is of format {found}", expected=f"format {FORMAT}", fix=fix)
            return plan_converter.structure(data, cls)
        except (ValueError, AttributeError, cattrs.BaseValidationError) as error:
            raise PlanError(f"the text is no capture plan ({error})", fix=fix) from error

    def __str__(self) -> str:
        return render(self)


def _lines_of_json(data: Mapping[str, object]) -> str:
    """JSON with a line for each key and each element of a list, so that a change shows as its lines."""
    entries = []
    for key, value in data.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}"
