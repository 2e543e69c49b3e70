"""Every kernel of scaled_dot_product_attention on a virtual mesh of one GPU, against the kernel on whole tensors."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise as sw
from shardwise.events import route_started

S0, S1, S2, R = sw.Shard(0), sw.Shard(1), sw.Shard(2), sw.Replicate()
KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def attend(kernel: Any, args: list[Any], **options: Any) -> tuple[Any, ...]:
    """The result and the gradients of the first three arguments, for a gradient that lies as the result does."""
    with sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(*args, **options)
    given = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=out.dtype).reshape(out.shape)
    if isinstance(out, sw.DTensor):
        given = sw.distribute_tensor(given, out.device_mesh, out.placements)
    sources = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    return (out, *torch.autograd.grad(out, sources, given))


def check(kernel: Any, plain: list[torch.Tensor], placements: list[Any], grad: int = 3, **options: Any) -> int:
    """Compare with whole tensors; give the number of collectives."""
    mesh = sw.init_device_mesh("cuda", (4,))
    whole = [t.clone().requires_grad_(i < grad) for i, t in enumerate(plain)]
    wanted = attend(kernel, whole, **options)
    laid = [sw.distribute_tensor(t, mesh, [p]) for t, p in zip(plain, placements, strict=True)]
    laid = [t.requires_grad_(i < grad) for i, t in enumerate(laid)]
    moved: list[int] = []
    watch: Callable[[Any], None] = lambda route: moved.append(route.collectives)  # noqa: E731
    route_started.append(watch)
    try:
        got = attend(kernel, laid, **options)
    finally:
        route_started.remove(watch)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.full_tensor(), b, atol=2e-2, rtol=2e-2)
    return sum(moved)


def test_batch_and_heads_need_no_communication() -> None:
    plain = tensors((4, 8, 64, 64), (4, 8, 48, 64), (4, 8, 48, 64))
    for kernel, placement in itertools.product(KERNELS, (S0, S1)):
        assert check(kernel, plain, [placement] * 3) == 0, (kernel, placement)


def test_causal_heads_need_no_communication() -> None:
    plain = tensors(*[(4, 8, 64, 64)] * 3)
    for kernel, placement in itertools.product(KERNELS[:3], (S0, S1)):
        assert check(kernel, plain, [placement] * 3, is_causal=True) == 0, (kernel, placement)


def test_queries() -> None:
    plain = tensors((4, 8, 64, 64), (4, 8, 48, 64), (4, 8, 48, 64))
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        assert check(kernel, plain, [S2, R, R]) == 0, kernel
    check(SDPBackend.EFFICIENT_ATTENTION, plain, [S2, R, R])


def test_other_layouts_are_right() -> None:
    plain = tensors(*[(3, 6, 40, 64)] * 3)
    for kernel, placement in itertools.product(KERNELS, (S0, S1, S2, sw.Shard(3), sw.Partial())):
        for causal in (False, True):
            check(kernel, plain, [placement] * 3, is_causal=causal)


def test_sequences() -> None:
    """Every way to attend to a sharded sequence with the flash kernel, uneven lengths among them."""
    for length, way in itertools.product((64, 46), ("ring", "gather", "heads")):
        plain = tensors(*[(3, 4, length, 64)] * 3)
        for causal in (False, True):
            with sw.attention(prefer=way):
                moved = check(SDPBackend.FLASH_ATTENTION, plain, [S2] * 3, is_causal=causal)
            assert moved == {"ring": 3 + 6, "gather": 2 + 4, "heads": 4 + 8}[way]


def test_masks() -> None:
    """Masks of a size that kernels pad, with and without a gradient."""
    plain = tensors((4, 8, 64, 64), (4, 8, 45, 64), (4, 8, 45, 64), (4, 8, 64, 45))
    for placement in (S0, S1, R):
        assert check(SDPBackend.EFFICIENT_ATTENTION, plain, [placement] * 4) == 0
        assert check(SDPBackend.EFFICIENT_ATTENTION, plain, [placement] * 4, grad=4) == 0
    narrow = [*plain[:3], *tensors((1, 1, 64, 45))]
    check(SDPBackend.EFFICIENT_ATTENTION, narrow, [S1, S1, S1, R], grad=4)
    check(SDPBackend.EFFICIENT_ATTENTION, narrow, [S1, S1, S1, S2], grad=3)


def test_groups_of_heads() -> None:
    plain = tensors((4, 8, 64, 64), (4, 4, 48, 64), (4, 4, 48, 64))
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        assert check(kernel, plain, [S1] * 3, enable_gqa=True) == 0
    few = [plain[0], *(t[:, :2].contiguous() for t in plain[1:])]
    check(SDPBackend.FLASH_ATTENTION, few, [S1] * 3, enable_gqa=True)
