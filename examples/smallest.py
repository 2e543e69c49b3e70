"""One tensor on many devices, in as few lines as it takes.

python examples/smallest.py                              # four ranks inside this process
torchrun --nproc-per-node 4 examples/smallest.py         # real processes, the same file
"""

import os

import torch

import shardwise as sw

mesh = sw.init_device_mesh("cpu", (int(os.environ.get("WORLD_SIZE", 4)),), mesh_dim_names=("x",))
torch.manual_seed(0)
a, b = torch.randn(6, 8), torch.randn(8, 5)

rows = sw.distribute_tensor(a, mesh, [sw.Shard(0)])  # six rows over four ranks: uneven, and that is fine
product = (rows @ sw.distribute_tensor(b, mesh, [sw.Replicate()])).relu()
total = product.sum()

if os.environ.get("RANK", "0") == "0":
    print(f"{rows.spec} @ b -> {product.spec}, its sum {total.spec}")
whole, number = product.full_tensor(), total.item()
if os.environ.get("RANK", "0") == "0":
    print(f"as on one device: {torch.allclose(whole, (a @ b).relu())}, {number:.4f}")
