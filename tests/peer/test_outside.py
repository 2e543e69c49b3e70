"""Ranks outside a mesh: a program runs on every rank of the world and does nothing on those outside, like torch's."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from tests.gloo.processes import ProcessPool
from tests.torch_version import TORCH

X = torch.arange(12.0).reshape(4, 3)
RAISES_IN_OLD_TORCH = ("max",)  # torch 2.11 raises an IndexError on ranks outside


def programs(lib: Any, mesh: Any) -> dict[str, Callable[[], Any]]:
    """Programs on a mesh of ranks 0 and 1."""
    rows, whole, part = [lib.Shard(0)], [lib.Replicate()], [lib.Partial()]

    def x(placements: Any = rows) -> Any:
        return lib.distribute_tensor(X, mesh, placements)

    def gradient(lead: Callable[[Any], Any]) -> Any:
        leaf = x().requires_grad_()
        lead(leaf).sum().backward()
        return leaf.grad.redistribute(mesh, rows)

    def trained() -> Any:
        torch.manual_seed(0)
        linear = lib.distribute_module(torch.nn.Linear(3, 3), mesh)
        optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1)
        linear(x()).sum().backward()
        optimizer.step()
        return linear.weight

    made = {
        "distribute": x,
        "replicated": lambda: x(whole),
        "integers": lambda: lib.distribute_tensor(X.long(), mesh, rows),
        "from_local": lambda: lib.DTensor.from_local(X, mesh, rows),
        "from_local replicated": lambda: lib.DTensor.from_local(X, mesh, whole),
        "from_local partial": lambda: lib.DTensor.from_local(X, mesh, part).redistribute(mesh, [lib.Shard(1)]),
        "redistribute": lambda: x().redistribute(mesh, whole),
        "to_local": lambda: x().to_local(),
        "full_tensor": lambda: x().full_tensor(),
        "number": lambda: x().sum().full_tensor(),
        "chunk": lambda: x().chunk(2, 1),
        "split": lambda: x().split([1, 2], 1),
        "unbind": lambda: x().unbind(1),
        "tensor_split": lambda: x(whole).tensor_split(2),
        "add": lambda: x() + x(),
        "matmul": lambda: x() @ x(whole).t(),
        "in place": lambda: x().relu_().add_(1),
        "index": lambda: x()[:, 1],
        "max": lambda: x().max(1),
        "cat": lambda: torch.cat([x(), x()], 1),
        "zeros": lambda: lib.zeros(4, 3, device_mesh=mesh, placements=rows, dtype=torch.int64),
        "to": lambda: x().to(torch.float64),
        "copy": lambda: copy.deepcopy(x()),
        "equal": lambda: torch.equal(x(whole), x(whole)),
        "layer_norm": lambda: torch.nn.functional.layer_norm(x(), (3,)),
        "gradient": lambda: gradient(lambda leaf: leaf * 2),
        "gradient of a move": lambda: gradient(lambda leaf: (leaf * 2).redistribute(mesh, whole)),
        "module": trained,
        "mesh": lambda: (mesh.size(), mesh.get_rank(), mesh.get_coordinate() is None),
    }
    return {name: program for name, program in made.items() if TORCH >= (2, 13) or name not in RAISES_IN_OLD_TORCH}


def described(value: Any) -> Any:
    """A result without the names of its library."""
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return [described(item) for item in value]
    if hasattr(value, "placements"):
        placements = str(value.placements).replace("dim=", "")
        return tuple(value.shape), value.dtype, placements, described(value.to_local())
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, [round(number, 4) for number in value.flatten().tolist()]
    return value


def both() -> list[tuple[str, Any, Any]]:
    ours = programs(sw, sw.DeviceMesh("cpu", [0, 1]))
    peers = programs(theirs, DeviceMesh("cpu", [0, 1]))
    return [(name, described(ours[name]()), described(peers[name]())) for name in ours]


def test_results_are_torchs(gloo4: ProcessPool) -> None:
    for rank, cases in enumerate(gloo4.run(both, timeout=120)):
        for name, ours, peers in cases:
            assert ours == peers, f"{name} on rank {rank}"


def no_peer() -> None:
    """What torch raises, waits or does nothing sensible for."""
    mesh = sw.DeviceMesh("cpu", [0, 1])
    outside = dist.get_rank() > 1
    assert sw.is_main() is (dist.get_rank() == 0)

    def x(placements: Any) -> sw.DTensor:
        return sw.distribute_tensor(X, mesh, placements)

    for placements in ([sw.Shard(0)], [sw.Replicate()]):
        assert x(placements).sum().item() == (0.0 if outside else 66.0)
        assert bool(x(placements)[1, 1] > 1) is not outside
        assert x(placements).tolist() == ([] if outside else X.tolist())
        assert torch.allclose(x(placements), x(placements))
        assert f"{x(placements).sum():.1f}" == ("0.0" if outside else "66.0")
        assert x(placements).nonzero().shape == ((0, 2) if outside else (11, 2))
        assert x(placements)[x(placements) > 2].shape == ((0,) if outside else (9,))
        assert "f32[4,3]" in repr(x(placements))
        assert all(t.shape == (4, 3) for t in torch._foreach_add([x(placements), x(placements)], 1.0))
        x(placements).squeeze_().unsqueeze_(0).squeeze_(0).add_(1)
    assert sw.DTensor.from_local(X, mesh, [sw.Replicate()], run_check=True).shape == (4, 3)
    assert sw.rand(4, 3, device_mesh=mesh, placements=[sw.Shard(0)]).normal_().shape == (4, 3)
    local = X.clone().requires_grad_()
    sw.DTensor.from_local(local, mesh, [sw.Shard(0)]).sum().backward()
    assert (local.grad is None) is outside
    plain = torch.ones(3, requires_grad=True)
    (x([sw.Shard(0)]) * plain).sum().backward()
    assert plain.grad is not None
    assert plain.grad.tolist() == ([0.0, 0.0, 0.0] if outside else X.sum(0).tolist())
    styles = {"0": sw.parallel.ColwiseParallel(), "1": sw.parallel.RowwiseParallel()}
    model = sw.parallel.parallelize_module(
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3)), mesh, styles
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        out = model(X)
        assert out.shape == ((0,) if outside else (4, 3))
        out.sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_the_rest_does_nothing_outside(gloo4: ProcessPool) -> None:
    gloo4.run(no_peer, timeout=120)
