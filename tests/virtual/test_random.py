"""Random operators give the numbers of one device, bit for bit, on every mesh; and leave its generator's state."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.core.layout import Cut
from shardwise.debug import CommDebugMode
from shardwise.rng import cpu_stream as stream
from shardwise.rng import indexed_generator as indexed
from shardwise.rng.block_geometry import count_below, extents_of, index_of, indices_between
from shardwise.rng.mt19937_jump import Origin, jumps_exactly
from shardwise.rng.random_fill import FROM, Draw
from tests.blocks import block_of

MESHES = ((2,), (4,), (3,), (2, 2), (2, 3))
SHAPES = ((8, 12), (5, 7), (3, 1, 50), (1,), (0, 4), (24,), ())
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
S0, S1, R = sw.Shard(0), sw.Shard(1), sw.Replicate()
SEED = 1234
CPU = torch.device("cpu")


def layouts(mesh: sw.DeviceMesh, ndim: int) -> Iterator[dict[str, Any]]:
    """Replicated, every dim sharded, on every axis; both orders of two axes on one dim; strided."""
    one = [R, *(sw.Shard(dim) for dim in range(ndim))]
    for placements in itertools.product(one, repeat=mesh.ndim):
        yield {"placements": placements}
    if mesh.ndim == 2 and ndim:
        yield {"placements": [S0, S0], "shard_order": (sw.ShardOrderEntry(0, (1, 0)),)}
    if ndim:
        yield {"placements": [sw.StridedShard(0, 2), *[R] * (mesh.ndim - 1)]}
        yield {"placements": [sw.Zigzag(0), *[R] * (mesh.ndim - 1)]}


def same_as_one_device(
    fn: Callable[[torch.Tensor], Any], x: torch.Tensor, mesh: sw.DeviceMesh, layout: dict[str, Any]
) -> None:
    """`fn` three times in a row with other operators in between: the same numbers, and the same state at the end."""

    def run(given: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(SEED)
        results = []
        for _ in range(3):
            result = fn(given.clone())
            results += [t.full_tensor() if isinstance(t, sw.DTensor) else t for t in _flat(result)]
            _ = given * 2
            results.append(torch.rand(3))
        return [*results, torch.get_rng_state()]

    expected = run(x)
    given = run(sw.distribute_tensor(x, mesh, **layout))
    for want, have in zip(expected, given, strict=True):
        assert want.dtype == have.dtype
        torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{layout}: {m}")


def _flat(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


FILLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform_": lambda x: x.uniform_(-1, 3),
    "normal_": lambda x: x.normal_(1, 2),
    "exponential_": lambda x: x.exponential_(1.5),
    "log_normal_": lambda x: x.log_normal_(0.5, 0.25),
    "cauchy_": lambda x: x.cauchy_(1, 2),
    "geometric_": lambda x: x.geometric_(0.3),
    "random_": lambda x: x.random_(),
    "random_ to": lambda x: x.random_(100),
    "random_ from to": lambda x: x.random_(-5, 100),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.4),
}


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", FILLS)
def test_fills(name: str, shape: tuple[int, ...]) -> None:
    mesh = sw.init_device_mesh("cpu", shape)
    for size in SHAPES:
        for layout in layouts(mesh, len(size)):
            same_as_one_device(FILLS[name], torch.zeros(size), mesh, layout)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FILLS)
def test_fills_of_every_float(name: str, dtype: torch.dtype) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 3))
    for layout in layouts(mesh, 2):
        same_as_one_device(FILLS[name], torch.zeros(7, 9, dtype=dtype), mesh, layout)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_fills_of_integers(dtype: torch.dtype) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    for layout in layouts(mesh, 2):
        for name in ("random_", "bernoulli_"):
            same_as_one_device(FILLS[name], torch.zeros(7, 9, dtype=dtype), mesh, layout)
        if dtype is not torch.bool:
            same_as_one_device(lambda x: x.random_(3, 90), torch.zeros(7, 9, dtype=dtype), mesh, layout)
    if dtype is torch.int64:
        same_as_one_device(
            lambda x: x.random_(0, 2**40), torch.zeros(7, 9, dtype=dtype), mesh, {"placements": [S1, S0]}
        )


@pytest.mark.parametrize("name", ["uniform_", "normal_", "randn_like", "rand_like"])
def test_complex_numbers(name: str) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    for layout in layouts(mesh, 2):
        same_as_one_device(FILLS[name], torch.zeros(7, 9, dtype=torch.complex64), mesh, layout)


@pytest.mark.parametrize("name", FILLS)
def test_tensors_that_lie_otherwise_in_memory_are_drawn_in_the_order_of_memory(name: str) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    fill = FILLS[name]
    for layout in layouts(mesh, 2):
        same_as_one_device(lambda x: (fill(x.t()), x), torch.zeros(5, 30), mesh, layout)
    channels_last = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for placements in ([S0, S1], [S1, R], [sw.Shard(3), sw.Shard(2)]):
        same_as_one_device(fill, channels_last, mesh, {"placements": placements})


def test_longer_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the stream that begin and end anywhere in the rows; the last ones of every length."""
    monkeypatch.setattr(stream, "BLOCK", 64)
    mesh = sw.init_device_mesh("cpu", (2, 3))
    for n in (63, 64, 65, 79, 80, 81, 127, 128, 200):
        for name in ("normal_", "uniform_", "bernoulli_", "log_normal_", "exponential_", "cauchy_", "geometric_"):
            for placements in ([S0, R], [R, S0], [S0, S0]):
                same_as_one_device(FILLS[name], torch.zeros(n), mesh, {"placements": placements})
                same_as_one_device(FILLS[name], torch.zeros(7, n), mesh, {"placements": [*placements[:1], S1]})


VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli_ tensor": lambda x: torch.empty_like(x).bernoulli_(x),
    "normal, normal": lambda x: torch.normal(x, x + 1),
    "normal, std": lambda x: torch.normal(2.0, x),
    "normal, mean": lambda x: torch.normal(x, 2.0),
    "normal, broadcast": lambda x: torch.normal(x, x[:1] + 1),
    "multinomial 1": lambda x: torch.multinomial(x, 1),
    "multinomial": lambda x: torch.multinomial(x, 4),
    "multinomial with replacement": lambda x: torch.multinomial(x, 4, replacement=True),
    "poisson": lambda x: torch.poisson(4 * x),
    "binomial": lambda x: torch.binomial(torch.round(10 * x), x),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout all": lambda x: F.dropout(x, 1.0),
    "dropout in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x[:, :, None].expand(-1, -1, 3), 0.4),
    "dropout2d": lambda x: F.dropout2d(x[:, :, None, None].expand(-1, -1, 3, 2), 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True),
    "native_dropout, not training": lambda x: torch.native_dropout(x, 0.4, False),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=0),
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x, hard=True, dim=1),
    "generator": lambda x: x.normal_(generator=torch.Generator().manual_seed(5)),
}
SUMS = {"gumbel_softmax", "gumbel_softmax hard"}  # sums over shards come in another order


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.filterwarnings("ignore:.*no rule")
def test_operators_that_look_at_values(name: str, shape: tuple[int, ...]) -> None:
    mesh = sw.init_device_mesh("cpu", shape)
    compare: Any = same_up_to_rounding if name in SUMS else same_as_one_device
    for size in ((8, 12), (5, 7)):
        x = torch.rand(size)
        for layout in layouts(mesh, 2):
            compare(VALUES[name], x, mesh, layout)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.filterwarnings("ignore:.*no rule")
def test_values_that_lie_otherwise_in_memory(name: str) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    compare: Any = same_up_to_rounding if name in SUMS else same_as_one_device
    x = torch.rand(5, 30)
    for placements in ([R, R], [S0, R], [R, S1], [S0, S1]):
        compare(lambda x: VALUES[name](x.t()), x, mesh, {"placements": placements})


