"""Experts on real processes: ten steps of training as on one device, and dispatch with and without a capacity."""

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from bench.counting import calls
from tests import expert_slots

CASES = (
    ((4,), ("ep",), 8, 2, None),
    ((4,), ("ep",), 6, 1, None),
    ((2, 2), ("dp", "ep"), 6, 2, None),
    ((2, 2), ("ep", "tp"), 8, 8, None),
    ((4,), ("ep",), 6, 2, 5),
)
TOKENS, WIDTH = 32, 8


def given(experts: int) -> list[torch.Tensor]:
    """Tokens, the weights of a router and of experts."""
    torch.manual_seed(experts)
    sizes = ((TOKENS, WIDTH), (experts, WIDTH), (experts, WIDTH, 16), (experts, 16, WIDTH))
    return [torch.randn(size) / WIDTH**0.5 for size in sizes]


def train(tensors: list[Any], choices: int, capacity: int | None, groups: int | None) -> list[Any]:
    """Ten steps: the losses and the parameters."""
    x, *parameters = tensors
    router, up, down = parameters = [p.requires_grad_() for p in parameters]
    optimizer, losses = torch.optim.SGD(parameters, lr=0.5), []
    for turn in range(10):
        weights, ids = F.linear(x, router).softmax(-1).topk(choices)
        early = weights if turn % 2 else None
        rows, back = sw.moe.dispatch(x, ids, len(up), weights=early, capacity=capacity, groups=groups)
        out = F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=back.offs)), down, offs=back.offs)
        loss = (x + back(out, None if turn % 2 else weights) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + [parameter.detach() for parameter in parameters]


def on_ranks() -> list[list[torch.Tensor]]:
    """All cases on this world."""
    found = []
    for shape, names, experts, choices, capacity in CASES:
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=names)
        layouts: list[list[Any]] = [[], [], [], []]
        for name in names:
            rows = {"dp": (0, None, None, None), "ep": (0, None, 0, 0), "tp": (None, None, 2, 1)}[name]
            for layout, dim in zip(layouts, rows, strict=True):
                layout.append(sw.Replicate() if dim is None else sw.Shard(dim))
        tensors = [sw.distribute_tensor(t, mesh, p) for t, p in zip(given(experts), layouts, strict=True)]
        found.append([value.full_tensor() for value in train(tensors, choices, capacity, None)])
    return found


def test_training_is_that_of_one_device(gloo4: Any) -> None:
    wanted = [
        train(given(experts), choices, capacity, 4 if capacity else None) for *_, experts, choices, capacity in CASES
    ]
    for found in gloo4.run(on_ranks, timeout=120):
        for mine, theirs in zip(found, wanted, strict=True):
            for value, plain in zip(mine, theirs, strict=True):
                torch.testing.assert_close(value, plain, rtol=1e-4, atol=1e-5)


READS = ("cpu", "item", "tolist", "__bool__", "__int__", "__index__", "__float__")


def reads_of_a_layer(choices: int, capacity: int | None) -> int:
    """How often the host reads values of tensors in a layer, forward and backward."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    x, router, up, down = (sw.distribute_tensor(t, mesh, [sw.Shard(0)]).requires_grad_() for t in given(6))
    weights, ids = F.linear(x, router).softmax(-1).topk(choices)
    gradient = sw.ones(TOKENS, WIDTH, device_mesh=mesh, placements=[sw.Shard(0)])
    found, saved = 0, {name: getattr(torch.Tensor, name) for name in READS}

    def counting(read: Any) -> Any:
        def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal found
            found += 1
            return read(tensor, *args, **kwargs)

        return counted

    def step() -> None:
        rows, back = sw.moe.dispatch(x, ids, 6, capacity=capacity)
        out = F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=back.offs)), down, offs=back.offs)
        back(out, weights).backward(gradient, retain_graph=True)

    step()  # what is decided once may read
    for name, read in saved.items():
        setattr(torch.Tensor, name, counting(read))
    try:
        step()
    finally:
        for name, read in saved.items():
            setattr(torch.Tensor, name, read)
    return found


def reads() -> list[int]:
    """With one and two choices, without and with a capacity."""
    return [reads_of_a_layer(choices, capacity) for choices in (1, 2) for capacity in (None, 5)]


def test_the_host_waits_once_for_a_layer_and_never_with_a_capacity(gloo4: Any) -> None:
    for found in gloo4.run(reads, timeout=60):
        assert found == [1, 0, 1, 0]


def compiled() -> list[bool]:
    """Layers with a capacity as one graph, beside eager ones."""
    return [
        same
        for shape, names in expert_slots.CASES
        for same in expert_slots.compiled_beside_eager(shape, names, uneven=len(names) == 1)
    ]


def test_with_a_capacity_a_layer_is_one_graph(gloo4: Any) -> None:
    for found in gloo4.run(compiled, timeout=240):
        assert all(found)


class Operators(TorchDispatchMode):
    """Counts operators on plain tensors, those of locals among them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(issubclass(kind, sw.DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


def work_of_a_layer(choices: int, early: bool) -> tuple[int, list[str], int, int]:
    """Collectives of dispatch and back, forward and backward, the nodes of autograd, operators, calls of Python."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    x, router, *_ = (sw.distribute_tensor(t, mesh, [sw.Shard(0)]).requires_grad_() for t in given(8))
    weights, ids = F.linear(x, router).softmax(-1).topk(choices)
    weights, gradient = weights.detach().requires_grad_(), x.detach()

    def step() -> list[str]:
        rows, back = sw.moe.dispatch(x, ids, 8, weights=weights if early else None)
        y = back(rows) if early else back(rows, weights)
        node, found = y.grad_fn, []
        while node is not None:
            found.append(node.name())
            node = node.next_functions[0][0] if node.next_functions else None
        y.backward(gradient)
        return found

    step()
    with Operators() as operators:
        nodes = step()
    with sw.debug.CommDebugMode() as comm:
        step()
    return comm.get_total_counts(), nodes, operators.count, calls(step)


def works() -> list[tuple[int, list[str], int, int]]:
    """With one choice and with two, weights given to `dispatch` and to `back`."""
    return [work_of_a_layer(choices, early) for choices in (1, 2) for early in (True, False)]


def test_what_a_layer_costs(gloo4: Any) -> None:
    """Collectives: counts, tokens, back, and two of gradients, as by hand; weights given to `back` take two more.

    Operators and calls of Python are those of 2026-11-18; what takes more is slower.
    """
    nodes = ["WeightedReturnBackward", "SendTokensBackward", "torch::autograd::AccumulateGrad"]
    exchanges, most = (5, 5, 5, 7), ((48, 380), (48, 370), (88, 470), (92, 510))
    for found in gloo4.run(works, timeout=60):
        assert [(collectives, names) for collectives, names, *_ in found] == [(count, nodes) for count in exchanges]
        work = [(operators, calls) for *_, operators, calls in found]
        assert all(mine <= bound for pair in zip(work, most, strict=True) for mine, bound in zip(*pair, strict=True)), (
            work
        )
