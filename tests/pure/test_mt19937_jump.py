"""The state of torch's CPU generator after a jump, against a generator that draws: every byte."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from shardwise.rng import mt19937_jump
from shardwise.rng.mt19937_jump import Origin, characteristic_polynomial, jumps_exactly, power_of_x


def generator_at(seed: int, used: int, normals: int = 0) -> torch.Generator:
    """A generator that has drawn some words, and `normals` normal numbers, each second of which it keeps."""
    generator = torch.Generator().manual_seed(seed)
    torch.empty(normals).normal_(generator=generator)
    torch.empty(used).uniform_(generator=generator)
    return generator


def drawn(generator: torch.Generator, words: int) -> torch.Tensor:
    """The state after drawing words."""
    torch.empty(words).uniform_(generator=generator)
    return generator.get_state()


def jumped(generator: torch.Generator, words: int) -> torch.Tensor:
    Origin(generator).jump(generator, words)
    return generator.get_state()


def test_jumps_are_exact_with_this_torch() -> None:
    assert jumps_exactly()


@pytest.mark.parametrize("used", [0, 1, 2, 300, 623, 624, 625])
@pytest.mark.parametrize("words", [0, 1, 2, 622, 623, 624, 625, 1247, 1248, 1249, 19_936, 19_937, 20_561, 2**20 + 3])
def test_a_jump_gives_the_state_that_drawing_gives(words: int, used: int) -> None:
    for normals in (0, 1):
        assert torch.equal(
            jumped(generator_at(5, used, normals), words), drawn(generator_at(5, used, normals), words)
        ), normals


@settings(max_examples=40)
@given(seed=st.integers(0, 2**40), used=st.integers(0, 1300), words=st.integers(0, 3_000_000))
@example(seed=0, used=0, words=623 * 624)
@example(seed=1, used=17, words=12_345_678)  # a square with a term of the degree that two remainders multiply to
def test_jumps_of_any_length(seed: int, used: int, words: int) -> None:
    assert torch.equal(jumped(generator_at(seed, used), words), drawn(generator_at(seed, used), words))


@settings(max_examples=20)
@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=5))
def test_two_jumps_are_one_of_their_sum(jumps: list[int]) -> None:
    """Farther than drawing reaches, and from one origin to places in any order."""
    generator, origin = generator_at(3, 100), Origin(generator_at(3, 100))
    for jump in jumps:
        Origin(generator).jump(generator, jump)
    other = torch.Generator()
    for place in (*jumps, sum(jumps)):
        origin.jump(other, place)
    assert torch.equal(generator.get_state(), other.get_state())


def test_the_words_satisfy_the_characteristic_polynomial() -> None:
    block = generator_at(0, 1).get_state().numpy().view(mt19937_jump.LAYOUT)["words"][0].astype(np.uint32)
    following = mt19937_jump._following(block, 30_000)
    terms = np.array([term for term in range(19938) if characteristic_polynomial() >> term & 1])
    assert len(terms) == 135
    for at in (0, 1, 623, 10_000):
        assert np.bitwise_xor.reduce(following[at + terms]) == 0


def remainder(polynomial: int) -> int:
    """By long division."""
    divisor = characteristic_polynomial()
    while polynomial.bit_length() >= divisor.bit_length():
        polynomial ^= divisor << polynomial.bit_length() - divisor.bit_length()
    return polynomial


@pytest.mark.parametrize("exponent", [0, 1, 16_383, 16_384, 19_936, 19_937, 39_873, 39_874])
def test_powers_of_x(exponent: int) -> None:
    assert power_of_x(exponent) == remainder(1 << exponent)


@settings(max_examples=20)
@given(st.integers(0, 2**39_875 - 1))
@example(2**39_875 - 1)
def test_remainders(polynomial: int) -> None:
    assert mt19937_jump._remainder(polynomial) == remainder(polynomial)


FIELDS = list(mt19937_jump.LAYOUT.fields or ())


@pytest.mark.parametrize(
    "fields",
    [
        [*FIELDS[2:], *FIELDS[:2]],
        [FIELDS[0], *FIELDS[4:], *FIELDS[1:4]],
        [*FIELDS[:4], FIELDS[5], FIELDS[4]],
        FIELDS[:-1],
    ],
    ids=["counts", "words and counts", "words", "size"],
)
def test_another_layout_of_the_state_is_noticed(fields: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = mt19937_jump.LAYOUT.fields or {}
    monkeypatch.setattr(mt19937_jump, "LAYOUT", np.dtype([(name, kinds[name][0]) for name in fields]))
    jumps_exactly.cache_clear()
    try:
        assert not jumps_exactly()
    finally:
        jumps_exactly.cache_clear()
