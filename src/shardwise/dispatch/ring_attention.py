"""Runs attention over a sharded sequence by the algorithm that `plan/sequence_attention.py` has chosen.

In a ring a rank sends its own block to the next rank that needs it while it computes on the received block. In backward
its results for a block go directly to the rank of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise import modes
from shardwise.core.cache import BoundedCache
from shardwise.core.layout import Run
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.core.tracing import is_tracing
from shardwise.dispatch.decision import decided
from shardwise.dispatch.executors import executor
from shardwise.dispatch.operands import operand_mover
from shardwise.dispatch.signature import Executor, Signature, routes_between
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import BoundRoute, Rotation, bound_rotations, bound_rows
from shardwise.fabric.traced_collectives import is_recorded
from shardwise.local import in_order_of
from shardwise.plan.propagate import OpSchema, OutputSharding
from shardwise.plan.route import Route
from shardwise.plan.sequence_attention import AttentionChoice, Pairs, choose_attention, position_along, ring_blocks
from shardwise.rules.attention import KERNELS
from shardwise.rules.attention_blocks import (
    MASKS,
    SEQUENCE,
    BackwardBlocks,
    ForwardBlocks,
    Kernel,
    ScoreTile,
    band_tiles,
    far_tiles,
    tiles,
)
from shardwise.rules.flex_blocks import Positions, Reaches
from shardwise.rules.flex_blocks import functions as flex_functions
from shardwise.rules.mask_reach import Blocks, Reach, reach_of
from shardwise.schema import OpInfo

__all__ = ["attending"]

MOST_REACHES = 16  # cached executors of one signature: one for each algorithm and each reach of masks
BY_MASK = (None, "ring", "halo")  # preferences under which the values of a mask matter
Ranks = Sequence[tuple[Coordinate, Mapping[str, Any]]]  # the coordinates and arguments of the ranks of this process
KeyBlock = tuple[torch.Tensor, torch.Tensor, list[ScoreTile]]  # keys, values, and the scores to compute with them


def attending(
    signature: Signature,
    sharding: OutputSharding,
    metas: tuple[TensorMeta, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Executor | None:
    """The executor of attention over a sharded sequence, by the user's preference; None to use the rule.

    Args:
        signature: the call.
        sharding: the layouts of the operator's own rule.
        metas: shape, stride and dtype of each result.
        args: the arguments of this call; only a mask that all ranks have is read.
        kwargs: those given by name.
    """
    routes = routes_between(signature.specs, sharding.inputs)
    by_position = KERNELS[signature.info.op][0].by_position
    if not by_position and not any(route is not None and route.communicates for route in routes):
        return None
    if KERNELS[signature.info.op][1] and not any(slot.name.startswith("grad_out") for slot in signature.slots):
        return None  # a backward without a gradient, of which kernels make none
    schema = OpSchema(signature.info.op, signature.arguments, signature.specs)
    blocks = ring_blocks(schema, metas) if _is_readable(signature) else None
    reaches = Reaches()

    def known_reach(prefer: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reach | None:
        if blocks is None or prefer not in BY_MASK or not modes.may_read_values():
            return None
        return _reach(signature, blocks, args, kwargs, reaches)

    prefer, max_bytes = modes.preferred_attention()
    reach = known_reach(prefer, args, kwargs)
    choice = choose_attention(schema, metas, prefer, reach, max_bytes)
    if choice is None:
        return None
    decided(choice.algorithm, signature, choice.sharding, choice.why, by_values=blocks is not None)
    made: BoundedCache[Any, Executor] = BoundedCache(MOST_REACHES)
    made.keep((prefer, max_bytes, reach), _executor(signature, choice))

    def run_attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        prefer, max_bytes = modes.preferred_attention()
        reach = known_reach(prefer, args, kwargs)
        known = made.get((prefer, max_bytes, reach))
        if known is None:
            chosen = choose_attention(schema, metas, prefer, reach, max_bytes)
            assert chosen is not None, "the possible algorithms do not depend on the preferred one"
            known = made.keep((prefer, max_bytes, reach), _executor(signature, chosen))
        return known(args, kwargs)

    return run_attention


def _is_readable(signature: Signature) -> bool:
    """Whether there is a mask that all ranks have, so that they make the same decision."""
    if KERNELS[signature.info.op][0].by_position:
        return fabric_of(signature.mesh).has_values
    spec = signature.arguments.get("attn_mask")
    return isinstance(spec, DTensorSpec) and spec.is_replicated and fabric_of(signature.mesh).has_values


def _reach(
    signature: Signature,
    blocks: tuple[Blocks, Blocks],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    reaches: Reaches,
) -> Reach | None:
    """The keys that the mask of a call lets queries see; None: all, or unknown."""
    if is_tracing():
        return None
    given = signature.info.bind(args, kwargs)
    if KERNELS[signature.info.op][0].by_position:
        query, key = given["query"], given["key"]
        return reaches.find(flex_functions.values()[-1], (*query.shape[:3], key.shape[2]), query.device, blocks)
    mask = given.get("attn_mask")
    if not isinstance(mask, torch.Tensor):
        return None
    if type(mask) is torch.Tensor:
        return reach_of(mask, *blocks)
    local: Any = getattr(mask, "_local_tensor", None)
    return None if local is None else reach_of(fabric_of(signature.mesh).parts(signature.mesh, local)[0][1], *blocks)


def _executor(signature: Signature, choice: AttentionChoice) -> Executor:
    if choice.halo:
        return _returning(signature, choice, _by_halos(signature, choice))
    run = executor(signature, choice.sharding) if choice.pairs is None else _by_blocks(signature, choice, choice.pairs)
    return _returning(signature, choice, run)


def _returning(signature: Signature, choice: AttentionChoice, run: Executor) -> Executor:
    """`run` with its results redistributed to their layouts."""
    back = routes_between(choice.sharding.outputs, choice.returns)
    wraps = [signature.wrapping.wrapper(spec) for spec in choice.returns]
    moves: list[tuple[int, BoundRoute]] = [(i, route) for i, route in enumerate(back) if route is not None]
    if not moves:
        return run

    def run_and_return(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        results = list(run(args, kwargs))
        for i, route in moves:
            results[i] = wraps[i](route.run(results[i]._local_tensor))
        return tuple(results)

    return run_and_return


# ---------------------------------------------------------------- block by block


class _Plan:
    """Facts computed once for a call that runs block by block."""

    def __init__(self, signature: Signature, choice: AttentionChoice, pairs: Pairs) -> None:
        self.mesh, self.pairs = signature.mesh, pairs
        self.fabric = fabric_of(self.mesh)
        self.inputs = dict(zip([slot.name for slot in signature.slots], choice.sharding.inputs, strict=True))
        self.rounds, self.back = _bound(choice.rounds), _bound(choice.back)
        self.kernel, self.is_backward = KERNELS[signature.info.op]

    def tiles(self, coordinate: Coordinate, block: int) -> list[ScoreTile]:
        """The part of a block that a rank computes. In a dry run all of it: one rank represents the slowest."""
        if not fabric_of(self.mesh).has_values:
            rows, columns = (self.inputs[name].local_shape(coordinate)[SEQUENCE] for name in ("query", "key"))
            # its keys may be more than those of an uneven block: the columns of a mask end with the last key
            first = min(self.pairs.key_runs[block][0].start, self.inputs["key"].shape[SEQUENCE] - columns)
            return [tile.within(0, 0, first) for tile in tiles(rows, columns, None)]
        return self.pairs.tiles(coordinate, block)

    def block_at(self, coordinate: Coordinate, turn: int) -> int:
        """The block of keys that a rank has in this turn."""
        return (self.pairs.position(coordinate) - turn) % self.pairs.count

    def unpacked(self, flat: torch.Tensor, coordinate: Coordinate, block: int) -> list[torch.Tensor]:
        """The keys and values in a flat buffer."""
        found, at = [], 0
        for name in ("key", "value"):
            shape = list(self.inputs[name].local_shape(coordinate))
            if fabric_of(self.mesh).has_values:
                shape[SEQUENCE] = self.pairs.length(block)
            size = torch.Size(shape).numel()
            found.append(flat.narrow(0, at, size).view(shape))
            at += size
        return found


def _keep_learned(kernel: Kernel, query: DTensorSpec, states: Sequence[tuple[Coordinate, BackwardBlocks]]) -> None:
    """Pass each rank's gradients of tensors that functions capture to the operator's caller."""
    if not kernel.by_position or not states:
        return
    used = flex_functions.values()[-1]
    for i in range(sum(used.learned)):
        by_rank = {coordinate: state.learned[i] for coordinate, state in states}
        used.gradients.append((fabric_of(query.mesh).build(query.mesh, by_rank.__getitem__), query))


Beside = Callable[[Coordinate, torch.Tensor], dict[str, Any]]


def _beside(kernel: Kernel, query: DTensorSpec) -> Beside:
    """Additional inputs of kernels, by the coordinate of a rank and its queries."""
    if not kernel.by_position:
        return lambda coordinate, local: {}
    used, has_values = flex_functions.values()[-1], fabric_of(query.mesh).has_values

    def positions(coordinate: Coordinate, local: torch.Tensor) -> dict[str, Any]:
        found = []
        for dim, size in enumerate(local.shape[:3]):
            # in a dry run one rank represents all
            runs = query.runs(dim, coordinate) if has_values else (Run(0, size),)
            parts = [torch.arange(run.start, run.start + run.length, device=local.device) for run in runs]
            found.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return {"functions": used, "positions": Positions(*found)}

    return positions


def _bound(route: Route | None) -> tuple[Callable[[], None], dict[int, Rotation]]:
    return (lambda: None, {}) if route is None else bound_rotations(route)


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors one after the other in a flat buffer."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _by_blocks(signature: Signature, choice: AttentionChoice, pairs: Pairs) -> Executor:
    """Each rank attends its queries to one block of keys after the other."""
    info, mesh = signature.info, signature.mesh
    inputs, outputs = choice.sharding.inputs, choice.sharding.outputs
    routes = routes_between(signature.specs, inputs)
    move_operands, plan = operand_mover(signature, routes), _Plan(signature, choice, pairs)
    moving = [route.route for route in routes if route is not None and route.communicates]
    moving += [route for route in (choice.rounds, choice.back) if route is not None and route.steps]
    compute = _backward if plan.is_backward else _forward
    wraps = [signature.wrapping.wrapper(spec) for spec in outputs]

    def attend_by_blocks(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if moving:
            modes.check_strict(info.op, moving)
        plain, beside = info.bind(args, kwargs), _beside(plan.kernel, plan.inputs["query"])
        columns = [
            plan.fabric.parts(mesh, _stored(local, spec, name))
            for local, (name, spec) in zip(move_operands(args, kwargs), plan.inputs.items(), strict=True)
        ]
        ranks = []
        for row in zip(*columns, strict=True):
            named = {slot.name: part for slot, (_, part) in zip(signature.slots, row, strict=True)}
            ranks.append((row[0][0], {**plain, **named, **beside(row[0][0], named["query"])}))
        return _wrapped(info, compute(plan, ranks), iter(zip(wraps, outputs, strict=True)))

    return attend_by_blocks


def _by_halos(signature: Signature, choice: AttentionChoice) -> Executor:
    """Each rank attends its queries to the keys near them, which it has received."""
    info, mesh, fabric = signature.info, signature.mesh, fabric_of(signature.mesh)
    inputs, outputs = choice.sharding.inputs, choice.sharding.outputs
    kernel, is_backward = KERNELS[info.op]
    names = [slot.name for slot in signature.slots]
    specs = dict(zip(names, inputs, strict=True))
    routes = routes_between(signature.specs, inputs)
    move_operands, exchanges = operand_mover(signature, routes), [bound_rows(step) for step in choice.halo]
    moving = [route.route for route in routes if route is not None and route.communicates]
    moving += [route for route, _ in exchanges if route.collectives]
    wraps = [signature.wrapping.wrapper(spec) for spec in outputs]
    at = [names.index(name) for name in ("key", "value")]

    def attend_by_halos(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if moving:
            modes.check_strict(info.op, moving)
        plain, beside = info.bind(args, kwargs), _beside(kernel, specs["query"])
        moved = zip(move_operands(args, kwargs), specs.items(), strict=True)
        locals_ = [_stored(local, spec, name) for local, (name, spec) in moved]
        received = exchanges[0][1]([locals_[i] for i in at], 0)
        ranks: list[tuple[Coordinate, Mapping[str, Any]]] = []
        results: list[list[Any]] = []
        states: list[tuple[Coordinate, BackwardBlocks]] = []
        for row in zip(*(fabric.parts(mesh, local) for local in (*locals_, *received)), strict=True):
            coordinate, parts = row[0][0], [part for _, part in row]
            named = dict(zip(names, parts, strict=False))
            ranks.append((coordinate, {**plain, **named, **beside(coordinate, named["query"])}))
            tiles_of = _near_and_far_tiles(choice, specs["query"], specs["key"], coordinate)
            blocks = list(zip(parts[len(names) :: 2], parts[len(names) + 1 :: 2], tiles_of, strict=True))
            if is_backward:
                states.append((coordinate, kernel.backward(ranks[-1][1])))
                results.append(_gradients_of(states[-1][1], named["query"].dtype, blocks))
            else:
                results.append(_attended(kernel.forward(ranks[-1][1]), blocks))
        _keep_learned(kernel, specs["query"], states)
        made = _locals_of_ranks(mesh, ranks, results)
        if is_backward:
            made[1:] = exchanges[1][1](made[1:], 0)
        return _wrapped(info, made, iter(zip(wraps, outputs, strict=True)))

    return attend_by_halos


def _near_and_far_tiles(
    choice: AttentionChoice, query: DTensorSpec, key: DTensorSpec, coordinate: Coordinate
) -> list[list[ScoreTile]]:
    """The scores of a rank's queries with near keys, and with far ones."""
    ((start, rows),) = query.runs(SEQUENCE, coordinate)
    length = key.shape[SEQUENCE]
    found = [band_tiles(start, rows, start - choice.band[0], length, choice.band)]
    if choice.far:
        far = choice.far[position_along(query.mesh, key.dim_axes[SEQUENCE], coordinate)]
        found.append(far_tiles(start, rows, far, length, choice.band))
    return found


