"""The attention of diffusers' transformers (0.42): one break, which every spec of such a model can share.

diffusers calls all its attention backends through one function, `dispatch_attention_fn`; 48 of its
transformer files call it. Planning and capturing rebind every module-level name of it, so that models are
captured as diffusers ships them.

The result has the rows and heads of the query and the last dim of the value, whatever the batch dims in
front are, and whether keys and heads are shared (`enable_gqa`) or not. A mask is handed to the body like any
other argument, as a tensor that a segment or an input holds, of whatever shape the backend broadcasts;
scale, dropout, causality and backend are frozen at capture.
"""

from __future__ import annotations

from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

import specgraph as sg


def contiguous_attention(
    query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object
) -> Tensor:
    """diffusers' attention, in the memory layout that the break declares.

    Args:
        query: [*B Q H D].
        key: [*B K G D]; G is H, or divides it under `enable_gqa`.
        value: [*B K G V].
        args, kwargs: the mask and the rest, as `dispatch_attention_fn` takes them.

    Returns:
        [*B Q H V], contiguous.
    """
    out: Tensor = dispatch_attention_fn(query, key, value, *args, **kwargs)
    return out.contiguous()


ATTENTION = sg.BreakSpec(
    "diffusers.models.attention_dispatch:dispatch_attention_fn",
    sg.TensorLayout("*B Q H V", dtype=sg.like("query")),
    inputs={
        "query": sg.TensorLayout("*B Q H D"),
        "key": sg.TensorLayout("*B K G D", dtype=sg.like("query")),
        "value": sg.TensorLayout("*B K G V", dtype=sg.like("query")),
    },
    body=contiguous_attention,
    fusable=True,
    name="attention",
)

EAGER_ONLY = ("aten::*scaled_dot_product*",)
"""Ops of the attention that must not be in a segment, for `ModelSpec.eager_only`."""
