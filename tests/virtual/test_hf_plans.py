"""Plans with names of styles, as configurations of transformers carry them, on plain modules, against plain torch."""

import copy
import subprocess
import sys
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.hf import model_plans, style_names, transformers_version


class Experts(nn.Module):
    """Fused gates of four experts; each row goes through one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8) / 3)
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6) / 3)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("nh,nfh->nf", x, self.gate_up_proj[chosen]).chunk(2, dim=-1)
        return torch.einsum("nf,nhf->nh", F.silu(gate) * up, self.down_proj[chosen])


class Block(nn.Module):
    """Attention with as many keys as queries, a scale for each head, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.o_proj = nn.Linear(8, 8)
        self.sinks = nn.Parameter(torch.randn(4))
        self.norm = nn.LayerNorm(8)
        self.experts = Experts()

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 2)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v) * self.sinks[:, None, None].sigmoid()
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.experts(self.norm(x).flatten(0, 1), chosen.flatten()).view_as(x)


class Model(nn.Module):
    tp_plan: ClassVar = {
        "embed": "embedding_rowwise",
        "layers.*.q_proj": "colwise",
        "layers.*.k_proj": "colwise",
        "layers.*.v_proj": "colwise",
        "layers.*.o_proj": "rowwise",
        "layers.*.sinks": "colwise",
        "layers.*.norm": "replicated_with_grad_allreduce",
        "layers.*.experts": "moe_tp_experts",
        "layers.*.experts.gate_up_proj": "packed_colwise",
        "layers.*.experts.down_proj": "rowwise",
        "head": "colwise_gather_output",
    }
    ep_plan: ClassVar = {
        "layers.*.experts": "ep_dispatch_experts",
        "layers.*.experts.gate_up_proj": "grouped_gemm",
        "layers.*.experts.down_proj": "grouped_gemm",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids) + torch.linspace(0, 1, ids.shape[1])[:, None]  # plain, made inside
        for layer in self.layers:
            x = layer(x, ids % 4)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def ids() -> torch.Tensor:
    return torch.randint(11, (4, 5))


def check(model: nn.Module, parallel: nn.Module, batch: torch.Tensor, given: torch.Tensor) -> None:
    losses = []
    for each, inputs in ((model, batch), (parallel, given)):
        loss = each(inputs)
        loss.backward()
        losses.append(loss.full_tensor() if isinstance(loss, sw.DTensor) else loss)
    torch.testing.assert_close(losses[1], losses[0])
    for (name, mine), theirs in zip(parallel.named_parameters(), model.parameters(), strict=True):
        grad: Any = mine.grad
        grad = grad.full_tensor() if isinstance(grad, sw.DTensor) else grad
        torch.testing.assert_close(
            grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("plan", ["auto", "ep", "derived"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_plan_gives_the_numbers_of_one_device(plan: str, ranks: int) -> None:
    model, batch = Model(), ids()
    parallel: Any = sw.hf.parallelize(copy.deepcopy(model), sw.init_device_mesh("cpu", (ranks,)), plan)
    experts = parallel.layers[0].experts
    if plan != "derived":
        expected = {"auto": "f32[4,12,8] S1/2", "ep": "f32[4,12,8] S0"}[plan]
        assert repr(experts.gate_up_proj.spec) == expected
    assert parallel.head.weight is parallel.embed.weight
    check(model, parallel, batch, batch)


@pytest.mark.parametrize("plan", ["tp", "ep"])
def test_a_plan_and_fully_shard(plan: str) -> None:
    model, batch = Model(), ids()
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel: Any = sw.fully_shard(sw.hf.parallelize(copy.deepcopy(model), mesh["tp"], plan), mesh["dp"])
    check(model, parallel, batch, sw.distribute_tensor(batch, mesh, [sw.Shard(0), sw.Replicate()]))


@pytest.mark.parametrize("plan", ["tp", "ep"])
def test_a_plan_and_a_batch_on_more_axes(plan: str) -> None:
    model, batch = Model(), ids()
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel: Any = sw.hf.parallelize(copy.deepcopy(model), mesh["tp"], plan)
    check(model, parallel, batch, sw.distribute_tensor(batch, mesh, [sw.Shard(0), sw.Replicate()]))
    assert parallel.layers[0].experts.down_proj.device_mesh == mesh["tp"]


def test_a_model_without_a_plan_is_derived_with_a_warning() -> None:
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2)])
    plain, x = copy.deepcopy(blocks), torch.randn(3, 4)
    mesh = sw.init_device_mesh("cpu", (2,))
    with pytest.warns(
        UserWarning, match=r"Sequential carries no plan; one was derived from its structure: \*\.0, \*\.2"
    ):
        parallel: Any = sw.hf.parallelize(blocks, mesh)
    assert parallel[1][0].weight.placements == (sw.Shard(0),)
    torch.testing.assert_close(parallel(x).full_tensor(), plain(x))

    with pytest.warns(UserWarning, match="no attention and no MLP was recognized"):
        parallel = sw.hf.parallelize(nn.Linear(4, 4), mesh)
    assert parallel.weight.placements == (sw.Replicate(),)


