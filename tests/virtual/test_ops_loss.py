"""Losses against one device: every reduction on uneven shards, classes that are sharded, and how little they move."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.events import route_started
from tests.virtual.free import S0, S1, P, R, collectives, tensor
from tests.virtual.parity import assert_parity, distribute, whole

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::shardwise.ReplicationWarning", "ignore:reduction. 'mean' divides the total loss"
    ),
    pytest.mark.usefixtures("always_decomposing"),
]

t = tensor
REDUCTIONS = ("none", "mean", "sum")
X, Y = t(7, 5), t(7, 5).flip(0)
PROBABILITIES, WEIGHT = X.sigmoid(), t(5).abs()
SIGNS = t(7, 5).sign()
TARGETS = torch.arange(7) * 3 % 5
IGNORING = TARGETS.index_fill(0, torch.tensor([1, 6]), -100)
IMAGE, IMAGE_TARGETS = t(3, 5, 2, 4), torch.arange(24).reshape(3, 2, 4) * 3 % 5
LABELS = (torch.arange(35).reshape(7, 5) * 2 % 6) - 1

LOSSES: dict[str, tuple[Any, ...]] = {
    "mse": (F.mse_loss, X, Y),
    "smooth l1": (lambda x, y, **r: F.smooth_l1_loss(x, y, beta=0.5, **r), X, Y),
    "huber": (lambda x, y, **r: F.huber_loss(x, y, delta=0.7, **r), X, Y),
    "l1": (F.l1_loss, X, Y),
    "binary cross entropy": (
        lambda x, y, w, **r: F.binary_cross_entropy(x, y.detach(), w.detach(), **r), PROBABILITIES, Y.sigmoid(), WEIGHT,
    ),
    "binary cross entropy of logits": (
        lambda x, y, w, **r: F.binary_cross_entropy_with_logits(x, y, pos_weight=w.detach(), **r),
        X, PROBABILITIES, WEIGHT,
    ),
    "kl": (F.kl_div, X, PROBABILITIES),
    "soft margin": (lambda x, y, **r: F.soft_margin_loss(x, y.detach(), **r), X, SIGNS),
    "hinge": (lambda x, y, **r: F.hinge_embedding_loss(x, y.detach(), **r), X, SIGNS),
    "cosine": (lambda x, y, s, **r: F.cosine_embedding_loss(x, y, s.detach(), **r), X, Y, SIGNS[:, 0].clone()),
    "ranking": (lambda x, y, s, **r: F.margin_ranking_loss(x, y, s.detach(), **r), X, Y, SIGNS),
    "triplet": (F.triplet_margin_loss, X, Y, PROBABILITIES),
    "poisson": (F.poisson_nll_loss, X, PROBABILITIES),
    "multi margin": (lambda x, y, w, **r: F.multi_margin_loss(x, y, weight=w.detach(), **r), X, TARGETS, WEIGHT),
    "multilabel margin": (F.multilabel_margin_loss, X, LABELS),
    "multilabel soft margin": (F.multilabel_soft_margin_loss, X, PROBABILITIES),
    "nll": (lambda x, y, w, **r: F.nll_loss(x, y, w.detach(), **r), X, IGNORING, WEIGHT),
    "cross entropy": (F.cross_entropy, X, TARGETS),
    "cross entropy even": (F.cross_entropy, t(8, 4), torch.arange(8) % 4),
    "cross entropy weighted": (lambda x, y, w, **r: F.cross_entropy(x, y, w.detach(), **r), X, IGNORING, WEIGHT),
    "cross entropy smoothed": (lambda x, y, **r: F.cross_entropy(x, y, label_smoothing=0.2, **r), X, IGNORING),
    "cross entropy of probabilities": (F.cross_entropy, X, PROBABILITIES),
    "cross entropy of an image": (
        lambda x, y, w, **r: F.cross_entropy(x, y, w.detach(), ignore_index=2, **r), IMAGE, IMAGE_TARGETS, WEIGHT,
    ),
    "cross entropy of one": (F.cross_entropy, X[0].clone(), TARGETS[0].clone()),
    "cross entropy of nothing": (F.cross_entropy, X, torch.full((7,), -100)),
}  # fmt: skip


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_same_as_one_device(name: str, reduction: str) -> None:
    fn, *args = LOSSES[name]
    assert_parity(lambda *tensors: fn(*tensors, reduction=reduction), *args, meshes=((4,), (2, 3)), limit=3)


def test_a_mean_of_halves_does_not_overflow() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x, y = (t(9000) * 4).half(), torch.zeros(9000).half()
    got = F.mse_loss(distribute(x, mesh, [S0]), distribute(y, mesh, [S0]))
    torch.testing.assert_close(whole(got), F.mse_loss(x, y), rtol=1e-2, atol=0)
    scores, targets = (t(9000, 4) * 9).half(), torch.arange(9000) % 4
    loss = F.nll_loss(distribute(scores.abs(), mesh, [S1]), distribute(targets, mesh, [R]))
    torch.testing.assert_close(whole(loss), F.nll_loss(scores.abs(), targets), rtol=1e-2, atol=0)


@pytest.mark.parametrize("placement", [S0, S1, R])
def test_a_target_that_is_no_class_is_an_error(placement: Any) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    targets = distribute(torch.tensor([0, 1, 2, 3, 4, 0, 5]), mesh, [R])
    with pytest.raises(RuntimeError, match="none of the 5 classes"):
        F.cross_entropy(distribute(X, mesh, [placement]), targets)


# ---------------------------------------------------------------- communication

FREE: dict[str, tuple[Any, ...]] = {
    "mse uneven": (F.mse_loss, (X, Y), (S0, S0), P),
    "mse of columns": (F.mse_loss, (X, Y), (S1, S1), P),
    "mse none": (lambda x, y: F.mse_loss(x, y, reduction="none"), (X, Y), (S0, S0), S0),
    "huber": (F.huber_loss, (X, Y), (S0, S0), P),
    "logits": (F.binary_cross_entropy_with_logits, (X, PROBABILITIES), (S0, S0), P),
    "kl": (F.kl_div, (X, PROBABILITIES), (S1, S1), P),
    "cross entropy of samples": (lambda x, y: F.cross_entropy(x, y, reduction="sum"), (X, TARGETS), (S0, S0), P),
    "cross entropy of each sample": (lambda x, y: F.cross_entropy(x, y, reduction="none"), (X, TARGETS), (S0, S0), S0),
    "likelihood of sharded classes": (lambda x, y: F.nll_loss(x, y, reduction="sum"), (X, TARGETS), (S1, R), P),
    "likelihood of each": (lambda x, y: F.nll_loss(x, y, reduction="none"), (X, TARGETS), (S1, R), P),
}


@pytest.mark.parametrize("name", FREE)
def test_without_communication(name: str) -> None:
    fn, args, placements, result = FREE[name]
    assert collectives(fn, args, placements) == ((result,), 0)


def test_cross_entropy_of_sharded_samples_reduces_one_number() -> None:
    assert collectives(F.cross_entropy, (X, IGNORING), (S0, S0)) == ((P,), 1)


def test_cross_entropy_of_sharded_classes_gathers_no_score() -> None:
    """The maximum and the sum of each row; one sum of each row in the gradient."""
    mesh = sw.init_device_mesh("cpu", (4,))
    scores, targets = t(6, 1000), torch.arange(6) * 150
    x, y = distribute(scores, mesh, [S1]).requires_grad_(), distribute(targets, mesh, [R])
    seen: list[Any] = []
    route_started.append(seen.append)
    try:
        (grad,) = torch.autograd.grad(F.cross_entropy(x, y), [x])
    finally:
        route_started.remove(seen.append)
    assert sum(route.collectives for route in seen) == 3
    assert sum(route.received for route in seen) < 10 * 6 * 8
    assert grad.placements == (S1,)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sequences_flattened_with_their_samples(reduction: str) -> None:
    """[B, T, C] sharded on T and viewed as [B*T, C]: each rank has a piece of each sample, and stays with it."""
    mesh = sw.init_device_mesh("cpu", (2,))
    scores, targets = t(3, 4, 5), torch.arange(12).reshape(3, 4) % 5

    def loss(x: Any, y: Any) -> Any:
        return F.cross_entropy(x.view(12, 5), y.view(12), reduction=reduction)

    placements, count = collectives(loss, (scores, targets), (S1, S1), (2,))
    assert count == (1 if reduction == "mean" else 0)
    assert mesh.ndim == len(placements)


def test_gradient_of_squares_of_a_sum_is_a_sum() -> None:
    """It is linear in the difference."""
    x, y, grad = t(4, 6), t(4, 6), torch.ones((), dtype=torch.float64)
    op = torch.ops.aten.mse_loss_backward.default
    assert collectives(lambda g, a, b: op(g, a, b, 1), (grad, x, y), (R, P, R), backward=False) == ((P,), 0)


# ---------------------------------------------------------------- connectionist temporal classification


@pytest.mark.parametrize("samples", [8, 7, 3])
def test_ctc_loss_of_a_batch_in_shards(samples: int) -> None:
    """Targets of each rank have a longest one of its own; on four ranks, three samples leave one without any."""
    line = sw.init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    scores = torch.randn(9, samples, 5).log_softmax(-1).requires_grad_()
    targets = torch.randint(1, 5, (samples, 4))
    lengths = [9 - i % 3 for i in range(samples)], [1 + (i * 7) % 4 for i in range(samples)]
    for reduction in ("mean", "none"):
        wanted = torch.nn.functional.ctc_loss(scores, targets, *lengths, reduction=reduction)
        gradient = torch.randn_like(wanted)
        (theirs,) = torch.autograd.grad(wanted, scores, gradient)
        for given in (sw.Shard(1), sw.Replicate()):
            spread: Any = sw.distribute_tensor(scores.detach(), line, [given]).requires_grad_()
            found: Any = torch.nn.functional.ctc_loss(spread, targets, *lengths, reduction=reduction)
            torch.testing.assert_close(found.full_tensor(), wanted)
            back = sw.distribute_tensor(gradient, line, [sw.Shard(0) if gradient.dim() else sw.Replicate()])
            (ours,) = torch.autograd.grad(found, spread, back)
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-5)
            if samples == 8:
                assert ours.placements == (given,) or given.is_replicate()


def test_ctc_loss_moves_nothing_of_a_batch_in_shards() -> None:
    line = sw.init_device_mesh("cpu", (4,))
    scores: Any = sw.distribute_tensor(torch.randn(9, 8, 5).log_softmax(-1), line, [sw.Shard(1)]).requires_grad_()
    targets = sw.distribute_tensor(torch.randint(1, 5, (8, 4)), line, [sw.Shard(0)])
    with CommDebugMode() as comm:
        torch.nn.functional.ctc_loss(scores, targets, [9] * 8, [4] * 8).backward()
    assert comm.get_total_counts() == 0
    assert scores.grad.placements == (sw.Shard(1),)
