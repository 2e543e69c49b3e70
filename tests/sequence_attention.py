"""Attention over a sharded sequence against one device: masks, lengths and layouts, for virtual ranks and processes."""

import contextlib
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise.debug import CommDebugMode

S0, S1, S2, Z2, R = sw.Shard(0), sw.Shard(1), sw.Shard(2), sw.Zigzag(2), sw.Replicate()
Layouts = tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...]
LAYOUTS: Layouts = (
    ((4,), (S2,)), ((3,), (S2,)), ((2, 2), (S2, S2)), ((2, 2), (S0, S2)), ((2, 2, 2), (S0, S1, S2)),
)  # fmt: skip
ZIGZAGS: Layouts = (
    ((4,), (Z2,)), ((3,), (Z2,)), ((2, 2), (Z2, S2)), ((2, 2), (S0, Z2)), ((2, 2, 2), (S0, S1, Z2)),
)  # fmt: skip
# queries and keys: equal, uneven, of different numbers, and fewer than there are ranks
LENGTHS = ((8, 8), (13, 13), (9, 6), (5, 11), (2, 3))
# a boolean mask has rows that are masked entirely, and so has a window where keys are fewer than queries
MASKS = ("none", "causal", "boolean", "float", "window", "float window", "samples", "heads", "padding")
OPTIONS = ("plain", "groups", "scale", "dropout")


class Case(NamedTuple):
    """Operands of one call, and its other arguments."""

    tensors: tuple[torch.Tensor, ...]  # query, key, value, gradient of the result
    mask: torch.Tensor | None
    options: dict[str, Any]


def case(
    mask: str, lengths: tuple[int, int], dtype: torch.dtype = torch.float64, heads: int = 4, option: str = "plain"
) -> Case:
    """A call with this mask and this option."""
    generator = torch.Generator().manual_seed(100 * MASKS.index(mask) + sum(lengths))

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, generator=generator)

    rows, columns = lengths
    few = heads // 2 if option == "groups" else heads
    tensors = rand(2, heads, rows, 8), rand(2, few, columns, 8), rand(2, few, columns, 8), rand(2, heads, rows, 8)
    options: dict[str, Any] = {"is_causal": mask == "causal", "enable_gqa": option == "groups"}
    if option == "scale":
        options["scale"] = 0.3
    if option == "dropout":
        options["dropout_p"] = 0.4
    return Case(tensors, _mask(mask, rows, columns, heads, dtype, generator), options)


def _mask(
    name: str, rows: int, columns: int, heads: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor | None:
    near = torch.ones(rows, columns, dtype=torch.bool).tril(1).triu(-2)
    if name in ("none", "causal"):
        return None
    if name == "window":
        return near
    if name == "padding":  # keys of a sample that is shorter than the other
        return (torch.arange(columns) < torch.tensor([[columns], [columns // 2 + 1]])).view(2, 1, 1, columns)
    if name == "boolean":
        chosen = torch.rand(2, 1, rows, columns, generator=generator) > 0.5
        chosen[:, :, rows // 2] = False  # a row that attends to nothing
        chosen[:, :, 0, : columns // 2] = False  # and one that attends to nothing of the first blocks
        return chosen
    if name == "samples":
        return torch.stack([near, near.flip(0)]).unsqueeze(1)
    if name == "heads":
        return near | (torch.rand(1, heads, rows, columns, generator=generator) > 0.8)
    bias = torch.randn((rows, columns), dtype=dtype, generator=generator)
    return bias if name == "float" else bias.masked_fill(~near, -torch.inf)


def attend(given: Case, tensors: Any, mask: Any, grad: Any) -> list[torch.Tensor]:
    """The result and the gradients of queries, keys and values."""
    torch.manual_seed(3)  # of dropout
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, **given.options)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def on_one_device(given: Case) -> list[torch.Tensor]:
    """The expected result."""
    return attend(given, given.tensors[:3], given.mask, given.tensors[3])


def on_mesh(given: Case, mesh: sw.DeviceMesh, placements: Any, way: str | None, mask: Any = None) -> list[Any]:
    """The same with the sequence sharded, in this way or the cheapest; masks are replicated unless `mask` is given."""
    laid = [sw.distribute_tensor(x, mesh, placements) for x in given.tensors]
    placed = None if given.mask is None else sw.distribute_tensor(given.mask, mesh, mask or [R] * mesh.ndim)
    with contextlib.nullcontext() if way is None else sw.attention(prefer=way):
        return attend(given, laid[:3], placed, laid[3])


def assert_close(got: list[Any], wanted: list[torch.Tensor]) -> None:
    """Within 1e-12 (float64) or 1e-6 (float32) of the norm."""
    for mine, plain in zip(got, wanted, strict=True):
        whole, plain = mine.full_tensor().detach(), plain.detach()
        assert whole.shape == plain.shape
        assert not whole.isnan().any()
        error = float((whole - plain).norm() / plain.norm().clamp(min=1e-3))
        assert error < (1e-12 if plain.dtype is torch.float64 else 1e-6), error


def counted(function: Any) -> tuple[Any, int, int]:
    """What a function returns, the collectives it issued, and the bytes that a rank received."""
    with CommDebugMode() as comm:
        result = function()
    return result, comm.get_total_counts(), comm.received_bytes
