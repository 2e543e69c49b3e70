"""Seconds and bytes of a step, from one model of the links: a start-up time and a time per byte for each axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from shardwise.core.mesh import DeviceMesh

__all__ = [
    "AxisGroup",
    "CostModel",
    "HostLinks",
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
    """Speed of a link: `alpha` seconds to start a collective, `beta` seconds for each byte that a rank receives.

    Args:
        alpha: seconds.
        beta: seconds.
        factors: pairs of a collective and how many times `beta` its bytes take, at least 1; 1 if it is not named.

    Example:
        >>> link = Link(1e-5, 1e-9, (("reduce_scatter", 2.0),))
        >>> link.seconds("all_gather", 1e6), link.seconds("reduce_scatter", 1e6)
        (0.00101, 0.00201)
    """

    alpha: float
    beta: float
    factors: tuple[tuple[str, float], ...] = ()

    def seconds(self, collective: str, received: float) -> float:
        """Modelled time of a collective in which a rank receives `received` bytes."""
        return self.alpha + received * self.beta * dict(self.factors).get(collective, 1.0)


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
class HostLinks:
    """Links by the hosts of ranks: ranks are numbered host by host, with the same number on each.

    Args:
        ranks_per_host: how many ranks a host has.
        inside: the link of a group of ranks of one host.
        across: the link of a group with one rank of each host, while all such groups communicate.
        mixed: the link of a group with several ranks of several hosts.

    Example:
        >>> links = HostLinks(2, Link(1e-6, 1e-10), Link(1e-4, 4e-9), Link(1e-4, 1e-9))
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        >>> [links.link(mesh, axes).beta for axes in ((1,), (0,), (0, 1))]
        [1e-10, 4e-09, 1e-09]
    """

    ranks_per_host: int
    inside: Link
    across: Link
    mixed: Link

    def link(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Link:
        """The link of the groups over `axes`."""
        hosts = np.sort(self.hosts(mesh)[mesh.groups(axes)], axis=1)
        changes = hosts[:, 1:] != hosts[:, :-1]
        if not changes.any():
            return self.inside
        return self.across if changes.all() else self.mixed

    def hosts(self, mesh: DeviceMesh) -> np.ndarray:
        """The number of the host of each position of the grid."""
        return np.asarray(mesh.grid_ranks, dtype=np.int64) // self.ranks_per_host


@dataclass(frozen=True)
class CostModel:
    """Links by device type, by hosts, and by axis name if axes differ (links between nodes are slower than NVLink).

    Args:
        devices: the link of each device type.
        axes: the link of an axis by its name; takes precedence.
        hosts: the links inside and between hosts, by device type; takes precedence over `devices`.

    Example:
        >>> model = CostModel(axes={"dp": Link(alpha=1e-4, beta=1e-9)})
        >>> mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
        >>> model.link(mesh, (0, 1)).beta
        1e-09
    """

    devices: Mapping[str, Link] = field(default_factory=lambda: {"cpu": CPU_LINK, "cuda": CUDA_LINK})
    axes: Mapping[str, Link] = field(default_factory=dict)
    hosts: Mapping[str, HostLinks] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("devices", "axes", "hosts"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    __hash__ = object.__hash__

    def link(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Link:
        """The link of a group over `axes`: the slowest of theirs."""
        hosts = self.hosts.get(mesh.device_type)
        default = self.devices.get(mesh.device_type, CPU_LINK) if hosts is None else hosts.mixed
        if not (self.axes or hosts) or not axes:
            return default
        named = [self.axes[name] for name in map(mesh.axis_name, axes) if name in self.axes]
        if len(named) < len(axes):
            others = tuple([a for a in axes if mesh.axis_name(a) not in self.axes])
            named.append(default if hosts is None else hosts.link(mesh, others))
        if len(named) == 1:
            return named[0]
        slowest = max(named, key=lambda link: link.beta)
        return Link(max(link.alpha for link in named), slowest.beta, slowest.factors)

    def seconds(self, mesh: DeviceMesh, axes: tuple[int, ...], received: float) -> float:
        """Modelled time of a collective over `axes` in which a rank receives `received` bytes."""
        link = self.link(mesh, axes)
        return link.alpha + received * link.beta


class AxisGroup(NamedTuple):
    """The ranks along some axes: their number, and the link between them."""

    size: int
    alpha: float
    beta: float
    factors: dict[str, float]

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

    def seconds(self, collective: str, axes: tuple[int, ...], received: float) -> float:
        """Modelled time of a collective over `axes`, by its kind."""
        group = self.group(axes)
        return group.seconds(received * group.factors.get(collective, 1.0) if group.factors else received)

    def group(self, axes: tuple[int, ...]) -> AxisGroup:
        """The group over `axes`."""
        found = self._groups.get(axes)
        if found is None:
            link = self._model.link(self._mesh, axes)
            size = math.prod([self._mesh.shape[a] for a in axes])
            found = self._groups[axes] = AxisGroup(size, link.alpha, link.beta, dict(link.factors))
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
