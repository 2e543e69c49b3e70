"""Elements that a mask selects, sent to the ranks that own their positions in the result."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch

from shardwise.core.placement import Shard
from shardwise.rules.engine import Factors, OwnerRow, Row
from shardwise.rules.owner_programs import Items, OwnedPart, owner_of, write
from shardwise.rules.registry import Call, rule

aten = torch.ops.aten

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("compact(Tensor self, Tensor mask, Tensor place, int size) -> Tensor")


def compact(tensor: torch.Tensor, mask: torch.Tensor, place: torch.Tensor, size: int) -> torch.Tensor:
    """The elements that a mask selects, at most `size`, padded with zeros."""
    result = tensor.new_zeros(size)
    if not tensor.is_meta:
        found = tensor[mask]
        result[: len(found)] = found
    return result


_library.impl("compact", compact, "CompositeExplicitAutograd")


def compact_by_owner(place: OwnedPart, named: Mapping[str, Any]) -> Generator[Items, Items, tuple[torch.Tensor, ...]]:
    """Send selected elements to the owners of their positions in the result. A dry run sends all elements."""
    mask = slice(None) if named["mask"].is_meta else named["mask"]
    member, row = owner_of(place, named["place"][mask])
    wrong = torch.zeros((), dtype=torch.bool, device=row.device)
    rows, values = yield from write(place, member, row, named["self"][mask], wrong)
    result = named["self"].new_zeros(place.length)
    result[rows] = values
    return (result,)


@rule(torch.ops.shardwise.compact.default, local_op=compact, program=compact_by_owner)
def compacting(call: Call) -> Factors:
    """Of tensors of one dim, all sharded alike."""
    owned = OwnerRow(Row((Shard(0),) * 3, (Shard(0),)), sent=(0, 2), table=3)
    return Factors(((None,),) * 3, ((None,),), owned=(owned,) if call["size"] else ())
