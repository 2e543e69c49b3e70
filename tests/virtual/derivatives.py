"""First and second derivatives of every move and of the operators used most, by finite differences, in float64.

A case is a function of plain tensors: it lays them out, moves them or calls an operator, and gathers the result. On it
`gradcheck` (reverse and forward mode) and `gradgradcheck` of torch are run.

    python -m tests.virtual.derivatives --jobs 2
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import shardwise as sw
from shardwise import DTensor, MaskPartial, Partial, Placement, Replicate, Shard, StridedShard, Zigzag

MESHES = ((4,), (2, 2), (3,))
SHAPE = (3, 5)  # uneven on each mesh, and empty on some ranks of four
KINDS: tuple[Placement, ...] = (
    Shard(0),
    Shard(1),
    StridedShard(1, 2),
    Zigzag(0),
    Replicate(),
    Partial(),
    Partial("avg"),
)
REDUCED: tuple[Placement, ...] = (
    Partial("max"), Partial("min"), Partial("product"), Partial("norm2"), Partial("norm3"), MaskPartial(),
)  # fmt: skip


class Case(NamedTuple):
    """What is checked, on which mesh, and the seed of its values."""

    kind: str  # "move", "local" or "operator"
    mesh: tuple[int, ...]
    what: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(map(str, self.what))} on {self.mesh}"


# ---------------------------------------------------------------- the operators

# Of x and y, both (3, 5), w (5, 3), c (2, 4, 6, 6) and k (4, 4, 3, 3); p is positive, i an index, m a mask.
OPERATORS = (
    "x + y", "x - y", "x * y", "x / (y.abs() + 1)", "-x", "x + 2", "2 - x", "x * 3", "x / 2", "1 / p", "x ** 2",
    "x ** 3", "p ** 0.5", "p ** y", "x.abs()", "x.exp()", "p.log()", "p.log1p()", "p.log2()", "p.log10()",
    "x.expm1()", "p.sqrt()", "p.rsqrt()", "x.square()", "x.sin()", "x.cos()", "x.tan()", "x.tanh()", "x.sigmoid()",
    "x.sinh()", "x.cosh()", "x.atan()", "(x * 0.3).asin()", "(x * 0.3).acos()", "x.asinh()", "(x * 0.3).atanh()",
    "x.erf()", "x.erfc()", "x.reciprocal()", "x.relu()", "F.gelu(x)", "F.gelu(x, approximate='tanh')", "F.silu(x)",
    "F.softplus(x)", "F.elu(x)", "F.selu(x)", "F.leaky_relu(x)", "F.mish(x)", "F.hardtanh(x)", "F.logsigmoid(x)",
    "F.celu(x)", "F.softsign(x)", "F.tanhshrink(x)", "x.clamp(-0.5, 0.7)", "x.clamp_min(0.1)", "torch.maximum(x, y)",
    "torch.minimum(x, y)", "torch.where(m, x, y)", "x.masked_fill(m, 1.5)", "torch.lerp(x, y, 0.3)",
    "torch.lerp(x, y, p)", "torch.addcmul(x, y, y, value=0.5)", "torch.addcdiv(x, y, p, value=0.5)",
    "torch.hypot(x, y)", "torch.atan2(x, y)", "torch.add(x, y, alpha=0.5)", "torch.sub(x, y, alpha=0.5)",
    "torch.logaddexp(x, y)", "x.logit(0.1)", "torch.xlogy(x, p)", "torch.special.entr(p)", "x.sum()", "x.sum(0)",
    "x.sum(1, keepdim=True)", "x.mean()", "x.mean(0)", "x.mean((0, 1))", "x.amax(1)", "x.amin(0)", "x.max()",
    "x.min()", "x.max(1).values", "x.min(0).values", "x.var()", "x.var(1)", "x.var(0, correction=0)", "x.std(1)",
    "x.std()", "torch.var_mean(x, 1)[0]", "x.prod()", "x.prod(1)", "x.norm()", "x.norm(dim=1)",
    "torch.linalg.vector_norm(x, 3, 0)", "torch.linalg.vector_norm(x, 1)", "torch.linalg.matrix_norm(x)",
    "x.logsumexp(1)", "x.logsumexp(0)", "x.cumsum(0)", "x.cumsum(1)", "p.cumprod(1)", "x.logcumsumexp(1)",
    "x.nansum(1)", "x.median(1).values", "x.kthvalue(2, 1).values", "x.sort(1).values", "x.sort(0).values",
    "x.topk(2, 1).values", "x.softmax(1)", "x.softmax(0)", "x.log_softmax(1)", "x.log_softmax(0)", "F.softmin(x, 1)",
    "F.normalize(x, dim=1)", "F.layer_norm(x, (5,))", "F.layer_norm(x, (5,), y[0], y[1])", "F.rms_norm(x, (5,))",
    "F.rms_norm(x, (5,), y[0], 1e-5)", "F.group_norm(c, 2)", "F.batch_norm(x, None, None, training=True)",
    "F.instance_norm(c)", "F.glu(c, 1)", "x @ w", "torch.mm(x, w)", "x.matmul(w)", "F.linear(x, y)",
    "F.linear(x, y, w[0])", "torch.addmm(y[:, :3], x, w)", "torch.bmm(c[0], c[1])", "torch.baddbmm(c[0], c[0], c[1])",
    "x @ y[0]", "torch.mv(x, y[0])", "torch.dot(x[0], y[0])", "torch.outer(x[0], y[1])",
    "torch.einsum('ij,jk->ik', x, w)", "torch.einsum('ij,ij->i', x, y)", "torch.einsum('bij,bkj->bik', c[0], c[1])",
    "torch.kron(x, w)", "torch.tensordot(x, w, 1)", "torch.cdist(x, y)", "F.cosine_similarity(x, y)",
    "F.pairwise_distance(x, y)", "F.bilinear(x, y, c[0, :, :5, :5])", "F.scaled_dot_product_attention(c, c, c)",
    "F.scaled_dot_product_attention(c, c, c, is_causal=True)", "F.conv2d(c, k)",
    "F.conv2d(c, k, padding=1, stride=2)", "F.conv1d(c[:, :, 0], k[:, :, 0])", "F.conv_transpose2d(c, k)",
    "F.avg_pool2d(c, 2)", "F.max_pool2d(c, 2)", "F.adaptive_avg_pool2d(c, 2)", "F.avg_pool1d(c[0], 2)",
    "F.interpolate(c, scale_factor=2)", "F.interpolate(c, scale_factor=2, mode='bilinear')", "F.pixel_shuffle(c, 2)",
    "F.unfold(c, 3)", "F.pad(x, (1, 2))", "F.pad(c[0], (1, 1), mode='reflect')", "F.pad(c[0], (1, 1), mode='circular')",
    "F.mse_loss(x, y)", "F.mse_loss(x, y, reduction='sum')", "F.l1_loss(x, y)", "F.smooth_l1_loss(x, y)",
    "F.huber_loss(x, y)", "F.cross_entropy(x, t)", "F.cross_entropy(x, t, label_smoothing=0.1)",
    "F.cross_entropy(x, y.softmax(1))", "F.nll_loss(x.log_softmax(1), t)", "F.binary_cross_entropy(x.sigmoid(), q)",
    "F.binary_cross_entropy_with_logits(x, q)", "F.kl_div(x.log_softmax(1), q.softmax(1), reduction='batchmean')",
    "F.hinge_embedding_loss(x, s)", "F.soft_margin_loss(x, s)", "F.gaussian_nll_loss(x, y, p)",
    "F.poisson_nll_loss(x, p)", "F.margin_ranking_loss(x, y, s)", "F.triplet_margin_loss(x, y, p)",
    "F.cosine_embedding_loss(x, y, s[:, 0])", "x.t()", "x.transpose(0, 1)", "x.mT", "c.permute(2, 0, 3, 1)",
    "x.reshape(5, 3)", "x.view(-1)", "x.flatten()", "c.flatten(1)", "c.reshape(2, 2, 2, 6, 6)", "x.unsqueeze(0)",
    "x[:, None].squeeze(1)", "x.expand(2, 3, 5)", "x.repeat(2, 1)", "x.repeat_interleave(2, 1)", "x[1]", "x[:, 1]",
    "x[1:3]", "x[:, ::2]", "x[..., -1]", "x[i]", "x[:, i]", "x[i, i]", "x[m]", "x.select(1, 2)", "x.narrow(1, 1, 3)",
    "x.index_select(0, i)", "x.gather(1, g)", "x.scatter(1, g, y)", "x.scatter_add(1, g, y)",
    "x.index_add(0, i, y[:2])", "x.index_copy(0, i, y[:2])", "x.index_fill(0, i, 0.5)", "x.index_put((i,), y[:2])",
    "torch.take_along_dim(x, g, 1)", "x.masked_select(m)", "F.embedding(i, x)",
    "F.embedding_bag(i[None], x, mode='sum')", "torch.cat([x, y])", "torch.cat([x, y], 1)", "torch.stack([x, y])",
    "torch.stack([x, y], 2)", "x.chunk(2, 1)[0]", "x.split(2, 1)[1]", "x.unbind(0)[1]", "x.flip(0)", "x.flip(1)",
    "x.roll(1, 0)", "x.roll(2, 1)", "x.tril()", "x.triu(1)", "x.diagonal()", "x.diag()", "torch.diag_embed(x)",
    "x.diff(dim=1)", "x.unfold(1, 2, 1)", "x.movedim(0, 1)", "x.swapaxes(0, 1)", "x.clone()", "x.contiguous()",
    "x.to(torch.float64)", "torch.vstack([x, y])", "torch.hstack([x, y])", "torch.broadcast_to(x, (2, 3, 5))",
    "torch.linalg.inv(x @ x.T + 4 * e)", "torch.linalg.det(x @ x.T + 4 * e)",
    "torch.linalg.solve(x @ x.T + 4 * e, y)", "torch.linalg.cholesky(x @ x.T + 4 * e)",
    "torch.linalg.slogdet(x @ x.T + 4 * e)[1]", "torch.trace(x @ y.T)", "torch.linalg.matrix_power(x @ y.T, 2)",
    "torch.cross(c[0, 0, :3], c[0, 1, :3], dim=0)", "torch.renorm(x, 2, 0, 1.0)", "torch.logdet(x @ x.T + 4 * e)",
    "torch.trapezoid(x, dim=1)", "torch.cumulative_trapezoid(x, dim=1)", "x.nan_to_num()", "x.sgn() * x",
    "torch.fmax(x, y)", "torch.fmin(x, y)", "x.fmod(1.7)", "x.remainder(1.7)", "torch.sinc(x)",
    "torch.addmv(x[:, 0], y, w[:, 0])", "x.masked_scatter(m, y)", "x.rot90()", "x.aminmax(dim=1).max",
    "F.softshrink(x, 0.2)", "F.hardshrink(x, 0.2)", "F.threshold(x, 0.1, 0.2)", "F.relu6(x)", "F.hardswish(x)",
    "F.hardsigmoid(x)", "F.prelu(x, y[0])", "x.dist(y)", "torch.lgamma(p)", "torch.digamma(p + 1)",
    "torch.special.i0(x)", "(x * 0.3).erfinv()",
)  # fmt: skip


def operands() -> dict[str, torch.Tensor]:
    """The tensors that operators are called with; no two elements are equal, and none is near a kink."""
    draw = torch.Generator().manual_seed(0)

    def spread(*shape: int) -> torch.Tensor:
        count = int(torch.tensor(shape).prod())
        values = torch.linspace(-1.43, 1.57, count, dtype=torch.float64)
        return values[torch.randperm(count, generator=draw)].reshape(shape)

    return {
        "x": spread(3, 5), "y": spread(3, 5) + 0.011, "w": spread(5, 3), "p": spread(3, 5).abs() + 0.5,
        "c": spread(2, 4, 6, 6), "k": spread(4, 4, 3, 3), "i": torch.tensor([2, 0]), "t": torch.tensor([4, 0, 2]),
        "m": spread(3, 5) > 0, "g": torch.tensor([[0, 2, 1, 4, 3], [1, 0, 2, 3, 4], [4, 3, 2, 1, 0]]),
        "q": spread(3, 5).sigmoid(), "s": spread(3, 5).sign(), "e": torch.eye(3, dtype=torch.float64),
    }  # fmt: skip


DIFFERENTIATED = ("x", "y", "w", "p", "c", "k")
Function = Callable[..., torch.Tensor]


# ---------------------------------------------------------------- the cases


def layouts(mesh: tuple[int, ...], kinds: Sequence[Placement]) -> list[tuple[tuple[Placement, ...], Any]]:
    """All layouts of a matrix by these placements, with every order of axes."""
    device_mesh = sw.init_device_mesh("cpu", mesh)
    found: list[tuple[tuple[Placement, ...], Any]] = []
    for placements in itertools.product(kinds, repeat=len(mesh)):
        try:
            sw.DTensorSpec(device_mesh, placements, sw.TensorMeta(SHAPE))
        except sw.LayoutError:
            continue
        found.append((placements, None))
        if len(mesh) == 2 and all(isinstance(p, Shard) for p in placements) and len(set(placements)) == 1:
            found.append((placements, ((placements[0].dim, (1, 0)),)))  # pyright: ignore[reportAttributeAccessIssue]
    return found


def cases() -> Iterator[Case]:
    """Every case there is."""
    for mesh in MESHES:
        for before, after in itertools.product(layouts(mesh, KINDS), repeat=2):
            yield Case("move", mesh, (before, after))
        for placements, order in layouts(mesh, (*KINDS, *REDUCED)):
            if Replicate() not in placements:  # the ranks have different locals
                yield Case("local", mesh, (placements, order))
        for text, seed in itertools.product(OPERATORS, range(2)):
            yield Case("operator", mesh, (text, seed))


def function_of(case: Case) -> tuple[Function, list[torch.Tensor], Function | None]:
    """The function of a case, its arguments, and what plain torch has for it."""
    mesh = sw.init_device_mesh("cpu", case.mesh)
    if case.kind == "move":
        (before, order), (after, new_order) = case.what

        def move(x: torch.Tensor) -> torch.Tensor:
            laid_out = DTensor.from_local(x, mesh).redistribute(placements=before, shard_order=order)
            return laid_out.redistribute(placements=after, shard_order=new_order).full_tensor()

        return move, [operands()["x"]], None
    if case.kind == "local":
        return _through_locals(mesh, *case.what), [_parts(mesh)], None
    return _operator(mesh, *case.what)


def _parts(mesh: sw.DeviceMesh) -> torch.Tensor:
    """What each rank holds, one after the other along a new dim."""
    size = mesh.size()
    values = torch.linspace(0.31, 1.7, size * 15, dtype=torch.float64)
    return values[torch.randperm(size * 15, generator=torch.Generator().manual_seed(1))].reshape(size, *SHAPE)


def _through_locals(mesh: sw.DeviceMesh, placements: Sequence[Placement], order: Any) -> Function:
    """Each rank's own tensor as its local of a tensor in some layout, out of it and into it again, and gathered."""
    one_each = [Shard(0)] * mesh.ndim
    kept = all(p.linear or p.reduce_op in ("min", "max") for p in placements if isinstance(p, Partial))

    def through(parts: torch.Tensor) -> torch.Tensor:
        own = DTensor.from_local(parts, mesh).redistribute(placements=one_each).to_local()[0]
        made = DTensor.from_local(own.sin(), mesh, placements, shard_order=order)
        if kept:  # the local of a product or a norm has no derivative
            made = DTensor.from_local(made.to_local(), mesh, placements, shard_order=order)
        reduced = made.redistribute(placements=made.spec.reduced().placements, shard_order=order)
        return DTensor.from_local(reduced.to_local().cos(), mesh, reduced.placements, shard_order=order).full_tensor()

    return through


