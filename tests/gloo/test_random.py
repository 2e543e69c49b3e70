"""Random operators on real processes: one device's numbers on every rank, and the same state afterwards."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.gloo.processes import ProcessPool

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(-1, 3),
    "normal_": lambda x: x.normal_(1, 2),
    "exponential_": lambda x: x.exponential_(),
    "random_": lambda x: x.random_(100),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "randn_like": lambda x: torch.randn_like(x),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.exp(), 3),
    "dropout": lambda x: F.dropout(x, 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "dropout2d": lambda x: F.dropout2d(x[:, :, None, None].expand(-1, -1, 2, 2), 0.4),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


def draws_like_one_device(shape: tuple[int, ...]) -> list[str]:
    mesh = sw.init_device_mesh("cpu", shape)
    failures = []
    for size in ((8, 12), (5, 7)):
        plain = torch.linspace(-1, 1, size[0] * size[1]).reshape(size)
        for placements in itertools.product((R, S0, S1), repeat=mesh.ndim):
            for name, fn in OPERATORS.items():
                torch.manual_seed(3)
                want = [fn(plain.clone()) for _ in range(2)]
                state = torch.get_rng_state()
                torch.manual_seed(3)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    have = [fn(sw.distribute_tensor(plain, mesh, placements)).full_tensor() for _ in range(2)]
                same = all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
                if not same or not torch.equal(torch.get_rng_state(), state):
                    failures.append(f"{name} {placements}")
    return failures


def test_operators(gloo4: ProcessPool) -> None:
    for shape in ((4,), (2, 2)):
        assert gloo4.run(draws_like_one_device, shape, timeout=120) == [[]] * 4


def made_by_factories() -> list[bool]:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    same = []
    for ours, theirs in (
        (lambda **k: sw.rand(5, 7, **k), lambda: torch.rand(5, 7)),
        (lambda **k: sw.randn(5, 7, **k), lambda: torch.randn(5, 7)),
        (lambda **k: sw.randint(9, (5, 7), **k), lambda: torch.randint(9, (5, 7))),
    ):
        sw.manual_seed(3, mesh)
        have = ours(device_mesh=mesh, placements=[S1, S0]).full_tensor()
        torch.manual_seed(3)
        same.append(torch.equal(have, theirs()))
    return same


def test_factories(gloo4: ProcessPool) -> None:
    assert gloo4.run(made_by_factories) == [[True] * 3] * 4


def comes_with_another_seed() -> tuple[list[float], int, str]:
    """A mesh on which nothing was drawn yet, and a seed of its own on every rank."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("seeds",))
    torch.manual_seed(100 + dist.get_rank())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        numbers = sw.rand(6, device_mesh=mesh).to_local().tolist()
    try:
        sw.manual_seed(dist.get_rank(), mesh)
        error = ""
    except sw.AgreementError as caught:
        error = str(caught)
    return numbers, sum("different random states" in str(w.message) for w in said), error


def recomputes_with_another_seed() -> tuple[str, bool]:
    """The error of a first draw that is recomputed, and whether gradients are those of one draw after seeding."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("recomputed",))
    torch.manual_seed(100 + dist.get_rank())
    x = sw.distribute_tensor(torch.ones(8, 4), mesh, [R]).requires_grad_()
    error = ""
    try:
        checkpoint(F.dropout, x, use_reentrant=False)
    except sw.AgreementError as caught:
        error = str(caught)
    sw.manual_seed(3, mesh)
    y = checkpoint(F.dropout, x, use_reentrant=False)
    y.sum().backward()
    return error, torch.equal(x.grad.full_tensor(), y.detach().full_tensor())  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def recomputes_reentrantly_with_another_seed() -> bool:
    """Whether gradients are those of the forward's draw, which was the first and replaced the random state."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("reentrant", "recomputed"))
    torch.manual_seed(100 + dist.get_rank())
    x = sw.distribute_tensor(torch.ones(8, 4), mesh, [R, R]).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = checkpoint(F.dropout, x, use_reentrant=True)
    y.sum().backward()
    return torch.equal(x.grad.to_local(), y.detach().to_local())  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def test_a_first_draw_that_is_recomputed_reentrantly_is_repeated(gloo4: ProcessPool) -> None:
    assert gloo4.run(recomputes_reentrantly_with_another_seed) == [True] * 4


def test_a_first_draw_that_is_recomputed_needs_equal_states(gloo4: ProcessPool) -> None:
    for error, same in gloo4.run(recomputes_with_another_seed):
        assert "inside a checkpointed function" in error
        assert "manual_seed" in error
        assert same


def test_ranks_that_come_with_different_states_agree_on_the_first(gloo4: ProcessPool) -> None:
    said = gloo4.run(comes_with_another_seed)
    torch.manual_seed(100)
    assert all(torch.equal(torch.tensor(numbers), torch.rand(0).new_tensor(said[0][0])) for numbers, _, _ in said)
    assert torch.equal(torch.tensor(said[0][0]), torch.rand(6))
    assert all(warned == 1 and "different seeds" in error for _, warned, error in said)
