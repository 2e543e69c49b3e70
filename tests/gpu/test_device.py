"""The device is there, and placements, which are data, are the same objects next to it."""

import pickle

import torch

from shardwise.core.placement import Replicate, Shard


def test_device_computes() -> None:
    x = torch.arange(1024, device="cuda", dtype=torch.float32)
    assert x.sum().item() == 1023 * 1024 / 2


def test_placements_are_interned() -> None:
    for placement, again in ((Shard(0), Shard(0)), (Shard(-1), Shard(-1)), (Replicate(), Replicate())):
        assert placement is again
        assert pickle.loads(pickle.dumps(placement)) is placement
    assert Shard(0) is not Shard(1)
