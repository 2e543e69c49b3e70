"""The nodes of the graphs of compiled programs, how often these are compiled, and refused programs."""

from collections.abc import Iterator

import pytest

from tests.gloo.processes import ProcessPool
from tests.peer import compiled


@pytest.fixture(scope="module")
def alone() -> Iterator[ProcessPool]:
    with ProcessPool(1, backend=None) as pool:
        yield pool


def test_graphs_hold_local_operators_and_the_collectives_of_eager_alone(alone):
    (found,) = alone.run(compiled.structures, timeout=240)
    assert set(found) == set(compiled.PROGRAMS)
    for name, (strange, dead, eager, issued, same_layout) in found.items():
        assert not strange, name
        assert not dead, name
        assert issued == eager, name
        assert same_layout, name


def test_compiled_once_for_ten_steps_and_again_for_what_is_guarded(alone):
    (found,) = alone.run(compiled.recompiles, timeout=240)
    assert found == {
        "ten steps": 1,
        "another placement": 2,
        "another mesh": 2,
        "sizes without marks": 2,
        "marked sizes": 1,
        "marked sizes that are gathered": 1,
        "marked sizes through views": 1,
        "marked sizes that a view works out": 1,
        "marked sizes of a loss": 1,
        "uneven sizes": 2,
    }


def test_checkpointed_activations_are_communicated_again(alone):
    ((plain, again),) = alone.run(compiled.checkpointed, timeout=120)
    assert plain
    assert len(again) > len(plain)


def test_optimizers(alone):
    (layouts,) = alone.run(compiled.optimized, timeout=120)
    assert layouts == ["R S0", "R S0", "R S1", "R R"] * 2


def test_a_step_that_dynamo_breaks_up(alone):
    assert alone.run(compiled.training_step_with_graph_breaks, timeout=120) == ["P P"]


def test_make_fx(alone):
    (names,) = alone.run(compiled.locals_traced, timeout=60)
    assert names[:2] == ["_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"]
    assert names[-1] == "aten.exp.default"
    (names,) = alone.run(compiled.dtensors_traced, timeout=60)
    assert sum(name == "_c10d_functional.all_gather_into_tensor.default" for name in names) == 2
    assert all(name.startswith(("aten.", "_c10d_functional.", "<built-in")) for name in names), names


def test_what_cannot_be_compiled_is_said(alone):
    (said,) = alone.run(compiled.refused, timeout=120)
    assert "a dry run has no values" in said["dry"]
    assert "run_check" in said["run_check"]
    assert "src_data_rank=None" in said["source rank"]
    assert "shardwise.debug.make_fx" in said["make_fx"]
    for view in ("view", "row", "column", "virtual view"):
        assert "aliased inputs that are mutated" in said[f"written beside a {view}"]
    assert "take the view inside" in said["written to a row"]
    assert "written beside another part of a buffer" not in said


def test_virtual_ranks_are_compiled_into_one_graph(alone):
    assert alone.run(compiled.virtual_ranks, timeout=120) == [[(41664.0, "S0 S1", True)] * 2]


def test_modules_made_parallel(alone):
    (found,) = alone.run(compiled.parallel_modules, timeout=120)
    # a graph for each linear layer between the hooks that gather and free, where one graph cannot hold them; none for
    # the activation, whose file Dynamo does not compile on its own, and none for code of ours
    assert found == {"tensor_parallel": (True, 1), "fully_sharded": (True, 2), "replicated": (True, 1)}
    assert alone.run(compiled.parallel_modules_on_a_larger_mesh, timeout=120) == [True]


def test_symbolic_sizes_forward_and_backward(alone):
    (found,) = alone.run(compiled.symbolic_sizes, timeout=120)
    assert found == dict.fromkeys(compiled.SIZED, True)
    assert alone.run(compiled.symbolic_beside_uneven, timeout=60) == ["S0 R"]


def test_inductor(alone):
    assert alone.run(compiled.inductor, timeout=240) == [("S0 R", "P S0")]
