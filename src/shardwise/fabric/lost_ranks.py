"""Failures of communication in the user's terms: the operation, this rank and its host, the others, the user's line.

A rank that ends, or a host that cannot be reached, is seen by a process group as a closed connection or a timeout. Its
text names an address at most.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from shardwise.errors import LostRankError, ShardwiseError
from shardwise.events import user_line

__all__ = ["SHOWN", "is_communication_failure", "is_timeout", "lost_rank_error", "named_failures", "reporting_rank"]

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
    """The error that explains a failure of a process group; None if the failure is not one of communication.

    Args:
        error: what the process group raised.
        operation: what was done.
        ranks: those that take part.
    """
    if not is_communication_failure(error):
        return None
    text, me = str(error), _rank()
    others = [rank for rank in ranks if rank != me]
    named = ", ".join(map(str, others[:SHOWN])) + (f" and {len(others) - SHOWN} more" if len(others) > SHOWN else "")
    others_named = f"ranks {named}" if others else "other ranks"
    found = _ADDRESS.search(text)
    peer = f"the peer at {found[1]}" if found else "one of them"
    happened = f"{peer} did not answer in time" if is_timeout(error) else f"{peer} has ended or cannot be reached"
    return LostRankError(
        f"{operation} failed on {reporting_rank()}: it communicates with {others_named}, and {happened}\n"
        f"  the process group says: {text.splitlines()[0][:300]}",
        hint="look at the output of the other ranks for the first error; shardwise.debug.check_ranks() names the "
        "rank that ended; the timeout is that of init_process_group",
    )


def is_communication_failure(error: BaseException) -> bool:
    """Whether a process group has failed to reach another rank."""
    return isinstance(error, RuntimeError) and not isinstance(error, ShardwiseError) and bool(_LOST.search(str(error)))


def is_timeout(error: BaseException | None) -> bool:
    """Whether a failure of a process group is a timeout."""
    return _TIMEOUT.search(str(error)) is not None


def reporting_rank() -> str:
    """This rank, its host and the user's line, for errors.

    Threads of the library and of autograd run no user code: their line is that of the main thread.
    """
    thread, line = threading.current_thread(), user_line()
    main = threading.main_thread()
    if thread is not main and (line == "backward" or thread.name.startswith("shardwise")):
        what = "backward" if line == "backward" else f"thread {thread.name!r}"
        line = f"{user_line(sys._current_frames().get(main.ident or 0))} (in {what})"
    return f"rank {_rank()} of {socket.gethostname()}, at {line}"


def _rank() -> int | None:
    return dist.get_rank() if dist.is_initialized() else None


def named_failures(function: Callable[..., T], operation: Callable[[], tuple[str, Sequence[int]]]) -> Callable[..., T]:
    """`function`, with failures of communication raised in the user's terms.

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
