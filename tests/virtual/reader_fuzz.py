"""Fuzzing of all readers of files, guided by coverage: checkpoints, models, states, programs, machine and lock files.

An input is one byte that chooses the reader, and the bytes of a file. A reader may return, or raise an error of this
package. It may not raise anything else, not run, import or open anything, and not allocate memory beyond a multiple of
its input. Inputs are changed by bytes and, if they are JSON, by nodes; a checksum that covers them fits again.

    python -m tests.virtual.reader_fuzz COUNT [SEED]       own loop, lines as coverage
    python -m tests.virtual.reader_fuzz atheris SECONDS    libFuzzer, if the package `atheris` is installed
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import linecache
import random
import resource
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch

import shardwise as sw
from shardwise.capture.program_file import decoded
from shardwise.checkpoint.format.checkpoint_index import INDEX, parse_index
from shardwise.checkpoint.format.json_values import decode
from shardwise.checkpoint.format.state_tree import merge, rebuild, stored_entries, tensor_name
from shardwise.checkpoint.io.range_reader import FileReader
from shardwise.checkpoint.io.safetensors_header import find_tensors
from shardwise.checkpoint.operations.load_checkpoint import read_index, read_values
from shardwise.debug.limits.lock_file import Lock
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.fabric.machine_file import Machine, parse_machine, write_machine
from shardwise.plan.cost import Link
from tests.virtual.saved_programs import made

Reader = Callable[[bytes], Any]
HEAD = b'{"sha256": "'
BLOCKS = b"\n--blocks--\n"  # between the index and the files of a checkpoint in one input
CALM = 1 << 20  # bytes that any reader may allocate
WORST = 400  # and bytes for each byte of its input: parsed JSON is objects
FORBIDDEN = ("exec", "compile", "import", "os.system", "os.exec", "subprocess", "socket", "ctypes", "pickle", "open")


KNOWN = (
    ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.Expr, ast.Return, ast.Call, ast.Name, ast.Constant,
    ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.UnaryOp, ast.USub, ast.keyword, ast.expr_context,
)  # fmt: skip


class MemoryFile:
    """A file in memory, as `FileReader` reads it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_into(self, view: memoryview, at: int) -> int:
        part = self._data[at : at + len(view)]
        view[: len(part)] = part
        return len(part)

    def will_read(self, at: int, length: int, *, dense: bool) -> None:
        pass

    def close(self) -> None:
        pass


