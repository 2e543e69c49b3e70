"""Modes are entered and left in any order, on any thread, and hold where the program that entered them runs."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import shardwise as sw
from shardwise import modes
from shardwise.core.mode_stack import entries_in_force
from shardwise.debug.recording import recorder
from shardwise.errors import CommunicationError, ImplicitCommunicationError, PlainTensorError
from shardwise.fabric.dry import dry
from shardwise.fabric.traced_collectives import functional_collectives
from shardwise.tensor import DTensor


@pytest.fixture
def mesh() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (2,))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Each test leaves no entry behind, on any thread."""
    before = modes.in_force(), DTensor.__dict__["__torch_dispatch__"]
    yield
    assert entries_in_force() == []
    assert (modes.in_force(), DTensor.__dict__["__torch_dispatch__"]) == before
    assert sw.init_device_mesh("cpu", (2,)).fabric == "virtual"


def moving(mesh: sw.DeviceMesh) -> Callable[[], Any]:
    """A call that communicates although it was not asked to."""
    a = sw.ones(4, 4, device_mesh=mesh, placements=[sw.Shard(0)])
    b = sw.ones(4, 4, device_mesh=mesh, placements=[sw.Shard(1)])
    return lambda: a + b


def is_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (ImplicitCommunicationError, PlainTensorError):
        return True
    return False


def takes_plain(mesh: sw.DeviceMesh) -> bool:
    x = sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)])
    plain = torch.arange(4)
    return not is_refused(lambda: x + plain)


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


# ---------------------------------------------------------------- order


def test_the_innermost_of_strict_and_allow_implicit_decides(mesh: sw.DeviceMesh) -> None:
    move = moving(mesh)
    with sw.strict():
        assert is_refused(move)
        with sw.allow_implicit(torch.ops.aten.add):
            assert not is_refused(move)
            with sw.strict():
                assert is_refused(move)
                with sw.allow_implicit("aten.sort"):
                    assert is_refused(move)
            assert not is_refused(move)
        assert is_refused(move)
    assert not is_refused(move)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "strict": sw.strict,
    "allow_implicit": sw.allow_implicit,
    "implicit_replication": sw.implicit_replication,
    "plain_tensors": lambda: sw.plain_tensors("refuse"),
    "use_rng": lambda: sw.use_rng("indexed"),
    "dry_run": sw.dry_run,
    "virtual": sw.virtual,
    "explain": sw.explain,
    "comm_budget": lambda: sw.comm_budget(bytes=0),
    "CommDebugMode": sw.debug.CommDebugMode,
    "check_ranks": sw.debug.check_ranks,
}


@pytest.mark.parametrize("inner", CONTEXTS)
@pytest.mark.parametrize("outer", CONTEXTS)
def test_left_out_of_order_each_ends_its_own_entries(outer: str, inner: str) -> None:
    def state() -> list[Any]:
        return [(entry.mode, entry.value) for entry in entries_in_force()]

    first, second = CONTEXTS[outer](), CONTEXTS[inner]()
    first.__enter__()
    of_first = state()
    second.__enter__()
    of_second = state()[len(of_first) :]
    assert of_first
    assert of_second
    first.__exit__(None, None, None)
    assert state() == of_second
    second.__exit__(None, None, None)
    assert state() == []


def test_strict_left_before_what_it_allows(mesh: sw.DeviceMesh) -> None:
    move = moving(mesh)
    outer, allowed = sw.strict(), sw.allow_implicit()
    outer.__enter__()
    allowed.__enter__()
    outer.__exit__(None, None, None)
    with sw.strict():
        assert is_refused(move)
        allowed.__exit__(None, None, None)
        assert is_refused(move)


def test_use_rng_left_out_of_order() -> None:
    first, second = sw.use_rng("indexed"), sw.use_rng("one_device")
    first.__enter__()
    second.__enter__()
    assert not modes.draws_by_index()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert not modes.draws_by_index()


