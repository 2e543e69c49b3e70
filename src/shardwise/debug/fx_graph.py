"""make_fx for functions of DTensors: traces the operators of one rank on its local tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.fx.experimental.proxy_tensor import make_fx as make_graph

from shardwise.tensor import DTensor
from shardwise.torch_private import tree_flatten, tree_map_only, tree_unflatten

__all__ = ["make_fx"]


def make_fx(
    function: Callable[..., Any], *, tracing_mode: Literal["real", "fake", "symbolic"] = "real"
) -> Callable[..., torch.fx.GraphModule]:
    """Return a function that traces `function` into a graph of local operators and collectives.

    torch's own make_fx makes its inputs placeholders, and cannot see the local tensor inside a DTensor. Here the
    inputs of the graph are the local tensors of the DTensors, in their order, and its results are local tensors, too.

    Args:
        function: takes and returns DTensors and other values.
        tracing_mode: "real", "fake" or "symbolic", as in torch.

    Example:
        >>> import shardwise as sw
        >>> x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)])
        >>> graph = make_fx(lambda t: t + 1)(x)
        >>> [node.target for node in graph.graph.nodes if node.op == "call_function"]
        [<OpOverload(op='aten.add', overload='Tensor')>]
    """

    def trace(*args: Any, **kwargs: Any) -> torch.fx.GraphModule:
        leaves, tree = tree_flatten((args, kwargs))
        specs = {i: leaf.spec for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor)}

        def of_locals(*given: Any) -> Any:
            wrapped = [DTensor(value, specs[i]) if i in specs else value for i, value in enumerate(given)]
            new_args, new_kwargs = tree_unflatten(wrapped, tree)
            return tree_map_only(DTensor, lambda tensor: tensor._local_tensor, function(*new_args, **new_kwargs))

        return make_graph(of_locals, tracing_mode=tracing_mode)(
            *[leaf._local_tensor.detach() if i in specs else leaf for i, leaf in enumerate(leaves)]
        )

    return trace
