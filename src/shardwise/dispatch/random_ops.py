"""Random operators: every rank gets its part of the numbers that one device would draw.

`shardwise.rng` chooses the generator. Operators whose draws depend on operand values, and cannot be reproduced in
parts, run on replicated operands.
"""

from __future__ import annotations

import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise import modes
from shardwise.core.layout import Block, Run, dense_strides
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.placement import Partial
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.core.symbolic import unrecorded
from shardwise.core.tracing import is_tracing
from shardwise.dispatch.signature import Executor, Signature, routes_between
from shardwise.dispatch.traced_random import fill_in_graph, mask_in_graph
from shardwise.errors import AgreementError
from shardwise.fabric.base import device_of, fabric_of, nothing_of, of_one_rank, on_new_world
from shardwise.fabric.routes import bound_route
from shardwise.local import coordinates_here
from shardwise.plan.propagate import meta_tensor, replicated_spec
from shardwise.rng.cuda import philox_fill as philox
from shardwise.rng.draw_blocks import default_generator, draw_blocks
from shardwise.rng.random_fill import FILLS, FROM, IN_PLACE, Draw, fills
from shardwise.torch_private import OpOverload, current_graph_task, saved_tensor_hooks

__all__ = [
    "agree_on_state",
    "agree_once",
    "agreements",
    "fill_parts",
    "filling",
    "forget_agreements",
    "random_executor",
]

aten = torch.ops.aten


@functools.cache
def _numbers_of(fill: OpOverload) -> tuple[str, ...]:
    """The names of a fill's arguments between the tensor and the generator."""
    return tuple(argument.name for argument in fill._schema.arguments[1:] if argument.name != "generator")


def _fill_of(op: OpOverload, numbers: Mapping[str, Any]) -> tuple[OpOverload, tuple[Any, ...]] | None:
    """The equivalent in-place fill of an operator, and its numbers; None for other operators."""
    fill = op if op in FILLS else IN_PLACE.get(op)
    if fill is not None:
        return fill, tuple(numbers[name] for name in _numbers_of(fill))
    match op._schema.name:
        case "aten::rand_like":
            return aten.uniform_.default, (0.0, 1.0)
        case "aten::randn_like":
            return aten.normal_.default, (0.0, 1.0)
        case "aten::randint_like":
            return FROM, (numbers.get("low", 0), numbers["high"])
    return None


# ---------------------------------------------------------------- each rank's part