def same_up_to_rounding(fn: Any, x: torch.Tensor, mesh: sw.DeviceMesh, layout: dict[str, Any]) -> None:
    torch.manual_seed(SEED)
    want = fn(x)
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    have = fn(sw.distribute_tensor(x, mesh, **layout))
    torch.testing.assert_close(have.full_tensor(), want)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["dropout", "native_dropout", "bernoulli", "bernoulli_ tensor", "normal, normal"])
def test_values_of_every_float(name: str, dtype: torch.dtype) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    for layout in layouts(mesh, 2):
        same_as_one_device(VALUES[name], torch.rand(7, 9).to(dtype), mesh, layout)


INITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform_": torch.nn.init.uniform_,
    "normal_": torch.nn.init.normal_,
    "trunc_normal_": torch.nn.init.trunc_normal_,
    "xavier_uniform_": torch.nn.init.xavier_uniform_,
    "xavier_normal_": torch.nn.init.xavier_normal_,
    "kaiming_uniform_": torch.nn.init.kaiming_uniform_,
    "kaiming_normal_": torch.nn.init.kaiming_normal_,
    "orthogonal_": torch.nn.init.orthogonal_,
    "sparse_": lambda w: torch.nn.init.sparse_(w, 0.3),
}


@pytest.mark.parametrize("name", INITS)
@pytest.mark.filterwarnings("ignore:.*no rule")
def test_initialisation_of_parameters(name: str) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))

    def init(x: torch.Tensor) -> torch.Tensor:
        parameter = torch.nn.Parameter(x)
        INITS[name](parameter)
        return parameter.detach()

    for placements in ([S0, R], [S1, S0], [R, R], [S0, S0]):
        same_as_one_device(init, torch.zeros(6, 5), mesh, {"placements": placements})


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_factories(shape: tuple[int, ...]) -> None:
    mesh = sw.init_device_mesh("cpu", shape)
    made: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "rand": (lambda **k: sw.rand(5, 7, **k), lambda **k: torch.rand(5, 7, **k)),
        "rand, double": (
            lambda **k: sw.rand((5, 7), dtype=torch.float64, **k),
            lambda **k: torch.rand(5, 7, dtype=torch.float64, **k),
        ),
        "randn": (lambda **k: sw.randn(5, 7, **k), lambda **k: torch.randn(5, 7, **k)),
        "randn, complex": (
            lambda **k: sw.randn(5, 7, dtype=torch.complex64, **k),
            lambda **k: torch.randn(5, 7, dtype=torch.complex64, **k),
        ),
        "randint": (lambda **k: sw.randint(9, (5, 7), **k), lambda **k: torch.randint(9, (5, 7), **k)),
        "randint, low": (lambda **k: sw.randint(-3, 9, (5, 7), **k), lambda **k: torch.randint(-3, 9, (5, 7), **k)),
    }
    for ours, theirs in made.values():
        for layout in layouts(mesh, 2):
            torch.manual_seed(SEED)
            have = [ours(device_mesh=mesh, **layout).full_tensor() for _ in range(2)]
            have.append(ours(generator=torch.Generator().manual_seed(5), device_mesh=mesh, **layout).full_tensor())
            torch.manual_seed(SEED)
            want = [theirs() for _ in range(2)] + [theirs(generator=torch.Generator().manual_seed(5))]
            for a, b in zip(have, want, strict=True):
                assert torch.equal(a, b)
                assert a.dtype == b.dtype
    for layout in layouts(mesh, 1):
        torch.manual_seed(SEED)
        have = sw.randperm(11, device_mesh=mesh, **layout).full_tensor()
        torch.manual_seed(SEED)
        assert torch.equal(have, torch.randperm(11))


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "product"])
def test_what_is_drawn_into_a_partial_tensor_adds_up_to_the_numbers_of_one_device(reduce_op: str) -> None:
    for shape, placements in (((4,), [sw.Partial(reduce_op)]), ((2, 2), [sw.Partial(reduce_op), sw.Shard(0)])):
        mesh = sw.init_device_mesh("cpu", shape)
        for draw in (torch.Tensor.uniform_, torch.Tensor.cauchy_, lambda x: x.bernoulli_(0.5)):
            partial = sw.ones(5, 3, device_mesh=mesh, placements=placements)
            torch.manual_seed(SEED)
            draw(partial)
            state = torch.get_rng_state()
            torch.manual_seed(SEED)
            assert torch.equal(partial.full_tensor(), draw(torch.ones(5, 3)))
            assert partial.placements == tuple(placements)
            assert torch.equal(torch.get_rng_state(), state)


