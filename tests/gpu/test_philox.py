"""Random numbers by index: the blocks of a tensor against torch's operator on the global tensor, bit for bit."""

import math
import unittest
import warnings
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload

from shardwise.core.layout import Block, Cut, Run
from shardwise.rng.cuda import philox_fill as philox
from shardwise.rng.cuda import philox_kernel as kernel
from shardwise.rng.random_fill import Draw
from tests.blocks import block_of

if not torch.cuda.is_available():
    raise unittest.SkipTest("no CUDA device")

aten = torch.ops.aten
CUDA = torch.device("cuda", torch.cuda.current_device())
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SIZES = (0, 1, 255, 256, 270_335, 270_336, 270_337, 3_000_001, 3_000_002, 3_000_004, 3_000_008)
DROPOUT = aten.native_dropout.default
FROM = getattr(aten.random_, "from")


def by_torch(draw: Draw) -> torch.Tensor:
    """The global tensor, from the device's default generator."""
    tensor = torch.empty(draw.shape, dtype=draw.dtype, device=CUDA)
    if draw.op is DROPOUT:
        return draw.op(tensor, *draw.numbers, True)[1]
    return draw.op(tensor, *draw.numbers)


def part(whole: torch.Tensor, block: Block) -> torch.Tensor:
    """The block, cut out of the global tensor."""
    for dim, runs in enumerate(block.runs):
        if runs != (Run(0, whole.shape[dim]),):
            whole = torch.cat([whole.narrow(dim, run.start, run.length) for run in runs], dim)
    return whole.contiguous()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, 1).view(torch.uint8)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Where two tensors differ first, or nothing."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype or not ours.is_contiguous():
        return f"{ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}"
    if torch.equal(bits(ours), bits(theirs)):
        return ""
    unequal = (bits(ours) != bits(theirs)).any(1).nonzero().reshape(-1)
    first = unequal[:3].tolist()
    pairs = [(at, ours.reshape(-1)[at].item(), theirs.reshape(-1)[at].item()) for at in first]
    return f"{len(unequal)} of {ours.numel()} differ: {pairs}"


def compare(draw: Draw, blocks: Sequence[Block], times: int = 3) -> list[str]:
    """What is wrong with some draws in a row, whether with the numbers or the generator's state."""
    wrong = []
    generator = torch.Generator(CUDA)
    torch.cuda.manual_seed(1234)
    generator.set_state(torch.cuda.get_rng_state())
    for time in range(times):
        theirs = by_torch(draw)
        ours = philox.draw(draw, blocks, generator)
        for at, (mine, block) in enumerate(zip(ours, blocks, strict=True)):
            if found := difference(mine, part(theirs, block)):
                wrong.append(f"{named(draw)}, draw {time}, block {at}: {found}")
        state, wanted = (
            state.view(torch.int64).tolist() for state in (generator.get_state(), torch.cuda.get_rng_state())
        )
        if state != wanted:
            wrong.append(f"{named(draw)}, draw {time}: state {state} instead of {wanted}")
    return wrong


def seed_and_offset(state: torch.Tensor) -> list[int]:
    return state.view(torch.int64).tolist()


def named(draw: Draw) -> str:
    return f"{draw.op}{draw.numbers} {draw.dtype} {draw.shape}"


def check(wrong: Iterable[str]) -> None:
    lines = list(wrong)
    assert not lines, f"{len(lines)} wrong\n" + "\n".join(lines[:40])


def sizes_agree(
    op: OpOverload, dtypes: Iterable[torch.dtype], numbers: Iterable[tuple[Any, ...]], sizes: Sequence[int] = SIZES
) -> None:
    wrong = []
    for dtype in dtypes:
        for given in numbers:
            for size in sizes:
                draw = Draw(op, given, (size,), dtype, CUDA)
                wrong += compare(draw, [block_of((size,), [()])])
                if not philox.reproduces(draw):
                    wrong.append(f"{named(draw)}: said not to be reproduced")
    check(wrong)