def test_what_is_not_known_is_refused_before_anything_changes() -> None:
    mesh, model = sw.init_device_mesh("cpu", (2,)), Model()
    with pytest.raises(sw.UnsupportedError, match=r"style 'colwize' \(for 'head'\) is not known") as error:
        sw.hf.parallelize(model, mesh, {"layers.*.q_proj": "colwise", "head": "colwize"})
    assert "colwise" in str(error.value.hint)
    with pytest.raises(sw.LayoutError, match="plan='pipeline' is not known"):
        sw.hf.parallelize(model, mesh, "pipeline")
    with pytest.raises(sw.UnsupportedError, match="Linear carries no tp plan"):
        sw.hf.parallelize(nn.Linear(2, 2), mesh, "tp")
    with pytest.raises(sw.MeshError, match="a plan is for one axis"):
        sw.hf.parallelize(model, sw.init_device_mesh("cpu", (2, 2)))
    assert not any(isinstance(parameter, sw.DTensor) for parameter in model.parameters())


def test_a_style_may_be_given_in_the_place_of_a_name() -> None:
    style = sw.parallel.ColwiseParallel(use_local_output=False)
    parallel = sw.hf.parallelize(nn.Sequential(nn.Linear(4, 6)), sw.init_device_mesh("cpu", (3,)), {"0": style})
    assert parallel(torch.ones(1, 4)).placements == (sw.Shard(1),)


def test_every_style_has_one_meaning() -> None:
    assert not style_names.SILENT & (style_names.LAYERS.keys() | style_names.PARAMETERS.keys() | style_names.EXPERTS)
    assert style_names.LAYERS.keys() <= style_names.PARAMETERS.keys()
    assert model_plans.named_plan(Model(), "ep").keys() >= Model.ep_plan.keys()
    assert "layers.*.experts" in model_plans.named_plan(Model(), "ep")


def test_versions_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = type(sys)("transformers")
    monkeypatch.setitem(sys.modules, "transformers", fake)
    fake.__version__ = "4.57.0"
    with pytest.raises(ImportError, match=r"transformers 4\.57\.0 is not supported"):
        transformers_version.check_loaded()
    fake.__version__ = ".".join(map(str, transformers_version.OLDEST)) + ".1"
    transformers_version.check_loaded()
    fake.__version__ = "99.0.0"
    monkeypatch.setattr(transformers_version, "_warned", [])
    with pytest.warns(UserWarning, match=r"transformers 99\.0\.0 is newer than"):
        transformers_version.check_loaded()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError):
        transformers_version.load_transformers()


def test_the_package_does_not_import_transformers() -> None:
    code = "import sys, shardwise; assert 'shardwise.hf' not in sys.modules; shardwise.hf; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "shardwise.hf.model_plans" in found.stdout.split()
    assert "transformers" not in found.stdout.split()
