"""Every kernel of scaled_dot_product_attention on a virtual mesh of one GPU, against the kernel on global tensors."""

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
    """The result and the gradients of the first three arguments, for a gradient in the layout of the result."""
    with sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(*args, **options)
    given = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=out.dtype).reshape(out.shape)
    if isinstance(out, sw.DTensor):
        given = sw.distribute_tensor(given, out.device_mesh, out.placements)
    sources = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    return (out, *torch.autograd.grad(out, sources, given))


def check(kernel: Any, plain: list[torch.Tensor], placements: list[Any], grad: int = 3, **options: Any) -> int:
    """Compare with global tensors; give the number of collectives."""
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


def test_masked_sequences() -> None:
    """Every way with the kernel that takes masks: lengths that it rounds up, masks that begin at any column."""
    for length, way in itertools.product((64, 46, 200), ("ring", "gather", "heads")):
        hidden = torch.rand(length, length, device="cuda") < 0.4
        hidden.fill_diagonal_(False)
        mask = torch.zeros(length, length, device="cuda", dtype=torch.bfloat16).masked_fill(hidden, -torch.inf)
        plain = [*tensors(*[(3, 4, length, 64)] * 3), mask]
        with sw.attention(prefer=way):
            moved = check(SDPBackend.EFFICIENT_ATTENTION, plain, [S2, S2, S2, R])
        assert moved == {"ring": 3 + 6, "gather": 2 + 4, "heads": 4 + 8}[way]


def test_masked_sequences_in_float32() -> None:
    """Statistics are merged in float32: as close to float64 as one kernel on global tensors."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 4, 150, 64, device="cuda", generator=generator) for _ in range(3))
    hidden = (torch.rand(150, 150, device="cuda", generator=generator) < 0.4).fill_diagonal_(False)
    mask = torch.zeros(150, 150, device="cuda").masked_fill(hidden, -torch.inf)
    exact = attend(SDPBackend.MATH, [x.double().requires_grad_() for x in (q, k, v)], attn_mask=mask.double())
    alone = attend(SDPBackend.EFFICIENT_ATTENTION, [x.clone().requires_grad_() for x in (q, k, v)], attn_mask=mask)
    mesh = sw.init_device_mesh("cuda", (4,))
    laid = [sw.distribute_tensor(x, mesh, [S2]).requires_grad_() for x in (q, k, v)]
    with sw.attention(prefer="ring"):
        ring = attend(SDPBackend.EFFICIENT_ATTENTION, laid, attn_mask=mask)
    for a, b, c in zip(ring, alone, exact, strict=True):
        assert (a.full_tensor() - c).abs().max() <= 4 * (b - c).abs().max() + 1e-6


def test_masks_that_hide_whole_blocks() -> None:
    """Rows of a block that a mask hides do not count, and rows that see nothing are zero with zero gradients."""
    plain = tensors(*[(1, 2, 64, 64)] * 3)
    near = torch.ones(64, 64, dtype=torch.bool, device="cuda").tril().triu(-5)
    check(SDPBackend.EFFICIENT_ATTENTION, [*plain, near], [S2, S2, S2, R])
    near[3:6] = False
    mesh = sw.init_device_mesh("cuda", (4,))
    laid = [sw.distribute_tensor(x, mesh, [S2]).requires_grad_() for x in plain]
    with sw.attention(prefer="ring"):
        out, *grads = attend(SDPBackend.EFFICIENT_ATTENTION, laid, attn_mask=near)
    assert (out.full_tensor()[:, :, 3:6] == 0).all()
    assert (grads[0].full_tensor()[:, :, 3:6] == 0).all()
    assert all(bool(grad.full_tensor().isfinite().all()) for grad in grads)


def test_flex_sequences() -> None:
    """Score functions and masks of `flex_attention`, block by block on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    plain = [x.float() for x in tensors(*[(2, 4, 200, 64)] * 3)]
    mesh = sw.init_device_mesh("cuda", (4,))

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < 20)

    def capped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 5 * (score / 5).tanh()

    blocks = create_block_mask(near, None, None, 200, 200, device="cuda")

    def run(args: list[Any]) -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in args]
        out: Any = flex_attention(*leaves, score_mod=capped, block_mask=blocks)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    wanted = run(plain)
    for way in ("ring", "halo", "gather"):
        with sw.attention(prefer=way):
            got = run([sw.distribute_tensor(x, mesh, [S2]) for x in plain])
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.full_tensor(), b, atol=2e-3, rtol=2e-3)


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
