"""The shapes that are known without running an operator are those that it gives."""

from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.core.spec import TensorMeta
from shardwise.rules.shapes import SHAPES, broadcast_shape

NAMES = (
    "softmax", "log_softmax", "sum", "mean", "amax", "amin", "mm", "addmm", "bmm", "matmul", "cat", "view", "reshape",
    "add", "mul", "where", "nn.functional.linear", "flatten", "unflatten", "logsumexp", "linalg.vector_norm",
)  # fmt: skip


class Compare(TorchDispatchMode):
    """Looks at every operator that runs, and at its results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not all(TensorMeta.of(t).is_contiguous for t in given):
            return result
        if func in SHAPES:
            schema = func._schema.arguments
            named = {a.name: a.default_value for a in schema if a.has_default_value()}
            named |= dict(zip((a.name for a in schema), args, strict=False)) | (kwargs or {})
            shape = SHAPES[func](tree_map_only(torch.Tensor, TensorMeta.of, named))
        elif torch.Tag.pointwise in func.tags and len(func._schema.returns) == 1 and not func._schema.is_mutable:
            shape = broadcast_shape([t.shape for t in given])
        else:
            return result
        if shape is not None:
            assert tuple(shape) == tuple(result.shape), f"{func}: {shape} is not {result.shape}"
            assert TensorMeta.of(result).is_contiguous, f"{func}: {result.stride()}"
            self.seen[func] = self.seen.get(func, 0) + 1
        return result


@pytest.mark.filterwarnings("ignore")
def test_shapes_are_those_of_the_operators() -> None:
    compare = Compare()
    for info in op_db:
        if info.name in NAMES:
            for sample in info.sample_inputs("cpu", torch.float32, requires_grad=False):
                with compare:
                    info(sample.input, *sample.args, **sample.kwargs)
    missing = [str(op) for op in SHAPES if op not in compare.seen]
    assert missing in ([], ["aten._unsafe_view.default"], ["aten.mean.default"]), missing


def test_what_is_wrong_is_left_to_torch() -> None:
    meta = TensorMeta((4, 6))
    aten = torch.ops.aten
    assert SHAPES[aten.mm.default]({"self": meta, "mat2": meta}) is None
    assert SHAPES[aten.view.default]({"self": meta, "size": [-1, 5]}) is None
    assert SHAPES[aten.view.default]({"self": meta, "size": [-1, -1]}) is None
    assert SHAPES[aten._softmax.default]({"self": meta, "dim": 2}) is None
    assert SHAPES[aten.sum.dim_IntList]({"self": meta, "dim": [3]}) is None
    assert SHAPES[aten.cat.default]({"tensors": [meta, TensorMeta((4, 5))], "dim": 0}) is None
    assert broadcast_shape([(4, 6), (5,)]) is None
