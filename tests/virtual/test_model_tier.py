"""The model tier itself: its comparisons, counts and page. The models run where their libraries are installed."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from tests.models import model_check
from tests.models.__main__ import page, sampled
from tests.models.architectures import ARCHITECTURES, LIBRARIES, Architecture
from tests.models.model_check import PASSED, Report, check_architecture
from tests.models.training_programs import MESHES, OF_TOKENS, PROGRAMS, WAYS, edited_lines, plain

ROOT = Path(__file__).parents[2]


class Model(nn.Module):
    """Small, with what can go wrong: dropout, batch norm, a buffer, a parameter that gets no gradient."""

    tp_plan: ClassVar = {"up": "colwise", "down": "rowwise", "experts.w": "packed_colwise", "experts": "moe_tp_experts"}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.experts = Gated()
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(F.relu(self.up(self.experts(self.norm(x))))))


class Gated(nn.Module):
    """Two matrices in one, as fused gates are."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(12, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.w).chunk(2, dim=-1)
        return F.silu(gate) * up


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(7, 6), "y": torch.randint(3, (7,))}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Architecture:
    architecture = Architecture("small", "torch", Model, batch, loss)
    monkeypatch.setitem(ARCHITECTURES, "small", architecture)
    return architecture


def test_every_way_of_a_small_model_passes(small: Architecture) -> None:
    report = check_architecture("small", dtype=torch.float64)
    assert report.results == {(way, mesh): PASSED for way in WAYS if way not in OF_TOKENS for mesh in PROGRAMS[way]}


class Attending(nn.Module):
    """One layer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.heads, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(self.table(ids)).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_tokens_are_sharded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens() -> dict[str, torch.Tensor]:
        return {"x": torch.randint(11, (7, 10)), "y": torch.randint(11, (7, 10))}

    def of_each(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    monkeypatch.setitem(ARCHITECTURES, "tokens", Architecture("tokens", "torch", Attending, tokens, of_each))
    report = check_architecture("tokens", OF_TOKENS, dtype=torch.float64)
    assert report.results == {(way, mesh): PASSED for way in OF_TOKENS for mesh in PROGRAMS[way]}


def test_what_is_wrong_is_found(small: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = model_check.state_after(plain(small))
    for kind, name in (("gradient", "up.weight"), ("parameter", "down.bias"), ("buffer", "norm.running_mean")):
        got = {each: dict(tensors) for each, tensors in wanted.items()}
        got[kind][name] = got[kind][name] + 1e-3 * got[kind][name].abs().max()
        (found,) = model_check.differences(got, wanted, 1e-4)
        assert found.startswith(f"{kind} {name}: differs by")
        got[kind][name] = torch.full_like(got[kind][name], torch.nan)
        assert len(list(model_check.differences(got, wanted, 1e-4))) == 1
        del got[kind][name]
        assert list(model_check.differences(got, wanted, 1e-4)) == [f"{kind} on one side alone: {name}"]

    def stopped(task: Architecture) -> None:
        raise ValueError("no such model")

    monkeypatch.setitem(PROGRAMS, "replicated", dict.fromkeys(MESHES, stopped))
    failures = check_architecture("small", ["replicated"]).failures
    assert failures == {("replicated", mesh): "ValueError: no such model" for mesh in MESHES}


def test_a_plan_that_names_nothing_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.tp_plan = {"layers.*.up": "colwise"}
    with pytest.raises(ValueError, match="shards no module of Sequential"):
        sw.hf.plan_of(model, "tp")


def test_programs_change_at_most_three_lines() -> None:
    counts = {(way, mesh): edited_lines(program) for way, by in PROGRAMS.items() for mesh, program in by.items()}
    assert edited_lines(plain) == 0
    assert all(0 < count <= 3 for count in counts.values()), counts


def test_a_sample_has_every_library() -> None:
    chosen = sampled(list(ARCHITECTURES), 8, seed=0)
    assert len(chosen) == 8
    assert {ARCHITECTURES[name].library for name in chosen} == set(LIBRARIES)


def test_the_page_lists_the_architectures_and_their_failures() -> None:
    text = (ROOT / "docs/models.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[rows.index("architecture") + 2 :] == list(ARCHITECTURES)

    passing, failing = Report("first", "torch"), Report("second", "torch")
    passing.results = {("replicated", mesh): PASSED for mesh in MESHES}
    failing.results = {("replicated", MESHES[0]): PASSED, ("replicated", MESHES[1]): "MeshError: what\nhint"}
    text = page([passing, failing, Report("third", "absent", skipped="absent is not installed")])
    assert "| first | torch | 2 | - | - | - | - | - |" in text
    assert "| second | torch | 2 / fails | - | - | - | - | - |" in text
    assert "- second, replicated on (2, 2): MeshError: what\n" in text
    assert "- third: absent is not installed" in text
