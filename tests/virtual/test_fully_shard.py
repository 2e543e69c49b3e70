"""fully_shard on virtual ranks: losses and gradients of one device, communication, memory."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.parallel import CPUOffloadPolicy, MixedPrecisionPolicy, register_fsdp_forward_method
from shardwise.parallel.data_parallel.schedule import thread_state
from tests.largest import Largest
from tests.transformer import (
    WIDTH,
    Transformer,
    assert_same,
    assert_trains_as_one_device,
    batch,
    loss_of,
    shard_all,
    tensor_parallel,
    whole,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def line(ranks: int) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))


def plane(*shape: int, names: tuple[str, ...] = ("dp", "tp")) -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", shape, mesh_dim_names=names)


def ranks_batch(parts: torch.Tensor, mesh: sw.DeviceMesh) -> sw.RankTensor:
    """Each rank's rows of a batch; ranks that differ along other axes than those of `mesh` get the same."""
    chunks = parts.chunk(mesh.size())
    numbers = [int(torch.arange(mesh.size()).reshape(mesh.shape)[tuple(row)]) for row in mesh.coordinates.tolist()]
    return sw.RankTensor([chunks[number] for number in numbers])


def counts(comm: CommDebugMode) -> Counter[str]:
    return Counter({str(op).rpartition(".")[2]: n for op, n in comm.get_comm_counts().items()})


def tensor_parallel_inside(model: Transformer, mesh: sw.DeviceMesh) -> None:
    """The feed-forward part split by hand, between plain tensors."""
    for block in model.blocks:
        for layer, weight, bias in ((block.up, S0, S0), (block.down, S1, R)):
            layer.weight = nn.Parameter(sw.distribute_tensor(layer.weight.detach(), mesh, [weight]))
            layer.bias = nn.Parameter(sw.distribute_tensor(layer.bias.detach(), mesh, [bias]))
        block.up.register_forward_pre_hook(lambda _, args: (sw.DTensor.from_local(args[0], mesh, [R]),))
        block.down.register_forward_hook(lambda _, args, out: out.redistribute(placements=[R]).to_local())


# ---------------------------------------------------------------- the numbers of one device


@pytest.mark.parametrize(("shape", "tied"), [((2,), True), ((4,), False), ((2, 2), False)])
def test_a_global_batch_trains_as_on_one_device_dropout_included(shape: tuple[int, ...], tied: bool) -> None:
    mesh = plane(*shape, names=("replicas", "dp")[-len(shape) :])
    assert_trains_as_one_device(
        lambda model: shard_all(model, mesh),
        lambda tensor: sw.distribute_tensor(tensor, mesh, [S0] * mesh.ndim),
        dropout=0.2,
        tied=tied,
        steps=10 if shape == (4,) else 3,
    )


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_batches_of_ranks_train_on_the_mean_of_their_losses(shape: tuple[int, ...]) -> None:
    mesh = plane(*shape, names=("replicas", "dp")[-len(shape) :])
    place = lambda tensor: ranks_batch(tensor, mesh)  # noqa: E731
    assert_trains_as_one_device(
        lambda model: shard_all(model, mesh), place, dropout=0.0, steps=5 if shape == (4,) else 3
    )


@pytest.mark.parametrize("shape", [(2, 2), (2, 4)])
def test_with_tensor_parallelism_and_a_global_batch(shape: tuple[int, int]) -> None:
    world = plane(*shape)
    assert_trains_as_one_device(
        lambda model: shard_all(model, world["dp"]),
        lambda tensor: sw.distribute_tensor(tensor, world, [S0, R]),
        dropout=0.2,
        steps=5 if shape == (2, 2) else 2,
        prepare=lambda model: tensor_parallel(model, world["tp"]),
    )


def test_with_tensor_parallelism_and_batches_of_ranks() -> None:
    world = plane(2, 2)
    assert_trains_as_one_device(
        lambda model: shard_all(model, world["dp"]),
        lambda tensor: ranks_batch(tensor, world["dp"]),
        dropout=0.0,
        steps=3,
        prepare=lambda model: tensor_parallel_inside(model, world["tp"]),
    )


def test_stored_parameters_say_how_both_axes_split_them() -> None:
    world = plane(2, 2)
    for size, split in ((8, [2, 2, 2, 2]), (5, [2, 1, 1, 1]), (3, [1, 1, 1, 0]), (1, [1, 0, 0, 0])):
        layer = nn.Linear(3, size, bias=False)
        weight = layer.weight.detach().clone()
        layer.weight = nn.Parameter(sw.distribute_tensor(weight, world["tp"], [S0]))
        sw.fully_shard(layer, world["dp"])
        stored: Any = layer.weight
        assert stored.spec.layout == "dp:S0 tp:S0 order 0:tp>dp"
        assert torch.equal(stored.full_tensor(), weight)
        held = {c: t.shape[0] for c, t in zip([(0, 0), (0, 1), (1, 0), (1, 1)], stored.to_local().tensors, strict=True)}
        assert [held[0, 0], held[1, 0], held[0, 1], held[1, 1]] == split
        layer(sw.ones(2, 3, device_mesh=world)).sum().backward()
        assert stored.grad.spec is stored.spec
        assert torch.equal(stored.grad.full_tensor(), torch.full((size, 3), 2.0))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_dim_to_shard_can_be_chosen_and_may_be_short(dim: int) -> None:
    mesh = line(4)
    torch.manual_seed(0)
    reference = nn.Linear(3, 5)
    layer = copy.deepcopy(reference)
    sw.fully_shard(layer, mesh, shard_placement_fn=lambda p: Shard(dim) if p.dim() == 2 else None)
    assert layer.weight.spec.layout == f"dp:S{dim % 2}"  # pyright: ignore[reportAttributeAccessIssue]
    x = torch.randn(8, 3)
    reference(x).pow(2).sum().backward()
    layer(sw.distribute_tensor(x, mesh, [S0])).pow(2).sum().backward()
    assert_same(layer, reference, lambda parameter: parameter.grad, 1e-4)


