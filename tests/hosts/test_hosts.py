"""Programs on two to four hosts give the values of one device; hosts are removed whatever happens."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.network_hosts import PREFIX, ROOT, Hosts, has_netem, ip, remove_stale

PROGRAMS = ("demo", "training", "pipeline", "experts")


@pytest.mark.parametrize(
    ("hosts", "ranks", "programs"),
    [(2, 2, PROGRAMS), (3, 1, ("training", "experts")), (4, 1, PROGRAMS)],
)
def test_programs_give_the_values_of_one_device(hosts: int, ranks: int, programs: tuple[str, ...]) -> None:
    with Hosts(hosts, rate="500mbit") as made:
        ended = made.torchrun("-m", "tests.hosts.host_programs", *programs, ranks=ranks)
        assert all(made.sent_bytes(number) > 10_000 for number in range(hosts))  # they have talked to each other
    for number, (status, text) in enumerate(ended):
        assert status == 0, text
        for name in programs:
            assert text.count(f"{name} done on rank") == text.count(f"of host{number}") / len(programs) == ranks


def test_a_wrong_value_on_one_host_ends_all() -> None:
    with Hosts(2) as hosts:
        ended = hosts.torchrun("-m", "tests.hosts.host_programs", "wrong", ranks=1, timeout=120)
    assert all(status != 0 for status, _ in ended)
    assert "a value differs" in ended[1].text


def test_delays() -> None:
    if not has_netem():
        pytest.skip("this kernel cannot delay packets (netem)")
    with Hosts(2, delay=20, loss=1) as hosts:
        assert "delay 20ms" in hosts.queue(0)
        assert "loss 1%" in hosts.queue(0)


def test_a_rate_holds() -> None:
    """Two megabytes at 8 Mbit/s: most packets have to wait."""
    with Hosts(2, rate="8mbit") as hosts:
        server = f"s = socket.create_server(('{hosts.addresses[1]}', 9)); c, _ = s.accept()\nwhile c.recv(65536): pass"
        sender = (
            f"while True:\n  try: c = socket.create_connection(('{hosts.addresses[1]}', 9)); break\n"
            "  except OSError: time.sleep(0.1)\n"
            "c.sendall(bytes(2000000)); c.shutdown(1); c.recv(1)"
        )
        for number, text in ((1, server), (0, sender)):
            command = (sys.executable, "-c", f"import socket, time\n{text}")
            process = hosts.start(number, command, hosts.folder / f"said{number}")
        assert process.wait(60) == 0
        assert hosts.sent_bytes(0) > 2_000_000
        assert hosts.sent_bytes(1) < 500_000
        assert "rate 8Mbit" in hosts.queue(0)
        assert int(hosts.queue(0).split("overlimits")[1].split()[0]) > 10


def test_hosts_of_a_killed_harness_are_removed_with_their_processes() -> None:
    script = (
        "import sys, time\nfrom tests.hosts.network_hosts import Hosts\nhosts = Hosts(2)\n"
        "sleeper = hosts.start(1, ('sleep', '1000'), hosts.folder / 'o')\n"
        "print(hosts.names[1], sleeper.pid, hosts.folder, flush=True)\ntime.sleep(1000)"
    )
    with subprocess.Popen((sys.executable, "-c", script), cwd=ROOT, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        name, pid, folder = harness.stdout.readline().split()
        assert name in ip("netns", "list")
        assert name not in remove_stale()  # it is in use
        assert name in ip("netns", "list")
        os.kill(harness.pid, signal.SIGKILL)
    remove_stale()  # or another worker of this test run, at the same moment
    deadline = time.monotonic() + 10
    while name in ip("netns", "list") or Path(folder).exists() or is_running(pid):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    line = Path(f"/proc/{pid}/cmdline")
    return line.exists() and bool(line.read_bytes())


def test_nothing_is_left_after_an_error() -> None:
    with pytest.raises(TimeoutError, match="did not end within"), Hosts(2) as hosts:
        hosts.torchrun("-c", "pass", timeout=0.01)
    mine = f"{PREFIX}-{os.getpid()}-"
    assert mine not in ip("netns", "list")
    assert not hosts.folder.exists()
