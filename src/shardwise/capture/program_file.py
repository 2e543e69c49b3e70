"""A program as JSON text, and back. Operators are named, and looked up among torch's: no code is read or run.

A file is checked as it is read: what is not exactly of this format raises, and nothing of it is executed.
"""

from __future__ import annotations

import base64
import bisect
import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from shardwise.capture.call_sites import NOWHERE, PHASES, Site
from shardwise.capture.collective_calls import (
    Collective,
    axes_of,
    bound_arguments,
    collective_kind,
    group_ranks,
    is_collective,
)
from shardwise.capture.leaving import Effect
from shardwise.capture.local_optimizer import LocalStep
from shardwise.capture.program import Local, Made, Program, Root, Same, Sequenced, Tabled
from shardwise.capture.roots import Opaque, RootFact
from shardwise.capture.tape import Call, Const, Geometry, Ref, Tape, Unit, made_by, refs_of
from shardwise.core.mesh import DeviceMesh
from shardwise.core.notation import parse_spec
from shardwise.core.spec import DTensorSpec
from shardwise.debug.recording.records import SourceLine
from shardwise.errors import LayoutError, ShardwiseError, UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.torch_private import OpOverload

__all__ = ["FORMAT", "SavedProgram", "check_effect", "decoded", "encoded"]

FORMAT = "shardwise captured program 2"
_NAMESPACES = frozenset({"aten", "prims"})
_FORBIDDEN = frozenset({"from_file", "_print"})  # they reach beyond tensors
_GROUPED = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "alltoall_base_")
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_LAYOUTS = {str(value): value for value in (torch.strided,)}
_FORMATS = {
    str(value): value
    for value in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}
_REDUCTIONS = {op.name: op for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT,
                                      dist.ReduceOp.AVG)}  # fmt: skip


class SavedProgram(NamedTuple):
    """All that a program is made again from.

    Args:
        program: the operators.
        names: of the tensors that it uses, by position; arguments have none.
        roots: the facts of these tensors.
        arguments: the description of the arguments.
        result: what it returns.
        effects: gradients that it sets.
        written: positions of DTensors that it writes to.
        aliases: other names of these tensors, by position.
    """

    program: Program
    names: dict[int, str]
    roots: dict[int, RootFact]
    arguments: Any
    result: Any
    effects: tuple[Effect, ...]
    written: tuple[int, ...]
    aliases: Mapping[int, tuple[str, ...]] = MappingProxyType({})


def _refused(
    what: str, hint: str = "keep such a step as a captured function; it is recorded quickly"
) -> UnsupportedError:
    return UnsupportedError(f"save: the program has {what}, which a file cannot hold", hint=hint)


# ---------------------------------------------------------------- writing