@pytest.mark.parametrize("shape", [(1,), (1, 2), (2, 1)])
def test_axes_of_one_rank_and_empty_parameters(shape: tuple[int, ...]) -> None:
    mesh = plane(*shape, names=("replicas", "dp")[-len(shape) :])
    reference = nn.Linear(3, 5)
    reference.nothing = nn.Parameter(torch.zeros(0, 3))
    layer = copy.deepcopy(reference)
    sw.fully_shard(layer, mesh)
    x = torch.randn(4, 3)
    for _ in range(2):
        (reference(x).pow(2).sum() + reference.nothing.sum()).backward()
        layer(sw.distribute_tensor(x, mesh, [S0] * mesh.ndim)).pow(2).sum().backward()
    layer.nothing.grad = torch.zeros_like(layer.nothing)
    assert_same(layer, reference, lambda parameter: parameter.grad, 1e-4)


def test_gradients_that_are_no_sums_are_counted_once() -> None:
    """A loss that does not depend on the batch has a replicated gradient, one that looks rows up a sharded one."""
    mesh = line(2)
    layer = sw.fully_shard(nn.Linear(2, 4, bias=False), mesh)
    weight = layer.weight.full_tensor()
    x = sw.ones(4, 2, device_mesh=mesh, placements=[S0])

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 4, bias=False)

        def forward(self, x: Any) -> Any:
            scaled = self.layer.weight.redistribute(placements=[S0])  # pyright: ignore[reportCallIssue]
            return (self.layer.weight**2).sum() + 0 * x.sum(), (scaled**2).sum()

    odd = Odd()
    odd.layer.weight = nn.Parameter(weight.clone())
    sw.fully_shard(odd, mesh)
    first, second = odd(x)
    first.backward()
    torch.testing.assert_close(whole(odd.layer.weight.grad), 2 * weight)
    _, second = odd(x)
    second.backward()
    torch.testing.assert_close(whole(odd.layer.weight.grad), 4 * weight)


# ---------------------------------------------------------------- communication