def test_the_fabric_of_meshes_left_out_of_order() -> None:
    outer, inner = sw.dry_run(), sw.virtual()
    run = outer.__enter__()
    inner.__enter__()
    assert sw.init_device_mesh("cpu", (2,)).fabric == "virtual"
    outer.__exit__(None, None, None)
    with sw.dry_run() as second:
        mesh = sw.init_device_mesh("cpu", (2,))
        sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)]).full_tensor()
        inner.__exit__(None, None, None)
        assert sw.init_device_mesh("cpu", (2,)).fabric == "dry"
    assert (run.bytes, second.bytes) == (0, 8)


# ---------------------------------------------------------------- generators


def test_generators_that_end_in_another_order(mesh: sw.DeviceMesh) -> None:
    move = moving(mesh)

    def inside(context: Any) -> Iterator[None]:
        with context:
            yield

    with sw.strict():
        allowing, again = inside(sw.allow_implicit()), inside(sw.allow_implicit("aten.sort"))
        next(allowing)
        next(again)
        assert not is_refused(move)
        allowing.close()
        assert is_refused(move)
        again.close()
        assert is_refused(move)


def test_a_generator_that_is_dropped_on_another_thread(mesh: sw.DeviceMesh) -> None:
    def inside() -> Iterator[None]:
        with sw.plain_tensors("refuse"):
            yield

    held = [inside()]
    next(held[0])
    assert not takes_plain(mesh)
    in_thread(held.clear)
    gc.collect()
    assert takes_plain(mesh)


# ---------------------------------------------------------------- exceptions, again, decorators


@pytest.mark.parametrize("name", CONTEXTS)
def test_an_exception_ends_it(name: str) -> None:
    with pytest.raises(ZeroDivisionError), CONTEXTS[name]():
        raise ZeroDivisionError
    assert entries_in_force() == []
    assert not recorder._listeners.values_anywhere()
    assert not dry.runs.values_anywhere()


@pytest.mark.parametrize("name", CONTEXTS)
def test_one_object_is_entered_again_and_twice(name: str) -> None:
    context = CONTEXTS[name]()
    for _ in range(2):
        with context:
            once = len(entries_in_force())
            with context:
                assert len(entries_in_force()) == 2 * once
            assert len(entries_in_force()) == once
        assert entries_in_force() == []
    with pytest.raises(RuntimeError, match="is left, but was not entered"):
        context.__exit__(None, None, None)


def test_one_counter_that_listens_twice_counts_once(mesh: sw.DeviceMesh) -> None:
    x = sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)])
    comm = sw.debug.CommDebugMode()
    with comm, comm:
        x.full_tensor()
    functional_collectives()
    assert comm.get_comm_counts() == {torch.ops.c10d_functional.all_gather_into_tensor: 1}


def test_functions_coroutines_and_generators_are_decorated(mesh: sw.DeviceMesh) -> None:
    move = moving(mesh)

    @sw.strict()
    def call() -> bool:
        return is_refused(move)

    @sw.strict()
    async def wait() -> bool:
        await asyncio.sleep(0)
        return is_refused(move)

    @sw.strict()
    def draw() -> Iterator[bool]:
        yield is_refused(move)
        yield is_refused(move)

    assert call()
    assert call()
    assert asyncio.run(wait())
    assert list(draw()) == [True, True]
    assert not is_refused(move)
    with pytest.raises(sw.UnsupportedError, match="cannot be decorated with a mode"):

        @sw.strict()
        async def stream() -> Any:
            yield 1


def test_a_recursive_function_is_decorated(mesh: sw.DeviceMesh) -> None:
    move = moving(mesh)

    @sw.strict()
    def nested(depth: int) -> list[bool]:
        return [*(nested(depth - 1) if depth else []), is_refused(move)]

    assert nested(2) == [True, True, True]
    assert not is_refused(move)