def test_uniform() -> None:
    sizes_agree(aten.uniform_.default, FLOATS, [(), (-0.3, 1.9), (0.1, 0.1)])


def test_normal() -> None:
    sizes_agree(aten.normal_.default, FLOATS, [(), (0.7, 1.3), (0.0, 0.02)])


def test_log_normal() -> None:
    sizes_agree(aten.log_normal_.default, FLOATS, [(), (0.3, 0.9)])


def test_exponential() -> None:
    sizes_agree(aten.exponential_.default, FLOATS, [(), (1.7,)])


def test_cauchy() -> None:
    sizes_agree(aten.cauchy_.default, FLOATS, [(), (0.7, 1.3)])


def test_geometric() -> None:
    sizes_agree(aten.geometric_.default, FLOATS + INTEGERS, [(0.3,), (0.01,)])


def test_bernoulli() -> None:
    sizes_agree(aten.bernoulli_.float, (*FLOATS, *INTEGERS, torch.bool), [(), (0.3,), (0.0,), (1.0,)])


def test_random() -> None:
    sizes_agree(aten.random_.default, (*FLOATS, *INTEGERS, torch.bool), [()])


def test_random_to() -> None:
    unsigned = (torch.uint16, torch.uint32, torch.uint64)
    sizes_agree(aten.random_.to, (*FLOATS, *INTEGERS, *unsigned), [(100,)])
    sizes_agree(aten.random_.to, (torch.bool,), [(1,), (2,)])
    sizes_agree(aten.random_.to, (torch.int64, torch.int32, torch.uint32, torch.float64), [(2**28 - 1,), (2**28,)])


