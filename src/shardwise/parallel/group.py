"""Parameters that are gathered and reduced together, through flat DTensors: one collective for all of them.

The one engine under `fully_shard` (stored sharded, one bucket) and `replicate` (stored replicated, many buckets). All
communication is `redistribute` of a one-dimensional DTensor, so it is the same on every fabric. Knows nothing of when
modules run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Partial, Placement, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.parallel.flat import FlatLayout
from shardwise.parallel.managed import ManagedParameter
from shardwise.parallel.precision import MixedPrecisionPolicy
from shardwise.parallel.sums import parts_of_sums
from shardwise.tensor import DTensor, dtensor_of

__all__ = ["Bucket", "Finish", "ParameterGroup", "by_dtype"]

Finish = Callable[[bool], None]  # waits; with True it gives the gradients out, with False they are lost
Arrived = Callable[["ParameterGroup", "Bucket", DeviceMesh | None], None]


class Bucket:
    """Parameters whose gradients are reduced together, and which of them have got theirs."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = tuple(indices)
        self.arrived: set[int] = set()
        # by where they were computed and whose they are: gradients scattered, and not yet added up over the replicas
        self.unreduced: dict[DeviceMesh | None, dict[tuple[int, ...], DTensor]] = {}


class ParameterGroup:
    """Stored parameters over one data mesh, and what is needed to compute with them.

    Args:
        parameters: what belongs together; of one dtype.
        data_mesh: the data axes.
        policy: dtypes.
        buckets: indices of the parameters whose gradients travel together.
        arrived: called when a bucket has all its gradients.
    """

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        data_mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        buckets: Sequence[Sequence[int]],
        arrived: Arrived,
    ) -> None:
        self.parameters, self.data_mesh, self.policy = tuple(parameters), data_mesh, policy
        for parameter in self.parameters:
            parameter.install()
        self._all = tuple(range(len(self.parameters)))
        self.buckets = [Bucket(indices) for indices in buckets]
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.indices}
        self._on_complete = arrived
        self.is_gathered = False
        self._shows_leaves = False
        self.is_sharded = any(parameter.is_sharded for parameter in self.parameters)
        self._gathering: DTensor | None = None
        self._accumulated: dict[tuple[DeviceMesh | None, int], torch.Tensor] = {}
        self._layouts: dict[tuple[int, ...], FlatLayout] = {}

    @property
    def dtype(self) -> torch.dtype:
        """What the parameters are computed with in."""
        return self.policy.param_dtype or self.parameters[0].stored.dtype

    @property
    def has_frozen(self) -> bool:
        """Whether some parameter gets no gradient, so that gradients do not tell when backward is through with it."""
        return any(not parameter.stored.requires_grad for parameter in self.parameters)

    def _layout(self, indices: tuple[int, ...]) -> FlatLayout:
        found = self._layouts.get(indices)
        if found is None:
            if len(self._layouts) > 64:
                self._layouts.clear()
            found = FlatLayout([self.parameters[index].slot for index in indices])
            self._layouts[indices] = found
        return found

    def _flat_spec(self, layout: FlatLayout, dtype: torch.dtype, placements: Sequence[Placement]) -> DTensorSpec:
        rows = self.data_mesh.shape[-1] if self.is_sharded else 1
        return DTensorSpec(self.data_mesh, placements, TensorMeta((rows * layout.total,), dtype=dtype))

    # ---------------------------------------------------------------- gathering

    @torch.no_grad()
    def start_gathering(self) -> None:
        """Begin to gather, in the background where the fabric can."""
        if self.is_gathered or self._gathering is not None:
            return
        if not self._shows_leaves:
            for parameter in self.parameters:
                parameter.refresh()
        if not self.is_sharded:
            return
        self._check_dtypes()
        layout = self._layout(self._all)
        locals_ = [_local(parameter.stored) for parameter in self.parameters]
        row = fabric_of(self.data_mesh).map(
            self.data_mesh, lambda _, *tensors: layout.joined(tensors, self.dtype), *locals_
        )
        whole = [Replicate()] * self.data_mesh.ndim
        flat = dtensor_of(self._flat_spec(layout, self.dtype, [*whole[:-1], Shard(0)]), row)
        self._gathering = flat.redistribute(placements=whole, async_op=True)

    @torch.no_grad()
    def gather(self) -> None:
        """Have the parameters whole: begin if need be, wait, and copy each to the memory of its leaves."""
        if self.is_gathered:
            return
        self.start_gathering()
        with torch.inference_mode(False):
            for parameter in self.parameters:
                parameter.prepare(self.dtype if parameter.is_sharded else parameter.stored.dtype)
        if self._gathering is not None:
            self._spread(self._gathering._local_tensor)
            self._gathering = None
        self.is_gathered = True

    def _spread(self, gathered: torch.Tensor) -> None:
        layout = self._layout(self._all)
        self._resize(filled=True)
        wholes = [parameter.whole for parameter in self.parameters]
        for buffer, coordinates, tensors in self._rank_by_rank(gathered, self._all, wholes):
            layout.spread(buffer, coordinates, tensors)

    def _rank_by_rank(
        self, buffer: torch.Tensor, indices: tuple[int, ...], locals_: Sequence[Any]
    ) -> Iterator[tuple[torch.Tensor, list[tuple[int, ...]], list[torch.Tensor]]]:
        """For each rank here its buffer, and of each parameter its coordinate and its tensor."""
        meshes = [self.parameters[index].spec.mesh for index in indices]
        columns = [fabric_of(mesh).parts(mesh, local) for mesh, local in zip(meshes, locals_, strict=True)]
        buffers = fabric_of(self.data_mesh).parts(self.data_mesh, buffer)
        for (_, flat), *row in zip(buffers, *columns, strict=True):
            yield flat, [coordinate for coordinate, _ in row], [tensor for _, tensor in row]

    def _resize(self, *, filled: bool) -> None:
        """Take or give back the memory of the gathered parameters, behind every tensor that looks at it."""
        fabric = fabric_of(self.data_mesh)
        for parameter in self.parameters:
            for storage, size, tensor in parameter.storages:
                storage.resize_(size if filled else 0)
                fabric.resized(tensor)

    def free(self) -> None:
        """Give back the memory of the gathered parameters. What autograd has saved of them stays, empty."""
        if self._gathering is not None:
            _ = self._gathering._local_tensor  # a collective in flight is finished before its buffer goes
            self._gathering = None
        if self.is_gathered and self.is_sharded:
            self._resize(filled=False)
        self.is_gathered = False

    def show_leaves(self, compute_mesh: DeviceMesh | None) -> None:
        """Let the modules see the gathered parameters."""
        self._shows_leaves = True
        with torch.inference_mode(False):
            for index, parameter in enumerate(self.parameters):
                parameter.register(parameter.leaf(compute_mesh, self._gradient_came, index))

    def show_stored(self) -> None:
        """Let the modules, and whoever looks, see the stored parameters."""
        if not self._shows_leaves:  # whatever stands there now may be the user's
            return
        self._shows_leaves = False
        for parameter in self.parameters:
            parameter.register(parameter.stored)

    def _check_dtypes(self) -> None:
        dtypes = {parameter.stored.dtype for parameter in self.parameters}
        if len(dtypes) > 1 and self.policy.param_dtype is None:
            raise UnsupportedError(
                f"parameters that were of one dtype when they were sharded are now of {sorted(map(str, dtypes))}",
                hint="convert the whole module, or give a MixedPrecisionPolicy(param_dtype=...)",
            )

    # ---------------------------------------------------------------- gradients

    def _gradient_came(self, compute_mesh: DeviceMesh | None, index: int) -> None:
        bucket = self._bucket_of[index]
        bucket.arrived.add(index)
        if all(i in bucket.arrived for i in bucket.indices if self.parameters[i].stored.requires_grad):
            bucket.arrived.clear()
            self._on_complete(self, bucket, compute_mesh)

    def compute_meshes(self) -> list[DeviceMesh | None]:
        """Where leaves have gradients that are not reduced yet; in an order that is the same on all ranks."""
        waiting = [mesh for p in self.parameters for mesh, leaf in p.leaves.items() if leaf.grad is not None]
        return list(dict.fromkeys([*waiting, *(mesh for mesh, _ in self._accumulated)]))

    @torch.no_grad()
    def accumulate(self) -> None:
        """Keep gradients for a later reduction, in the dtype that they will be reduced in."""
        dtype = self.policy.reduce_dtype
        for index, parameter in enumerate(self.parameters):
            for mesh, leaf in parameter.leaves.items():
                if leaf.grad is None or dtype is None or leaf.grad.dtype is dtype:
                    continue
                key = (mesh, index)
                more = leaf.grad.to(dtype)
                self._accumulated[key] = self._accumulated[key] + more if key in self._accumulated else more
                leaf.grad = None

    def _take_gradient(self, index: int, compute_mesh: DeviceMesh | None) -> torch.Tensor:
        leaf = self.parameters[index].leaves[compute_mesh]
        grad, before = leaf.grad, self._accumulated.pop((compute_mesh, index), None)
        leaf.grad = None
        if grad is None or before is None:
            return before if grad is None else grad  # pyright: ignore[reportReturnType]  # one of them is there
        return before + grad

    @torch.no_grad()
    def reduce(self, bucket: Bucket, compute_mesh: DeviceMesh | None, all_reduce: bool) -> list[Finish]:
        """Begin to reduce the gradients of a bucket; what comes back waits, and gives the stored parameters theirs."""
        bucket.arrived.clear()
        # plain leaves compute a loss for each rank, of which the mean is meant; DTensors compute the loss of all
        part = Partial("avg") if compute_mesh is None else Partial()
        scattered: Placement = Shard(0) if self.is_sharded else Replicate()
        replicas = self.data_mesh.ndim - 1
        waiting = bucket.unreduced.setdefault(compute_mesh, {})
        indices = tuple(index for index in bucket.indices if self._has_gradient(index, compute_mesh))
        if indices:
            flat = self._flattened(indices, self._layout(indices), compute_mesh, part)
            if not all_reduce or indices in waiting:
                flat = flat.redistribute(placements=[part] * replicas + [scattered])
                flat: Any = waiting[indices] + flat if indices in waiting else flat
            waiting[indices] = flat
        if not all_reduce:
            return []
        del bucket.unreduced[compute_mesh]
        goal = [Replicate()] * replicas + [scattered]
        return [
            functools.partial(self._finish, flat.redistribute(placements=goal, async_op=True), of)
            for of, flat in waiting.items()
        ]

    def _finish(self, reduced: DTensor, indices: tuple[int, ...], give: bool) -> None:
        local = reduced._local_tensor
        if give:
            self._give(local, indices, self._layout(indices))

    def forget_gradients(self) -> None:
        """Drop gradients that were not reduced: those of a backward that failed."""
        self._accumulated.clear()
        for bucket in self.buckets:
            bucket.arrived.clear()
            bucket.unreduced.clear()
        for parameter in self.parameters:
            for leaf in parameter.leaves.values():
                leaf.grad = None

    def _has_gradient(self, index: int, compute_mesh: DeviceMesh | None) -> bool:
        leaf = self.parameters[index].leaves.get(compute_mesh)
        return (leaf is not None and leaf.grad is not None) or (compute_mesh, index) in self._accumulated

    def _flattened(
        self, indices: tuple[int, ...], layout: FlatLayout, mesh: DeviceMesh | None, part: Partial
    ) -> DTensor:
        """The gradients as one flat DTensor, of which each rank holds its part of the sum."""
        leaves = [self.parameters[index].leaves[mesh] for index in indices]
        grads = [self._take_gradient(index, mesh) for index in indices]
        locals_ = parts_of_sums(grads, leaves, self.data_mesh)
        dtype = self.policy.reduce_dtype or locals_[0].dtype
        spec = self._flat_spec(layout, dtype, [part] * self.data_mesh.ndim)
        buffer = self._empty(locals_[0], spec, layout.is_even)
        for flat, coordinates, tensors in self._rank_by_rank(buffer, indices, locals_):
            layout.fill(flat, coordinates, tensors)
        return dtensor_of(spec, buffer)

    def _empty(self, like: torch.Tensor, spec: DTensorSpec, is_even: bool) -> torch.Tensor:
        make = torch.empty if is_even else torch.zeros
        size, dtype = spec.shape, spec.tensor_meta.dtype
        fabric = fabric_of(self.data_mesh)
        return fabric.map(self.data_mesh, lambda _, tensor: make(size, dtype=dtype, device=tensor.device), like)

    def _give(self, row: torch.Tensor, indices: tuple[int, ...], layout: FlatLayout) -> None:
        """Add each stored parameter's part of a reduced buffer to its gradient."""
        for at, index in enumerate(indices):
            parameter = self.parameters[index]
            stored: Any = parameter.stored
            mesh = parameter.spec.mesh
            local = fabric_of(mesh).map(mesh, functools.partial(_block, layout, at), row)
            grad = dtensor_of(stored._spec, local if local.dtype is stored.dtype else local.to(stored.dtype))
            with torch.no_grad():
                stored.grad = grad if stored.grad is None else stored.grad + grad


def by_dtype(parameters: Iterable[ManagedParameter]) -> list[list[ManagedParameter]]:
    """One buffer has one dtype, so parameters of others go in groups of their own."""
    groups: dict[torch.dtype, list[ManagedParameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.stored.dtype, []).append(parameter)
    return list(groups.values())


def _block(layout: FlatLayout, at: int, coordinate: tuple[int, ...], row: torch.Tensor) -> torch.Tensor:
    return layout.block(row, at, coordinate)


def _local(parameter: Any) -> torch.Tensor:
    return parameter._local_tensor
