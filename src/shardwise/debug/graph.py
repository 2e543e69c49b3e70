"""make_fx over functions of DTensors: the graph of what one rank does with its locals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.fx.experimental.proxy_tensor import make_fx as make_graph
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardwise.tensor import DTensor

__all__ = ["make_fx"]


def make_fx(
    function: Callable[..., Any], *, tracing_mode: Literal["real", "fake", "symbolic"] = "real"
) -> Callable[..., torch.fx.GraphModule]:
    """A function that traces `function`, given the same arguments, into a graph of local operators and collectives.

    torch's own make_fx gives its inputs names in the graph, and what is inside them stays unknown to it. Here the
    inputs of the graph are the locals of the DTensors, in their order, and its results are locals, too.

    Args:
        function: takes and gives DTensors and other values.
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
