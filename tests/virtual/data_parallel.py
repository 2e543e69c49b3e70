"""Every data parallel plan on every mesh beside one device, ten steps each: `python -m tests.virtual.data_parallel`.

The tests in test_fully_shard.py and test_replicate.py are a sample of this.
"""

import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

import shardwise as sw
from shardwise import Replicate, Shard
from tests.transformer import assert_trains_as_one_device, shard_all, tensor_parallel

DTYPES = (torch.float64, torch.float32)
NAMES = {(2,): ("dp",), (4,): ("dp",), (3,): ("dp",), (2, 2): ("replicas", "dp"), (2, 4): ("replicas", "dp")}


def rows_of_ranks(mesh: sw.DeviceMesh, tensor: torch.Tensor) -> sw.RankTensor:
    """Each rank its own rows; the batch has eight, so meshes of three ranks have none of this."""
    return sw.RankTensor(tensor.chunk(mesh.size()))


def global_rows(mesh: sw.DeviceMesh, placements: list[Any], tensor: torch.Tensor) -> sw.DTensor:
    return sw.distribute_tensor(tensor, mesh, placements)


def plans() -> Iterator[tuple[str, dict[str, Any]]]:
    """A name and the arguments of `assert_trains_as_one_device`."""
    wraps = {"fully_shard": shard_all, "replicate": functools.partial(sw.replicate, bucket_cap_mb=0.002)}
    for (shape, names), (kind, wrap), tied, dtype in itertools.product(
        NAMES.items(), wraps.items(), (False, True), DTYPES
    ):
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
        common = {"wrap": functools.partial(wrap, mesh=mesh), "tied": tied, "dtype": dtype}
        name = f"{kind} {shape} {'tied ' if tied else ''}{str(dtype).removeprefix('torch.')}"
        placed = functools.partial(global_rows, mesh, [Shard(0)] * mesh.ndim)
        yield f"{name}, a global batch", {**common, "place": placed, "dropout": 0.2}
        if shape != (3,):
            yield (
                f"{name}, batches of ranks",
                {**common, "place": functools.partial(rows_of_ranks, mesh), "dropout": 0.0},
            )
    for shape, (kind, wrap), dtype in itertools.product(((2, 2), (2, 4), (4, 2), (3, 2)), wraps.items(), DTYPES):
        world = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        yield (
            f"{kind} x tensor parallel {shape} {str(dtype).removeprefix('torch.')}, a global batch",
            {
                "wrap": functools.partial(wrap, mesh=world["dp"]),
                "place": functools.partial(global_rows, world, [Shard(0), Replicate()]),
                "prepare": functools.partial(tensor_parallel, mesh=world["tp"]),
                "dropout": 0.2,
                "dtype": dtype,
            },
        )


def main() -> int:
    failures = number = 0
    for number, (name, arguments) in enumerate(plans(), 1):
        start = time.perf_counter()
        try:
            assert_trains_as_one_device(**arguments)
            outcome = "as one device"
        except AssertionError as error:
            failures += 1
            outcome = f"FAILED: {str(error).splitlines()[0]}"
        print(f"{number:3} {name}: {outcome} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{number - failures} of {number} plans train as one device")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
