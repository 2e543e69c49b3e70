"""When data parallel modules gather, free and reduce: the hooks of forward and backward, and prefetching.

A `ModuleState` belongs to the modules of one `fully_shard` or `replicate` call. A `ForwardRun` is one forward of an
outermost module, a `Backward` one pass of autograd. States share nothing else, so modules may be called in any order: a
module is outermost if no other is running. `param_group` moves the data.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.compilers import not_compiled
from shardwise.core.mesh import DeviceMesh, on_one_grid
from shardwise.errors import MeshError, UnsupportedError
from shardwise.parallel.data_parallel.data_axes import has_all_data_axes
from shardwise.parallel.data_parallel.gathered_params import Gathered, save_handles
from shardwise.parallel.data_parallel.module_tree import STATE, states_under, tensors_in
from shardwise.parallel.data_parallel.param_group import Bucket, Finish, ParameterGroup
from shardwise.parallel.data_parallel.precision import MixedPrecisionPolicy, cast_floats
from shardwise.tensor import DTensor
from shardwise.torch_private import current_graph_task, functorch, queue_callback, transforms_active

__all__ = [
    "ModuleState",
    "abandon_forward",
    "forget_waiting_gradients",
    "leave_forwards",
    "refuse_waiting_gradients",
    "thread_state",
]


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward now is repeated by checkpointing."""
    return current_graph_task() != -1


class ForwardRun:
    """One forward of an outermost module, including the modules that it calls."""

    def __init__(self, outermost: ModuleState, is_repeated: bool) -> None:
        self.outermost, self.is_repeated = outermost, is_repeated
        self.entered: list[ModuleState] = []
        self.gathered: dict[ModuleState, None] = {}  # states with parameters that this forward has gathered
        self.left: list[ModuleState] = []  # in the order of forward; backward runs in reverse

    def next_in_forward(self, state: ModuleState) -> ModuleState | None:
        """The module that followed this one in the last forward, if the order has been the same so far."""
        self.entered.append(state)
        at, order = len(self.entered), self.outermost.forward_order
        return order[at] if at < len(order) and order[at - 1] is state else None

    def next_in_backward(self, state: ModuleState) -> ModuleState | None:
        """The module that backward reaches after this one."""
        for at in reversed(range(len(self.left))):
            if self.left[at] is state:
                del self.left[at:]
                return self.left[-1] if self.left else None
        return None

    def end(self) -> None:
        """The outermost forward is over, or has failed."""
        if self.is_repeated:
            return
        self.outermost.forward_order = self.entered
        for state in self.gathered:
            state.still_to_run.clear()
            if not state.awaits_backward and not state.keeps_gathered:
                state.drop(keep_part=True)
            for group in state.groups:
                group.offer_leaves_again()


class Backward:
    """One pass of autograd, including nested passes, and the states that it has reached."""

    def __init__(self, task: int) -> None:
        self.task = task
        self.states: dict[ModuleState, None] = {}
        self.is_over = False
        self._reducing: ModuleState | None = None

    def reduce(self, state: ModuleState, group: ParameterGroup, bucket: Bucket) -> None:
        """Begin a reduction; of sharded groups one is in flight at a time, so that few buffers are alive."""
        if group.is_sharded:
            if self._reducing is not None:
                self._reducing.finish_reductions()
            self._reducing = state
        state.reductions += group.reduce(bucket, state.requires_all_reduce)

    def end(self) -> None:
        """Drop the gathered parameters, and wait for the reductions."""
        self.is_over = True
        for state in self.states:
            state.backward = None
            state.backward_over(self)
        if _waiting:
            for state in _waiting_below(self.states):
                self.states[state] = None
                state.reduce_pending(self)
        for state in self.states:
            if state.is_last_backward:
                state.finish_reductions()

    def give_up(self) -> None:
        """This pass has failed: drop its state, gradients that are not reduced included."""
        self.is_over = True
        for state in self.states:
            state.backward = None
            state.give_up()