class MemoryDirectory:
    """A directory in memory, as a checkpoint is read from."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def __enter__(self) -> MemoryDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def error(self, problem: str, hint: str) -> CheckpointError:
        return CheckpointError(problem, hint=hint)

    def open(self, file: str, what: str, *, links: bool = False) -> MemoryFile:
        if file not in self._files:
            raise CheckpointError(f"{what}: there is no {file}")
        return MemoryFile(self._files[file])

    def read(self, file: str, what: str, *, links: bool = False) -> bytes:
        self.open(file, what)
        return self._files[file]

    def contains(self, file: str) -> bool:
        return file in self._files


# ---------------------------------------------------------------- readers


def _with_checksum(body: bytes) -> bytes:
    return HEAD + hashlib.sha256(body).hexdigest().encode() + b'", "index": ' + body + b"}\n"


def read_an_index(data: bytes) -> Any:
    index = parse_index(_with_checksum(data))
    return [decode(value) for _, value in stored_entries(index.state).values() if tensor_name(value) is None]


def read_a_checkpoint(data: bytes) -> Any:
    body, _, blocks = data.partition(BLOCKS)
    directory = MemoryDirectory(
        {INDEX: _with_checksum(body), "blocks-00000.safetensors": blocks, "blocks-00001.safetensors": blocks[::-1]}
    )
    index = read_index(directory)
    with FileReader(directory, index.files) as files:
        return read_values(index, files)


def read_a_model(data: bytes) -> Any:
    named, _, file = data.partition(BLOCKS)
    files = {"model.safetensors": file, "a.safetensors": file}
    if named:
        files["model.safetensors.index.json"] = named
    sizes, tensors = find_tensors(MemoryDirectory(files), None)
    with FileReader(MemoryDirectory(files), sizes) as reader:
        for name, tensor in tensors.items():
            out = torch.empty(tensor.shape, dtype=tensor.dtype).reshape(-1).view(torch.uint8).numpy()
            part = tuple(slice(0, size) for size in tensor.shape)
            reader.read_part(tensor.file, tensor.start, tensor.shape, part, tensor.dtype.itemsize, out, name)


def read_a_state(data: bytes) -> Any:
    state = _json(data)
    named = stored_entries(state)
    tensors = {found: torch.zeros(1) for _, value in named.values() if (found := tensor_name(value)) is not None}
    rebuild(merge(state, state), tensors)
    return [decode(value) for _, value in named.values() if tensor_name(value) is None]


def _json(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(error)) from None


def read_a_lock(data: bytes) -> Any:
    lock = Lock.parse(data, "the file")
    return lock.as_text(), lock.total


class Readers:
    """The readers, each with intact files to begin with."""

    def __init__(self) -> None:
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        self._model, self._optimizer, train = made(mesh)
        self._mesh = mesh
        step = sw.captured(train)
        for _ in range(2):
            step(torch.randn(4, 8), 2.0)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            step.save(place / "program", model=self._model, optimizer=self._optimizer)
            program = next((place / "program").iterdir()).read_bytes()
            state = {"w": sw.ones(4, 3, device_mesh=mesh, placements=[sw.Shard(0)]), "n": [1, (2.5, None)], "e": 0}
            more = state | {"o": {3: torch.ones(2, dtype=torch.bfloat16)}, "c": Counter("aab"), "big": 2**70}
            sw.checkpoint.save(state, place / "sharded")
            sw.checkpoint.save({"w": torch.ones(3), "z": torch.ones(0, 2), "s": torch.tensor(1)}, place / "plain")
            sw.checkpoint.save(more, place / "more")
            bodies = [(place / name / INDEX).read_bytes()[88:-2] for name in ("sharded", "plain", "more")]
            plain = (place / "plain" / "blocks-00000.safetensors").read_bytes()
            write_machine(_machine(), place / "machine.json")
            machine = (place / "machine.json").read_bytes()
        states = [json.dumps(json.loads(body)["state"]).encode() for body in bodies]
        entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
        header = json.dumps({"w": entry, "__metadata__": {"a": "b"}}).encode()
        model = len(header).to_bytes(8, "little") + header + bytes(12)
        named = json.dumps({"weight_map": {"w": "a.safetensors"}}).encode()
        lock = Lock.parse(b'{"shardwise_lock": 1, "communication": {}}', "the file").as_text().encode()
        amount = b'{"shardwise_lock": 1, "communication": {"a": {"b": {"count": 1, "received_bytes": 2}}}}'
        self.all: dict[str, tuple[Reader, list[bytes]]] = {
            "index": (read_an_index, bodies),
            "checkpoint": (read_a_checkpoint, [bodies[1] + BLOCKS + plain]),
            "safetensors": (read_a_model, [BLOCKS + model, named + BLOCKS + model]),
            "state": (read_a_state, states),
            "program": (self.read_a_program, [program]),
            "machine": (parse_machine, [machine]),
            "lock": (read_a_lock, [lock, amount]),
        }
        self.names = list(self.all)

    def read_a_program(self, data: bytes) -> Any:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(str(error)) from None
        found = decoded(text, [self._mesh], {"optimizer": self._optimizer})
        _state["on"] = False
        check_text(found.program.text)
        return found

    def seeds(self) -> list[bytes]:
        return [bytes([at]) + seed for at, (_, seeds) in enumerate(self.all.values()) for seed in seeds]

    def run(self, data: bytes) -> tuple[str, bool]:
        """The reader of an input, and whether it returned; raises what is no error of this package."""
        name = self.names[data[0] % len(self.names)] if data else self.names[0]
        try:
            with silent():
                self.all[name][0](data[1:])
        except ShardwiseError:
            return name, False
        finally:
            for key in [key for key in linecache.cache if key.startswith("<captured ")]:
                del linecache.cache[key]
        return name, True


def check_text(text: str) -> None:
    """The text of a program is one function of calls of operators: nothing of the file is code in it."""
    tree = ast.parse(text)
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef), text
    assert not function.decorator_list, text
    for node in ast.walk(function):
        assert isinstance(node, KNOWN), f"{type(node).__name__} in {text}"
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_"), text
            assert node.attr in ("clone", "wait") or (isinstance(node.value, ast.Name) and node.value.id == "torch")


def _machine() -> Machine:
    link = Link(4e-5, 1e-9, (("all_reduce", 1.5),))
    return Machine("cpu", ("a", "b"), 2, link, link, link)


# ---------------------------------------------------------------- what is forbidden

_state = {"on": False, "hooked": False}


def _audit(event: str, args: Any) -> None:
    if _state["on"] and event.startswith(FORBIDDEN):
        named = args[1] if event == "compile" else getattr(args[0], "co_filename", "") if event == "exec" else ""
        if str(named).startswith("<captured "):  # the text of a program; see check_text
            return
        _state["on"] = False
        raise AssertionError(f"a reader caused {event} {args!r:.200}")


class silent:
    """While a reader runs: nothing is run, imported or opened."""

    def __enter__(self) -> None:
        if not _state["hooked"]:
            sys.addaudithook(_audit)
            _state["hooked"] = True
        _state["on"] = True

    def __exit__(self, *exception: object) -> None:
        _state["on"] = False


def check_memory(readers: Readers, data: bytes) -> None:
    """Run an input and compare the memory that it takes with its size."""
    tracemalloc.start()
    try:
        readers.run(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < CALM + WORST * len(data), f"{peak} bytes for an input of {len(data)}"


# ---------------------------------------------------------------- changes of inputs

ODD: tuple[Any, ...] = (
    0, 1, -1, 2, 7, 4096, 2**31, 2**53, 2**62, 2**63, 10**30, 10**400, 0.5, 1e300, -0.0, True, None, "", "1", [], {},
    [1], "..", "../x.safetensors", "float32", "complex32", "F16", "BOOL", "a\0b", "\ud800", "x" * 300, {"$tuple": []},
    {"$int": "0x1"}, {"$int": "0x" + "f" * 600}, {"$tensor": "w"}, {"$dict": [[1, 2]]}, {"$ordered": {"$dict": []}},
    {"$default": ["int", {}]}, {"$size": [-1]}, {"$counter": {"a": None}}, {"$dtype": "int8"}, {"$float": "nan"},
)  # fmt: skip


TOKENS = (b"{", b"[", b'"', b",", b"NaN", b"1e999", b"\\ud800", b"[" * 2000, b"9" * 5000)


def _deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


def changed_json(data: Any, rng: random.Random) -> Any:
    """JSON data with one node replaced, removed, repeated or moved."""
    data = copy.deepcopy(data)
    nodes: list[tuple[Any, Any]] = []
    left = [data]
    while left:
        node = left.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            nodes.append((node, key))
            left.append(node[key])
    if not nodes:
        return rng.choice(ODD)
    node, key = rng.choice(nodes)
    match rng.randrange(7):
        case 0:
            del node[key]
        case 1:
            other, at = rng.choice(nodes)
            node[key] = copy.deepcopy(other[at])
        case 2:
            node[key] = _deep(rng.choice((3, 99, 101, 250, 900)))
        case 3 if isinstance(node[key], int):
            node[key] = node[key] + rng.choice((-1, 1, 2, 8, 1 << 31))
        case 4 if isinstance(node, dict) and isinstance(key, str):
            node[rng.choice(("$tuple", "$dict", "$ordered", "w", key + "x", "$tensor"))] = node.pop(key)
        case 5 if isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        case _:
            node[key] = copy.deepcopy(rng.choice(ODD))
    return data


def changed(data: bytes, rng: random.Random) -> bytes:
    """Another input of the same reader."""
    head, body = data[:1], data[1:]
    first, mark, rest = body.partition(BLOCKS)
    if mark and rng.random() < 0.3 and len(rest) > 8:  # the header of a block file
        length = int.from_bytes(rest[:8], "little")
        with_header = _changed_text(rest[8 : 8 + length], rng)
        if with_header is not None:
            size = rng.choice((len(with_header), len(with_header), length, 2**40))
            return head + first + mark + size.to_bytes(8, "little") + with_header + rest[8 + length :]
    if rng.random() < 0.7:
        text = _changed_text(first, rng)
        if text is not None:
            return head + text + mark + rest
    raw = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(4):
            case 0:
                raw[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                raw[at:at] = rng.choice(
                    (b"{", b"[", b'"', b",", b"NaN", b"1e999", b"\\ud800", b"[" * 2000, b"9" * 5000)
                )
            case 2:
                del raw[at : at + rng.choice((1, 4, 64))]
            case _:
                raw[at:at] = raw[at : at + rng.choice((1, 8, 64))]
    return head + bytes(raw)


def _changed_text(text: bytes, rng: random.Random) -> bytes | None:
    try:
        found = json.loads(text)
        for _ in range(rng.choice((1, 1, 2, 5))):
            found = changed_json(found, rng)
        return json.dumps(found).encode()
    except (ValueError, RecursionError):
        return None


# ---------------------------------------------------------------- the loops


class Lines:
    """The lines of this package that a call runs."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, int]] = set()
        self.new = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if "shardwise" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        at = (frame.f_code.co_filename, frame.f_lineno, event == "exception")
        if at not in self.seen:
            self.seen.add(at)
            self.new += 1
        return self._line