# ---------------------------------------------------------------- threads and tasks


def test_a_mode_of_one_thread_does_not_act_on_another(mesh: sw.DeviceMesh) -> None:
    move = moving(mesh)
    with sw.strict(), sw.implicit_replication(), sw.use_rng("indexed"), sw.dry_run() as run:
        assert not in_thread(lambda: is_refused(move))
        assert in_thread(modes.plain_policy) == "verify"
        assert not in_thread(modes.draws_by_index)
        assert in_thread(lambda: sw.init_device_mesh("cpu", (2,))).fabric == "virtual"

        def dry_elsewhere() -> int:
            with sw.dry_run() as other:
                there = sw.init_device_mesh("cpu", (2,))
                sw.ones(4, device_mesh=there, placements=[sw.Shard(0)]).full_tensor()
            return other.bytes

        assert in_thread(dry_elsewhere) == 8
    assert run.bytes == 0


def test_threads_that_leave_in_another_order(mesh: sw.DeviceMesh) -> None:
    move, entered, left = moving(mesh), threading.Event(), threading.Event()

    def allowing() -> bool:
        with sw.strict(), sw.allow_implicit():
            entered.set()
            assert left.wait(60)
            return is_refused(move)

    with ThreadPoolExecutor(1) as pool:
        with sw.strict():
            other = pool.submit(allowing)
            assert entered.wait(60)
            assert is_refused(move)
        left.set()
        assert not other.result()
        assert not pool.submit(is_refused, move).result()
    with sw.strict():
        assert is_refused(move)


def test_one_object_on_two_threads(mesh: sw.DeviceMesh) -> None:
    move, context = moving(mesh), sw.strict()
    entered, left = threading.Event(), threading.Event()

    def inside() -> bool:
        with context:
            entered.set()
            assert left.wait(60)
            return is_refused(move)

    with ThreadPoolExecutor(1) as pool:
        with context:
            other = pool.submit(inside)
            assert entered.wait(60)
        assert not is_refused(move)
        left.set()
        assert other.result()


def test_tasks_that_take_turns(mesh: sw.DeviceMesh) -> None:
    move, context = moving(mesh), sw.strict()

    async def within(contexts: list[Any]) -> list[bool]:
        with contextlib.ExitStack() as stack:
            for each in contexts:
                stack.enter_context(each)
                await asyncio.sleep(0)
            seen = []
            for _ in range(4):
                await asyncio.sleep(0)
                seen.append(is_refused(move))
            return seen

    async def together() -> list[list[bool]]:
        kinds = [[context], [context, sw.allow_implicit()], [], [sw.allow_implicit(), context]]
        return await asyncio.gather(*[within(each) for each in kinds])

    assert asyncio.run(together()) == [[True] * 4, [False] * 4, [False] * 4, [True] * 4]


def test_a_task_started_inside_a_mode_is_inside_it_until_it_is_left(mesh: sw.DeviceMesh) -> None:
    move = moving(mesh)

    async def look() -> tuple[bool, bool]:
        inside = is_refused(move)
        await asyncio.sleep(0.01)
        return inside, is_refused(move)

    async def start() -> tuple[bool, bool, bool]:
        with sw.strict():
            task = asyncio.create_task(look())
            there = await asyncio.to_thread(is_refused, move)
        return (there, *await task)

    assert asyncio.run(start()) == (True, True, False)


# ---------------------------------------------------------------- backward


