"""An operator of one's own, the rule that says how it may be sharded, and the check that the rule is true.

python examples/custom_operator.py                       # four ranks inside this process
torchrun --nproc-per-node 4 examples/custom_operator.py  # real processes, the same file
"""

import os

import torch
from torch import Tensor

import shardwise as sw

say = print if os.environ.get("RANK", "0") == "0" else lambda *words: None


@torch.library.custom_op("examples::scores", mutates_args=())
def scores(queries: Tensor, keys: Tensor) -> Tensor:
    """How near each query is to each key: minus the squared distance."""
    return -torch.cdist(queries, keys).square()


@scores.register_fake
def _(queries: Tensor, keys: Tensor) -> Tensor:
    return queries.new_empty(queries.shape[0], keys.shape[0])


# q queries and k keys may be split over devices, and each result goes where its query and its key are. Over d the
# squares are added up: split there, the results are parts of a sum.
RULE = "qd,kd->qk"


def main() -> None:
    mesh = sw.init_device_mesh("cpu", (int(os.environ.get("WORLD_SIZE", 4)),), mesh_dim_names=("x",))
    torch.manual_seed(0)
    queries, keys = torch.randn(10, 4), torch.randn(7, 4)

    operator = torch.ops.examples.scores.default
    sw.register_sharding(operator, RULE)
    sw.check_rule(operator, queries, keys)
    say(f"{RULE} is true: every way to split it gives what one device gives")

    alone = scores(queries, keys)
    for name, placements in {"queries": (sw.Shard(0), sw.Replicate()), "keys": (sw.Replicate(), sw.Shard(0))}.items():
        q, k = (sw.distribute_tensor(t, mesh, [p]) for t, p in zip((queries, keys), placements, strict=True))
        with sw.explain() as report:
            result = scores(q, k)
        moved = report.total.collectives
        same = torch.allclose(result.full_tensor(), alone, atol=1e-5)
        say(f"{name} split: {q.spec}, {k.spec} -> {result.spec}; {moved} collectives, as on one device: {same}")

    try:
        sw.register_sharding(operator, "qd,kd->qd")
        sw.check_rule(operator, queries, keys[:, :4])
    except sw.RuleError as error:
        say(f"a rule that is not true is told so: {str(error).splitlines()[0]}")
    finally:
        sw.register_sharding(operator, RULE)


if __name__ == "__main__":
    main()
