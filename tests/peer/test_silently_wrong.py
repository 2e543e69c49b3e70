"""Programs on which torch.distributed.tensor gives another value than one device, and no error. Each is right here.

The table in README.md is made of these. torch's values are asserted too: where a later torch gives the value of one
device, the test fails, and the table loses a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.tensor as torch_tensor
import torch.nn.functional as F

import shardwise as sw
from tests.gloo.processes import ProcessPool
from tests.torch_version import TORCH

RANKS = 4
Distribute = Callable[[torch.Tensor, int | None], Any]  # sharded in a dim, or replicated


def number_of_a_sum(distribute: Distribute) -> Any:
    """The loss that a training loop prints."""
    return distribute(torch.arange(1.0, 9.0), 0).sum().item()


def loss_with_padding(distribute: Distribute) -> Any:
    """Four sequences of two tokens; of the first two sequences the second token is padding."""
    logits = torch.arange(24.0).reshape(8, 3).remainder(5)
    targets = torch.tensor([0, -100, 1, -100, 2, 0, 1, 2])
    return F.cross_entropy(distribute(logits, 0), distribute(targets, 0))


def weighted_loss(distribute: Distribute) -> Any:
    scores = torch.arange(24.0).reshape(8, 3).remainder(5)
    targets, weights = torch.arange(8) % 3, torch.tensor([1.0, 2.0, 4.0])
    return F.nll_loss(distribute(scores, 0), distribute(targets, 0), weight=distribute(weights, None))


def gradient_of_mse(distribute: Distribute) -> Any:
    x = distribute(torch.arange(8.0), 0).requires_grad_()
    F.mse_loss(x, distribute(torch.zeros(8), 0)).backward()
    return x.grad


def mse_of_uneven_shards(distribute: Distribute) -> Any:
    return F.mse_loss(distribute(torch.arange(7.0), 0), distribute(torch.zeros(7), 0))


def write_to_a_row(distribute: Distribute) -> Any:
    x = distribute(torch.ones(8, 2), 0)
    x[6].mul_(3)
    return x


def write_to_a_chunk(distribute: Distribute) -> Any:
    x = distribute(torch.ones(8), 0)
    x.chunk(2)[0].zero_()
    return x


def fill_a_sum(distribute: Distribute) -> Any:
    """The product of matrices that are split in the dim that is summed over is Partial; it is filled with ones."""
    product = distribute(torch.ones(2, 8), 1) @ distribute(torch.ones(8, 2), 0)
    return product.fill_(1.0)


def convolution(distribute: Distribute) -> Any:
    """An image split by columns; a filter that adds up three neighbours."""
    image, kernel = torch.arange(8.0).reshape(1, 1, 1, 8), torch.ones(1, 1, 1, 3)
    return F.conv2d(distribute(image, 3), distribute(kernel, None), padding=(0, 1))


def dropout(distribute: Distribute) -> Any:
    torch.manual_seed(0)
    return F.dropout(distribute(torch.ones(16), 0), 0.5)


class Case(NamedTuple):
    program: Callable[[Distribute], Any]
    one_device: Any
    torchs: Any  # on rank 0


CASES = [
    Case(number_of_a_sum, 36, 3),
    Case(loss_with_padding, 1.227432, 1.397475),
    Case(weighted_loss, -2.647059, -2.633333),
    Case(gradient_of_mse, [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75], [0, 1, 2, 3, 4, 5, 6, 7]),
    Case(mse_of_uneven_shards, 13, 15.875),
    Case(write_to_a_row, [1] * 12 + [3] * 2 + [1] * 2, [1] * 16),
    Case(write_to_a_chunk, [0] * 4 + [1] * 4, [1] * 8),
    Case(fill_a_sum, [1] * 4, [4] * 4),
    Case(convolution, [1, 3, 6, 9, 12, 15, 18, 13], [1, 1]),
    Case(dropout, [0, 0, 2, 0, 0, 0, 2, 2, 0, 2, 2, 2, 2, 0, 2, 2], [0, 0, 2, 0] * 4),
]


def with_torch(tensor: torch.Tensor, dim: int | None) -> Any:
    mesh = torch_tensor.init_device_mesh("cpu", (RANKS,))
    return torch_tensor.distribute_tensor(tensor, mesh, [_placement(torch_tensor, dim)])


def with_shardwise(tensor: torch.Tensor, dim: int | None) -> Any:
    mesh = sw.init_device_mesh("cpu", (RANKS,))
    return sw.distribute_tensor(tensor, mesh, [_placement(sw, dim)])


def with_one_device(tensor: torch.Tensor, dim: int | None) -> Any:
    return tensor.clone()


def _placement(library: Any, dim: int | None) -> Any:
    return library.Replicate() if dim is None else library.Shard(dim)


def numbers(value: Any) -> Any:
    """A number, or the elements of the global tensor, flattened."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.flatten().tolist() if isinstance(whole, torch.Tensor) and whole.ndim else float(whole)


def values_of(distribute: Distribute) -> dict[str, Any]:
    """What every program gives on this rank."""
    return {case.program.__name__: numbers(case.program(distribute)) for case in CASES}


@pytest.fixture(scope="module")
def torchs(gloo4: ProcessPool) -> list[dict[str, Any]]:
    return gloo4.run(values_of, with_torch)


@pytest.fixture(scope="module")
def ours(gloo4: ProcessPool) -> list[dict[str, Any]]:
    return gloo4.run(values_of, with_shardwise)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.program.__name__)
def test_right_here_and_silently_wrong_in_torch(
    case: Case, torchs: list[dict[str, Any]], ours: list[dict[str, Any]]
) -> None:
    name = case.program.__name__
    assert numbers(case.program(with_one_device)) == pytest.approx(case.one_device, abs=1e-5)
    for values in ours:
        assert values[name] == pytest.approx(case.one_device, abs=1e-5)
    if TORCH < (2, 13) and torchs[0][name] != pytest.approx(case.torchs, abs=1e-5):
        pytest.skip(f"torch {torch.__version__} gives {torchs[0][name]}; the table is of torch 2.13")
    assert torchs[0][name] == pytest.approx(case.torchs, abs=1e-5), "torch has changed: so must the table in README.md"
    assert torchs[0][name] != pytest.approx(case.one_device, abs=1e-3)


def test_torch_reads_what_each_rank_has(torchs: list[dict[str, Any]]) -> None:
    assert [values["number_of_a_sum"] for values in torchs] == [3, 7, 11, 15]
    if TORCH >= (2, 13):  # torch 2.11 gives the value of one device
        assert [values["convolution"] for values in torchs] == [[1, 1], [5, 5], [9, 9], [13, 13]]
