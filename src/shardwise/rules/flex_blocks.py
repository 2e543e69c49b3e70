"""`flex_attention` block by block: scores, masks and their gradients on plain tensors, by functions of positions.

The operators defined here take only queries, keys and values. Functions that modify scores and hide keys are not
arguments: they are active in `functions` during the call. Layouts do not depend on them.
"""

from __future__ import annotations

import contextlib
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardwise.core.mode_stack import ModeStack
from shardwise.core.spec import DTensorSpec
from shardwise.rules.attention import KERNELS, KEY, OUT, QUERY, SUMS, VALUE, algorithms_of, attention
from shardwise.rules.attention_blocks import BackwardBlocks, BlockOutput, ForwardBlocks, ScoreTile, wide_dtype
from shardwise.rules.mask_reach import Blocks, Reach, reach_of_function
from shardwise.rules.registry import rule
from shardwise.torch_private import scalar_lookups

__all__ = ["FlexFunctions", "Positions", "Reaches", "for_each_score", "functions", "repeat_heads", "sum_heads"]

MOST_MASKS = 16  # cached reaches
LOG2 = math.log(2)  # torch's operator gives logarithms to base 2


class Positions(NamedTuple):
    """The samples, heads and queries of a rank, by their indices in the global tensor."""

    samples: torch.Tensor
    heads: torch.Tensor
    queries: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FlexFunctions:
    """The functions of a call. Their arguments are scalars, and tensors that are replicated.

    Args:
        score: of a score, sample, head, query and key, and the tensors of `captured`: the score to use.
        gradient: of the same and the gradient of the result: first the gradient of the score. None in a forward.
        mask: of a sample, head, query and key, and the tensors of `mask_captured`: whether the key is seen.
        captured: the tensors that `score` is given.
        mask_captured: those that `mask` is given.
        learned: which of `captured` need gradients.
        gradients: the gradients of these, in the order of `captured`. A backward appends a local for each, summed over
            the rank's queries, with the layout of the queries.
    """

    score: Callable[..., Any]
    gradient: Callable[..., Any] | None
    mask: Callable[..., Any]
    captured: tuple[Any, ...] = ()
    mask_captured: tuple[Any, ...] = ()
    learned: tuple[bool, ...] = ()
    gradients: list[tuple[torch.Tensor, DTensorSpec]] = field(default_factory=list)

    def visible(self, samples: Any, heads: Any, queries: Any, keys: Any) -> Any:
        """Whether keys are seen, by sample, head, query and key."""
        with _calling():
            found = for_each_score(self.mask, 0, len(self.mask_captured))
            return found(samples, heads, queries, keys, *self.mask_captured)

    def modified(self, products: Any, indices: Sequence[Any]) -> Any:
        """The scores to use."""
        with _calling():
            return for_each_score(self.score, 1, len(self.captured))(products, *indices, *self.captured)

    def of_products(self, products: Any, indices: Sequence[Any], of_scores: Any) -> tuple[Any, list[Any]]:
        """The gradients of the products of queries and keys, and of `learned`, from the gradient of the scores."""
        gradient = self.gradient
        assert gradient is not None, "of a backward"

        def wanted(*args: Any) -> tuple[Any, ...]:
            first, *rest = gradient(*args)
            return first, *(grad for grad, learned in zip(rest[4:], self.learned, strict=False) if learned)

        with _calling():
            # results that are not mapped are summed: torch adds up the gradients of captured tensors
            out_dims = (0, *(None,) * sum(self.learned))
            found = for_each_score(wanted, 1, 1 + len(self.captured), (0,), out_dims)
            first, *learned = found(products, *indices, of_scores, *self.captured)
            return first, learned

    def begin(self, found: Sequence[ScoreTile], positions: Positions) -> None:
        """Called before the tiles of a block are computed."""

    def dropped(self, tile: ScoreTile, x: Any) -> Any:
        """Scores of a tile after dropout. Without dropout, the scores themselves."""
        return x


@contextlib.contextmanager
def _calling() -> Iterator[None]:
    """Allows `vmap` of functions of scalars inside an operator on DTensors, where torch disables it."""
    with torch.overrides.enable_reentrant_dispatch(), torch.no_grad(), scalar_lookups():
        yield


functions = ModeStack[FlexFunctions]("functions of flex_attention")


class _Known(NamedTuple):
    """The reach of a mask, the tensors that the mask read, and their versions."""

    mask: Callable[..., Any]
    captured: tuple[Any, ...]  # numbers, and weak references to tensors
    versions: tuple[int, ...]
    reach: Reach | None


