"""A program in a folder: one file for each rank that runs it. Written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.capture.program import Root, Sequenced, Tabled
from shardwise.capture.program_file import SavedProgram, check_effect, encoded
from shardwise.capture.roots import NamedMemories, RootFact
from shardwise.errors import UnsupportedError

__all__ = ["file_of", "save_program"]


def file_of(path: str | os.PathLike[str]) -> Path:
    """The file of this process: `rank3.json`; on virtual ranks all of them are `rank0.json`."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return Path(path) / f"rank{rank}.json"


def save_program(path: str | os.PathLike[str], recorded: SavedProgram, objects: Mapping[str, Any]) -> None:
    """Write a program.

    Args:
        path: the folder.
        recorded: the program, without names and with the facts of all tensors that were there.
        objects: what holds the tensors that it uses, by name.
    """
    for effect in recorded.effects:
        check_effect(effect)
    roots = recorded.roots
    used = _positions(recorded)
    named = NamedMemories(objects)
    held = [at for at in used if roots[at].memories is not None or roots[at].owner is not None]
    names = {at: _name(at, roots, named) for at in held}
    optimizers = {id(value): name for name, value in objects.items() if isinstance(value, torch.optim.Optimizer)}
    saved = recorded._replace(
        names=names,
        roots={at: roots[at] for at in used},
        written=tuple(at for at in recorded.written if at in used),
        aliases={at: named.others(name) for at, name in names.items()},
    )
    text = encoded(saved, optimizers, named.names)
    target = file_of(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    staged.write_text(text, encoding="utf-8")
    os.replace(staged, target)


def _positions(recorded: SavedProgram) -> list[int]:
    """The positions of the tensors that a program reads, gives back, sets gradients of or takes as arguments."""
    numbers = recorded.program.inputs()
    found = {at for at, fact in recorded.roots.items() if numbers & set(fact.numbers)}
    found |= {effect.target for effect in recorded.effects}
    waiting = [recorded.result, recorded.arguments, *(effect.value for effect in recorded.effects)]
    while waiting:
        match waiting.pop():
            case Root(position):
                found.add(position)
            case Sequenced(_, items):
                waiting += items
            case Tabled(_, items):
                waiting += [part for item in items for part in item]
            case _:
                pass
    return sorted(found)


def _name(at: int, roots: Mapping[int, RootFact], named: NamedMemories) -> str:
    fact = roots[at]
    if fact.owner is not None:
        return _name(fact.owner, roots, named) + ".grad"
    name = None if fact.memories is None else named.find(fact)
    if name is None:
        shown = fact.spec if fact.spec is not None else f"of shape {fact.parts[0].shape}" if fact.parts else ""
        raise UnsupportedError(
            f"save: the program uses a tensor {shown} that no object that was given holds",
            hint="step.save(path, model=model, optimizer=optimizer, ...): all that holds tensors of the step, by names",
        )
    return name