class _Writer:
    def __init__(self, saved: SavedProgram, optimizers: Mapping[int, str], tensors: Mapping[int, str]) -> None:
        self.saved = saved
        self.optimizers = optimizers
        self.tensors = tensors
        self.meshes: list[DeviceMesh] = list(saved.program.facts.meshes)
        self.schemas: dict[str, str] = {}
        self.containers: set[int] = set()  # descriptions of lists and dicts that were written

    def document(self) -> dict[str, Any]:
        saved, program = self.saved, self.saved.program
        calls = [self.call(position, call) for position, call in program.calls]
        inputs = [self.root(at, fact) for at, fact in saved.roots.items()]
        result, arguments = self.shape(saved.result), self.shape(saved.arguments)
        effects = [self.effect(effect) for effect in saved.effects]
        return {
            "format": FORMAT,
            "torch": torch.__version__.split("+")[0],
            "name": program.name,
            "ranks": program.ranks,
            "rank": dist.get_rank() if program.collectives else 0,
            "meshes": [self.mesh(mesh) for mesh in self.meshes],
            "schemas": self.schemas,
            "inputs": inputs,
            "arguments": arguments,
            "constants": [_tensor_text(tensor) for tensor in program.constants],
            "values": self.values(),
            "calls": calls,
            "moves": self.moves(),
            "wanted": list(program.wanted),
            "result": result,
            "effects": effects,
            "written": list(saved.written),
        }

    def mesh(self, mesh: DeviceMesh) -> dict[str, Any]:
        ranks = [mesh.grid_ranks[at] for at in mesh.groups(tuple(range(mesh.ndim)))[0].tolist()]
        return {
            "device": mesh.device_type,
            "shape": list(mesh.shape),
            "names": None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names),
            "ranks": list(map(int, ranks)),
        }

    def spec(self, spec: DTensorSpec | None) -> Any:
        if spec is None:
            return None
        if spec.mesh not in self.meshes:
            self.meshes.append(spec.mesh)
        text, stride = str(spec), list(spec.tensor_meta.stride)
        found = [self.meshes.index(spec.mesh), text, stride]
        if _spec(spec.mesh, text, stride) is not spec:
            raise _refused(f"a tensor of the layout {spec}")
        return found

    def root(self, at: int, fact: RootFact) -> dict[str, Any]:
        return {
            "position": at,
            "name": self.saved.names.get(at),
            "aliases": list(self.saved.aliases.get(at, ())),
            "spec": self.spec(fact.spec),
            "parts": [_geometry_text(part) for part in fact.parts],
            "device": str(fact.device),
            "requires_grad": fact.requires_grad,
            "has_grad": fact.has_grad,
            "numbers": list(fact.numbers),
        }

    def values(self) -> list[list[Any]]:
        program = self.saved.program
        facts = program.facts
        used = {ref.number for _, call in program.calls for ref in (*refs_of(call), *made_by(call))}
        numbers = sorted(used | set(program.wanted) | program.inputs())
        memories = [facts.memory_of[number] for number in numbers]
        return [
            [number, memory, facts.bytes_of[memory], *_geometry_text(facts.geometry[number])]
            for number, memory in zip(numbers, memories, strict=True)
        ]

    def moves(self) -> list[list[Any]]:
        """Collectives that routes announced: on virtual ranks the program has no others."""
        kept = [position for position, _ in self.saved.program.calls]
        return [
            [bisect.bisect_left(kept, move.position), *move[1:-1], _site_text(move.site)]
            for move in self.saved.program.facts.moves
        ]

    def call(self, position: int, call: Call | Unit) -> dict[str, Any]:
        at = _site_text(self.saved.program.facts.sites.get(position, NOWHERE))
        if isinstance(call, Unit):
            return self.unit(call) | {"at": at}
        if is_collective(call):
            return self.collective(call) | {"at": at}
        name = str(call.op)
        if call.op.namespace not in _NAMESPACES or call.op._opname in _FORBIDDEN:
            raise _refused(f"the operator {name}")
        self.schemas[name] = str(call.op._schema)
        return {
            "op": name,
            "args": [self.value(arg) for arg in call.args],
            "kwargs": {key: self.value(arg) for key, arg in call.kwargs.items()},
            "made": self.value(call.made),
            "expected": self.value(call.expected),
            "writes": list(call.writes),
            "at": at,
        }

    def unit(self, unit: Unit) -> dict[str, Any]:
        if not isinstance(unit.run, LocalStep):
            raise _refused(f"{unit.name} of Python (random numbers of virtual ranks)")
        optimizer = unit.run.optimizer
        name = self.optimizers.get(id(optimizer))
        if name is None:
            raise _refused(
                f"the step of {type(optimizer).__name__}, which was not named", "step.save(path, optimizer=optimizer)"
            )
        return {
            "optimizer": type(optimizer).__name__,
            "name": name,
            "counts": list(unit.run.counts),
            "making": unit.run.making,
            "parameters": [self.tensors.get(id(parameter)) for parameter in unit.run.parameters()],
            "reads": [ref.number for ref in unit.reads],
        }

    def collective(self, call: Call) -> dict[str, Any]:
        bound = bound_arguments(call)
        name = call.op._opname
        if name not in _GROUPED or (name in ("allreduce_", "_reduce_scatter_base_") and call.expected is None):
            raise _refused(f"the collective {collective_kind(call)}")
        if axes_of(group_ranks(call), self.meshes)[0] is None:
            raise _refused(f"a collective of the ranks {group_ranks(call)}, which are no group of a mesh")
        reduction = None if call.expected is None else call.expected.reduceOp.op.name
        if reduction is not None and reduction not in _REDUCTIONS:
            raise _refused(f"a reduction by {reduction}")
        return {
            "collective": name,
            "ranks": list(group_ranks(call)),
            "tensors": [ref.number for ref in refs_of(call)],
            "reduction": reduction,
            "splits": [list(bound.get("output_split_sizes", ())), list(bound.get("input_split_sizes", ()))],
        }

    def value(self, value: Any) -> Any:
        match value:
            case Ref(number):
                return {"v": number}
            case Const(number):
                return {"constant": number}
            case None | bool() | int() | str():
                return value
            case float():
                return value if math.isfinite(value) else {"float": repr(value)}
            case tuple():
                return {"tuple": [self.value(item) for item in value]}
            case list():
                return [self.value(item) for item in value]
            case torch.dtype():
                return {"dtype": str(value)}
            case torch.device():
                return {"device": str(value)}
            case torch.layout() if str(value) in _LAYOUTS:
                return {"layout": str(value)}
            case torch.memory_format():
                return {"memory_format": str(value)}
            case _:
                raise _refused(f"an argument of the type {type(value).__name__}")

    def shape(self, shape: Any) -> Any:
        if isinstance(shape, Tabled) or (isinstance(shape, Sequenced) and shape.kind is list):
            if id(shape) in self.containers:
                raise _refused("one list or dict in two places of its result", "return a copy of it in one of them")
            self.containers.add(id(shape))
        match shape:
            case Root(position):
                return {"root": position}
            case Same(value):
                return {"same": self.value(value)}
            case Made(number, local, spec, requires_grad, is_spent, _):
                return {"made": number, "local": self.shape(local), "spec": self.spec(spec),
                        "requires_grad": requires_grad, "is_spent": is_spent}  # fmt: skip
            case Local(refs, is_ranks):
                return {"numbers": [ref.number for ref in refs], "is_ranks": is_ranks}
            case Sequenced(kind, items) if kind in (list, tuple):
                return {kind.__name__: [self.shape(item) for item in items]}  # pyright: ignore[reportAttributeAccessIssue]
            case Tabled(kind, items) if kind is dict:
                return {"dict": [[self.shape(key), self.shape(value)] for key, value in items]}
            case Opaque(kind):
                raise _refused(f"an argument of the type {kind}")
            case _:
                raise _refused("a result that is no tensor, number, list, tuple or dict")

    def effect(self, effect: Effect) -> dict[str, Any]:
        check_effect(effect)
        return {"grad_of": effect.target, "value": self.shape(effect.value)}


