"""Where the elements of a block stand, and which launches fill a tensor: against plain counting."""

import itertools
import math

import pytest
import torch

from shardwise.core.layout import Block, Cut
from shardwise.rng.block_geometry import Extent, count_below, extents_of, indices_between
from shardwise.rng.cuda.philox_tensor_ops import philox
from shardwise.rng.cuda.torch_kernels import FillKernel, TorchLaunch, fill_kernel_of, torch_launches
from shardwise.rng.cuda.work_sharing import ALONE, BlockLaunch, block_launch
from shardwise.rng.random_fill import Draw
from tests.blocks import block_of

THREADS = 270_336
CUDA = torch.device("cuda", 0)
aten = torch.ops.aten

Cuts = tuple[tuple[Cut, ...], ...]
LAYOUTS: list[tuple[tuple[int, ...], Cuts]] = [
    ((), ()),
    ((7,), ((Cut(3, 1),),)),
    ((7,), ((Cut(3, 2, rows=2),),)),
    ((4, 6), ((), ())),
    ((4, 6), ((Cut(2, 1),), ())),
    ((4, 6), ((), (Cut(3, 1),))),
    ((4, 6), ((Cut(3, 2),), (Cut(4, 3),))),  # empty in the second dim
    ((3, 5, 4), ((), (Cut(2, 0),), ())),
    ((3, 5, 4), ((Cut(3, 1),), (), (Cut(2, 1),))),
    ((3, 5, 4), ((Cut(3, 1),), (Cut(2, 1),), ())),
    ((3, 10, 4), ((), (Cut(2, 1, rows=3),), ())),
    ((6, 10, 4), ((Cut(2, 1, rows=3),), (Cut(2, 0, rows=2),), (Cut(4, 2),))),
    ((2, 3, 2, 3), ((Cut(2, 1),), (), (Cut(2, 0),), ())),
]


def indices(shape: tuple[int, ...], block: Block) -> list[int]:
    held = [[at for run in runs for at in range(run.start, run.start + run.length)] for runs in block.runs]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return [sum(at * stride for at, stride in zip(ats, strides, strict=True)) for ats in itertools.product(*held)]


