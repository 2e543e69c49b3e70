"""Several meshes of one world: states that move from one to another. The public names, nothing else."""

from __future__ import annotations

from shardwise.meshes.transfers import PendingTransfer, TransferPlan, transfer, transfer_plan

__all__ = ["PendingTransfer", "TransferPlan", "transfer", "transfer_plan"]