def _operator(mesh: sw.DeviceMesh, text: str, seed: int) -> tuple[Function, list[torch.Tensor], Function]:
    """An operator on operands in random layouts."""
    given, rng = operands(), random.Random(f"{text} {seed} {mesh.shape}")
    code = compile(text, text, "eval")
    used = [name for name in given if name in code.co_names]
    wanted = [name for name in used if name in DIFFERENTIATED]
    places = {
        name: [
            rng.choice(
                [Replicate(), Partial() if name in wanted else Replicate(), *map(Shard, range(given[name].dim()))]
            )
            for _ in mesh.shape
        ]
        for name in used
    }

    def plain(*args: torch.Tensor) -> torch.Tensor:
        return eval(code, {"torch": torch, "F": F}, given | dict(zip(wanted, args, strict=True)))

    def distributed(*args: torch.Tensor) -> torch.Tensor:
        whole = given | dict(zip(wanted, args, strict=True))
        laid_out = {name: DTensor.from_local(whole[name], mesh).redistribute(placements=places[name]) for name in used}
        return eval(code, {"torch": torch, "F": F}, laid_out).full_tensor()

    return distributed, [given[name] for name in wanted], plain


# ---------------------------------------------------------------- checking

ORDERS: dict[str, Callable[[Function, list[torch.Tensor]], bool]] = {
    "gradcheck": lambda f, args: gradcheck(f, args, fast_mode=True),
    "gradcheck, forward mode": lambda f, args: gradcheck(
        f, args, fast_mode=True, check_forward_ad=True, check_backward_ad=False
    ),
    "gradgradcheck": lambda f, args: gradgradcheck(f, args, fast_mode=True),
}
ONCE = ("product",)  # reductions whose second derivative is refused


