"""Eight devices in one process: JAX on its host devices and Shardwise on virtual ranks, the same calls in turn.

    JAX_PYTHON=path/to/python python -m bench jax_devices

JAX is no dependency: it runs in a process of its own, by the interpreter that JAX_PYTHON names. Both get one core, as
threads of a busy machine wait for each other; SHARDWISE_ALL_CORES=1 gives both all of them.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import shardwise as sw

ROUNDS = 9
ROWS = 4096  # square, float32: 64 MiB
SMALL = 64
SHAPE, NAMES = (2, 4), ("dp", "tp")
JAX = """
import json, os, statistics, time
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh({shape}, {names})

def spread(size, *spec):
    return jax.device_put(jnp.ones((size, size)), NamedSharding(mesh, P(*spec)))

def median(call, rounds):
    call().block_until_ready()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call().block_until_ready()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)

large, small = spread({rows}, "dp", "tp"), spread({small}, "dp", "tp")
swapped, whole = NamedSharding(mesh, P("tp", "dp")), NamedSharding(mesh, P())
print(json.dumps({{
    "a + b, 64 x 64": median(lambda: small + small, 40 * {rounds}),
    "dp:S0 tp:S1 -> dp:S1 tp:S0, 64 MiB": median(lambda: jax.device_put(large, swapped), {rounds}),
    "dp:S0 tp:S1 -> dp:R tp:R, 64 MiB": median(lambda: jax.device_put(large, whole), {rounds}),
    "version": jax.__version__,
}}))
"""


def median(call: Callable[[], object], rounds: int) -> float:
    """Seconds of a call when it is warm."""
    call()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def of_shardwise() -> dict[str, float]:
    """Seconds of each call here."""
    with sw.virtual(), torch.no_grad():
        mesh = sw.init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
        blocks, swapped, whole = [sw.Shard(0), sw.Shard(1)], [sw.Shard(1), sw.Shard(0)], [sw.Replicate()] * 2
        large = sw.ones(ROWS, ROWS, device_mesh=mesh, placements=blocks)
        small = sw.ones(SMALL, SMALL, device_mesh=mesh, placements=blocks)
        return {
            "a + b, 64 x 64": median(lambda: small + small, 40 * ROUNDS),
            "dp:S0 tp:S1 -> dp:S1 tp:S0, 64 MiB": median(lambda: large.redistribute(placements=swapped), ROUNDS),
            "dp:S0 tp:S1 -> dp:R tp:R, 64 MiB": median(lambda: large.redistribute(placements=whole), ROUNDS),
        }


def of_jax(python: str) -> dict[str, float | str]:
    """Seconds of each call there."""
    program = JAX.format(shape=SHAPE, names=NAMES, rows=ROWS, small=SMALL, rounds=ROUNDS)
    done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"JAX failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print both, and the ratio; say so where there is no JAX."""
    python = os.environ.get("JAX_PYTHON")
    if not python:
        print("not measured: JAX_PYTHON names no interpreter with JAX")
        return
    if "SHARDWISE_ALL_CORES" not in os.environ:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the child has it, too
        torch.set_num_threads(1)
    theirs, ours = of_jax(python), of_shardwise()
    print(f"JAX {theirs.pop('version')}, eight devices of one process, milliseconds")
    for name, mine in ours.items():
        peer = float(theirs[name])
        print(f"{name:40} shardwise {mine * 1e3:8.3f}   JAX {peer * 1e3:8.3f}   ratio {mine / peer:.2f}")