def check_effect(effect: Effect) -> None:
    """Raise unless a file can hold this change."""
    if effect.kind != "grad":
        raise _refused("an attribute, container or local that it replaces")


def encoded(saved: SavedProgram, optimizers: Mapping[int, str], tensors: Mapping[int, str]) -> str:
    """The text of a file.

    Args:
        saved: what is to be written.
        optimizers: the names of optimizers by their identities.
        tensors: those of tensors.
    """
    document = _Writer(saved, optimizers, tensors).document()
    lines = []
    for name, value in document.items():
        if name in ("calls", "values", "inputs", "moves") and value:
            rows = ",\n    ".join(json.dumps(row) for row in value)
            lines.append(f'  "{name}": [\n    {rows}\n  ]')
        else:
            lines.append(f'  "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _site_text(site: Site) -> list[Any]:
    return [*site.where, site.phase, site.module]


def _geometry_text(geometry: Geometry) -> list[Any]:
    return [list(geometry.shape), list(geometry.stride), geometry.offset, str(geometry.dtype)]


def _tensor_text(tensor: torch.Tensor) -> dict[str, Any]:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "shape": list(tensor.shape), "dtype": str(tensor.dtype), "device": str(tensor.device),
        "bytes": base64.b64encode(raw).decode("ascii"),
    }  # fmt: skip


# ---------------------------------------------------------------- reading


