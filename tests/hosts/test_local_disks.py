"""Checkpoints where each host has a disk of its own."""

import sys

from tests.hosts.network_hosts import Ended, Hosts, environment_of

PROGRAMS = ("loads", "tools", "lost_files", "lost_directory", "full_disk", "directory_disappears")
ATTACKS = ("strangers", "late_files", "interrupted", "saved_by_many")


def test_checkpoints_on_disks_of_their_own() -> None:
    with Hosts(2) as made:
        passed(made, PROGRAMS)


def passed(hosts: Hosts, programs: tuple[str, ...]) -> None:
    """Run programs on two ranks of each host."""
    for status, text in hosts.torchrun("-m", "tests.hosts.disk_programs", *programs, ranks=2):
        assert status == 0, text
        assert all(text.count(f"{name} done on rank") == 2 for name in programs), text


def run(hosts: Hosts, program: str) -> list[Ended]:
    """Run a program with one rank on each host, without torchrun, which waits for hosts that were killed."""
    command = (sys.executable, "-m", "tests.hosts.disk_programs", program)
    outputs = [hosts.folder / f"{program}{rank}" for rank in range(hosts.count)]
    started = [
        hosts.start(rank, command, output, **environment_of(rank, hosts, 1)) for rank, output in enumerate(outputs)
    ]
    return [
        Ended(process.wait(120), output.read_text(errors="replace"))
        for process, output in zip(started, outputs, strict=True)
    ]


def test_a_kill_while_disks_are_published_loses_no_checkpoint() -> None:
    with Hosts(2) as made:
        first, second = run(made, "killed")
        assert second.status == -9
        assert "refused on rank 0" in first.text, first.text
        assert "left ['step-1']" in first.text, first.text
        for status, text in run(made, "resumed"):
            assert status == 0, text


def test_files_of_other_runs_interrupts_and_fewer_ranks() -> None:
    with Hosts(2) as made:
        passed(made, ATTACKS)
        for status, text in run(made, "loaded_by_fewer"):
            assert status == 0, text
