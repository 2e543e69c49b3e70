"""Plans with local outputs on virtual ranks, compiled against not compiled: values and gradients.

    python -m tests.virtual.compiled_locals --backend inductor

A program of its own, because torch's compiler does not trace the run-time type checks of the tests.
"""

import argparse
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

PLANS: dict[str, dict[str, Any]] = {
    "columns": {"0": ColwiseParallel(use_local_output=True)},
    "rows": {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=True)},
    "sequence": {"0": SequenceParallel(use_local_output=True)},
}


def model_of(plan: str, mesh: sw.DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    first = nn.LayerNorm(8) if plan == "sequence" else nn.Linear(8, 8)
    layers = [first] if plan == "sequence" else [first, nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.5)]
    return parallelize_module(nn.Sequential(*(layers[:1] if plan == "columns" else layers)), mesh, PLANS[plan])


def parts(tensor: Any) -> list[torch.Tensor]:
    if isinstance(tensor, sw.DTensor):
        tensor = tensor.full_tensor()
    return [part.detach() for part in getattr(tensor, "tensors", [tensor])]


def difference(plan: str, backend: str, mesh: sw.DeviceMesh) -> float:
    """The largest difference between the compiled plan and the plan, of the result and all gradients."""
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    given = sw.distribute_tensor(x, mesh, [sw.Shard(1)]) if plan == "sequence" else x
    outcomes: list[list[torch.Tensor]] = []
    for compiled in (False, True):
        model = model_of(plan, mesh)
        if backend == "inductor":  # whose random numbers are its own
            model.eval()
        run = torch.compile(model, backend=backend) if compiled else model
        torch.manual_seed(1)
        result = run(given)
        assert isinstance(result, sw.RankTensor), (compiled, type(result))
        (result * result).sum().backward()
        held = [result, *[parameter.grad for parameter in model.parameters()]]
        outcomes.append([part for tensor in held for part in parts(tensor)])
    return max((a - b).abs().max().item() for a, b in zip(*outcomes, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    options = parser.parse_args()
    mesh = sw.init_device_mesh("cpu", (4,))
    for plan in options.plans:
        found = difference(plan, options.backend, mesh)
        assert found < 1e-5, (plan, found)
        print(f"{plan}, {options.backend}: differs by {found:.1e} at most")


if __name__ == "__main__":
    main()