def test_partial_factories_are_refused() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    state = torch.get_rng_state()
    for draw in (
        lambda: sw.rand(4, device_mesh=mesh, placements=[sw.Partial()]),
        lambda: sw.randint(4, (3,), device_mesh=mesh, placements=[sw.Partial()]),
    ):
        with pytest.raises(sw.LayoutError, match="has another distribution"):
            draw()
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_of_a_sum_stays_a_sum() -> None:
    """The mask is drawn for the value; the ranks apply it to their summands, and nothing moves."""
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.randn(6, 5), mesh, [sw.Partial()])
    with CommDebugMode() as moved:
        torch.manual_seed(SEED)
        y, mask = torch.native_dropout(x, 0.5, True)
    assert moved.get_total_counts() == 0
    assert y.placements == (sw.Partial(),)
    assert mask.placements == (R,)
    torch.manual_seed(SEED)
    torch.testing.assert_close(y.full_tensor(), torch.native_dropout(x.full_tensor(), 0.5, True)[0])


@pytest.mark.parametrize("name", [*FILLS, "dropout", "native_dropout", "bernoulli", "alpha_dropout"])
def test_drawing_moves_nothing(name: str) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    x = sw.distribute_tensor(torch.rand(6, 5), mesh, [S0, S1])
    with CommDebugMode() as moved, sw.strict():
        {**FILLS, **VALUES}[name](x)
    assert moved.get_total_counts() == 0


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11
def test_drawing_needs_the_memory_of_the_own_part() -> None:
    """A tensor of 256 MiB, of which the block is one in 4096: no more is allocated than some blocks of the stream."""
    shape = (4096, 16384)
    block = block_of(shape, [(Cut(4096, 17),), ()])
    wanted = Draw(torch.ops.aten.uniform_.default, (0.0, 1.0), shape, torch.float32, torch.device("cpu"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        (part,) = stream.draw(wanted, [block], torch.Generator().manual_seed(0))
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert part.shape == (1, 16384)
    assert allocated < 8 * 2**20


# ---------------------------------------------------------------- one process's part of a long stream

aten = torch.ops.aten
OPS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "uniform": (aten.uniform_.default, (-1.0, 3.0)),
    "normal": (aten.normal_.default, (1.0, 2.0)),
    "log_normal": (aten.log_normal_.default, (0.5, 0.25)),
    "exponential": (aten.exponential_.default, (1.5,)),
    "cauchy": (aten.cauchy_.default, (1.0, 2.0)),
    "geometric": (aten.geometric_.default, (0.3,)),
    "bernoulli": (aten.bernoulli_.float, (0.3,)),
    "random": (aten.random_.default, ()),
    "random to": (aten.random_.to, (100,)),
    "random from to": (FROM, (-5, 100)),
}
INTEGERS = {"random", "random to", "random from to", "bernoulli", "geometric"}
PAIRS = {"log_normal"}  # numbers are made in pairs, and the second is kept
NEAR = {"columns with short gaps", "overlapping"}
BLOCKS: dict[str, tuple[tuple[int, ...], list[list[tuple[Cut, ...]]]]] = {
    "rows": ((40, 300), [[(Cut(8, 4),), ()]]),
    "first rows": ((40, 300), [[(Cut(8, 0),), ()]]),
    "last rows": ((41, 301), [[(Cut(8, 7),), ()]]),
    "uneven rows": ((37, 311), [[(Cut(8, 4),), ()]]),
    "empty": ((3, 5007), [[(Cut(8, 5),), ()]]),
    "columns with long gaps": ((3, 5003), [[(), (Cut(8, 3),)]]),
    "columns with short gaps": ((300, 41), [[(), (Cut(8, 3),)]]),
    "parts of rows and columns": ((4, 3, 1501), [[(Cut(2, 1),), (), (Cut(4, 2),)]]),
    "front and back": ((40, 300), [[(Cut(4, 1, 2),), ()]]),
    "several": ((40, 307), [[(Cut(20, 11),), ()], [(Cut(20, 2),), ()]]),
    "overlapping": ((40, 300), [[(Cut(20, 11),), ()], [(), (Cut(150, 140),)]]),
    "none": ((40, 307), []),
}


def states() -> Iterator[tuple[bool, torch.Generator]]:
    """Fresh ones, and some inside a block of the generator's state; whether a normal number is kept."""
    for seed, used, normals in ((0, 0, 0), (1, 300, 1), (2, 624, 0)):
        generator = torch.Generator().manual_seed(seed)
        torch.empty(used).uniform_(generator=generator)
        torch.empty(normals).normal_(generator=generator)
        yield bool(normals), generator


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", OPS)
def test_a_process_jumps_over_what_it_does_not_need(
    name: str, blocks: str, contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers, and each byte of the state after them."""
    assert jumps_exactly()  # tried once a process, by jumps
    monkeypatch.setattr(stream, "BLOCK", 128)
    monkeypatch.setattr(stream, "JUMP", 1300)
    jump, jumps = Origin.jump, []
    monkeypatch.setattr(Origin, "jump", lambda *args: jumps.append(args[2]) or jump(*args))
    (op, numbers), (shape, cuts) = OPS[name], BLOCKS[blocks]
    held = [block_of(shape, each) for each in cuts]
    count = math.prod(shape)
    for dtype in (*FLOATS[:3], torch.int64) if name in INTEGERS else FLOATS[:3]:
        for keeps_normal, generator in states():
            plain = generator.clone_state()
            memory = torch.empty(count, dtype=dtype) if contiguous else torch.empty(2 * count, dtype=dtype)[::2]
            drawn = op(memory, *numbers, generator=plain)
            jumps.clear()
            parts = stream.draw(Draw(op, numbers, shape, dtype, CPU, contiguous), held, generator)
            for block, part in zip(held, parts, strict=True):
                own = drawn[indices_between(extents_of(shape, block), 0, part.numel())] if part.numel() else drawn[:0]
                assert torch.equal(part.view(-1), own)
            assert torch.equal(generator.get_state(), plain.get_state())
            paired = name in PAIRS or (name == "normal" and not contiguous)
            assert bool(jumps) == (blocks not in NEAR and not (paired and keeps_normal))


class Drawn(TorchDispatchMode):
    """Counts the words that operators take from a generator, if each element takes one."""

    words = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.uniform_.default and kwargs["generator"]._cdata == self.generator._cdata:
            self.words += args[0].nbytes // 4
        return func(*args, **(kwargs or {}))

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator


def test_modes_see_every_number_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded program repeats operators, and would not repeat a jump."""
    monkeypatch.setattr(stream, "BLOCK", 64)
    monkeypatch.setattr(stream, "JUMP", 1000)
    wanted = Draw(aten.uniform_.default, (0.0, 1.0), (40, 300), torch.float32, CPU)
    generator, plain = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    with Drawn(generator) as seen:
        (part,) = stream.draw(wanted, [block_of((40, 300), [(Cut(8, 4),), ()])], generator)
    assert seen.words == 40 * 300
    assert torch.equal(part, torch.empty(40, 300).uniform_(generator=plain)[20:25])
    assert torch.equal(generator.get_state(), plain.get_state())


@pytest.mark.parametrize("name", OPS)
def test_where_the_state_of_torch_is_not_the_known_one_all_numbers_are_drawn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BLOCK", 64)
    monkeypatch.setattr(stream, "JUMP", 1000)
    monkeypatch.setattr(stream, "jumps_exactly", lambda: False)
    op, numbers = OPS[name]
    for _, generator in states():
        plain = generator.clone_state()
        wanted = Draw(op, numbers, (40, 301), torch.float32, CPU)
        (part,) = stream.draw(wanted, [block_of((40, 301), [(Cut(8, 4),), ()])], generator)
        assert torch.equal(part, op(torch.empty(40, 301), *numbers, generator=plain)[20:25])
        assert torch.equal(generator.get_state(), plain.get_state())


# ---------------------------------------------------------------- the indexed generator


def test_indexed_numbers_are_the_same_on_every_mesh() -> None:
    """And cost no more than the own part: the positions alone are looked at."""
    results = []
    for shape in MESHES:
        mesh = sw.init_device_mesh("cpu", shape)
        for layout in layouts(mesh, 2):
            torch.manual_seed(SEED)
            with sw.use_rng("indexed"):
                x = sw.zeros(9, 14, device_mesh=mesh, **layout)
                row = [FILLS[name](x).full_tensor().clone() for name in FILLS]
            results.append([*row, sw.rand(3, device_mesh=mesh).full_tensor()])
    for row in results[1:]:
        for a, b in zip(row, results[0], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", FILLS)
def test_indexed_numbers_have_the_distribution_of_torchs(name: str) -> None:
    """The two-sample Kolmogorov-Smirnov distance of 20,000 numbers each stays under the value passed once in 10,000."""
    mesh = sw.init_device_mesh("cpu", (4,))
    torch.manual_seed(SEED)
    with sw.use_rng("indexed"):
        ours = FILLS[name](sw.zeros(20000, device_mesh=mesh, placements=[S0])).full_tensor()
    theirs = FILLS[name](torch.zeros(20000))
    together = torch.cat([ours, theirs]).sort().values.unique()
    gap = (
        torch.searchsorted(ours.sort().values, together, right=True)
        - torch.searchsorted(theirs.sort().values, together, right=True)
    ).abs().max() / 20000
    assert gap < 2.2 * (2 / 20000) ** 0.5


def test_indexed_numbers_of_neighbours_and_of_draws_do_not_correlate() -> None:
    device = torch.device("cpu")
    wanted = Draw(torch.ops.aten.normal_.default, (0.0, 1.0), (256, 256), torch.float64, device)
    block = block_of((256, 256), [(), ()])
    a, b = (indexed.draw(wanted, [block], torch.Generator().manual_seed(seed))[0] for seed in (1, 2))
    for x, y in ((a, b), (a[1:], a[:-1]), (a[:, 1:], a[:, :-1]), (a, a.t())):
        off = ~torch.eye(256, dtype=torch.bool) if y.shape == (256, 256) else torch.ones_like(x, dtype=torch.bool)
        assert torch.corrcoef(torch.stack([x[off], y[off]]))[0, 1].abs() < 4.5 / 256


def test_unknown_generators_are_refused() -> None:
    with pytest.raises(sw.UnsupportedError, match="one_device"), sw.use_rng("other"):
        pass


@pytest.mark.parametrize("cuts", [[(), ()], [(Cut(3, 2),), ()], [(), (Cut(4, 1),)], [(Cut(2, 1, 2),), (Cut(2, 0),)]])
def test_positions(cuts: list[tuple[Cut, ...]]) -> None:
    shape = (10, 6)
    block = block_of(shape, cuts)
    extents = extents_of(shape, block)
    indices = [[i for run in runs for i in range(run.start, run.start + run.length)] for runs in block.runs]
    want = [i * 6 + j for i in indices[0] for j in indices[1]]
    assert indices_between(extents, 0, len(want)).tolist() == want
    assert [index_of(extents, element) for element in range(len(want))] == want
    with pytest.raises(IndexError):
        index_of(extents, len(want))
    assert [count_below(extents, p) for p in range(61)] == [sum(q < p for q in want) for p in range(61)]


# ---------------------------------------------------------------- states, seeds, recomputation


def test_trackers() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    tracker = sw.RNGTracker(mesh)
    tracker.manual_seed(11)
    state = tracker.get_state()
    with tracker.fork():
        a = sw.rand(4, device_mesh=mesh)
    b = sw.rand(4, device_mesh=mesh)
    tracker.set_state(state)
    c = sw.rand(4, device_mesh=mesh)
    assert torch.equal(a.full_tensor(), b.full_tensor())
    assert torch.equal(b.full_tensor(), c.full_tensor())
    sw.manual_seed(11, mesh)
    assert tracker.seed == 11
    assert torch.equal(tracker.get_state(), state)


def test_a_dry_run_draws_nothing() -> None:
    state = torch.get_rng_state()
    with sw.dry_run():
        mesh = sw.init_device_mesh("cpu", (64,))
        x = sw.rand(1024, 1024, device_mesh=mesh, placements=[S0])
        F.dropout(x, 0.5).normal_()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_draws_the_same_numbers(reentrant: bool) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    plain = torch.randn(6, 8)
    grads = []
    for x in (plain.clone(), sw.distribute_tensor(plain, mesh, [S0, S1])):
        x.requires_grad_()
        for wrapped in (False, True):

            def block(h: torch.Tensor) -> torch.Tensor:
                return F.dropout(F.gelu(F.dropout(h, 0.3)), 0.3) ** 2

            torch.manual_seed(SEED)
            y = checkpoint(block, x, use_reentrant=reentrant) if wrapped else block(x)
            _ = torch.rand(5)  # what is drawn in between does not change what is recomputed
            (grad,) = torch.autograd.grad(y.sum(), x) if not reentrant else (None,)
            if reentrant:
                x.grad = None
                y.sum().backward()
                grad = x.grad
            assert grad is not None
            grads.append(grad.full_tensor() if isinstance(grad, sw.DTensor) else grad)
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], rtol=1e-6, atol=1e-6)


class Transformer(torch.nn.Module):
    """A small one with dropout wherever models have it."""

    def __init__(self, width: int = 16, heads: int = 4, tokens: int = 11) -> None:
        super().__init__()
        self.heads = heads
        self.embed = torch.nn.Embedding(tokens, width)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(3))
        self.query, self.key, self.value, self.out = (torch.nn.Linear(width, width) for _ in range(4))
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.head = torch.nn.Linear(width, tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embed(tokens), 0.1)
        h = self.norms[0](x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + F.dropout(self.out(h.transpose(1, 2).flatten(2)), 0.1)
        x = x + F.dropout(self.down(F.dropout(F.gelu(self.up(self.norms[1](x))), 0.1)), 0.1)
        return self.head(self.norms[2](x))


COLUMN = ("query", "key", "value", "up", "head")
ROW = ("out", "down")


def sharded(model: torch.nn.Module, mesh: sw.DeviceMesh) -> None:
    """Tensor parallel over the last axis, replicated over the others."""
    rest = [R] * (mesh.ndim - 1)
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if path in COLUMN:
                placement: Any = S0
            elif path in ROW and name == "weight":
                placement = S1
            else:
                placement = R
            laid = sw.distribute_tensor(parameter.detach(), mesh, [*rest, placement])
            module.register_parameter(name, torch.nn.Parameter(laid))


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_a_transformer_with_dropout_trains_like_on_one_device(shape: tuple[int, ...]) -> None:
    mesh = sw.init_device_mesh("cpu", shape)
    tokens = torch.randint(11, (20, 8, 9))
    losses: list[list[float]] = []
    for distributed in (False, True):
        torch.manual_seed(SEED)
        model = Transformer()
        if distributed:
            sharded(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        row = []
        for step in range(20):
            batch: Any = tokens[step]
            if distributed:
                batch = sw.distribute_tensor(batch, mesh, [S0] * (mesh.ndim - 1) + [R])
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            row.append(loss.full_tensor().item() if isinstance(loss, sw.DTensor) else loss.item())
        losses.append(row)
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=2e-5, atol=2e-5)
    assert losses[0][-1] < losses[0][0]
