"""Chooses the algorithm of attention over a sharded sequence: ring, gathered keys and values, exchanged heads, halos.

Compares the seconds of the cost model, and lists the blocks that each rank needs.

- "ring": every rank keeps its queries, and blocks of keys and values rotate. A rank holds one block besides its own.
- "gather": every rank keeps its queries and gathers all keys and values.
- "heads": sequence shards become shards of heads (or of the batch) and back.
- "halo": every rank keeps its queries, and receives the keys and values that a mask lets them see: those near them,
  and a few others (sinks).
- "local": nothing is sent, because a mask lets every rank see only its own keys, or the sequence is not sharded.

If the values of a mask are known (`Reach`), a ring omits the turns that no query needs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.core.layout import Run, Segment, Window
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.placement import AnyShard, Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import MemoryBoundError
from shardwise.plan.cost import current_cost_model
from shardwise.plan.propagate import OpSchema, OutputSharding, ShardingPropagator
from shardwise.plan.route import DTensorRedistributePlanner, Route, StepCost
from shardwise.plan.row_exchange import row_exchange_route
from shardwise.plan.step import ChosenRows, Rotate, RowExchange, Rows, Windowed
from shardwise.rules.attention import ALGORITHMS, KERNELS
from shardwise.rules.attention_blocks import MASKS, SEQUENCE, ScoreTile, joined, tiles
from shardwise.rules.mask_reach import Blocks, Reach
from shardwise.text import human_bytes, human_seconds

__all__ = ["AttentionChoice", "Pairs", "choose_attention", "position_along", "ring_blocks", "ring_pairs"]

# Gathered keys and values also take memory: their seconds count twice. That memory grows with the ranks: beyond this
# multiple of a rank's own operands they are gathered only if nothing else is possible.
HELD = 2.0
GATHERED = 8


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """One algorithm for a call of attention.

    Args:
        algorithm: "ring", "gather", "heads", "halo" or "local".
        sharding: the layouts of operands and results.
        returns: the specs to which results are redistributed.
        pairs: which queries see which keys on which rank; None if a kernel gets complete sequences.
        rounds: the rotations of keys and values, by distance; those that no rank needs are omitted.
        back: the rotations that return gradients of keys and values to the owners of these.
        seconds: of all that is communicated, by the cost model.
        received: bytes that a rank receives.
        held: bytes of keys and values (of "heads": of all operands) that a rank holds at once besides its own.
        why: the comparison in words.
        halo: the exchange that gives ranks the keys and values that their queries see, and the reverse one for
        gradients.
            First those near the queries, then, if there are any, the far ones.
        band: the number of keys before and after its own position that a query sees.
        far: the further keys that the queries of each rank along the axes see; none: no keys.
    """

    algorithm: str
    sharding: OutputSharding
    returns: tuple[DTensorSpec, ...]
    pairs: Pairs | None
    rounds: Route | None
    back: Route | None
    seconds: float
    received: float
    held: float
    why: str = ""
    halo: tuple[RowExchange, ...] = ()
    band: tuple[int, int] = (0, 0)
    far: tuple[tuple[Run, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Pairs:
    """Blocks of queries and keys along the axes that shard them. Positions count along `over`, the first axis major.

    Args:
        query_spec: the layout of the queries.
        over: the axes along which blocks of keys rotate; none if every rank has all keys.
        key_runs: the runs of keys that each block consists of.
        causal: whether query `i` attends only to the keys up to `i`.
        masked: whether there is a mask, of which a tile needs neighbouring columns.
        turns: the turns after which a rank has keys that the mask lets its queries see; None: any.
    """

    query_spec: DTensorSpec
    over: tuple[int, ...]
    key_runs: tuple[tuple[Run, ...], ...]
    causal: bool
    masked: bool
    turns: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """The number of blocks of keys."""
        return len(self.key_runs)

    def length(self, block: int) -> int:
        """The number of keys of a block."""
        return sum(run.length for run in self.key_runs[block])

    def position(self, coordinate: Coordinate) -> int:
        """The position of a rank along the axes."""
        return position_along(self.query_spec.mesh, self.over, coordinate)

    def tiles(self, coordinate: Coordinate, block: int) -> list[ScoreTile]:
        """The parts of the scores of a rank's queries with a block of keys that count."""
        if self.turns is not None and (self.position(coordinate) - block) % self.count not in self.turns:
            return []
        rows = self.query_spec.runs(SEQUENCE, coordinate)
        if not self.causal:  # then the positions of the queries do not matter
            rows = (Run(0, sum(run.length for run in rows)),)
        found: list[ScoreTile] = []
        for row, queries in _placed(rows):
            for column, keys in _placed(self.key_runs[block]):
                inner = tiles(queries.length, keys.length, self._offset(queries, keys))
                found += [tile.within(row, column, keys.start) for tile in inner]
        return joined(found, self.masked)

    def pieces(self, coordinate: Coordinate, block: int) -> list[tuple[Run, Run, ScoreTile]]:
        """The same, each part with the runs of queries and of keys that it is in."""
        runs = itertools.product(self.query_spec.runs(SEQUENCE, coordinate), self.key_runs[block])
        return [(q, k, tile) for q, k in runs for tile in tiles(q.length, k.length, self._offset(q, k))]

    def _offset(self, queries: Run, keys: Run) -> int | None:
        return queries.start - keys.start if self.causal else None


