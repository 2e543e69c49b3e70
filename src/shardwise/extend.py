"""For users' own operators and functions: register_sharding, check_rule, local_map.

Registered rules are handled like those of the library.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.api import distribute_tensor
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Partial, Placement, Replicate, as_placement
from shardwise.core.spec import TensorMeta
from shardwise.core.tracing import is_dynamo_compiling
from shardwise.errors import LayoutError, RuleError
from shardwise.fabric.world import as_mesh, init_device_mesh, virtual
from shardwise.rules.engine import Factors, Row, candidates, parse
from shardwise.rules.registry import Call, Rule, declare_rule, find_rule, overloads, pattern_factors, readers_of
from shardwise.schema import OpInfo, load_rules
from shardwise.tensor import DTensor, dtensor_of, forget_operators, is_dtensor
from shardwise.torch_private import OpOverload, OpOverloadPacket, tree_flatten, tree_leaves, tree_unflatten

__all__ = ["check_rule", "local_map", "register_sharding"]

Operator = OpOverload | OpOverloadPacket


def register_sharding(op: Operator | Sequence[Operator], rule: str | None = None, **facts: Any) -> Any:
    """Define how an operator may be sharded: by a rule string, or by a function that lists rows.

    Args:
        op: the operator, or several.
        rule: a rule string such as "mk,kn->mn", with the operands and results in the order of the schema (lists
            flattened). Left out, this is a decorator of a function that gets the operator's arguments, with
            `TensorMeta` in place of tensors, and returns the rows of one axis: pairs of the results' placements and
            of the arguments' placements (None for arguments that are not tensors).
        facts: with a rule string, arguments of `Factors`: `linear`, `reduce`, `unsharded`, `monotone`, ...

    Example:
        >>> @torch.library.custom_op("shardwise_doc::scale", mutates_args=())
        ... def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        ...     return x * factor
        >>> @scale.register_fake
        ... def _(x, factor):
        ...     return torch.empty_like(x)
        >>> register_sharding(torch.ops.shardwise_doc.scale.default, "...->...", linear=((0,),))
        >>> check_rule(torch.ops.shardwise_doc.scale.default, torch.randn(5, 3), 2.0)
        >>> @register_sharding(torch.ops.shardwise_doc.scale.default)
        ... def rows(x, factor):
        ...     return [([sw.Shard(d)], [sw.Shard(d), None]) for d in range(len(x.shape))]
        >>> import shardwise as sw
        >>> check_rule(torch.ops.shardwise_doc.scale.default, torch.randn(5, 3), 2.0)
    """
    ops = overloads([op] if isinstance(op, OpOverload | OpOverloadPacket) else op)
    if rule is not None:
        pattern = parse(rule)
        _declare(Rule(lambda call: pattern_factors(pattern, call, **facts)), ops)
        return None

    def decorate(rows_of: Callable[..., Any]) -> Callable[..., Any]:
        reads = readers_of([argument.name for op in ops for argument in op._schema.arguments])  # rows may depend on all
        _declare(Rule(lambda call: _factors_from_rows(call, rows_of), reads=reads), ops)
        return rows_of

    return decorate


def _declare(rule: Rule, ops: Sequence[OpOverload]) -> None:
    load_rules()  # so that they do not replace this one later
    declare_rule(rule, *ops, replace=True)
    forget_operators()


def _factors_from_rows(call: Call, rows_of: Callable[..., Any]) -> Factors:
    info = OpInfo.of(call.op)
    keyword_only = {a.name for a in call.op._schema.arguments if a.kwarg_only}
    positional = [call[name] for name in info.names if name not in keyword_only]
    rows = []
    for outputs, inputs in rows_of(*positional, **{name: call[name] for name in keyword_only}):
        flat_in = tuple(as_placement(p) for p in tree_leaves(inputs, is_leaf=_is_placement) if p is not None)
        flat_out = tuple(as_placement(p) for p in tree_leaves(outputs, is_leaf=_is_placement) if p is not None)
        if len(flat_in) != len(call.operands) or len(flat_out) != len(call.results):
            raise RuleError(
                f"{call.op}: a row names {len(flat_in)} tensor arguments and {len(flat_out)} results, the call has "
                f"{len(call.operands)} and {len(call.results)}",
                hint="give a placement for each tensor (also inside lists) and None for other arguments",
            )
        rows.append(Row(flat_in, flat_out))
    none = tuple((None,) * len(meta.shape) for meta in call.operands)
    return Factors(none, tuple((None,) * len(meta.shape) for meta in call.results), rows=tuple(rows))


def _is_placement(value: Any) -> bool:
    return value is None or isinstance(value, Placement)


def check_rule(op: OpOverload, *args: Any, sizes: Sequence[int] = (2, 3), **kwargs: Any) -> None:
    """Check an operator's rule against one device: every row, on virtual meshes of each size.

    Args:
        op: the operator.
        args: sample arguments, with plain tensors.
        sizes: the numbers of ranks of the meshes.
        kwargs: sample keyword arguments.

    Raises:
        RuleError: a row gives another value or another layout than it states.

    Example:
        >>> check_rule(torch.ops.aten.mm.default, torch.randn(4, 6), torch.randn(6, 5))
    """
    load_rules()
    rule = find_rule(op)
    leaves, tree = tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    wanted = op(*args, **kwargs)
    results = [t for t in tree_leaves(wanted) if isinstance(t, torch.Tensor)]
    if rule is None:
        raise RuleError(f"{op} has no rule", hint="define one with register_sharding")
    bound = OpInfo.of(op).bind(*_with_metas(leaves, tree, at))
    call = Call(op, bound, tuple(TensorMeta.of(leaves[i]) for i in at), tuple(TensorMeta.of(t) for t in results))
    factors = rule.factors(call)
    if factors is None:
        raise RuleError(f"the rule of {op} does not apply to these arguments")
    for size, row in itertools.product(sizes, candidates(factors)):
        with virtual():
            mesh = init_device_mesh("cpu", (size,))
        new = list(leaves)
        for i, placement in zip(at, row.inputs, strict=True):
            new[i] = _spread(leaves[i], mesh, placement)
        new_args, new_kwargs = tree_unflatten(new, tree)
        got = [t for t in tree_leaves(op(*new_args, **new_kwargs)) if isinstance(t, DTensor)]
        _check_row(op, row, got, results)


def _check_row(op: OpOverload, row: Row, got: Sequence[DTensor], results: Sequence[torch.Tensor]) -> None:
    """Raise unless the results have the values of one device, and the layouts of the row."""
    for one, plain, placement in zip(got, results, row.outputs, strict=True):
        where = f"{op}: the row {row.inputs} -> {row.outputs} on {one.device_mesh.size()} ranks"
        if not torch.allclose(one.full_tensor(), plain, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise RuleError(f"{where} gives a wrong value")
        if one.placements != (placement,):
            raise RuleError(f"{where} gives the layout {one.placements[0]}")


def _with_metas(leaves: list[Any], tree: Any, at: list[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tree_unflatten([TensorMeta.of(leaf) if i in at else leaf for i, leaf in enumerate(leaves)], tree)


def _spread(tensor: torch.Tensor, mesh: Any, placement: Placement) -> DTensor:
    """A tensor in a layout that makes a wrong rule visible: a Partial sum has nonzero addends on every rank."""
    if isinstance(placement, Partial) and placement.reduce_op == "sum" and type(placement) is Partial:
        replicated = distribute_tensor(tensor, mesh, [Replicate()])
        other = distribute_tensor(torch.ones_like(tensor), mesh, [Replicate()])
        parts: Any = replicated.redistribute(placements=[placement])._local_tensor
        one: Any = other._local_tensor
        for sign, part in zip(itertools.cycle((1, -1)), parts.tensors[: 2 * (mesh.size() // 2)], strict=False):
            part.add_(sign * one.tensors[0])
        return dtensor_of(replicated._spec.with_placements([placement]), parts)
    return distribute_tensor(tensor, mesh, [placement])


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Any = None,
    in_grad_placements: Any = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
    out_shapes: Any = None,
) -> Any:
    """A function of local tensors as a function of DTensors.

    Args:
        func: gets each rank's local tensors, and returns tensors of each rank. Left out, this is a decorator.
        out_placements: the placements of each result; one list for a single result, None for other values.
        in_placements: the placements that each argument must have, None if it is not a DTensor; not checked if absent.
            Keyword arguments may be left out if none of them is a DTensor.
        in_grad_placements: for each argument the layout of the gradient of its local.
        device_mesh: the mesh, if no argument is a DTensor.
        redistribute_inputs: redistribute arguments to `in_placements` instead of refusing others.
        out_shapes: the global shape of each result, one shape for a single result, or a function of the arguments that
            gives them. Needed if shards are uneven; otherwise computed from the local shapes.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> x = sw.ones(4, 3, device_mesh=mesh, placements=[sw.Shard(0)])
        >>> total = local_map(lambda t: t.sum(0), out_placements=[sw.Partial()], in_placements=([sw.Shard(0)],))
        >>> total(x).full_tensor()
        tensor([4., 4., 4.])
    """
    if func is None:
        return functools.partial(
            local_map, out_placements=out_placements, in_placements=in_placements,
            in_grad_placements=in_grad_placements, device_mesh=device_mesh, redistribute_inputs=redistribute_inputs,
            out_shapes=out_shapes,
        )  # fmt: skip

    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        mesh = next((leaf.device_mesh for leaf in leaves if is_dtensor(leaf)), None)
        mesh = mesh or (as_mesh(device_mesh) if device_mesh is not None else None)
        named = tree_leaves(kwargs)
        ignored = 0 if any(map(is_dtensor, named)) else len(named)
        new_args, new_kwargs = tree_unflatten(
            _locals_of(leaves, in_placements, in_grad_placements, redistribute_inputs, ignored), tree
        )
        result = func(*new_args, **new_kwargs)
        if mesh is None:
            return result
        shapes = out_shapes(*args, **kwargs) if callable(out_shapes) else out_shapes
        return _as_dtensors(result, mesh, out_placements, shapes)

    # compilers do not read the attributes of every callable
    return mapped if is_dynamo_compiling() else functools.wraps(func)(mapped)


def _locals_of(
    leaves: Sequence[Any], in_placements: Any, in_grad_placements: Any, redistribute_inputs: bool, ignored: int
) -> Any:
    """The arguments of a mapped function: the locals of DTensors, redistributed to the required placements.

    The last `ignored` of them need no placements.
    """

    def for_all(given: Any) -> list[Any]:
        each = [None] * len(leaves) if given is None else list(given)
        return each + [None] * ignored if len(each) == len(leaves) - ignored else each

    wanted, gradients = for_all(in_placements), for_all(in_grad_placements)
    if len(wanted) != len(leaves) or len(gradients) != len(leaves):
        raise LayoutError(
            f"local_map: {len(leaves)} arguments, {len(wanted)} in_placements, {len(gradients)} in_grad_placements",
            hint="give one for each argument, None for arguments that are not DTensors",
        )
    return [
        _as_wanted(leaf, want, i, redistribute_inputs).to_local(grad_placements=gradient) if is_dtensor(leaf) else leaf
        for i, (leaf, want, gradient) in enumerate(zip(leaves, wanted, gradients, strict=True))
    ]


def _as_dtensors(result: Any, mesh: DeviceMesh, out_placements: Any, out_shapes: Any) -> Any:
    """The results of a mapped function: tensors as DTensors with the placements named for them."""
    outs, tree = tree_flatten(result)
    single = len(outs) == 1 and all(isinstance(p, Placement) for p in out_placements)
    placements = [out_placements] if single else list(out_placements)
    if len(placements) != len(outs):
        raise LayoutError(f"local_map: {len(placements)} out_placements for {len(outs)} results")
    is_one_shape = single and out_shapes is not None and all(isinstance(size, int) for size in out_shapes)
    shapes = [None] * len(outs) if out_shapes is None else [out_shapes] if is_one_shape else list(out_shapes)
    if len(shapes) != len(outs):
        raise LayoutError(f"local_map: {len(shapes)} out_shapes for {len(outs)} results")
    laid_out = [
        _laid_out(out, mesh, chosen, shape) if isinstance(out, torch.Tensor) and chosen is not None else out
        for out, chosen, shape in zip(outs, placements, shapes, strict=True)
    ]
    return tree_unflatten(laid_out, tree)


def _laid_out(out: torch.Tensor, mesh: DeviceMesh, placements: Any, shape: Any) -> DTensor:
    try:
        return DTensor.from_local(out, mesh, placements, shape=shape)
    except LayoutError as error:
        hint = "pass the global shapes as out_shapes=... if shards are uneven"
        raise LayoutError(f"local_map: {error.problem.removeprefix('from_local: ')}", hint=hint) from None


def _as_wanted(tensor: DTensor, wanted: Any, index: int, redistribute_inputs: bool) -> DTensor:
    if wanted is None:
        return tensor
    moved = tensor._spec.with_placements(wanted)
    if moved is tensor._spec:
        return tensor
    if not redistribute_inputs:
        raise LayoutError(
            f"local_map: argument {index} is {tensor._spec}, but in_placements requires {moved.layout}",
            hint="redistribute it, or pass redistribute_inputs=True",
        )
    return tensor.redistribute(placements=wanted)
