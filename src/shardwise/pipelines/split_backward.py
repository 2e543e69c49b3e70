"""Backward in two parts: first the gradients of the inputs, later those of the weights.

The graph is cut between operators that lead to an input and operators that lead only to weights. Part one runs the
former and keeps the gradients that arrive at the cut. Part two runs each operator at the cut again, for its weights,
and then backward from there. Both parts are backwards of autograd, so every node and every hook runs as usual.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.errors import UnsupportedError
from shardwise.torch_private import input_metadata

__all__ = ["WeightPart", "input_gradients"]

_Edge = tuple[Any, int]  # a node of autograd and the number of its input


def input_gradients(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], WeightPart]:
    """The gradients of inputs, and the rest of backward.

    Args:
        outputs: of a stage; each needs a gradient.
        gradients: of the outputs.
        inputs: leaves that need gradients.

    Example:
        >>> x, layer = torch.ones(1, 2, requires_grad=True), torch.nn.Linear(2, 1)
        >>> (gradient,), rest = input_gradients([layer(x)], [torch.ones(1, 1)], [x])
        >>> torch.equal(gradient, layer.weight), layer.weight.grad
        (True, None)
        >>> rest.run()
        >>> layer.weight.grad
        tensor([[1., 1.]])
    """
    roots: list[_Edge] = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, outputs)]
    above = _nodes_above([node for node, _ in roots], {get_gradient_edge(leaf).node for leaf in inputs})
    rest = WeightPart()
    through = []
    for number, (node, position) in enumerate(roots):
        if node in above:
            through.append(number)
        else:
            rest.keep((node, position), gradients[number])
    if not through:
        return [None] * len(inputs), rest
    handles = []
    for node in above:
        edges = [(at, edge) for at, edge in enumerate(node.next_functions) if edge[0] is not None]
        edges = [(at, edge) for at, edge in edges if edge[0] not in above]
        if not edges:
            continue
        if isinstance(node, BackwardCFunction):  # written in Python: it computes all its gradients at once
            handles.append(node.register_hook(_keeper(rest, edges)))
        else:
            handles.append(node.register_prehook(_deferrer(rest, node, edges)))
    try:
        found = torch.autograd.grad(
            [outputs[number] for number in through],
            list(inputs),
            [gradients[number] for number in through],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    return list(found), rest


def _nodes_above(roots: Sequence[Any], leaves: set[Any]) -> dict[Any, None]:
    """The nodes from which one of the leaves can be reached, those that backward runs first in front."""
    reaches: dict[Any, bool] = dict.fromkeys(leaves, True)
    order = []
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in reaches:
            stack.pop()
            continue
        following = [found for found, _ in node.next_functions if found is not None]
        waiting = [found for found in following if found not in reaches]
        if waiting:
            stack += waiting
            continue
        stack.pop()
        reaches[node] = any(reaches[found] for found in following)
        if reaches[node]:
            order.append(node)
    return dict.fromkeys([*reversed(order), *leaves])


def _keeper(rest: WeightPart, edges: Sequence[tuple[int, _Edge]]) -> Callable[..., None]:
    def keep(computed: tuple[Any, ...], _: Any) -> None:
        for at, edge in edges:
            rest.keep(edge, computed[at])

    return keep


def _deferrer(rest: WeightPart, node: Any, edges: Sequence[tuple[int, _Edge]]) -> Callable[..., None]:
    def defer(arrived: tuple[Any, ...]) -> None:
        if any(gradient is not None for gradient in arrived):
            rest.defer(node, tuple(arrived), edges)

    return defer


class WeightPart:
    """The rest of a backward after the gradients of its inputs."""

    def __init__(self) -> None:
        self._edges: list[_Edge] = []
        self._gradients: list[torch.Tensor] = []
        self._deferred: list[tuple[Any, tuple[Any, ...], Sequence[tuple[int, _Edge]]]] = []

    def keep(self, edge: _Edge, gradient: Any) -> None:
        """Keep a gradient at an edge to weights."""
        if gradient is not None:
            self._edges.append(edge)
            self._gradients.append(_fitting(gradient, edge))

    def defer(self, node: Any, gradients: tuple[Any, ...], edges: Sequence[tuple[int, _Edge]]) -> None:
        """Compute the gradients of a node along `edges` later."""
        self._deferred.append((node, gradients, edges))

    def run(self) -> None:
        """Accumulate the gradients of the weights, with their hooks."""
        deferred, self._deferred = self._deferred, []
        for wanted in _levels([edge for *_, edges in deferred for _, edge in edges]):
            parts = [(node, came, [e for e in edges if e[1] in wanted]) for node, came, edges in deferred]
            _run_in_backward(functools.partial(self._compute, [part for part in parts if part[2]]), wanted)
        edges, self._edges = self._edges, []
        gradients, self._gradients = self._gradients, []
        if edges:
            torch.autograd.backward([GradientEdge(node, number) for node, number in edges], gradients)

    def _compute(self, deferred: Sequence[tuple[Any, tuple[Any, ...], Sequence[tuple[int, _Edge]]]]) -> None:
        for node, gradients, edges in deferred:
            computed = node(*gradients)
            computed = computed if isinstance(computed, tuple) else (computed,)
            for at, edge in edges:
                self.keep(edge, computed[at])


def _levels(edges: Sequence[_Edge]) -> list[list[_Edge]]:
    """The edges in groups, within which no node leads to another."""
    wanted = {node for node, _ in edges}
    depth: dict[Any, int] = {}  # of wanted nodes below, at most
    stack = list(wanted)
    while stack:
        node = stack[-1]
        following = [found for found, _ in node.next_functions if found is not None]
        waiting = [found for found in following if found not in depth]
        if waiting and node not in depth:
            stack += waiting
            continue
        stack.pop()
        depth[node] = max([depth[found] + (found in wanted) for found in following], default=0)
    found: dict[int, dict[_Edge, None]] = {}
    for edge in edges:
        found.setdefault(depth[edge[0]], {})[edge] = None
    return [list(found[level]) for level in sorted(found)]


def _fitting(gradient: torch.Tensor, edge: _Edge) -> torch.Tensor:
    """A gradient in the shape and dtype of its edge. Operators leave it to autograd to undo broadcasting and casts."""
    meta = _metadata(*edge)
    if gradient.shape != torch.Size(meta.shape):
        gradient = gradient.sum_to_size(meta.shape)
    return gradient if gradient.dtype is meta.dtype else gradient.to(meta.dtype)


def _metadata(node: Any, number: int) -> Any:
    """Shape, dtype and device of a gradient that a node takes."""
    try:
        return input_metadata(node)[number]
    except RuntimeError as error:  # torch 2.11, of functions in Python
        raise UnsupportedError(
            f"a backward in two parts through {node.name()}: this version of torch has no sizes of its gradients",
            hint='use the schedule "1f1b" or "interleaved", or torch 2.13',
        ) from error


class _Within(torch.autograd.Function):
    """A node whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.work = work
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.work()
        return gradient, None