class _Parts:
    """The blocks of a tensor on the ranks of this process, with dims in the order in which torch draws."""

    def __init__(self, spec: DTensorSpec, by_memory: bool = True) -> None:
        self.spec = spec
        stride = spec.tensor_meta.stride
        self.order = sorted(range(spec.ndim), key=lambda dim: (-stride[dim], dim)) if by_memory else range(spec.ndim)
        self.back = [self.order.index(dim) for dim in range(spec.ndim)]
        with unrecorded():
            self.contiguous = meta_tensor(spec.tensor_meta).is_contiguous()
        self.of_rank = {c: self._in_order(spec.block(c)) for c in coordinates_here(spec.mesh)}
        self.blocks = list(dict.fromkeys(self.of_rank.values()))

    def _in_order(self, block: Block) -> Block:
        shape, offset, runs = (tuple(field[dim] for dim in self.order) for field in block)
        return Block(shape, offset, runs)  # pyright: ignore[reportArgumentType]

    def wanted(self, op: OpOverload, numbers: tuple[Any, ...], dtype: torch.dtype) -> Draw:
        """The fill of the global tensor."""
        shape = tuple(self.spec.shape[dim] for dim in self.order)
        return Draw(op, numbers, shape, dtype, device_of(self.spec.mesh), self.contiguous)

    def draw(self, op: OpOverload, numbers: tuple[Any, ...], generator: torch.Generator | None) -> torch.Tensor:
        """The local of a tensor that `op` fills."""
        spec, mesh = self.spec, self.spec.mesh
        if not fabric_of(mesh).has_values:
            dtype = spec.tensor_meta.dtype
            return fabric_of(mesh).build(mesh, lambda c: torch.empty(spec.local_shape(c), dtype=dtype, device="meta"))
        _note_state(mesh, op, generator)
        return self.given(_drawn(self.wanted(op, numbers, spec.tensor_meta.dtype), self.blocks, generator))

    def draw_into(
        self, local: torch.Tensor, op: OpOverload, numbers: tuple[Any, ...], generator: torch.Generator | None
    ) -> None:
        """Fill the local of a tensor; on CUDA in place, if its memory is exactly that of its block."""
        wanted = self.wanted(op, numbers, self.spec.tensor_meta.dtype)
        parts = self._parts_in_place(local, wanted)
        if parts is None:
            local.copy_(self.draw(op, numbers, generator))
            return
        first = {self.of_rank[coordinate]: tensor for coordinate, tensor in reversed(parts)}
        outs = [first[block] for block in self.blocks]
        _note_state(self.spec.mesh, op, generator)
        philox.draw(wanted, self.blocks, generator or default_generator(wanted.device), outs)
        for coordinate, tensor in parts:
            if tensor is not first[self.of_rank[coordinate]]:
                tensor.copy_(first[self.of_rank[coordinate]])

    def _parts_in_place(self, local: torch.Tensor, wanted: Draw) -> list[tuple[Coordinate, torch.Tensor]] | None:
        """The tensors of this process's ranks, if numbers can be drawn directly into them; else None."""
        mesh = self.spec.mesh
        if (
            not fabric_of(mesh).has_values
            or modes.draws_by_index()
            or not self.contiguous
            or not philox.reproduces(wanted)
        ):
            return None
        parts = fabric_of(mesh).parts(mesh, local)
        return parts if all(tensor.is_contiguous() for _, tensor in parts) else None

    def given(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The local made of the drawn blocks; ranks with the same block get separate copies."""
        drawn = dict(zip(self.blocks, parts, strict=True))
        used: set[int] = set()

        def part(coordinate: Coordinate) -> torch.Tensor:
            found = drawn[self.of_rank[coordinate]]
            first = id(found) not in used
            used.add(id(found))
            return (found if first else found.clone()).permute(self.back)

        fabric = fabric_of(self.spec.mesh)
        return nothing_of(self.spec) if fabric.is_outside(self.spec.mesh) else fabric.build(self.spec.mesh, part)


def _note_state(mesh: DeviceMesh, op: OpOverload, generator: torch.Generator | None) -> None:
    """All ranks must draw from one random state; compared if ranks are checked."""
    if generator is None:
        _agree_again(mesh)

    def text() -> str:
        state = (generator or default_generator(device_of(mesh))).get_state()
        return f"{op} from the random state {hashlib.sha1(state.numpy().tobytes()).hexdigest()[:12]}"

    fabric_of(mesh).note(mesh, text)


def _drawn(wanted: Draw, blocks: list[Block], generator: torch.Generator | None) -> list[torch.Tensor]:
    """The blocks; of complex numbers, by their real and imaginary parts, as torch does."""
    if not wanted.dtype.is_complex:
        return draw_blocks(wanted, blocks, generator, modes.draws_by_index())
    both = (Run(0, 2),)
    pairs = [Block((*b.shape, 2), (*b.offset, 0), (*b.runs, both)) for b in blocks]
    numbers = wanted.numbers
    if wanted.op is aten.normal_.default:  # the variance is that of both parts together
        numbers = (numbers[0], numbers[1] / math.sqrt(2))
    real = wanted._replace(numbers=numbers, shape=(*wanted.shape, 2), dtype=wanted.dtype.to_real())
    return [torch.view_as_complex(part) for part in draw_blocks(real, pairs, generator, modes.draws_by_index())]


@functools.lru_cache(maxsize=1024)
def _parts_of(spec: DTensorSpec) -> _Parts:
    agree_once(spec.mesh)
    return _Parts(spec)


def fill_parts(
    spec: DTensorSpec, op: OpOverload, numbers: tuple[Any, ...], generator: torch.Generator | None
) -> torch.Tensor:
    """The local of a new tensor of this spec that the in-place operator `op` has filled."""
    if is_tracing():
        agree_once(spec.mesh)
        return fill_in_graph(spec, op, numbers, generator)
    return _parts_of(spec).draw(op, numbers, generator)


_agreed: dict[DeviceMesh, None] = of_one_rank({})
# where ranks agreed although their states differed: that of this rank, and that of the first rank, which replaced it
_replaced: dict[DeviceMesh, tuple[bytes, bytes]] = of_one_rank({})
on_new_world += [_parts_of.cache_clear, _agreed.clear, _replaced.clear]


def agree_once(mesh: DeviceMesh) -> None:
    """Make ranks agree on a random state at the first draw on a mesh; later states follow from it."""
    if mesh in _agreed:
        _agree_again(mesh)
        return
    if is_tracing():
        with unrecorded():
            _check_agreement(
                mesh, "trace a program that draws random numbers", "before the compiled program first runs"
            )
    elif saved_tensor_hooks._top_saved_tensors_default_hooks(True) is not None:
        # `torch.utils.checkpoint` has kept the state from before, from which the recomputation would draw
        what = "draw random numbers for the first time inside a checkpointed function (or below hooks of saved tensors)"
        _check_agreement(mesh, what, "before the forward pass")
    else:
        agree_on_state(mesh)
    _agreed[mesh] = None


def agreements() -> int:
    """The number of meshes whose ranks have agreed on a random state."""
    return len(_agreed)


def forget_agreements(known: int) -> list[DeviceMesh]:
    """Forget all agreements but the first `known`, since random states were restored. Returns their meshes in order."""
    fresh = list(_agreed)[known:]
    for mesh in fresh:
        del _agreed[mesh]
        _replaced.pop(mesh, None)
    if fresh:
        _parts_of.cache_clear()
    return fresh


def _check_agreement(mesh: DeviceMesh, what: str, when: str) -> None:
    """Raise if states differ where they cannot be changed, since compilers and recomputation restore them."""
    if not coordinates_here(mesh) or not fabric_of(mesh).one_rank:
        return
    state = hashlib.sha1(default_generator(device_of(mesh)).get_state().numpy().tobytes()).hexdigest()
    if len(set(fabric_of(mesh).agree(mesh, state, torch.empty(0)))) > 1:
        raise AgreementError(
            f"the ranks of {mesh} {what} with different random states",
            hint=f"call shardwise.manual_seed(seed) with one seed on every rank {when}",
        )


def agree_on_state(mesh: DeviceMesh) -> None:
    """If the ranks' generators differ, use the state of the first rank and warn: replicas would differ otherwise."""
    if not coordinates_here(mesh) or not fabric_of(mesh).one_rank:
        return
    generator, nothing = default_generator(device_of(mesh)), torch.empty(0)
    state = generator.get_state().numpy().tobytes()
    if len(set(fabric_of(mesh).agree(mesh, hashlib.sha1(state).hexdigest(), nothing))) > 1:
        first = fabric_of(mesh).agree(mesh, state, nothing)[0]
        generator.set_state(_as_state(first))
        _replaced[mesh] = state, first
        warnings.warn(
            f"the ranks of {mesh} have different random states: all continue with that of the first rank. Call "
            "shardwise.manual_seed(seed) with one seed on every rank",
            stacklevel=2,
        )


def _agree_again(mesh: DeviceMesh) -> None:
    """In a backward, replace a state from before ranks agreed by the one they agreed on, as the forward did.

    A reentrant `torch.utils.checkpoint` around the first draw has kept that state, and recomputes from it.
    """
    if mesh not in _replaced or current_graph_task() < 0:
        return
    generator, (before, agreed) = default_generator(device_of(mesh)), _replaced[mesh]
    if generator.get_state().numpy().tobytes() == before:
        generator.set_state(_as_state(agreed))


def _as_state(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


# ---------------------------------------------------------------- executors


def filling(signature: Signature) -> Executor:
    """An in-place fill. The sum of a Partial tensor is the draw of one device."""
    info, spec = signature.info, signature.specs[0]
    if spec.partial_axes:
        return _filling_partial(signature)

    def fill_in_place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        bound = info.bind(args, kwargs)
        op, numbers = _fill_of(info.op, bound)  # pyright: ignore[reportGeneralTypeIssues]
        local = args[0]._local_tensor
        if is_tracing():
            local.copy_(fill_in_graph(spec, op, numbers, bound.get("generator")))
        else:
            _parts_of(spec).draw_into(local, op, numbers, bound.get("generator"))
        return args[0]

    return fill_in_place


def _filling_partial(signature: Signature) -> Executor:
    info, spec = signature.info, signature.specs[0]
    reduced = spec.reduced()
    route = bound_route(reduced, spec)

    def fill_partial(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        bound = info.bind(args, kwargs)
        op, numbers = _fill_of(info.op, bound)  # pyright: ignore[reportGeneralTypeIssues]
        fill = fill_in_graph if is_tracing() else fill_parts
        args[0]._local_tensor.copy_(route.run(fill(reduced, op, numbers, bound.get("generator"))))
        return args[0]

    return fill_partial


def random_executor(signature: Signature, metas: tuple[TensorMeta, ...]) -> Executor:
    """A random operator that returns new tensors."""
    info = signature.info
    if fills(info.op):
        return _filling_new(signature, metas[0])
    if info.op is aten.native_dropout.default:
        return _dropout(signature, metas)
    return _on_gathered_operands(signature, metas)


def _filling_new(signature: Signature, meta: TensorMeta) -> Executor:
    info = signature.info
    spec = signature.specs[0].reduced().with_meta(meta)
    wrap = signature.wrapping.wrapper(spec)

    def fill_new(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        bound = info.bind(args, kwargs)
        op, numbers = _fill_of(info.op, bound)  # pyright: ignore[reportGeneralTypeIssues]
        return wrap(fill_parts(spec, op, numbers, bound.get("generator")))

    return fill_new


def _dropout(signature: Signature, metas: tuple[TensorMeta, ...]) -> Executor:
    """`native_dropout`: the mask is drawn, and may be applied to the addends of a sum."""
    info, spec, mesh, wrapping = signature.info, signature.specs[0], signature.mesh, signature.wrapping
    linear = all(p.reduce_op in ("sum", "avg") for p in spec.placements if isinstance(p, Partial))
    operand = spec if linear else spec.reduced()
    (route,) = routes_between((spec,), (operand,))
    mask_spec = operand.reduced().with_dtype(torch.bool)
    wrap, wrap_mask = wrapping.wrapper(operand), wrapping.wrapper(mask_spec)
    with unrecorded():
        draw_mask = _cuda_mask(operand.reduced()) if mesh.device_type == "cuda" else _bernoulli_mask(mask_spec)
    if draw_mask is None:
        return _on_gathered_operands(signature, metas)

    def run_dropout(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        bound = info.bind(args, kwargs)
        p, train = bound["p"], bound["train"]
        local = args[0]._local_tensor if route is None else route.run(args[0]._local_tensor)
        if train is False:
            return wrap(local.clone()), wrap_mask(torch.ones_like(local, dtype=torch.bool))
        mask = mask_in_graph(operand.reduced(), p) if is_tracing() else draw_mask(p)
        kept = fabric_of(mesh).map(mesh, lambda c, x, keep: _kept(x, keep, p), local, mask)
        return wrap(kept), wrap_mask(mask)

    return run_dropout


def _bernoulli_mask(spec: DTensorSpec) -> Callable[[float], torch.Tensor]:
    return lambda p: fill_parts(spec, aten.bernoulli_.float, (1 - p,), None)


def _cuda_mask(spec: DTensorSpec) -> Callable[[float], torch.Tensor] | None:
    """The mask of torch's fused kernel. None if the kernel traverses memory in another order."""
    meta = spec.tensor_meta
    if meta.stride != dense_strides(meta.shape, like=meta.stride):
        return None
    parts = _Parts(spec, by_memory=meta.is_contiguous or math.prod(meta.shape) % 2 == 0)
    if not philox.reproduces(parts.wanted(aten.native_dropout.default, (0.5,), meta.dtype)):
        return None
    by_index = _bernoulli_mask(spec.with_dtype(torch.bool))

    def draw(p: float) -> torch.Tensor:
        if modes.draws_by_index():
            return by_index(p)
        wanted = parts.wanted(aten.native_dropout.default, (p,), meta.dtype)
        _note_state(spec.mesh, wanted.op, None)
        return parts.given(philox.draw(wanted, parts.blocks, default_generator(wanted.device)))

    return draw


def _kept(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    """The result of dropout, with the roundings of the device's own kernel."""
    if x.device.type != "cuda":
        return x * (keep.to(x.dtype) * (0.0 if p == 1 else 1 / (1 - p)))
    share = 1 - p if x.dtype is torch.float64 else torch.tensor(1 - p, dtype=torch.float32).item()
    return x.mul(keep).mul_(0.0 if share == 0 else 1 / share)


def _on_gathered_operands(signature: Signature, metas: tuple[TensorMeta, ...]) -> Executor:
    """Draw on gathered operands, as on one device; every rank keeps its part."""
    info, slots, specs, mesh, wrapping = (
        signature.info, signature.slots, signature.specs, signature.mesh, signature.wrapping,
    )  # fmt: skip
    routes = routes_between(specs, signature.replicated_operands())
    moving = [route.route for route in routes if route is not None and route.communicates]
    keeps = list(_result_layouts(specs[0], [replicated_spec(mesh, meta) for meta in metas]))
    wraps = [wrapping.wrapper(spec) for spec, _ in keeps]

    def run_on_global(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if moving:
            modes.check_strict(info.op, moving)
        new_args, new_kwargs = list(args), dict(kwargs)
        for slot, route in zip(slots, routes, strict=True):
            local = wrapping.local_of(slot.get(args, kwargs), mesh)
            full = fabric_of(mesh).parts(mesh, local if route is None else route.run(local))[0][1]
            slot.put(new_args, new_kwargs, full)
        _note_state(mesh, info.op, kwargs.get("generator"))
        results = info.op(*new_args, **new_kwargs)
        tools = iter(zip(keeps, wraps, strict=True))

        def mine(result: Any) -> Any:
            if not isinstance(result, torch.Tensor):
                return result
            (_, keep), wrap = next(tools)
            local = fabric_of(mesh).build(mesh, lambda coordinate: result.clone())
            return wrap(local if keep is None else keep.run(local))

        return tuple(map(mine, results)) if isinstance(results, tuple) else mine(results)

    return run_on_global


def _result_layouts(operand: DTensorSpec, gathered: list[DTensorSpec]) -> Iterator[tuple[DTensorSpec, Any]]:
    """The layout of each result of an operator on gathered operands: that of the operand, if it has the same shape."""
    for spec in gathered:
        if spec.shape == operand.shape and not operand.partial_axes and not operand.is_replicated:
            target = operand.with_meta(spec.tensor_meta)
            yield target, bound_route(spec, target)
        else:
            yield spec, None
