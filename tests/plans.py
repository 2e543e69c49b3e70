"""The example's transformer spread as people do it for torch, in either library: plain tensors in and out.

Each data parallel rank has its own batch and loss. What the library is, is an argument; none is imported here but ours.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

import shardwise as sw
import shardwise.parallel


class Library(NamedTuple):
    """Where the names of a library are: placements and meshes, styles, `fully_shard`, `replicate`."""

    tensors: Any
    parallel: Any
    fully_shard: Any
    replicate: Any


OURS = Library(sw, sw.parallel, sw.fully_shard, sw.replicate)


def styles_of(plan: str, library: Library) -> dict[str, Any]:
    """The styles of "tp", "tp+sp" and "tp+sp, loss parallel"."""
    parallel, tensors = library.parallel, library.tensors
    colwise, rowwise, whole = parallel.ColwiseParallel, parallel.RowwiseParallel, tensors.Replicate()
    if plan == "tp":
        before, rows = {}, rowwise()
        outside = {"embedding": rowwise(input_layouts=whole), "head": colwise(output_layouts=whole)}
    else:
        part, sequence = tensors.Shard(1), parallel.SequenceParallel()
        rows = rowwise(output_layouts=part)
        before = {
            "blocks.*.*_norm": sequence,
            "norm": sequence,
            "blocks.*.attention": parallel.PrepareModuleInput(
                input_layouts=(part, None, None), desired_input_layouts=(whole, None, None)
            ),
            "blocks.*.feed_forward": parallel.PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
        }
        last = {"output_layouts": whole}
        if "loss" in plan:
            last = {"output_layouts": tensors.Shard(-1), "use_local_output": False}
        outside = {
            "embedding": rowwise(input_layouts=whole, output_layouts=part),
            "head": colwise(input_layouts=part, **last),
        }
    inside = {
        "blocks.*.attention.[qkv]*": colwise(),
        "blocks.*.attention.out": rows,
        "blocks.*.feed_forward.gate": colwise(),
        "blocks.*.feed_forward.up": colwise(),
        "blocks.*.feed_forward.down": rows,
    }
    return {**outside, **before, **inside}


TENSOR_PARALLEL = {"tp": "tp", "tp+sp": "tp+sp", "fsdp-tp": "tp+sp", "ddp-tp": "tp"}  # which styles a plan has


def spread_plain(plan: str, model: Any, mesh: Any, library: Library = OURS, **options: Any) -> nn.Module:
    """A plan of the example, for plain batches. `mesh` has the axes that the example gives to the plan."""
    data = mesh
    if plan in TENSOR_PARALLEL:
        alone = len(mesh.shape) == 1
        styles = styles_of(TENSOR_PARALLEL[plan], library)
        library.parallel.parallelize_module(model, mesh if alone else mesh["tp"], styles)
        data = None if alone else mesh["dp"]
    if plan.startswith("fsdp"):
        for module in (*model.blocks, model):
            library.fully_shard(module, mesh=data, **options)
    elif plan.startswith("ddp"):
        library.replicate(model, data, **options)
    return model


def own_rows(mesh: sw.DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Gives each rank the rows of a batch that are its own; ranks along tp have the same."""
    names = mesh.mesh_dim_names or ()
    data = [axis for axis, name in enumerate(names) if name != "tp"]

    def number(coordinate: Any) -> int:
        found = 0
        for axis in data:
            found = found * mesh.shape[axis] + int(coordinate[axis])
        return found

    parts = 1
    for axis in data:
        parts *= mesh.shape[axis]
    if mesh.fabric == "virtual":
        numbers = [number(coordinate) for coordinate in mesh.coordinates.tolist()]
        return lambda batch: sw.RankTensor([batch.chunk(parts)[at] for at in numbers])
    own = number(mesh.get_coordinate())
    return lambda batch: batch.chunk(parts)[own]


class Adapted(nn.Module):
    """A layer, with an adapter of low rank beside it. peft uses these names."""

    def __init__(self, base_layer: Any, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))
