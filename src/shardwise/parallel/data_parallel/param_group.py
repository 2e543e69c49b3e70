"""Parameters that are gathered and reduced together, through flat DTensors: one collective for all of them.

The one engine under `fully_shard` (stored sharded, one bucket) and `replicate` (stored replicated, many buckets). All
communication is `redistribute` of a one-dimensional DTensor, so it is the same on every fabric. When
modules run is decided in `schedule`.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from shardwise.core.cache import BoundedCache
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Partial, Placement, Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.rank_tensor import of_rows, part_at
from shardwise.parallel.data_parallel.flat_params import FlatLayout
from shardwise.parallel.data_parallel.gathered_params import Gathered, Leaves, Source, at_once, completion_token
from shardwise.parallel.data_parallel.grad_reduction import parts_of_sums
from shardwise.parallel.data_parallel.granular_params import GranularLayout
from shardwise.parallel.data_parallel.precision import MixedPrecisionPolicy
from shardwise.parallel.data_parallel.sharded_param import MARK, ParametersInBackward, ShardedParameter
from shardwise.tensor import DTensor, apply_function, dtensor_of, moved

__all__ = ["Bucket", "Finish", "ParameterGroup", "alike", "rank_by_rank"]

_SUM, _AVERAGE = Partial(), Partial("avg")
Finish = Callable[[bool], None]  # waits; with True it returns the gradients, with False it drops them
Key = tuple[DeviceMesh | None, Source]


@runtime_checkable
class Pass(Protocol):
    """A backward that has reached a state. One that the state still has when it is over has failed."""

    is_over: bool


@runtime_checkable
class Owner(Protocol):
    """The interface of a state to its group."""

    requires_gradient_sync: bool
    gradient_divide_factor: float | None
    compute_mesh: DeviceMesh | None

    @property
    def backward(self) -> Pass | None:
        """The backward that has reached the state."""
        ...

    def needed(self, gathered: Gathered) -> None:
        """Backward needs gathered memory that has been dropped."""
        ...

    def start_anew(self) -> None:
        """Called when backward has gradients of a bucket and the last one has failed: drop what that has left."""
        ...

    def completed(self, group: ParameterGroup, bucket: Bucket) -> None:
        """Called when backward has computed all gradients of a bucket."""
        ...


class Bucket:
    """Parameters whose gradients are reduced together."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = tuple(indices)
        self.token: torch.Tensor | None = None
        # by mesh and source: gradients that are not reduced yet, by the index of the parameter
        self.pending: dict[Key, dict[int, Any]] = {}
        # by mesh and source: scattered gradients that are not reduced over the replicas yet, by indices of parameters
        self.unreduced: dict[Key, dict[tuple[int, ...], DTensor]] = {}


