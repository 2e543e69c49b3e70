"""Composite operators of torch that cannot run on DTensors: replaced by other operators, for DTensors only.

torch decomposes a composite operator in C++, before a tensor class sees it. Those that read the memory of an operand,
or make a sparse tensor, are replaced at the one dispatch key above autograd that only tensor classes have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise import modes
from shardwise.errors import MemoryBoundError, UnsupportedError
from shardwise.schema import load_rules
from shardwise.torch_private import DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard, OpOverload

__all__ = ["attention_by_products", "attention_with_dropout", "replace_composites"]

aten = torch.ops.aten
_KEY = "PythonTLSSnapshot"
GATHERED = 64 * 1024  # bytes below which a tensor is gathered instead
MOST_COPIES = 16  # of a dim that are joined
_library = torch.library.Library("aten", "IMPL")


def _below(op: OpOverload) -> Callable[..., Any]:
    """The operator as torch runs it, without the replacement of this file."""
    if op._can_decompose():
        return op.decompose
    here = DispatchKeySet(DispatchKey.PythonTLSSnapshot)

    def run_below(*args: Any, **kwargs: Any) -> Any:
        with ExcludeDispatchKeyGuard(here):  # pyright: ignore[reportAttributeAccessIssue]
            return op(*args, **kwargs)

    return run_below


def _tensor_split(self: Any, tensor_indices_or_sections: Any, dim: int = 0) -> Any:
    """torch reads the indices in memory; here their values are requested."""
    if tensor_indices_or_sections.dim():
        return aten.tensor_split.indices(self, tensor_indices_or_sections.tolist(), dim)
    return aten.tensor_split.sections(self, int(tensor_indices_or_sections), dim)


def _embedding_sparse_backward(
    grad: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    """A DTensor is dense, so a table with sparse gradients gets a dense one."""
    return aten.embedding_dense_backward.default(grad, indices, num_weights, padding_idx, scale_grad_by_freq)


def _ctc_loss_by_lengths(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    """torch reads lengths in memory; here their values are requested."""
    lengths = input_lengths.reshape(-1).tolist(), target_lengths.reshape(-1).tolist()
    return aten.ctc_loss.IntList(log_probs, targets, *lengths, blank, reduction, zero_infinity)


def _ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    """torch copies the targets of CUDA to the CPU, to decide whether a library computes the loss."""
    batched = log_probs.dim() == 3
    log_probs = log_probs if batched else log_probs.unsqueeze(1)
    targets = targets.to(log_probs.device, torch.int64)
    loss = aten._ctc_loss.default(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        loss = loss.masked_fill(loss == math.inf, 0.0)
    match reduction:
        case 1:  # mean
            lengths = torch.tensor(target_lengths, dtype=loss.dtype, device=loss.device)
            return (loss / lengths.clamp_min(1)).mean()
        case 2:
            return loss.sum()
        case _:
            return loss if batched else loss.squeeze(0)


def _pack_padded_sequence(sequences: Any, lengths: Any, batch_first: bool) -> Any:
    """Select rows by numbers that torch packs as a plain tensor: it reads lengths and sizes in memory."""
    lengths = lengths if lengths.__class__ is torch.Tensor else torch.tensor(lengths.tolist())
    steps = sequences.transpose(0, 1) if batch_first else sequences
    numbers = torch.arange(steps.shape[0] * steps.shape[1]).view(*steps.shape[:2], 1)
    rows, sizes = aten._pack_padded_sequence.default(numbers, lengths, False)
    return steps.flatten(0, 1).index_select(0, rows.flatten().to(sequences.device)), sizes


def _pad_packed_sequence(
    data: Any, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: int
) -> Any:
    """The inverse, in the same way. Row -1 is padding."""
    numbers = torch.arange(data.shape[0]).view(-1, 1)
    padded, lengths = aten._pad_packed_sequence.default(numbers, batch_sizes, batch_first, -1, total_length)
    rows = padded.squeeze(-1).to(data.device)
    steps = data.index_select(0, rows.flatten().clamp(min=0)).unflatten(0, rows.shape)
    return steps.masked_fill((rows < 0).view(*rows.shape, *(1,) * (data.dim() - 1)), padding_value), lengths


def _with_dropout(op: OpOverload) -> Callable[..., Any]:
    """A recurrent network with dropout between its layers, which torch's decomposition leaves out.

    Layer by layer, time before batch, as torch's kernels draw it.
    """
    run = _below(op)

    def compute(
        input: Any,  # noqa: A002  # torch's name
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if not dropout or not train or layers == 1:
            return run(input, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first)
        _refuse_cudnn(input)
        output = input.transpose(0, 1) if batch_first else input
        several, parts = isinstance(hx, list | tuple), len(params) // layers
        ends: list[Any] = []
        for layer in range(layers):
            own = [state.chunk(layers)[layer] for state in (hx if several else [hx])]
            given = output if layer == 0 else torch.dropout(output, dropout, True)
            own_params = params[layer * parts : (layer + 1) * parts]
            states = own if several else own[0]
            output, *left = run(given, states, own_params, has_biases, 1, 0.0, train, bidirectional, False)
            ends.append(left)
        output = output.transpose(0, 1) if batch_first else output
        return output, *[torch.cat([_states_of_layers(state) for state in kind]) for kind in zip(*ends, strict=True)]

    return compute


def _refuse_cudnn(batch: Any) -> None:
    if batch.device.type == "cuda" and torch.backends.cudnn.enabled:
        raise UnsupportedError(
            "dropout between the layers of a recurrent network on CUDA: cuDNN draws it with a state of each process",
            hint="set torch.backends.cudnn.enabled = False, or put nn.Dropout between networks of one layer",
        )


def _states_of_layers(state: Any) -> Any:
    """Before torch 2.13 the states of an LSTM without a fused kernel have an extra dim."""
    return state.squeeze(1) if state.dim() > 3 else state


def _with_states_as_input(op: OpOverload) -> Callable[..., Any]:
    """Lay out the first states of a recurrent network like its batch: torch writes to tensors made from them."""
    run = _with_dropout(op)

    def compute(input: Any, hx: Any, *options: Any) -> Any:  # noqa: A002  # torch's name
        time, batch = (1, 0) if options[-1] else (0, 1)
        placements = [placement for placement in input._spec.placements if placement.is_shard()]
        if placements and all(placement.dim == batch for placement in placements):
            kept = torch.ones_like(input.select(time, 0).narrow(-1, 0, 1), dtype=torch.bool)
            states = hx if isinstance(hx, list | tuple) else [hx]
            laid_out = [torch.where(kept, state, state) for state in states]
            hx = laid_out if isinstance(hx, list | tuple) else laid_out[0]
        output, *left = run(input, hx, *options)
        return output, *[_states_of_layers(state) for state in left]

    return compute


def _value_selecting_reduction_backward(grad: Any, dim: int, indices: Any, sizes: Any, keepdim: bool) -> Any:
    """torch makes plain zeros, of the global size on every rank; those of a DTensor may be sharded."""
    zeros = grad.new_zeros(sizes)
    if not keepdim and len(sizes):
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    return zeros.scatter(dim, indices, grad)


def _cummaxmin_backward(grad: Any, input: Any, indices: Any, dim: int) -> Any:  # noqa: A002  as torch has it
    """Zeros as above."""
    return grad if not input.numel() else input.new_zeros(input.shape).scatter_add(dim, indices, grad)


def _cumprod_backward(grad: Any, input: Any, dim: int, output: Any) -> Any:  # noqa: A002  as torch has it
    """torch reads a value and, if a factor is zero, computes step by step. Only a derivative of this needs that.

    Before the first zero a product is divided by the factor. At the first zero, products of the other factors count, up
    to the second zero. After it everything is zero.
    """
    if torch.is_grad_enabled() or not input.dim() or input.shape[dim] < 2:
        return _below(aten.cumprod_backward.default)(grad, input, dim, output)
    is_zero = input == 0
    zeros = is_zero.cumsum(dim)
    factors, first = input.conj(), is_zero & (zeros == 1)
    before = torch.where(zeros == 0, output.conj() * grad, 0)
    divided = before.flip(dim).cumsum(dim).flip(dim) / torch.where(is_zero, 1, factors)
    others = torch.where(first, 1, factors).cumprod(dim)
    at_first = torch.where(zeros == 1, others * grad, 0).sum(dim, keepdim=True)
    return torch.where(zeros == 0, divided, torch.where(first, at_first, 0)).to(grad.dtype)


def _convolution_double_backward(
    ggI: Any, ggW: Any, ggb: Any, gO: Any, weight: Any, self: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, output_mask: Any,
) -> Any:  # fmt: skip
    """torch makes a kernel of the gradient, which cannot be sharded in space; uses convolutions instead."""
    options = (stride, padding, dilation, transposed, output_padding, groups)
    parts = [] if ggI is None else [aten.convolution.default(ggI, weight, None, *options)]
    if ggW is not None:
        parts.append(aten.convolution.default(self, ggW, None, *options))
    if ggb is not None:
        parts.append(ggb.view(-1, *([1] * (gO.dim() - 2))).expand_as(gO))
    ggO = sum(parts[1:], parts[0]) if output_mask[0] and parts else None
    gI = gW = None
    if output_mask[1] and ggW is not None:
        gI = aten.convolution_backward.default(gO, self, ggW, None, *options, [True, False, False])[0]
    if output_mask[2] and ggI is not None:
        gW = aten.convolution_backward.default(gO, ggI, weight, None, *options, [False, True, False])[1]
    return ggO, gI, gW


def _pad_circular(self: Any, pad: Any) -> Any:
    """torch writes parts into a new tensor; here they are concatenated, so that ranks exchange rows."""
    aten._pad_circular.default(torch.empty(self.shape, device="meta"), pad)  # raises torch's own errors
    made = self
    for i in range(len(pad) // 2):
        dim, before, after = self.dim() - 1 - i, pad[2 * i], pad[2 * i + 1]
        rows = self.shape[dim] + min(before, 0) + min(after, 0)
        if max(before, after) > rows:
            raise UnsupportedError(
                f"circular padding by {list(pad)} of shape {list(self.shape)} wraps around more rows than it leaves",
                hint="crop it first: x.narrow(dim, start, length), then F.pad(..., mode='circular')",
            )
        kept = made.narrow(dim, max(-before, 0), rows)
        parts = [kept]
        if before > 0:
            parts.insert(0, kept.narrow(dim, rows - before, before))
        if after > 0:
            parts.append(kept.narrow(dim, 0, after))
        made = torch.cat(parts, dim)
    return made.contiguous() if any(n > 0 for n in pad) else made.clone(memory_format=torch.contiguous_format)


def _repeat(self: Any, repeats: Any) -> Any:
    """Concatenate copies of a sharded dim: torch's gradient would split the dim by copies."""
    new = len(repeats) - self.dim()
    joined = [
        dim
        for dim in range(self.dim())
        if new >= 0 and 1 < repeats[new + dim] <= MOST_COPIES and self._spec.dim_axes[dim]
    ]
    if self.numel() * self.element_size() <= GATHERED:
        joined = []
    for dim in range(self.dim()) if new >= 0 else ():
        if not repeats[new + dim]:
            self = self.narrow(dim, 0, 0)
    times = [1 if dim - new in joined else count for dim, count in enumerate(repeats)]
    made = _below(aten.repeat.default)(self, times)
    for dim in joined:
        made = torch.cat([made] * repeats[new + dim], new + dim)
    return made


