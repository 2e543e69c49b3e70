"""Damaged checkpoints by the thousand: every one loads bit by bit or is refused by the checkpoint's own error.

Flips of bytes, truncations, files that are missing, swapped or links; edits of the index at random, with its own
checksum made to fit again, so that every check behind it is met. After each: the error type, that nothing was loaded,
and the most memory that was held. `python -m tests.virtual.corruption COUNT` runs as many as one likes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.checkpoint import load, save, verify
from shardwise.checkpoint.format.checkpoint_index import INDEX
from tests.virtual.checkpoints import full, laid_out, mesh_of, same_bits, values, zeroed

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 64, 4096, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30, -(2**63), 0.5, 1e300, True, None, "1", [],
    {}, [1], {"x": 1},
)  # fmt: skip
TEXTS: tuple[Any, ...] = (
    "", "../other.safetensors", "/etc/passwd", "blocks-00000.safetensors", "blocks-00001.safetensors", "a\0b", "..",
    "float32", "float64", "complex32", "int8", "f32", "0" * 16, "f" * 16, "x" * 5000, 3, None, [], "index.json",
    "shardwise.checkpoint", "$tensor", "\ud800",
)  # fmt: skip


class Sample:
    """A whole checkpoint, what is in it, and how to damage it."""

    def __init__(self, folder: Path, seed: int) -> None:
        rng = random.Random(seed)
        self.whole = folder / "whole"
        self.tensors = values(seed) | {"large": torch.arange(2**17).reshape(256, 512).float()}
        state = {"t": laid_out(self.tensors, mesh_of((2, 2)), rng), "step": 3, "nested": {"rates": (0.1, [1, 2])}}
        save(state, self.whole)
        self.size = sum(file.stat().st_size for file in self.whole.iterdir())
        self.target = laid_out(self.tensors, mesh_of((2, 3)), rng)
        # what is held is compared with the size of the checkpoint: no rank may have a copy of all of it
        self.target["large"] = sw.distribute_tensor(self.tensors["large"], mesh_of((2, 3)), [sw.Shard(0), sw.Zigzag(1)])

    def check(self, path: Path) -> str:
        """Load a damaged checkpoint: "loaded" bit by bit, or "refused" with nothing changed. Anything else raises."""
        target = zeroed(self.target)
        state = {"t": target, "step": None, "nested": {"rates": None}}
        tracemalloc.start()
        try:
            load(state, path)
        except sw.CheckpointError:
            outcome = "refused"
        else:
            outcome = "loaded"
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 2 * self.size + 2**20, f"{peak} bytes held for a checkpoint of {self.size}"
        for name, tensor in self.tensors.items():
            expected = tensor if outcome == "loaded" else torch.zeros_like(tensor)
            assert same_bits(full(target[name]), expected), f"{name} after it was {outcome}"
        assert state["step"] == (3 if outcome == "loaded" else None)
        return outcome


# ---------------------------------------------------------------- damages


def flip_byte(path: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(path.iterdir()))
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(path.iterdir()))
    size = file.stat().st_size
    os.truncate(file, rng.choice((0, 1, size - 1, rng.randrange(size), size + 1, size + 4096)))


def move_files(path: Path, rng: random.Random) -> None:
    a, b = rng.sample(sorted(path.iterdir()), 2)
    match rng.randrange(5):
        case 0:
            a.unlink()
        case 1:
            a.unlink()
            a.symlink_to(b)
        case 2:
            a.unlink()
            os.mkfifo(a)
        case 3:
            a.unlink()
            a.mkdir()
        case _:
            kept = a.read_bytes()
            a.write_bytes(b.read_bytes())
            b.write_bytes(kept)


def nonsense_index(path: Path, rng: random.Random) -> None:
    """Bodies that are no index, under a right checksum."""
    bodies = (
        b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"NaN", b'{"a":1,"a":2}',
        b"\xff\xfe", b"{" + b" " * 1000 + b"}", b'"' + b"x" * 10_000 + b'"', b"1e999",
    )  # fmt: skip
    write_body(path, rng.choice(bodies))


def edit_index(path: Path, rng: random.Random) -> None:
    """Change, remove, repeat or swap something anywhere in the index, and make its checksum fit."""
    content = json.loads((path / INDEX).read_bytes())["index"]
    # of the state only what names tensors is edited: a number that was changed there is another number, not damage
    content["state"], kept = {"t": content["state"]["t"]}, content["state"]
    for _ in range(rng.choice((1, 1, 2))):
        edit(content, rng)
    if isinstance(content.get("state"), dict):
        content["state"] = kept | content["state"]
    write_body(path, json.dumps(content).encode())


def edit(content: Any, rng: random.Random) -> None:
    places = [place for place in containers(content) if place]
    place = rng.choice(places)
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    key = rng.choice(keys)
    match rng.randrange(7):
        case 0:
            del place[key]
        case 1 if isinstance(place, dict):
            place[str(rng.choice(TEXTS))] = place.pop(key)
        case 2:
            other = rng.choice(keys)
            place[key], place[other] = place[other], place[key]
        case 3 if isinstance(place, list):
            place.insert(key, copy.deepcopy(place[key]))
        case 4 if type(place[key]) is int:
            place[key] += rng.choice((-1, 1, 4, -8, 512, 4096))
        case 5 if isinstance(place[key], str):
            place[key] = rng.choice(TEXTS)
        case _:
            place[key] = rng.choice(NUMBERS)


def containers(data: Any) -> list[Any]:
    found, left = [], [data]
    while left:
        item = left.pop()
        if isinstance(item, dict | list):
            found.append(item)
            left += item.values() if isinstance(item, dict) else item
    return found


def write_body(path: Path, body: bytes) -> None:
    head = f'{{"sha256": "{hashlib.sha256(body).hexdigest()}", "index": '.encode()
    (path / INDEX).write_bytes(head + body + b"}\n")


DAMAGES: dict[str, tuple[int, Callable[[Path, random.Random], None]]] = {
    "flipped": (4, flip_byte),
    "truncated": (2, truncate),
    "moved": (1, move_files),
    "nonsense": (1, nonsense_index),
    "edited": (8, edit_index),
}


def run(count: int, seed: int = 0) -> Counter[tuple[str, str]]:
    """Damage and load `count` checkpoints; how many of each kind were refused or loaded."""
    rng = random.Random(seed)
    outcomes: Counter[tuple[str, str]] = Counter()
    kinds, weights = list(DAMAGES), [weight for weight, _ in DAMAGES.values()]
    with tempfile.TemporaryDirectory() as folder:
        sample = Sample(Path(folder), seed)
        assert sample.check(sample.whole) == "loaded"
        for number in range(count):
            kind = rng.choices(kinds, weights)[0]
            path = Path(folder) / "damaged"
            shutil.copytree(sample.whole, path)
            own = random.Random(f"{seed} {number}")
            DAMAGES[kind][1](path, own)
            try:
                outcome = sample.check(path)
                verified = verify(path)
                assert outcome == "refused" or kind != "flipped" or not any("checksum" in line for line in verified)
            except Exception as error:
                raise AssertionError(f"damage {number} of seed {seed}, {kind}") from error
            outcomes[kind, outcome] += 1
            shutil.rmtree(path)
    return outcomes


if __name__ == "__main__":
    start = time.monotonic()
    total = run(int(sys.argv[1]) if len(sys.argv) > 1 else 2000, seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for (kind, outcome), count in sorted(total.items()):
        print(f"{kind:10} {outcome:8} {count}")
    print(f"{sum(total.values())} damaged checkpoints in {time.monotonic() - start:.0f} s")
