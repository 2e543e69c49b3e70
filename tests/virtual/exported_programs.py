"""Inference programs that are exported, saved, loaded and run on locals, on any fabric."""

import io
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.capture import captured
from shardwise.fabric.virtual import parts_of
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Layers(nn.Module):
    """A feed-forward with a norm, tensor parallel."""

    def __init__(self, mesh: sw.DeviceMesh) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: Any) -> Any:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def exported(mesh: sw.DeviceMesh) -> Any:
    """An exported program that was saved and loaded, with the function that it was made of."""
    torch.manual_seed(0)
    model = Layers(mesh)
    table = sw.distribute_tensor(torch.rand(8, 12), mesh, [sw.Shard(1)])

    @torch.no_grad()
    def infer(x: Any, rows: Any) -> Any:
        scores = model(x) @ table
        return {"scores": scores, "gathered": scores.redistribute(placements=[sw.Replicate()]), "rows": rows * 2}

    step = captured(infer)
    for seed in range(3):
        step(*arguments(mesh, seed))
    file = io.BytesIO()
    torch.export.save(step.export(model=model, table=table), file)
    file.seek(0)
    return torch.export.load(file), infer


def arguments(mesh: sw.DeviceMesh, seed: int) -> tuple[Any, Any]:
    draw = torch.Generator().manual_seed(seed)
    x = sw.distribute_tensor(torch.rand(4, 8, generator=draw), mesh, [sw.Replicate()])
    return x, sw.distribute_tensor(torch.rand(8, 3, generator=draw), mesh, [sw.Shard(0)])


def locals_of(tensor: Any) -> list[torch.Tensor]:
    return list(parts_of(tensor._local_tensor))


def compare(mesh: sw.DeviceMesh) -> list[str]:
    """Run the loaded program on new values. Returns the names of its buffers and the targets of its nodes."""
    loaded, infer = exported(mesh)
    run = loaded.module()
    for seed in range(5, 8):
        given = arguments(mesh, seed)
        found = run(*(part for tensor in given for part in locals_of(tensor)))
        for name, wanted in infer(*given).items():
            parts = locals_of(wanted)
            ours = found[name] if isinstance(found[name], list) else [found[name]]
            assert len(ours) == len(parts)
            assert all(map(torch.equal, ours, parts)), name
    nodes = [str(node.target) for node in loaded.graph.nodes if node.op == "call_function"]
    return [*loaded.graph_signature.buffers, *nodes]
