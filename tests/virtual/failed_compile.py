"""Programs that run after a compilation has failed: `python -m tests.virtual.failed_compile` prints what changed.

In a process of its own, because torch itself does not undo everything: its frame evaluator stays installed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise import modes
from shardwise.core.mode_stack import entries_in_force
from shardwise.core.tracing import is_tracing
from shardwise.fabric.routes import forget_routes
from shardwise.fabric.virtual import VirtualFabric
from shardwise.rules.registry import DECOMPOSITIONS, RULES
from shardwise.tensor import DTensor, forget_operators

aten = torch.ops.aten


class Failure(Exception):
    """Raised on purpose."""


def fail_if_traced() -> None:
    """Fail, but only while a graph is made."""
    if is_tracing() or torch.compiler.is_compiling():
        raise Failure


# ---------------------------------------------------------------- where compilation fails


def _loss(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x * 2, 0).cumsum(0).sum()


def _bad_backend(graph: Any, inputs: Any) -> Any:
    raise Failure


def _bad_backward(graph: Any, inputs: Any) -> Any:
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda g, _: g.forward, bw_compiler=_bad_backend)(graph, inputs)


def _failing(function: Callable[..., Any], error: BaseException | None = None) -> Callable[..., Any]:
    """`function`, which fails when it has run, while a graph is made."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if is_tracing():
            raise error or Failure
        return result

    return run


def _forget() -> None:
    forget_routes()
    forget_operators()


@contextlib.contextmanager
def _bad_decomposition(op: Any) -> Iterator[None]:
    try:
        with mock.patch.dict(DECOMPOSITIONS, {op: _failing(DECOMPOSITIONS[op])}):
            _forget()
            yield
    finally:
        _forget()


@contextlib.contextmanager
def _bad_rule(op: Any, error: BaseException | None = None) -> Iterator[None]:
    bad = replace(RULES[op], factors=_failing(RULES[op].factors, error))
    try:
        with mock.patch.dict(RULES, {op: bad}):
            _forget()
            yield
    finally:
        _forget()


@contextlib.contextmanager
def _bad_step() -> Iterator[None]:
    bind = VirtualFabric.bind
    try:
        with mock.patch.object(VirtualFabric, "bind", lambda self, step: _failing(bind(self, step))):
            _forget()
            yield
    finally:
        _forget()


