"""Kinds of parallelism together on processes: some cells of the matrix, and what else stages of a pipeline share."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.gloo.processes import ProcessPool
from tests.pipelines import batch, language_model, loss_of
from tests.virtual.compositions import Case, Trained, compare, one_device, together

SAMPLE = [
    Case("fsdp", ("pp", "dp"), "accumulation"),
    Case("plan", ("pp", "tp"), "dropout"),
    Case("ddp", ("pp", "cp"), "bfloat16"),
    Case("fsdp", ("dp", "tp"), "checkpointing"),
    Case("ddp", ("dp", "ep"), "bfloat16"),
    Case("plan", ("cp", "ep"), "dropout"),
    Case("fsdp", ("ep", "tp"), "accumulation"),
    Case("fsdp", ("dp", "cp"), "compiled"),
    Case("fsdp", ("dp", "cp"), "captured"),
]


def trained(cases: list[Case]) -> list[Trained]:
    return [together(case) for case in cases]


@pytest.mark.filterwarnings("ignore")
def test_pairs_train_as_one_device(gloo4: ProcessPool) -> None:
    answers = gloo4.run(trained, SAMPLE, timeout=240)
    for number, case in enumerate(SAMPLE):
        losses, parameters = one_device(case)
        seen = set[str]()
        for rank, answer in enumerate(answers):
            found, own = answer[number]
            if "pp" not in case.axes or rank > 1:  # the last stage
                compare(case, (found, {}), (losses, {}))
            compare(case, (losses, own), (losses, parameters))
            seen |= own.keys()
        assert seen == parameters.keys()


def clips_over_stages() -> tuple[float, dict[str, torch.Tensor]]:
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    pipe = sw.pipeline(language_model(4, tied=True), mesh["pp"], microbatches=2)
    for step in range(2):
        pipe.step(*batch(step, 8), loss_of)
    norm = pipe.clip_grad_norm_(0.1)
    return float(norm), {name: value.grad for name, value in pipe.named_parameters() if value.grad is not None}


def test_tied_gradients_accumulate_and_are_clipped_over_all_stages(gloo4: ProcessPool) -> None:
    model = language_model(4, tied=True)
    for step in range(2):
        loss_of(model(batch(step, 8)[0]), batch(step, 8)[1]).backward()
    want = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = dict(model.named_parameters(remove_duplicate=False))
    seen = set[str]()
    for norm, own in gloo4.run(clips_over_stages, timeout=120):
        assert norm == pytest.approx(float(want), rel=1e-5)
        for name, value in own.items():
            torch.testing.assert_close(value, expected[name].grad, msg=lambda m, n=name: f"{n}: {m}")
        seen |= own.keys()
    assert seen == expected.keys()


def saves_stages(folder: str) -> tuple[list[str], list[bool]]:
    """The errors of states without names, and whether moments come back by names. A random state is on all ranks."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    pipe = sw.pipeline(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), mesh["pp"], microbatches=2)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    pipe.step(torch.randn(4, 4), torch.randn(4, 4), nn.functional.mse_loss)
    optimizer.step()
    path, errors = Path(folder), list[str]()
    (stage,) = pipe.stages.values()
    alike = nn.Sequential(*stage.children())  # a list of stages has such names
    for unnamed in ({"model": pipe, "optimizer": optimizer}, {"optimizer": optimizer}, {"model": alike}):
        try:
            sw.checkpoint.save(unnamed, path / "unnamed")
        except sw.AgreementError as raised:
            errors.append(str(raised))
    state: dict[str, Any] = {
        "model": pipe,
        "optimizer": sw.checkpoint.NamedOptimizer(pipe.module, optimizer),
        "random": torch.get_rng_state(),
    }
    sw.checkpoint.save(state, path / "names")
    before = [copy.deepcopy(optimizer.state[parameter]) for parameter in pipe.parameters()]
    for parameter in pipe.parameters():
        for value in optimizer.state[parameter].values():
            value.zero_()
    sw.checkpoint.load(state, path / "names")
    after = [optimizer.state[parameter] for parameter in pipe.parameters()]
    return errors, [torch.equal(old[key], new[key]) for old, new in zip(before, after, strict=True) for key in old]


def test_states_of_stages_are_saved_by_names(gloo4: ProcessPool, tmp_path: Path) -> None:
    for errors, same in gloo4.run(saves_stages, str(tmp_path), timeout=120):
        assert len(errors) == 3
        assert all("the ranks have different tensors named optimizer/state/0/" in error for error in errors[:2])
        assert "the ranks have different tensors named model/0.weight" in errors[2]
        assert all("checkpoint.NamedOptimizer(model, optimizer)" in error for error in errors)
        assert len(same) == 6
        assert all(same)
    stored = sw.checkpoint.read(tmp_path / "names")
    assert {"0.weight", "3.bias"} <= stored["model"].keys()
    assert "state.3.bias.exp_avg" in stored["optimizer"]


def loads_stages_without_entries(folder: str) -> list[tuple[Any, ...]]:
    """A stage that is frozen has no state of an optimizer, one without parameters nothing at all."""
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]
    layers[0].requires_grad_(False)
    pipe = sw.pipeline(nn.Sequential(*layers), mesh["pp"], split=["1", "2", "3"], microbatches=2)
    parameters = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    optimizers = [torch.optim.AdamW(parameters)] if parameters else []
    pipe.step(torch.randn(4, 4), torch.randn(4, 4), nn.functional.mse_loss)
    for optimizer in optimizers:
        optimizer.step()
    named = sw.checkpoint.NamedOptimizer(pipe.module, *optimizers)
    state: dict[str, Any] = {"model": pipe, "optimizer": named}
    sw.checkpoint.save(state, folder)
    return [sw.checkpoint.load(state, folder)[1:4]]


def test_stages_without_entries_are_loaded(gloo4: ProcessPool, tmp_path: Path) -> None:
    for fits in gloo4.run(loads_stages_without_entries, str(tmp_path / "c"), timeout=120):
        assert fits == [((), (), {})]


class WithCopies(nn.Module):
    """Its state dict has copies, and loading it communicates."""

    def __init__(self, value: float) -> None:
        super().__init__()
        mesh = sw.init_device_mesh("cpu", (4,))
        self.weight = nn.Parameter(sw.full((2,), value, device_mesh=mesh, placements=[sw.Shard(0)]))
        self.loads = 0

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: value.clone() for name, value in super().state_dict(*args, **options).items()}

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        self.loads += 1
        return super().load_state_dict(*args, **options)


def loads_copies_on_some_ranks(folder: str) -> int:
    sw.checkpoint.save({"model": WithCopies(5.0)}, folder)
    model = WithCopies(0.0)
    sw.checkpoint.load({"model": model}, folder)
    assert model.weight.full_tensor().eq(5).all()  # pyright: ignore[reportAttributeAccessIssue]
    return model.loads


def test_a_state_dict_is_given_on_all_ranks_or_none(gloo4: ProcessPool, tmp_path: Path) -> None:
    assert gloo4.run(loads_copies_on_some_ranks, str(tmp_path / "c"), timeout=120) == [1, 1, 1, 1]
