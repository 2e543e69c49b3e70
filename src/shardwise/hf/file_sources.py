"""Which tensors in the files of a transformers model form its parameters, by its own converters.

Converters of transformers rename tensors, stack those of experts, join and split fused ones. They run here on
`LazyTensor`, which records the slices, so that each rank reads only what it needs.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.checkpoint.partition.assembled_tensors import LazyTensor
from shardwise.checkpoint.partition.fused_tensors import Source
from shardwise.errors import UnsupportedError

__all__ = ["sources_of"]


def sources_of(model: nn.Module, files: Mapping[str, tuple[int, ...]]) -> dict[str, Source]:
    """The sources of a model's tensors in the files, by their names in the model.

    Args:
        model: a model of transformers.
        files: the shapes of the tensors in the files.
    """
    conversions = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    loading = importlib.import_module("transformers.core_model_loading")
    renamings = [each for each in conversions if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    own = model.state_dict()
    prefix = getattr(model, "base_model_prefix", None)
    sources: dict[str, Source] = {}
    started: dict[str, Any] = {}
    for name in sorted(files, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, own)
        if pattern is None:
            sources[target] = name
        else:
            converter = started.setdefault(target, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(target, name, pattern, LazyTensor.of_file(name, tuple(files[name])))
    for target, converter in started.items():
        for found, value in _converted(model, target, converter).items():
            value = value[0] if isinstance(value, list) else value
            sources[found] = value.assembled()
    return sources


def _converted(model: Any, target: str, converter: Any) -> dict[str, Any]:
    """The results of a converter, by their names in the model."""
    tensors = converter.materialize_tensors()
    for operation in converter.operations:
        try:
            tensors = operation.convert(
                tensors,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=target,
                model=model,
                config=model.config,
                missing_keys=None,
            )
        except UnsupportedError as error:
            raise UnsupportedError(f"{target}: {error.problem} ({operation!r})", hint=error.hint) from None
    name = target.replace("*.", "0.")
    for pattern in tensors:
        if pattern in name:
            before, _, after = name.partition(pattern)
            return {before + each + after: value for each, value in tensors.items()}
    return tensors