def run(count: int, seed: int = 0, *, memory_every: int = 1) -> dict[tuple[str, bool], int]:
    """Run `count` inputs; those that reach new lines are kept and changed further. Raises at the first finding."""
    readers, rng, lines = Readers(), random.Random(seed), Lines()
    corpus = readers.seeds()
    for data in corpus:
        assert readers.run(data)[1], f"an intact file is refused: {data[:60]!r}"
    outcomes: Counter[tuple[str, bool]] = Counter()
    for number in range(count):
        data = corpus[number] if number < len(corpus) else changed(rng.choice(corpus), rng)
        lines.new = 0
        try:
            if number % memory_every == 0:
                check_memory(readers, data)
            sys.settrace(lines)
            try:
                outcomes[readers.run(data)] += 1
            finally:
                sys.settrace(None)
        except BaseException:
            sys.settrace(None)
            Path(tempfile.gettempdir(), "reader_fuzz.input").write_bytes(data)
            raise
        if lines.new and len(data) < 1 << 16:
            corpus.append(data)
    print(f"{count} inputs, {len(corpus)} kept, {len(lines.seen)} lines")
    return dict(outcomes)


def _functions() -> Iterator[Any]:
    """The functions and methods of the readers."""
    places = ("checkpoint", "capture.program_file", "fabric.machine_file", "debug.limits", "core.notation")
    wanted = tuple(f"shardwise.{place}" for place in places)
    for name, module in list(sys.modules.items()):
        if name.startswith(wanted):
            own = [value for value in vars(module).values() if getattr(value, "__module__", None) == name]
            inside = [value for kind in own if isinstance(kind, type) for value in vars(kind).values()]
            yield from (value for value in own + inside if isinstance(value, FunctionType))


