"""Attention against one device, and the layouts on which it needs no communication."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise as sw
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.plan.propagate import OpSchema, ShardingPropagator
from shardwise.rules.attention import padded
from tests.virtual.free import S0, S1, S2, S3, R, collectives, tensor
from tests.virtual.parity import assert_parity

pytestmark = pytest.mark.filterwarnings("ignore::shardwise.ReplicationWarning")

t = tensor
sdpa: Callable[..., Any] = F.scaled_dot_product_attention
Q, K, V = t(2, 4, 6, 8), t(2, 4, 5, 8), t(2, 4, 5, 8).cos()


def causal(q: Any, k: Any, v: Any) -> Any:
    return sdpa(q, k, v, is_causal=True)


def grouped(q: Any, k: Any, v: Any) -> Any:
    return sdpa(q, k, v, enable_gqa=True)


def masked(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return sdpa(q, k, v, attn_mask=mask.detach(), scale=0.3)


def by_products(q: Any, k: Any, v: Any) -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v)


CASES: dict[str, tuple[Any, ...]] = {
    "plain": (sdpa, Q, K, V),
    "uneven": (sdpa, t(3, 5, 7, 8), t(3, 5, 4, 8), t(3, 5, 4, 8).cos()),
    "causal": (causal, Q, t(2, 4, 6, 8).sin(), t(2, 4, 6, 8).cos()),
    "mask": (masked, Q, K, V, t(6, 5)),
    "mask of batches": (masked, Q, K, V, t(2, 1, 6, 5)),
    "mask of bools": (masked, Q, K, V, t(2, 4, 6, 5) > -1),
    "mask with a gradient": (lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), Q, K, V, t(1, 4, 6, 5)),
    "groups": (grouped, Q, K[:, :2], V[:, :2]),
    "values of another size": (sdpa, Q, K, t(2, 4, 5, 3)),
    "without batch": (sdpa, Q[0], K[0], V[0]),
    "by products": (by_products, Q, K, V),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_device(name: str) -> None:
    assert_parity(*CASES[name], limit=6)


WIDE = t(4, 8, 8, 4), t(4, 8, 5, 4), t(4, 8, 5, 4).cos()
NARROW = WIDE[0], t(4, 4, 5, 4), t(4, 4, 5, 4).cos()
MASK = t(8, 5)

FREE: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[Any, ...], Any]] = {
    "batch": (sdpa, WIDE, (S0, S0, S0), S0),
    "heads": (sdpa, WIDE, (S1, S1, S1), S1),
    "uneven heads": (sdpa, tuple(x[:, :7] for x in WIDE), (S1, S1, S1), S1),
    "queries": (sdpa, WIDE, (S2, R, R), S2),
    "uneven queries": (sdpa, (t(2, 2, 7, 4), *(x[:2, :2] for x in WIDE[1:])), (S2, R, R), S2),
    "heads, causal": (causal, (WIDE[0], *WIDE[:2]), (S1, S1, S1), S1),
    "heads in groups": (grouped, NARROW, (S1, S1, S1), S1),
    "heads, mask": (lambda q, k, v: sdpa(q, k, v, attn_mask=_whole(MASK, q)), WIDE, (S1, S1, S1), S1),
}


def _whole(mask: torch.Tensor, like: Any) -> Any:
    if not isinstance(like, sw.DTensor):
        return mask
    return sw.distribute_tensor(mask, like.device_mesh, [R] * like.device_mesh.ndim)


@pytest.mark.parametrize("name", FREE)
def test_without_communication(name: str) -> None:
    fn, args, placements, result = FREE[name]
    assert collectives(fn, args, placements) == ((result,), 0)


def test_two_axes_without_communication() -> None:
    assert collectives(sdpa, WIDE, ([S0, S1],) * 3, (2, 2)) == ((S0, S1), 0)
    assert collectives(sdpa, WIDE, ([S1, S2], [S1, R], [S1, R]), (2, 2)) == ((S1, S2), 0)


@pytest.mark.parametrize("dim", [S2, S3])
def test_what_is_normalised_over_is_gathered(dim: Any) -> None:
    """Keys, and queries that a causal mask counts, are not read in parts."""
    args = (WIDE[0],) * 3
    _, moved = collectives(causal, args, (dim, dim, dim))
    assert moved > 0


def test_groups_are_cut_where_their_heads_are() -> None:
    """Three heads of keys for six of queries on two ranks: an even split of the queries would cut a group."""
    assert_parity(grouped, t(2, 6, 4, 8), t(2, 3, 5, 8), t(2, 3, 5, 8).cos(), meshes=((2,), (4,)), limit=12)


def test_locals_may_lie_in_any_order_of_memory() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    grads = []
    for order in ((0, 1, 2, 3), (0, 3, 2, 1)):
        local = Q.permute(order).contiguous().permute(order).requires_grad_()
        held = sw.DTensor.from_local(local, mesh, [R], shape=Q.shape, stride=Q.stride())
        sdpa(held, held, held).full_tensor().square().sum().backward()
        grads.append(local.grad)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoders_that_do_not_train_stay_with_their_batch(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    layer.eval()
    heads, x, hidden = layer.self_attn, t(4, 5, 8), t(4, 5) > 0.5

    def run(layer: Any, heads: Any, x: Any, hidden: Any) -> list[Any]:
        return [layer(x), layer(x, src_key_padding_mask=hidden), *heads(x, x, x, key_padding_mask=hidden)]

    mesh = sw.init_device_mesh("cpu", (2,))
    with torch.no_grad():
        wanted = run(layer, heads, x, hidden)
        sw.distribute_module(layer, mesh)
        with sw.strict():
            got = run(layer, heads, *(sw.distribute_tensor(value, mesh, [S0]) for value in (x, hidden)))
        torch.testing.assert_close([value.full_tensor() for value in got], wanted)


def test_nested_tensors_are_refused() -> None:
    mask = sw.ones(2, 4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[S0]) > 0
    with pytest.raises(sw.UnsupportedError, match="enable_nested_tensor=False"):
        torch._nested_tensor_from_mask(mask.unsqueeze(-1).double(), mask)  # as nn.TransformerEncoder does


def test_bias_is_padded_to_where_kernels_can_read_it() -> None:
    bias = torch.randn(2, 3, 5)
    got = padded(bias)
    assert got is not None
    torch.testing.assert_close(got, bias)
    assert all(stride % 16 == 0 for stride in got.stride()[:-1])
    assert padded(got) is got
    assert padded(None) is None


# ---------------------------------------------------------------- what only a GPU runs, by shapes alone


def _layouts(op: Any, tensors: dict[str, Any], placed: dict[str, Any], **others: Any) -> Any:
    """Where the propagator puts operands and results of a call on a mesh of four."""
    mesh = sw.init_device_mesh("cpu", (4,))
    specs = {
        name: None if x is None else DTensorSpec(mesh, [placed.get(name, R)], TensorMeta.of(x))
        for name, x in tensors.items()
    }
    arguments = {a.name: a.default_value for a in op._schema.arguments} | others | specs
    order = [arguments[a.name] for a in op._schema.arguments]
    given = tuple(x for x in order if isinstance(x, DTensorSpec))
    results = op(
        *[tensors.get(a.name, arguments[a.name]) for a in op._schema.arguments if not a.kwarg_only],
        **{a.name: arguments[a.name] for a in op._schema.arguments if a.kwarg_only},
    )
    metas = tuple(TensorMeta.of(r) for r in results if isinstance(r, torch.Tensor))
    found = ShardingPropagator().propagate(OpSchema(op, arguments, given), metas)
    return (
        None if found is None else ([s.placements[0] for s in found.inputs], [s.placements[0] for s in found.outputs])
    )


FORWARD = {
    "flash": torch.ops.aten._scaled_dot_product_flash_attention.default,
    "efficient": torch.ops.aten._scaled_dot_product_efficient_attention.default,
    "cudnn": torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    "overrideable": torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
}
BACKWARD = {
    "flash": torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    "efficient": torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    "cudnn": torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default,
    "overrideable": torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default,
}


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _arguments(bias: bool = False) -> dict[str, Any]:
    q, k = _meta(4, 8, 16, 32), _meta(4, 8, 12, 32)
    return {"query": q, "key": k, "value": k, "attn_bias": _meta(4, 8, 16, 12) if bias else None}


@pytest.mark.parametrize("kernel", FORWARD)
@pytest.mark.parametrize("placement", [S0, S1])
def test_kernels_of_a_gpu_by_shape(kernel: str, placement: Any) -> None:
    op = FORWARD[kernel]
    tensors = {a.name: x for a in op._schema.arguments if (x := _arguments().get(a.name)) is not None}
    others = {"compute_log_sumexp": True, "attn_bias": None}
    placed = dict.fromkeys(tensors, placement)
    inputs, outputs = _layouts(op, tensors, placed, **others)
    assert inputs == [placement] * 3
    assert outputs[:2] == [placement] * 2
    assert all(p is R for p in outputs[2:])
    assert _layouts(op, tensors, placed, dropout_p=0.5, **others) is None


@pytest.mark.parametrize("kernel", BACKWARD)
@pytest.mark.parametrize("placement", [S0, S1])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_a_gpu_by_shape(kernel: str, placement: Any, bias: bool) -> None:
    op = BACKWARD[kernel]
    given = _arguments(bias)
    sums = _meta(4, 8, 16, 1) if kernel == "cudnn" else _meta(4, 8, 32 if kernel == "efficient" else 16)
    given |= {"grad_out": given["query"], "grad_out_": given["query"], "out": given["query"], "logsumexp": sums}
    given |= {"philox_seed": _meta(), "philox_offset": _meta(), "cum_seq_q": None, "cum_seq_k": None}
    tensors = {a.name: given[a.name] for a in op._schema.arguments if a.name in given}
    placed = {name: placement for name, x in tensors.items() if x is not None and x.ndim}
    others = {"max_q": 16, "max_k": 12, "dropout_p": 0.0, "is_causal": False, "grad_input_mask": [True] * 4}
    try:
        inputs, outputs = _layouts(op, tensors, placed, **others)
    except NotImplementedError as error:
        pytest.skip(f"torch {torch.__version__}: {error}")
    assert outputs == [placement] * len(outputs)
    assert len(outputs) == (4 if bias and "grad_input_mask" in {a.name for a in op._schema.arguments} else 3)
    assert inputs == [placed.get(name, R) for name, x in tensors.items() if x is not None]
