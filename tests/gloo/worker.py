"""One rank of a ProcessPool: takes calls from a pipe, runs them, answers. Knows nothing of pytest or Shardwise.

Run as `python -m tests.gloo.worker FD RANK WORLD_SIZE BACKEND STORE`; started by tests.gloo.processes.
"""

import faulthandler
import importlib
import operator
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def main(fd: int, rank: int, world_size: int, backend: str, store_path: str) -> None:
    # The log is stderr: asked with this signal, the stacks of all threads go there.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    pipe = Connection(fd)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, calls), daemon=True).start()
    torch.set_num_threads(1)
    if backend != "none":
        store = dist.FileStore(store_path, world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    _send(pipe, ("ready", None))
    while True:
        _send(pipe, _answer(calls.get(), expects_group=backend != "none"))


def _receive(pipe: Connection, calls: "queue.SimpleQueue[bytes]") -> None:
    """Pass calls on. When the parent closes its end, or dies, so does this process, whatever it is doing."""
    while True:
        try:
            calls.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


def _send(pipe: Connection, answer: tuple[str, Any]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # Plain pickle: Connection.send would share tensors' memory with a parent that may outlive this process.
    pipe.send_bytes(pickle.dumps(answer))


def _answer(call: bytes, *, expects_group: bool) -> tuple[str, Any]:
    """("done", (pickled result, whether this process can take more calls)) or ("failed", (when, traceback))."""
    try:
        module, qualname, args = pickle.loads(call)
        function = operator.attrgetter(qualname)(importlib.import_module(module))
        torch.manual_seed(0)
        result = pickle.dumps(function(*args))
    except BaseException:
        # BaseException: a SystemExit or a skip inside a rank is a failure of that rank too.
        return "failed", (time.monotonic(), traceback.format_exc())
    return "done", (result, dist.is_initialized() == expects_group)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
