"""Recurrent networks: a sharded batch stays sharded, with the values and gradients that cuDNN gives one device."""

import copy
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard

LAYOUTS: tuple[Any, ...] = (
    ((4,), [True]), ((2, 2), [True, False]), ((2, 2), [True, True]), ((2, 2), [False, True]), ((3,), [True]),
)  # fmt: skip
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"batch_first": True, "num_layers": 2, "bidirectional": True}, {"bias": False},
)  # fmt: skip


def compare(kind: type[nn.RNNBase], options: dict[str, Any], shape: Any, split: Any, size: int) -> None:
    dim = 0 if options.get("batch_first") else 1
    network = kind(5, 6, **options).cuda().double()
    x = torch.randn((size, 3, 5) if dim == 0 else (3, size, 5), dtype=torch.float64, device="cuda")
    mesh = sw.init_device_mesh("cuda", shape)
    parallel = sw.distribute_module(copy.deepcopy(network), mesh)
    plain = x.clone().requires_grad_()
    given: Any = sw.distribute_tensor(x, mesh, [Shard(dim) if s else Replicate() for s in split]).requires_grad_()
    outputs = []
    for model, batch in ((network, plain), (parallel, given)):
        output, states = model(batch)
        states = states if isinstance(states, tuple) else (states,)
        (output.sin().sum() + sum(state.cos().sum() for state in states)).backward()
        outputs.append((output, *states))
    assert outputs[1][0].placements == given.placements
    pairs = [*zip(outputs[1], outputs[0], strict=True), (given.grad, plain.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(parallel.parameters(), network.parameters(), strict=True)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-9, atol=1e-9)


def test_networks_over_a_sharded_batch() -> None:
    torch.manual_seed(0)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for options in OPTIONS:
            for shape, split in LAYOUTS:
                for size in (12, 7):
                    compare(kind, options, shape, split, size)