def _run_in_backward(work: Callable[[], None], edges: Sequence[_Edge]) -> None:
    """Call a function inside a backward that requests only the gradients along these edges.

    Nodes that are called there compute no others. The engine only needs to know the edges: they get zeros, which reach
    no other edge and no hook of a parameter.
    """
    wanted = [GradientEdge(*edge) for edge in edges]
    metas = [_metadata(edge.node, edge.output_nr) for edge in wanted]
    zeros = [torch.zeros((), dtype=meta.dtype, device=meta.device).expand(tuple(meta.shape)) for meta in metas]
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        called = _Within.apply(anchor, work)
    with _without_hooks([edge.node for edge in wanted]):
        asked: Any = [anchor, *wanted]
        torch.autograd.grad([called, *wanted], asked, [torch.ones(()), *zeros], allow_unused=True)


@contextlib.contextmanager
def _without_hooks(nodes: Sequence[Any]) -> Iterator[None]:
    """Inside, parameters among the nodes have no hooks."""
    found = [getattr(getattr(node, "variable", None), "_backward_hooks", None) for node in nodes]
    hooks = [(known, dict(known)) for known in found if known]
    for known, _ in hooks:
        known.clear()
    try:
        yield
    finally:
        for known, kept in hooks:
            known.update(kept)
