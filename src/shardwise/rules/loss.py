"""Losses: computed element by element, then summed or averaged over shards that may be uneven; classes may be sharded.

A mean is a sum of the ranks' means, each weighted by its share of the elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.core.layout import Run
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.rules.dims import aligned, names
from shardwise.rules.engine import FIRST, Dim, Factors
from shardwise.rules.registry import Call, rule
from shardwise.torch_private import assert_async

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)

NONE, MEAN, SUM = 0, 1, 2  # as torch numbers the reductions
Specs = Sequence[DTensorSpec]


# ---------------------------------------------------------------- losses of elements


def elementwise(call: Call) -> Factors | None:
    """Every dim is a factor; if the loss is reduced, no result has it, and the result is a Partial sum."""
    shape = call["self"].shape
    operands = call.operands[1:] if "grad_output" in call.arguments else call.operands
    if any(torch.broadcast_shapes(meta.shape, shape) != shape for meta in operands):
        return None
    own = names(len(shape))
    dims = tuple(aligned(meta.shape, own, shape) for meta in call.operands)
    result = aligned(call.results[0].shape, own, shape)
    linear = FIRST if "grad_output" in call.arguments else ()
    if call.op is aten.mse_loss_backward.default:  # also in the difference of the two
        linear = (*linear, (1, 2))
    return Factors(dims, (result,), linear=linear)


def share_of_mean(call: Call, inputs: Specs, outputs: Specs, coordinate: Coordinate) -> Mapping[str, Any]:
    """The local share of the elements of a mean."""
    own = inputs[1 if "grad_output" in call.arguments else 0]
    count, total = own.share(coordinate, range(own.ndim))
    if call["reduction"] == NONE or count == total:
        return {}
    if not count:  # the mean of an empty tensor is NaN, and some operators leave even its sum undefined
        return {"share": 0.0, "reduction": SUM}
    return {"share": count / total} if call["reduction"] == MEAN else {}


def forward_on_share(op: Any, *args: Any, share: float = 1.0, **kwargs: Any) -> Any:
    """A loss on a rank: its summand of the mean."""
    found = op(*args, **kwargs)
    if share == 1.0:
        return found
    loss, *rest = found if isinstance(found, tuple) else (found,)
    loss = loss * share if share else torch.zeros_like(loss)
    return (loss, *rest) if rest else loss


def backward_on_share(op: Any, grad: torch.Tensor, *args: Any, share: float = 1.0, **kwargs: Any) -> torch.Tensor:
    """The gradient of a loss on a rank. The operator divides by the local number of elements; `share` corrects it."""
    return op(grad if share == 1.0 else grad * share, *args, **kwargs)


def declare(factors: Any, forward: Sequence[Any], backward: Sequence[Any]) -> None:
    """Declare the rule of some losses and their gradients."""
    for op in forward:
        rule(op, localize=share_of_mean, local_op=partial(forward_on_share, op))(factors)
    for op in backward:
        rule(op, localize=share_of_mean, local_op=partial(backward_on_share, op))(factors)


declare(
    elementwise,
    forward=(
        aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.soft_margin_loss.default,
        aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
    ),
    backward=(
        aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
        aten.soft_margin_loss_backward.default, aten.binary_cross_entropy_backward.default,
    ),
)  # fmt: skip


# ---------------------------------------------------------------- losses of rows


def rowwise(call: Call) -> Factors | None:
    """Rows are independent; classes and their weights must not be sharded."""
    if len(call["self"].shape) != 2:
        return None
    rows = call["self"].shape[0]
    weight = call.get("weight")

    def dims(meta: Any) -> tuple[Dim, ...]:
        batched = len(meta.shape) and meta.shape[0] == rows and (weight is None or meta is not weight)
        return tuple("n" if d == 0 and batched else None for d in range(len(meta.shape)))

    operands = [dims(meta) for meta in call.operands]
    if weight is not None:  # its size may be that of the batch
        operands[-1] = (None,)
    results = tuple(dims(meta) for meta in call.results)
    return Factors(
        tuple(operands), results, summed=frozenset("n"), linear=FIRST if "grad_output" in call.arguments else ()
    )


declare(
    rowwise,
    forward=(aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default),
    backward=(aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default),
)


# ---------------------------------------------------------------- the likelihood of classes


def class_dim(scores: Any) -> int:
    """The dim of the classes."""
    return 1 if len(scores.shape) > 1 else 0


def class_factors(call: Call) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """The factors of the scores, with classes "c", and those of the targets."""
    ndim, at = len(call["self"].shape), class_dim(call["self"])
    scores = [*names(ndim)]
    scores[at] = "c"
    return tuple(scores), tuple(name for d, name in enumerate(scores) if d != at)


def classes_here(call: Call, inputs: Specs, outputs: Specs, coordinate: Coordinate) -> Mapping[str, Any]:
    """The classes of a rank, and the number of all classes."""
    at = class_dim(call["self"])
    scores = inputs[1 if "grad_output" in call.arguments else 0]
    return {"runs": scores.block(coordinate).runs[at], "classes": scores.shape[at]}


def positions(
    target: torch.Tensor, ignore_index: int, runs: Sequence[Run], classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The local position of each target's class, and whether it is on this rank and not ignored."""
    counts = target != ignore_index
    known = ((target >= 0) & (target < classes)) | ~counts
    assert_async(known.all(), f"a target is none of the {classes} classes and is not ignored")
    position, found, before = torch.zeros_like(target, dtype=torch.int64), torch.zeros_like(counts), 0
    for start, length in runs:
        here = (target >= start) & (target < start + length)
        position = torch.where(here, target - start + before, position)
        found, before = found | here, before + length
    return position, found & counts


