"""The layout `Zigzag`: one device's values on every operator, and causal attention whose work is balanced on it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional as F

import shardwise as sw
from examples.llama import Llama
from shardwise import Shard, Zigzag
from shardwise.core.layout import Run
from shardwise.plan.sequence_attention import Pairs
from shardwise.rules.attention_blocks import ScoreTile
from tests import sequence_attention as sequences
from tests.sequence_attention import S0, S2, assert_close, case, on_mesh, on_one_device
from tests.transformer import assert_trains_as_one_device, shard_all
from tests.virtual.layout_operators import OPERATORS, assert_as_on_one_device

Z0, Z1, Z2 = Zigzag(0), Zigzag(1), Zigzag(2)


# ---------------------------------------------------------------- operators

UNEVEN = ((3,), (Z1,), 13)
LAYOUTS = (  # mesh, placements, length; 6 leaves blocks empty
    ((4,), (Z1,), 16), ((2, 2), (S0, Z1), 10), ((2, 2), (Z1, Shard(1)), 11), ((4,), (Z1,), 6),
    ((2, 2), (Zigzag(1, blocks=(2, 0, 3, 1, 4, 5)), Shard(2)), 12), ((2, 2), (Z1, Z0), 8),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::shardwise.ReplicationWarning")  # boolean masks, as on other dims than the first
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_give_the_values_of_one_device(name: str) -> None:
    """And their gradients: each operator on uneven blocks and two more layouts, each layout with many operators."""
    number = list(OPERATORS).index(name)
    for layout in (UNEVEN, LAYOUTS[number % 6], LAYOUTS[(number + 2) % 6]):
        assert_as_on_one_device(name, layout)


def test_what_is_computed_token_by_token_keeps_the_layout() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    x = sw.distribute_tensor(torch.randn(4, 16, 8), mesh, [S0, Z1])
    with sw.debug.CommDebugMode() as comm:
        heads = F.linear(F.rms_norm(x, (8,)), torch.randn(8, 8)).unflatten(-1, (2, 4)).transpose(1, 2)
        flat = x.flatten(0, 1)
        again = flat.unflatten(0, (4, 16))
    assert comm.get_total_counts() == 0
    assert (heads.spec.layout, flat.spec.layout, again.spec.layout) == ("dp:S0 cp:Z2", "dp:S0 cp:Z0/2", "dp:S0 cp:Z1")


def test_a_shard_becomes_a_zigzag_by_one_exchange() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.arange(16), mesh, [S0])
    with sw.debug.CommDebugMode() as comm:
        y = x.redistribute(placements=[Z0])
    assert comm.get_total_counts() == 1
    assert [part.tolist() for part in y.to_local().tensors] == [  # pyright: ignore[reportAttributeAccessIssue]
        [0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9],
    ]  # fmt: skip
    assert comm.received_bytes == 3 * 8  # on average: nothing of a half for the first, all but two elements later


def test_blocks_that_do_not_fit_are_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    with pytest.raises(sw.LayoutError, match="6 blocks for 4 ranks"):
        sw.distribute_tensor(torch.zeros(8), mesh, [Zigzag(0, blocks=range(6))])
    with pytest.raises(sw.LayoutError, match="each block once"):
        Zigzag(0, blocks=(0, 0))


def test_the_usual_blocks_are_the_usual_zigzag() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.zeros(8), mesh, [Zigzag(0, blocks=(0, 3, 1, 2))])
    assert x.placements == (Z0,)


def test_random_numbers_are_those_of_one_device() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    x = sw.distribute_tensor(torch.ones(2, 13, 4), mesh, [Z1])
    torch.manual_seed(0)
    wanted = F.dropout(torch.ones(2, 13, 4), 0.4)
    torch.manual_seed(0)
    assert torch.equal(F.dropout(x, 0.4).full_tensor(), wanted)


def test_saved_and_loaded(tmp_path: Path) -> None:
    x = torch.randn(10, 14)
    for i, (save, load) in enumerate([([Z1], [S0]), ([S0], [Z0]), ([Z0], [Z1]), ([Zigzag(1, (3, 1, 2, 0))], [Z0])]):
        before, after = sw.init_device_mesh("cpu", (4,)), sw.init_device_mesh("cpu", (3,))
        sw.checkpoint.save({"x": sw.distribute_tensor(x, before, save)}, tmp_path / str(i))
        state = {"x": sw.distribute_tensor(torch.zeros(10, 14), after, load)}
        sw.checkpoint.load(state, tmp_path / str(i))
        assert torch.equal(state["x"].full_tensor(), x)
        torch.save(state, tmp_path / f"{i}.pt")
        assert torch.equal(torch.load(tmp_path / f"{i}.pt", weights_only=True)["x"].full_tensor(), x)


def test_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    x = sw.distribute_tensor(torch.zeros(8), mesh, [Z0])
    sw.debug.visualize_sharding(x)
    text = capsys.readouterr().out
    assert "f32[8] cp:Z0" in text
    assert [rank for rank in "".join(text.splitlines()[4:5]) if rank.isdigit()] == ["0", "1", "0"]
    assert "Z0" in sw.draw(x).svg


# ---------------------------------------------------------------- attention


def test_attention_in_float32() -> None:
    given = case("causal", (64, 64), torch.float32)
    assert_close(on_mesh(given, sw.init_device_mesh("cpu", (4,)), [Z2], "ring"), on_one_device(given))


def _work(placement: sw.Placement, ranks: int, length: int) -> list[float]:
    """The scores that each rank computes of a causal ring."""
    mesh = sw.init_device_mesh("cpu", (ranks,))
    spec = sw.DTensorSpec(mesh, [placement], sw.TensorMeta((1, 1, length, 8)))
    blocks = tuple(spec.runs(2, (rank,)) for rank in range(ranks))
    pairs = Pairs(spec, (0,), blocks, True, False)

    def scores(tile: ScoreTile) -> float:
        return tile.rows * (tile.columns + 1) / 2 if tile.causal else tile.rows * tile.columns

    found = [sum(scores(t) for block in range(ranks) for t in pairs.tiles((rank,), block)) for rank in range(ranks)]
    assert sum(found) == length * (length + 1) / 2
    return found


@pytest.mark.parametrize(("ranks", "length"), [(4, 4096), (8, 4096), (8, 4099), (3, 1000), (64, 65536)])
def test_causal_work_is_balanced(ranks: int, length: int) -> None:
    balanced, contiguous = _work(Z2, ranks, length), _work(S2, ranks, length)
    assert max(balanced) * ranks / sum(balanced) <= 1.02
    assert max(contiguous) * ranks / sum(contiguous) > 1.6


def test_a_turn_is_one_rectangle() -> None:
    """Of another rank's block the two halves that count lie side by side, so that one kernel computes them."""
    spec = sw.DTensorSpec(sw.init_device_mesh("cpu", (4,)), [Z2], sw.TensorMeta((1, 1, 64, 8)))
    blocks = tuple(spec.runs(2, (rank,)) for rank in range(4))
    pairs = Pairs(spec, (0,), blocks, True, False)
    for rank in range(3):  # the two blocks of the last rank are one run
        assert [len(pairs.tiles((rank,), block)) for block in range(4)] == [
            3 if block == rank else 1 for block in range(4)
        ]
    assert blocks[1] == (Run(8, 8), Run(48, 8))