@pytest.mark.parametrize(("shape", "cuts"), LAYOUTS)
def test_elements_of_a_block(shape: tuple[int, ...], cuts: Cuts) -> None:
    block = block_of(shape, cuts)
    extents = extents_of(shape, block)
    wanted = indices(shape, block)
    assert math.prod(extent.size for extent in extents) == len(wanted)
    assert indices_between(extents, 0, len(wanted)).tolist() == wanted
    assert indices_between(extents, len(wanted) // 3, len(wanted)).tolist() == wanted[len(wanted) // 3 :]
    for index in range(math.prod(shape) + 1):
        assert count_below(extents, index) == sum(held < index for held in wanted)


def test_dims_are_joined() -> None:
    assert len(extents_of((3, 5, 4), block_of((3, 5, 4), ((Cut(3, 1),), (), ())))) == 1
    assert len(extents_of((3, 5, 4), block_of((3, 5, 4), ((), (Cut(2, 1),), ())))) == 2
    assert len(extents_of((3, 5, 4), block_of((3, 5, 4), ((Cut(3, 1),), (Cut(2, 1),), ())))) == 1


def index_of(extents: tuple[Extent, ...], element: int) -> int:
    """The position of one element; before all dims, at the beginning."""
    return int(indices_between(extents, element, element + 1)) if extents else 0


def elements_of_calls(launch: BlockLaunch, extents: tuple[Extent, ...], start: int, few: int) -> list[list[int]]:
    """The elements that come from each call made, filled or not: the kernel's arithmetic, for 4 values a call."""
    spread = launch.spread
    if not launch.slab:
        begins = [launch.base + at // spread * spread * 4 + at % spread for at in range(launch.threads)]
        return [[begin + k * spread for k in range(4)] for begin in begins]
    found = []
    outer, extent = extents[: launch.shared], extents[launch.shared]
    for thread in range(launch.threads):
        chunk, lane = divmod(thread, spread)
        slab, chunk = divmod(chunk + launch.base, launch.chunks)
        begin = index_of(outer, slab) + extent.runs[0].start * extent.stride
        lead = (begin - start) % (4 * few) // extent.stride * launch.inner
        inside = range(slab * launch.slab, (slab + 1) * launch.slab)
        for group in range(chunk * launch.groups, (chunk + 1) * launch.groups):
            at = slab * launch.slab + group * spread * 4 + lane - lead
            found.append([e for k in range(4) if (e := at + k * spread) in inside])
    return found


SHARING: list[tuple[tuple[int, ...], Cuts, int]] = [
    ((1000,), ((Cut(3, 1),),), 0),
    ((1000,), ((Cut(3, 1, rows=2),),), 1),
    ((100, 8), ((), (Cut(2, 1),)), 0),
    ((3, 100, 8), ((), (Cut(2, 1),), (Cut(2, 1),)), 1),
    ((3, 400), ((), (Cut(2, 1),)), 1),
    ((30, 7), ((), (Cut(2, 0),)), ALONE),
    ((20,), ((),), ALONE),
]


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(("shape", "cuts", "shared"), SHARING)
def test_threads_share_calls(shape: tuple[int, ...], cuts: Cuts, shared: int, halves: int) -> None:
    few, numel = 16, math.prod(shape)
    extents = extents_of(shape, block_of(shape, cuts))
    cut = numel // 2 // 8 * 8
    filled: list[int] = []
    parts = (TorchLaunch(0, numel, 0),) if halves == 1 else (TorchLaunch(0, cut, 0), TorchLaunch(cut, numel, 9))
    for part in parts:
        launch = block_launch(extents, part, values=4, vector=1, threads=few)
        if launch is None:
            continue
        assert launch.shared == shared
        for elements in elements_of_calls(launch, extents, part.start, few):
            mine = [e for e in elements if launch.first <= e < launch.last]
            filled += mine
            calls = {((i := index_of(extents, e) - part.start) % few, i // few // 4) for e in mine}
            assert shared == ALONE or len(calls) <= 1
    assert sorted(filled) == list(range(math.prod(extent.size for extent in extents)))


@pytest.mark.parametrize(
    ("shape", "cuts", "shared"),
    [
        ((101,), ((Cut(3, 1),),), 0),
        ((10, 8), ((), (Cut(2, 1),)), 0),
        ((10, 6), ((), (Cut(2, 1),)), ALONE),
        ((10, 12), ((), (Cut(2, 1),)), ALONE),
    ],
)
def test_neighbours_share_calls(shape: tuple[int, ...], cuts: Cuts, shared: int) -> None:
    extents = extents_of(shape, block_of(shape, cuts))
    launch = block_launch(extents, TorchLaunch(0, math.prod(shape), 0), values=4, vector=8, threads=16)
    assert launch is not None
    assert launch.shared == shared
    filled: list[int] = []
    for elements in elements_of_calls(launch, extents, 0, 16):
        mine = [e for e in elements if launch.first <= e < launch.last]
        filled += mine
        assert shared == ALONE or len({index_of(extents, e) // 4 for e in mine}) <= 1
    assert sorted(filled) == list(range(math.prod(extent.size for extent in extents)))


def test_one_launch_while_bytes_are_counted_in_32_bits() -> None:
    kernel_model = FillKernel("uniform", torch.float32, "float", 4)
    for numel in (1, 4 * THREADS, 2**29):
        assert torch_launches(numel, 4, kernel_model, THREADS) == (
            (TorchLaunch(0, numel, 0),),
            4 * -(-numel // (4 * THREADS)),
        )


def test_larger_tensors_are_halved_until_they_fit() -> None:
    kernel_model = FillKernel("normal", torch.float32, "float", 4)
    numel = 2**30 + 3
    launches, increment = torch_launches(numel, 4, kernel_model, THREADS)
    assert [launch.stop - launch.start for launch in launches] == [2**28, 2**28 + 1, 2**28 + 1, 2**28 + 1]
    assert [launch.start for launch in launches] == [0, *(launch.stop for launch in launches[:-1])]
    calls = [-(-n // (4 * THREADS)) for n in (numel, *(launch.stop - launch.start for launch in launches))]
    assert [launch.calls for launch in launches] == [sum(calls[: at + 1]) for at in range(len(launches))]
    assert increment == 4 * sum(calls)


@pytest.mark.parametrize(("vector", "values", "calls"), [(8, 4, 2), (4, 4, 1), (2, 2, 1), (1, 4, 1)])
def test_dropout_is_cut_between_calls(vector: int, values: int, calls: int) -> None:
    kernel_model = FillKernel("keep", torch.bool, "float", values, vector)
    launches, increment = torch_launches(2**33, 2, kernel_model, THREADS)
    period = THREADS * (4 if vector == 1 else vector)
    assert launches[-1].stop == 2**33
    assert all(launch.stop - launch.start < 2**31 for launch in launches)
    assert all(launch.calls * period == launch.start * calls for launch in launches)
    assert increment == 4 * -(-(2**33) // (4 * THREADS))


@pytest.mark.parametrize(
    ("dtype", "size", "vector"),
    [
        (torch.bfloat16, 16, 8),
        (torch.bfloat16, 12, 4),
        (torch.float32, 16, 4),
        (torch.float64, 16, 2),
        (torch.float32, 6, 2),
        (torch.float32, 7, 1),
    ],
)
def test_vectors_of_dropout(dtype: torch.dtype, size: int, vector: int) -> None:
    kernel_model = fill_kernel_of(Draw(aten.native_dropout.default, (0.25,), (size,), dtype, CUDA))
    assert kernel_model is not None
    assert (kernel_model.vector, kernel_model.dtype, kernel_model.numbers[0]) == (vector, torch.bool, 0.75)


@pytest.mark.parametrize(
    ("dtype", "numbers", "span", "low"),
    [
        (torch.int64, (), 2**63, 0),
        (torch.float32, (), 2**24 + 1, 0),
        (torch.bool, (), 2, 0),
        (torch.int16, (10,), 10, 0),
        (torch.int16, (-5, 10), 15, -5),
        (torch.int16, (-5, None), 2**15 + 5, -5),
        (torch.int64, (-(2**63), None), 0, 0),
        (torch.float16, (0, 65504), 65472, 0),  # 65503 would be rounded up
        (torch.bfloat16, (-1007, 1000), 2000, -1004),  # -1006 would be rounded down, 999 up
    ],
)
def test_ranges_of_integers(dtype: torch.dtype, numbers: tuple[int | None, ...], span: int, low: int) -> None:
    op = (aten.random_.default, aten.random_.to, getattr(aten.random_, "from"))[len(numbers)]
    kernel_model = fill_kernel_of(Draw(op, numbers, (8,), dtype, CUDA))
    assert kernel_model is not None
    assert (kernel_model.range, kernel_model.low) == (span, low)


@pytest.mark.parametrize(
    ("counter", "thread", "seed", "words"),
    [
        (0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, -1, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x85A308D3_243F6A88 - 2**64,
            0x03707344_13198A2E,
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter: int, thread: int, seed: int, words: tuple[int, ...]) -> None:
    assert tuple(map(int, philox(seed, torch.tensor(counter), torch.tensor(thread)))) == words


def test_what_is_not_known() -> None:
    assert fill_kernel_of(Draw(aten.normal_.default, (), (8,), torch.complex64, CUDA)) is None
    assert fill_kernel_of(Draw(aten.uniform_.default, (), (8,), torch.int32, CUDA)) is None
    assert fill_kernel_of(Draw(aten.bernoulli_.Tensor, (), (8,), torch.float32, CUDA)) is None