class Nested(torch.autograd.Function):
    """Its backward runs another backward, `depth` deep: far enough down, torch takes another thread."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, call: Callable[[], Any], seen: list[Any]) -> torch.Tensor:
        ctx.inner = depth, call, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        depth, call, seen = ctx.inner
        if depth:
            run_backward(depth - 1, call, seen)
        else:
            seen += [threading.get_ident(), call()]
            with sw.allow_implicit():
                seen.append(call())
            seen.append(call())
        return gradient, None, None, None


def run_backward(depth: int, call: Callable[[], Any], seen: list[Any]) -> None:
    with torch.enable_grad():
        Nested.apply(torch.ones(1, requires_grad=True), depth, call, seen).sum().backward()  # pyright: ignore[reportAttributeAccessIssue]


def test_modes_hold_on_autograds_own_threads(mesh: sw.DeviceMesh) -> None:
    move, seen = moving(mesh), []
    run_backward(70, lambda: is_refused(move), seen)
    assert seen[1:] == [False, False, False]
    seen.clear()
    with sw.strict():
        run_backward(70, lambda: is_refused(move), seen)
    assert seen[0] != threading.get_ident(), "torch runs a backward this deep on another thread"
    assert seen[1:] == [True, False, True]


def test_strict_in_the_backward_of_two_threads_at_once(mesh: sw.DeviceMesh) -> None:
    move, together = moving(mesh), threading.Barrier(2)

    def backward(context: Any) -> list[Any]:
        seen: list[Any] = []

        def look() -> bool:
            together.wait(60)
            return is_refused(move)

        with context:
            run_backward(70, look, seen)
        return seen[1:]

    with ThreadPoolExecutor(2) as pool:
        strict, free = pool.submit(backward, sw.strict()), pool.submit(backward, contextlib.nullcontext())
        assert strict.result() == [True, False, True]
        assert free.result() == [False, False, False]


# ---------------------------------------------------------------- budgets, compilers


def test_a_budget_that_is_left_first_no_longer_counts(mesh: sw.DeviceMesh) -> None:
    x = sw.ones(4, device_mesh=mesh, placements=[sw.Shard(0)])
    first, second = sw.comm_budget(collectives=1), sw.comm_budget(collectives=1)
    first.__enter__()
    spent = second.__enter__()
    first.__exit__(None, None, None)
    x.full_tensor()
    with pytest.raises(CommunicationError):
        x.full_tensor()
    with pytest.raises(CommunicationError):
        second.__exit__(None, None, None)
    assert spent.spent_collectives == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_code_compiled_outside_of_a_mode_is_compiled_again_inside(mesh: sw.DeviceMesh, backend: str) -> None:
    a = sw.ones(4, 4, device_mesh=mesh, placements=[sw.Shard(0)])
    b = sw.ones(4, 4, device_mesh=mesh, placements=[sw.Shard(1)])
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    program = torch.compile(lambda x, y: (x + y) * 2, backend=counter)
    wanted = program(a, b).full_tensor()
    with sw.strict():
        with pytest.raises(ImplicitCommunicationError, match=r"strict: aten\.add"):
            program(a, b)
        for _ in range(2):
            assert program(a, a).spec is a.spec
        with sw.allow_implicit("aten.add"):
            assert torch.equal(program(a, b).full_tensor(), wanted)
    compiled = counter.frame_count
    assert torch.equal(program(a, b).full_tensor(), wanted)
    assert counter.frame_count == compiled  # what was compiled outside is still there
    with sw.strict():
        x = a.detach().requires_grad_()
        loss = program(x, a).sum()
    loss.full_tensor().backward()  # outside of the mode that it was compiled in
    assert torch.equal(x.grad.full_tensor(), torch.full((4, 4), 2.0))
    torch._dynamo.reset()


def test_a_mode_inside_compiled_code_holds(mesh: sw.DeviceMesh) -> None:
    a = sw.ones(4, 4, device_mesh=mesh, placements=[sw.Shard(0)])
    b = sw.ones(4, 4, device_mesh=mesh, placements=[sw.Shard(1)])

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with sw.strict():
            return a + b

    with pytest.raises(ImplicitCommunicationError, match=r"strict: aten\.add"):
        torch.compile(program, backend="eager")(a, b)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="entered outside of compiled code"):
        torch.compile(program, backend="eager", fullgraph=True)(a, b)
    torch._dynamo.reset()
