"""Programs on which torch.distributed.tensor fails or gives other numbers than one device. Each is right here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from tests.virtual.parity import assert_parity, bytes_moved

R, S0, S1, P = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()
GENERATOR = torch.Generator().manual_seed(0)


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=GENERATOR)


def positive(*size: int) -> torch.Tensor:
    return torch.rand(size, dtype=torch.float64, generator=GENERATOR) * 0.8 + 0.1


def signs(*size: int) -> torch.Tensor:
    return torch.where(normal(*size) > 0, 1.0, -1.0).double()


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "Partial plus a number": (lambda x: x + 1, (normal(8, 6),)),
    "a number minus Partial": (lambda x: 1.0 - x, (normal(5, 7),)),
    "max": (lambda x: (x.max(), x.max(0).values, x.max(1).indices), (normal(7, 6),)),
    "min": (lambda x: (x.min(), x.min(0).indices, x.min(1).values), (normal(7, 6),)),
    "argmax and argmin": (lambda x: (x.argmax(), x.argmax(0), x.argmin(1)), (normal(7, 6),)),
    "flatten of an uneven dim": (lambda x: x.flatten(), (normal(7, 3),)),
    "flatten of two uneven dims": (lambda x: x.flatten(0, 1), (normal(5, 7, 2),)),
    "linear on a sharded sequence": (F.linear, (normal(2, 8, 6), normal(5, 6), normal(5))),
    "linear on an uneven sequence": (F.linear, (normal(2, 7, 6), normal(5, 6), normal(5))),
    "linear of one vector": (F.linear, (normal(6), normal(5, 6), normal(5))),
    "write to a slice": (lambda x: _written(x * 1), (normal(8, 6),)),
    "quantile": (lambda x: (x.quantile(0.3), torch.quantile(x, 0.7)), (normal(9),)),
    "mse_loss": (F.mse_loss, (normal(7), normal(7))),
    "mse_loss of four": (F.mse_loss, (normal(4), normal(4))),
    "smooth_l1_loss": (F.smooth_l1_loss, (normal(7, 2), normal(7, 2))),
    "huber_loss": (F.huber_loss, (normal(7, 2), normal(7, 2))),
    "binary_cross_entropy": (F.binary_cross_entropy, (positive(7, 2), positive(7, 2))),
    "soft_margin_loss": (lambda x, y: F.soft_margin_loss(x, y.detach()), (normal(7), signs(7))),
    "cosine_embedding_loss": (F.cosine_embedding_loss, (normal(7, 4), normal(7, 4), signs(7))),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), (normal(4, 4, 9), normal(6, 4, 3), normal(6))),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (normal(4, 4, 5, 6), normal(6, 4, 3, 3), normal(6))),
    "conv3d": (F.conv3d, (normal(2, 2, 4, 4, 4), normal(3, 2, 2, 2, 2), normal(3))),
    "conv_transpose1d": (F.conv_transpose1d, (normal(4, 4, 5), normal(4, 6, 3), normal(6))),
    "conv_transpose2d": (F.conv_transpose2d, (normal(4, 4, 4, 5), normal(4, 6, 3, 3), normal(6))),
    "conv_transpose3d": (F.conv_transpose3d, (normal(2, 2, 3, 3, 3), normal(2, 3, 2, 2, 2), normal(3))),
    "inf norm": (lambda x: torch.linalg.vector_norm(x, float("inf")), (normal(7, 5),)),
    "inf norm of a dim": (lambda x: torch.linalg.vector_norm(x, float("inf"), 0), (normal(7, 5),)),
    "minus inf norm": (lambda x: torch.linalg.vector_norm(x, float("-inf"), 1), (normal(7, 5),)),
    "attention": (F.scaled_dot_product_attention, (normal(4, 4, 6, 8), normal(4, 4, 6, 8), normal(4, 4, 6, 8))),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (normal(4, 4, 6, 8), normal(4, 4, 6, 8), normal(4, 4, 6, 8)),
    ),
    # two rows on four ranks or more: some ranks hold nothing
    "amax of empty shards": (lambda x: (x.amax(0), x.amax(), x.amin(1)), (normal(2, 3),)),
    "argmax of empty shards": (lambda x: (x.argmax(0), x.argmax()), (normal(2, 3),)),
    "fft of empty shards": (lambda x: torch.fft.fft(x, dim=0).abs(), (normal(2, 3),)),
    "batch_norm of empty shards": (lambda x: F.batch_norm(x, None, None, training=True), (normal(2, 3, 4),)),
    "one_hot of empty shards": (lambda x: F.one_hot((x > 0).long(), 3).double(), (normal(2),)),
}


def _written(x: Any) -> Any:
    x[1:5] = 0.5
    x[6].mul_(2)
    return x


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*no rule")
def test_known_cases(name: str) -> None:
    fn, tensors = CASES[name]
    assert_parity(fn, *tensors)


def test_numbers_of_partial_and_empty_tensors() -> None:
    for shape in ((4,), (2, 3)):
        mesh = sw.init_device_mesh("cpu", shape)
        for placement in (R, S0, P):
            one = sw.distribute_tensor(torch.tensor([3.0]), mesh, [placement] * mesh.ndim)
            assert one.item() == 3.0
            assert bool(one > 2)
            assert float(one.sum()) == 3.0


def test_dropout_on_shards_differs_from_shard_to_shard() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    dropped = F.dropout(sw.ones(4, 64, device_mesh=mesh, placements=[S0]), 0.5).full_tensor()
    assert len({tuple(row.tolist()) for row in dropped}) == 4


@pytest.mark.parametrize("op", [torch.stack, torch.cat])
def test_hundreds_of_tensors_cost_in_proportion_to_their_number(op: Any) -> None:
    """Counted as functions entered for each tensor, which may not rise with their number."""
    from bench.walk import walk

    mesh = sw.init_device_mesh("cpu", (2, 2))
    each = []
    for count in (100, 400):
        parts = [sw.ones(4, 3, device_mesh=mesh, placements=[S0, S1]) for _ in range(count)]
        each.append(walk(lambda parts=parts: op(parts)).visits / count)
    assert each[1] < 1.2 * each[0]


@pytest.mark.parametrize("placements", [[S0, R], [S1, R], [S0, S1]], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_by_batch_and_head_moves_nothing(placements: list[Any], causal: bool) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    q, k, v = (sw.distribute_tensor(normal(4, 4, 6, 8), mesh, placements) for _ in range(3))
    assert bytes_moved(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))[1:] == (0, 0)
