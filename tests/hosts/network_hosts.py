"""Hosts as network namespaces: each has an address, a host name and a disk; links between them have a given speed.

Nothing outside the namespaces is reached or changed: the switch that connects the hosts is a namespace, too. Names
contain the process that made them, so those of a process that was killed are removed by the next one. Linux and root.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

PREFIX = "swhosts"
ROOT = Path(__file__).parent.parent.parent
PORT = 29400  # of the rendezvous; a namespace has all ports to itself
NETWORK = "10.77"
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


def ip(*arguments: str, check: bool = True) -> str:
    """Run `ip` with these arguments."""
    done = subprocess.run(("ip", *arguments), capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@lru_cache
def why_not() -> str | None:
    """The reason for which hosts cannot be made here, None if they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"the command {missing[0]} is not installed"
    try:
        with Hosts(1, rate="100mbit"):
            return None
    except RuntimeError as error:
        return f"network namespaces cannot be made: {error}"


@lru_cache
def has_netem() -> bool:
    """Whether the kernel can delay and lose packets."""
    with Hosts(1) as hosts:
        made = subprocess.run(
            ("ip", "netns", "exec", hosts.names[0], "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"),
            capture_output=True, check=False,
        )  # fmt: skip
        return made.returncode == 0


class Ended(NamedTuple):
    """How the program of one host ended."""

    status: int
    text: str


