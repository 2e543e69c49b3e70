"""Models of Hugging Face transformers, parallel over a mesh. The public names, nothing else.

transformers is not a dependency: nothing here imports it before a function needs it.
"""

from __future__ import annotations

from shardwise.hf.input_layouts import context_parallel, shard_batch
from shardwise.hf.model_plans import plan_of
from shardwise.hf.parallel_models import parallelize
from shardwise.hf.pretrained_models import from_pretrained, save_pretrained
from shardwise.hf.training_loops import TrainerMixin, one_program

__all__ = [
    "TrainerMixin",
    "context_parallel",
    "from_pretrained",
    "one_program",
    "parallelize",
    "plan_of",
    "save_pretrained",
    "shard_batch",
]