def _attended(state: ForwardBlocks, blocks: Sequence[KeyBlock]) -> list[Any]:
    """The results of one rank: its queries with near and far keys and values."""
    for key, value, found in blocks:
        state.add(key, value, found)
    return [*state.results(blocks[0][1].shape[-1]), *state.others]


def _gradients_of(state: BackwardBlocks, dtype: torch.dtype, blocks: Sequence[KeyBlock]) -> list[Any]:
    """The gradients of one rank's queries, and of near and far keys and values."""
    grads = [grad for key, value, found in blocks for grad in state.add(key, value, found)]
    return [state.grad_query.to(dtype), *grads]


def _stored(local: torch.Tensor, spec: DTensorSpec, name: str) -> torch.Tensor:
    """A local that kernels can read: copied if it has broadcast dims. Masks may have them."""
    return local.clone(memory_format=torch.contiguous_format) if spec.broadcast and name not in MASKS else local


def _wrapped(info: OpInfo, results: Sequence[Any], fresh: Any) -> tuple[Any, ...]:
    """The wrapped results of an operator; the last may be a gradient that was not requested."""

    def wrapped(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        wrap, spec = next(fresh)
        stride = spec.tensor_meta.stride
        return wrap(in_order_of(result, stride) if result.dim() == len(stride) else result)

    missing = len(info.op._schema.returns) - len(results)
    return (*(wrapped(result) for result in results), *(None,) * missing)


def _circulate(plan: _Plan, ranks: Ranks, see: Callable[[int, list[list[torch.Tensor]]], None]) -> list[torch.Tensor]:
    """Call `see` with each turn and the keys and values of this process's ranks in it; None if they need none.

    Returns blocks that arrived on this rank and were not needed, which a compiler would remove.
    """
    announce, rotations = plan.rounds
    unused: list[torch.Tensor] = []
    own = {coordinate: [given["key"], given["value"]] for coordinate, given in ranks}
    flat = None
    if rotations:
        announce()
        flat = plan.fabric.build(plan.mesh, lambda coordinate: _packed(own[coordinate]))
    blocks: list[Any] = list(own.values())
    for turn in range(plan.pairs.count):
        rotation = rotations.get(turn + 1)
        arriving = None if rotation is None or flat is None else rotation(flat)
        see(turn, blocks)
        if arriving is None:
            blocks = [None] * len(ranks)
            continue
        arrived = plan.fabric.parts(plan.mesh, arriving())
        blocks = []
        for coordinate, part in arrived:
            block = plan.block_at(coordinate, turn + 1)
            needed = bool(plan.tiles(coordinate, block))
            blocks.append(plan.unpacked(part, coordinate, block) if needed else None)
            if not needed:
                unused.append(part)
    return unused


def _forward(plan: _Plan, ranks: Ranks) -> list[Any]:
    """The output, the logarithms of the sums, and the other results of the operator."""
    states = [plan.kernel.forward(given) for _, given in ranks]

    def see(turn: int, blocks: Sequence[Any]) -> None:
        for (coordinate, _), state, block in zip(ranks, states, blocks, strict=True):
            if block is not None:
                at = plan.block_at(coordinate, turn)
                key, value = block
                state.add(key, value, plan.tiles(coordinate, at))

    unused = _circulate(plan, ranks, see)
    pairs = [state.results(given["value"].shape[-1]) for state, (_, given) in zip(states, ranks, strict=True)]
    results = [[_tied(out, unused), lse, *state.others] for (out, lse), state in zip(pairs, states, strict=True)]
    return _locals_of_ranks(plan.mesh, ranks, results)


def _backward(plan: _Plan, ranks: Ranks) -> list[Any]:
    """The gradients of queries, keys and values."""
    states = [plan.kernel.backward(given) for _, given in ranks]
    announce, rotations = plan.back
    if rotations:
        announce()
    sums: list[list[torch.Tensor]] = []
    unused: list[torch.Tensor] = []
    sent: list[Callable[[], torch.Tensor]] = []  # waits for gradients in flight

    def add_up() -> None:
        for arriving in sent:
            for (coordinate, part), total in zip(plan.fabric.parts(plan.mesh, arriving()), sums, strict=True):
                own = plan.pairs.position(coordinate)
                if not part.numel():
                    unused.append(part)
                    continue
                for mine, theirs in zip(total, plan.unpacked(part, coordinate, own), strict=True):
                    mine.add_(theirs)
        sent.clear()

    def see(turn: int, blocks: Sequence[Any]) -> None:
        grads: dict[Coordinate, list[torch.Tensor]] = {}
        for (coordinate, given), state, block in zip(ranks, states, blocks, strict=True):
            if block is None:
                grads[coordinate] = [given["key"][..., :0, :], given["value"][..., :0, :]]
                continue
            at = plan.block_at(coordinate, turn)
            key, value = block
            grads[coordinate] = list(state.add(key, value, plan.tiles(coordinate, at)))
        if not turn:
            wide = states[0].grad_query.dtype
            sums.extend([grad.to(wide) for grad in pair] for pair in grads.values())
            return
        add_up()
        rotation = rotations.get(plan.pairs.count - turn)
        if rotation is not None:
            flat = plan.fabric.build(plan.mesh, lambda coordinate: _packed(grads[coordinate]))
            sent.append(rotation(flat))

    unused += _circulate(plan, ranks, see)
    add_up()
    of_ranks = [(coordinate, state) for (coordinate, _), state in zip(ranks, states, strict=True)]
    _keep_learned(plan.kernel, plan.inputs["query"], of_ranks)
    results = []
    for state, total, (_, given) in zip(states, sums, ranks, strict=True):
        names = ("query", "key", "value")
        made = zip(names, (state.grad_query, *total), strict=True)
        results.append([_tied(grad.to(given[name].dtype), unused) for name, grad in made])
    return _locals_of_ranks(plan.mesh, ranks, results)


def _tied(result: torch.Tensor, unused: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result that depends on unneeded blocks, because a compiler removes unused values.

    Other ranks would wait for the collectives that this one omitted.
    """
    if not unused or not is_recorded(result):
        return result
    shape = [0 if dim == SEQUENCE else size for dim, size in enumerate(result.shape)]
    nothing = [part.narrow(0, 0, 0).to(result.dtype).view(shape) for part in unused]
    return torch.cat([result, *nothing], SEQUENCE)


def _locals_of_ranks(mesh: DeviceMesh, ranks: Ranks, results: Sequence[Sequence[Any]]) -> list[Any]:
    """The results of the ranks here, each as a local."""
    found = []
    for column in zip(*results, strict=True):
        if not isinstance(column[0], torch.Tensor):
            found.append(column[0])
            continue
        by_rank = {coordinate: item for (coordinate, _), item in zip(ranks, column, strict=True)}
        found.append(fabric_of(mesh).build(mesh, by_rank.__getitem__))
    return found