def test_random_from() -> None:
    sizes_agree(FROM, (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8), [(-100, 100), (-7, None)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these bounds are beyond what the dtypes count exactly
        sizes_agree(FROM, (torch.float16,), [(0, 65_504)], sizes=(300_000,))
        sizes_agree(FROM, (torch.bfloat16,), [(-1007, 1000)], sizes=(300_000,))
    sizes_agree(FROM, (torch.int64,), [(-(2**62), 2**62 + 12345), (-(2**63), None), (-(2**63), 2**63 - 1)])
    sizes_agree(FROM, (torch.float32, torch.float64, torch.bfloat16), [(-(2**63), None)])


def test_dropout() -> None:
    sizes_agree(DROPOUT, FLOATS, [(0.1,), (0.5,), (0.0,), (1.0,)])


BLOCKS: list[tuple[tuple[int, ...], list[list[tuple[Cut, ...]]]]] = [
    ((), [[]]),
    ((3_000_000,), [[(Cut(4, at),)] for at in range(4)]),
    ((3_000_001,), [[(Cut(7, at),)] for at in range(7)]),
    ((3_000_008,), [[(Cut(8, at),)] for at in range(8)]),  # dropout takes eight at once, and no block has eights
    ((1_500_004, 2), [[(Cut(3, at),), ()] for at in range(3)]),
    ((3_000_001,), [[(Cut(3, at, rows=1000),)] for at in range(3)]),
    ((5,), [[(Cut(4, at),)] for at in range(4)]),  # the last is empty
    ((1000, 2048), [[(), (Cut(4, at),)] for at in range(4)]),  # 2048 divides the threads of many devices
    ((1001, 2047), [[(), (Cut(4, at),)] for at in range(4)]),
    ((1000, 2048), [[(Cut(3, row),), (Cut(2, at, rows=4),)] for row in range(3) for at in range(2)]),
    ((37, 41, 53, 17), [[(Cut(2, a),), (), (Cut(3, b),), ()] for a in range(2) for b in range(3)]),
    ((64, 128, 256), [[(Cut(2, a, rows=8),), (Cut(2, b, rows=5),), (Cut(4, 3),)] for a in range(2) for b in range(2)]),
    ((0, 4), [[(), (Cut(2, 0),)]]),
    # large enough for the elements of a thread to come from one call, along each of the dims
    ((3, 3_000_000), [[(), (Cut(2, at),)] for at in range(2)]),
    ((6_000_000,), [[(Cut(2, at, rows=2),)] for at in range(2)]),
    ((3, 4000, 2048), [[(), (), (Cut(2, at),)] for at in range(2)]),
    ((3, 4000, 2048), [[(), (Cut(2, a),), (Cut(2, b),)] for a in range(2) for b in range(2)]),
    ((3, 4000, 2048), [[(), (Cut(2, a),), (Cut(2, 1, rows=3),)] for a in range(2)]),
]


def blocks_agree(op: OpOverload, dtypes: Iterable[torch.dtype], numbers: tuple[Any, ...]) -> None:
    wrong = []
    for dtype in dtypes:
        for shape, cuts in BLOCKS:
            draw = Draw(op, numbers, shape, dtype, CUDA)
            wrong += compare(draw, [block_of(shape, of_dims) for of_dims in cuts], times=2)
    check(wrong)


def test_blocks_of_uniform() -> None:
    blocks_agree(aten.uniform_.default, FLOATS, (-0.3, 1.9))


def test_blocks_of_normal() -> None:
    blocks_agree(aten.normal_.default, FLOATS, (0.7, 1.3))


def test_blocks_of_integers() -> None:
    blocks_agree(FROM, INTEGERS, (0, 100))
    blocks_agree(aten.random_.default, (torch.int64, torch.bool), ())


def test_blocks_of_dropout() -> None:
    blocks_agree(DROPOUT, FLOATS, (0.3,))


LARGE: list[tuple[OpOverload, torch.dtype, tuple[int, ...], list[list[tuple[Cut, ...]]]]] = [
    (aten.uniform_.default, torch.float32, (2**29 + 4099,), [[(Cut(3, at),)] for at in range(3)]),
    (aten.uniform_.default, torch.float32, (131_100, 4096), [[(), (Cut(2, at),)] for at in range(2)]),
    (aten.uniform_.default, torch.float32, (131_101, 4099), [[(), (Cut(2, at),)] for at in range(2)]),
    (aten.normal_.default, torch.float64, (2**29 + 3,), [[(Cut(3, at),)] for at in range(3)]),
    (aten.normal_.default, torch.bfloat16, (2**30 + 8,), [[(Cut(3, at, rows=5),)] for at in range(3)]),
    (DROPOUT, torch.bfloat16, (2**31 + 2**20,), [[(Cut(3, at),)] for at in range(3)]),
    (DROPOUT, torch.bfloat16, (2**31 // 4096 + 77, 4096), [[(), (Cut(2, at),)] for at in range(2)]),
]


def test_tensors_whose_bytes_torch_cannot_count_in_32_bits() -> None:
    wrong = []
    for op, dtype, shape, cuts in LARGE:
        draw = Draw(op, (0.3,) if op is DROPOUT else (), shape, dtype, CUDA)
        wrong += compare(draw, [block_of(shape, of_dims) for of_dims in cuts], times=2)
        torch.cuda.empty_cache()
    check(wrong)


def test_a_small_block_of_a_large_tensor() -> None:
    numel = 2**30 + 5
    draw = Draw(aten.normal_.default, (), (numel,), torch.float32, CUDA)
    starts = (0, numel // 4 - 3000, numel // 2 - 3000, numel - 7000)  # across torch's launches
    check(compare(draw, [Block((7000,), (at,), ((Run(at, 7000),),)) for at in starts], times=2))


def test_factories_draw_as_the_operators_do() -> None:
    shape, size = (1001, 301), 1001 * 301
    whole = [block_of(shape, [(), ()])]
    for dtype in FLOATS:
        for factory, op, numbers in (
            (lambda d: torch.rand(shape, device=CUDA, dtype=d), aten.uniform_.default, (0.0, 1.0)),
            (lambda d: torch.randn(shape, device=CUDA, dtype=d), aten.normal_.default, (0.0, 1.0)),
            (lambda d: torch.randint(-5, 90, shape, device=CUDA, dtype=d), FROM, (-5, 90)),
        ):
            torch.cuda.manual_seed(7)
            theirs = factory(dtype)
            torch.cuda.manual_seed(7)
            generator = torch.cuda.default_generators[CUDA.index]
            (ours,) = philox.draw(Draw(op, numbers, shape, dtype, CUDA), whole, generator)
            assert not (found := difference(ours, theirs)), f"{op} {dtype} {size}: {found}"


def test_transposed_tensors_draw_in_the_order_of_memory() -> None:
    for op, numbers in ((aten.normal_.default, (0.0, 1.0)), (aten.uniform_.default, (0.0, 1.0)), (DROPOUT, (0.3,))):
        torch.cuda.manual_seed(7)
        tensor = torch.empty(48, 36, device=CUDA).t()
        theirs = op(tensor, *numbers, True)[1] if op is DROPOUT else op(tensor, *numbers)
        torch.cuda.manual_seed(7)
        draw = Draw(op, numbers, (48, 36), torch.float32, CUDA)
        (ours,) = philox.draw(draw, [block_of((48, 36), [(), ()])], torch.cuda.default_generators[CUDA.index])
        assert not (found := difference(ours, theirs.t().contiguous())), f"{op}: {found}"


def test_the_device_without_an_index_is_the_current_one() -> None:
    draw = Draw(aten.uniform_.default, (), (5,), torch.float32, torch.device("cuda"))
    assert philox.reproduces(draw)
    (ours,) = philox.draw(draw, [block_of((5,), [()])], torch.Generator(CUDA).manual_seed(1))
    assert not difference(ours, torch.empty(5, device=CUDA).uniform_(generator=torch.Generator(CUDA).manual_seed(1)))


def test_seeds_of_64_bits_and_late_offsets() -> None:
    draw = Draw(aten.normal_.default, (), (1000,), torch.float32, CUDA)
    for seed in (2**64 - 1, 2**63, 2**32 + 1, 0):
        theirs, mine = (torch.Generator(CUDA).manual_seed(seed) for _ in range(2))
        for generator in (theirs, mine):
            generator.set_offset(2**36 + 4)
        (ours,) = philox.draw(draw, [block_of((1000,), [()])], mine)
        assert not difference(ours, torch.empty(1000, device=CUDA).normal_(generator=theirs)), seed
        assert torch.equal(mine.get_state(), theirs.get_state())


def test_wrong_numbers_are_torch_s_errors() -> None:
    generator = torch.Generator(CUDA).manual_seed(1)
    for op, numbers, dtype in (
        (aten.uniform_.default, (2.0, 1.0), torch.float32),
        (aten.normal_.default, (0.0, -1.0), torch.float32),
        (aten.bernoulli_.float, (1.5,), torch.float32),
        (aten.exponential_.default, (-1.0,), torch.float32),
        (aten.random_.to, (300,), torch.uint8),
    ):
        try:
            philox.draw(Draw(op, numbers, (4,), dtype, CUDA), [block_of((4,), [()])], generator)
        except RuntimeError:
            assert generator.get_offset() == 0
        else:
            raise AssertionError(f"{op}{numbers} was not refused")


def test_what_is_not_reproduced_is_said() -> None:
    for op, dtype in ((aten.normal_.default, torch.complex64), (aten.uniform_.default, torch.int32)):
        assert not philox.reproduces(Draw(op, (), (4,), dtype, CUDA))
    assert not philox.reproduces(Draw(aten.bernoulli_.Tensor, (), (4,), torch.float32, CUDA))


def test_a_kernel_that_disagrees_with_torch_is_not_used() -> None:
    def late(part: kernel.BlockFill, seed: int, counter: int, *out: torch.Tensor | None) -> torch.Tensor:
        return kernel.fill_part(part, seed, counter + 1, *out)

    with mock.patch.object(philox, "fill_part", late), mock.patch.dict(philox._AGREED, clear=True):
        for op, dtype in ((aten.normal_.default, torch.float32), (DROPOUT, torch.bfloat16)):
            assert not philox.reproduces(Draw(op, (0.3,), (4,), dtype, CUDA))


def test_asking_leaves_the_generators_alone() -> None:
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    with mock.patch.dict(philox._AGREED, clear=True):
        for op in (aten.normal_.default, DROPOUT):
            assert philox.reproduces(Draw(op, (0.3,), (4,), torch.float32, CUDA))
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_without_a_compiler() -> None:
    exact = [
        (aten.uniform_.default, (0.0, 0.7), FLOATS),
        (aten.bernoulli_.float, (0.3,), (*FLOATS, torch.bool)),
        (aten.random_.to, (100,), (*FLOATS, *INTEGERS)),
        (FROM, (-7, 90), (torch.int64, torch.int8, torch.float16)),
        (DROPOUT, (0.3,), FLOATS),
    ]
    others = [(aten.normal_.default, (0.0, 1.0)), (aten.uniform_.default, (0.5, 1.0)), (aten.random_.default, ())]
    wrong = []
    without = mock.patch.object(philox, "can_compile", return_value=False)
    with without, mock.patch.dict(philox._AGREED, clear=True):
        for op, numbers, dtypes in exact:
            for dtype in dtypes:
                for shape, cuts in BLOCKS[:12]:
                    draw = Draw(op, numbers, shape, dtype, CUDA)
                    assert philox.reproduces(draw), named(draw)
                    wrong += compare(draw, [block_of(shape, of_dims) for of_dims in cuts], times=1)
        for op, numbers in others:
            assert not philox.reproduces(Draw(op, numbers, (8,), torch.float64, CUDA))
    check(wrong)


def test_not_while_a_graph_is_captured() -> None:
    draw = Draw(aten.normal_.default, (), (8,), torch.float32, CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.zeros(8, device=CUDA), philox.reproduces(draw)
    assert not captured[1]
    assert philox.reproduces(draw)


def test_a_block_is_one_launch() -> None:
    shapes = [(shape, cuts) for shape, cuts in BLOCKS if math.prod(shape)]
    for shape, cuts in shapes:
        for of_dims in cuts:
            block = block_of(shape, of_dims)
            with mock.patch.object(kernel.Kernel, "launch") as launch:
                philox.draw(Draw(aten.normal_.default, (), shape, torch.float32, CUDA), [block], torch.Generator(CUDA))
            assert launch.call_count == (1 if math.prod(block.shape) else 0)


def test_nothing_is_written_beside_a_block() -> None:
    rooms: list[torch.Tensor] = []

    def roomy(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape = (shape,) if isinstance(shape, int) else shape
        rooms.append(torch.full((math.prod(shape) + 64,), True, dtype=dtype, device=device))
        return rooms[-1][32:-32].view(shape)

    # all of what is drawn differs from what was there
    for op, numbers, dtype in (
        (DROPOUT, (1 - 1e-12,), torch.bfloat16),
        (aten.uniform_.default, (0.0, 0.5), torch.float32),
    ):
        for shape, cuts in BLOCKS:
            draw = Draw(op, numbers, shape, dtype, CUDA)
            for of_dims in cuts:
                with mock.patch.object(kernel.torch, "empty", side_effect=roomy):
                    (out,) = philox.draw(draw, [block_of(shape, of_dims)], torch.Generator(CUDA))
                assert not (out == 1).any(), named(draw)
                assert all(bool((room[:32] == 1).all() and (room[-32:] == 1).all()) for room in rooms), named(draw)
                rooms.clear()


def test_a_block_costs_its_own_elements() -> None:
    draw = Draw(aten.normal_.default, (), (2**15, 2**15), torch.float32, CUDA)
    block = block_of(draw.shape, [(Cut(256, 17),), (Cut(8, 3),)])
    assert philox.reproduces(draw)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (ours,) = philox.draw(draw, [block], torch.Generator(CUDA).manual_seed(1))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 4 * math.prod(block.shape) + 4096, peak
    assert ours.numel() == math.prod(block.shape)
