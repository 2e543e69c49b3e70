"""Seconds and bytes of a step, from one model of the links: a start-up time and a time per byte for each axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from shardwise.core.mesh import DeviceMesh

__all__ = [
    "AxisGroup",
    "CostModel",
    "Link",
    "MeshLinks",
    "all_gather_bytes",
    "all_reduce_bytes",
    "all_to_all_bytes",
    "current_cost_model",
    "links_of",
    "on_new_model",
    "reduce_scatter_bytes",
    "set_cost_model",
]


@dataclass(frozen=True, slots=True)
class Link:
    """Speed of a link: `alpha` seconds to start a collective, `beta` seconds for each byte that a rank receives."""

    alpha: float
    beta: float


# ---------------------------------------------------------------- bytes that a rank receives in a collective


def all_gather_bytes(ranks: int, block: float) -> float:
    """Of an all-gather: the blocks of all other ranks, each of `block` bytes."""
    return (ranks - 1) * block


def reduce_scatter_bytes(ranks: int, block: float) -> float:
    """Of a reduce-scatter that leaves `block` bytes on each rank: an addend from every other rank."""
    return (ranks - 1) * block


def all_reduce_bytes(ranks: int, held: float) -> float:
    """Of an all-reduce of `held` bytes: a reduce-scatter, and an all-gather of its results."""
    return 2 * (ranks - 1) / ranks * held


def all_to_all_bytes(ranks: int, held: float) -> float:
    """Of an all-to-all of `held` bytes: an equal part from every other rank."""
    return (ranks - 1) / ranks * held


# ---------------------------------------------------------------- seconds


CPU_LINK = Link(alpha=40e-6, beta=1 / 2e9)  # gloo over loopback or ethernet
CUDA_LINK = Link(alpha=15e-6, beta=1 / 150e9)  # NCCL over NVLink


@dataclass(frozen=True)
class CostModel:
    """Links by device type, and by axis name if axes differ (links between nodes are slower than NVLink).

    Args:
        devices: the link of each device type.
        axes: the link of an axis by its name; takes precedence.

    Example:
        >>> model = CostModel(axes={"dp": Link(alpha=1e-4, beta=1e-9)})
        >>> mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
        >>> model.link(mesh, (0, 1)).beta
        1e-09
    """

    devices: Mapping[str, Link] = field(default_factory=lambda: {"cpu": CPU_LINK, "cuda": CUDA_LINK})
    axes: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", MappingProxyType(dict(self.devices)))
        object.__setattr__(self, "axes", MappingProxyType(dict(self.axes)))

    __hash__ = object.__hash__

    def link(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Link:
        """The link of a group over `axes`: the slowest of theirs."""
        default = self.devices.get(mesh.device_type, CPU_LINK)
        if not self.axes or not axes:
            return default
        links = [self.axes.get(mesh.axis_name(a), default) for a in axes]
        return Link(max(link.alpha for link in links), max(link.beta for link in links))

    def seconds(self, mesh: DeviceMesh, axes: tuple[int, ...], received: float) -> float:
        """Modelled time of a collective over `axes` in which a rank receives `received` bytes."""
        link = self.link(mesh, axes)
        return link.alpha + received * link.beta


class AxisGroup(NamedTuple):
    """The ranks along some axes: their number, and the link between them."""

    size: int
    alpha: float
    beta: float

    def seconds(self, received: float) -> float:
        """Modelled time of a collective in which a rank receives `received` bytes."""
        return self.alpha + received * self.beta


class MeshLinks:
    """The links of one mesh in one model, computed once: of each axis, of groups of axes, the best of all."""

    __slots__ = ("_groups", "_mesh", "_model", "best", "by_speed", "each", "uniform")

    def __init__(self, model: CostModel, mesh: DeviceMesh) -> None:
        self._model, self._mesh = model, mesh
        self._groups: dict[tuple[int, ...], AxisGroup] = {}
        self.each = tuple(model.link(mesh, (axis,)) for axis in range(mesh.ndim))
        known = self.each or (model.link(mesh, ()),)
        self.best = Link(min(link.alpha for link in known), min(link.beta for link in known))
        self.uniform = len(set(known)) == 1
        self.by_speed = tuple(sorted(range(mesh.ndim), key=lambda axis: (self.each[axis].beta, axis)))

    def group(self, axes: tuple[int, ...]) -> AxisGroup:
        """The group over `axes`."""
        found = self._groups.get(axes)
        if found is None:
            link = self._model.link(self._mesh, axes)
            size = math.prod([self._mesh.shape[a] for a in axes])
            found = self._groups[axes] = AxisGroup(size, link.alpha, link.beta)
        return found


@lru_cache(maxsize=256)
def links_of(model: CostModel, mesh: DeviceMesh) -> MeshLinks:
    """The links of `mesh` in `model`.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]])
        >>> links_of(CostModel(), mesh).group((0, 1)).size
        6
    """
    return MeshLinks(model, mesh)


_current: list[CostModel] = [CostModel()]
# Called when the model changes, to empty caches of decisions.
on_new_model: list[Callable[[], None]] = []


def current_cost_model() -> CostModel:
    """The model that plans are made with.

    Example:
        >>> current_cost_model().devices["cuda"].alpha
        1.5e-05
    """
    return _current[0]


def set_cost_model(model: CostModel) -> CostModel:
    """Plan with `model` from now on; returns the previous one.

    Example:
        >>> before = set_cost_model(CostModel())
        >>> _ = set_cost_model(before)
    """
    before = _current[0]
    _current[0] = model
    for forget in on_new_model:
        forget()
    return before