class _Reader:
    """Every access is by the type that the format has there; anything else is a damaged file."""

    def __init__(
        self, document: Mapping[str, Any], meshes: Sequence[DeviceMesh], optimizers: Mapping[str, Any]
    ) -> None:
        self.document = document
        self.optimizers = optimizers
        self.meshes = [self.mesh(entry, meshes) for entry in document["meshes"]]

    def mesh(self, entry: Mapping[str, Any], meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        for mesh in meshes:
            names = None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names)
            ranks = [int(mesh.grid_ranks[at]) for at in mesh.groups(tuple(range(mesh.ndim)))[0].tolist()]
            same = mesh.device_type == entry["device"] and list(mesh.shape) == entry["shape"]
            if same and names == entry["names"] and ranks == entry["ranks"]:
                return mesh
        raise LayoutError(
            f"load_captured: the program runs on a mesh of shape {entry['shape']} with the axes {entry['names']} on "
            f"{entry['device']}, and nothing that was given is on such a mesh",
            hint="load_captured(path, mesh=mesh, ...) with a mesh of this shape, these names and ranks",
        )

    def saved(self) -> SavedProgram:
        document = self.document
        tape = Tape([])
        tape.constants += [_tensor_of(entry) for entry in document["constants"]]
        for number, memory, size, *geometry in document["values"]:
            tape.memory_of[_whole(number)] = _whole(memory)
            tape.bytes_of[_whole(memory)] = _whole(size)
            tape.geometry[number] = _geometry_of(geometry)
        for at, entry in enumerate(document["calls"]):
            tape.calls.append(self.call(entry))
            tape.sites.at[at] = _site_of(entry["at"])
        name = document["name"]
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError("name")
        program = Program(tape, [_whole(number) for number in document["wanted"]], name, self.meshes)
        program.ranks = _whole(document["ranks"])
        program.announce([_move_of(entry) for entry in document["moves"]])
        roots = {_whole(entry["position"]): self.root(entry) for entry in document["inputs"]}
        names = {_whole(e["position"]): str(e["name"]) for e in document["inputs"] if e["name"] is not None}
        effects = tuple(Effect("grad", _whole(e["grad_of"]), self.shape(e["value"])) for e in document["effects"])
        return SavedProgram(
            program, names, roots, self.shape(document["arguments"]), self.shape(document["result"]), effects,
            tuple(map(_whole, document["written"])),
            {_whole(e["position"]): tuple(map(str, e["aliases"])) for e in document["inputs"]},
        )  # fmt: skip

    def root(self, entry: Mapping[str, Any]) -> RootFact:
        return RootFact(
            None, None, self.spec(entry["spec"]), tuple(map(_geometry_of, entry["parts"])),
            torch.device(str(entry["device"])), bool(entry["requires_grad"]), bool(entry["has_grad"]),
            tuple(map(_whole, entry["numbers"])),
        )  # fmt: skip

    def spec(self, entry: Any) -> DTensorSpec | None:
        if entry is None:
            return None
        at, text, stride = entry
        return _spec(self.meshes[_whole(at)], str(text), list(map(_whole, stride)))

    def call(self, entry: Mapping[str, Any]) -> Call | Unit:
        if "optimizer" in entry:
            return self.unit(entry)
        if "collective" in entry:
            return self.collective(entry)
        op = self.operator(entry["op"])
        kwargs = {name: self.value(value) for name, value in entry["kwargs"].items()}
        if not kwargs.keys() <= {argument.name for argument in op._schema.arguments}:
            raise ValueError(f"arguments {list(kwargs)} of {op}")
        args, made = tuple(map(self.value, entry["args"])), self.value(entry["made"])
        expected, writes = self.value(entry["expected"]), tuple(map(_whole, entry["writes"]))
        if op is torch.ops.aten.detach.default and not (isinstance(made, Ref) and args and isinstance(args[0], Ref)):
            raise ValueError(f"operands of {op}")  # a program has another name for its value instead
        return Call(op, args, kwargs, made, str(entry["at"][0]), expected, writes)

    def operator(self, name: Any) -> OpOverload:
        namespace, _, rest = str(name).partition(".")
        packet, _, overload = rest.partition(".")
        parts = (namespace, packet, overload)
        if namespace not in _NAMESPACES or packet in _FORBIDDEN or not all(part.isidentifier() for part in parts):
            raise UnsupportedError(
                f"load_captured: the file names the operator {name!r}, which programs do not use",
                hint="load files that `save` has written, from people you trust",
            )
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
        if not isinstance(found, OpOverload) or str(found._schema) != self.document["schemas"][name]:
            raise UnsupportedError(
                f"load_captured: the operator {name} is another one in torch {torch.__version__} than in torch "
                f"{self.document['torch']}, which the program was saved with",
                hint="capture the function again",
            )
        return found

    def unit(self, entry: Mapping[str, Any]) -> Unit:
        optimizer = self.optimizers.get(entry["name"])
        if type(optimizer).__name__ != entry["optimizer"]:
            raise LayoutError(
                f"load_captured: the program steps an optimizer {entry['name']!r} of the class {entry['optimizer']}",
                hint=f"load_captured(path, {entry['name']}=optimizer)",
            )
        assert optimizer is not None
        counts = list(map(_whole, entry["counts"]))
        step = LocalStep(optimizer, counts)
        step.making = [[bool(flag) for flag in group] for group in entry["making"]]
        step.names = [None if known is None else str(known) for known in entry["parameters"]]
        _check_states(optimizer, counts, entry["name"])
        name = f"{type(optimizer).__name__.lower()}_step"
        return Unit(step, tuple(Ref(_whole(number)) for number in entry["reads"]), str(entry["at"][0]), name=name)

    def collective(self, entry: Mapping[str, Any]) -> Call:
        name, group = entry["collective"], self.group(tuple(map(_whole, entry["ranks"])))
        if name not in _GROUPED:
            raise ValueError(name)
        tensors = [Ref(_whole(number)) for number in entry["tensors"]]
        got, sent = (list(map(_whole, sizes)) for sizes in entry["splits"])
        options: Any = None
        if name in ("allreduce_", "_reduce_scatter_base_"):
            options = dist.AllreduceOptions() if name == "allreduce_" else dist.ReduceScatterOptions()
            options.reduceOp = _REDUCTIONS[entry["reduction"]]
        op: Any = getattr(torch.ops.c10d, name).default
        kwargs: dict[str, Any] = {"process_group": group}
        if name == "allreduce_":
            kwargs["tensors"] = tensors
        else:
            first, second = [a.name for a in op._schema.arguments[:2]]
            kwargs |= {first: tensors[0], second: tensors[1]}
        if name == "alltoall_base_":
            kwargs |= {"output_split_sizes": got, "input_split_sizes": sent}
        ordered = {a.name: kwargs[a.name] for a in op._schema.arguments if a.name in kwargs}
        return Call(op, (), ordered, None, str(entry["at"][0]), options, tuple(ref.number for ref in tensors))

    def group(self, ranks: tuple[int, ...]) -> Any:
        """The process group of these ranks, of the mesh."""
        mesh, axes = axes_of(ranks, self.meshes)
        if mesh is None:
            raise LayoutError(f"load_captured: no mesh has a group {ranks}", hint="load it on the mesh it was saved on")
        return fabric_of(mesh).group(mesh, axes).boxed()

    def value(self, value: Any) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list():
                return [self.value(item) for item in value]
            case {"v": number}:
                return Ref(_whole(number))
            case {"constant": number}:
                return Const(_whole(number))
            case {"float": ("inf" | "-inf" | "nan") as text}:
                return float(text)
            case {"tuple": list() as items}:
                return tuple(self.value(item) for item in items)
            case {"dtype": text}:
                return _DTYPES[text]
            case {"device": str() as text}:
                return torch.device(text)
            case {"layout": text}:
                return _LAYOUTS[text]
            case {"memory_format": text}:
                return _FORMATS[text]
            case _:
                raise ValueError(value)

    def shape(self, shape: Any) -> Any:
        match shape:
            case {"root": position}:
                return Root(_whole(position))
            case {"same": value}:
                return Same(self.value(value))
            case {"made": number, "local": local, "spec": spec, "requires_grad": requires_grad, "is_spent": spent}:
                return Made(_whole(number), self.shape(local), self.spec(spec), bool(requires_grad), bool(spent))
            case {"numbers": numbers, "is_ranks": is_ranks}:
                return Local(tuple(Ref(_whole(number)) for number in numbers), bool(is_ranks))
            case {"list": items}:
                return Sequenced(list, tuple(map(self.shape, items)))
            case {"tuple": items}:
                return Sequenced(tuple, tuple(map(self.shape, items)))
            case {"dict": items}:
                return Tabled(dict, tuple((self.shape(key), self.shape(value)) for key, value in items))
            case _:
                raise ValueError(shape)


