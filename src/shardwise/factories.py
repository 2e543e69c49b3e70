"""zeros, ones, empty, full, rand, randn, randint, randperm: new DTensors. Each rank makes its own block only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.api import cut_block
from shardwise.compilers import traceable
from shardwise.core.placement import Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.dispatch.random_ops import fill_parts
from shardwise.errors import LayoutError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import bound_route
from shardwise.fabric.world import as_mesh
from shardwise.tensor import DTensor, dtensor_of
from shardwise.transforms import outside_transforms

__all__ = ["empty", "full", "ones", "rand", "randint", "randn", "randperm", "zeros"]

aten = torch.ops.aten


class Layout(NamedTuple):
    """The layout of a new tensor: arguments of every factory besides size and dtype."""

    device_mesh: Any
    placements: Sequence[Any] | None
    shard_order: Sequence[Any] | None
    layout: torch.layout

    def spec(self, size: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
        """The spec of a tensor of this size."""
        if self.layout is not torch.strided:
            raise LayoutError(f"a DTensor is strided, not {self.layout}", hint="leave out layout=")
        mesh = as_mesh(self.device_mesh)
        placements = (Replicate(),) * mesh.ndim if self.placements is None else self.placements
        return DTensorSpec(mesh, placements, TensorMeta(size, dtype=dtype), self.shard_order)


def _new(
    spec: DTensorSpec, requires_grad: bool, make: Callable[[DTensorSpec], torch.Tensor], draws: bool = False
) -> DTensor:
    """A DTensor with the local `make(spec)`, for a spec without Partial. `draws`: whether it has random numbers."""
    reduced = spec.reduced()
    with outside_transforms("a factory of random numbers" if draws else "a factory", draws=draws):
        local = make(reduced)
        if reduced is not spec:  # a Partial tensor of ones has the value one, not one for each rank
            local = bound_route(reduced, spec).run(local)
        made = dtensor_of(spec, local)
    if requires_grad:
        made.requires_grad_()
    return made


def _flat(size: Sequence[Any]) -> Sequence[int]:
    """A size may be given as one sequence or as numbers."""
    return size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size


def _blocks(make: Callable[..., torch.Tensor], *numbers: Any) -> Callable[[DTensorSpec], torch.Tensor]:
    """Every rank calls `make` with the size of its block."""

    def build(spec: DTensorSpec) -> torch.Tensor:
        device = "meta" if not fabric_of(spec.mesh).has_values else spec.mesh.device_type
        kind = spec.tensor_meta.dtype
        return fabric_of(spec.mesh).build(
            spec.mesh, lambda c: make(spec.local_shape(c), *numbers, dtype=kind, device=device)
        )

    return build


@traceable
def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """A DTensor of zeros.

    Args:
        size: the global size.
        dtype: the default one of torch, if none is given.
        layout: strided; no other is supported.
        requires_grad: as in torch.
        device_mesh: the mesh.
        placements: the layout of the tensor; replicated by default.
        shard_order: which axis splits a dim first, if it is not the order of the mesh.

    Example:
        >>> import shardwise as sw
        >>> zeros(4, 2, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)]).spec
        f32[4,2] S0
    """
    spec = Layout(device_mesh, placements, shard_order, layout).spec(_flat(size), dtype or torch.get_default_dtype())
    return _new(spec, requires_grad, _blocks(torch.zeros))


@traceable
def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """A DTensor of ones; arguments as in `zeros`.

    Example:
        >>> import shardwise as sw
        >>> ones(3, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Partial()]).full_tensor()
        tensor([1., 1., 1.])
    """
    spec = Layout(device_mesh, placements, shard_order, layout).spec(_flat(size), dtype or torch.get_default_dtype())
    return _new(spec, requires_grad, _blocks(torch.ones))


@traceable
def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """An uninitialized DTensor; arguments as in `zeros`.

    Example:
        >>> import shardwise as sw
        >>> empty(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)]).shape
        torch.Size([4])
    """
    spec = Layout(device_mesh, placements, shard_order, layout).spec(_flat(size), dtype or torch.get_default_dtype())
    return _new(spec, requires_grad, _blocks(torch.empty))


@traceable
def full(
    size: Sequence[Any],
    fill_value: complex,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """A DTensor filled with a value; other arguments as in `zeros`.

    Example:
        >>> import shardwise as sw
        >>> full((2, 2), 7, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(1)]).full_tensor()
        tensor([[7, 7],
                [7, 7]])
    """
    dtype = dtype or torch.full((), fill_value, device="meta").dtype
    return _new(
        Layout(device_mesh, placements, shard_order, layout).spec(size, dtype),
        requires_grad,
        _blocks(torch.full, fill_value),
    )


# ---------------------------------------------------------------- random numbers: those of one device


def _drawn(
    spec: DTensorSpec, requires_grad: bool, fill: Any, numbers: tuple[Any, ...], generator: torch.Generator | None
) -> DTensor:
    if spec.partial_axes:
        raise LayoutError(
            f"random numbers cannot have the layout {spec}: a sum of addends has another distribution",
            hint="use Replicate() or Shard()",
        )
    return _new(spec, requires_grad, lambda reduced: fill_parts(reduced, fill, numbers, generator), draws=True)


@traceable
def rand(
    *size: Any,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """Uniform random numbers in [0, 1), those of `torch.rand` on one device; other arguments as in `zeros`.

    Example:
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> x = sw.manual_seed(7) or rand(5, device_mesh=mesh, placements=[sw.Shard(0)])
        >>> torch.equal(x.full_tensor(), torch.manual_seed(7) and torch.rand(5))
        True
    """
    spec = Layout(device_mesh, placements, shard_order, layout).spec(_flat(size), dtype or torch.get_default_dtype())
    return _drawn(spec, requires_grad, aten.uniform_.default, (0.0, 1.0), generator)


@traceable
def randn(
    *size: Any,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """Normal random numbers, those of `torch.randn` on one device; other arguments as in `zeros`.

    Example:
        >>> import shardwise as sw
        >>> randn(4, 4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(1)]).spec
        f32[4,4] S1
    """
    spec = Layout(device_mesh, placements, shard_order, layout).spec(_flat(size), dtype or torch.get_default_dtype())
    return _drawn(spec, requires_grad, aten.normal_.default, (0.0, 1.0), generator)


@traceable
def randint(
    low: int,
    high: int | Sequence[int],
    size: Sequence[int] | None = None,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """Random integers in [low, high), as `torch.randint`: `randint(high, size)` or `randint(low, high, size)`.

    Example:
        >>> import shardwise as sw
        >>> randint(10, (6,), device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)]).spec
        i64[6] S0
    """
    if size is None:
        if not isinstance(high, Sequence):
            raise TypeError("randint needs a size: randint(high, size) or randint(low, high, size)")
        low, high, size = 0, low, high
    spec = Layout(device_mesh, placements, shard_order, layout).spec(size, dtype or torch.int64)
    return _drawn(spec, requires_grad, getattr(aten.random_, "from"), (low, high), generator)


@traceable
def randperm(
    n: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Any] | None = None,
    shard_order: Sequence[Any] | None = None,
) -> DTensor:
    """A random permutation of 0 to n - 1, as `torch.randperm`. Every rank draws all of it and keeps its part.

    Example:
        >>> import shardwise as sw
        >>> randperm(6, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)]).full_tensor().sum()
        tensor(15)
    """
    spec = Layout(device_mesh, placements, shard_order, layout).spec((n,), dtype or torch.int64)

    def permuted(spec: DTensorSpec) -> torch.Tensor:
        if not fabric_of(spec.mesh).has_values:
            return _blocks(torch.empty)(spec)
        device = spec.mesh.device_type
        full = torch.randperm(n, generator=generator, dtype=spec.tensor_meta.dtype, device=device)
        return fabric_of(spec.mesh).build(spec.mesh, lambda c: cut_block(full, spec, c))

    return _new(spec, requires_grad, permuted, draws=True)