class ParameterGroup:
    """Stored parameters over one data mesh: gathers them, makes leaves, and reduces gradients.

    Args:
        parameters: parameters of one group; of one dtype.
        data_mesh: the data axes.
        policy: dtypes.
        buckets: indices of the parameters whose gradients are reduced in one collective.
        owner: notified when backward needs parameters, and when a bucket has all its gradients.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        data_mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        buckets: Sequence[Sequence[int]],
        owner: Owner,
    ) -> None:
        self.parameters, self.data_mesh, self.policy = tuple(parameters), data_mesh, policy
        for parameter in self.parameters:
            parameter.install()
        self._first_owners = [parameter.owners[0] for parameter in self.parameters]
        # for each module, functions that return the leaves of its parameters in backward, by name
        self._in_backward: dict[nn.Module, dict[str, Callable[[Any], Any]]] = {}
        for index, parameter in enumerate(self.parameters):
            for module, name in parameter.owners:
                leaves = self._in_backward.setdefault(module, {})
                leaves[name] = functools.partial(self._leaf_in_backward, index)
        self.buckets = [Bucket(indices) for indices in buckets]
        self._owner = owner
        # for nodes of autograd: leaves that the group keeps would keep it for ever
        self._reference: weakref.ref[ParameterGroup] = weakref.ref(self)
        self.current: Gathered | None = None  # the copy that was gathered last; its memory may have been dropped
        self._others: list[Gathered] = []  # earlier ones that backward requested
        self.shown: list[Any] | None = None  # the tensors that modules have in place of the stored parameters
        self._replaced: list[Any] = []  # the former ones
        self.is_sharded = any(parameter.is_sharded for parameter in self.parameters)
        self._source = Source([parameter.stored for parameter in self.parameters], {})
        self._layouts: dict[tuple[int, ...], FlatLayout] = {}
        self._specs: BoundedCache[tuple[Any, ...], list[DTensorSpec | None]] = BoundedCache(64)
        self._flat_specs: BoundedCache[tuple[Any, ...], DTensorSpec] = BoundedCache(64)
        self._replicated: tuple[Placement, ...] = (Replicate(),) * data_mesh.ndim
        self._scattered: tuple[Placement, ...] = (
            (*self._replicated[:-1], Shard(0)) if self.is_sharded else self._replicated
        )
        self._is_offered, self._was_offered = False, False
        self._offered: dict[nn.Module, ParametersInBackward] = {}  # by module: its parameters in backward, reused

    def check_copied(self) -> None:
        """Raise if the modules have gathered parameters, which cannot be copied."""
        if self.shown is not None:
            raise UnsupportedError(
                f"{self.parameters[0].name} is gathered, so its module cannot be copied now",
                hint="copy the module outside of its forward; after unshard(), call reshard() first",
            )

    def copied(self, owner: Owner, memo: dict[int, Any]) -> ParameterGroup:
        """The group of copied modules."""
        parameters = [parameter.copied(memo) for parameter in self.parameters]
        return ParameterGroup(parameters, self.data_mesh, self.policy, [b.indices for b in self.buckets], owner)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        return self.policy.param_dtype or self.parameters[0].stored.dtype

    @property
    def has_frozen(self) -> bool:
        """Whether some parameter gets no gradient: then gradients do not show when backward has finished with it."""
        return False in {parameter.stored.requires_grad for parameter in self.parameters}

    def _layout(self, indices: tuple[int, ...]) -> FlatLayout:
        found = self._layouts.get(indices)
        if found is None:
            if len(self._layouts) > 64:
                self._layouts.clear()
            slots = [self.parameters[index].slot for index in indices]
            found = (GranularLayout if slots[0].is_granular else FlatLayout)(slots)
            self._layouts[indices] = found
        return found

    def _flat_spec(self, layout: FlatLayout, dtype: torch.dtype, placements: tuple[Placement, ...]) -> DTensorSpec:
        found = self._flat_specs.get((layout.total, dtype, placements))
        if found is None:
            rows = self.data_mesh.shape[-1] if self.is_sharded else 1
            found = DTensorSpec(self.data_mesh, placements, TensorMeta((rows * layout.total,), dtype=dtype))
            self._flat_specs.keep((layout.total, dtype, placements), found)
        return found

    def _start_move(self, flat: DTensor, placements: tuple[Placement, ...]) -> DTensor:
        """Begin to redistribute a flat buffer, in the background if the fabric can."""
        goal = self._flat_specs.get((flat._spec, placements))
        if goal is None:
            goal = flat._spec.with_placements(placements)
            self._flat_specs.keep((flat._spec, placements), goal)
        return moved(flat, goal, async_op=True)

    # ---------------------------------------------------------------- gathering

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters are gathered."""
        return self.current is not None and self.current.tensors is not None

    def _registered(self) -> list[Any]:
        """The parameters that the modules have now; None if a module has removed its parameter."""
        return [dict.get(module._parameters, name) for module, name in self._first_owners]

    def _look(self) -> Source:
        """The current tensors of the modules: stored parameters, or tensors that a caller has substituted."""
        registered = self._registered()
        if all(map(operator.is_, registered, self._source.stored)):
            return self._source
        stored: list[Any] = []
        for parameter, have in zip(self.parameters, registered, strict=True):
            if have is not parameter.stored and isinstance(have, nn.Parameter):
                parameter.assign(have)  # by load_state_dict(assign=True), a conversion, ...
            stored.append(have if have is parameter.stored else None)
        substituted = {index: have for index, have in enumerate(registered) if stored[index] is None}
        self._source = Source(stored, substituted)
        return self._source

    def start(self) -> None:
        """Begin to gather for a forward, in the background if the fabric can. Does nothing if they are gathered."""
        if self.shown is not None:
            return
        source, current = self._look(), self.current
        is_there = current is not None and (current.part is not None or current.is_present)
        if current is not None and is_there and current.source is source and self._is_valid(current):
            if current.part is not None:
                current.start()
            return
        self._drop_all()
        self.current = Gathered(self, source)
        self.current.start()

    def start_again(self) -> None:
        """Begin to gather again, for backward, the parameters of the last forward."""
        if self.current is not None and self.current.is_up_to_date:
            self.current.start()

    def drop_outdated(self) -> None:
        """Drop the gathered parameters if the stored ones have changed since."""
        if self.current is not None and not (self.current.is_present and self._is_valid(self.current)):
            self.drop()

    def _is_valid(self, gathered: Gathered) -> bool:
        """Whether a copy has the values of the stored parameters; of replicated ones, whether it is their memory."""
        if self.is_sharded:
            return gathered.is_up_to_date
        tensors, stored = gathered.tensors, gathered.source.stored
        return tensors is not None and all(tensors[i] is stored[i]._local_tensor for i in gathered.source.indices)

    def launch(self, source: Source) -> DTensor | None:
        """Begin the all-gather of stored parameters. Called without gradients."""
        if not self.is_sharded or not source.indices:
            return None
        self._check_dtypes(source)
        layout, dtype = self._layout(source.indices), self.dtype
        locals_: list[Any] = [source.stored[index]._local_tensor for index in source.indices]
        row = fabric_of(self.data_mesh).map(self.data_mesh, lambda _, *tensors: layout.joined(tensors, dtype), *locals_)
        return self._start_move(dtensor_of(self._flat_spec(layout, dtype, self._scattered), row), self._replicated)

    def part_of(self, buffer: DTensor, ranks: int) -> DTensor:
        """A copy of this rank's part of a gathered flat buffer, split over each group of `ranks` neighbours."""
        gathered = self._flat_specs.get((buffer._spec, ranks))
        if gathered is None:
            axis = self.data_mesh.ndim - 1
            name = "dp" if self.data_mesh.mesh_dim_names is None else self.data_mesh.axis_name(axis)
            sizes = (self.data_mesh.shape[axis] // ranks, ranks)
            mesh = self.data_mesh[[axis]]._unflatten(0, sizes, (f"{name}_groups", f"{name}_ranks"))
            gathered = DTensorSpec(mesh, (Replicate(), Replicate()), buffer._spec.tensor_meta)
            self._flat_specs.keep((buffer._spec, ranks), gathered)
        return moved(dtensor_of(gathered, buffer._local_tensor), gathered.with_placements((Replicate(), Shard(0))))

    def launch_again(self, part: DTensor) -> DTensor:
        """Begin to gather a flat buffer from the parts that ranks have kept. Called without gradients."""
        return self._start_move(part, (Replicate(), Replicate()))

    def fill(self, source: Source, buffer: DTensor | None) -> list[Any]:
        """Wait for an all-gather, and copy each parameter to separate memory; by index."""
        found: list[Any] = [None] * len(self.parameters)
        if buffer is None:
            for index in source.indices:
                found[index] = source.stored[index]._local_tensor.to(self._compute_dtype(index))
            return found
        layout, local = self._layout(source.indices), buffer._local_tensor
        rows: list[list[torch.Tensor]] = []
        for flat, coordinates in rank_by_rank(self.data_mesh, layout, local):
            full_tensors = [flat.new_empty(shape) for shape in layout.shapes(coordinates)[1]]
            layout.spread(flat, full_tensors)
            rows.append(full_tensors)
        for index, tensor in zip(source.indices, of_rows(local, rows), strict=False):
            found[index] = tensor
        return found

    def needed(self, gathered: Gathered) -> None:
        """Backward needs memory that has been dropped: share that of an equal copy, or gather again."""
        for other in (self.current, *self._others):
            if other is not None and other.lend(gathered):
                self._others.append(gathered)
                return
        if self.current is not None and self.current.is_present and self.current is not gathered:
            self._others.append(gathered)
        else:
            self.current = gathered
        self._owner.needed(gathered)

    def drop(self, *, keep_part: bool = False) -> None:
        """Drop the gathered parameters. Tensors with other references stay.

        Args:
            keep_part: keep the part of the flat buffer that this forward has set aside for backward.
        """
        if self.shown is not None:
            self.show_stored()
        if self.is_sharded:
            self._drop_all(keep_part=keep_part)

    def _drop_all(self, *, keep_part: bool = False) -> None:
        for gathered in (self.current, *self._others):
            if gathered is not None:
                gathered.drop(keep_part=keep_part)
        self._others.clear()

    # ---------------------------------------------------------------- the tensors that modules see

    def show(self, compute_mesh: DeviceMesh | None, keep_over: int | None = None) -> None:
        """Let the modules see the gathered parameters.

        Args:
            compute_mesh: the mesh of the inputs.
            keep_over: set a part of the flat buffer aside for backward, split over groups of this many ranks.
        """
        if self.shown is None:
            self.start()
        gathered = self.current
        assert gathered is not None
        gathered.finish(keep_over)
        leaves = gathered.leaves(compute_mesh)
        substituted = gathered.source.substituted
        if substituted:
            leaves = list(leaves)
            for index, given in substituted.items():
                leaves[index] = self.parameters[index].from_caller(given, compute_mesh, self._compute_dtype(index))
        if self.shown is None:
            self._replaced = self._registered()
        self.shown = leaves
        for parameter, leaf in zip(self.parameters, leaves, strict=True):
            parameter.register(leaf)

    def _compute_dtype(self, index: int) -> torch.dtype:
        return self.policy.param_dtype or self.parameters[index].stored.dtype

    def show_stored(self) -> None:
        """Restore the former parameters of the modules."""
        if self.shown is None:  # the current ones may be the user's
            return
        for parameter, leaf, now, registered in zip(
            self.parameters, self.shown, self._registered(), self._replaced, strict=True
        ):
            if now is leaf:
                parameter.register(registered)
        self.shown, self._replaced = None, []

    def make_leaves(self, gathered: Gathered, compute_mesh: DeviceMesh | None) -> list[Any]:
        """A leaf for each gathered parameter; the gradients of a bucket come back through one node of autograd."""
        source, tensors = gathered.source, gathered.tensors
        assert tensors is not None
        found: list[Any] = [None] * len(self.parameters)
        for index, spec in zip(source.indices, self._leaf_specs(source.indices, compute_mesh), strict=True):
            found[index] = self.parameters[index].leaf(tensors[index], spec)
        for bucket in self.buckets:
            chosen = [i for i in bucket.indices if found[i] is not None and source.stored[i].requires_grad]
            if not chosen:
                continue
            take = functools.partial(_take, self._reference, bucket, (compute_mesh, source), chosen)
            token = self._token(bucket, source.stored[chosen[0]])
            stored = [source.stored[index] for index in chosen]
            leaves: Any = apply_function(Leaves, token, take, [found[index] for index in chosen], stored)
            at_once(leaves[0])
            for index, leaf in zip(chosen, leaves, strict=True):
                found[index] = leaf
        return found

    def _leaf_specs(self, indices: tuple[int, ...], compute_mesh: DeviceMesh | None) -> list[DTensorSpec | None]:
        found = self._specs.get((indices, compute_mesh))
        if found is None:
            found = [self.parameters[index].leaf_spec(compute_mesh) for index in indices]
            self._specs.keep((indices, compute_mesh), found)
        return found

    def _token(self, bucket: Bucket, stored: Any) -> torch.Tensor:
        if bucket.token is None or stored.device not in (bucket.token.device, torch.device("meta")):
            number = self.buckets.index(bucket)
            bucket.token = completion_token(stored, functools.partial(_complete, self._reference, number))
        return bucket.token

    def offer_leaves(self) -> None:
        """Give leaves to a backward that recomputes a part of forward (checkpointing)."""
        if not self._is_offered:
            self._is_offered = self._was_offered = True
            for module, leaves in self._in_backward.items():
                registered: Any = module._parameters
                if registered.__class__ is ParametersInBackward:
                    registered.leaves.update(leaves)
                else:  # the same object each time, so that nothing has changed after a step
                    offered = self._offered.setdefault(module, ParametersInBackward())
                    offered.clear()
                    offered.update(registered)
                    offered.leaves = dict(leaves)
                    module.__dict__["_parameters"] = offered

    def offer_leaves_again(self) -> None:
        """Offer leaves again after a forward that withdrew them: the backward of an earlier forward may follow."""
        if self._was_offered:
            self.offer_leaves()

    def withdraw_leaves(self) -> None:
        """Restore the plain dicts of parameters of the modules, while a forward runs."""
        if self._is_offered:
            self._is_offered = False
            for module, leaves in self._in_backward.items():
                registered: Any = module._parameters
                if registered.__class__ is ParametersInBackward:
                    for name in leaves:
                        registered.leaves.pop(name, None)
                    if not registered.leaves:
                        module.__dict__["_parameters"] = dict(registered)

    def _leaf_in_backward(self, index: int, registered: Any) -> Any:
        current = self.current
        if current is None or self.shown is not None or current.source.stored[index] is not registered:
            return None  # already a leaf, or not managed by this group
        self._owner.needed(current)
        self.show(self._owner.compute_mesh)
        assert self.shown is not None
        return self.shown[index]

    def keep_writes(self) -> None:
        """Store writes of forward to gathered parameters, if they are the same on all ranks; else raise."""
        gathered = self.current
        if gathered is None or gathered.tensors is None:
            return
        for index, writes in gathered.take_writes().items():
            parameter = self.parameters[index]
            stored: Any = gathered.source.stored[index]
            full = gathered.tensors[index]
            for mesh, in_graph, assigned in writes:
                if assigned:
                    raise UnsupportedError(
                        f"the data of {parameter.name} was set to another tensor while it was gathered",
                        hint="copy values into it: parameter.data.copy_(tensor)",
                    )
                if in_graph or mesh is None or full.dtype is not stored.dtype:
                    raise UnsupportedError(
                        f"{parameter.name} was written to while it was gathered{_why(mesh, in_graph)}",
                        hint="write to the parameter when it is not gathered, under torch.no_grad(); or pass inputs as "
                        "DTensors over the data axes, so that all ranks write the same values",
                    )
            parameter.write_back(stored, full)
            gathered.versions = gathered.source.versions()
            gathered.part = None  # it has former values

    def _check_dtypes(self, source: Source) -> None:
        dtypes = {source.stored[index].dtype for index in source.indices}
        if len(dtypes) > 1 and self.policy.param_dtype is None:
            raise UnsupportedError(
                f"parameters that had one dtype when they were sharded now have {sorted(map(str, dtypes))}",
                hint="convert all parameters of the module, or give a MixedPrecisionPolicy(param_dtype=...)",
            )

    # ---------------------------------------------------------------- gradients

    def has_all_gradients(self, bucket: Bucket) -> bool:
        """Whether every parameter of a bucket that requires a gradient has one."""
        wanted = {index for index in bucket.indices if self.parameters[index].stored.requires_grad}
        return all(wanted <= grads.keys() for grads in bucket.pending.values())

    @torch.no_grad()
    def reduce(self, bucket: Bucket, all_reduce: bool) -> list[Finish]:
        """Start to reduce the gradients of a bucket. The results wait for it and set `.grad` of stored parameters."""
        pending = dict(bucket.pending)
        bucket.pending.clear()
        found: list[Finish] = []
        for key in dict.fromkeys([*bucket.unreduced, *pending]):
            found += self._reduce(bucket, key, pending.get(key, {}), all_reduce)
        return found

    def _reduce(self, bucket: Bucket, key: Key, grads: dict[int, Any], all_reduce: bool) -> list[Finish]:
        # with plain leaves each rank has its own loss, and gradients are averaged; DTensors have one global loss
        factor = self._owner.gradient_divide_factor
        part = _AVERAGE if key[0] is None and factor is None else _SUM
        waiting = bucket.unreduced.setdefault(key, {})
        indices = bucket.indices
        if len(grads) < len(indices):
            indices = tuple([index for index in indices if index in grads])
        if indices:
            flat = self._flattened(indices, self._layout(indices), [grads.pop(i) for i in indices], key[0], part)
            if factor is not None and factor != 1:
                flat._local_tensor.div_(factor)
            if not all_reduce or indices in waiting:
                flat = flat.redistribute(placements=(*(part for _ in self._replicated[:-1]), self._scattered[-1]))
                flat: Any = waiting[indices] + flat if indices in waiting else flat
            waiting[indices] = flat
        if not all_reduce:
            return []
        del bucket.unreduced[key]
        return [
            functools.partial(self._finish, self._start_move(flat, self._scattered), of, key[1])
            for of, flat in waiting.items()
        ]

    def _finish(self, reduced: DTensor, indices: tuple[int, ...], source: Source, give: bool) -> None:
        local = reduced._local_tensor
        if give:
            self._give(local, indices, source)

    def forget_gradients(self) -> None:
        """Drop gradients that were not reduced: those of a backward that failed."""
        for bucket in self.buckets:
            bucket.pending.clear()
            bucket.unreduced.clear()

    def waiting_parameter(self, parameters: set[int]) -> str | None:
        """The name of one of the parameters, given by id, whose gradient waits for a reduction; None if none does."""
        for bucket in self.buckets:
            for key in (*bucket.pending, *bucket.unreduced):
                of = itertools.chain(bucket.pending.get(key, ()), *bucket.unreduced.get(key, ()))
                for index in of:
                    if id(key[1].stored[index]) in parameters:
                        return self.parameters[index].name
        return None

    def forget_gradients_of(self, parameters: set[int]) -> None:
        """Drop gradients that wait for a reduction, of stored parameters given by id."""
        for bucket in self.buckets:
            for key, grads in [*bucket.pending.items()]:
                kept = {index: grad for index, grad in grads.items() if id(key[1].stored[index]) not in parameters}
                bucket.pending |= {key: kept}
                if not kept:
                    del bucket.pending[key]
            for key, flats in [*bucket.unreduced.items()]:
                for indices in [*flats]:
                    dropped = {index for index in indices if id(key[1].stored[index]) in parameters}
                    if len(dropped) == len(indices):
                        del flats[indices]
                    elif dropped:
                        self._zero_blocks(flats[indices], indices, dropped)

    @torch.no_grad()
    def _zero_blocks(self, flat: DTensor, indices: tuple[int, ...], of: set[int]) -> None:
        """Zero some parameters' parts of a scattered flat buffer."""
        layout = self._layout(indices)
        for row, coordinates in rank_by_rank(self.data_mesh, layout, flat._local_tensor):
            for index, block in zip(indices, layout.blocks(row, coordinates), strict=True):
                if index in of:
                    block.zero_()

    def _flattened(
        self, indices: tuple[int, ...], layout: FlatLayout, grads: list[Any], mesh: DeviceMesh | None, part: Partial
    ) -> DTensor:
        """The gradients as one flat DTensor that is Partial over the data axes."""
        locals_ = parts_of_sums(grads, self._leaf_specs(indices, mesh), self.data_mesh)
        grads.clear()
        dtype = self.policy.reduce_dtype or locals_[0].dtype
        spec = self._flat_spec(layout, dtype, (part,) * self.data_mesh.ndim)
        buffer = self._empty(locals_[0], spec, layout.is_even)
        for flat, _, *tensors in rank_by_rank(self.data_mesh, layout, buffer, *locals_):
            layout.fill(flat, tensors)
        return dtensor_of(spec, buffer)

    def _empty(self, like: torch.Tensor, spec: DTensorSpec, is_even: bool) -> torch.Tensor:
        make = torch.empty if is_even else torch.zeros
        size, dtype = spec.shape, spec.tensor_meta.dtype
        fabric = fabric_of(self.data_mesh)
        return fabric.map(self.data_mesh, lambda _, tensor: make(size, dtype=dtype, device=tensor.device), like)

    def _give(self, row: torch.Tensor, indices: tuple[int, ...], source: Source) -> None:
        """Give each stored parameter its part of a reduced buffer, as autograd would: with its hooks."""
        layout = self._layout(indices)
        rows = [layout.blocks(flat, coordinates) for flat, coordinates in rank_by_rank(self.data_mesh, layout, row)]
        with torch.no_grad():
            for index, local in zip(indices, of_rows(row, rows), strict=False):
                stored: Any = source.stored[index]
                grad = dtensor_of(stored._spec, local if local.dtype is stored.dtype else local.to(stored.dtype))
                accumulate(stored, grad)


@torch.no_grad()
def _take(
    reference: weakref.ref[ParameterGroup], bucket: Bucket, key: Key, indices: Sequence[int], grads: Sequence[Any]
) -> None:
    """Add gradients of a bucket to those of this backward and of earlier ones. Called by a node of leaves."""
    group = reference()
    if group is None:
        raise UnsupportedError(
            f"the data parallel module of {getattr(key[1].stored[indices[0]], MARK)} was deleted after forward, so "
            "that the gradients of its gathered parameters cannot be reduced",
            hint="keep the module until backward has run",
        )
    last = group._owner.backward
    if last is not None and last.is_over:
        group._owner.start_anew()
    pending = bucket.pending.setdefault(key, {})
    stored = key[1].stored
    for index, grad in zip(indices, grads, strict=True):
        if grad is None or not stored[index].requires_grad:  # as AccumulateGrad asks
            continue
        before = pending.get(index)
        if group._owner.requires_gradient_sync:
            pending[index] = grad if before is None else before + grad
        else:  # kept until a later backward: in the dtype of the reduction, in separate memory
            kept = grad.to(group.policy.reduce_dtype or grad.dtype, copy=before is None)
            pending[index] = kept if before is None else before + kept


def _complete(reference: weakref.ref[ParameterGroup], number: int) -> None:
    """A backward has run all nodes of leaves of a bucket."""
    group = reference()
    if group is not None:  # else a node of leaves has raised
        group._owner.completed(group, group.buckets[number])


def accumulate(stored: Any, grad: DTensor) -> None:
    """Add to the gradient of a parameter, and call its hooks. The gradient has the layout of the parameter."""
    given: Any = grad
    hooks, before = stored._backward_hooks, stored.grad
    for hook in [*hooks.values()] if hooks else ():
        changed = hook(given)
        given = given if changed is None else changed
    total = given if before is None else before + given
    if total._spec is not stored._spec:
        total = total.redistribute(placements=stored._spec.placements, shard_order=stored._spec.shard_order)
    stored.grad = total
    hooks = stored._post_accumulate_grad_hooks
    for hook in [*hooks.values()] if hooks else ():
        hook(stored)


def _why(mesh: DeviceMesh | None, in_graph: bool) -> str:
    if in_graph:
        return " by an operator that autograd follows"
    if mesh is None:
        return ", where each rank computes on its own plain tensors: the ranks' copies of it may differ now"
    return " in another dtype than it is stored in"


def alike(parameters: Iterable[ShardedParameter]) -> list[list[ShardedParameter]]:
    """Group parameters by dtype and by whether they are sharded: each group has one flat buffer."""
    groups: dict[tuple[torch.dtype, bool], list[ShardedParameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.stored.dtype, parameter.is_sharded), []).append(parameter)
    return list(groups.values())


def rank_by_rank(data_mesh: DeviceMesh, layout: FlatLayout, *locals_: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """For each rank of this process: its first tensor, its coordinate for each parameter, its other tensors."""
    here = {data_mesh: fabric_of(data_mesh).coordinates(data_mesh)}
    for mesh in layout.meshes:
        if mesh not in here:
            here[mesh] = fabric_of(mesh).coordinates(mesh)
    for rank in range(len(here[data_mesh])):
        flat, *others = [local if type(local) is torch.Tensor else part_at(local, rank) for local in locals_]
        yield flat, [here[mesh][rank] for mesh in layout.meshes], *others