def position_along(mesh: DeviceMesh, over: Sequence[int], coordinate: Coordinate) -> int:
    """The position of a rank along some axes, the first major."""
    at = 0
    for axis in over:
        at = at * mesh.shape[axis] + coordinate[axis]
    return at


def _placed(runs: Sequence[Run]) -> list[tuple[int, Run]]:
    """Runs with their positions in a local tensor."""
    return list(zip(itertools.accumulate((run.length for run in runs), initial=0), runs, strict=False))


def choose_attention(
    schema: OpSchema,
    results: tuple[TensorMeta, ...],
    prefer: str | None = None,
    reach: Reach | None = None,
    max_bytes: int | None = None,
) -> AttentionChoice | None:
    """The algorithm of a call whose sequence is sharded; None if none applies.

    Args:
        schema: the call.
        results: shape, stride and dtype of each result.
        prefer: the algorithm to take if possible; None for the cheapest.
        reach: the keys that queries see by the mask, if that has been read.
        max_bytes: the most bytes to hold; algorithms that hold more are not taken.

    Raises:
        MemoryBoundError: all algorithms hold more.
    """
    specs = schema.specs
    if any(spec.tensor_meta.is_symbolic or 0 in spec.shape for spec in specs):
        return None
    given = _named(schema, specs)
    if given["key"].shape[SEQUENCE] != given["value"].shape[SEQUENCE]:  # which the kernel may refuse
        return None
    turns = None if reach is None else reach.turns
    causal = bool(schema.arguments.get("is_causal")) or (reach is not None and reach.causal)
    makers = {
        "ring": functools.partial(_ring, causal=causal, turns=turns),
        "heads": functools.partial(_heads, causal=causal),
        "gather": functools.partial(_gather, causal=causal),
    }
    found = {name: made for name in ALGORITHMS if (made := makers[name](schema, results)) is not None}
    if not found:
        return None
    if (
        reach is not None
        and reach.band is not None
        and (near := _halo(schema, results, reach.band, reach.far)) is not None
    ):
        found["halo"] = near
    own = sum(spec.local_bytes for spec in specs)
    taken, reason = _cheapest(found, prefer, max_bytes, own)
    costs = ", ".join(
        f"{name} {human_seconds(c.seconds)}, {human_bytes(c.received)} received and {human_bytes(c.held)} held"
        for name, c in found.items()
    )
    chosen = found[taken]
    algorithm = chosen.algorithm if chosen.received else "local"
    return replace(chosen, algorithm=algorithm, why=f"{algorithm} ({reason}{costs})")


def _cheapest(
    found: Mapping[str, AttentionChoice], prefer: str | None, max_bytes: int | None, own: float
) -> tuple[str, str]:
    """The chosen algorithm, and the reason if it is not simply the cheapest; `own`: the bytes of a rank's operands."""
    fitting = [name for name in found if max_bytes is None or found[name].held <= max_bytes]
    if not fitting:
        smallest = math.ceil(min(choice.held for choice in found.values()))
        raise MemoryBoundError(
            f"attention over a sharded sequence cannot be run within max_bytes={max_bytes:,}",
            hint=f"the smallest possible bound is {smallest:,} bytes",
            smallest=smallest,
        )
    small = [name for name in fitting if name != "gather" or found[name].held <= GATHERED * own] or fitting
    best = min(small, key=lambda name: found[name].seconds * (HELD if name == "gather" else 1.0))
    if prefer is None:
        return best, "" if len(fitting) == len(found) else f"at most {human_bytes(max_bytes or 0)} held; "
    if prefer in fitting:
        return prefer, f"{prefer} was asked for; "
    return best, f"{prefer} holds too much; " if prefer in found else f"{prefer} is not possible; "


