"""Every operator of torch's test database, with its results written to in place: as on one device.

A result that is a copy must not share memory with an operand, and one that is a view must. Both are decided by other
code in inference mode, where operators that torch composes of others come to DTensors as one.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import shardwise as sw
from tests.virtual.conformance import database

CHUNKS = 8  # so that workers can share them
CASES = 4
# Operators whose results cannot be compared after a write, and why.
LEFT_OUT = {
    "unsafe_split": "writes to its results are undefined",
    "unsafe_chunk": "writes to its results are undefined",
    "unfold": "windows overlap",
}
UNINITIALIZED = "empty"  # in the names of operators that give memory as it is


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def called(
    op: Any, sample: Any, place: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The results and operands of a call."""
    given = tree_map(
        lambda leaf: place(leaf.detach().clone()) if isinstance(leaf, torch.Tensor) else leaf,
        (sample.input, sample.args, sample.kwargs),
    )
    torch.manual_seed(1)
    return tensors_in(op.op(given[0], *given[1], **given[2])), tensors_in(given)


def written(results: list[torch.Tensor], operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The values of results and operands after a write to each floating result."""
    for result in results:
        if result.is_floating_point():
            result.mul_(0.5).add_(1)
    return [each.full_tensor() if isinstance(each, sw.DTensor) else each for each in (*results, *operands)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_writes_to_results(chunk: int, mode: Any) -> None:
    mesh = sw.init_device_mesh("cpu", (2,))

    def sharded(tensor: torch.Tensor) -> torch.Tensor:
        return sw.distribute_tensor(tensor, mesh, [sw.Shard(0) if tensor.dim() else sw.Replicate()])

    compared, wrong = 0, []
    for name in itertools.islice(database(), chunk, None, CHUNKS):
        op = database()[name]
        if op.name in LEFT_OUT or UNINITIALIZED in op.name or torch.float64 not in op.dtypes:
            continue
        torch.manual_seed(0)
        for sample in itertools.islice(op.sample_inputs("cpu", torch.float64, requires_grad=False), CASES):
            with mode():
                try:
                    wanted = written(*called(op, sample, lambda tensor: tensor))
                except Exception:  # torch cannot do this on one device
                    continue
                try:
                    results, operands = called(op, sample, sharded)
                except RuntimeError:  # the conformance tests list what is refused
                    continue
                compared += 1
                try:
                    found = written(results, operands)
                    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8, equal_nan=True)
                except (AssertionError, RuntimeError) as error:
                    wrong.append(f"{name}: {str(error).splitlines()[0]}")
    assert not wrong, "\n".join(wrong)
    assert compared > 100


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize(
    "reshaped", [lambda x: x.t().reshape(-1), lambda x: x[:, 1:3].reshape(6), lambda x: x.reshape(12)]
)
@pytest.mark.parametrize("placement", [sw.Shard(0), sw.Shard(1), sw.Replicate()])
def test_a_reshape_that_copies_on_one_device_copies(placement: sw.Placement, reshaped: Any, mode: Any) -> None:
    """A shard of one row or column could be a view where the global tensor has to be copied."""
    with mode():
        plain = torch.arange(12.0).view(3, 4)
        given = sw.distribute_tensor(plain.clone(), sw.init_device_mesh("cpu", (4,)), [placement])
        for x in (plain, given):
            reshaped(x).add_(1)
        assert torch.equal(given.full_tensor(), plain)
