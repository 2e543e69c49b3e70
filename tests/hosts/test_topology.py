"""Links measured on hosts, and routes that use them: fewer bytes between hosts, the values of one device."""

import json

import pytest

from shardwise.fabric.machine_file import read_machine
from tests.hosts.network_hosts import Hosts


def test_routes_over_hosts_send_less_between_them() -> None:
    """Counted at the hosts' network cards."""
    with Hosts(2) as hosts:
        ended = hosts.torchrun("-m", "tests.hosts.topology_program", "512", "512", "2", ranks=4)
    assert all(status == 0 for status, _ in ended), ended
    found = [json.loads(line) for line in ended[0].text.splitlines() if line.startswith("{")]
    assert [(row["collective"], row["mesh"]) for row in found] == [
        ("all-reduce", "8"), ("all-gather", "8"), ("reduce-scatter", "8"), ("all-reduce", "dp=2,tp=4"),
        ("all-gather", "dp=2,tp=4"), ("exchange", "dp=2,tp=4"),
    ]  # fmt: skip
    for row in found:
        assert row["flat"]["route"] != row["hosts"]["route"]
        assert row["hosts"]["bytes"] < 0.65 * row["flat"]["bytes"], row


def test_calibrate_finds_hosts_and_slow_links() -> None:
    with Hosts(2, rate="40mbit") as hosts:
        path = hosts.shared_disk / "machine.json"
        command = ("-m", "shardwise", "calibrate", str(path), "--mesh", "dp=2,tp=2", "--largest", "256KiB", "--json")
        ended = hosts.torchrun(*command, ranks=2)
        assert all(status == 0 for status, _ in ended), ended
        machine = read_machine(path)
    assert machine.hosts == ("host0", "host1")
    assert machine.ranks_per_host == 2
    assert machine.across.beta > machine.inside.beta
    assert len(machine.measurements) == 3 * 4 * 3  # kinds of groups, collectives, sizes
    report = json.loads(ended[0].text[ended[0].text.index("\n{\n") :])
    assert {row["axes"] for row in report["axes"]} == {"dp", "tp", "dp x tp"}
    assert len(report["routes"]) == 4
    for row in [*report["axes"], *report["routes"]]:
        assert row["predicted"] > 0
        assert row["measured"] > 0
    assert report["step"]["communication"] > 0
    assert "{" not in ended[1].text  # only rank 0 reports


@pytest.mark.parametrize("hosts_of", [3])
def test_calibrate_on_one_rank_a_host(hosts_of: int) -> None:
    with Hosts(hosts_of, rate="200mbit") as hosts:
        path = hosts.shared_disk / "machine.json"
        ended = hosts.torchrun("-m", "shardwise", "calibrate", str(path), "--largest", "64KiB", ranks=1)
        assert all(status == 0 for status, _ in ended), ended
        machine = read_machine(path)
    assert len(machine.hosts) == 3
    assert {one.group for one in machine.measurements} == {"across"}
    assert machine.inside == machine.across == machine.mixed
    assert "A step of a fully sharded network: predicted" in ended[0].text


def test_doctor_reports_all_ranks_and_tests_every_collective() -> None:
    with Hosts(2, rate="200mbit") as hosts:
        ended = hosts.torchrun("-m", "shardwise", "doctor", "--mesh", "dp=2,tp=2", "--json", ranks=2)
    assert all(status == 0 for status, _ in ended), ended
    report = json.loads(ended[0].text[ended[0].text.index("\n{\n") :])
    assert [one["host"] for one in report["ranks"]] == ["host0", "host0", "host1", "host1"]
    assert {one["axis"] for one in report["axes"]} == {"dp", "tp"}
    assert len(report["self_test"]) == 10  # five collectives, two axes
    assert not any(report["self_test"].values())
    assert not [text for text in report["problems"] if "wrong values" in text or "versions" in text]
    assert "{" not in ended[1].text