def _named(schema: OpSchema, specs: Sequence[DTensorSpec]) -> dict[str, DTensorSpec]:
    """Specs by the names of their arguments."""
    order = [name for name in (a.name for a in schema.op._schema.arguments) if name in schema.arguments]
    return dict(zip([n for n in order if isinstance(schema.arguments[n], DTensorSpec)], specs, strict=True))


def _returns(schema: OpSchema, sharding: OutputSharding) -> tuple[DTensorSpec, ...]:
    """The layouts of results: that of the queries for the output, that of its operand for each gradient."""
    given, outputs = _named(schema, schema.specs), list(sharding.outputs)
    names = ("query", "key", "value") if KERNELS[schema.op][1] else ("query",)
    for i, name in enumerate(names):
        like = given[name]
        if not like.partial_axes:
            outputs[i] = like.with_meta(outputs[i].tensor_meta)
    return tuple(outputs)


def _made(
    algorithm: str,
    schema: OpSchema,
    sharding: OutputSharding,
    pairs: Pairs | None = None,
    rounds: Route | None = None,
    back: Route | None = None,
    held: float = 0.0,
) -> AttentionChoice:
    planner = DTensorRedistributePlanner()
    returns = _returns(schema, sharding)
    ends = (*zip(schema.specs, sharding.inputs, strict=True), *zip(sharding.outputs, returns, strict=True))
    routes = [planner.plan(have, want) for have, want in ends if have is not want]
    routes += [route for route in (rounds, back) if route is not None]
    seconds, received = sum(route.seconds for route in routes), sum(route.received for route in routes)
    return AttentionChoice(algorithm, sharding, returns, pairs, rounds, back, seconds, received, held)


def _is_masked(schema: OpSchema, inputs: Mapping[str, DTensorSpec]) -> bool:
    """Whether the scores of a tile depend on the positions of its keys."""
    return any(name in inputs for name in MASKS) or KERNELS[schema.op][0].by_position


def _heads(schema: OpSchema, results: tuple[TensorMeta, ...], causal: bool) -> AttentionChoice | None:
    sharding = ShardingPropagator().propagate(schema, results, algorithm="heads")
    if sharding is None:
        return None
    moved = _named(schema, sharding.inputs)["query"]
    sequence = _sequence_axes(schema)
    exchanged = all(isinstance(moved.placements[axis], AnyShard) for axis in sequence)
    held = sum(float(spec.local_bytes) for spec in (*sharding.inputs, *sharding.outputs))
    if not exchanged:
        return None
    if not KERNELS[schema.op][0].by_position:  # kernels need no blocks
        return _made("heads", schema, sharding, held=held)
    return _made("heads", schema, sharding, _all_keys(schema, _named(schema, sharding.inputs), causal), held=held)


def _all_keys(schema: OpSchema, inputs: Mapping[str, DTensorSpec], causal: bool) -> Pairs:
    """One block of all keys, on every rank."""
    length = inputs["key"].shape[SEQUENCE]
    return Pairs(inputs["query"], (), ((Run(0, length),),), causal, _is_masked(schema, inputs))


def _sequence_axes(schema: OpSchema) -> set[int]:
    """The axes that shard the sequence of queries, keys or values."""
    given = _named(schema, schema.specs)
    return {axis for name in ("query", "key", "value") for axis in given[name].dim_axes[SEQUENCE]}