def test_a_ring_receives_as_much_as_on_contiguous_shards() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    given = case("causal", (16, 16), torch.float32)
    local = 2 * 4 * 4 * 8 * 4  # bytes of a block of keys
    laid = [sw.distribute_tensor(x, mesh, [Z2]).requires_grad_() for x in given.tensors]
    with sw.attention(prefer="ring"):
        out, calls, received = sequences.counted(lambda: F.scaled_dot_product_attention(*laid[:3], is_causal=True))
        assert (calls, received) == (3, 3 * 2 * local)
        _, calls, received = sequences.counted(lambda: torch.autograd.grad(out, laid[:3], laid[3].detach()))
        assert (calls, received) == (6, 3 * 4 * local)


def test_memory_does_not_grow_with_the_ranks() -> None:
    def peak(ranks: int) -> int:
        with sw.dry_run() as run:
            mesh = sw.init_device_mesh("cuda", (ranks,))
            x = sw.zeros(1, 4, 128 * ranks, 64, dtype=torch.bfloat16, device_mesh=mesh, placements=[Z2])
            with sw.attention(prefer="ring"):
                F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return run.peak_bytes

    assert peak(32) == peak(8)


def test_explain_says_which_way() -> None:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    x = sw.distribute_tensor(torch.randn(1, 2, 64, 8), mesh, [Z2])
    with sw.explain() as report:
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert report.records[-1].way == "ring"
    assert "cp:Z2" in str(report.records[-1].operands[0])


# ---------------------------------------------------------------- models


