"""Runs of operators that are replayed at fixed addresses: a stand-in for CUDA graphs replays them on the CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shardwise.capture import captured
from shardwise.capture.cuda_graphs import MOST_CAPTURES, Replayed
from shardwise.errors import UnsupportedError


def on_cpu(run: Any, given: Sequence[torch.Tensor], pool: Any) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
    """As a CUDA graph: reads the tensors of the capture, and writes to the results of the capture."""
    made = [torch.full_like(tensor, torch.nan) for tensor in run(*given)]

    def replay() -> None:
        for tensor, new in zip(made, run(*given), strict=True):
            tensor.copy_(new)

    return replay, made


def test_inputs_that_move_are_copied() -> None:
    replayed = Replayed(lambda x, w: [x @ w, x + 1], [True, False], capture=on_cpu)
    weight = torch.randn(4, 4)
    kept = []
    for call in range(8):
        x = torch.randn(2, 4)
        kept.append((x, weight.clone(), replayed(x, weight)[0]))
        assert torch.equal(replayed(x, weight)[1], x + 1)
        weight.mul_(1.5)  # in place: seen by the next replay
        del call
    for x, then, product in kept:
        assert torch.equal(product, x @ then)
    assert replayed.captures == 2


def test_all_inputs_may_move() -> None:
    replayed = Replayed(lambda *given: [sum(given[1:], given[0])], [True], capture=on_cpu)
    tensors = [torch.randn(3) for _ in range(4)]
    for call in range(24):
        tensors[call % 4] = torch.randn(3)
        wanted = tensors[0] + tensors[1] + tensors[2] + tensors[3]
        assert torch.equal(replayed(*tensors)[0], wanted)
    assert replayed.captures <= MOST_CAPTURES + 1


def test_runs_that_write_to_inputs_are_not_captured() -> None:
    replayed = Replayed(lambda x: [x.add_(1) * 2], [True], capture=on_cpu)
    x = torch.zeros(3)
    for call in range(4):
        assert torch.equal(replayed(x)[0], torch.full((3,), 2.0 * (call + 1)))
    assert torch.equal(x, torch.full((3,), 4.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="need a GPU"):
        captured(lambda x: x, backend="cudagraphs")
