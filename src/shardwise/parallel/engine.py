"""When data parallel modules gather, free and reduce: the hooks of forward and backward, and what runs ahead of them.

A `ModuleState` belongs to the modules of one `fully_shard` or `replicate` call, a `Context` to all states under the
module that runs outermost. Nothing is kept between the hooks but what must be, so that an exception in forward or
backward leaves the modules usable. How things are moved is the group's business.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.compilers import not_compiled
from shardwise.core.mesh import DeviceMesh
from shardwise.errors import MeshError
from shardwise.parallel.group import Bucket, Finish, ParameterGroup
from shardwise.parallel.precision import MixedPrecisionPolicy, cast_floats
from shardwise.parallel.tree import STATE, states_under, tensors_in
from shardwise.tensor import DTensor

__all__ = ["ModuleState"]


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward now is one that checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1


class Context:
    """What the states under one outermost module share."""

    def __init__(self) -> None:
        self.states: list[ModuleState] = []
        self.outermost: ModuleState | None = None  # whose forward is running
        self.compute_mesh: DeviceMesh | None = None
        self.forward_order: list[ModuleState] = []  # of the forward before
        self.entered: list[ModuleState] = []  # in this forward
        self.left: list[ModuleState] = []  # in the order that backward goes through from the end
        self.reductions: list[Finish] = []
        self.awaits_end = False
        self.is_last_backward = True

    def begin(self, state: ModuleState, inputs: Any) -> None:
        """The outermost forward begins. What is still gathered was left over, and may be out of date."""
        if self.awaits_end:
            self.give_up()
        for other in self.states:
            if not other.is_held:
                other.free()
        self.compute_mesh = _compute_mesh(self.states, inputs)
        self.outermost = state
        self.entered = []

    def give_up(self) -> None:
        """A forward or backward has failed: what it left behind goes, unreduced gradients included."""
        self.outermost, self.awaits_end = None, False
        self.left.clear()
        self.finish_reductions(give=False)
        for state in self.states:
            state.is_held, state.depth = False, 0
            state.still_to_run.clear()
            state.free()
            for group in state.groups:
                group.forget_gradients()

    def end(self) -> None:
        """The outermost forward is over, or has failed."""
        self.outermost = None
        self.forward_order, self.entered = self.entered, []
        for state in self.states:
            state.still_to_run.clear()
            if not state.awaits_backward and not state.is_held:
                state.free()

    def next_in_forward(self, state: ModuleState) -> ModuleState | None:
        """Which module came after this one the last time, if the order has been the same so far."""
        self.entered.append(state)
        at = len(self.entered)
        order = self.forward_order
        return order[at] if at < len(order) and order[at - 1] is state else None

    def next_in_backward(self, state: ModuleState) -> ModuleState | None:
        """Which module backward will come to after this one."""
        for at in reversed(range(len(self.left))):
            if self.left[at] is state:
                del self.left[at:]
                return self.left[-1] if self.left else None
        return None  # another output of a module that backward has come to already

    def reduce(self, group: ParameterGroup, bucket: Bucket, mesh: DeviceMesh | None, state: ModuleState) -> None:
        """Begin a reduction; of sharded groups one is in flight at a time, so that few buffers are alive."""
        if group.is_sharded:
            self.finish_reductions()
        self.reductions += group.reduce(bucket, mesh, state.requires_all_reduce)

    def finish_reductions(self, *, give: bool = True) -> None:
        """Wait for the reductions in flight, and hand out the gradients."""
        reductions, self.reductions = self.reductions, []
        for finish in reductions:
            finish(give)

    def backward_begins(self) -> None:
        """Ask to be called at the end of the backward that is running, once."""
        if not self.awaits_end:
            self.awaits_end = True
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_ends)

    def backward_ends(self) -> None:
        """Reduce what is left (parameters that got no gradient kept their bucket waiting) and free everything."""
        self.awaits_end = False
        self.left.clear()
        for state in reversed(self.states):
            state.backward_over()
        if self.is_last_backward:
            self.finish_reductions()


class ModuleState:
    """What `fully_shard` or `replicate` has put on a module, or on several that are treated as one.

    Args:
        modules: the modules.
        policy: dtypes.
        reshard_after_forward: free the gathered parameters after forward; None: unless the module is the outermost.
    """

    def __init__(
        self, modules: Sequence[nn.Module], policy: MixedPrecisionPolicy, reshard_after_forward: bool | None
    ) -> None:
        self.modules, self.policy = tuple(modules), policy
        self.groups: list[ParameterGroup] = []
        self.context = Context()
        self.context.states = [self]
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.forward_prefetch: list[ModuleState] | None = None
        self.backward_prefetch: list[ModuleState] | None = None
        self.is_root = True
        self.is_held = False  # the user asked for the gathered parameters, or to keep them
        self.awaits_backward = False
        self.depth = 0  # how many forwards of this state's modules are inside each other
        self._knows_children = False
        self.still_to_run: set[nn.Module] = set()
        for module in self.modules:
            setattr(module, STATE, self)
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, always_call=True)

    @property
    def keeps_after_forward(self) -> bool:
        """Whether the gathered parameters wait for backward."""
        return self.is_root if self.reshard_after_forward is None else not self.reshard_after_forward

    # ---------------------------------------------------------------- gathered or not

    def start(self) -> None:
        """Begin to gather."""
        for group in self.groups:
            group.start_gathering()

    def show(self) -> None:
        """Gather, and let the modules see the whole parameters."""
        for group in self.groups:
            group.gather()
            group.show_leaves(self.context.compute_mesh)

    def free(self) -> None:
        """Free the gathered parameters; the modules see the stored ones."""
        self.awaits_backward = False
        for group in self.groups:
            group.free()
            group.show_stored()

    # ---------------------------------------------------------------- forward

    @not_compiled
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The hook before a module's forward: have its parameters, and begin to gather the next module's."""
        self.depth += 1
        repeated = in_backward()
        if not repeated and self.context.outermost is None:
            self._share_context()
            self.context.begin(self, (args, kwargs))
        if not self.still_to_run:
            self.still_to_run = set(self.modules)
        self.show()
        if not repeated and self.depth == 1:
            following = self.context.next_in_forward(self)
            for state in self._ahead(self.forward_prefetch, following):
                state.start()
        if self.policy.cast_forward_inputs:
            args, kwargs = cast_floats((args, kwargs), self.policy.param_dtype)
        self._watch_inputs((args, kwargs))
        return args, kwargs

    @not_compiled
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The hook after a module's forward, with None where that has raised: free, and wait for backward."""
        self.depth = max(self.depth - 1, 0)
        if self.depth:  # a part of a module that treats it as one with itself, or one that calls itself
            return cast_floats(output, self.policy.output_dtype)
        watched = self._watch_outputs(output)
        self.still_to_run.discard(module)
        if not in_backward():
            if not self.still_to_run:
                self._leave(watched)
            if self.context.outermost is self:
                self.context.end()
        return cast_floats(output, self.policy.output_dtype)

    def _leave(self, backward_will_come: bool) -> None:
        """All modules of this state have run."""
        kept = backward_will_come and self.keeps_after_forward
        if not kept and (self.reshard_after_backward or not self.is_held):
            self.is_held = False
            self.free()
        for group in self.groups:
            group.show_stored()
        self.awaits_backward = backward_will_come
        if backward_will_come:
            self.context.left.append(self)

    def _watch_outputs(self, output: Any) -> bool:
        """Be told when backward reaches this module; whether it may. Into some objects one cannot look."""
        if not torch.is_grad_enabled():
            return False
        found, opaque = tensors_in(output)
        hook = functools.partial(self._before_backward, self.context.compute_mesh)
        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(hook)
                opaque = True
        return opaque

    def _watch_inputs(self, inputs: Any) -> None:
        """Be told when backward is through, where gradients of the parameters do not tell: some get none."""
        if not torch.is_grad_enabled() or not any(group.has_frozen and group.is_sharded for group in self.groups):
            return
        found = [tensor for tensor in tensors_in(inputs)[0] if tensor.requires_grad]
        if found:
            torch.autograd.graph.register_multi_grad_hook(found, lambda _: self._after_backward())

    # ---------------------------------------------------------------- backward

    def _before_backward(self, compute_mesh: DeviceMesh | None, grad: torch.Tensor) -> None:
        self.context.compute_mesh = compute_mesh
        self.context.backward_begins()
        self.show()
        following = self.context.next_in_backward(self)
        for state in self._ahead(self.backward_prefetch, following):
            state.start()

    def _ahead(self, chosen: list[ModuleState] | None, following: ModuleState | None) -> Iterable[ModuleState]:
        return chosen if chosen is not None else () if following is None else (following,)

    def bucket_complete(self, group: ParameterGroup, bucket: Bucket, mesh: DeviceMesh | None) -> None:
        """All gradients of a bucket are there."""
        self.context.backward_begins()
        if group.is_sharded and not group.has_frozen:  # first of all: the reduction needs memory
            self._after_backward([group])
        if self.requires_gradient_sync:
            self.context.reduce(group, bucket, mesh, self)
        else:
            group.accumulate()

    def _after_backward(self, groups: Sequence[ParameterGroup] | None = None) -> None:
        if self.reshard_after_backward:
            for group in self.groups if groups is None else groups:
                group.free()
                group.show_stored()

    def backward_over(self) -> None:
        """The whole backward is over: reduce what waits for gradients that did not come, and be as between steps."""
        self.awaits_backward = False
        for group in self.groups:
            for bucket in group.buckets:
                for mesh in group.compute_meshes() if self.requires_gradient_sync else ():
                    self.context.reduce(group, bucket, mesh, self)
                bucket.arrived.clear()
            if not self.requires_gradient_sync:
                group.accumulate()
        if self.reshard_after_backward:
            self.is_held = False
            self.free()
        else:
            self.is_held = True
        for group in self.groups:
            group.show_stored()

    # ---------------------------------------------------------------- the tree

    def _share_context(self) -> None:
        """Bring the states of all modules below into one context, the first time that this one runs outermost."""
        if self._knows_children:
            return
        self._knows_children = True
        found = list(states_under(*self.modules))
        for state in found:
            if state is not self:
                state.is_root = False
            state.context = self.context
        self.context.states = found


def _compute_mesh(states: Iterable[ModuleState], inputs: Any) -> DeviceMesh | None:
    """The mesh of the inputs, where they are DTensors over the data axes; None where each rank computes on its own."""
    meshes = {tensor._spec.mesh for tensor in tensors_in(inputs)[0] if isinstance(tensor, DTensor)}
    data = {group.data_mesh for state in states for group in state.groups}
    found: DeviceMesh | None = None
    for mesh in meshes:
        for axes in data:
            if mesh.root is not axes.root or not _grid_axes(mesh) & _grid_axes(axes):
                continue
            if not set(axes.axes) <= set(mesh.axes) or (found is not None and found is not mesh):
                raise MeshError(
                    f"the inputs lie on {mesh}, the parameters are shared out over {axes}",
                    hint="give all inputs on one mesh that has every data axis, or each rank its own plain tensors",
                )
            found = mesh
    return found


def _grid_axes(mesh: DeviceMesh) -> set[int]:
    return {axis for joined in mesh.axes for axis in joined}