@pytest.mark.parametrize("keep", [False, True])
def test_collectives_of_a_step(keep: bool) -> None:
    mesh = line(4)
    blocks = 3
    model = shard_all(Transformer(blocks), mesh, **({"reshard_after_forward": False} if keep else {}))
    tokens, targets = (ranks_batch(t, mesh) for t in batch(0))
    comm = CommDebugMode()
    for _ in range(2):  # the first step has no order to prefetch by; the counts are the same
        with comm:
            loss = loss_of(model(tokens), targets)
            assert counts(comm) == {"all_gather_into_tensor": blocks + 1}
            loss.backward()
        gathers = blocks + 1 if keep else 2 * blocks + 1
        assert counts(comm) == {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": blocks + 1}
    padded = sum(-(-p.shape[0] // 4) * 4 * p[0].numel() * 4 for p in Transformer(blocks).parameters())
    root = sum(-(-p.shape[0] // 4) * 4 * p[0].numel() * 4 for p in Transformer(0).parameters())
    assert comm.received_bytes == (padded * (2 if keep else 3) - (0 if keep else root)) * 3 // 4


def test_accumulating_without_communication() -> None:
    mesh = line(2)
    torch.manual_seed(0)
    reference = Transformer().double()
    model = shard_all(copy.deepcopy(reference), mesh)
    for step in range(3):
        tokens, targets = batch(step)
        loss_of(reference(tokens), targets).backward()
        place = lambda t: ranks_batch(t, mesh)  # noqa: E731
        with CommDebugMode() as comm:
            if step < 2:
                with model.no_sync():
                    loss_of(model(place(tokens)), place(targets)).backward()
                assert counts(comm)["reduce_scatter_tensor"] == 0
                assert all(parameter.grad is None for parameter in model.parameters())
            else:
                loss_of(model(place(tokens)), place(targets)).backward()
                assert counts(comm)["reduce_scatter_tensor"] == 3
    assert_same(model, reference, lambda parameter: parameter.grad)
    tokens, targets = batch(3)  # and once more with reduction: the shards of gradients add up
    loss_of(reference(tokens), targets).backward()
    loss_of(model(ranks_batch(tokens, mesh)), ranks_batch(targets, mesh)).backward()
    assert_same(model, reference, lambda parameter: parameter.grad)


def test_parameters_kept_over_microbatches_are_gathered_once() -> None:
    mesh = line(2)
    model = shard_all(Transformer(), mesh)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    tokens, targets = (ranks_batch(t, mesh) for t in batch(0))
    with CommDebugMode() as comm:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            loss_of(model(tokens), targets).backward()
    assert counts(comm) == {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 3}


def test_replicas_may_wait_with_adding_up() -> None:
    mesh = plane(2, 2, names=("replicas", "dp"))
    torch.manual_seed(0)
    reference = Transformer().double()
    model = shard_all(copy.deepcopy(reference), mesh)
    for step in range(2):
        tokens, targets = batch(step)
        loss_of(reference(tokens), targets).backward()
        model.set_requires_all_reduce(step == 1)
        with CommDebugMode() as comm:
            loss_of(model(ranks_batch(tokens, mesh)), ranks_batch(targets, mesh)).backward()
        assert counts(comm)["reduce_scatter_tensor"] == 3
        assert counts(comm)["all_reduce"] == 3 * step
    assert_same(model, reference, lambda parameter: parameter.grad)


def test_the_next_module_is_gathered_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = line(2)
    model = shard_all(Transformer(3), mesh)
    names = {id(module._state): name or "root" for name, module in model.named_modules() if hasattr(module, "_state")}
    said: list[str] = []
    for state in model._states():
        name = names[id(state)]
        group = state.groups[0]

        def launch(source: Any, name: str = name, original: Any = group.launch) -> Any:
            said.append(f"gather {name}")
            return original(source)

        monkeypatch.setattr(group, "launch", launch)
    for name, module in model.named_modules():
        if hasattr(module, "_state"):
            module.register_forward_pre_hook(lambda *_, name=name: said.append(f"run {name or 'root'}"))
    tokens, targets = (ranks_batch(t, mesh) for t in batch(0))
    loss_of(model(tokens), targets).backward()
    said.clear()
    loss = loss_of(model(tokens), targets)
    assert said == [
        "gather root", "gather blocks.0", "run root", "gather blocks.1", "run blocks.0", "gather blocks.2",
        "run blocks.1", "run blocks.2",
    ]  # fmt: skip
    said.clear()
    loss.backward()
    assert said == ["gather blocks.2", "gather blocks.1", "gather blocks.0"]


# ---------------------------------------------------------------- memory


def gathered_bytes(model: Any) -> int:
    """The bytes of gathered parameters on one rank."""
    copies = [group.current for state in model._states() for group in state.groups]
    tensors = [tensor for copy in copies if copy is not None and copy.tensors is not None for tensor in copy.tensors]
    tensors += [copy.part._local_tensor for copy in copies if copy is not None and copy.part is not None]
    return sum(tensor.tensors[0].untyped_storage().nbytes() for tensor in tensors)


def test_gathered_parameters_are_freed_when_a_module_is_through() -> None:
    mesh = line(2)
    model = shard_all(Transformer(3), mesh)
    root = sum(p.numel() * 4 for p in Transformer(0).parameters())
    block = sum(p.numel() * 4 for p in Transformer(1).blocks.parameters())
    seen: list[int] = []
    for one in model.blocks:
        one.register_forward_hook(lambda *_: seen.append(gathered_bytes(model)))
    tokens, targets = (ranks_batch(t, mesh) for t in batch(0))
    for _ in range(2):
        seen.clear()
        loss = loss_of(model(tokens), targets)
        # the hook of a user runs after ours, so this block is freed; one may be in flight, in a buffer of its own
        assert seen == [root] * 3
        assert gathered_bytes(model) == root
        loss.backward()
        assert gathered_bytes(model) == 0
    model.blocks[0].unshard()
    assert gathered_bytes(model) == block
    assert isinstance(model.blocks[0].up.weight, sw.RankTensor)
    model.blocks[0].reshard()
    assert gathered_bytes(model) == 0
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    assert torch.equal(model.blocks[0].norm1.weight.tensors[1], torch.ones(WIDTH))
    with torch.no_grad():
        model(tokens)
    assert gathered_bytes(model) == 0
    assert isinstance(model.blocks[0].up.weight, sw.DTensor)


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.parametrize("named", [True, False])
def test_groups_of_ranks_keep_the_parameters_until_backward(shape: tuple[int, ...], named: bool) -> None:
    """Forward gathers over all sharding ranks, backward over groups of two, from a half that each rank keeps."""
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "dp")[-len(shape) :] if named else None)
    reference = Transformer(3)
    model = copy.deepcopy(reference)
    for block in model.blocks:
        sw.fully_shard(block, mesh, reshard_after_forward=2)
    sw.fully_shard(model, mesh)
    block = sum(p.numel() * 4 for p in reference.blocks[0].parameters())
    root = sum(p.numel() * 4 for p in Transformer(0).parameters())
    padded = sum(-(-p.shape[0] // 4) * p[0].numel() * 4 * 4 for p in Transformer(0).parameters())
    for step in range(2):
        tokens, targets = (sw.distribute_tensor(t, mesh, [S0] * mesh.ndim) for t in batch(step))
        with sw.explain() as forward:
            loss = loss_of(model(tokens), targets)
        assert gathered_bytes(model) == root + 3 * block // 2
        with sw.explain() as backward:
            loss.backward()
        assert gathered_bytes(model) == 0
        loss_of(reference(batch(step)[0]), batch(step)[1]).backward()
        assert_same(model, reference, lambda parameter: parameter.grad, 1e-4)
        assert forward.by_collective["all_gather"].received == (padded + 3 * block) * 3 // 4
        assert backward.by_collective["all_gather"].received == 3 * block // 2
        with torch.no_grad():
            for parameter in (*reference.parameters(), *model.parameters()):
                parameter.mul_(0.9)
                parameter.grad = None


def test_a_captured_step_with_groups_of_ranks_is_the_eager_one() -> None:
    mesh = line(4)
    torch.manual_seed(0)
    models = [Transformer(2)]
    models.append(copy.deepcopy(models[0]))
    for model in models:
        for block in model.blocks:
            sw.fully_shard(block, mesh, reshard_after_forward=2)
        sw.fully_shard(model, mesh)
    steps = [functools.partial(trained_once, model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    steps[1] = sw.captured(steps[1])
    for number in range(4):
        given = [sw.distribute_tensor(t, mesh, [S0]) for t in batch(number)]
        losses = [step(*given).full_tensor() for step in steps]
        assert torch.equal(*losses)
    for eager, captured in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(eager.full_tensor(), captured.full_tensor())


def trained_once(model: Any, optimizer: Any, tokens: Any, targets: Any) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model(tokens), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_a_module_on_the_meta_device_is_made_shard_by_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.rng.cpu_stream.BLOCK", 256)  # numbers are drawn in blocks of several ranks
    mesh = line(4)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        sw.fully_shard(layer, mesh)
    sw.fully_shard(model, mesh)
    torch.manual_seed(3)
    with Largest() as largest:
        model.to_empty(device="cpu")
        for layer in model:
            layer.reset_parameters()  # pyright: ignore[reportCallIssue]
    assert 0 < largest.elements <= 64 * 64 // 4
    torch.manual_seed(3)
    with torch.device("meta"):
        reference = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    reference.to_empty(device="cpu")
    for layer in reference:
        layer.reset_parameters()  # pyright: ignore[reportCallIssue]
    assert_same(model, reference, lambda parameter: parameter.detach(), 0)
    x = torch.randn(8, 64)
    torch.testing.assert_close(model(sw.distribute_tensor(x, mesh, [S0])).full_tensor(), reference(x))


# ---------------------------------------------------------------- dtypes


def test_mixed_precision() -> None:
    mesh = line(2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    layer = sw.fully_shard(nn.Linear(4, 4), mesh, mp_policy=policy)
    inside: list[torch.dtype] = []
    layer.register_forward_pre_hook(lambda module, args: inside.extend([module.weight.dtype, args[0].dtype]))
    with CommDebugMode() as comm:
        out = layer(sw.ones(2, 4, device_mesh=mesh, placements=[S0]))
        assert comm.received_bytes == 20 * 2 // 2
        out.sum().backward()
    assert comm.received_bytes == 20 * 2 // 2 + 20 * 4 // 2
    assert inside == [torch.bfloat16] * 2
    assert (out.dtype, layer.weight.dtype, layer.weight.grad.dtype) == (torch.float32,) * 3
    assert torch.equal(whole(layer.weight.grad), torch.full((4, 4), 2.0))
    with layer.no_sync():
        layer(sw.ones(2, 4, device_mesh=mesh, placements=[S0])).sum().backward()
    layer(sw.ones(2, 4, device_mesh=mesh, placements=[S0])).sum().backward()
    assert torch.equal(whole(layer.weight.grad), torch.full((4, 4), 6.0))


def test_parameters_of_two_dtypes_and_a_later_conversion() -> None:
    mesh = line(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    sw.fully_shard(model, mesh)
    x = sw.ones(2, 4, device_mesh=mesh, placements=[S0])
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 2
    model.double()
    model(x.double()).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}  # pyright: ignore[reportOptionalMemberAccess]


# ---------------------------------------------------------------- what models do


class Model(nn.Module):
    """A module of two layers, with a forward given by the test."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.run = run
        self.is_inside = False

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def calling_itself(model: Any, x: Any) -> Any:
    if model.is_inside:
        return model.first(x)
    model.is_inside = True
    try:
        return model.second(model(x * 2).tanh()) + model.first(x)
    finally:
        model.is_inside = False


def keeping_products(function: Callable[..., Any], x: Any) -> Any:
    """A checkpoint that keeps what matrix products gave."""
    kept = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    return checkpoint(
        function, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(kept)
    )  # fmt: skip


RUNS: dict[str, Callable[[Any, Any], Any]] = {
    "one after the other": lambda m, x: m.second(m.first(x).tanh()),
    "one is unused": lambda m, x: m.first(x),
    "one is called twice": lambda m, x: m.second(m.first(m.first(x).tanh()).tanh()),
    "checkpoint inside": lambda m, x: checkpoint(lambda y: m.second(m.first(y).tanh()), x, use_reentrant=False),
    "reentrant checkpoint inside": lambda m, x: checkpoint(
        lambda y: m.second(m.first(y).tanh()), x, use_reentrant=True
    ),
    "checkpointed layers": lambda m, x: checkpoint(
        m.second, checkpoint(m.first, x, use_reentrant=False).tanh(), use_reentrant=False
    ),
    "checkpointed layers, reentrant": lambda m, x: checkpoint(
        m.second, checkpoint(m.first, x, use_reentrant=True).tanh(), use_reentrant=True
    ),
    "selective checkpoint inside": lambda m, x: keeping_products(lambda y: m.second(m.first(y).tanh()), x),
    "selectively checkpointed layers": lambda m, x: keeping_products(m.second, keeping_products(m.first, x).tanh()),
    "outputs in a dict": lambda m, x: {"out": m.second(m.first(x)), "more": [m.first(x)]},
    "it calls itself": lambda m, x: calling_itself(m, x),
    "a result without gradient": lambda m, x: m.second(m.first(x).detach()),
}


def summed(result: Any) -> Any:
    tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return sum((t.pow(2).sum() for t in tensors[1:]), tensors[0].pow(2).sum())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("frozen", ["", "first", "second.weight"])
def test_what_models_do(run: str, frozen: str) -> None:
    mesh = line(2)
    torch.manual_seed(0)
    reference = Model(RUNS[run]).double()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    reference.register_buffer("nothing", torch.zeros(1))
    model = copy.deepcopy(reference)
    sw.fully_shard(model.first, mesh)
    sw.fully_shard(model.second, mesh)
    sw.fully_shard(model, mesh)
    alone = copy.deepcopy(reference)
    sw.fully_shard(alone, mesh)
    for step in range(3):
        x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        reference.zero_grad()
        summed(reference(x.clone().requires_grad_())).backward()
        for one in (model, alone):
            one.zero_grad()
            global_batch = sw.distribute_tensor(x, mesh, [S0]).requires_grad_()
            summed(one(global_batch)).backward()
            assert_same(one, reference, lambda parameter: parameter.grad)
            assert gathered_bytes(one) == 0
            one.zero_grad()
            (summed(one(ranks_batch(x, mesh).requires_grad_())) * 2).sum().backward()
            assert_same(one, reference, lambda parameter: parameter.grad)


@dataclasses.dataclass
class Result:
    out: Any


class Hidden:
    """An object that nobody can look into."""

    def __init__(self, out: Any) -> None:
        self._out = out

    def reveal(self) -> Any:
        return self._out


USES: dict[str, Callable[[Any, Any], Any]] = {
    "two forwards, one backward": lambda m, x: (summed(m(x)) + summed(m(x * 2))).backward(),
    "two forwards, two backwards": lambda m, x: [loss.backward() for loss in [summed(m(x)), summed(m(x * 2))]],
    "backward twice": lambda m, x: [loss.backward(retain_graph=True) for loss in [summed(m(x))] * 2],
    "a forward without a backward": lambda m, x: (m(x), summed(m(x)).backward()),
    "backward on another thread": lambda m, x: in_thread(summed(m(x)).backward),
    "gradients asked for": lambda m, x: (torch.autograd.grad(summed(m(x)), [x]), summed(m(x)).backward()),
    "parts on their own": lambda m, x: summed(m.second(m.first(x))).backward(),
}


def in_thread(run: Callable[[], None]) -> None:
    failed: list[BaseException] = []
    thread = threading.Thread(target=lambda: _recording(run, failed))
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _recording(run: Callable[[], None], failed: list[BaseException]) -> None:
    try:
        run()
    except BaseException as error:
        failed.append(error)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("keep", [None, False, 2])
def test_how_models_are_used(use: str, keep: bool | int | None) -> None:
    mesh = line(4)
    torch.manual_seed(0)
    reference = Model(RUNS["one after the other"]).double()
    model = copy.deepcopy(reference)
    for module in (model.first, model.second, model):
        sw.fully_shard(module, mesh, reshard_after_forward=keep)
    for step in range(2):
        x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        USES[use](reference, x.clone().requires_grad_())
        USES[use](model, sw.distribute_tensor(x, mesh, [S0]).requires_grad_())
        assert_same(model, reference, lambda parameter: parameter.grad)
        assert gathered_bytes(model) == 0
        with torch.no_grad():
            for parameter in (*reference.parameters(), *model.parameters()):
                parameter.mul_(0.9)


def test_another_method_may_be_as_forward() -> None:
    mesh = line(2)
    torch.manual_seed(0)
    reference = Model(RUNS["one after the other"]).double()
    model = copy.deepcopy(reference)
    sw.fully_shard(model, mesh)

    def both(module: Any, x: Any) -> Any:
        return module(x) + module.first(x)

    for module in (reference, model):
        module.both = functools.partial(both, module)
    register_fsdp_forward_method(model, "both")
    x = torch.randn(4, 4, dtype=torch.float64)
    reference.both(x).pow(2).sum().backward()
    with CommDebugMode() as comm:
        model.both(sw.distribute_tensor(x, mesh, [S0])).pow(2).sum().backward()
    assert counts(comm) == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
    assert_same(model, reference, lambda parameter: parameter.grad)
    model.both = lambda x: 1 / 0
    register_fsdp_forward_method(model, "both")
    with pytest.raises(ZeroDivisionError):
        model.both(x)
    assert gathered_bytes(model) == 0


def test_a_method_whose_parameters_cannot_be_gathered_leaves_no_forward_running() -> None:
    mesh = line(2)
    model = sw.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh)
    model.project = lambda x: model[0](x)
    register_fsdp_forward_method(model, "project")
    model[0].double()
    x = sw.distribute_tensor(torch.ones(2, 4), mesh, [S0])
    with pytest.raises(sw.UnsupportedError, match="had one dtype"):
        model.project(x)
    model[0].float()
    with CommDebugMode() as comm:
        for _ in range(2):  # each is an outermost forward again
            model(x).sum().backward()
    assert counts(comm) == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert thread_state.frames == []


@pytest.mark.parametrize("whole_model", [True, False])
def test_an_input_that_is_used_again_keeps_no_hooks(whole_model: bool) -> None:
    """Training an input, as a soft prompt, of a frozen model; a module may also return its input as it is."""
    mesh = line(2)
    layers = [nn.Linear(4, 4).requires_grad_(False), nn.Identity()]
    model = sw.fully_shard(nn.Sequential(*(layers if whole_model else layers[1:])), mesh)
    x = sw.distribute_tensor(torch.ones(2, 4), mesh, [S0]).requires_grad_()
    for _ in range(3):
        model(x)
    assert len(x._backward_hooks or ()) <= 2
    for _ in range(3):
        model(x).sum().backward()
    assert not x._backward_hooks


@pytest.mark.parametrize("wrap", [Result, Hidden])
def test_outputs_may_be_objects(wrap: Callable[[Any], Any]) -> None:
    mesh = line(2)
    torch.manual_seed(0)
    reference = Model(lambda m, x: wrap(m.second(m.first(x).tanh())))
    model = copy.deepcopy(reference)
    for module in (model.first, model.second, model):
        sw.fully_shard(module, mesh)
    x = torch.randn(4, 4)
    for _ in range(2):
        for one, given in ((reference, x), (model, sw.distribute_tensor(x, mesh, [S0]))):
            result = one(given)
            summed(result.out if isinstance(result, Result) else result.reveal()).backward()
    assert_same(model, reference, lambda parameter: parameter.grad, 1e-5)
    assert gathered_bytes(model) == 0


def test_modules_that_keep_a_list_of_their_parameters() -> None:
    mesh = line(2)
    reference = nn.LSTM(3, 4, batch_first=True)
    model = copy.deepcopy(reference)
    sw.fully_shard(model, mesh)
    x = torch.randn(2, 5, 3)
    reference(x)[0].sum().backward()
    model(ranks_batch(x, mesh))[0].sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.grad) * 2, dict(reference.named_parameters())[name].grad)


def test_forward_without_gradients_then_training() -> None:
    mesh = line(2)
    torch.manual_seed(0)
    reference = Transformer(dropout=0.2).double()
    model = shard_all(copy.deepcopy(reference), mesh)
    tokens, targets = batch(0)
    place = lambda t: sw.distribute_tensor(t, mesh, [S0])  # noqa: E731
    for without in (torch.no_grad, torch.inference_mode):
        for module in (reference, model):
            module.eval()
        with without():
            torch.testing.assert_close(model(place(tokens)).full_tensor(), reference(tokens))
        assert gathered_bytes(model) == 0
    for module in (reference, model):
        module.train()
    torch.manual_seed(5)
    loss_of(reference(tokens), targets).backward()
    torch.manual_seed(5)
    loss_of(model(place(tokens)), place(targets)).backward()
    assert_same(model, reference, lambda parameter: parameter.grad)


def test_a_forward_that_raises_leaves_the_module_usable() -> None:
    mesh = line(2)
    torch.manual_seed(0)
    reference = Transformer(3).double()
    model = shard_all(copy.deepcopy(reference), mesh)
    tokens, targets = batch(0)
    place = lambda t: ranks_batch(t, mesh)  # noqa: E731
    handle = model.blocks[1].up.register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(place(tokens))
    handle.remove()
    assert all(isinstance(parameter, sw.DTensor) for parameter in model.parameters())

    def fail(grad: Any) -> None:
        raise RuntimeError("in backward")

    hidden: list[Any] = []
    handle = model.blocks[1].register_forward_hook(lambda _, args, out: hidden.append(out.register_hook(fail)))
    with pytest.raises(RuntimeError, match="in backward"):
        loss_of(model(place(tokens)), place(targets)).backward()
    handle.remove()
    model.zero_grad()
    loss_of(reference(tokens), targets).backward()
    loss_of(model(place(tokens)), place(targets)).backward()
    assert_same(model, reference, lambda parameter: parameter.grad)


@pytest.mark.parametrize("wrap", [torch.clone, Hidden])
@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
def test_a_backward_after_one_that_failed_has_none_of_its_gradients(kind: str, wrap: Callable[[Any], Any]) -> None:
    """The same graph again, and that of another forward. Gradients of an output that is hidden arrive first."""
    mesh = line(2)
    torch.manual_seed(0)
    hidden: list[Any] = []

    def forward(model: Model, x: Any) -> Any:
        hidden.append(model.first(x).tanh())
        return wrap(model.second(hidden[-1]))

    reference = Model(forward)
    model = copy.deepcopy(reference)
    if kind == "replicate":
        sw.replicate(model, mesh, bucket_cap_mb=1e-6)
    else:
        for module in (model.first, model.second, model):
            sw.fully_shard(module, mesh)
    x = torch.randn(4, 4)
    for one, given in ((reference, x), (model, sw.distribute_tensor(x, mesh, [S0]))):
        results = [one(part) for part in (given, given + 1)]
        first, second = [each.reveal() if isinstance(each, Hidden) else each for each in results]
        handle = hidden[-2].register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            first.sum().backward(retain_graph=True)
        handle.remove()
        one.zero_grad()
        first.sum().backward()
        second.sum().backward()
    assert_same(model, reference, lambda parameter: parameter.grad, 1e-5)


@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
def test_gradients_that_wait_stay_when_their_parameters_are_frozen(kind: str) -> None:
    mesh = line(2)
    torch.manual_seed(0)
    reference = Model(lambda m, x: m.second(m.first(x).tanh()))
    model = getattr(sw, kind)(copy.deepcopy(reference), mesh)
    x = torch.randn(4, 4)
    for one, given in ((reference, x), (model, sw.distribute_tensor(x, mesh, [S0]))):
        with one.no_sync() if one is model else contextlib.nullcontext():
            one(given).sum().backward()
        between = one(given).sum()
        one.first.weight.requires_grad_(False)
        between.backward()
        one(given).sum().backward()
    assert_same(model, reference, lambda parameter: parameter.grad, 1e-5)


def test_a_list_of_modules_is_gathered_together_and_keeps_ties() -> None:
    mesh = line(2)
    torch.manual_seed(0)
    reference = Transformer(tied=True).double()
    model = copy.deepcopy(reference)
    sw.fully_shard([model.embedding, model.norm, model.head], mesh)
    shard_all(model, mesh)
    assert model.embedding.weight is model.head.weight
    tokens, targets = batch(0)
    loss_of(reference(tokens), targets).backward()
    with CommDebugMode() as comm:
        loss_of(model(ranks_batch(tokens, mesh)), ranks_batch(targets, mesh)).backward()
    assert model.embedding.weight is model.head.weight
    assert_same(model, reference, lambda parameter: parameter.grad)
    assert counts(comm)["reduce_scatter_tensor"] == 3  # the root has nothing of its own


def test_state_dicts_hold_shards_and_load() -> None:
    mesh = line(4)
    model, other = (shard_all(Transformer(), mesh) for _ in range(2))
    state = model.state_dict()
    assert all(value.spec.layout == "dp:S0" for value in state.values())
    other.load_state_dict(state)
    third = shard_all(Transformer(), mesh)
    third.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    x = sw.distribute_tensor(batch(0)[0], mesh, [S0])
    expected = model(x).full_tensor()
    assert torch.equal(other(x).full_tensor(), expected)
    assert torch.equal(third(x).full_tensor(), expected)
    third(x).sum().backward()
    assert all(parameter.grad is not None for parameter in third.parameters())


def test_clipping_and_strict_mode() -> None:
    world = plane(2, 2)
    torch.manual_seed(0)
    reference = Transformer().double()
    model = copy.deepcopy(reference)
    tensor_parallel_inside(model, world["tp"])  # parameters on two meshes
    shard_all(model, world["dp"])
    tokens, targets = batch(0)
    loss_of(reference(tokens), targets).backward()
    with sw.strict():  # gathering and reducing was asked for
        loss_of(model(ranks_batch(tokens, world["dp"])), ranks_batch(targets, world["dp"])).backward()
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (reference, model)]
    torch.testing.assert_close(whole(norms[1]), norms[0])
    assert_same(model, reference, lambda parameter: parameter.grad)


def test_ignored_parameters_are_left_alone() -> None:
    mesh = line(2)
    layer = nn.Linear(4, 4)
    bias = layer.bias
    sw.fully_shard(layer, mesh, ignored_params={bias})
    assert layer.bias is bias
    layer(torch.ones(2, 4)).sum().backward()
    assert isinstance(layer.weight.grad, sw.DTensor)


# ---------------------------------------------------------------- refused


def test_errors_say_what_to_do() -> None:
    mesh = line(2)
    tied = Transformer(tied=True)
    sw.fully_shard(tied.embedding, mesh)
    done = sw.fully_shard(nn.Linear(2, 2), mesh)
    hybrid = plane(2, 2, names=("replicas", "dp"))
    half = sw.fully_shard(nn.Linear(2, 2), hybrid)
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: sw.fully_shard(nn.Linear(2, 2)), sw.MeshError, "no mesh"),
        (lambda: sw.fully_shard(nn.Linear(2, 2), plane(2, 2, 2, names=("a", "b", "c"))), sw.MeshError, "3 axes"),
        (
            lambda: sw.fully_shard(nn.Linear(2, 2), mesh, offload_policy=CPUOffloadPolicy()),
            sw.UnsupportedError,
            "CPUOffloadPolicy",
        ),
        (
            lambda: sw.fully_shard(nn.Linear(2, 2), line(4), reshard_after_forward=3),
            sw.LayoutError,
            "the 4 ranks .* groups",
        ),
        (lambda: sw.fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh), sw.UnsupportedError, "no forward"),
        (lambda: sw.fully_shard(done, mesh), sw.UnsupportedError, "already"),
        (lambda: sw.fully_shard(tied, mesh), sw.UnsupportedError, "tied"),
        (
            lambda: sw.fully_shard(nn.Linear(2, 2), mesh, shard_placement_fn=lambda p: R),
            sw.LayoutError,
            "Shard\\(dim\\)",
        ),
        (lambda: half(sw.ones(2, 2, device_mesh=hybrid["dp"])), sw.MeshError, "every data axis"),
        (lambda: half(sw.ones(2, 2, device_mesh=hybrid.flatten())), sw.MeshError, "every data axis"),
    ]
    for call, kind, text in cases:
        with pytest.raises(kind, match=text):
            call()


@pytest.mark.parametrize(("wrap", "shown"), [(sw.fully_shard, "FSDP"), (sw.replicate, "Replicate")])
def test_a_class_keeps_its_name_and_makes_plain_modules(wrap: Callable[[Any, Any], Any], shown: str) -> None:
    """Libraries go by names of classes, as in the table of causal language models of transformers."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    text = repr(plain)
    kind = type(plain)
    model = wrap(plain, sw.init_device_mesh("cpu", (2,)))
    assert type(model) is not kind
    assert isinstance(model, kind)
    assert str(type(model)) == str(kind)
    assert model._get_name() == "Sequential"
    assert repr(model) == f"{shown}{text}"
    assert type(copy.deepcopy(model)) is type(model)
    assert type(model[:2]) is kind  # a container's slice is made by its class
    assert type(type(model)(nn.ReLU())) is kind


# ---------------------------------------------------------------- gradients asked for by parameter


@pytest.mark.parametrize("wrap", [sw.fully_shard, sw.replicate])
@pytest.mark.parametrize("allow_unused", [False, True])
def test_gradients_of_parameters_that_autograd_does_not_reach_are_refused(
    wrap: Callable[[Any, Any], Any], allow_unused: bool
) -> None:
    """torch would take the parameters for unused: None from `grad`, and no gradient from `backward(inputs=...)`."""
    mesh = line(4)
    model = wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), mesh)
    x = sw.distribute_tensor(torch.randn(8, 4), mesh, [S0]).requires_grad_()
    parameters = list(model.parameters())
    with pytest.raises(sw.ShardwiseError, match="reduced outside of autograd"):
        torch.autograd.grad(model(x).sum(), [x, *parameters], allow_unused=allow_unused)
    with pytest.raises(sw.ShardwiseError, match="reduced outside of autograd"):
        torch.autograd.grad(inputs=parameters[0], outputs=[model(x)], grad_outputs=[torch.ones(8, 4)])
    with pytest.raises(sw.ShardwiseError, match="reduced outside of autograd"):
        model(x).sum().backward(inputs=parameters)
    assert all(parameter.grad is None for parameter in parameters)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(sw.ShardwiseError, match="reduced outside of autograd"):
        model(x).sum().backward(inputs=list(model.parameters()))


def test_gradients_asked_for_by_edges_and_by_gathered_leaves_are_refused() -> None:
    mesh = line(4)
    model = sw.fully_shard(nn.Linear(4, 4), mesh)
    x = sw.distribute_tensor(torch.randn(8, 4), mesh, [S0])
    edge = torch.autograd.graph.get_gradient_edge(model.weight)
    with pytest.raises(sw.ShardwiseError, match="the gradient of weight"):
        torch.autograd.grad(model(x).sum(), [edge], allow_unused=True)
    model.unshard()
    shown = model.bias  # a leaf for plain inputs, and these are DTensors
    with pytest.raises(sw.ShardwiseError, match="the gradient of bias"):
        torch.autograd.grad(model(x).sum(), [shown], allow_unused=True)
    model.unshard()
    shown = model.bias
    found = torch.autograd.grad(model(torch.ones(2, 4)).sum(), shown)[0]  # each rank's own, of its plain batch
    torch.testing.assert_close(found.tensors[0], torch.full((4,), 2.0))


def test_a_function_that_differentiates_a_sharded_module_in_its_backward_is_refused() -> None:
    """As solvers of differential equations by adjoints do; the gradients would be zero."""

    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, *parameters: Any) -> Any:
            ctx.save_for_backward(x, *parameters)
            with torch.no_grad():
                return model(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, *parameters = ctx.saved_tensors
            with torch.enable_grad():
                return torch.autograd.grad(model(x.detach()), (x, *parameters), grads, allow_unused=True)

    mesh = line(4)
    model = sw.fully_shard(nn.Linear(4, 4), mesh)
    x = sw.distribute_tensor(torch.randn(8, 4), mesh, [S0])
    with pytest.raises(sw.ShardwiseError, match="reduced outside of autograd"):
        Adjoint.apply(x, *model.parameters()).sum().backward()


@pytest.mark.parametrize("wrap", [sw.fully_shard, sw.replicate])
def test_writes_through_data_inside_forward_are_kept_or_refused(wrap: Any) -> None:
    """As codebooks with moving averages do: the write came to a gathered copy alone, and was lost."""

    class Written(nn.Module):
        def __init__(self, write: Any) -> None:
            super().__init__()
            self.weight, self.write = nn.Parameter(torch.arange(28.0).reshape(7, 4)), write

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.weight.t()
            self.write(self.weight)
            return y

    def assign(weight: Any) -> None:
        weight.data = weight.data * 2

    mesh, x = line(4), torch.ones(8, 4)
    writes = [lambda w: w.data.mul_(2), lambda w: w.data.copy_(w.data + 1), lambda w: w.data[1:3].fill_(7.0)]
    for write in writes:
        reference, model = Written(write), wrap(Written(write), mesh)
        for _ in range(2):
            reference(x).sum().backward()
            model(sw.distribute_tensor(x, mesh, [S0])).sum().backward()
        torch.testing.assert_close(whole(model.weight), reference.weight.detach())
        torch.testing.assert_close(whole(model.weight.grad), reference.weight.grad)
        with pytest.raises(sw.UnsupportedError, match="own plain tensors"):
            wrap(Written(write), mesh)(ranks_batch(x, mesh))
    for given in (sw.distribute_tensor(x, mesh, [S0]), ranks_batch(x, mesh)):
        with pytest.raises(sw.UnsupportedError, match=r"set to another tensor|own plain tensors"):
            wrap(Written(assign), mesh)(given)


def test_gradients_that_autograd_reaches_are_given() -> None:
    """Of inputs, of stored parameters that a loss uses itself, of parameters that it does not use."""
    mesh = line(4)
    torch.manual_seed(0)
    one = nn.Linear(4, 4)
    x = torch.randn(8, 4, requires_grad=True)
    wanted = torch.autograd.grad(one(x).square().sum(), x)[0]
    model = sw.fully_shard(copy.deepcopy(one), mesh)
    other = sw.fully_shard(nn.Linear(4, 4), mesh)
    sharded = sw.distribute_tensor(x.detach(), mesh, [S0]).requires_grad_()
    found = torch.autograd.grad(
        model(sharded).square().sum(), [sharded, *other.parameters()], allow_unused=True, retain_graph=True
    )
    torch.testing.assert_close(whole(found[0]), wanted)
    assert found[1] is None
    weight = model.weight
    torch.testing.assert_close(whole(torch.autograd.grad(weight.square().sum(), weight)[0]), 2 * one.weight.detach())
    model(sharded).square().sum().backward(inputs=[sharded])
    torch.testing.assert_close(whole(sharded.grad), wanted)


def test_gradients_of_plain_modules_are_given_for_generators_of_parameters() -> None:
    """The functions that refuse parameters of data parallel modules read their arguments once more."""
    sw.fully_shard(nn.Linear(4, 4), line(4))
    plain, x = nn.Linear(4, 4), torch.randn(8, 4)
    wanted = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    for found, expected in zip(torch.autograd.grad(plain(x).square().sum(), plain.parameters()), wanted, strict=True):
        assert torch.equal(found, expected)
    plain(x).square().sum().backward(inputs=plain.parameters())
    for parameter, expected in zip(plain.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, expected)
