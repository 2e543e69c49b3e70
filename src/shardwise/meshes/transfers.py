"""States from one mesh to another: `transfer`, and its plan, which is made once and run many times.

`plan/state_transfer` and `fabric/state_messages` compute the messages of each rank; fabrics execute them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.core.cache import BoundedCache
from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.core.tracing import is_tracing
from shardwise.errors import AgreementError, LayoutError, ShardwiseError, UnsupportedError
from shardwise.events import route_started
from shardwise.fabric.base import RunTransfer, device_of, fabric_of, nothing_of, on_new_world
from shardwise.fabric.rank_tensor import parts_of, writes_to
from shardwise.fabric.shared_writes import check_agreement
from shardwise.fabric.state_messages import rank_transfer
from shardwise.meshes.named_values import named_values, with_values
from shardwise.meshes.target_layouts import Dtype, Layouts, target_specs
from shardwise.plan.cost import current_cost_model, on_new_model
from shardwise.plan.route import Route, StepCost, check_reachable
from shardwise.plan.state_transfer import Distances, StateTransfer, plan_buckets
from shardwise.plan.step import SendState
from shardwise.tensor import DTensor
from shardwise.tensor.laid_out import dtensor_of
from shardwise.text import human_bytes, plural

__all__ = ["PendingTransfer", "TransferPlan", "transfer", "transfer_plan"]

BUCKET_BYTES = 64 * 2**20
Progress = Callable[[int, int], object]


def transfer(
    state: Any,
    mesh: DeviceMesh,
    layouts: Layouts = None,
    *,
    dtype: Dtype = None,
    into: Any = None,
    async_op: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    links: DeviceMesh | None = None,
    progress: Progress | None = None,
) -> Any:
    """Move every DTensor of a state to another mesh: each byte is sent once, directly to the rank that needs it.

    Every rank of both meshes calls it with the same names and layouts. A rank that is not in the mesh of a tensor
    passes the tensor without elements, or its `DTensorSpec`. Ranks in neither mesh may call it, and do nothing. The
    result is a copy without gradients. Other values are returned unchanged.

    A tensor on a slice of a mesh (`mesh["dp"]`) is assumed to be the same in all slices.

    Args:
        state: a dict of DTensors; dicts, lists and tuples in it too.
        mesh: the new mesh.
        layouts: the placements there: of all tensors; a dict by name or pattern (`"*.weight"`), whose values may also
            be DTensors or specs on the new mesh; or a function of name and spec, which may return None. By default, and
            for None, each axis of the new mesh has the placement of the old axis of the same name.
        dtype: the new dtype of floating-point tensors; or a function of name and spec.
        into: a state on the new mesh to write to; its layouts and dtypes are used.
        async_op: return a `PendingTransfer` at once. The state must not be written to before its `wait()`.
        bucket_bytes: the memory limit for messages of a rank.
        links: a mesh over all ranks whose axes define their distances, by the cost model. By default the two meshes.
        progress: called after each bucket with the bytes sent and received so far by this process, and their total.

    Example:
        >>> import shardwise as sw
        >>> trainer = sw.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> generator = sw.DeviceMesh("cpu", [4, 5, 6], mesh_dim_names=("tp",))
        >>> state = {"w": sw.distribute_tensor(torch.randn(8, 6), trainer, [sw.Shard(0), sw.Shard(1)])}
        >>> moved = sw.transfer(state, generator, dtype=torch.bfloat16)
        >>> moved["w"].spec, moved["w"].device_mesh
        (bf16[8,6] tp:S1, DeviceMesh(cpu tp=3, ranks [4, 5, 6], virtual))
    """
    plan = transfer_plan(state, mesh, layouts, dtype=dtype, into=into, bucket_bytes=bucket_bytes, links=links)
    return plan.run(state, into=into, async_op=async_op, progress=progress)


def transfer_plan(
    state: Any,
    mesh: DeviceMesh,
    layouts: Layouts = None,
    *,
    dtype: Dtype = None,
    into: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    links: DeviceMesh | None = None,
) -> TransferPlan:
    """The plan of a `transfer`, for states of the same names, shapes and layouts. Arguments as there.

    Example:
        >>> import shardwise as sw
        >>> trainer = sw.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> generator = sw.DeviceMesh("cpu", [4, 5], mesh_dim_names=("tp",))
        >>> state = {"w": sw.ones(8, 6, device_mesh=trainer, placements=[sw.Shard(0), sw.Shard(1)])}
        >>> plan = sw.transfer_plan(state, generator)
        >>> print(plan)
        transfer of 1 tensor in 1 bucket: 192 B in 4 messages, from 4 ranks to 2
          a rank sends 48 B, receives 96 B, and stages at most 96 B
        >>> synced = plan.run(state)
        >>> synced = plan.run(state, into=synced)
    """
    if bucket_bytes < 1:
        raise LayoutError(
            f"transfer: bucket_bytes={bucket_bytes}", hint="pass the memory for messages in bytes, such as 2**26"
        )
    if is_tracing():
        raise UnsupportedError(
            "a transfer between meshes cannot be compiled", hint="call it outside of the compiled function"
        )
    sources = {name: spec for name, value in named_values(state) if (spec := _spec_of(value)) is not None}
    if layouts is None and into is not None:
        given = dict(named_values(into))
        layouts = {name: given[name] for name in sources if isinstance(given.get(name), DTensor)}
        dtype = dtype if dtype is not None else lambda name, spec: given[name].dtype
    targets = target_specs(sources, mesh, layouts, dtype)
    return TransferPlan(sources, targets, bucket_bytes, links)


class TransferPlan:
    """The messages that move a state to another mesh. Made by `transfer_plan`, run many times.

    Args:
        sources: the layout of each tensor now.
        targets: its layout after the transfer.
        bucket_bytes: the memory limit for messages of a rank.
        links: a mesh over all ranks whose axes define their distances.
    """

    def __init__(
        self,
        sources: Mapping[str, DTensorSpec],
        targets: Mapping[str, DTensorSpec],
        bucket_bytes: int,
        links: DeviceMesh | None,
    ) -> None:
        self.sources, self.targets = dict(sources), dict(targets)
        self._limit, self._links = bucket_bytes, links
        self._old = {name: _over_grid(spec) for name, spec in self.sources.items()}
        self._new = {name: _over_grid(spec) for name, spec in self.targets.items()}
        for name, spec in self._old.items():
            check_reachable(spec, self._new[name].with_meta(spec.tensor_meta))

    # ---------------------------------------------------------------- costs

    @property
    def bytes(self) -> int:
        """Bytes that all ranks send in total: exactly the missing bytes of the receivers."""
        return sum(self.sent.values())

    @property
    def sent(self) -> dict[int, int]:
        """Bytes that each rank sends."""
        return {rank: own.sent for rank, own in self._ranks().items()}

    @property
    def received(self) -> dict[int, int]:
        """Bytes that each rank receives."""
        return {rank: own.received for rank, own in self._ranks().items()}

    @property
    def buckets(self) -> int:
        """The number of buckets: messages are packed and sent bucket by bucket."""
        return len(self._transfer().buckets)

    @property
    def messages(self) -> int:
        """Messages that all ranks send in total."""
        return sum(own.messages for own in self._ranks().values())

    @property
    def seconds(self) -> float:
        """Modelled time, by the current cost model."""
        return _bound(self).route.seconds if self.sources else 0.0

    def __str__(self) -> str:
        ranks = list(self._ranks().values())
        sent, received = [own.sent for own in ranks if own.sent], [own.received for own in ranks if own.received]
        staged = max([own.staged for own in ranks], default=0)
        return (
            f"transfer of {plural(len(self.sources), 'tensor')} in {plural(self.buckets, 'bucket')}: "
            f"{human_bytes(sum(sent))} in {plural(sum(own.messages for own in ranks), 'message')}, "
            f"from {plural(len(sent), 'rank')} to {len(received)}\n"
            f"  a rank sends {_span(sent)}, receives {_span(received)}, and stages at most {human_bytes(staged)}"
        )

    def _transfer(self) -> StateTransfer:
        return _transfer_of(tuple(self._old.values()), tuple(self._new.values()), self._limit, self._links)

    def _ranks(self) -> dict[int, _Counts]:
        """Counts of all ranks, only for reports: a rank that runs the plan computes only its own part."""
        transfer = self._transfer()
        found = {}
        for rank in transfer.ranks:
            own = rank_transfer(transfer, rank)
            found[rank] = _Counts(own.sent, own.received, own.messages, own.staged)
        return found

    # ---------------------------------------------------------------- running it

    def run(self, state: Any, *, into: Any = None, async_op: bool = False, progress: Progress | None = None) -> Any:
        """The state on the new mesh; a `PendingTransfer` with `async_op`. Arguments as in `transfer`.

        Example:
            >>> import shardwise as sw
            >>> a, b = sw.DeviceMesh("cpu", [0, 1]), sw.DeviceMesh("cpu", [2, 3, 4])
            >>> state = {"w": sw.distribute_tensor(torch.arange(6.0), a, [sw.Shard(0)])}
            >>> pending = sw.transfer_plan(state, b).run(state, async_op=True)
            >>> pending.wait()["w"].full_tensor()
            tensor([0., 1., 2., 3., 4., 5.])
        """
        values = dict(named_values(state))
        locals_ = [self._checked_local(name, values.get(name)) for name in self.sources]
        given = None if into is None else dict(named_values(into))
        results = [self._result(name, given) for name in self.targets]
        _refuse_shared_memory(list(self.sources), locals_, results)
        pending = PendingTransfer(self, state, locals_, results, given, progress)
        pending._start(async_op)
        return pending if async_op else pending.wait()

    def _checked_local(self, name: str, value: Any) -> torch.Tensor:
        """The local of a tensor of the state. Raises if its layout is not that of the plan."""
        known, spec = self.sources[name], _spec_of(value)
        if spec is not known:
            raise LayoutError(
                f"the plan is for {name!r} as {known} on {known.mesh}, got "
                f"{'nothing of that name' if spec is None else f'{spec} on {spec.mesh}'}",
                hint="make a plan for this state with transfer_plan",
            )
        fabric = fabric_of(known.mesh)
        if isinstance(value, DTensorSpec):
            if fabric.has_values and not fabric.is_outside(known.mesh):
                raise LayoutError(
                    f"{name!r} is a spec, and this rank is in {known.mesh}", hint="ranks of the mesh pass the DTensor"
                )
            return nothing_of(known)
        local = value._local_tensor
        if self._old[name] is not known and fabric.many_ranks:
            slices: dict[Any, list[torch.Tensor]] = {}
            for coordinate, part in fabric.parts(known.mesh, local):
                slices.setdefault(coordinate, []).append(part)
            for parts in slices.values():
                check_agreement(parts, lambda rank: _differing(name, known))
        return local

    def _result(self, name: str, given: Mapping[str, Any] | None) -> torch.Tensor:
        """The new local of a tensor: new memory, or the local of a tensor of `into`."""
        spec = self.targets[name]
        fabric = fabric_of(spec.mesh)
        if given is None:
            if fabric.is_outside(spec.mesh):
                return nothing_of(spec)
            device = device_of(spec.mesh) if fabric.has_values else torch.device("meta")
            dtype = spec.tensor_meta.dtype
            return fabric.build(
                spec.mesh,
                lambda at: torch.empty_strided(spec.local_shape(at), spec.local_stride(at), dtype=dtype, device=device),
            )
        found = given.get(name)
        if (
            not isinstance(found, DTensor)
            or found._spec.with_meta(spec.tensor_meta) is not spec
            or (found.dtype is not spec.tensor_meta.dtype or found._spec.broadcast or found._copied_view is not None)
        ):
            have = f"{found._spec} on {found._spec.mesh}" if isinstance(found, DTensor) else "no DTensor"
            raise LayoutError(
                f"into[{name!r}] is {have}, and cannot be written to as {spec} on {spec.mesh}",
                hint="pass a state like the one that the plan returns without `into`",
            )
        return found._local_tensor


def _span(counts: Sequence[int]) -> str:
    least, most = min(counts, default=0), max(counts, default=0)
    return human_bytes(most) if least == most else f"{human_bytes(least)} to {human_bytes(most)}"


class _Counts(NamedTuple):
    """Bytes and messages of one rank."""

    sent: int
    received: int
    messages: int
    staged: int


class PendingTransfer:
    """A transfer that was started. `wait()` returns the state on the new mesh."""

    def __init__(
        self,
        plan: TransferPlan,
        state: Any,
        locals_: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        given: Mapping[str, Any] | None,
        progress: Progress | None,
    ) -> None:
        self.plan, self._state, self._locals, self._results, self._given = plan, state, locals_, results, given
        self._progress = progress
        self.bytes_done = 0
        values = dict(named_values(state))
        self._tensors = [values[name] for name in plan.sources]
        self._versions = self._writes()
        self._finished = False
        self.bytes, self._wait = 0, lambda: None

    def _start(self, in_background: bool) -> None:
        if self.plan.sources:
            bound = _bound(self.plan)
            self.bytes = bound.nbytes
            if route_started:
                route_started.notify(bound.route)
            with torch.no_grad():
                self._wait = bound.run(self._locals, self._results, self._report, in_background)

    def _report(self, more: int) -> None:
        self.bytes_done += more
        if self._progress is not None:
            self._progress(self.bytes_done, self.bytes)

    def wait(self) -> Any:
        """Wait for all messages of this rank, and return the state."""
        if not self._finished:
            self._wait()
            self._finished = True
            self._check_unwritten()
            if self._given is not None:
                torch.autograd.graph.increment_version([self._given[name] for name in self.plan.targets])
        made = dict(zip(self.plan.targets, self._results, strict=True))

        def moved(name: str, value: Any) -> Any:
            if name not in made:
                return value
            return dtensor_of(self.plan.targets[name], made[name]) if self._given is None else self._given[name]

        return with_values(self._state, moved)

    def _writes(self) -> list[tuple[int | None, int | None]]:
        """The numbers of writes to each tensor and to its local: a write increments one of the two."""
        return [
            (writes_to(tensor) if isinstance(tensor, DTensor) else None, writes_to(local))
            for tensor, local in zip(self._tensors, self._locals, strict=True)
        ]

    def _check_unwritten(self) -> None:
        for name, now, before in zip(self.plan.sources, self._writes(), self._versions, strict=True):
            if now != before:
                raise UnsupportedError(
                    f"{name!r} was written to while it was transferred: the copy may be partly old, partly new",
                    hint="wait() before the optimizer steps, or transfer a copy of the state",
                )


# ---------------------------------------------------------------- cached plans, and plans bound to fabrics


class _BoundTransfer(NamedTuple):
    """A transfer bound to its fabric."""

    run: RunTransfer
    nbytes: int
    route: Route


_plans: BoundedCache[tuple[Any, ...], StateTransfer] = BoundedCache(64)
_runs: BoundedCache[tuple[Any, ...], _BoundTransfer] = BoundedCache(64)
on_new_world.append(_runs.clear)  # they refer to process groups
on_new_model += [_plans.clear, _runs.clear]


def _transfer_of(
    old: tuple[DTensorSpec, ...], new: tuple[DTensorSpec, ...], limit: int, links: DeviceMesh | None
) -> StateTransfer:
    key = (old, new, limit, links)
    found = _plans.get(key)
    if found is None:
        meshes = tuple(dict.fromkeys(spec.mesh for spec in (*old, *new)))
        model = current_cost_model()
        distances = None
        if model.axes:
            ranks = sorted({rank for mesh in meshes for rank in mesh.grid_ranks})
            distances = Distances(model, ranks, [links, *meshes] if links is not None else meshes)
        # two buckets are in flight
        found = StateTransfer(old, new, plan_buckets(old, new, max(limit // 2, 1)), distances, meshes)
        _plans.keep(key, found)
    return found


def _bound(plan: TransferPlan) -> _BoundTransfer:
    old, new = tuple(plan._old.values()), tuple(plan._new.values())
    key = (old, new, plan._limit, plan._links)
    found = _runs.get(key)
    if found is None:
        transfer = plan._transfer()
        route = _route_of(transfer)
        run, nbytes = fabric_of(old[0].mesh).bind_transfer(transfer, route)
        found = _runs.keep(key, _BoundTransfer(run, nbytes, route))
    return found


def _route_of(transfer: StateTransfer) -> Route:
    """The transfer as a route of one step, with the received bytes of the first rank of the new mesh."""
    first, last = transfer.sources[0], transfer.targets[0]
    received = rank_transfer(transfer, last.mesh.grid_ranks[0]).received
    link = current_cost_model().link(last.mesh, ())
    step = SendState(first, last, len(transfer.sources), len(transfer.buckets))
    holds = sum(spec.local_bytes for spec in transfer.targets)
    cost = StepCost(float(received), len(transfer.buckets) * link.alpha + received * link.beta, holds)
    return Route(first, last, (step,), (cost,))


def _over_grid(spec: DTensorSpec) -> DTensorSpec:
    """The layout over all ranks: a tensor on a slice is replicated along the other axes."""
    spec = spec.materialized()
    return spec if spec.mesh.size() == spec.mesh.grid_size else spec.remapped(spec.mesh.root)


def _spec_of(value: Any) -> DTensorSpec | None:
    if isinstance(value, DTensor):
        return value._spec
    return value if isinstance(value, DTensorSpec) else None


def _differing(name: str, spec: DTensorSpec) -> ShardwiseError:
    return AgreementError(
        f"{name!r} ({spec} on {spec.mesh}) differs between the slices of its mesh, so it is not one tensor",
        hint="reduce it, or choose one slice first; a state has one value of each tensor",
    )


def _refuse_shared_memory(
    names: Sequence[str], locals_: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> None:
    """Raise if `into` shares memory with the state: a tensor would be sent partly changed."""
    for name, local, result in zip(names, locals_, results, strict=True):
        if not _memory(local).isdisjoint(_memory(result)):
            raise LayoutError(
                f"{name!r} would be written to while it is read: `into` shares its memory",
                hint="leave out `into`, or pass tensors that do not share memory",
            )


def _memory(local: torch.Tensor) -> set[int]:
    """The addresses of the storages of a local."""
    return {part.untyped_storage().data_ptr() for part in parts_of(local) if not part.is_meta and part.numel()}
