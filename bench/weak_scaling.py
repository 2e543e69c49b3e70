"""Weak scaling: programs whose data on each rank is constant, forward and backward, on 8 to 4,096 ranks.

Prints for each program the peak memory and the bytes received of a rank, in units of the data of a rank, and the
collectives. On more ranks these must not grow. Dry runs: nothing is computed.

    python -m bench weak_scaling [program ...]
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import shardwise as sw
from bench.figures import point

RANKS = (8, 64, 512, 4096)
ROWS, WIDTH = 64, 256  # of the data on each rank
UNIT = ROWS * WIDTH * 4  # bytes of the data on each rank
PLOTTED = ("mean_squared_error", "differences_of_rows", "beside_rows", "covariance", "convolution", "recurrent")

Program = Callable[["World"], Any]
PROGRAMS: dict[str, Program] = {}


class World:
    """A dry mesh and the tensors of a program on it."""

    def __init__(self, ranks: int) -> None:
        self.mesh, self.ranks = sw.init_device_mesh("cpu", (ranks,)), ranks

    def data(self, *inner: int, rows: int = ROWS, dtype: torch.dtype = torch.float32, grad: bool = True) -> Any:
        """A tensor of which each rank has `rows` rows, of the size `inner`."""
        shape = (rows * self.ranks, *(inner or (WIDTH,)))
        layout: dict[str, Any] = {"device_mesh": self.mesh, "placements": [sw.Shard(0)]}
        return sw.zeros(shape, dtype=dtype, requires_grad=grad and dtype.is_floating_point, **layout)

    def labels(self, *inner: int) -> Any:
        """Integers, of which each rank has as many rows as of data."""
        return sw.zeros(ROWS * self.ranks, *inner, dtype=torch.int64, device_mesh=self.mesh, placements=[sw.Shard(0)])

    def weight(self, *shape: int) -> Any:
        """A parameter that every rank has."""
        return sw.zeros(shape, device_mesh=self.mesh, placements=[sw.Replicate()], requires_grad=True)


class Cost(NamedTuple):
    """What a program costs a rank: units of its data at the peak, units received, collectives."""

    peak: float
    received: float
    collectives: int


def cost(program: Program, ranks: int) -> Cost:
    """Run a program dry, and its backward."""
    with sw.dry_run() as run, warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.ReplicationWarning)
        loss = program(World(ranks))
        if loss is not None:
            loss.backward()
        return Cost(run.peak_bytes / UNIT, run.bytes / UNIT, sum(run.collectives.values()))


def grows(few: Cost, many: Cost, few_ranks: int) -> bool:
    """Whether a program costs more than a tenth more on many ranks; the (n-1)/n of a reduction aside."""
    share = few_ranks / (few_ranks - 1)
    return many.peak > 1.1 * few.peak or many.received > 1.1 * share * few.received


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def each(**formulas: Callable[..., Any]) -> None:
    """Programs that are a formula of two tensors of data."""
    for name, formula in formulas.items():
        PROGRAMS[name] = lambda world, formula=formula: formula(world.data(), world.data())


# ---------------------------------------------------------------- losses

each(
    mean=lambda x, y: x.mean(),
    sum=lambda x, y: x.sum(),
    mean_squared_error=lambda x, y: ((x - y) ** 2).mean(),
    l1_loss=lambda x, y: F.l1_loss(x, y),
    huber=lambda x, y: F.huber_loss(x, y),
    smooth_l1=lambda x, y: F.smooth_l1_loss(x, y),
    binary_cross_entropy=lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach()),
    log_cosh=lambda x, y: (x - y).cosh().log().mean(),
    kl_divergence=lambda x, y: F.kl_div(x.log_softmax(1), y.log_softmax(1), reduction="batchmean", log_target=True),
    cosine=lambda x, y: (1 - F.cosine_similarity(x, y)).mean(),
    hinge=lambda x, y: F.relu(1 - x * y).mean(),
    poisson=lambda x, y: F.poisson_nll_loss(x, y.detach()),
    gaussian=lambda x, y: (0.5 * (y + (x - 1) ** 2 / y.exp())).mean(),
    dice=lambda x, y: 1 - 2 * (x.sigmoid() * y).sum() / (x.sigmoid().sum() + y.sum()),
    focal=lambda x, y: ((1 - x.sigmoid()) ** 2 * F.softplus(-x)).mean(),
    margin_of_rows=lambda x, y: F.relu((x - y).norm(dim=1) - 1).mean(),
    masked=lambda x, y: x.masked_fill(y > 0, 0.0).sum() / (y <= 0).sum(),
    chosen=lambda x, y: torch.where(x > y, x, y).mean(),
    entropy=lambda x, y: -(x.softmax(1) * x.log_softmax(1)).sum(1).mean(),
)


@program
def cross_entropy(w: World) -> Any:
    return F.cross_entropy(w.data(), w.labels(), label_smoothing=0.1)


@program
def weighted_cross_entropy(w: World) -> Any:
    return F.cross_entropy(w.data(), w.labels(), weight=w.weight(WIDTH).detach(), ignore_index=3)


@program
def written_columns(w: World) -> Any:
    x = w.data() * 1
    x[:, 3] = 0
    x[:, :4] *= 2
    return x.mean()


@program
def written_rows(w: World) -> Any:
    x = w.data() * 1
    x[0] = 1
    x[3:7] *= 2
    return x.mean()


@program
def written_by_mask(w: World) -> Any:
    x = w.data() * 1
    x[x > 0] = 1
    return x.mean()


@program
def one_part(w: World) -> Any:
    return w.data().chunk(2, 1)[0].mean() + w.data().tanh().unbind(1)[2].square().mean()


# ---------------------------------------------------------------- statistics

each(
    variance=lambda x, y: x.var(),
    deviation_of_columns=lambda x, y: x.std(0).sum(),
    deviation_of_rows=lambda x, y: x.std(1).mean(),
    centred=lambda x, y: (x - x.mean()).square().sum(),
    centred_columns=lambda x, y: (x - x.mean(0)).square().sum(),
    centred_rows=lambda x, y: (x - x.mean(1, keepdim=True)).square().mean(),
    standardized=lambda x, y: ((x - x.mean(0)) / (x.std(0) + 1e-5)).abs().mean(),
    min_max_scaled=lambda x, y: ((x - x.amin(0)) / (x.amax(0) - x.amin(0) + 1)).mean(),
    skewness=lambda x, y: (((x - x.mean()) / x.std()) ** 3).mean(),
    kurtosis=lambda x, y: (((x - x.mean(0)) / x.std(0)) ** 4).mean(0).sum(),
    covariance=lambda x, y: ((x - x.mean(0)).T @ (y - y.mean(0)) / x.shape[0]).square().sum(),
    correlation=lambda x, y: ((x - x.mean()) * (y - y.mean())).mean() / (x.std() * y.std()),
    weighted_mean=lambda x, y: (x * y.exp()).sum(0).div(y.exp().sum(0)).sum(),
    log_sum_exp=lambda x, y: x.logsumexp(0).sum() + x.logsumexp(1).mean(),
    softmax_of_columns=lambda x, y: (x.softmax(0) * y).sum(),
    norms=lambda x, y: x.norm() + x.norm(dim=0).sum() + x.norm(dim=1).mean(),
    extremes=lambda x, y: x.amax() + x.amin(0).sum() + x.max(1).values.mean(),
    largest_of_rows=lambda x, y: x.topk(4, 1).values.mean(),
    sorted_rows=lambda x, y: x.sort(1).values[:, WIDTH // 2].mean(),
    median_of_rows=lambda x, y: x.median(1).values.mean(),
    running_sum_of_rows=lambda x, y: x.cumsum(1).mean(),
    running_sum_of_columns=lambda x, y: x.cumsum(0).mean(),
    moving_average=lambda x, y: F.avg_pool1d(x[None], 5, 1)[0].square().mean(),
    power_iteration=lambda x, y: (x.T @ (x @ y.mean(0))).norm(),
    energy_distance=lambda x, y: (x.mean(0) - y.mean(0)).square().sum() + (x.var(0) - y.var(0)).square().sum(),
    both_moments=lambda x, y: x.mean() ** 2 + x.square().mean() + torch.stack([x, y]).mean(),
)


@program
def nearest_centres(w: World) -> Any:
    """A step of k-means."""
    x, centres = w.data(), w.weight(8, WIDTH)
    return torch.cdist(x, centres).min(1).values.mean()


@program
def mixture_of_gaussians(w: World) -> Any:
    x, centres, logits = w.data(), w.weight(8, WIDTH), w.weight(8)
    squares = (x[:, None, :] - centres).square().sum(-1)
    return -(logits.log_softmax(0) - 0.5 * squares).logsumexp(1).mean()


@program
def normal_equations(w: World) -> Any:
    x, y = w.data(), w.data(1)
    solved = torch.linalg.solve(x.T @ x + w.weight(WIDTH, WIDTH), x.T @ y)
    return (x @ solved - y).square().mean()


@program
def histogram(w: World) -> Any:
    x, edges = w.data(), w.weight(16)
    soft = torch.sigmoid((x[..., None] - edges) * 10).mean((0, 1))
    return (soft - soft.detach().mean()).square().sum()


@program
def accuracy(w: World) -> Any:
    with torch.no_grad():
        (w.data().argmax(1) == w.labels()).float().mean()


# ---------------------------------------------------------------- training


@program
def linear_regression(w: World) -> Any:
    return (w.data() @ w.weight(WIDTH, 1) + w.weight(1) - w.data(1)).square().mean()


@program
def logistic_regression(w: World) -> Any:
    return F.binary_cross_entropy_with_logits(F.linear(w.data(), w.weight(1, WIDTH), w.weight(1)), w.data(1).detach())


@program
def perceptron(w: World) -> Any:
    hidden = F.gelu(F.linear(w.data(), w.weight(2 * WIDTH, WIDTH), w.weight(2 * WIDTH)))
    return F.cross_entropy(F.linear(hidden, w.weight(10, 2 * WIDTH), w.weight(10)), w.labels())


@program
def gated(w: World) -> Any:
    x = w.data()
    return (F.silu(x @ w.weight(WIDTH, WIDTH)) * (x @ w.weight(WIDTH, WIDTH)) @ w.weight(WIDTH, WIDTH)).square().mean()


@program
def layer_norm(w: World) -> Any:
    return F.layer_norm(w.data(), (WIDTH,), w.weight(WIDTH), w.weight(WIDTH)).square().mean()


@program
def rms_norm(w: World) -> Any:
    x = w.data()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w.weight(WIDTH)).abs().mean()


@program
def batch_norm(w: World) -> Any:
    return F.batch_norm(w.data(), None, None, w.weight(WIDTH), w.weight(WIDTH), training=True).square().mean()


@program
def group_norm(w: World) -> Any:
    return F.group_norm(w.data(8, 8), 4, w.weight(8), w.weight(8)).square().mean()


@program
def embedding(w: World) -> Any:
    return F.embedding(w.labels(4), w.weight(32, WIDTH)).mean()


@program
def sharded_table(w: World) -> Any:
    ids = sw.zeros(4, 8, dtype=torch.int64, device_mesh=w.mesh, placements=[sw.Replicate()])
    return F.embedding(ids, w.data()).square().mean()


@program
def language_model(w: World) -> Any:
    x = F.embedding(w.labels(4), w.weight(32, WIDTH)) + w.weight(4, WIDTH)
    x = F.layer_norm(x, (WIDTH,))
    return F.cross_entropy(F.linear(x, w.weight(32, WIDTH)).flatten(0, 1), w.labels(4).flatten())


@program
def attention(w: World) -> Any:
    q, k, v = (w.data(2, 4, 8) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


@program
def attention_module(w: World) -> Any:
    x = w.data(6, 32)
    module = sw.distribute_module(torch.nn.MultiheadAttention(32, 4, batch_first=True), w.mesh)
    return module(x, x, x, need_weights=False)[0].mean()


@program
def encoder_layer(w: World) -> Any:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return sw.distribute_module(layer, w.mesh)(w.data(6, 32)).square().mean()


@program
def bags(w: World) -> Any:
    return F.embedding_bag(w.labels(4), w.weight(32, WIDTH)).mean()


@program
def decorrelated(w: World) -> Any:
    """Two standardized views of the data, whose features are to be equal and uncorrelated."""
    x, y = ((x - x.mean(0)) / (x.std(0) + 1) for x in (w.data(), w.data()))
    return ((x.T @ y) / x.shape[0] - torch.eye(WIDTH)).square().sum()


@program
def clipped_policy(w: World) -> Any:
    gain = w.data().detach()
    gain = (gain - gain.mean()) / (gain.std() + 1)
    ratio = (w.data() - w.data().detach()).exp()
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


@program
def attention_by_hand(w: World) -> Any:
    x = w.data(4, 16)
    scores = (x @ w.weight(16, 16)) @ x.transpose(1, 2) / 4
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask = sw.distribute_tensor(mask, w.mesh, [sw.Replicate()], src_data_rank=None)
    return (scores.masked_fill(~mask, -math.inf).softmax(-1) @ x).mean()


@program
def convolution(w: World) -> Any:
    x = F.relu(F.conv2d(w.data(1, 8, 8), w.weight(4, 1, 3, 3), w.weight(4), padding=1))
    return F.max_pool2d(x, 2).mean((2, 3)).square().sum(1).mean()


@program
def patches(w: World) -> Any:
    x = w.data(1, 8, 8).unfold(2, 4, 4).unfold(3, 4, 4).reshape(-1, 4, 16) @ w.weight(16, WIDTH)
    return (x + w.weight(4, WIDTH)).mean(1).square().mean()


@program
def recurrent(w: World) -> Any:
    x, state, weight = w.data(4, 16), w.data(16), w.weight(16, 16)
    for t in range(4):
        state = torch.tanh(x[:, t] @ weight + state)
    return state.square().mean()


@program
def autoencoder(w: World) -> Any:
    x = w.data()
    code = torch.tanh(x @ w.weight(WIDTH, 8))
    noise = torch.randn_like(code)
    kl = (code.square() + code.exp() - 1).sum(1).mean()
    return F.mse_loss((code + noise) @ w.weight(8, WIDTH), x) + 0.1 * kl


@program
def diffusion(w: World) -> Any:
    x = w.data(1, 8, 8)
    noise, level = torch.randn_like(x), torch.rand_like(x[:, :1, :1, :1])
    seen = level.sqrt() * x + (1 - level).sqrt() * noise
    return F.mse_loss(F.conv2d(seen, w.weight(1, 1, 3, 3), padding=1), noise)


@program
def mixture_of_experts(w: World) -> Any:
    x, experts = w.data(), w.weight(4, WIDTH, WIDTH)
    gates = (x @ w.weight(WIDTH, 4)).softmax(1)
    balance = (gates.mean(0) * gates.mean(0)).sum()
    return (torch.einsum("bi,eij->bej", x, experts) * gates[..., None]).sum(1).square().mean() + balance


@program
def dropout(w: World) -> Any:
    return F.dropout(F.relu(w.data()), 0.5).mean()


@program
def penalized_gradient(w: World) -> Any:
    x, weight = w.data(), w.weight(WIDTH, WIDTH)
    (slope,) = torch.autograd.grad(torch.tanh(x @ weight).sum(1).mean(), [x], create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@program
def two_backwards(w: World) -> Any:
    x = w.data()
    x.mean().backward()
    x.square().sum().backward()
    (x - x.mean()).square().mean().backward()


@program
def clipped_adam(w: World) -> Any:
    x, weight = w.data(), w.weight(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW([x, weight], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        ((x @ weight).square().mean() + x.mean()).backward()
        torch.nn.utils.clip_grad_norm_([x, weight], 1.0)
        optimizer.step()


@program
def sharded_weights(w: World) -> Any:
    """Parameters and state sharded, as `fully_shard` has them, whose gathers are for one layer at a time."""
    module = torch.nn.Linear(WIDTH, 8)
    x = w.data()
    weight = sw.distribute_tensor(module.weight.detach(), w.mesh, [sw.Replicate()], src_data_rank=None)
    return F.linear(x, weight.requires_grad_()).square().mean()


# ---------------------------------------------------------------- shapes

each(
    beside_columns=lambda x, y: torch.cat([x, y], 1).mean(),
    beside_rows=lambda x, y: torch.cat([x, y]).mean(),
    flattened=lambda x, y: x.flatten().mean() + y.view(-1, 8, 8).sum(1).mean(),
    turned=lambda x, y: x.T.mean() + (y.T * x.T).sum(0).mean(),
    columns=lambda x, y: x[:, 1:].mean() + y[:, ::2].sum() + x[:, 3].mean(),
    chunks=lambda x, y: sum(part.mean() for part in x.chunk(4, 1)) + sum(part.sum() for part in y.unbind(1)[:2]),
    first_row=lambda x, y: x[0].mean(),
    some_rows=lambda x, y: x[4:12].mean(),
    all_but_the_first=lambda x, y: x[1:].square().mean(),
    differences_of_rows=lambda x, y: (x[1:] - x[:-1]).square().mean(),
    looked_up=lambda x, y: x.gather(1, (y > 0).long()).mean(),
    repeated=lambda x, y: x.repeat(1, 2).mean() + x.repeat_interleave(2, 1).mean(),
    padded=lambda x, y: F.pad(x, (1, 1)).mean(),
    triangles=lambda x, y: x.view(-1, 8, 8).tril().mean() + y.view(-1, 8, 8).diagonal(0, 1, 2).sum(),
    expanded=lambda x, y: (x[:, None, :].expand(-1, 4, -1) * 2).mean(),
    outer=lambda x, y: torch.einsum("bi,bj->bij", x[:, :8], y[:, :8]).mean(),
)


@program
def picked_rows(w: World) -> Any:
    x, y = w.data(), w.data()
    index = sw.zeros(8, dtype=torch.int64, device_mesh=w.mesh, placements=[sw.Replicate()])
    return x.index_select(0, index).mean() + (x * y)[index].square().sum() + y.gather(0, index[:, None]).mean()


# ---------------------------------------------------------------- science

each(
    heat=lambda x, y: (x + 0.1 * (x.roll(1, 1) - 2 * x + x.roll(-1, 1))).square().mean(),
    rolled_rows=lambda x, y: (x - x.roll(1, 0)).square().mean(),
    waves=lambda x, y: ((y - x) ** 2 - (x[:, 1:] - x[:, :-1]).square().mean()).sum(),
    spectrum=lambda x, y: torch.fft.rfft(x).abs().square().mean(),
    spectral_derivative=lambda x, y: torch.fft.irfft(torch.fft.rfft(x) * 2j).square().mean(),
    autocorrelation=lambda x, y: (x * x.roll(3, 1)).mean(1).square().mean(),
    pendulums=lambda x, y: (0.5 * y.square() + 1 - x.cos()).mean(),
    options=lambda x, y: torch.relu(100 * (x * 0.2 - 0.02).exp() - 100).mean().log(),
    rotations=lambda x, y: torch.linalg.cross(x.view(-1, 16, 4)[..., :3], y.view(-1, 16, 4)[..., :3]).square().mean(),
    determinants=lambda x, y: x.view(-1, 8, 8).det().mean(),
    factors=lambda x, y: torch.linalg.cholesky(x.view(-1, 8, 8).mT @ x.view(-1, 8, 8)).diagonal(0, 1, 2).sum(1).mean(),
    exponentials=lambda x, y: torch.matrix_exp(x.view(-1, 8, 8)).diagonal(0, 1, 2).sum(1).mean(),
    median_of_windows=lambda x, y: x.unfold(0, 3, 1).median(-1).values.mean(),
    local_means=lambda x, y: F.avg_pool2d(x[None, None], 3, 1, 1, count_include_pad=False).sub(x).square().mean(),
    tiled=lambda x, y: (x.repeat(2, 1) * y.repeat(2, 1)).mean(),
    slope=lambda x, y: torch.gradient(x, dim=0)[0].square().mean(),
    signals=lambda x, y: F.conv1d(x[:, None], y[:1, None, :5].detach().mean(0, keepdim=True)).square().mean(),
    interpolated=lambda x, y: F.interpolate(x[:, None], scale_factor=2, mode="linear").mean(),
)  # fmt: skip


@program
def heat(w: World) -> Any:
    """Steps of a solver by convolutions, over a plate whose height is sharded."""
    plate, kernel = w.data()[None, None], w.weight(1, 1, 3, 3)
    for _ in range(2):
        plate = plate + F.conv2d(plate, kernel, padding=1)
    return plate.square().mean()


@program
def encoder_of_space(w: World) -> Any:
    """Pooled and resized again, over an image whose height is sharded."""
    image = F.relu(F.conv2d(w.data()[None, None], w.weight(2, 1, 5, 5), w.weight(2), padding=2))
    small = F.max_pool2d(image, 3, 2, 1)
    large = F.interpolate(small, scale_factor=2, mode="bilinear")
    return F.conv_transpose2d(small, w.weight(2, 2, 4, 4), w.weight(2), stride=2, padding=1).sub(large).square().mean()


@program
def leapfrog(w: World) -> Any:
    position, speed = w.data(), w.data()
    for _ in range(3):
        speed = speed - 0.05 * position
        position = position + 0.1 * speed
    return (position.square() + speed.square()).mean()


@program
def runge_kutta(w: World) -> Any:
    state, matrix = w.data(), w.weight(WIDTH, WIDTH)
    slope = state @ matrix
    return (state + 0.1 * ((state + 0.05 * slope) @ matrix)).norm(dim=1).mean()


@program
def particles(w: World) -> Any:
    """Energy of the particles of each rank in the field of some that every rank knows."""
    distance = (w.data(3)[:, None, :] - w.weight(8, 3)).norm(dim=-1) + 1
    return (distance.pow(-12) - distance.pow(-6)).sum(1).mean()


@program
def neural_residual(w: World) -> Any:
    """The residual of a differential equation: a derivative in the loss."""
    t = w.data(1)
    u = torch.tanh(t @ w.weight(1, 8)) @ w.weight(8, 1)
    (du,) = torch.autograd.grad(u.sum(), [t], create_graph=True)
    return (du + u).square().mean()


@program
def kalman(w: World) -> Any:
    mean, seen, gain = w.data(8), w.data(8), w.weight(8, 8).sigmoid()
    for _ in range(2):
        mean = mean + (seen - mean) @ gain
    return (seen - mean).square().sum(1).mean()


@program
def monte_carlo(w: World) -> Any:
    points = torch.rand_like(w.data(2, grad=False))
    return (w.weight(1) * (points.square().sum(1) < 1).float().mean()).sum()


def table(names: Sequence[str], ranks: Sequence[int] = RANKS) -> int:
    """Print what programs cost on each number of ranks; gives how many of them grow."""
    head = "".join(f"{n:>24,}" for n in ranks)
    print(f"{'':24}{head}\n{'program':24}" + "   peak  received calls" * len(ranks))
    growing = 0
    for name in names:
        found = [cost(PROGRAMS[name], n) for n in ranks]
        more = grows(found[0], found[-1], ranks[0])
        growing += more
        if name in PLOTTED:
            for n, each_cost in zip(ranks, found, strict=True):
                point("weak_scaling", name.replace("_", " "), n, each_cost.peak)
        cells = "".join(f"{c.peak:7.2f}{c.received:10.3f}{c.collectives:7d}" for c in found)
        print(f"{name:24}{cells}{'  grows' if more else ''}", flush=True)
    print(f"{len(names)} programs, {growing} of them grow")
    return growing


def main() -> None:
    """All programs, or those named on the command line."""
    named = [word for word in sys.argv[1:] if word in PROGRAMS]
    table(named or list(PROGRAMS))


if __name__ == "__main__":
    main()
