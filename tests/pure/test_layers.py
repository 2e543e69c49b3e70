"""The layers hold: reads the imports and calls of every module of the package, without importing any.

A name in LAYERS is a module or package right under shardwise. A row imports only rows above it.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "shardwise"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "text", "imports", "torch_private", "events"),
    ("core",),
    ("rng",),
    ("rules",),
    ("plan",),
    ("fabric",),
    ("modes", "compilers", "transforms"),
    ("schema",),
    ("local",),
    ("dispatch",),
    ("tensor",),
    ("decompose",),
    ("api", "random", "interop"),
    ("factories", "loading", "raw_memory", "recurrent_states", "optimizer_hook"),
    ("extend", "moe", "recurrences"),
    ("parallel", "checkpoint", "debug", "optim", "meshes"),
    ("capture", "elastic", "hf", "pipelines"),
    ("essentials",),
    ("__init__",),
    ("cli", "demo", "__main__"),
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
# Imports that wait until they are used.
DEFERRED = frozenset({("__init__", "shardwise.essentials")})
# Methods of DTensor that communicate or leave it: for its own layer and those above.
METHODS = frozenset({"redistribute", "to_local", "full_tensor"})
STRANGERS = frozenset(
    {"parallel", "checkpoint", "debug", "optim", "meshes"}
)  # of one row, and do not import each other
MAY_COMMUNICATE = frozenset({"fabric", "parallel", "checkpoint", "interop", "capture"})  # may import torch.distributed
THEIRS = ("torch.distributed.tensor", "torch.distributed._tensor")
ADAPTER = "interop"  # the one module that may import torch.distributed.tensor
LAZY = (
    "rich",
    "safetensors",
    "transformers",
    "matplotlib",
    "torch._dynamo",
    "torch._inductor",
)  # imported inside functions only


class Import(NamedTuple):
    """One imported name, or one use of `torch.distributed` as an attribute."""

    target: str
    line: int
    in_function: bool


class Module(NamedTuple):
    name: str
    path: str
    imports: tuple[Import, ...]
    calls: tuple[tuple[str, int], ...] = ()  # methods of `METHODS` that are called, with their lines

    @property
    def layer(self) -> str:
        """The name right under shardwise that this module belongs to."""
        return layer_of(self.name)


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def within(target: str, package: str) -> bool:
    return target == package or target.startswith(package + ".")


def parse(name: str, path: str, source: str, known: frozenset[str]) -> Module:
    tree = ast.parse(source, path)
    return Module(name, path, tuple(_imports(tree, known, in_function=False)), tuple(_method_calls(tree)))


def _method_calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in METHODS:
                yield name, node.lineno
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]) if name in METHODS:
                yield name, node.lineno


def _imports(node: ast.AST, known: frozenset[str], *, in_function: bool) -> Iterator[Import]:
    match node:
        case ast.Import(names=names):
            yield from (Import(alias.name, node.lineno, in_function) for alias in names)
            return
        case ast.ImportFrom(level=level) if level > 0:
            yield Import("." * level + (node.module or ""), node.lineno, in_function)
            return
        case ast.ImportFrom(module=str(module), names=names):
            for alias in names:
                target = f"{module}.{alias.name}"
                # in our package we know what is a module; of torch, the longer name is the safer guess
                is_module = target in known if within(module, "shardwise") else True
                yield Import(target if is_module else module, node.lineno, in_function)
            return
        case ast.Attribute() if within(dotted := _dotted(node), "torch.distributed"):
            yield Import(dotted, node.lineno, in_function)
            return
        case ast.Call(func=function, args=[ast.Constant(value=str(target)), *_]) if _dotted(function) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            yield Import(target, node.lineno, in_function)
    inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, known, in_function=inside)


def _dotted(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute):
            return f"{_dotted(value)}.{attribute}"
    return ""


def problems(modules: Mapping[str, Module]) -> list[str]:
    """Every breach, as `path:line: what (which rule)`."""
    found: list[str] = []
    for module in modules.values():
        if module.layer not in LEVEL:
            found.append(f"{module.path}:1: {module.layer} has no place in the layers (add it to LAYERS)")
            continue
        for imported in module.imports:
            if why := breach(module, imported):
                found.append(f"{module.path}:{imported.line}: {why}")
        if LEVEL[module.layer] < LEVEL["tensor"]:
            found += [
                f"{module.path}:{line}: {module.layer} calls {name} of a DTensor (a layer before tensor knows specs "
                "and locals; decompositions are in decompose)"
                for name, line in module.calls
            ]
    found += [f"import cycle: {' -> '.join(cycle)} (modules do not import each other)" for cycle in cycles(modules)]
    return found


def breach(module: Module, imported: Import) -> str | None:
    """The error of one import, or None."""
    target, _, in_function = imported
    if target.startswith("."):
        return f"import of {target} is relative (imports are absolute)"
    if within(target, "shardwise"):
        return _breach_inside(module.layer, target, in_function)
    if any(within(target, package) for package in THEIRS) and module.layer != ADAPTER:
        return f"uses {target} (only {ADAPTER}.py may)"
    if within(target, "torch.distributed") and module.layer not in MAY_COMMUNICATE:
        return f"uses {target} (only {', '.join(sorted(MAY_COMMUNICATE))} may use torch.distributed)"
    if not in_function and any(within(target, package) for package in LAZY):
        return f"imports {target} at the top (it is imported inside the function that needs it)"
    return None


def _breach_inside(layer: str, target: str, in_function: bool) -> str | None:
    other = layer_of(target)
    if in_function and (layer, target) not in DEFERRED:
        return f"imports {target} inside a function (imports of the package stand at the top)"
    if other not in LEVEL:
        return f"imports {target}, which has no place in the layers"
    if LEVEL[other] > LEVEL[layer]:
        return f"{layer} imports {target} (a layer imports only layers before it: {other} comes after {layer})"
    if other != layer and {layer, other} <= STRANGERS:
        return f"{layer} imports {target} ({layer} and {other} do not import each other)"
    return None


def cycles(modules: Mapping[str, Module]) -> list[list[str]]:
    """One cycle for each module that closes one, found depth first."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append([*trail[trail.index(name) :], name])
            return
        if name in done or name not in modules:
            return
        for target in sorted({imported.target for imported in modules[name].imports}):
            visit(target, [*trail, name])
        done.add(name)

    for name in modules:
        visit(name, [])
    return found


