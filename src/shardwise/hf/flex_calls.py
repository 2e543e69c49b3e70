"""`flex_attention` as transformers calls it, on DTensors."""

from __future__ import annotations

import functools
import sys
from typing import Any

from shardwise.tensor import is_dtensor

__all__ = ["call_flex_attention_uncompiled"]


def call_flex_attention_uncompiled() -> None:
    """Wrap the function by which transformers calls `flex_attention`, once, if transformers is loaded.

    It calls a compiled version. On DTensors `flex_attention` works block by block, with functions that a compiled
    program cannot contain. Calls with plain tensors are unchanged.
    """
    module: Any = sys.modules.get("transformers.integrations.flex_attention")
    call = getattr(module, "compile_friendly_flex_attention", None)
    if call is not None and not hasattr(call, "__wrapped__"):
        module.compile_friendly_flex_attention = _on_dtensors(call, module.flex_attention)


def _on_dtensors(compiled: Any, flex_attention: Any) -> Any:
    @functools.wraps(compiled)
    def compile_friendly_flex_attention(
        query: Any, key: Any, value: Any, training: bool = False, **options: Any
    ) -> Any:
        if is_dtensor(query) or is_dtensor(key) or is_dtensor(value):
            return flex_attention(query, key, value, **options)
        return compiled(query, key, value, training=training, **options)

    return compile_friendly_flex_attention
