"""Fully sharded and tensor parallel at once, with what people train with: against one device.

Optimizer state, clipping, gradient scaling, activation checkpointing, mixed precision, accumulation, meta devices,
three axes, checkpoints.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from examples.llama import PLANS, Llama, place_on, sequence_parallel
from shardwise.parallel import MixedPrecisionPolicy
from tests.largest import Largest
from tests.plans import own_rows, spread_plain
from tests.virtual.training import Case, Sort, make_batches, make_model, mean_over_ranks, mesh_for, whole

ODD, EVEN = Sort(odd=True), Sort()
BOTH = Case("fsdp-tp", (2, 2))
PLAIN = Case("fsdp-tp", (2, 2), plain=True)
Place = Callable[[Tensor], Tensor]


def spread(case: Case, model: Llama, **options: Any) -> tuple[Any, Place]:
    """The model as a plan has it, and where its batches go."""
    mesh = mesh_for(case)
    if case.plain:
        return spread_plain(case.plan, model, mesh, **options), own_rows(mesh)
    return PLANS[case.plan].spread(model, mesh), place_on(mesh)


def loss_of(model: nn.Module, place: Place, batch: tuple[Tensor, Tensor]) -> Any:
    return F.cross_entropy(model(place(batch[0])).flatten(0, 1), place(batch[1]).flatten())


def value_of(loss: Any) -> float:
    """A loss as a number: the mean over ranks where each has its own."""
    return (mean_over_ranks(loss) if isinstance(loss, sw.RankTensor) else loss).item()


def alone(tensor: Tensor) -> Tensor:
    return tensor


def steps(model: nn.Module, place: Place, optimizer: torch.optim.Optimizer, count: int, start: int = 0) -> list[float]:
    """Losses of steps `start` and on."""
    found = []
    for batch in make_batches(start + count)[start:]:
        loss = loss_of(model, place, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value_of(loss))
    return found


def assert_same_values(got: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(
            whole(got[name]), whole(want), rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def expected_gradients(sort: Sort, count: int = 1) -> dict[str, Any]:
    """Of one device, added up over batches."""
    model = make_model(sort)
    for batch in make_batches(count):
        loss_of(model, alone, batch).backward()
    return gradients(model)


def moved(report: Any) -> Counter[tuple[str, str]]:
    """How many collectives of each kind over each axis."""
    return Counter((move.collective, move.axis) for record in report.records for move in record.moves)


# ---------------------------------------------------------------- parameters and optimizers


def three_axes(model: Llama) -> tuple[Any, Place]:
    """Replicated, fully sharded and tensor parallel, each over two ranks."""
    world = sw.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicas", "dp", "tp"))
    sequence_parallel(model, world)
    for module in (*model.blocks, model):
        sw.fully_shard(module, world["replicas", "dp"])
    return model, place_on(world)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = {}
    for number, state in optimizer.state_dict()["state"].items():
        found.update({f"{number} {key}": value for key, value in state.items()})
    return found


@pytest.mark.parametrize("kind", ["two axes", "three axes"])
def test_parameters_and_optimizer_state_are_those_of_one_device(kind: str) -> None:
    reference = make_model(ODD)
    model, place = spread(BOTH, make_model(ODD)) if kind == "two axes" else three_axes(make_model(ODD))
    assert_same_values(dict(model.named_parameters()), dict(reference.named_parameters()), 0.0)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    ours, theirs = steps(model, place, optimizers[0], 2), steps(reference, alone, optimizers[1], 2)
    assert ours == pytest.approx(theirs, rel=1e-9)
    assert_same_values(dict(model.named_parameters()), dict(reference.named_parameters()))
    state = optimizer_state(optimizers[0])
    assert_same_values(state, optimizer_state(optimizers[1]))
    moments = [value for name, value in state.items() if "exp_avg" in name]
    assert moments
    assert all(isinstance(value, sw.DTensor) for value in moments)
    assert {value.spec for value in moments} == {parameter.spec for parameter in model.parameters()}


@pytest.mark.parametrize("case", [BOTH, PLAIN], ids=str)
def test_clipping_takes_one_reduction(case: Case) -> None:
    sort = EVEN if case.plain else ODD
    model, place = spread(case, make_model(sort))
    reference = make_model(sort)
    loss_of(model, place, make_batches(1)[0]).backward()
    loss_of(reference, alone, make_batches(1)[0]).backward()
    meshes = {parameter.device_mesh for parameter in model.parameters()}
    with sw.explain() as report:
        norm = clip_grad_norm_(model.parameters(), 0.1)
    assert moved(report).total() == len(meshes) == 1
    torch.testing.assert_close(whole(norm), clip_grad_norm_(reference.parameters(), 0.1), rtol=1e-9, atol=1e-9)
    assert_same_values(gradients(model), gradients(reference))


@pytest.mark.parametrize("case", [BOTH, Case("ddp-tp", (2, 2), plain=True)], ids=str)
def test_gradient_scaling(case: Case) -> None:
    """The second has parameters on two meshes: norms, which are not tensor parallel, lie on the data axis alone."""
    runs: list[list[float]] = []
    for model, place in (spread(case, make_model(EVEN)), (make_model(EVEN), alone)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2, backoff_factor=2.0**-120)
        seen: list[float] = []
        for step, batch in enumerate(make_batches(3)):
            loss = loss_of(model, place, batch)
            scaler.scale(loss * (1e300 if step == 0 else 1.0)).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [value_of(loss), scaler.get_scale()]
        runs.append(seen)
    assert runs[0] == pytest.approx(runs[1], rel=1e-9)
    assert runs[1][1] < 2.0**127, "no step was skipped: the test shows nothing"


# ---------------------------------------------------------------- how blocks compute


def checkpoint_inside(model: Llama, reentrant: bool) -> None:
    """Attention and feed-forward of each block compute again what backward needs."""
    for block in model.blocks:
        for part in (block.attention, block.feed_forward):
            part.forward = functools.partial(checkpoint, part.forward, use_reentrant=reentrant)


def checkpoint_around(model: Llama, reentrant: bool) -> None:
    """Whole blocks do."""
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("wrap", [checkpoint_inside, checkpoint_around])
@pytest.mark.parametrize("case", [BOTH, PLAIN], ids=str)
def test_activation_checkpointing(case: Case, wrap: Any, reentrant: bool) -> None:
    sort = EVEN if case.plain else Sort(dropout=0.1)
    wanted = make_model(sort)
    torch.manual_seed(5)
    loss_of(wanted, alone, make_batches(1)[0]).backward()
    model = make_model(sort)
    wrap(model, reentrant)
    model, place = spread(case, model)
    calls: list[int] = []
    model.blocks[0].feed_forward.gate.register_forward_pre_hook(lambda *_: calls.append(1))
    torch.manual_seed(5)
    loss_of(model, place, make_batches(1)[0]).backward()
    assert_same_values(gradients(model), gradients(wanted))
    assert len(calls) == 2  # in forward, and again for backward


@pytest.fixture
def plain_matmul() -> Iterator[None]:
    """Without the kernels for bfloat16 that some processors claim and do not run."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def test_mixed_precision(plain_matmul: None) -> None:
    """Against a mesh of one rank with the same policy, which is one device's mixed precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found: list[dict[str, Any]] = []
    for shape in ((2, 2), (1, 1)):
        model = make_model(Sort(torch.float32))
        inside: set[torch.dtype] = set()
        model.blocks[0].feed_forward.gate.register_forward_hook(lambda _, args, out, to=inside: to.add(out.dtype))
        model, place = spread(Case("fsdp-tp", shape, plain=True), model, mp_policy=policy)
        loss_of(model, place, make_batches(1)[0]).backward()
        assert inside == {torch.bfloat16}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        found.append(gradients(model))
    exact = expected_gradients(Sort(torch.float32))
    for name, want in found[1].items():
        error = (whole(found[0][name]) - whole(want)).norm() / whole(want).norm()
        assert error < 0.03, name  # bfloat16 rounds to one part in 256
        assert not torch.allclose(whole(want), exact[name], rtol=1e-6), name


@pytest.mark.parametrize("case", [BOTH, PLAIN], ids=str)
def test_accumulating_communicates_nothing_over_the_data_axis(case: Case) -> None:
    model, place = spread(case, make_model(EVEN))
    first, second = make_batches(2)
    with model.no_sync(), sw.explain() as silent:
        loss_of(model, place, first).backward()
    reductions = ("reduce_scatter", "all_reduce")
    small = {"all_reduce": 1} if not case.plain else {}  # the loss of a global batch is itself a mean over dp
    over_data = Counter({kind: n for (kind, axis), n in moved(silent).items() if "dp" in axis and kind in reductions})
    assert over_data == small
    assert all(parameter.grad is None for parameter in model.parameters())
    with sw.explain() as loud:
        loss_of(model, place, second).backward()
    assert moved(loud)["reduce_scatter", "dp"] == 2  # the block, and what is left of the model
    assert_same_values(gradients(model), expected_gradients(EVEN, 2))


# ---------------------------------------------------------------- where a model comes from and goes to


def reset(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("plain", [False, True])
def test_a_model_on_the_meta_device_is_made_shard_by_shard(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.rng.cpu_stream.BLOCK", 256)  # numbers are drawn in blocks of several ranks
    sizes = {"vocabulary": 64, "dim": 32, "blocks": 1, "heads": 4, "kv_heads": 4, "hidden": 64, "longest": 8}
    with torch.device("meta"):
        model = Llama(**sizes)
    world = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with Largest() as largest:
        if plain:
            spread_plain("fsdp-tp", model, world)
        else:
            PLANS["fsdp-tp"].spread(model, world)
        model.to_empty(device="cpu")
        torch.manual_seed(7)
        reset(model)
    assert 0 < largest.elements <= 64 * 32 // 4
    reference = Llama(**sizes)
    torch.manual_seed(7)
    reset(reference)
    assert_same_values(dict(model.named_parameters()), dict(reference.named_parameters()), 0.0)


def resumed_on() -> Iterator[tuple[str, Any, Place]]:
    """Models of other values, on other meshes and on none."""
    for case in (Case("fsdp", (4,)), Case("fsdp-tp", (4, 2)), Case("tp", (2,))):
        yield str(case), *spread(case, make_model(ODD))
    yield "one device", make_model(ODD), alone


def test_a_checkpoint_goes_on_anywhere(tmp_path: Path) -> None:
    model, place = spread(BOTH, make_model(ODD))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, place, optimizer, 2)
    sw.checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path / "two")
    expected = steps(model, place, optimizer, 2, start=2)
    for where, other, place_there in resumed_on():
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        again = torch.optim.AdamW(other.parameters(), lr=1e-3)
        sw.checkpoint.load({"model": other, "optimizer": again}, tmp_path / "two")
        assert steps(other, place_there, again, 2, start=2) == pytest.approx(expected, rel=1e-9), where