_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "pick_class(Tensor self, Tensor target, Tensor? weight, int ignore_index) -> (Tensor losses, Tensor weights)"
)


def pick_class(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    runs: Sequence[Run] | None = None,
    classes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The negative weighted score of each target and its weight, zeros if its class is on another rank or ignored."""
    at = class_dim(scores)
    wide = torch.float32 if scores.dtype in HALVES else scores.dtype
    if scores.is_meta:
        return target.new_empty(target.shape, dtype=wide), target.new_empty(target.shape, dtype=wide)
    size = scores.shape[at]
    position, is_local = positions(target, ignore_index, runs or (Run(0, size),), size if classes is None else classes)
    if not size:
        zeros = torch.zeros(target.shape, dtype=wide, device=scores.device)
        return zeros, zeros.clone()
    picked = scores.gather(at, position.unsqueeze(at)).squeeze(at).to(wide)
    weights = torch.ones_like(picked) if weight is None else weight[position].to(wide)
    return torch.where(is_local, -picked * weights, 0), torch.where(is_local, weights, 0)


_library.impl("pick_class", pick_class, "CompositeExplicitAutograd")


@rule(torch.ops.shardwise.pick_class.default, localize=classes_here, local_op=pick_class)
def picking(call: Call) -> Factors:
    """Rows are independent; classes may be sharded, and one rank has the class of a target."""
    scores, target = class_factors(call)
    weight = () if call["weight"] is None else (("c",),)
    return Factors((scores, target, *weight), (target, target))


_library.define(
    "place_class(Tensor grad_output, Tensor self, Tensor target, Tensor? weight, int ignore_index) -> Tensor"
)


def place_class(
    grad: torch.Tensor,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    runs: Sequence[Run] | None = None,
    classes: int | None = None,
) -> torch.Tensor:
    """The gradient of `pick_class` for the local scores: zero except at each target's class."""
    at = class_dim(scores)
    found = torch.zeros_like(scores, memory_format=torch.contiguous_format)
    size = scores.shape[at]
    if scores.is_meta or not size:
        return found
    position, is_local = positions(target, ignore_index, runs or (Run(0, size),), size if classes is None else classes)
    value = -grad if weight is None else -grad * weight[position]
    return found.scatter_(at, position.unsqueeze(at), torch.where(is_local, value, 0).to(scores.dtype).unsqueeze(at))


_library.impl("place_class", place_class, "CompositeExplicitAutograd")


@rule(torch.ops.shardwise.place_class.default, localize=classes_here, local_op=place_class)
def placing(call: Call) -> Factors:
    """Every rank fills in its local classes."""
    scores, target = class_factors(call)
    weight = () if call["weight"] is None else (("c",),)
    grad = target if call["grad_output"].shape == call["target"].shape else ()
    return Factors((grad, scores, target, *weight), (scores,), linear=FIRST)


# ---------------------------------------------------------------- connectionist temporal classification


def ctc_dims(call: Call) -> dict[str, tuple[Dim, ...]] | None:
    """The factors of the operands of a loss over a batch; None for targets that are joined into one dim."""
    if len(call["targets"].shape) != 2:
        return None
    return {
        "grad": ("b",), "log_probs": (None, "b", None), "targets": ("b", None), "neg_log_likelihood": ("b",),
        "log_alpha": ("b", None, None),
    }  # fmt: skip


def lengths_here(call: Call, inputs: Specs, outputs: Specs, coordinate: Coordinate) -> Mapping[str, Any]:
    """The lengths of a rank's samples, and the width of `log_alpha` on one device, by the longest target."""
    batch = inputs[list(call.tensors).index("log_probs")]
    samples = [i for run in batch.runs(1, coordinate) for i in range(run.start, run.start + run.length)]
    own = {name: [call[name][i] for i in samples] for name in ("input_lengths", "target_lengths")}
    return {**own, "width": _alpha_width(call["target_lengths"])}


def _alpha_width(target_lengths: Sequence[int]) -> int:
    return 2 * max(target_lengths, default=0) + 1


def local_ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, *rest: Any, width: int
) -> Any:
    """The loss of a rank's samples; `log_alpha` is padded to its width on one device."""
    loss, alpha = aten._ctc_loss.default(log_probs, targets, input_lengths, target_lengths, *rest)
    return loss, torch.nn.functional.pad(alpha, (0, width - alpha.shape[-1]), value=-torch.inf)


