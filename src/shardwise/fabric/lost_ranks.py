"""Failures of communication in the user's terms: the operation, this rank and its host, the others, the user's line.

A rank that ends, or a host that cannot be reached, is seen by a process group as a closed connection or a timeout. Its
text names an address at most.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from shardwise.errors import LostRankError, ShardwiseError
from shardwise.events import user_line

__all__ = ["lost_rank_error", "named_failures"]

T = TypeVar("T")
SHOWN = 8  # ranks
_LOST = re.compile(
    r"closed by peer|connection reset|connection refused|broken pipe|timed? ?out|no route to host|unreachable|"
    r"failed to (recv|send)|(send|recv)\w* failed|socket|rank \d+ is not connected|nccl|remote process exited|aborted|"
    r"gloo/transport|connect failure",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")


def lost_rank_error(error: BaseException, operation: str, ranks: Sequence[int]) -> LostRankError | None:
    """The error that says what a failure of a process group means; None if it is of another kind.

    Args:
        error: what the process group raised.
        operation: what was done.
        ranks: those that take part.
    """
    text = str(error)
    if isinstance(error, ShardwiseError) or not isinstance(error, RuntimeError) or not _LOST.search(text):
        return None
    me = dist.get_rank() if dist.is_initialized() else None
    others = [rank for rank in ranks if rank != me]
    named = ", ".join(map(str, others[:SHOWN])) + (f" and {len(others) - SHOWN} more" if len(others) > SHOWN else "")
    found = _ADDRESS.search(text)
    peer = f"the peer at {found[1]}" if found else "one of them"
    happened = f"{peer} did not answer in time" if _TIMEOUT.search(text) else f"{peer} has ended or cannot be reached"
    return LostRankError(
        f"{operation} failed on rank {me} of {socket.gethostname()}, at {user_line()}: it communicates with ranks "
        f"{named}, and {happened}\n  the process group says: {text.splitlines()[0][:300]}",
        hint="look at the output of the other ranks for the first error; shardwise.check_ranks() names the rank that "
        "ended; the timeout is that of init_process_group",
    )


def named_failures(function: Callable[..., T], operation: Callable[[], tuple[str, Sequence[int]]]) -> Callable[..., T]:
    """The function, with failures of communication in the user's terms.

    Args:
        function: what communicates.
        operation: its description and ranks, asked for when it has failed.
    """

    def run_with_names(*args: object) -> T:
        try:
            return function(*args)
        except RuntimeError as error:
            named = lost_rank_error(error, *operation())
            if named is None:
                raise
            raise named from error

    return run_with_names