def _llama(mesh: sw.DeviceMesh, placements: Any, **options: Any) -> None:
    """One step of the example's model against one device; its positions are plain tables."""
    torch.manual_seed(0)
    reference = Llama(vocabulary=32, dim=32, blocks=1, heads=4, kv_heads=2, hidden=48).double()
    model = copy.deepcopy(reference)
    if options.get("fully"):
        sw.fully_shard(model.blocks[0], mesh)
        sw.fully_shard(model, mesh)
    else:
        if options.get("recomputed"):
            model.blocks[0] = checkpoint_wrapper(model.blocks[0], checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        sw.distribute_module(model, mesh)
    tokens = torch.randint(32, (2, 23))
    ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    laid, aims = (sw.distribute_tensor(x, mesh, placements) for x in (ids, targets))
    with sw.attention(prefer="ring"):
        losses = [
            F.cross_entropy(m(x).flatten(0, 1), y.flatten())
            for m, x, y in ((reference, ids, targets), (model, laid, aims))
        ]
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(losses[1].full_tensor(), losses[0], rtol=1e-12, atol=1e-12)
    for mine, plain in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.full_tensor(), plain.grad, rtol=1e-9, atol=1e-12)


def test_a_llama_with_rotary_positions() -> None:
    _llama(sw.init_device_mesh("cpu", (2, 2)), [S0, Z1])
    _llama(sw.init_device_mesh("cpu", (3,)), [Z1], recomputed=True)


def test_a_llama_under_fully_shard() -> None:
    _llama(sw.init_device_mesh("cpu", (2, 2)).flatten(), [Z1], fully=True)


def test_training_with_dropout() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    assert_trains_as_one_device(
        lambda model: shard_all(model, mesh), lambda x: sw.distribute_tensor(x, mesh, [Z1]), dropout=0.1, steps=2
    )


def test_compiled() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    given = case("causal", (16, 16))

    def step(q: Any, k: Any, v: Any) -> Any:
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True) * q.cumsum(2)).square().sum()

    plain = [x.clone().requires_grad_() for x in given.tensors[:3]]
    wanted = torch.autograd.grad(step(*plain), plain)
    laid = [sw.distribute_tensor(x, mesh, [Z2]).requires_grad_() for x in given.tensors[:3]]
    torch._dynamo.reset()
    with sw.attention(prefer="ring"):
        total = torch.compile(step, backend="aot_eager", fullgraph=True)(*laid)
        assert_close(list(torch.autograd.grad(total, laid)), list(wanted))


def test_second_derivatives() -> None:
    x = torch.randn(2, 7, 3, dtype=torch.float64)

    def penalty(x: Any) -> Any:
        (grad,) = torch.autograd.grad((x.cumsum(1) * x.softmax(1)).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    laid: Any = sw.distribute_tensor(x, sw.init_device_mesh("cpu", (3,)), [Z1])
    torch.testing.assert_close(penalty(laid.requires_grad_()).full_tensor(), penalty(x.requires_grad_()))


def test_locals_come_and_go() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = torch.arange(24.0).reshape(3, 8)
    laid = sw.distribute_tensor(x, mesh, [Z1])
    again = sw.DTensor.from_local(laid.to_local() * 2, mesh, [Z1])
    assert torch.equal(again.full_tensor(), 2 * x)


def _linear_attention(q: Any, k: Any, v: Any, chunks: int) -> Any:
    """Causal linear attention by chunks, as models write it: states of earlier chunks, and the chunk itself."""
    q, k, v = (x.unflatten(2, (chunks, -1)) for x in (q, k, v))
    states = k.mT @ v
    own = (q @ k.mT * torch.ones(q.shape[3], q.shape[3], dtype=q.dtype).tril()) @ v
    return (own + q @ (states.cumsum(2) - states)).flatten(2, 3)


@pytest.mark.parametrize("placement", [S2, Z2])
def test_linear_attention_by_chunks_exchanges_states_alone(placement: sw.Placement) -> None:
    """Received bytes do not depend on the length, and tokens are not moved."""
    mesh, received = sw.init_device_mesh("cpu", (4,)), set()
    for length in (64, 128):
        plain = [torch.randn(1, 2, length, 4, dtype=torch.float64) for _ in range(3)]
        laid = [sw.distribute_tensor(x, mesh, [placement]) for x in plain]
        out, _, received_bytes = sequences.counted(lambda laid=laid: _linear_attention(*laid, 8))
        received.add(received_bytes)
        assert out.placements == (placement,)
        torch.testing.assert_close(out.full_tensor(), _linear_attention(*plain, 8), rtol=1e-12, atol=1e-12)
    assert len(received) == 1
    assert received.pop() <= 3 * 8 * 2 * 4 * 4 * 8  # at most the states of all chunks for each other rank