def run_atheris(seconds: float) -> None:
    """Run libFuzzer for some time, and print the count; a finding ends it."""
    import atheris  # pyright: ignore[reportMissingImports, reportMissingModuleSource]

    readers = Readers()
    for function in _functions():
        atheris.instrument_func(function)
    folder = tempfile.mkdtemp(prefix="reader-fuzz-")
    for number, data in enumerate(readers.seeds()):
        Path(folder, str(number)).write_bytes(data)
    begin, total = time.monotonic(), Counter[tuple[str, bool]]()
    limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + (8 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    findings: set[str] = set()

    def one(data: bytes) -> None:
        try:
            total[readers.run(data)] += 1
        except Exception as error:  # noted once for each place, and the search goes on
            total["finding", False] += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {last.filename}:{last.lineno}"
            if place not in findings:
                findings.add(place)
                Path(folder, f"finding-{len(findings)}").write_bytes(data)
                print(f"finding {len(findings)}: {place}: {error!s:.200}", flush=True)
        if sum(total.values()) % 100_000 == 0:
            print(f"{time.monotonic() - begin:.0f} s: {dict(total)}", flush=True)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        made = changed(bytes(data) or b"\0", random.Random(seed))
        return made if len(made) <= most else bytes(data)

    options = [f"-max_total_time={seconds:.0f}", "-max_len=65536", "-rss_limit_mb=8192", "-timeout=60"]
    atheris.Setup([sys.argv[0], folder, *options], one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "atheris":
        run_atheris(float(sys.argv[2]))
    else:
        for (reader, returned), times in sorted(run(int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])).items()):
            print(f"{reader:12} {'read' if returned else 'refused':8} {times}")
