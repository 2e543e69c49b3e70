"""Gradients requested by parameter: `torch.autograd.grad` and `backward(inputs=...)` on data parallel modules.

A module computes with gathered leaves. Their gradients are reduced outside of autograd, and become `.grad` of the
stored parameters at the end of a backward. So autograd has no path to a stored parameter: torch would treat it as
unused, and return None or set no gradient without an error. These calls are refused. Both functions of torch are
wrapped when the first data parallel module is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, no_type_check

import torch
from torch.autograd.graph import GradientEdge

from shardwise.core.tracing import is_dynamo_compiling
from shardwise.errors import UnsupportedError
from shardwise.parallel.data_parallel.gathered_params import STORED
from shardwise.parallel.data_parallel.sharded_param import MARK

__all__ = ["wrap_autograd"]


@functools.cache
def wrap_autograd() -> None:
    """Let `torch.autograd.grad` and `torch.autograd.backward` refuse parameters of data parallel modules."""
    torch.autograd.grad = _refusing(torch.autograd.grad, 1)
    torch.autograd.backward = _refusing(torch.autograd.backward, 5)


def _refusing(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    """The function with a check of its argument `inputs`, the one at `position`."""

    @no_type_check  # a compiler may trace it, and hints of the function are not importable from its module
    @functools.wraps(function, assigned=("__doc__",))
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if (len(args) > position or kwargs.get("inputs") is not None) and not is_dynamo_compiling():
            args = tuple([_kept(each) for each in args])  # generators are read here, and once more by torch
            kwargs = {name: _kept(each) for name, each in kwargs.items()}
            inputs = args[position] if len(args) > position else kwargs["inputs"]
            asked = {id(each): getattr(each, MARK) for each in map(_stored, _listed(inputs)) if hasattr(each, MARK)}
            if asked:
                own = {_node(each) for each in _listed(inputs)}
                _refuse(args[0] if args else kwargs.get("outputs", kwargs.get("tensors", ())), asked, own)
        return function(*args, **kwargs)

    return refusing


def _kept(given: Any) -> Any:
    """An argument that can be iterated twice."""
    return tuple(given) if isinstance(given, Iterator) else given


def _node(given: Any) -> Any:
    """The node of autograd that gives a tensor, or that an edge names; None for a parameter."""
    return given.node if isinstance(given, GradientEdge) else getattr(given, "grad_fn", None)


def _stored(given: Any) -> Any:
    """The stored parameter that is asked for: by itself, by an edge of autograd, by a leaf that `unshard()` shows."""
    node = _node(given)
    if hasattr(node, STORED):
        return getattr(node, STORED)[given.output_nr]
    return getattr(node, "variable", given)


def _refuse(outputs: Any, asked: dict[int, str], own: set[Any]) -> None:
    """Raise if a result was computed from a gathered leaf of one of the parameters, given as names by id.

    Not with a leaf that is asked for itself, whose node is one of `own`.
    """
    for node in _nodes(outputs):
        if node in own:
            continue
        for stored in getattr(node, STORED, ()):
            if id(stored) in asked:
                raise UnsupportedError(
                    f"torch.autograd.grad or backward(inputs=...) requests the gradient of {asked[id(stored)]}: "
                    "gradients of data parallel modules are reduced outside of autograd, which treats their parameters "
                    "as unused",
                    hint="call backward() without inputs= and read .grad, with requires_grad_(False) on parameters "
                    "to leave out; or shard the batch alone, after distribute_module(model, mesh)",
                )


def _nodes(outputs: Any) -> Iterator[Any]:
    """All nodes of the graph of the results, once each."""
    waiting = [
        each.grad_fn if isinstance(each, torch.Tensor) else getattr(each, "node", None) for each in _listed(outputs)
    ]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            yield node


def _listed(given: Any) -> tuple[Any, ...]:
    """Tensors and graph edges as a tuple, from the forms that torch accepts: one, several, or a dict."""
    if given is None:
        return ()
    if isinstance(given, torch.Tensor | GradientEdge):
        return (given,)
    return tuple(given.values() if isinstance(given, dict) else given)