class Reaches:
    """The reaches of masks that are functions, with a cache of the latest.

    A user's function may read any state, so it is evaluated in every call. A function traced by torch reads only its
    arguments: it is evaluated again only after a write to one of them.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def find(
        self, used: FlexFunctions, sizes: tuple[int, ...], device: torch.device, blocks: tuple[Blocks, Blocks]
    ) -> Reach | None:
        """The reach of a mask of these numbers of samples, heads, queries and keys; None: all keys may be needed."""
        tensors = [x for x in used.mask_captured if isinstance(x, torch.Tensor)]
        kept = _is_traced(used.mask) and not any(x.is_inference() for x in tensors)  # inference tensors lack versions
        versions = tuple([x._version for x in tensors]) if kept else ()
        for known in self._known if kept else ():
            given = [x() if isinstance(x, weakref.ref) else x for x in known.captured]
            same = len(given) == len(used.mask_captured) and all(map(operator.is_, given, used.mask_captured))
            if known.mask is used.mask and same and known.versions == versions:
                return known.reach
        samples, heads, _, columns = (torch.arange(size, device=device) for size in sizes)

        def visible(start: int, count: int) -> torch.Tensor:
            return used.visible(samples, heads, torch.arange(start, start + count, device=device), columns)

        reach = reach_of_function(visible, sizes[2], *blocks)
        if kept:
            captured = tuple([weakref.ref(x) if isinstance(x, torch.Tensor) else x for x in used.mask_captured])
            self._known = [*self._known[1 - MOST_MASKS :], _Known(used.mask, captured, versions, reach)]
        return reach


def _is_traced(function: Callable[..., Any]) -> bool:
    """Whether torch has traced a function, and it has no tensors of its own."""
    if not isinstance(function, torch.fx.GraphModule):
        return False
    return all(node.op != "get_attr" for node in function.graph.nodes)


def for_each_score(
    function: Callable[..., Any],
    before: int,
    after: int,
    mapped: tuple[int, ...] = (),
    out_dims: int | tuple[int | None, ...] = 0,
) -> Callable[..., Any]:
    """A function of `before` scores, four indices and `after` more, on all of them.

    Args:
        function: called with scalars.
        before: the number of scores before the indices.
        after: the number of arguments after the indices.
        mapped: arguments after the indices that are scores too; the others are passed unchanged.
        out_dims: None for results that are not scores.
    """
    following = tuple(0 if i in mapped else None for i in range(after))
    for index in reversed(range(4)):
        of_indices = tuple(0 if i == index else None for i in range(4))
        in_dims = ((0,) * before) + of_indices + following
        function = torch.vmap(function, in_dims=in_dims, out_dims=out_dims)  # pyright: ignore[reportArgumentType]
    return function


class _Tile(NamedTuple):
    """The scores of a tile: products, arguments of softmax, the mask; indices."""

    products: torch.Tensor
    final: torch.Tensor
    allowed: torch.Tensor
    indices: tuple[torch.Tensor, ...]


def _scores(arguments: Mapping[str, Any], tile: ScoreTile, query: torch.Tensor, keys: torch.Tensor) -> _Tile:
    wide, used, positions = wide_dtype(query), arguments["functions"], arguments["positions"]
    products = query.to(wide) @ keys.to(wide).mT * arguments["scale"]
    columns = torch.arange(tile.first, tile.first + tile.columns, device=query.device)
    rows = positions.queries
    rows = rows if tile.rows == rows.shape[0] else rows.narrow(0, tile.row, tile.rows)
    indices = (positions.samples, positions.heads, rows, columns)
    allowed = used.visible(*indices)
    final = torch.where(allowed, used.modified(products, indices), -math.inf)
    return _Tile(products, final, allowed, indices)


def repeat_heads(x: Any, query: Any) -> Any:
    """Keys or values repeated for each head of the queries (grouped-query attention)."""
    groups = query.shape[1] // x.shape[1]
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def sum_heads(grad: Any, like: Any) -> Any:
    """The gradient of keys or values from that of repeated heads."""
    groups = grad.shape[1] // like.shape[1]
    return grad.unflatten(1, (-1, groups)).sum(2) if groups > 1 else grad


class FlexForward(ForwardBlocks):
    """The output of one block of queries over the blocks of keys seen so far, and the largest score of each."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.largest: torch.Tensor | None = None

    def add(self, key: torch.Tensor, value: torch.Tensor, found: list[ScoreTile]) -> None:
        """Add a block of keys."""
        self.arguments["functions"].begin(found, self.arguments["positions"])
        super().add(key, value, found)

    def block_output(self, tile: ScoreTile, key: torch.Tensor, value: torch.Tensor) -> BlockOutput:
        """The output of a tile."""
        query = tile.of_rows(self.query)
        final = _scores(self.arguments, tile, query, repeat_heads(key, query)).final
        largest = final.amax(-1)
        dead = largest == -math.inf  # queries without keys
        if self.largest is None:
            self.largest = largest.new_full(self.query.shape[:3], -math.inf)
        so_far = tile.of_rows(self.largest)
        so_far.copy_(torch.maximum(so_far, largest))
        weights = final.softmax(-1).masked_fill(dead.unsqueeze(-1), 0.0)
        weights = self.arguments["functions"].dropped(tile, weights)
        shift = largest.masked_fill(dead, 0.0).unsqueeze(-1)
        rest = (final - shift).exp().sum(-1).log().masked_fill(dead, 0.0)
        return BlockOutput(weights @ repeat_heads(value, query).to(final.dtype), largest, rest)

    def results(self, value_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the logarithm of the sum of exponentials, to base 2; `others` has the largest scores."""
        nothing = self.query.new_full(self.query.shape[:3], -math.inf, dtype=wide_dtype(self.query))
        sums = None if self.lse is None else self.logsumexp()
        largest, lse = (nothing if x is None else x / LOG2 for x in (self.largest, sums))
        self.others = (largest if largest is not lse else largest.clone(),)
        if self.out is None:
            return self.query.new_zeros((*self.query.shape[:3], value_size)), lse
        return self.out.to(self.query.dtype), lse


class FlexBackward(BackwardBlocks):
    """The gradients of one block of queries, and of the blocks of keys added to it."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        wide = self.grad_query.dtype
        given = (self.out.to(wide) * self.grad_out.to(wide)).sum(-1, keepdim=True)
        of_sums = arguments.get("grad_logsumexp")
        self.given = given if of_sums is None else given - of_sums.to(wide).unsqueeze(-1) / LOG2
        used = arguments["functions"]
        self.learned = [
            torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format)
            for x, learned in zip(used.captured, used.learned, strict=False)
            if learned
        ]

    def add(self, key: torch.Tensor, value: torch.Tensor, found: list[ScoreTile]) -> tuple[torch.Tensor, torch.Tensor]:
        """The contribution to the gradients of a block of keys and values; those of queries are accumulated."""
        self.arguments["functions"].begin(found, self.arguments["positions"])
        return super().add(key, value, found)

    def block_gradients(
        self, tile: ScoreTile, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The contribution of a tile to the gradients of its queries, keys and values."""
        query, grad_out, lse, given = (tile.of_rows(x) for x in (self.query, self.grad_out, self.lse, self.given))
        keys, values = repeat_heads(key, query), repeat_heads(value, query)
        scores = _scores(self.arguments, tile, query, keys)
        wide, used = scores.final.dtype, self.arguments["functions"]
        dead = (lse == -math.inf).unsqueeze(-1)
        weights = (scores.final - lse.to(wide).unsqueeze(-1) * LOG2).exp().masked_fill(dead, 0.0)
        of_final = weights * (used.dropped(tile, grad_out.to(wide) @ values.to(wide).mT) - given)
        of_products, learned = used.of_products(scores.products, scores.indices, of_final)
        for total, grad in zip(self.learned, learned, strict=True):
            total.add_(grad)
        of_products = torch.where(scores.allowed, of_products * self.arguments["scale"], 0.0).to(query.dtype)
        return (
            of_products @ keys.to(query.dtype),
            sum_heads(of_products.mT @ query, key),
            sum_heads(used.dropped(tile, weights).to(query.dtype).mT @ grad_out, value),
        )


class FlexKernel:
    """Blocks of `flex_attention`; it reads positions and functions."""

    by_position = True

    def forward(self, arguments: Mapping[str, Any]) -> FlexForward:
        """Begin the output of a block of queries."""
        return FlexForward(arguments)

    def backward(self, arguments: Mapping[str, Any]) -> FlexBackward:
        """Begin the gradients of a block of queries."""
        return FlexBackward(arguments)


FLEX = FlexKernel()

# ---------------------------------------------------------------- operators

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("flex_attention(Tensor query, Tensor key, Tensor value, float scale) -> (Tensor, Tensor, Tensor)")
_library.define(
    "flex_attention_backward(Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor grad_out, "
    "Tensor? grad_logsumexp, float scale) -> (Tensor, Tensor, Tensor)"
)


def _result_shapes(query: Any, key: Any, value: Any, scale: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sums = query.new_empty(query.shape[:3], dtype=wide_dtype(query))
    return query.new_empty((*query.shape[:3], value.shape[-1])), sums, torch.empty_like(sums)


def _gradient_shapes(query: Any, key: Any, value: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, second, third = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    return first, second, third


_library.impl("flex_attention", _result_shapes, "Meta")
_library.impl("flex_attention_backward", _gradient_shapes, "Meta")
forward, backward = torch.ops.shardwise.flex_attention.default, torch.ops.shardwise.flex_attention_backward.default
for op, results in ((forward, (OUT, SUMS, SUMS)), (backward, (QUERY, KEY, VALUE))):
    rule(op, algorithms=algorithms_of(*results, empty=True))(attention(*results))
    KERNELS[op] = FLEX, op is backward