def _gather(schema: OpSchema, results: tuple[TensorMeta, ...], causal: bool) -> AttentionChoice | None:
    """Gather keys and values along their sequence; other operands keep their layouts if they can."""
    given = _named(schema, schema.specs)
    for name in ("key", "value"):
        placements = [
            Replicate() if isinstance(p, AnyShard) and p.dim == SEQUENCE else p for p in given[name].placements
        ]
        order = [entry for entry in given[name].shard_order if entry.dim != SEQUENCE]
        given[name] = given[name].with_placements(placements, order)
    gathered = OpSchema(schema.op, {**schema.arguments, **given}, tuple(given.values()))
    sharding = ShardingPropagator().propagate(gathered, results, algorithm="gather")
    if sharding is None:
        return None
    inputs = _named(schema, sharding.inputs)
    pairs = _all_keys(schema, inputs, causal)
    held = sum(
        float(inputs[name].local_bytes - own.local_bytes)
        for name, own in _named(schema, schema.specs).items()
        if name in ("key", "value")
    )
    return _made("gather", schema, sharding, pairs, held=held * (2 if KERNELS[schema.op][1] else 1))


def _ring_layout(schema: OpSchema, results: tuple[TensorMeta, ...]) -> tuple[OutputSharding, Pairs, np.ndarray] | None:
    """Layouts, blocks, and the coordinates of one ring."""
    sharding = ShardingPropagator().propagate(schema, results, algorithm="ring")
    if sharding is None:
        return None
    inputs = _named(schema, sharding.inputs)
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    over = key.dim_axes[SEQUENCE]
    if not over or query.dim_axes[SEQUENCE] != over or value.dim_axes[SEQUENCE] != over:
        return None
    pairs = ring_pairs(query, key, bool(schema.arguments.get("is_causal")), _is_masked(schema, inputs))
    return sharding, pairs, key.mesh.coordinates[key.mesh.group_through(over, 0)]


def ring_pairs(query: DTensorSpec, key: DTensorSpec, causal: bool, masked: bool) -> Pairs:
    """The blocks of a ring over the axes that shard the keys."""
    over = key.dim_axes[SEQUENCE]
    line = key.mesh.coordinates[key.mesh.group_through(over, 0)]
    return Pairs(query, over, _runs_along(key, line), causal, masked)


def ring_blocks(schema: OpSchema, results: tuple[TensorMeta, ...]) -> tuple[Blocks, Blocks] | None:
    """The runs of queries and of keys at each position of a ring; None if there can be none."""
    found = _ring_layout(schema, results)
    return None if found is None else (_runs_along(found[1].query_spec, found[2]), found[1].key_runs)


def _ring(
    schema: OpSchema, results: tuple[TensorMeta, ...], causal: bool, turns: tuple[int, ...] | None = None
) -> AttentionChoice | None:
    found = _ring_layout(schema, results)
    if found is None:
        return None
    sharding, pairs, line = found
    pairs = replace(pairs, causal=causal, turns=turns)
    inputs = _named(schema, sharding.inputs)
    travelling = inputs["key"], inputs["value"]
    needed = _needed(pairs, line)
    rounds = _rotations(travelling, pairs.over, needed, forward=True)
    back = _rotations(travelling, pairs.over, needed, forward=False) if KERNELS[schema.op][1] else None
    # the current block and the one that arrives; in the backward also the addends of their gradients
    blocks = (2 if rounds.steps else 0) * (2 if back is not None else 1)
    held = blocks * sum(float(spec.local_bytes) for spec in travelling)
    return _made("ring" if rounds.steps else "local", schema, sharding, pairs, rounds, back, held)


