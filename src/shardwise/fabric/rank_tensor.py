"""RankTensor: the local tensors of all virtual ranks in one tensor, and operators on each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import TypeIs

from shardwise.core.dispatch_keys import NumberConversions
from shardwise.core.tangents import accept_plain_tangents, made_from_plain
from shardwise.errors import AgreementError, LayoutError, MeshError, ShardwiseError, UnsupportedError
from shardwise.fabric.nondeterministic import is_nondeterministic, shape_only, share_results
from shardwise.fabric.rank_generators import draws, draws_alike
from shardwise.fabric.rank_sizes import of_rank, rank_sizes, traced_sizes
from shardwise.fabric.rank_tangents import RankTangents, in_forward_mode
from shardwise.fabric.shared_writes import (
    STATISTICS,
    TRACED,
    SharedWrite,
    check_agreement,
    is_shared,
    is_traced,
    written_arguments,
)
from shardwise.torch_private import (
    OpOverload,
    disabled_torch_function,
    make_wrapper_subclass,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = [
    "DATA_IS_COUNTED", "RankTensor", "UnevenDual", "check_replicas", "counters_of_data", "data_was_read", "is_even",
    "is_of_ranks", "is_tensor", "map_parts", "of_rows", "part_at", "parts_of", "rank_results", "results_alike",
    "run_on_each", "run_rows", "writes_as_data", "writes_to", "written_leaves",
]  # fmt: skip


SHOWN_RANKS = 6  # of a RankTensor that is printed


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not is_traced(a) and a.is_meta is b.is_meta is False and torch.equal(a, b)


class RankTensor(NumberConversions):
    """One tensor for each virtual rank. An operator on it runs on each rank's tensor.

    Sizes that differ between ranks are symbolic: numbers computed from them differ too. `tensors` has all.
    """

    tensors: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(cls, tensors: Sequence[torch.Tensor]) -> RankTensor:
        first = tensors[0]
        size, stride = first.shape, first.stride()
        if first.__class__ in TRACED:
            size, stride = traced_sizes(tensors)
        else:
            for tensor in tensors:
                if tensor.shape != size:
                    size, stride = _own_sizes(tensors)
                    cls = UnevenDual if in_forward_mode() else cls
                    break
        self = make_wrapper_subclass(cls, size, strides=stride, dtype=first.dtype, device=first.device)
        self.tensors = tuple(tensors)
        return self

    __torch_function__ = disabled_torch_function  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(types) > 1 and any(getattr(kind, "_laid_out_over_ranks", False) for kind in types):
            return NotImplemented  # a DTensor operand is distributed over the ranks: its class handles the call
        return run_on_each(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The same values, unknown to autograd. Assigning gives each rank's tensor the values of another's."""
        return self.detach() if DATA_IS_COUNTED in self.__dict__ else _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if not isinstance(value, RankTensor) or len(value.tensors) != len(self.tensors):
            raise UnsupportedError(
                f"the data of a RankTensor of {len(self.tensors)} ranks cannot be set to one plain tensor: the ranks "
                "would share its memory",
                hint=f"RankTensor([tensor.clone() for _ in range({len(self.tensors)})])",
            )
        if DATA_IS_COUNTED in self.__dict__:
            with torch.no_grad():
                self.copy_(value)
            return
        for mine, other in zip(self.tensors, value.tensors, strict=True):
            mine.data = other
        _DATA.__set__(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        count = len(self.tensors)
        if count > 1 and is_even(self) and all(_is_same(self.tensors[0], other) for other in self.tensors[1:]):
            shown = [f"  ranks 0 to {count - 1}: {self.tensors[0]!r}\n"]
        else:
            shown = [f"  rank {i}: {t!r}\n" for i, t in enumerate(self.tensors)]
            if count > SHOWN_RANKS:
                shown[SHOWN_RANKS // 2 : -(SHOWN_RANKS // 2)] = [f"  ... {count - SHOWN_RANKS} more\n"]
        return "RankTensor(\n" + "".join(shown) + ")"

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        if not is_traced(self.tensors[0]) and not is_even(self):
            raise UnsupportedError(
                f"torch.compile of a RankTensor of shape {tuple(self.shape)}: the ranks' tensors differ in shape, and "
                "the compiler needs one shape",
                hint="make it a DTensor before the compiled program, by from_local(..., shape=, stride=); as such it "
                "compiles",
            )
        return [f"_t{i}" for i in range(len(self.tensors))], len(self.tensors)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_t") and name[2:].isdigit():  # as compilers know them
            return self.tensors[int(name[2:])]
        raise AttributeError(f"'RankTensor' object has no attribute {name!r}", name=name, obj=self)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], count: int, size: Any, stride: Any) -> RankTensor:
        return RankTensor([inner[f"_t{i}"] for i in range(count)])

    def __coerce_tangent_metadata__(self) -> RankTensor:
        """The gradient that a compiler expects for this output: one for each rank."""
        accept_plain_tangents()
        return self

    def __coerce_same_metadata_as_tangent__(
        self, expected: Any, expected_type: type | None = None
    ) -> torch.Tensor | None:
        """Convert the ranks' gradients if compiled code expects one plain gradient for all."""
        if expected_type is not torch.Tensor:
            return None
        check_agreement(self.tensors, _differing_gradients)
        return self.tensors[0]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return RankTensor, (self.tensors,)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankTensor:
        copied = RankTensor([tensor.detach().clone() for tensor in self.tensors])
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def tolist(self) -> list[Any]:
        """The values of each rank."""
        return [tensor.tolist() for tensor in self.tensors]

    def numpy(self, *, force: bool = False) -> Any:
        """Refused: each rank has its own array."""
        raise UnsupportedError(
            "numpy() of a RankTensor, which has a tensor for each rank",
            hint="x.numpy() of a DTensor is the global array; tensors[rank].numpy() is that of one rank",
        )


