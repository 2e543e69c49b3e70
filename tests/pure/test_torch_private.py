"""Private names of torch: imported in one module, each with its reason, each still there."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise import torch_private

SOURCE = Path(__file__).parents[2] / "src" / "shardwise"
# Modules that replace or adapt what they name. Their docstrings and `torch_private` say so.
ROOMS = (
    "torch_private.py",
    "interop.py",
    "fabric/c10d.py",
    "fabric/process_groups.py",
    "fabric/thread_group.py",
    "loading.py",
)


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every private name of torch that a module imports or reads."""
    tree, known = ast.parse(source), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names = {a.asname or "torch": a.name for a in node.names if a.name.partition(".")[0] == "torch"}
        else:
            continue
        known |= {name: full if name != "torch" else "torch" for name, full in names.items()}
        yield from ((node.lineno, full) for full in names.values() if _is_private(full))

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute) and (base := dotted(node.value)) is not None:
            return f"{base}.{node.attr}"
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)) is not None and _is_private(name):
            yield node.lineno, name


def _is_private(name: str) -> bool:
    if name.startswith("torch.ops."):  # operators, whatever they are called
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_names_are_in_one_module() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        if str(path.relative_to(SOURCE)) not in ROOMS
        for line, name in private_names(path.read_text())
    ]
    assert not found, "import these from shardwise.torch_private, with a reason there:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C._len_torch_dispatch_stack()", "torch._C"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch.utils import _pytree as tree", "torch.utils._pytree"),
        ("import torch.utils._pytree as tree", "torch.utils._pytree"),
        ("from torch import autograd\nautograd._get_sequence_nr()", "torch.autograd._get_sequence_nr"),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    assert name in [found for _, found in private_names(source)]


def test_public_names_are_not() -> None:
    assert not list(private_names("import torch\ntorch.ops.aten._softmax\ntorch.nn.Module.__call__\nx._spec"))


def test_each_name_has_a_reason() -> None:
    lines = (SOURCE / "torch_private.py").read_text().splitlines()
    bare = [line for line in lines if line[:1].isalpha() and "_C._" in line and "  # " not in line]
    assert not bare


@pytest.mark.parametrize("name", torch_private.__all__)
def test_torch_still_has_it(name: str) -> None:
    assert getattr(torch_private, name) is not None or name == "opaque_types", f"torch has moved what {name} stands for"


# ---------------------------------------------------------------- whether code is traced

ASKING = ("is_compiling", "is_dynamo_compiling", "is_exporting", "_get_dispatch_mode", "dispatch_mode_of")


def test_whether_code_is_traced_is_asked_in_one_module() -> None:
    """Torch has several answers; `core/tracing.py` names the questions."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name in ("core/tracing.py", "torch_private.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ASKING:
                found.append(f"{name}:{node.lineno}")
            elif isinstance(node, ast.ImportFrom) and node.module != "shardwise.core.tracing":
                found += [f"{name}:{node.lineno}" for alias in node.names if alias.name in ASKING]
    assert not found, f"ask `is_tracing`, `is_dynamo_compiling` or `proxy_mode` of core/tracing.py: {found}"
