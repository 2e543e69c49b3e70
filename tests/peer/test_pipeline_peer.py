"""Schedules of pipelines against those of torch.distributed.pipelining: the same tables, and its validator agrees."""

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

import shardwise as sw
from shardwise.pipelines import pipeline_table
from shardwise.pipelines.pipeline_tables import stage_ranks

SIZES = [(1, 2), (2, 2), (2, 3), (2, 6), (3, 6), (4, 4), (4, 8), (8, 16)]


def as_theirs(actions: list[Any]) -> list[Any]:
    return [theirs._Action.from_str(str(action)) for action in actions]


class Stage:
    """As much of a stage as their schedules look at."""

    def __init__(self, rank: int, index: int, ranks: int, stages: int) -> None:
        self.group_rank, self.group_size, self.stage_index, self.num_stages = rank, ranks, index, stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward = True
        self.device, self.group = "cpu", None

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb1p", 1), ("zb1p", 2), ("zbv", 2),
     ("dualpipev", 2)],
)  # fmt: skip
def test_their_validator_accepts_ours(schedule: str, chunks: int, ranks: int, microbatches: int) -> None:
    refused = {
        "interleaved": microbatches % max(1, microbatches // ranks),
        "zb1p": microbatches % max(1, microbatches // ranks),
        "dualpipev": microbatches < 2 * ranks,
    }
    if refused.get(schedule):
        with pytest.raises(sw.LayoutError):
            pipeline_table(schedule, ranks, microbatches, chunks)
        return
    table = pipeline_table(schedule, ranks, microbatches, chunks)
    actions = {rank: as_theirs(row) for rank, row in enumerate(table)}
    homes = theirs._validate_schedule(actions, ranks, ranks * chunks, microbatches)
    assert homes == dict(enumerate(stage_ranks(schedule, ranks, ranks * chunks)))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 3), (3, 7), (4, 4), (4, 8)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_on_each_rank_is_theirs(name: str, ranks: int, microbatches: int) -> None:
    kind: Any = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}[name]
    other = kind(Stage(0, 0, ranks, ranks), microbatches, loss_fn=lambda *_: None)._get_pipeline_order()
    for rank, row in enumerate(pipeline_table(name, ranks, microbatches)):
        computed = [action for action in other[rank] if action is not None and action.is_compute_op]
        if name == "1f1b" and rank == ranks - 1:  # torch counts the forwards of its last rank from 1
            computed = [a._replace(microbatch_index=a.microbatch_index - (str(a)[1] == "F")) for a in computed]
        assert computed == as_theirs(row)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 4), (3, 6), (4, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_is_theirs(ranks: int, microbatches: int, chunks: int) -> None:
    stages: Any = [Stage(0, chunk * ranks, ranks, chunks * ranks) for chunk in range(chunks)]
    other = theirs.ScheduleInterleaved1F1B(stages, microbatches, loss_fn=lambda *_: None)
    for rank, row in enumerate(pipeline_table("interleaved", ranks, microbatches, chunks)):
        assert [action for action in other.pipeline_order[rank] if action is not None] == as_theirs(row)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 2), (2, 4), (3, 6), (4, 4), (4, 8), (4, 12), (8, 16)])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_zero_bubble_interleaved_is_theirs(ranks: int, microbatches: int, chunks: int) -> None:
    stages: Any = [Stage(0, chunk * ranks, ranks, chunks * ranks) for chunk in range(chunks)]
    other = theirs.ScheduleInterleavedZeroBubble(stages, microbatches, loss_fn=lambda *_: None)
    for rank, row in enumerate(pipeline_table("zb1p", ranks, microbatches, chunks)):
        assert [action for action in other.pipeline_order[rank] if action is not None] == as_theirs(row)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 2), (2, 3), (2, 8), (3, 4), (4, 4), (4, 8), (8, 20)])
@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_schedules_in_the_shape_of_a_v_are_theirs(name: str, ranks: int, microbatches: int) -> None:
    if name == "dualpipev" and microbatches < 2 * ranks:
        pytest.skip("refused there and here")
    kind: Any = {"zbv": theirs.ScheduleZBVZeroBubble, "dualpipev": theirs.ScheduleDualPipeV}[name]
    stages: Any = [Stage(0, 0, ranks, 2 * ranks), Stage(0, 2 * ranks - 1, ranks, 2 * ranks)]
    other = kind(stages, microbatches, loss_fn=lambda *_: None)
    for rank, row in enumerate(pipeline_table(name, ranks, microbatches)):
        assert [action for action in other.pipeline_order[rank] if action is not None] == as_theirs(row)