def decoded(text: str, meshes: Sequence[DeviceMesh], optimizers: Mapping[str, Any]) -> SavedProgram:
    """The program of a file."""
    try:
        if r"\u0000" in text:  # in a name: the text of a program could not be parsed
            raise ValueError("a null character")
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(document["format"])
        return _Reader(document, meshes, optimizers).saved()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, SyntaxError, RecursionError, RuntimeError,
            AssertionError) as error:  # fmt: skip
        if isinstance(error, ShardwiseError):
            raise
        raise UnsupportedError(
            f"load_captured: this is no file of a captured program, or it is damaged ({type(error).__name__}: {error})",
            hint="load what `step.save` has written",
        ) from error


def _whole(value: Any) -> int:
    if value.__class__ is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _spec(mesh: DeviceMesh, text: str, stride: Sequence[int]) -> DTensorSpec:
    spec = parse_spec(text, mesh)
    meta = spec.tensor_meta
    if list(meta.stride) != list(stride):
        spec = DTensorSpec.from_context(spec.context, type(meta)(meta.shape, tuple(stride), meta.dtype))
    return spec


class _LoadedSite(Site):
    """A line of a program that was read from a file, which may name any file: it is not opened."""

    def comment(self) -> str:
        """The line as a comment of a program: file and number."""
        return PHASES[self.phase] + str(self.where) if self.where.file else self.phase