def local_ctc_loss_backward(
    grad: torch.Tensor, log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any,
    loss: torch.Tensor, alpha: torch.Tensor, *rest: Any, width: int,
) -> torch.Tensor:  # fmt: skip
    """The gradient of a rank's samples. The kernel needs `log_alpha` cut to the longest local target."""
    alpha = alpha.narrow(-1, 0, _alpha_width(target_lengths)).contiguous()
    return aten._ctc_loss_backward.default(grad, log_probs, targets, input_lengths, target_lengths, loss, alpha, *rest)


def ctc_loss_on_meta(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, *rest: Any
) -> Any:
    """The shapes of the results; torch has no meta kernel."""
    steps, samples, _ = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, _alpha_width(target_lengths))


def ctc_loss_backward_on_meta(grad: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The shape of the gradient; torch has no meta kernel."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


@rule(aten._ctc_loss.default, localize=lengths_here, local_op=local_ctc_loss, meta_op=ctc_loss_on_meta)
def ctc_loss(call: Call) -> Factors | None:
    """Samples are independent. Kernels are not called without samples."""
    dims = ctc_dims(call)
    if dims is None:
        return None
    results = dims["neg_log_likelihood"], dims["log_alpha"]
    return Factors(tuple(dims[name] for name in call.tensors), results, nonempty=frozenset("b"))


@rule(
    aten._ctc_loss_backward.default, localize=lengths_here, local_op=local_ctc_loss_backward,
    meta_op=ctc_loss_backward_on_meta,
)  # fmt: skip
def ctc_loss_backward(call: Call) -> Factors | None:
    """The gradient of each sample's scores, linear in that of its loss."""
    dims = ctc_dims(call)
    if dims is None:
        return None
    return Factors(
        tuple(dims[name] for name in call.tensors), (dims["log_probs"],), linear=FIRST, nonempty=frozenset("b")
    )
