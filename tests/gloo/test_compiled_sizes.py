"""A sample of the compiled programs of many sizes; `python -m tests.gloo.compiled_sizes --programs 200` runs more."""

import shardwise as sw
from tests.gloo.compiled_sizes import Program, check, run
from tests.gloo.processes import ProcessPool

R, S = sw.Replicate(), sw.Shard
UNEVEN_TWICE = Program(
    seed=0, mesh=(2, 2), layers=(("layer_norm", 8, 8), ("linear", 8, 6)),
    placements=((R, R), (R, R), (S(1), R), (R, R)), given=(S(0), R), length=None, sizes=(7, 5), dynamic=None,
)  # fmt: skip


def test_a_second_uneven_batch(gloo4: ProcessPool) -> None:
    assert gloo4.run(run, UNEVEN_TWICE, "aot_eager", timeout=120) == [None] * 4


def test_random_layers_layouts_and_sizes(gloo4: ProcessPool) -> None:
    assert not check(range(2), gloo4)


def test_programs_are_the_same_every_time() -> None:
    assert Program.of(3) == Program.of(3)
    assert Program.of(3) != Program.of(4)
