"""Writes to memory that virtual ranks share: one plain tensor that stands for every rank's copy.

Each rank's write is tried on a separate copy. If the copies agree, the result is written once; if they differ, an error
is raised and nothing changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from shardwise.errors import AgreementError, ShardwiseError, UnsupportedError
from shardwise.torch_private import FakeTensor, FunctionalTensor, OpOverload

__all__ = [
    "STATISTICS",
    "TRACED",
    "SharedWrite",
    "agree",
    "check_agreement",
    "is_shared",
    "is_traced",
    "written_arguments",
]

# Running statistics, which these operators update though their schemas do not declare it.
STATISTICS = ("running_mean", "running_var")
_UNDECLARED = frozenset({
    "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::batch_norm_update_stats",
    "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts",
})  # fmt: skip
_ALIGNED = 16  # bytes: no dtype is larger


@functools.cache
def written_arguments(op: OpOverload) -> tuple[str, ...]:
    """The arguments that an operator writes to, by its schema, and those that its schema omits.

    Example:
        >>> written_arguments(torch.ops.aten.add_.Tensor), written_arguments(torch.ops.aten.add.Tensor)
        (('self',), ())
    """
    schema = op._schema
    declared = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return (*declared, *(STATISTICS if schema.name in _UNDECLARED else ()))


def is_shared(column: Sequence[torch.Tensor]) -> bool:
    """Whether some of the ranks' tensors share memory."""
    first = column[0]
    if all(tensor is first for tensor in column):
        return len(column) > 1
    if is_traced(first) or first.layout is not torch.strided:
        return False
    starts = {(t.untyped_storage()._cdata, t.storage_offset()) for t in column if t.numel()}
    return len(starts) < sum(1 for t in column if t.numel())


TRACED = frozenset({FakeTensor, FunctionalTensor})


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a compiler's, which has no values."""
    return isinstance(tensor, FakeTensor | FunctionalTensor)


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same sizes and the same bits: a NaN agrees with itself.

    Example:
        >>> agree(torch.tensor([0.0, float("nan")]), torch.tensor([0.0, float("nan")]))
        True
        >>> agree(torch.tensor(0.0), torch.tensor(-0.0))
        False
    """
    if a is b:
        return True
    if a.shape != b.shape or a.dtype is not b.dtype or a.layout is not b.layout:
        return False
    if a.is_meta:
        return True
    if a.layout is not torch.strided:
        return a.dim() == 0 or torch.equal(a.to_dense(), b.to_dense())
    return torch.equal(_bits(a), _bits(b))


def check_agreement(tensors: Sequence[torch.Tensor], error: Callable[[int], ShardwiseError]) -> None:
    """Raise for the first virtual rank whose tensor differs; for traced tensors, when the program runs.

    Args:
        tensors: one for each rank.
        error: makes the error if this rank's tensor differs from that of rank 0.
    """
    first = tensors[0]
    for rank, tensor in enumerate(tensors):
        if tensor is first:
            continue
        if is_traced(first) and tensor.shape == first.shape and tensor.dtype is first.dtype:
            same = ((tensor == first) | ((tensor != tensor) & (first != first))).all()
            torch.ops.aten._assert_async.msg(same, error(rank).problem.replace('"', "'"))  # in generated C++
        elif not agree(first, tensor):
            raise error(rank)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    # of a single element the stride may be any number
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


class SharedWrite:
    """One operator call for each rank, some of which write to memory that ranks share.

    Args:
        op: the operator.
        rows: each rank's tensors and other values, flat.
        written: the positions in a row of tensors that are written to, with the names of their arguments.
        shared: those of the positions at which ranks share memory.
    """

    def __init__(
        self, op: Any, rows: Sequence[Sequence[Any]], written: Sequence[tuple[int, str]], shared: Sequence[int]
    ) -> None:
        self.op, self.rows, self.written, self.shared = op, rows, written, frozenset(shared)
        self.trials = [_on_copies(row, [position for position, _ in written]) for row in rows]

    def commit(self) -> None:
        """Compare the ranks' writes to shared memory, then apply all of them."""
        for position, name in self.written:
            if position in self.shared:
                written = [trial[position] for trial in self.trials]
                check_agreement(written, functools.partial(self._error, position, name))
        for position, _ in self.written:
            for row, trial in zip(self.rows, self.trials, strict=True):
                _assign(row[position], trial[position])
                if position in self.shared:
                    break

    def _error(self, position: int, name: str, rank: int) -> ShardwiseError:
        return AgreementError(
            f"{self.op} would write a different value on virtual rank {rank} than on rank 0 into the argument "
            f"{name!r}, a "
            f"plain tensor of shape {tuple(self.rows[0][position].shape)}: it is one tensor for all ranks, and cannot "
            "hold different values",
            hint="write to a RankTensor, which holds one tensor for each rank: "
            f"RankTensor([tensor.clone() for _ in range({len(self.rows)})]); or reduce the values over the ranks "
            "first, as full_tensor() of a DTensor does",
        )

    def original(self, rank: int, result: Any) -> Any:
        """A result of a rank's trial, with a written copy replaced by its original."""
        for position, _ in self.written:
            if result is self.trials[rank][position]:
                return self.rows[rank][position]
        return result


def _assign(target: torch.Tensor, value: torch.Tensor) -> None:
    if target.shape != value.shape:  # an operator with out= gives an empty tensor its size
        target.resize_(value.shape)
        if target.stride() != value.stride():
            target.as_strided_(value.shape, value.stride())
    target.copy_(value)


def _on_copies(row: Sequence[Any], written: Iterable[int]) -> list[Any]:
    """A row whose written tensors are copies, and whose aliases of these are views of the copy."""
    tensors = {i: value for i, value in enumerate(row) if isinstance(value, torch.Tensor)}
    groups = {_memory(tensors[i]): [] for i in written}
    for i, tensor in tensors.items():
        if (memory := _memory(tensor)) in groups:
            groups[memory].append(i)
    copied = list(row)
    for group in groups.values():
        for i, copy in zip(group, _copies([tensors[i] for i in group]), strict=True):
            copied[i] = copy
    return copied


def _memory(tensor: torch.Tensor) -> int:
    """The memory that two tensors may have in common."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors on one memory, with the same offsets and strides."""
    first = tensors[0]
    if all(tensor is first for tensor in tensors) and first.is_contiguous():
        return [first.clone()] * len(tensors)
    if is_traced(first) or first.layout is not torch.strided or first.is_meta:
        if any(tensor is not first for tensor in tensors):
            raise UnsupportedError(
                "values of virtual ranks are written to plain tensors that share memory, inside a compiled program",
                hint="write outside of compiled code, or to one of the tensors at a time",
            )
        return [first.clone()] * len(tensors)
    begin = min(int(t.storage_offset()) * t.itemsize for t in tensors) // _ALIGNED * _ALIGNED
    end = max((int(t.storage_offset()) + _extent(t)) * t.itemsize for t in tensors)
    memory = first.untyped_storage()
    spanned = torch.empty(0, dtype=torch.uint8, device=first.device).set_(memory, begin, (end - begin,), (1,))
    copy = spanned.clone().untyped_storage()
    return [
        torch.empty(0, dtype=t.dtype, device=t.device).set_(
            copy, int(t.storage_offset()) - begin // t.itemsize, t.shape, t.stride()
        )
        for t in tensors
    ]


def _extent(tensor: torch.Tensor) -> int:
    """The number of elements from the first to the last in memory, inclusive."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