def _one_hot(self: Any, num_classes: int = -1) -> Any:
    """By a write, which refuses classes out of range. For tensor classes torch compares, and gives rows of zeros."""
    if not self.numel():
        return _below(aten.one_hot.default)(self, num_classes)
    classes = int(self.max().item()) + 1 if num_classes == -1 else num_classes
    zeros = torch.zeros_like(self).unsqueeze(-1).expand(*self.shape, classes)  # in the layout of the indices
    return zeros.scatter(-1, self.unsqueeze(-1), 1)


def _trace_backward(grad: Any, sizes: Any) -> Any:
    """torch makes plain zeros, of the global size on every rank; those of a DTensor may be sharded."""
    return grad.new_ones(sizes).tril().triu() * grad


def _instance_norm(
    input: Any,  # noqa: A002  as torch has it
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """torch repeats the weights for each sample; for a sharded batch they get the batch's layout."""
    run = _below(aten.instance_norm.default)
    spec: Any = getattr(input, "_spec", None)  # a plain tensor has none
    if spec is None or input.dim() < 2 or not spec.dim_axes[0]:
        return run(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled)
    samples, channels = input.shape[:2]
    kept = input
    for _ in range(input.dim() - 2):
        kept = kept.select(2, 0)
    kept = torch.ones_like(kept, dtype=torch.bool)
    given = (weight, bias, running_mean, running_var)
    each: list[Any] = [None if t is None else torch.where(kept, t, t).flatten().clone() for t in given]
    joined = input.contiguous().view(1, samples * channels, *input.shape[2:])
    made = aten.batch_norm.default(joined, *each, use_input_stats, momentum, eps, cudnn_enabled)
    for running, new in ((running_mean, each[2]), (running_var, each[3])):
        if running is not None:
            with torch.no_grad():
                running.copy_(new.view(samples, channels).mean(0))
    return made.view(input.shape)


attention_with_dropout: list[Callable[..., Any]] = []  # tried first; NotImplemented: matrix products compute it


def _attention(*args: Any, **options: Any) -> Any:
    """The mathematical path of attention."""
    load_rules()  # it may be the first operator
    for attend in attention_with_dropout:
        found = attend(*args, **options)
        if found is not NotImplemented:
            return found
    return attention_by_products(*args, **options)


def attention_by_products(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
    """Attention from matrix products gathers keys and values along a sharded sequence: not beyond a bound."""
    _, max_bytes = modes.preferred_attention()
    if max_bytes is not None:
        held = sum(_bytes_of_gathered(x, -2) for x in (key, value))
        if held > max_bytes:
            raise MemoryBoundError(
                f"attention over a sharded sequence cannot be run within max_bytes={max_bytes:,}: without a "
                "batch, with the gradient of a mask or second derivatives of dropout, keys and values are gathered",
                hint=f"the smallest possible bound is {held:,} bytes; a ring holds two blocks",
                smallest=held,
            )
    return _below(aten._scaled_dot_product_attention_math.default)(query, key, value, *rest, **options)


def _bytes_of_gathered(x: Any, dim: int) -> int:
    """Bytes that a rank holds in addition when a dim is gathered; none of a plain tensor."""
    spec: Any = getattr(x, "_spec", None)
    if spec is None or not x.numel():
        return 0
    dim %= x.dim()
    own = spec.largest_local_shape
    return math.prod(own) // max(own[dim], 1) * (spec.shape[dim] - own[dim]) * x.dtype.itemsize


REPLACED: dict[OpOverload, Callable[..., Any]] = {
    aten._scaled_dot_product_attention_math.default: _attention,
    aten.tensor_split.tensor_indices_or_sections: _tensor_split,
    aten.ctc_loss.Tensor: _ctc_loss_by_lengths,
    aten.ctc_loss.IntList: _ctc_loss,
    aten._pack_padded_sequence.default: _pack_padded_sequence,
    aten._pad_packed_sequence.default: _pad_packed_sequence,
    aten._convolution_double_backward.default: _convolution_double_backward,
    aten._pad_circular.default: _pad_circular,
    aten.repeat.default: _repeat,
    aten.one_hot.default: _one_hot,
    aten.trace_backward.default: _trace_backward,
    aten.instance_norm.default: _instance_norm,
    aten.embedding_sparse_backward.default: _embedding_sparse_backward,
    **{
        op: _with_states_as_input(op)
        for op in (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
    },
    aten.value_selecting_reduction_backward.default: _value_selecting_reduction_backward,
    aten.cummaxmin_backward.default: _cummaxmin_backward,
    aten.cumprod_backward.default: _cumprod_backward,
}


def replace_composites(tensor_class: type[torch.Tensor]) -> None:
    """Compute the operators of `REPLACED` by others if a tensor of this class is among the arguments."""
    for op, compute in REPLACED.items():
        if op is aten.repeat.default and torch.__version__ < "2.13":  # it cannot call the operator that it replaces
            continue
        _library.impl(op.name().removeprefix("aten::"), _kernel(tensor_class, op, compute), _KEY)


def _kernel(tensor_class: type[torch.Tensor], op: OpOverload, compute: Callable[..., Any]) -> Callable[..., Any]:
    run_op = _below(op)

    def run_kernel(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, tensor_class) for arg in args):
            return compute(*args, **kwargs)
        return run_op(*args, **kwargs)

    return run_kernel
