"""explain where backward runs on a thread of the device's: its operators still have their lines and modules."""

import threading

import shardwise as sw
from tests.virtual.block import Block, batch, line_of, train


def check_backward(device: str) -> set[int]:
    """The threads that backward was recorded on."""
    with sw.virtual():
        mesh = sw.init_device_mesh(device, (4,), mesh_dim_names=("tp",))
    model, x = Block(mesh), batch(mesh)
    threads: set[int] = set()
    x.register_hook(lambda gradient: threads.add(threading.get_ident()))
    for _ in range(2):
        with sw.explain() as report:
            train(model, x)
        gather, _, back = [record for record in report.records if record.moves]
        assert [move.collective for move in gather.moves + back.moves] == ["all_gather", "reduce_scatter"]
        assert (back.phase, back.where.line, back.module) == ("backward", line_of("gather"), "Block")
        assert report.record_at(back.cause) is gather
    return threads


def test_backward_on_the_devices_thread_is_recorded() -> None:
    assert threading.get_ident() not in check_backward("cuda")


def test_the_check_itself_on_this_thread() -> None:
    assert check_backward("cpu") == {threading.get_ident()}
