"""Values between stages: tensors on one mesh become tensors on the next, and gradients go back.

A DTensor keeps the placements of axes with the same names in both meshes. A plain tensor goes from each rank to the
rank at the same coordinate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.errors import LayoutError
from shardwise.fabric.base import device_of, fabric_of
from shardwise.fabric.stage_link import StageLink
from shardwise.fabric.state_messages import RankTransfer, rank_transfer
from shardwise.meshes.target_layouts import same_axes
from shardwise.meshes.transfers import TransferPlan
from shardwise.plan.state_transfer import StateTransfer, plan_buckets
from shardwise.tensor import DTensor
from shardwise.tensor.laid_out import dtensor_of

__all__ = ["InProcess", "OverLink", "ValueMeta"]


CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class ValueMeta(NamedTuple):
    """A tensor without its values: its spec, or shape and dtype of a plain one; and whether it needs a gradient.

    Other values are in `value`.
    """

    spec: DTensorSpec | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: no tensor
    needs_grad: bool
    value: Any = None

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor, which must be sent."""
        return self.dtype is not None

    @classmethod
    def of(cls, value: Any) -> ValueMeta:
        """The description of an output of a stage."""
        if isinstance(value, CONSTANTS):
            return cls(None, (), None, False, value)
        if not isinstance(value, torch.Tensor):
            raise LayoutError(
                f"a stage returns a {type(value).__name__}, which cannot go to the next stage",
                hint="return a tuple of tensors, numbers, strings and None",
            )
        spec = value._spec.reduced().materialized() if isinstance(value, DTensor) else None
        return cls(spec, tuple(value.shape), value.dtype, value.requires_grad)

    def on(self, mesh: DeviceMesh) -> ValueMeta:
        """The same tensor on the mesh of another stage."""
        if self.spec is None:
            return self
        return self._replace(spec=same_axes("the output of a stage", self.spec, mesh, self.spec.tensor_meta))


class InProcess:
    """All stages in this process: a value is kept from its send until its receive."""

    def __init__(self) -> None:
        self._kept: dict[Any, torch.Tensor] = {}

    def send(self, key: Any, value: torch.Tensor, old: ValueMeta, new: ValueMeta, meshes: Any) -> None:
        """Move a tensor to the mesh of another stage."""
        if old.spec is None:
            _check_plain(*meshes)
        self._kept[key] = _moved(value.detach(), old, new)

    def has(self, key: Any) -> bool:
        """Whether a value was sent and not received."""
        return key in self._kept

    def receive(self, key: Any, old: ValueMeta, new: ValueMeta, meshes: Any) -> torch.Tensor:
        """The value that was sent."""
        return self._kept.pop(key)

    def drop(self) -> None:
        """Drop unread values after a failed step."""
        self._kept.clear()


def _moved(value: Any, old: ValueMeta, new: ValueMeta) -> torch.Tensor:
    if old.spec is None or new.spec is None:
        return value.clone()
    if value._spec is not old.spec:
        value = value.redistribute(placements=old.spec.placements, shard_order=old.spec.shard_order)
    plan = TransferPlan({"value": value._spec}, {"value": new.spec}, 2**62, None)
    return plan.run({"value": value})["value"]


class OverLink:
    """Stages on processes: messages between the ranks of their meshes."""

    def __init__(self, link: StageLink) -> None:
        self.link = link
        self._known: dict[Any, RankTransfer] = {}
        self._own = InProcess()  # between stages of the same ranks

    def send(self, key: int, value: Any, old: ValueMeta, new: ValueMeta, meshes: tuple[DeviceMesh, DeviceMesh]) -> None:
        """Send the parts of a tensor that the ranks of another stage need."""
        if meshes[0] is meshes[1]:
            self._own.send(key, value, old, new, meshes)
            return
        value = value.detach()
        if old.spec is None or new.spec is None:
            self.link.send(_partner(*meshes), key, value.contiguous())
            return
        if value._spec is not old.spec:
            value = value.redistribute(placements=old.spec.placements, shard_order=old.spec.shard_order)
        for bucket in self._messages(old.spec, new.spec).buckets:
            for message in bucket.sends:
                buffer = message.pack([value._local_tensor])
                for rank in message.ranks:
                    self.link.send(rank, key, buffer)

    def receive(self, key: int, old: ValueMeta, new: ValueMeta, meshes: tuple[DeviceMesh, DeviceMesh]) -> torch.Tensor:
        """A tensor that another stage sends, on the mesh of this one."""
        if meshes[0] is meshes[1]:
            return self._own.receive(key, old, new, meshes)
        if old.spec is None or new.spec is None:
            made = torch.empty(new.shape, dtype=new.dtype, device=device_of(meshes[1]))
            self.link.receive([(_partner(meshes[1], meshes[0]), key, made)])
            return made
        spec = new.spec
        (at,) = fabric_of(spec.mesh).coordinates(spec.mesh)
        local = torch.empty_strided(
            spec.local_shape(at), spec.local_stride(at), dtype=new.dtype, device=device_of(spec.mesh)
        )
        for bucket in self._messages(old.spec, spec).buckets:
            buffers = [message.empty([local]) for message in bucket.receives]
            sources = [message.ranks[0] for message in bucket.receives]
            self.link.receive([(rank, key, buffer) for rank, buffer in zip(sources, buffers, strict=True)])
            for message, buffer in zip(bucket.receives, buffers, strict=True):
                message.unpack(buffer, [local])
        return dtensor_of(spec, local)

    def drop(self) -> None:
        """Drop unread values after a failed step."""
        self._own.drop()

    def _messages(self, old: DTensorSpec, new: DTensorSpec) -> RankTransfer:
        found = self._known.get((old, new))
        if found is None:
            buckets = plan_buckets([old], [new], 2**62)
            transfer = StateTransfer((old,), (new,), buckets, None, tuple(dict.fromkeys((old.mesh, new.mesh))))
            found = self._known[old, new] = rank_transfer(transfer, fabric_of(old.mesh).rank())
        return found


def _check_plain(mine: DeviceMesh, other: DeviceMesh) -> None:
    if mine.shape != other.shape:
        raise LayoutError(
            f"a plain tensor cannot go from {mine} to {other}, which has another shape: its layout is unknown",
            hint="pass a DTensor to the first stage, so that layouts are known",
        )


def _partner(mine: DeviceMesh, other: DeviceMesh) -> int:
    """The rank of another stage at the coordinate of this one."""
    _check_plain(mine, other)
    position = mine.position_of(fabric_of(mine).rank())
    assert position is not None, "a rank runs its own stages"
    return other.grid_ranks[position]