def check(case: Case) -> str | None:
    """The error of the derivatives of a case; None if they are right, or torch itself has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function, values, plain = function_of(case)
            arguments = [value.detach().clone().requires_grad_() for value in values]
            function(*arguments)
        except sw.LayoutError:  # a layout that this shape cannot have
            return None
        for name, checked in ORDERS.items():
            once = name != "gradcheck" and case.kind == "local" and any(_is_once(p) for p in case.what[0])
            told = _outcome(checked, function, arguments)
            if once and name == "gradgradcheck":
                if told is None or "second derivatives through from_local" not in told:
                    return f"{name} of {case}: not refused, {told}"
            elif told is not None and (plain is None or _outcome(checked, plain, arguments) is None):
                return f"{name} of {case}: {told}"
    return None


def _is_once(placement: Placement) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op in ONCE


def _outcome(checked: Callable[..., bool], function: Function, arguments: list[torch.Tensor]) -> str | None:
    torch.manual_seed(0)
    try:
        checked(function, arguments)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


def _failures(some: Sequence[Case]) -> list[str]:
    torch.set_num_threads(1)
    return [told for told in map(check, some) if told is not None]


def _some(rng: random.Random, of: list[Case], count: int) -> list[Case]:
    return rng.sample(of, min(count, len(of)))


def sample(seed: int, count: int) -> list[Case]:
    """As many cases of each kind on each mesh, the same for a seed."""
    rng, every = random.Random(seed), list(cases())
    kinds = sorted({(case.kind, case.mesh) for case in every})
    return [case for kind in kinds for case in _some(rng, [c for c in every if (c.kind, c.mesh) == kind], count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="as many cases of each kind on each mesh; all by default")
    parser.add_argument("--kind", choices=("move", "local", "operator"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    every = list(cases()) if options.sample is None else sample(options.seed, options.sample)
    every = [case for case in every if options.kind in (None, case.kind)]
    random.Random(options.seed).shuffle(every)
    chunks = [every[i : i + 20] for i in range(0, len(every), 20)]
    found = 0
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for failures in pool.map(_failures, chunks):
            found += len(failures)
            for text in failures:
                print(text, flush=True)
    print(f"{len(every)} cases on meshes {', '.join(map(str, MESHES))}: {found} have wrong derivatives")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