def _site_of(entry: Sequence[Any]) -> Site:
    file, line, function, phase, module = entry
    if phase not in PHASES:
        raise ValueError(phase)
    return _LoadedSite(SourceLine(str(file), _whole(line), str(function)), phase, str(module))


def _move_of(entry: Sequence[Any]) -> Collective:
    position, kind, over, ranks, received, seconds, site = entry
    return Collective(
        _whole(position), str(kind), str(over), _whole(ranks), float(received), float(seconds), _site_of(site)
    )


def _geometry_of(entry: Sequence[Any]) -> Geometry:
    shape, stride, offset, dtype = entry
    return Geometry(tuple(map(_whole, shape)), tuple(map(_whole, stride)), _whole(offset), _DTYPES[dtype])


def _tensor_of(entry: Mapping[str, Any]) -> torch.Tensor:
    raw = np.frombuffer(bytearray(base64.b64decode(entry["bytes"], validate=True)), dtype=np.uint8)
    shape = list(map(_whole, entry["shape"]))
    found = torch.from_numpy(raw.copy()).view(_DTYPES[entry["dtype"]]).reshape(shape)
    return found.to(torch.device(str(entry["device"])))


def _check_states(optimizer: torch.optim.Optimizer, counts: Sequence[int], name: str) -> None:
    """An optimizer makes its states in its first step; on locals they would be lost."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len(parameters) != len(counts):
        raise LayoutError(
            f"load_captured: {name} has {len(parameters)} parameters, and had {len(counts)}",
            hint="give it an optimizer of the same parameters",
        )
    needs = type(optimizer).__name__ != "SGD" or any(group.get("momentum") for group in optimizer.param_groups)
    if needs and any(count and not optimizer.state.get(p) for p, count in zip(parameters, counts, strict=True)):
        raise LayoutError(
            f"load_captured: {name} has no states yet",
            hint="load its state dict first, or take one step without the program",
        )
