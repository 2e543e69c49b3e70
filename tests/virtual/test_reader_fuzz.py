"""A short, repeatable run of the fuzzer of readers, and what longer runs have found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.debug.limits.lock_file import Lock
from shardwise.fabric.machine_file import parse_machine
from tests.virtual import reader_fuzz
from tests.virtual.reader_fuzz import Readers


def test_readers_refuse_what_they_cannot_read() -> None:
    outcomes = reader_fuzz.run(500, seed=7, memory_every=4)
    assert sum(outcomes.values()) == 500
    assert {name for name, _ in outcomes} == set(Readers().names)
    assert sum(count for (_, returned), count in outcomes.items() if not returned) > 300


def test_the_fuzzer_notices() -> None:
    """A reader that opens a file, one that runs text and one that allocates too much are findings."""
    readers = Readers()
    for bad in (lambda data: Path("/dev/null").read_bytes(), lambda data: eval("1"), lambda data: {}["x"]):
        readers.all["lock"] = (bad, [])
        with pytest.raises((AssertionError, KeyError)):
            readers.run(bytes([readers.names.index("lock")]))
    readers.all["lock"] = (lambda data: bytearray(1 << 24), [])
    with pytest.raises(AssertionError, match="bytes for an input"):
        reader_fuzz.check_memory(readers, bytes([readers.names.index("lock")]))


@pytest.mark.parametrize("amount", [{"count": [], "received_bytes": 1}, {"count": 1, "received_bytes": 10**30}, 3])
def test_a_lock_file_with_other_amounts(amount: object) -> None:
    text = json.dumps({"shardwise_lock": 1, "communication": {"a": {"b": amount}}})
    with pytest.raises(sw.LayoutError, match="is not a lock file"):
        Lock.parse(text.encode(), "x")


def test_a_machine_file_with_a_huge_number_or_another_encoding() -> None:
    readers = Readers()
    content = json.loads(readers.all["machine"][1][0])
    content["inside"]["alpha"] = 10**400
    with pytest.raises(sw.MachineFileError, match="must be a number"):
        parse_machine(json.dumps(content).encode())
    with pytest.raises(sw.MachineFileError, match="no machine file"):
        parse_machine(readers.all["machine"][1][0].decode().encode("utf-16"))


def test_a_program_file_that_is_too_deep() -> None:
    with pytest.raises(sw.UnsupportedError, match="damaged"):
        Readers().read_a_program(b'{"format": ' + b"[" * 100_000)
