"""Host memory for values that wait: those of a load until all are verified, those of a save until they are written."""

from __future__ import annotations

import math

import numpy as np
import torch

from shardwise.checkpoint.io.block_writer import as_bytes
from shardwise.fabric.base import of_one_rank

__all__ = ["HostBuffer", "kept_buffer"]

ALIGNMENT = 16  # of the widest dtype


class HostBuffer:
    """One large allocation of host memory, handed out in parts: the system gives it huge pages."""

    def __init__(self, size: int) -> None:
        self._data = np.empty(size, dtype=np.uint8)
        self._used = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HostBuffer:
        """The memory of a tensor itself, if it is dense and in host memory."""
        made = cls(0)
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            made._data = as_bytes(tensor)
        return made

    @property
    def size(self) -> int:
        """Bytes of the allocation."""
        return len(self._data)

    def clear(self) -> None:
        """Hand out all of it again. What was handed out before must not be in use."""
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[np.ndarray, torch.Tensor]:
        """Memory as bytes and as a tensor; a new allocation if not enough is left."""
        size = math.prod(shape) * dtype.itemsize
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        data = self._data[start : start + size]
        if len(data) == size:
            self._used = start + size
        else:
            data = np.empty(size, dtype=np.uint8)
        tensor = torch.from_numpy(data).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        return data, tensor


_kept: list[HostBuffer] = of_one_rank([])


def kept_buffer(size: int) -> HostBuffer:
    """The buffer of saves in the background, of at least this size; kept for the next one.

    One such save runs at a time. A buffer that is more than twice as large as needed is replaced.
    """
    if not _kept or not size <= _kept[0].size <= 2 * size:
        _kept.clear()  # freed before the next one is allocated
        _kept.append(HostBuffer(size))
    _kept[0].clear()
    return _kept[0]
