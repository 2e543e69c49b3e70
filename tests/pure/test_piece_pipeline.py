"""Routes in pieces: the result of the steps on the full local, and one order of starts and waits on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardwise.fabric.piece_pipeline import run_in_pieces
from shardwise.plan.route_pieces import Pieces

Start = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_pieces_go_through_all_steps(count: int, steps: int, dim: int) -> None:
    log: list[tuple[str, int, int]] = []  # started or done, step, piece by its first value

    def step(number: int) -> Start:
        """A stand-in for a collective: doubles the other dim, as a gather along it."""

        def start(piece: torch.Tensor) -> Callable[[], torch.Tensor]:
            assert piece.is_contiguous()
            key = int(piece.reshape(-1)[0])
            log.append(("start", number, key))

            def wait() -> torch.Tensor:
                log.append(("done", number, key))
                return torch.cat([piece, piece], 1 - dim)

            return wait

        return start

    local = torch.arange(64).view(8, 8)
    result = run_in_pieces([step(number) for number in range(steps)], Pieces(dim, count))(local)
    assert torch.equal(result, torch.cat([local] * 2**steps, 1 - dim))
    assert len(log) == 2 * count * steps
    keys = [int(local.narrow(dim, piece * (8 // count), 1).reshape(-1)[0]) for piece in range(count)]
    expected: list[tuple[str, int, int]] = []
    for turn in range(count + steps - 1):  # all collectives of a turn are in flight before the first is waited for
        moving = [(number, keys[turn - number]) for number in range(steps) if 0 <= turn - number < count]
        expected += [("start", *each) for each in moving] + [("done", *each) for each in moving]
    assert log == expected