class Hosts:
    """Some hosts and the switch between them; `close` ends their processes and removes them.

    Args:
        count: how many hosts.
        rate: of each link between hosts, as `tc` writes it ("200mbit"); None: as fast as the machine.
        inside: of the connections inside a host.
        cards: how many network cards a host has, each with the rate; rank k of a host uses `eth{k % cards}`.
        delay: milliseconds that a packet takes to another host; needs netem.
        loss: percent of packets that are lost; needs netem.
    """

    def __init__(
        self,
        count: int,
        *,
        rate: str | None = None,
        inside: str | None = None,
        cards: int = 1,
        delay: float = 0,
        loss: float = 0,
    ) -> None:
        remove_stale()
        self.count, self.cards = count, cards
        run = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_numbers)}"
        self.switch = f"{run}-net"
        self.names = [f"{run}-h{number}" for number in range(count)]
        self.addresses = [f"{NETWORK}.0.{number + 1}" for number in range(count)]
        self.folder = Path(tempfile.mkdtemp(prefix=f"{run}-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._build(rate, inside, delay, loss)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _build(self, rate: str | None, inside: str | None, delay: float, loss: float) -> None:
        for name in (self.switch, *self.names):
            ip("netns", "add", name)
        for card in range(self.cards):
            ip("-n", self.switch, "link", "add", f"br{card}", "type", "bridge")
            ip("-n", self.switch, "link", "set", f"br{card}", "up")
        for number, name in enumerate(self.names):
            ip("-n", name, "link", "set", "lo", "up")
            for card in range(self.cards):
                port, device = f"port{number}.{card}", f"eth{card}"
                ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", device, "netns", name)
                ip("-n", self.switch, "link", "set", port, "master", f"br{card}", "up")
                ip("-n", name, "addr", "add", f"{NETWORK}.{card}.{number + 1}/24", "dev", device)
                ip("-n", name, "link", "set", device, "up")
                if delay or loss:
                    _shape(name, device, "root", "netem", "delay", f"{delay}ms", "loss", f"{loss}%", "limit", "100000")
                if rate:
                    if not (delay or loss):
                        _shape(name, device, "root", *_bucket(rate))
                    _shape(self.switch, port, "root", *_bucket(rate))
            if inside:
                _shape(name, "lo", "root", *_bucket(inside))
            disk = self.disk(number)
            disk.mkdir()
        names = "".join(f"{address} {self.host_name(n)}\n" for n, address in enumerate(self.addresses))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (self.folder / "disk").mkdir()  # where each host sees its own
        (self.folder / "shared").mkdir()

    @property
    def local_disk(self) -> Path:
        """The path at which each host has a disk of its own."""
        return self.folder / "disk"

    @property
    def shared_disk(self) -> Path:
        """A directory that all hosts have."""
        return self.folder / "shared"

    def disk(self, number: int) -> Path:
        """The local disk of a host, as seen from outside."""
        return self.folder / f"disk{number}"

    @staticmethod
    def host_name(number: int) -> str:
        return f"host{number}"

    def enter(self, number: int) -> None:
        """Move this process, which has one thread, to a host."""
        with open(f"/run/netns/{self.names[number]}") as namespace:
            _check(_libc.setns(namespace.fileno(), CLONE_NEWNET))
        _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
        _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
        for source, target in ((self.disk(number), self.local_disk), (self.folder / "hosts", Path("/etc/hosts"))):
            _check(_libc.mount(os.fsencode(source), os.fsencode(target), None, MS_BIND, None))
        name = self.host_name(number).encode()
        _check(_libc.sethostname(name, len(name)))
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    # ---------------------------------------------------------------- programs

    def start(self, number: int, command: Sequence[str], output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a program on a host; what it prints goes to a file."""
        everything = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "CARDS": str(self.cards),
            "SHARED_DISK": str(self.shared_disk),
            "LOCAL_DISK": str(self.local_disk),
            **environment,
        }
        with output.open("ab") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=everything, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=lambda: self.enter(number),
            )  # fmt: skip
        self._processes.append(process)
        return process

    def torchrun(
        self,
        *program: str,
        ranks: int = 1,
        timeout: float = 240,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[Ended]:
        """`torchrun program` on all hosts, `ranks` processes on each; `meanwhile` is called once they are started."""
        outputs = [self.folder / f"output{number}" for number in range(self.count)]
        for output in outputs:
            output.write_bytes(b"")
        launch = (
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.count), "--nproc-per-node", str(ranks),
            "--master-addr", self.addresses[0], "--master-port", str(PORT), *options,
        )  # fmt: skip
        started = [
            self.start(n, (*launch, "--node-rank", str(n), *program), outputs[n], **(environment or {}))
            for n in range(self.count)
        ]
        meanwhile()
        deadline = time.monotonic() + timeout
        try:
            for process in started:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            texts = "\n".join(f"host {n}:\n{output.read_text()[-3000:]}" for n, output in enumerate(outputs))
            self.end_processes()
            raise TimeoutError(f"{' '.join(program)} did not end within {timeout:g} s\n{texts}") from None
        return [Ended(p.returncode, o.read_text(errors="replace")) for p, o in zip(started, outputs, strict=True)]

    # ---------------------------------------------------------------- faults and measurements

    def pids(self, number: int) -> list[int]:
        """The processes of a host."""
        return [int(word) for word in ip("netns", "pids", self.names[number], check=False).split()]

    def signal(self, number: int, what: int) -> None:
        """Send a signal to every process of a host."""
        for pid in self.pids(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)

    def set_link(self, number: int, up: bool) -> None:
        """Cut a host off from the switch, or connect it again. Its own address stays."""
        for card in range(self.cards):
            ip("-n", self.switch, "link", "set", f"port{number}.{card}", "up" if up else "down")

    def sent_bytes(self, number: int, device: str = "eth0") -> int:
        """The bytes that a host has sent to others (eth0), or inside (lo)."""
        (found,) = json.loads(ip("-n", self.names[number], "-s", "-j", "link", "show", "dev", device))
        return found["stats64"]["tx"]["bytes"]

    def queue(self, number: int, device: str = "eth0") -> str:
        """The queue of a device, as `tc` describes it."""
        command = ("ip", "netns", "exec", self.names[number], "tc", "-s", "qdisc", "show", "dev", device)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    # ---------------------------------------------------------------- ending

    def end_processes(self) -> None:
        """Kill every process of every host."""
        for _ in range(5):  # one that was just forked is found the next time
            if not [self.signal(number, signal.SIGKILL) for number in range(self.count) if self.pids(number)]:
                break
            time.sleep(0.05)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        self._processes.clear()

    def close(self) -> None:
        """End all processes of the hosts and remove them."""
        self.end_processes()
        for name in (*self.names, self.switch):
            ip("netns", "del", name, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def remove_stale() -> list[str]:
    """Remove the hosts of processes that are gone, with what still runs in them. Returns their names."""
    gone = []
    for line in ip("netns", "list", check=False).splitlines():
        name = line.split()[0] if line.strip() else ""
        parts = name.split("-")
        if len(parts) != 5 or parts[0] != PREFIX or _started(int(parts[1])) == parts[2]:
            continue
        for pid in map(int, ip("netns", "pids", name, check=False).split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ip("netns", "del", name, check=False)
        gone.append(name)
    for folder in {"-".join(name.split("-")[:4]) for name in gone}:
        for left in Path(tempfile.gettempdir()).glob(f"{folder}-*"):
            shutil.rmtree(left, ignore_errors=True)
    return gone


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; numbers of processes are used again. Empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _bucket(rate: str) -> tuple[str, ...]:
    return ("tbf", "rate", rate, "burst", "256kb", "latency", "200ms")


def _shape(namespace: str, device: str, *discipline: str) -> None:
    command = ("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, *discipline)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"tc {' '.join(discipline)}: {done.stderr.strip()}")


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def environment_of(rank: int, hosts: Hosts, ranks: int) -> dict[str, Any]:
    """torchrun's variables of a rank, for programs that are started without it."""
    return {
        "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(PORT), "RANK": str(rank),
        "WORLD_SIZE": str(hosts.count * ranks), "LOCAL_RANK": str(rank % ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(rank // ranks),
    }  # fmt: skip