class UnevenDual(RankTensor):
    """A `RankTensor` of uneven locals made in forward mode, where torch needs each rank's zero tangents."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = disabled_torch_function
        if not in_forward_mode():
            return plain(func, types, args, kwargs or {})
        with RankTangents(RankTensor):
            return plain(func, types, args, kwargs or {})


def _differing_gradients(rank: int) -> ShardwiseError:
    return AgreementError(
        f"the gradient of a plain output of compiled code differs between virtual ranks 0 and {rank}: the output is "
        "one tensor for all ranks",
        hint="reduce over the ranks first, as full_tensor() of a DTensor does",
    )


made_from_plain(RankTensor, lambda tangent, count: RankTensor([tangent] * count))


def check_replicas(local: RankTensor) -> None:
    """Raise unless all ranks hold the same values, so that one plain tensor can represent them."""
    if not is_traced(local.tensors[0]):
        check_agreement(local.tensors, _differing_replicas)


def _differing_replicas(rank: int) -> ShardwiseError:
    return AgreementError(
        f"the replicas of a DTensor differ between virtual ranks 0 and {rank}: one tensor cannot represent all ranks",
        hint="per-rank values were written to its local or given as replicated; to_local().tensors has each rank's",
    )


def is_of_ranks(tensor: Any) -> TypeIs[RankTensor]:
    """Whether a tensor holds the tensors of all virtual ranks. A plain one is of one rank, or equal on all."""
    return isinstance(tensor, RankTensor)


def is_even(local: RankTensor) -> bool:
    """Whether all ranks have a tensor of one shape."""
    return all(tensor.shape == local.tensors[0].shape for tensor in local.tensors)


def parts_of(local: Any) -> Sequence[torch.Tensor]:
    """The tensors of a local: one for each virtual rank, or the local itself."""
    return local.tensors if isinstance(local, RankTensor) else (local,)


def part_at(local: Any, position: int) -> torch.Tensor:
    """The tensor of the rank at a position among the ranks of this process; a plain tensor belongs to every rank."""
    return local.tensors[position] if isinstance(local, RankTensor) else local


def map_parts(fn: Callable[[torch.Tensor], torch.Tensor], local: torch.Tensor) -> torch.Tensor:
    """The local made of `fn(part)` for each tensor of a local."""
    return RankTensor([fn(part) for part in local.tensors]) if isinstance(local, RankTensor) else fn(local)


def of_rows(like: torch.Tensor, rows: Sequence[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """Locals of the same kind as `like`, from a row of tensors for each rank here; none if there is no rank."""
    if isinstance(like, RankTensor):
        return [RankTensor(column) for column in zip(*rows, strict=True)]
    return rows[0] if rows else ()


_COUNTERS = "_shardwise_counters"  # an attribute of storages
DATA_IS_COUNTED = "_shardwise_counted_data"  # an attribute of those whose `data` shares their version counter


def writes_as_data(local: torch.Tensor) -> int:
    """How many times the memory of a local was written to since it was first read as `data`, as far as counters tell.

    torch gives `x.data` a counter of its own, so that of `x` does not count writes to it, nor the other way round.
    """
    if not data_was_read:
        return 0
    for part in parts_of(local):
        counters = getattr(part.untyped_storage(), _COUNTERS, None)
        if counters is not None:
            return sum([counter._version for counter in counters])
    return 0


data_was_read: list[bool] = []  # not empty: some program has read the data of a DTensor


def counters_of_data(local: torch.Tensor, make: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Tensors that have the version counters of all writes to the memory of a local; made when first asked for."""
    storages = [part.untyped_storage() for part in parts_of(local)]
    for storage in storages:
        counters = getattr(storage, _COUNTERS, None)
        if counters is not None:
            return counters
    counters = make()
    for storage in storages:
        setattr(storage, _COUNTERS, counters)
    data_was_read[:] = [True]
    return counters