def _halo(
    schema: OpSchema, results: tuple[TensorMeta, ...], band: tuple[int, int], far: tuple[tuple[Run, ...], ...]
) -> AttentionChoice | None:
    """Queries, keys and values keep their layouts; a rank receives the further keys and values that its queries see."""
    sharding = ShardingPropagator().propagate(schema, results, algorithm="ring")
    if sharding is None or schema.arguments.get("is_causal"):
        return None
    inputs = _named(schema, sharding.inputs)
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    over = key.dim_axes[SEQUENCE]
    alike = (
        query.dim_axes[SEQUENCE] == over == value.dim_axes[SEQUENCE] and query.shape[SEQUENCE] == key.shape[SEQUENCE]
    )
    if not over or not alike or any(spec.is_strided for spec in (query, key, value)):
        return None
    windows = ((SEQUENCE, Window(-band[0], band[1]), query),)
    given: tuple[Rows, ...] = (key, value)
    wanted: list[Rows] = [Windowed(spec, windows) for spec in (key, value)]
    segments = [Segment(i, 0, i, 0, key.shape[SEQUENCE]) for i in range(2)]
    lengths = tuple([sum(run.length for run in runs) for runs in far])
    if far:
        wanted += [ChosenRows(spec, SEQUENCE, over, lengths) for spec in (key, value)]
        at = itertools.accumulate((run.length for runs in far for run in runs), initial=0)
        placed = list(zip(at, (run for runs in far for run in runs), strict=False))
        segments += [Segment(i, run.start, i + 2, start, run.length) for i in range(2) for start, run in placed]
    steps = [RowExchange(key, key, given, tuple(wanted), SEQUENCE, tuple(segments), over)]
    if KERNELS[schema.op][1]:
        back = tuple([Segment(s.result, s.at, s.operand, s.first, s.length) for s in segments])
        steps.append(RowExchange(key, key, tuple(wanted), given, SEQUENCE, back, over, adds=True))
    rows = (sum(band) + max(lengths, default=0)) * len(steps)
    made = _made("halo", schema, sharding, held=float(rows * sum(_row_bytes(spec) for spec in (key, value))))
    routes = [row_exchange_route(step) for step in steps]
    seconds, received = (sum(getattr(route, name) for route in routes) for name in ("seconds", "received"))
    return replace(
        made, seconds=made.seconds + seconds, received=made.received + received, halo=tuple(steps), band=band, far=far
    )


def _needed(pairs: Pairs, line: np.ndarray) -> np.ndarray:
    """By position of the rank and of the block, whether the rank needs the block."""
    queries, keys = (
        np.array([_extent(runs) for runs in of]) for of in (_runs_along(pairs.query_spec, line), pairs.key_runs)
    )
    needed = (queries[:, 0] < queries[:, 1])[:, None] & (keys[:, 0] < keys[:, 1])[None, :]
    if pairs.causal:
        needed &= keys[None, :, 0] < queries[:, None, 1]
    if pairs.turns is not None:
        at = np.arange(pairs.count)
        needed &= np.isin((at[:, None] - at[None, :]) % pairs.count, pairs.turns)
    return needed


def _runs_along(spec: DTensorSpec, line: np.ndarray) -> tuple[tuple[Run, ...], ...]:
    """The runs of tokens of the ranks at these coordinates."""
    if not spec.is_strided:
        starts, lengths = spec.starts_and_lengths(SEQUENCE, line)
        return tuple([(Run(*run),) for run in zip(starts.tolist(), lengths.tolist(), strict=True)])
    return tuple([spec.runs(SEQUENCE, tuple(coordinate)) for coordinate in line.tolist()])


def _extent(runs: tuple[Run, ...]) -> tuple[int, int]:
    """The first index of runs, which are in ascending order, and the end of the last."""
    return runs[0].start, runs[-1].start + runs[-1].length


def _rotations(blocks: tuple[DTensorSpec, ...], over: tuple[int, ...], needed: np.ndarray, forward: bool) -> Route:
    """The rotations that give each rank the blocks it needs; not `forward`: those that return its gradients of them."""
    key, count = blocks[0], len(needed)
    mesh = key.mesh
    positions = np.arange(count)
    line = mesh.coordinates[mesh.group_through(over, 0)]
    lengths = np.array([sum(run.length for run in runs) for runs in _runs_along(key, line)])
    row_bytes = sum(_row_bytes(spec) for spec in blocks)
    steps, costs = [], []
    for turn in range(1, count):
        # at this distance the block of `source` is at the rank of this position
        at, source = (positions, (positions - turn) % count) if forward else ((positions + turn) % count, positions)
        wanted = needed[at, source]
        if not wanted.any():
            continue
        distance = turn if forward else count - turn
        received = float((lengths[source] * wanted).max()) * row_bytes
        steps.append(Rotate(key, key, blocks, distance, tuple(wanted.tolist()), not forward, over))
        costs.append(StepCost(received, current_cost_model().seconds(mesh, over, received), round(received)))
    return Route(key, key, tuple(steps), tuple(costs))


def _row_bytes(spec: DTensorSpec) -> int:
    """Bytes of one key in the largest local."""
    sizes = [size for dim, size in enumerate(spec.largest_local_shape) if dim != SEQUENCE]
    return math.prod(sizes) * spec.tensor_meta.dtype.itemsize