class _AtEnd:
    """Called by autograd at the end of a pass. A failed pass only deletes it: modules get their stored parameters."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    def __call__(self) -> None:
        self._backward.end()

    def __del__(self) -> None:
        if not self._backward.is_over:
            self._backward.is_over = True
            for state in self._backward.states:
                for group in state.groups:
                    group.show_stored()


def current_backward() -> Backward:
    """The outermost backward running on this thread. The first use queues its callback."""
    found = thread_state.backward()
    if found is None or found.is_over:
        task = current_graph_task()
        with _lock:
            found = _backwards.get(task)
            if found is None:
                found = _backwards[task] = Backward(task)
                queue_callback(_AtEnd(found))  # pyright: ignore[reportAttributeAccessIssue]
        thread_state.backward = weakref.ref(found)  # the queue keeps it, and of a failed one the modules it has reached
    return found


_backwards: weakref.WeakValueDictionary[int, Backward] = weakref.WeakValueDictionary()  # by number of the graph task
_lock = threading.Lock()


@dataclass(eq=False, slots=True)
class Frame:
    """One call of a wrapped module that is running."""

    state: ModuleState
    module: nn.Module
    run: ForwardRun
    meshes: tuple[DeviceMesh, ...]  # of the DTensors that it was given
    compute_mesh: DeviceMesh | None = None
    hooks: Any = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.backward: Callable[[], Backward | None] = lambda: None


thread_state = _Thread()


def abandon_forward() -> None:
    """Discard the forwards running on this thread."""
    while thread_state.frames:
        _close(thread_state.frames.pop())


def leave_forwards(running: int) -> None:
    """Call the hooks after forward of calls that have ended without them, until so many calls are running.

    torch calls them after an `Exception`, but not after a KeyboardInterrupt.
    """
    frames = thread_state.frames
    while len(frames) > running:
        frame = frames[-1]
        frame.state.after_forward(frame.module, (), None)


def _close(frame: Frame) -> None:
    if frame.hooks is not None:
        frame.hooks.__exit__()


class ModuleState:
    """The state that `fully_shard` or `replicate` puts on a module, or on several that are treated as one.

    Args:
        modules: the modules.
        policy: dtypes.
        reshard_after_forward: drop the gathered parameters after forward; None: unless the module is the outermost. A
            number of ranks: keep a part, from which groups of that many ranks gather for backward.
    """

    def __init__(
        self, modules: Sequence[nn.Module], policy: MixedPrecisionPolicy, reshard_after_forward: bool | int | None
    ) -> None:
        self._begin(modules, policy, reshard_after_forward)
        for module in self.modules:
            setattr(module, STATE, self)
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, always_call=True)

    def _begin(
        self, modules: Sequence[nn.Module], policy: MixedPrecisionPolicy, reshard_after_forward: bool | int | None
    ) -> None:
        self.modules, self.policy = tuple(modules), policy
        self.groups: list[ParameterGroup] = []
        self.set_reshard_after_forward(reshard_after_forward)
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.gradient_divide_factor: float | None = None
        self.requires_all_reduce = True
        self.is_last_backward = True
        self.forward_prefetch: list[ModuleState] | None = None
        self.backward_prefetch: list[ModuleState] | None = None
        self.keeps_gathered = False  # the user requested the gathered parameters, or to keep them
        self.awaits_backward = False
        self.forward_order: list[ModuleState] = []  # of the last forward in which this one was outermost
        self.run: ForwardRun | None = None  # the last forward that gathered
        self.compute_mesh: DeviceMesh | None = None  # of the last forward
        self.backward: Backward | None = None  # the pass that has reached this module
        self.reductions: list[Finish] = []
        self.still_to_run: set[nn.Module] = set()
        self._leaf_hooks: list[RemovableHandle] = []  # on leaves of autograd: those of other tensors go with the graph

    def set_reshard_after_forward(self, reshard: bool | int | None) -> None:
        """Set whether the gathered parameters, or a part of them, are kept between forward and backward."""
        self.reshard_after_forward = reshard
        # the number of ranks over which a kept part is split
        self.keep_over = None if isinstance(reshard, bool) else reshard

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        """The state of copied modules: the same settings, parameters of their own, and nothing gathered."""
        for group in self.groups:
            group.check_copied()
        made = ModuleState.__new__(ModuleState)
        memo[id(self)] = made
        made._begin([], self.policy, self.reshard_after_forward)
        for name in _SETTINGS:
            setattr(made, name, getattr(self, name))
        made.modules = tuple(copy.deepcopy(module, memo) for module in self.modules)
        made.groups = [group.copied(made, memo) for group in self.groups]
        return made

    # ---------------------------------------------------------------- gathered or not

    def start(self) -> None:
        """Begin to gather, for a forward."""
        for group in self.groups:
            group.start()

    def show(self, compute_mesh: DeviceMesh | None, keep_over: int | None = None) -> None:
        """Gather, and let the modules see the gathered parameters."""
        for group in self.groups:
            group.show(compute_mesh, keep_over)

    def show_stored(self) -> None:
        """Give the modules the stored parameters; keep writes to the gathered ones."""
        try:
            for group in self.groups:
                group.keep_writes()
        finally:
            for group in self.groups:
                group.show_stored()

    def drop(self, *, keep_part: bool = False) -> None:
        """Drop the gathered parameters; the modules see the stored ones.

        Args:
            keep_part: keep the parts from which groups of ranks gather for backward.
        """
        self.awaits_backward = False
        try:
            self.show_stored()
        finally:
            for group in self.groups:
                group.drop(keep_part=keep_part)

    def _join(self, run: ForwardRun) -> None:
        """Join a forward. Parameters that are still gathered are from an earlier forward, and may be out of date."""
        if self.run is run:
            return
        if self.backward is not None:  # it has not ended
            self.backward.give_up()
        if self.reductions:
            self.finish_reductions()
        for group in self.groups:
            group.withdraw_leaves()
            if self.keeps_gathered:
                group.drop_outdated()
        if not self.keeps_gathered:
            self.drop()
        if self._leaf_hooks:
            self._remove_leaf_hooks()
        self.run = run
        run.gathered[self] = None

    # ---------------------------------------------------------------- forward

    @not_compiled
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The hook before a module's forward: gather its parameters, and begin to gather the next module's."""
        frames = thread_state.frames
        run = frames[-1].run if frames else ForwardRun(self, in_backward())
        is_inside = self in [frame.state for frame in frames]
        frame = Frame(self, module, run, _meshes_of(args, kwargs))
        frame.compute_mesh = self._compute_mesh(frame, frames)
        frames.append(frame)
        if run.is_repeated:
            self._touch()
        else:
            self._join(run)
        self.compute_mesh = frame.compute_mesh
        if not self.still_to_run:
            self.still_to_run = set(self.modules)
        keep_over = self.keep_over if torch.is_grad_enabled() and not run.is_repeated else None
        self.show(frame.compute_mesh, keep_over)
        if not run.is_repeated and not is_inside:
            for state in _ahead(self.forward_prefetch, run.next_in_forward(self)):
                state._join(run)
                state.start()
        if self.policy.cast_forward_inputs:
            args, kwargs = cast_floats((args, kwargs), self.policy.param_dtype)
        if torch.is_grad_enabled():
            if self._drops_after_forward(run):
                frame.hooks = save_handles()
            self._watch_inputs((args, kwargs))
        return args, kwargs

    def serve(self, module: nn.Module) -> None:
        """Let a submodule be called on its own, too: a forward then begins with it."""
        module.register_forward_pre_hook(self._before_part, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after_part, always_call=True)

    def _before_part(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        for frame in thread_state.frames:
            if frame.state is self:
                return None
        if not in_backward():
            self.still_to_run = {module}
        return self.before_forward(module, args, kwargs)

    def _after_part(self, module: nn.Module, args: Any, output: Any) -> Any:
        for frame in thread_state.frames:
            if frame.module is module:
                return self.after_forward(module, args, output)
        return output

    @not_compiled
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The hook after a module's forward (the output is None after an error): drop, and wait for backward."""
        frames = thread_state.frames
        at = len(frames) - 1
        while at >= 0 and frames[at].module is not module:
            at -= 1
        if at < 0:  # the hook before it has not run
            return output
        frame = frames[at]
        while len(frames) > at:
            _close(frames.pop())
        try:
            self._leave(frame, output)
        finally:
            if not frames:
                frame.run.end()
        return cast_floats(output, self.policy.output_dtype)

    def _leave(self, frame: Frame, output: Any) -> None:
        inside = [other for other in thread_state.frames if other.state is self]
        if inside:  # another module of the same state, or a recursive call
            if inside[-1].compute_mesh is not frame.compute_mesh:
                self.show(inside[-1].compute_mesh)
            return
        self.still_to_run.discard(frame.module)
        if frame.run.is_repeated:
            self.show_stored()  # backward is about to use the gathered parameters, and drops them
            for group in self.groups:
                group.offer_leaves()
        elif not self.still_to_run:
            waits = torch.is_grad_enabled() and self._watch_outputs(frame, output)
            if not waits or self._drops_after_forward(frame.run):
                if self.reshard_after_backward or not self.keeps_gathered:
                    self.keeps_gathered = False
                    self.drop(keep_part=waits)
            else:
                self.awaits_backward = True
            self.show_stored()
            if waits:
                frame.run.left.append(self)
                for group in self.groups:
                    group.offer_leaves()

    def _drops_after_forward(self, run: ForwardRun) -> bool:
        """Whether the gathered parameters are dropped after forward, and gathered again for backward."""
        reshard = run.outermost is not self if self.reshard_after_forward is None else self.reshard_after_forward
        return bool(reshard) and True in [group.is_sharded for group in self.groups]

    def _watch_outputs(self, frame: Frame, output: Any) -> bool:
        """Register hooks for backward on the outputs. Returns whether a backward is possible.

        An output that cannot be inspected counts as one with a gradient.
        """
        found, opaque = tensors_in(output)
        hook = functools.partial(self._before_backward, frame.run)
        for tensor in found:
            if tensor.requires_grad:
                opaque = True
                self._hook(tensor, hook)
        return opaque

    def _hook(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        """Call a hook with the gradient of a tensor of this forward."""
        handle = tensor.register_hook(hook)
        if tensor.grad_fn is None:
            self._leaf_hooks.append(handle)

    def _remove_leaf_hooks(self) -> None:
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()

    def _watch_inputs(self, inputs: Any) -> None:
        """With frozen parameters: drop the gathered ones when all inputs have their gradients."""
        if True not in [group.is_sharded and group.has_frozen for group in self.groups]:
            return
        found = [tensor for tensor in tensors_in(inputs)[0] if tensor.requires_grad]
        waiting = set(range(len(found)))

        def came(number: int, grad: torch.Tensor) -> None:
            waiting.discard(number)
            if not waiting and self.backward is not None:
                self._through(self.groups)

        for number, tensor in enumerate(found):
            self._hook(tensor, functools.partial(came, number))

    def _compute_mesh(self, frame: Frame, outer: Sequence[Frame]) -> DeviceMesh | None:
        """The mesh to compute on: that of the inputs over the data axes, of this module or of its caller."""
        for given in (frame, *reversed(outer)):
            found = _mesh_over(self.groups, given.meshes) if given.meshes else None
            if found is not None:
                return found
        return self.compute_mesh if frame.run.is_repeated else None

    # ---------------------------------------------------------------- backward

    def _touch(self) -> Backward:
        """Join the running backward. If the last one failed, its gradients are dropped, as by the next forward."""
        found, last = current_backward(), self.backward
        if last is not None and last is not found and last.is_over:
            last.give_up()
        found.states[self] = None
        self.backward = found
        return found

    def start_anew(self) -> None:
        """Called when a backward has gradients of gathered parameters, and the last one has failed."""
        self._touch()

    def _before_backward(self, run: ForwardRun, grad: torch.Tensor) -> None:
        """Called when backward reaches an output of this module: begin to gather it, and the next module."""
        self._touch()
        for group in self.groups:
            group.start_again()
        self._gather_ahead(run)

    def needed(self, gathered: Gathered) -> None:
        """Called when backward reaches an operator of this module that needs its parameters."""
        if in_backward():
            self._touch()
        gathered.finish()
        if in_backward() and self.run is not None:
            self._gather_ahead(self.run)

    def _gather_ahead(self, run: ForwardRun) -> None:
        for state in _ahead(self.backward_prefetch, run.next_in_backward(self)):
            state._touch()
            for group in state.groups:
                group.start_again()

    def completed(self, group: ParameterGroup, bucket: Bucket) -> None:
        """Called when a backward has computed all gradients of a bucket."""
        backward = self._touch()
        is_inner = current_graph_task() != backward.task
        if is_inner and not group.has_all_gradients(bucket):
            return  # one part of a module that checkpointing recomputes part by part
        if not group.has_frozen:  # first of all: the reduction needs memory
            self._through([group])
        if self.requires_gradient_sync:
            backward.reduce(self, group, bucket)

    def _through(self, groups: Iterable[ParameterGroup]) -> None:
        if self.reshard_after_backward:
            for group in groups:
                group.drop()

    def backward_over(self, backward: Backward) -> None:
        """Called at the end of backward: restore the state between steps."""
        if self.requires_gradient_sync:
            self.reduce_pending(backward)
        if not (self.requires_gradient_sync and self.requires_all_reduce and self.is_last_backward):
            _waiting[self] = None  # a later backward reduces its gradients, or waits for that
        if self._leaf_hooks:
            self._remove_leaf_hooks()
        self.awaits_backward = False
        self.keeps_gathered = not self.reshard_after_backward
        if self.reshard_after_backward:
            self.drop()
        else:
            self.show_stored()

    def reduce_pending(self, backward: Backward) -> None:
        """Begin to reduce gradients that are there, of this backward and of earlier ones."""
        for group in self.groups:
            for bucket in group.buckets:
                if bucket.pending:
                    backward.reduce(self, group, bucket)

    def forget_gradients_of(self, parameters: set[int]) -> None:
        """Drop what waits of the gradients of parameters, given by id, as if it were in their `.grad`, set to None."""
        self.finish_reductions()
        for group in self.groups:
            group.forget_gradients_of(parameters)

    def finish_reductions(self, *, give: bool = True) -> None:
        """Wait for the reductions in flight, and set the gradients."""
        reductions, self.reductions = self.reductions, []
        for finish in reductions:
            finish(give)

    # ---------------------------------------------------------------- captured functions

    def between_steps(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """The state that a step depends on: settings, stored parameters, gradients that wait for a reduction."""
        yield self, _GUARDED
        for group in self.groups:
            yield group, ("data_mesh", "_source")
            for parameter in group.parameters:
                yield parameter, ("stored",)
            for bucket in group.buckets:
                yield bucket, ("indices", "pending", "unreduced")

    def why_unsettled(self) -> str | None:
        """The reason why no program can be recorded now; None in the state between steps."""
        if any(group.shown is not None for group in self.groups) or (
            self.keeps_gathered and self.reshard_after_backward
        ):
            return "unshard() has gathered its parameters; call reshard() first"
        if self.reductions or not self.is_last_backward:
            return "reductions are left to a later backward (set_is_last_backward(False))"
        return None

    def settle(self) -> None:
        """Return to the state between steps: drop gathered parameters, which are only a cache of the stored ones."""
        self.awaits_backward = False
        for group in self.groups:
            group.drop()

    def abandon(self) -> None:
        """Abandon a forward or backward that may be running, with all its modules."""
        if self.backward is not None:
            self.backward.give_up()
        self.give_up()

    def give_up(self) -> None:
        """A forward or backward has failed: drop its state, gradients that are not reduced included."""
        self.keeps_gathered, self.run = False, None
        self.still_to_run.clear()
        self.finish_reductions(give=False)
        for group in self.groups:
            group.drop()
            group.forget_gradients()


# The user's settings, which a copy of a module keeps. The modules to prefetch are determined again.
_SETTINGS = (
    "reshard_after_backward",
    "requires_gradient_sync",
    "gradient_divide_factor",
    "requires_all_reduce",
    "is_last_backward",
)
# The settings that determine which operators and collectives run.
_GUARDED = (*_SETTINGS, "policy", "reshard_after_forward", "forward_prefetch", "backward_prefetch")


# ---------------------------------------------------------------- gradients that wait


# states that have left gradients to a later backward, in the order in which they did
_waiting: weakref.WeakKeyDictionary[ModuleState, None] = weakref.WeakKeyDictionary()


def _waiting_below(states: Iterable[ModuleState]) -> list[ModuleState]:
    """The states that a backward has not reached, and whose gradients of earlier ones it reduces.

    They belong to modules below those that the forward began with. In an order that is the same on all ranks.
    """
    outermost = dict.fromkeys([state.run.outermost for state in states if state.run is not None])
    found = dict.fromkeys([each for state in outermost for each in states_under(*state.modules)])
    return [state for state in found if state in _waiting and state not in states and state.requires_gradient_sync]


def forget_waiting_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Drop the gradients of parameters that an earlier backward has left to a later one."""
    if _waiting:
        found = {id(parameter) for parameter in parameters}
        for state in [*_waiting]:
            state.forget_gradients_of(found)


def refuse_waiting_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Raise if gradients of parameters wait for a reduction; wait for reductions that have begun."""
    if not _waiting:
        return
    found = {id(parameter) for parameter in parameters}
    for state in [*_waiting]:
        state.finish_reductions()
        for group in state.groups:
            name = group.waiting_parameter(found)
            if name is not None:
                raise UnsupportedError(
                    f"the gradient of {name} is not reduced over the ranks, and an optimizer is to step",
                    hint="call the last backward before step() outside of no_sync(), with set_requires_gradient_sync "
                    "and set_requires_all_reduce True; or zero_grad() to drop these gradients",
                )


# ---------------------------------------------------------------- which modules, which meshes


def _ahead(chosen: list[ModuleState] | None, following: ModuleState | None) -> Iterable[ModuleState]:
    return chosen if chosen is not None else () if following is None else (following,)


_PLAIN = frozenset({torch.Tensor, nn.Parameter})


def _meshes_of(args: Any, kwargs: Any) -> tuple[DeviceMesh, ...]:
    """The meshes of the DTensors among the inputs."""
    transformed = transforms_active()
    if not kwargs and not transformed and _PLAIN.issuperset(map(type, args)):
        return ()
    found: list[Any] = tensors_in((args, kwargs))[0]
    if transformed:
        found = [_unwrapped(tensor) for tensor in found]
    return tuple(dict.fromkeys([tensor._spec.mesh for tensor in found if isinstance(tensor, DTensor)]))


def _unwrapped(tensor: Any) -> Any:
    """The tensor inside the wrappers of torch.func."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _mesh_over(groups: Iterable[ParameterGroup], meshes: Iterable[DeviceMesh]) -> DeviceMesh | None:
    """The mesh that has the data axes; None if each rank computes on its own batch."""
    found: DeviceMesh | None = None
    for mesh in meshes:
        for axes in dict.fromkeys([group.data_mesh for group in groups]):
            if not _has_data_axes(mesh, axes):
                continue
            if not has_all_data_axes(mesh, axes) or (found is not None and found is not mesh):
                raise MeshError(
                    f"the inputs are on {mesh}, the parameters are sharded over {axes}",
                    hint="put all inputs on one mesh that has every data axis, or pass plain tensors on each rank",
                )
            found = mesh
    return found


def _has_data_axes(mesh: DeviceMesh, axes: DeviceMesh) -> bool:
    """Whether the mesh of an input has data axes, so that the input is one batch for all ranks along them."""
    found = on_one_grid(mesh, axes)
    overlap = found is not None and bool(_grid_axes(found[0]) & _grid_axes(found[1]))
    if found is None or (overlap and mesh.root is not axes.root):
        raise MeshError(
            f"the batch is on {mesh}, and the model's parameters are sharded or replicated over {axes}",
            hint="put the batch on the mesh of the model, or on a larger one that has it as a slice; "
            "or pass plain tensors on each rank",
        )
    return overlap


def _grid_axes(mesh: DeviceMesh) -> set[int]:
    return {axis for joined in mesh.axes for axis in joined}