def writes_to(local: torch.Tensor) -> int | None:
    """How many times a local was written to; None if torch does not count."""
    count = writes_as_data(local)
    for tensor in (local, *local.tensors) if isinstance(local, RankTensor) else (local,):
        if tensor.is_inference():
            return None
        count += tensor._version
    return count


def run_on_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` on each rank's tensors; results that are tensors become a `RankTensor`, others must agree."""
    leaves, tree = tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, RankTensor)]
    counts = {len(leaves[i].tensors) for i in at}
    if len(counts) != 1:
        raise MeshError(f"{func}: locals of meshes with {sorted(counts)} ranks cannot be combined")
    count = counts.pop()
    if any(isinstance(leaf, _SYMBOLIC) for leaf in leaves):
        rows = [[of_rank(leaf, rank) for leaf in leaves] for rank in range(count)]
    else:
        rows = [list(leaves) for _ in range(count)]
    for i in at:
        for row, tensor in zip(rows, leaves[i].tensors, strict=True):
            row[i] = tensor
    if func.namespace == "prims":
        _resize_metas(rows, leaves, at)

    def call(row: Sequence[Any]) -> Any:
        rank_args, rank_kwargs = tree_unflatten(row, tree)
        return func(*rank_args, **rank_kwargs)

    written = written_leaves(func, args, kwargs, leaves)
    results = run_rows(func, rows, call, written)
    for i, _ in written:
        if isinstance(leaves[i], RankTensor):
            _take_sizes(leaves[i])
    return rank_results(results, functools.partial(_agreed, func), leaves)


def _resize_metas(rows: Sequence[list[Any]], leaves: Sequence[Any], at: Sequence[int]) -> None:
    """Give a meta tensor each rank's own shape if it has that of the first rank and other operands differ in shape.

    Forward mode uses such meta tensors for the sizes of a product with zero.
    """
    local = leaves[at[0]]
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and i not in at and leaf.is_meta and leaf.shape == local.shape:
            for row, tensor in zip(rows, local.tensors, strict=True):
                row[i] = leaf.new_empty(tensor.shape)


def written_leaves(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any]
) -> list[tuple[int, str]]:
    """The positions in the flat arguments of tensors that an operator writes to, and the names of their arguments."""
    names = written_arguments(func) if isinstance(func, OpOverload) else ()
    if not names:
        return []
    named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | dict(kwargs)
    if named.get("training") is False:  # running statistics are only read
        names = [name for name in names if name not in STATISTICS]
    found = {id(leaf): name for name in names for leaf in tree_leaves(named.get(name))}
    return [(i, found[id(leaf)]) for i, leaf in enumerate(leaves) if id(leaf) in found and is_tensor(leaf)]


def run_rows(
    func: Any, rows: Sequence[list[Any]], call: Callable[[Sequence[Any]], Any], written: Sequence[tuple[int, str]]
) -> list[Any]:
    """`call` on the row of each rank, as N processes would, with one plain tensor or generator for N equal ones.

    Args:
        func: the operator that is called.
        rows: each rank's tensors and other values.
        call: runs the operator on a row.
        written: the positions in a row of the tensors that it writes to, and the names of their arguments.
    """
    random = draws(func)
    shared = [i for i, _ in written if is_shared([row[i] for row in rows])]
    if not shared and not random:
        return results_alike(func, rows, call, written)
    trial = SharedWrite(func, rows, written, shared) if written else None
    mine = rows if trial is None else trial.trials
    if random:
        results = draws_alike(func, mine, call)
    else:
        results = results_alike(func, mine, call, written)
    if trial is None:
        return results
    trial.commit()
    return [tree_map(functools.partial(trial.original, rank), result) for rank, result in enumerate(results)]


def results_alike(func: Any, rows: Sequence[Any], call: Callable[[Sequence[Any]], Any], written: Any) -> list[Any]:
    """`call` on each row; ranks with equal rows have equal results."""
    if is_nondeterministic(func):
        return share_results(rows, call, written, shape_only(func))
    return [call(row) for row in rows]


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


_DATA: Any = torch.Tensor.data
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _own_sizes(tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """The sizes and strides of uneven locals."""
    if len({tensor.dim() for tensor in tensors}) > 1:
        raise LayoutError(
            f"locals of {sorted({tensor.dim() for tensor in tensors})} dims cannot form one RankTensor",
            hint="give every rank a tensor of as many dims",
        )
    return rank_sizes([t.shape for t in tensors]), rank_sizes([t.stride() for t in tensors], strides=True)


def _take_sizes(local: RankTensor) -> None:
    """Update the sizes of a local after an operator has resized its tensors: resize_, t_, out=."""
    made = RankTensor(local.tensors)
    if _sizes(made) != _sizes(local):
        _DATA.__set__(local, made)


def _sizes(local: RankTensor) -> list[Any]:
    return [of_rank(size, rank) for rank in range(len(local.tensors)) for size in (*local.shape, *local.stride())]


def rank_results(results: Sequence[Any], plain: Callable[[Sequence[Any]], Any], given: Sequence[Any] = ()) -> Any:
    """The results of all ranks as one: tensors as a `RankTensor`, sequences item by item, other values by `plain`.

    An in-place operator returns the tensor it wrote to, which is looked up in `given`.
    """
    first = results[0]
    if isinstance(first, torch.Tensor):
        for leaf in given:
            if first is leaf or (isinstance(leaf, RankTensor) and _are_parts(results, leaf)):
                return leaf
        return RankTensor(results)
    if isinstance(first, tuple | list):
        if len({len(result) for result in results}) > 1:
            raise AgreementError(
                f"an operator gives {[len(result) for result in results]} results on the virtual ranks",
                hint="ranks run in lockstep here: take the tensor of one rank with local.tensors[rank]",
            )
        items = (rank_results(column, plain, given) for column in zip(*results, strict=True))
        return list(items) if isinstance(first, list) else tuple(items)
    return plain(results)


def _are_parts(results: Sequence[Any], leaf: RankTensor) -> bool:
    return all(result is tensor for result, tensor in zip(results, leaf.tensors, strict=True))


def _agreed(func: Any, values: Sequence[Any]) -> Any:
    """The plain value that every rank has; a NaN agrees with a NaN."""
    first = values[0]
    if any(value != first and (value == value or first == first) for value in values[1:]):
        raise UnsupportedError(
            f"{func} gives a different plain value on each virtual rank ({values[:4]}...)",
            hint="ranks run in lockstep here: take the values of one rank with local.tensors[rank]",
        )
    return first