def read_package(folder: Path) -> dict[str, Module]:
    paths: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    root = folder.parents[1]
    return {
        name: parse(name, str(path.relative_to(root)), path.read_text(encoding="utf-8"), frozenset(paths))
        for name, path in paths.items()
    }


def of_sources(**sources: str) -> list[str]:
    """The breaches of a package given as `layer__module="source"`; `init` is its `__init__`."""
    names = {key: "shardwise" if key == "init" else "shardwise." + key.replace("__", ".") for key in sources}
    known = frozenset(names.values())
    return problems(
        {name: parse(name, key.replace("__", "/") + ".py", sources[key], known) for key, name in names.items()}
    )


def test_the_package_keeps_its_layers() -> None:
    modules = read_package(SOURCE)
    assert "shardwise.errors" in modules, f"no package found in {SOURCE}"
    assert not (found := problems(modules)), "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"core__a": "from shardwise.plan.b import x", "plan__b": ""}, "core/a.py:1: core imports shardwise.plan.b"),
        ({"core__a": "import shardwise.api", "api": ""}, "api comes after core"),
        ({"core__a": "from shardwise import api", "api": ""}, "api comes after core"),
        ({"tensor": "from shardwise import DTensor", "init": ""}, "__init__ comes after tensor"),
        ({"tensor": "if TYPE_CHECKING:\n    from shardwise.api import x", "api": ""}, "tensor.py:2: tensor imports"),
        ({"init": "from shardwise.cli import main", "cli": ""}, "cli comes after __init__"),
        (
            {"debug__a": "from shardwise.parallel import x", "parallel": ""},
            "debug and parallel do not import each other",
        ),
        (
            {"plan__a": "def f():\n    from shardwise.core import x", "core": ""},
            "plan/a.py:2: imports shardwise.core inside",
        ),
        (
            {"plan__a": "f = lambda: __import__('shardwise.core')", "core": ""},
            "imports shardwise.core inside a function",
        ),
        ({"api": "import importlib\nimportlib.import_module('shardwise.debug')", "debug": ""}, "debug comes after api"),
        (
            {"core__a": "from shardwise.core import b", "core__b": "from shardwise.core import a"},
            "import cycle: shardwise",
        ),
        ({"api": "import shardwise.random", "random": "import shardwise.api"}, "import cycle: shardwise.api -> "),
        ({"core__a": "from . import b"}, "is relative"),
        ({"core__a": "import torch.distributed as dist"}, "core/a.py:1: uses torch.distributed (only"),
        ({"plan__a": "from torch import distributed"}, "uses torch.distributed (only"),
        ({"rules__a": "import torch\ntorch.distributed.barrier()"}, "rules/a.py:2: uses torch.distributed.barrier"),
        ({"tensor": "def f():\n    import torch.distributed"}, "tensor.py:2: uses torch.distributed (only"),
        ({"fabric__c10d": "from torch.distributed.tensor import DTensor"}, "(only interop.py may)"),
        ({"fabric__c10d": "from torch.distributed import tensor"}, "(only interop.py may)"),
        ({"fabric__c10d": "import torch\nx = torch.distributed.tensor.DTensor"}, "(only interop.py may)"),
        ({"cli": "from rich.console import Console"}, "imports rich.console.Console at the top"),
        ({"parallel": "class A:\n    import torch._dynamo"}, "parallel.py:2: imports torch._dynamo at the top"),
        ({"rules__a": "def f(x):\n    return x.redistribute()"}, "rules/a.py:2: rules calls redistribute of a DTensor"),
        ({"dispatch__a": "def f(x):\n    return getattr(x, 'to_local')()"}, "dispatch calls to_local of a DTensor"),
        ({"utils": ""}, "utils has no place in the layers"),
        ({"api": "import shardwise.utils"}, "which has no place in the layers"),
    ],
)
def test_a_breach_is_found(sources: dict[str, str], expected: str) -> None:
    found = of_sources(**sources)
    assert any(expected in line for line in found), found


def test_what_is_allowed_is_allowed() -> None:
    assert not of_sources(
        errors="import torch",
        core="from shardwise.core.a import x",
        core__a="from shardwise.errors import LayoutError",
        core__b="from shardwise.core import a\nfrom shardwise import errors",
        fabric__c10d="import torch.distributed as dist\nfrom torch.distributed import ReduceOp",
        random="from shardwise.tensor import DTensor",
        api="from shardwise import random\nx = 'torch.distributed.tensor'",
        interop="def f():\n    from torch.distributed.tensor import DTensor",
        tensor="def f():\n    from rich.table import Table",
        decompose__a="from shardwise.tensor import DTensor\nx = DTensor().redistribute().to_local()",
        checkpoint="import torch.distributed.checkpoint\nfrom shardwise.api import y",
        init="from shardwise.api import y\nfrom shardwise.checkpoint import z",
        cli="import shardwise\nfrom shardwise.demo import main",
        demo="import shardwise as sw",
    )
