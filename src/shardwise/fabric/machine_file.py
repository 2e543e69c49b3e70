"""The machine file: hosts, measured links and measurements of a cluster, as JSON that is validated when it is read."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import MachineFileError
from shardwise.plan.cost import CostModel, HostLinks, Link

__all__ = ["Machine", "Measurement", "load_machine", "parse_machine", "read_machine", "write_machine"]

VERSION = 1
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
HINT = "make one with shardwise calibrate"
LONGEST = 1 << 24  # bytes of a file that is read at all


@dataclass(frozen=True)
class Measurement:
    """One measured collective: the kind of its groups, the bytes that a rank receives, and the slowest rank's time."""

    group: str
    ranks: int
    collective: str
    received: float
    seconds: float


@dataclass(frozen=True)
class Machine:
    """What was measured of a cluster.

    Args:
        device_type: "cpu" or "cuda".
        hosts: the names of the hosts, in the order of their ranks.
        ranks_per_host: how many ranks each has.
        inside: the link of ranks of one host.
        across: the link of one rank of each host, all such groups at once.
        mixed: the link of groups with several ranks of several hosts.
        measurements: what the links were fitted to.
    """

    device_type: str
    hosts: tuple[str, ...]
    ranks_per_host: int
    inside: Link
    across: Link
    mixed: Link
    measurements: tuple[Measurement, ...] = ()

    @property
    def cost_model(self) -> CostModel:
        """The model that plans with these links."""
        links = HostLinks(self.ranks_per_host, self.inside, self.across, self.mixed)
        return CostModel(hosts={self.device_type: links})


def load_machine(path: str | Path) -> CostModel:
    """The cost model of a machine file, which `shardwise calibrate` writes. Every rank must load the same file.

    Args:
        path: the file.

    Example:
        >>> import tempfile
        >>> link = Link(4e-5, 1e-9)
        >>> path = Path(tempfile.mkdtemp()) / "machine.json"
        >>> write_machine(Machine("cpu", ("a", "b"), 2, link, Link(1e-4, 1e-8), Link(1e-4, 1e-8)), path)
        >>> load_machine(path).hosts["cpu"].ranks_per_host
        2
    """
    return read_machine(path).cost_model


def read_machine(path: str | Path) -> Machine:
    """The contents of a machine file."""
    try:
        with open(path, "rb") as file:
            data = file.read(LONGEST + 1)
    except OSError as error:
        raise MachineFileError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > LONGEST:
        raise MachineFileError(f"{path} is no machine file: it is larger than {LONGEST} bytes")
    return parse_machine(data, str(path))


def write_machine(machine: Machine, path: str | Path) -> None:
    """Write a machine file."""
    text = json.dumps({"version": VERSION, **asdict(machine)}, indent=1)
    parse_machine(text.encode(), str(path))
    Path(path).write_text(text + "\n")


def parse_machine(data: bytes, name: str = "the file") -> Machine:
    """The machine of a JSON text; raises where something is missing, unknown or out of range."""
    reader = _Reader(name)
    try:
        found = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise MachineFileError(
            f"{name} is no machine file: {error}", hint="make one with shardwise calibrate"
        ) from None
    fields = ("version", "device_type", "hosts", "ranks_per_host", "inside", "across", "mixed", "measurements")
    reader.check(isinstance(found, dict) and sorted(found) == sorted(fields), "it must have the fields", fields)
    reader.check(found["version"] == VERSION, "its version must be", VERSION)
    reader.check(found["device_type"] in ("cpu", "cuda"), "device_type must be", "cpu or cuda")
    hosts = found["hosts"]
    reader.check(isinstance(hosts, list) and hosts and all(isinstance(h, str) for h in hosts), "hosts must be", "names")
    ranks = found["ranks_per_host"]
    reader.check(type(ranks) is int and 1 <= ranks <= 1 << 20, "ranks_per_host must be", "a count of at least 1")
    links = [reader.link(found[kind], kind) for kind in ("inside", "across", "mixed")]
    reader.check(isinstance(found["measurements"], list), "measurements must be", "a list")
    measured = tuple(reader.measurement(one) for one in found["measurements"])
    return Machine(found["device_type"], tuple(hosts), ranks, *links, measurements=measured)


class _Reader:
    """Checks of the parts of a file, with its name in the errors."""

    def __init__(self, name: str) -> None:
        self.name = name

    def check(self, holds: Any, what: str, wanted: Any) -> None:
        if not holds:
            text = ", ".join(map(str, wanted)) if isinstance(wanted, tuple) else wanted
            raise MachineFileError(f"{self.name} is no machine file: {what} {text}", hint=HINT)

    def number(self, value: Any, what: str, least: float = 0.0) -> float:
        holds = (type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value))
        self.check(holds and value >= least, f"{what} must be a number of at least", least)
        return float(value)

    def link(self, value: Any, kind: str) -> Link:
        holds = isinstance(value, dict) and sorted(value) == ["alpha", "beta", "factors"]
        self.check(holds, f"{kind} must have the fields", ("alpha", "beta", "factors"))
        factors = value["factors"]
        self.check(isinstance(factors, list), f"the factors of {kind} must be", "a list")
        for pair in factors:
            self.check(
                isinstance(pair, list) and len(pair) == 2 and pair[0] in COLLECTIVES,
                f"a factor of {kind} must be a number and one of",
                COLLECTIVES,
            )
        pairs = tuple((name, self.number(factor, f"a factor of {kind}", 1.0)) for name, factor in factors)
        return Link(
            self.number(value["alpha"], f"alpha of {kind}"), self.number(value["beta"], f"beta of {kind}"), pairs
        )

    def measurement(self, value: Any) -> Measurement:
        fields = ("group", "ranks", "collective", "received", "seconds")
        self.check(
            isinstance(value, dict) and sorted(value) == sorted(fields), "a measurement must have the fields", fields
        )
        self.check(value["group"] in ("inside", "across", "mixed"), "a group must be", "inside, across or mixed")
        self.check(value["collective"] in COLLECTIVES, "a collective must be one of", COLLECTIVES)
        self.check(type(value["ranks"]) is int and value["ranks"] > 1, "ranks must be", "a count of at least 2")
        received, seconds = (self.number(value[key], key) for key in ("received", "seconds"))
        return Measurement(value["group"], value["ranks"], value["collective"], received, seconds)