def stages(x: DTensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each way to fail, with its name."""
    leaf = x.detach().clone().requires_grad_()

    def compiled(function: Callable[..., Any], given: torch.Tensor = x, **options: Any) -> Any:
        return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True, **options})(given)

    def within(context: Any, run: Callable[[], Any]) -> Any:
        with context:
            return run()

    def raises(x: torch.Tensor) -> torch.Tensor:
        y = F.softmax(x * 2, 0)
        fail_if_traced()
        return y

    def branches(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    yield "an exception in forward", lambda: compiled(raises)
    yield "an exception in forward, symbolic sizes", lambda: compiled(raises, dynamic=True)
    yield "a graph break under fullgraph", lambda: compiled(branches)
    yield "a backend", lambda: compiled(_loss, backend=_bad_backend)
    yield "the backend of backward", lambda: compiled(_loss, leaf, backend=_bad_backward).backward()
    yield "a decomposition", lambda: within(_bad_decomposition(aten.aminmax.default), lambda: compiled(torch.aminmax))
    yield "a rule", lambda: within(_bad_rule(aten.mul.Tensor), lambda: compiled(_loss))
    backward = _bad_rule(aten.sigmoid_backward.default)
    yield "a rule in backward", lambda: within(backward, lambda: compiled(lambda x: x.sigmoid().sum(), leaf).backward())
    yield "a step of the fabric", lambda: within(_bad_step(), lambda: compiled(_loss))
    interrupt = _bad_rule(aten.cumsum.default, KeyboardInterrupt())
    yield "an interrupt", lambda: within(interrupt, lambda: compiled(_loss))
    yield "make_fx", lambda: sw.debug.make_fx(raises)(x)
    yield "strict mode", lambda: within(sw.strict(), lambda: compiled(lambda x: x.sum(0) * x))


# ---------------------------------------------------------------- what runs afterwards


def _written_through_a_view(x: DTensor) -> torch.Tensor:
    base = x.clone()
    base[1:3, 1].mul_(2)
    return base


def _random_numbers(x: DTensor) -> torch.Tensor:
    torch.manual_seed(0)
    with sw.use_rng("indexed"):
        by_index = torch.rand_like(x)
    return F.dropout(x, 0.5) + torch.randn_like(x) + by_index


def _gradient(x: DTensor) -> torch.Tensor | None:
    leaf = x.detach().clone().requires_grad_()
    _loss(leaf.redistribute(placements=[sw.Shard(1)])).backward()
    return leaf.grad


def _trained_plan(x: DTensor) -> torch.Tensor:
    torch.manual_seed(1)
    plan = {"0": sw.parallel.ColwiseParallel(), "2": sw.parallel.RowwiseParallel()}
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model = sw.parallel.parallelize_module(model, x.device_mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x.full_tensor()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.full_tensor().flatten() for p in model.parameters()])  # pyright: ignore[reportAttributeAccessIssue]


def _strict(x: DTensor) -> torch.Tensor:
    with sw.strict():
        return x.sum(0) * x


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "a list as index": lambda x: x[[1, 0, 2]],
    "a mask": lambda x: x[x > 3],
    "softmax along the sharded dim": lambda x: F.softmax(x, 0),
    "cumsum along the sharded dim": lambda x: x.cumsum(0),
    "a matrix product": lambda x: x @ x.T,
    "a norm": torch.linalg.vector_norm,
    "conjugates": lambda x: torch.view_as_real((x * 1j).conj().resolve_conj()),
    "an operator of torch's in Python": lambda x: torch.cov(x),
    "a write through a view": _written_through_a_view,
    "random numbers": _random_numbers,
    "a gradient": _gradient,
    "a plan that is trained": _trained_plan,
    "a plain tensor": lambda x: x + torch.arange(6.0)[:, None],
    "strict mode": _strict,
}


def results(x: DTensor) -> dict[str, Any]:
    """What each program gives, or the error it raises."""
    found: dict[str, Any] = {}
    for name, program in PROGRAMS.items():
        try:
            result = program(x)
            found[name] = result.full_tensor() if isinstance(result, DTensor) else result
        except sw.ShardwiseError as error:
            found[name] = type(error).__name__
    return found


def surroundings() -> dict[str, Any]:
    """The state of torch and of the library that a failure could leave changed."""
    native: Any = torch._C
    return {
        "dispatch modes": native._len_torch_dispatch_stack(),
        "function modes": native._len_torch_function_stack(),
        "included keys": str(native._dispatch_tls_local_include_set()),
        "excluded keys": str(native._dispatch_tls_local_exclude_set()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "transforms": native._are_functorch_transforms_active(),
        "tracing": is_tracing(),
        "modes": (modes.in_force(), [entry.mode for entry in entries_in_force()]),
        "decomposing": modes.is_nested(),
        "dispatch": DTensor.__dict__["__torch_dispatch__"],
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of values that differ."""
    return [name for name, value in before.items() if not _same(value, after[name])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and a == b


def run() -> dict[str, Any]:
    """Fail at each stage; whether it did, and what has changed since the start."""
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = sw.distribute_tensor(torch.arange(24.0).reshape(6, 4) / 3, mesh, [sw.Shard(0)])
    torch._dynamo.reset()
    surrounded, first = surroundings(), results(x)
    found: dict[str, Any] = {}
    for name, fail in stages(x):
        here = surroundings()
        failed = ""
        torch._dynamo.reset()
        try:
            fail()
        except BaseException as error:
            failed = type(error).__name__
        found[name] = {"failed": failed, "changed": differences(here, surroundings())}
        found[name]["changed"] += differences(first, results(x))
    torch._dynamo.reset()
    found["the end"] = {"failed": "-", "changed": differences(surrounded, surroundings())}
    compiled = torch.compile(_loss, backend="aot_eager", fullgraph=True)(x)
    if not torch.equal(compiled.full_tensor(), _loss(x).full_tensor()):
        found["the end"]["changed"].append("compiled")
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for stage, said in run().items():
        print(f"{stage}: {said['failed'] or 'did not fail'}; changed: {said['changed'] or 'nothing'}")
