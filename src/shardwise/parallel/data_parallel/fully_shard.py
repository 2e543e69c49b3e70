"""fully_shard: parameters, gradients and optimizer state split over the data axes. The public interface of the engine.

Checks a call and its arguments; the engine decides when parameters are gathered and gradients reduced.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.api import mark_replaced, parameters_of
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Ragged, Shard, as_placement
from shardwise.errors import LayoutError, MeshError, UnsupportedError
from shardwise.parallel.data_parallel.asked_gradients import wrap_autograd
from shardwise.parallel.data_parallel.data_axes import DataParallelMeshDims, data_axes
from shardwise.parallel.data_parallel.data_parallel_module import DataParallelModule
from shardwise.parallel.data_parallel.granular_params import granular_placements
from shardwise.parallel.data_parallel.module_tree import STATE, owned_parameters, subclass_with
from shardwise.parallel.data_parallel.param_group import ParameterGroup, alike
from shardwise.parallel.data_parallel.precision import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.parallel.data_parallel.schedule import ModuleState, abandon_forward, leave_forwards, thread_state
from shardwise.parallel.data_parallel.sharded_param import ShardedParameter, computed_shape
from shardwise.parallel.data_parallel.waiting_gradients import follow_waiting_gradients

__all__ = ["FSDPModule", "UnshardHandle", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]

ShardPlacementFn = Callable[[nn.Parameter], Any]
Granularity = int | Callable[[nn.Parameter], int | None]


class UnshardHandle:
    """The result of `unshard(async_op=True)`.

    Example:
        >>> UnshardHandle(None).wait()
    """

    def __init__(self, state: ModuleState | None) -> None:
        self._state = state

    def wait(self) -> None:
        """Wait until the module has its gathered parameters."""
        if self._state is not None:
            self._state.show(None)
            self._state = None


class FSDPModule(DataParallelModule):
    """The methods that `fully_shard` adds to a module: control of gathering and reduction.

    Example:
        >>> import shardwise as sw
        >>> module = fully_shard(nn.Linear(4, 4), sw.init_device_mesh("cpu", (2,)))
        >>> isinstance(module, FSDPModule), isinstance(module, nn.Linear), type(module).__name__
        (True, True, 'Linear')
        >>> module
        FSDPLinear(in_features=4, out_features=4, bias=True)
    """

    _shown_as = "FSDP"

    @property
    def _state(self) -> ModuleState:
        return getattr(self, STATE)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's own parameters. It has them until `reshard` or the end of its next forward.

        Args:
            async_op: return at once with a handle to wait on.
        """
        if not self._state.keeps_gathered:
            self._state.drop()
        self._state.keeps_gathered = True
        self._state.start()
        handle = UnshardHandle(self._state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered parameters; the module has its shards again."""
        self._state.keeps_gathered = False
        self._state.drop()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a hybrid mesh: whether backward also adds gradients up over the replicas, or only scatters them."""
        follow_waiting_gradients()
        for state in self._states(recurse):
            state.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of the next backward waits for the reductions; if not, a later backward does."""
        follow_waiting_gradients()
        for state in self._states():
            state.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the gathered parameters are freed after forward, and gathered again for backward."""
        for state in self._states(recurse):
            state.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether the gathered parameters are freed after backward; if not, the next forward uses them."""
        for state in self._states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the modules whose all-gathers start with this one's forward, instead of the next module's."""
        self._state.forward_prefetch = [module._state for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the modules whose all-gathers start with this one's backward, instead of the next module's."""
        self._state.backward_prefetch = [module._state for module in modules]

    def reset_iter_state(self) -> None:
        """Drop the state of a failed forward or backward. The next forward does it too, so it is seldom needed."""
        abandon_forward()
        for state in self._states():
            state.give_up()


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    mesh: Any = None,
    *,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    granularity: Granularity | None = None,
) -> Any:
    """Split the parameters of a module over the data axes, and gather them when they are used. Changes it in place.

    Wrap the blocks of a model first and then the model: each wrapped module gathers, with one all-gather, the
    parameters that are not in its wrapped children. Between steps every parameter is a DTensor parameter, sharded over
    the ranks; so are gradients, and with them the state of an optimizer that is made afterwards.

    With plain tensors as inputs each rank computes the loss of its own batch, and gradients are averaged. With DTensors
    over the data axes as inputs the loss is that of the global batch, and everything is as on one device.

    Args:
        module: the module, or several that are gathered together.
        mesh: one axis to shard over, or two to replicate over the first and shard over the second. A slice of a larger
            mesh (`world["dp"]`) composes with tensor parallelism on its other axes. By default all processes of an
            initialized process group.
        reshard_after_forward: free the gathered parameters after forward. By default all modules except the outermost
            do. A number `n` that divides the sharding ranks: each rank keeps 1/n of them, and groups of `n`
            neighbouring ranks gather them for backward. With the ranks of a host as `n`, backward gathers only inside
            hosts.
        shard_placement_fn: which dim of a parameter to shard, as `Shard(dim)`; None for the first one.
        mp_policy: dtypes to compute, reduce and return in.
        offload_policy: only the default one.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: the names of the data axes, if `mesh` has other axes too.
        granularity: the number of indices of the first dim of a parameter that stay together on one rank: the rows of
            a quantization block, or of an expert in a stack of experts. A number for all parameters, or a function that
            returns it for each (None: 1). Shards are then `Ragged`: ranks have about equal shares of all parameters in
            total, with as little padding as the granules allow, instead of an equal part of each.

    A scalar parameter stays replicated.

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> for layer in model:
        ...     _ = fully_shard(layer, mesh)
        >>> _ = fully_shard(model, mesh)
        >>> model[0].weight.spec
        f32[8,8] dp:S0
        >>> batch = sw.distribute_tensor(torch.ones(4, 8), mesh, [sw.Shard(0)])
        >>> model(batch).sum().backward()
        >>> model[0].weight.grad.spec
        f32[8,8] dp:S0
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    before = parameters_of("fully_shard", *modules)
    data_mesh = _checked_axes(mesh, dp_mesh_dims)
    shards = dp_mesh_dims is None or dp_mesh_dims.shard is not None
    _check_modules(modules, offload_policy)
    policy = mp_policy or MixedPrecisionPolicy()
    reshard = _checked_reshard(reshard_after_forward, data_mesh)
    found = list(owned_parameters(modules, ignored_params or ()))
    placements: dict[nn.Parameter, Shard | Ragged] = {
        parameter: _shard_of(parameter, name, shard_placement_fn)
        for name, parameter, _ in found
        if shards and parameter.dim()
    }
    if granularity is not None:
        placements = _by_granules(found, placements, data_mesh, granularity)
    managed = [
        ShardedParameter(parameter, owners, name, data_mesh, placements.get(parameter))
        for name, parameter, owners in found
    ]
    wrap_autograd()
    state = ModuleState(modules, policy, reshard)
    for group in alike(managed):
        own = policy if group[0].stored.is_floating_point() else MixedPrecisionPolicy()
        state.groups.append(ParameterGroup(group, data_mesh, own, [range(len(group))], state))
    mark_replaced("fully_shard", before, *modules)
    for each in modules:
        subclass_with(each, FSDPModule)
    return modules if not isinstance(module, nn.Module) else module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a fully sharded module run like its forward, with gathered parameters.

    Args:
        module: the module; one that is not fully sharded is not changed.
        method_name: the method.

    Example:
        >>> import shardwise as sw
        >>> class Model(nn.Linear):
        ...     def encode(self, x):
        ...         return self(x).tanh() + self.bias
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> model = fully_shard(Model(4, 4), mesh)
        >>> register_fsdp_forward_method(model, "encode")
        >>> model.encode(sw.ones(2, 4, device_mesh=mesh, placements=[sw.Shard(0)])).shape
        torch.Size([2, 4])
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name)
    state = module._state

    @functools.wraps(method)
    def forward_with_hooks(*args: Any, **kwargs: Any) -> Any:
        running = len(thread_state.frames)
        try:
            args, kwargs = state.before_forward(module, args, kwargs)
            output = method(*args, **kwargs)
        except BaseException:
            leave_forwards(running)
            raise
        return state.after_forward(module, args, output)

    setattr(module, method_name, forward_with_hooks)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Accepted for programs written for torch: fully sharded modules have no streams of their own to share.

    Args:
        modules: fully sharded modules.

    Example:
        >>> import shardwise as sw
        >>> share_comm_ctx([fully_shard(nn.Linear(4, 4), sw.init_device_mesh("cpu", (2,)))])
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise UnsupportedError(f"{type(module).__name__} is not fully sharded", hint="call fully_shard on it first")


def _checked_axes(mesh: Any, dims: DataParallelMeshDims | None) -> DeviceMesh:
    ours = data_axes(mesh, dims)
    if ours.ndim > 2:
        raise MeshError(
            f"fully_shard over {ours}, which has {ours.ndim} axes",
            hint='one axis shards, and one before it may replicate: fully_shard(module, world["dp"])',
        )
    return ours


def _check_modules(modules: Sequence[nn.Module], offload_policy: OffloadPolicy | None) -> None:
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise UnsupportedError(
            "fully_shard does not support CPUOffloadPolicy: shards stay on their device",
            hint="leave out offload_policy",
        )
    for module in modules:
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise UnsupportedError(
                f"a {type(module).__name__} has no forward, so its use cannot be observed",
                hint="wrap the modules in it one by one, or as a list: fully_shard([*modules], mesh)",
            )
        if hasattr(module, STATE):
            raise UnsupportedError(
                f"the {type(module).__name__} is data parallel already",
                hint="call fully_shard or replicate once for a module, children first",
            )


def _checked_reshard(given: bool | int | None, mesh: DeviceMesh) -> bool | int | None:
    if given is None or isinstance(given, bool):
        return given
    ranks = mesh.shape[-1]
    if given in (1, ranks):
        return given != 1
    if not 1 < given < ranks or ranks % given:
        raise LayoutError(
            f"reshard_after_forward={given}: the {ranks} ranks that shard the parameters do not split into groups",
            hint="use True, False, or a divisor of the number of ranks, for example the ranks of a host",
        )
    return given


def _shard_of(parameter: nn.Parameter, name: str, choose: ShardPlacementFn | None) -> Shard:
    chosen = None if choose is None else choose(parameter)
    if chosen is None:
        return Shard(0)
    placement = as_placement(chosen)
    if not isinstance(placement, Shard):
        raise LayoutError(f"shard_placement_fn returned {chosen!r} for {name}", hint="return Shard(dim), or None")
    return placement


def _by_granules(
    found: Sequence[tuple[str, nn.Parameter, Any]],
    shards: Mapping[nn.Parameter, Shard | Ragged],
    data_mesh: DeviceMesh,
    granularity: Granularity,
) -> dict[nn.Parameter, Shard | Ragged]:
    """The placements of parameters that are split only between granules; those of one dtype are balanced together."""
    by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter, int]]] = {}
    for name, parameter, _ in found:
        if parameter not in shards:
            continue
        if shards[parameter].dim % parameter.dim():
            raise UnsupportedError(
                f"{name}: shard_placement_fn chooses dim {shards[parameter].dim}, and granules are of the first dim",
                hint="leave out shard_placement_fn, or pass granularity only to the other modules",
            )
        given = granularity(parameter) if callable(granularity) else granularity
        granule = 1 if given is None else operator.index(given)
        if granule < 1:
            raise LayoutError(f"granularity is {granule} for {name}", hint="use a granularity of at least 1")
        by_dtype.setdefault(parameter.dtype, []).append((name, parameter, granule))
    placed: dict[nn.Parameter, Shard | Ragged] = {}
    for group in by_dtype.values():
        shapes = [computed_shape(parameter, data_mesh, name) for name, parameter, _ in group]
        made = granular_placements(shapes, [granule for _, _, granule in group], data_mesh.shape[-1])
        placed |= {parameter: placement for (_, parameter, _), placement in zip(group, made, strict=True)}
    return placed
