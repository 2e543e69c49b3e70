"""The samples of each training step, as a function of the step: any number of ranks gets the same batches."""

from __future__ import annotations

import functools

import torch

from shardwise.errors import LayoutError

__all__ = ["batch_indices"]


def batch_indices(
    step: int, batch_size: int, dataset_size: int, *, seed: int = 0, shuffle: bool = True
) -> torch.Tensor:
    """The indices of the global batch of a step, in order.

    Each epoch visits the data once, in a different order; a batch may begin in one epoch and end in the next.
    The result depends only on the arguments, so a job that continues from a checkpoint on other ranks needs no sampler
    state. `distribute_tensor` of a batch gives each rank its rows.

    Args:
        step: the number of the step, from 0.
        batch_size: the size of the global batch.
        dataset_size: the number of samples.
        seed: the seed of the order.
        shuffle: use a random order in each epoch; else the order of the data.

    Example:
        >>> batch_indices(1, 3, 8, shuffle=False), batch_indices(2, 3, 8, shuffle=False)
        (tensor([3, 4, 5]), tensor([6, 7, 0]))
        >>> epoch = torch.cat([batch_indices(step, 4, 8) for step in range(2)])
        >>> sorted(epoch.tolist())
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if step < 0 or batch_size < 1 or dataset_size < 1:
        raise LayoutError(
            f"batch_indices: step {step}, batches of {batch_size}, {dataset_size} samples",
            hint="use a step of at least 0, and sizes of at least 1",
        )
    first = step * batch_size
    positions = torch.arange(first, first + batch_size)
    if not shuffle:
        return positions % dataset_size
    parts = []
    for epoch in range(first // dataset_size, (first + batch_size - 1) // dataset_size + 1):
        own = positions[positions // dataset_size == epoch] % dataset_size
        parts.append(_order(dataset_size, seed, epoch)[own])
    return torch.cat(parts)


@functools.lru_cache(2)
def _order(size: int, seed: int, epoch: int) -> torch.Tensor:
    """The permutation of an epoch, from a separate generator."""
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) % 2**63
    return torch.randperm(size, generator=torch.Generator().manual_seed(mixed))
