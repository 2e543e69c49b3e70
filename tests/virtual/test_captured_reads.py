"""Whatever a captured function reads: a change of it is noticed, or the function is refused by name."""

import array
import contextvars
import functools
import os
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.capture import captured, dict_versions
from shardwise.capture.program_code import is_program_code
from shardwise.errors import UnsupportedError
from tests.virtual.captured_reads import REFUSED, SAME, compare, on_mesh


@pytest.mark.parametrize("name", SAME)
def test_changes_are_noticed(name: str) -> None:
    eager, found = compare(name)
    assert found == eager


@pytest.mark.parametrize("name", REFUSED)
def test_reads_that_cannot_be_followed_are_refused(name: str) -> None:
    _, found = compare(name)
    assert all(isinstance(each, UnsupportedError) for each in found[1:]), found


class Deaf(dict_versions.DictVersions):
    """Versions that do not see a change, as those of a Python whose dicts have other ones."""

    def hold(self) -> bool:
        return True


class Frozen(dict_versions.DictVersions):
    """Numbers of versions that stay the same."""

    def changed(self) -> set[int]:
        return set()


@pytest.mark.parametrize("kind", [Deaf, Frozen])
def test_dicts_are_compared_by_their_contents_where_versions_are_wrong(
    kind: type[dict_versions.DictVersions], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dict_versions.versions_are_right()
    dict_versions.versions_are_right.cache_clear()
    monkeypatch.setattr(dict_versions, "DictVersions", kind)
    monkeypatch.setattr("shardwise.capture.binding.DictVersions", kind)
    try:
        assert not dict_versions.versions_are_right()
        options = {"width": 2.0}
        step = captured(lambda t: t * options["width"])
        x = on_mesh(torch.ones(4))
        for width in (2.0, 2.0, 2.0, 5.0, 5.0, 2.0):
            options["width"] = width
            assert step(x).full_tensor().tolist() == [width] * 4
    finally:
        dict_versions.versions_are_right.cache_clear()


def test_a_cached_function_that_read_what_cannot_be_compared() -> None:
    held = {"number": 1.0}
    proxy = types.MappingProxyType(held)

    @functools.lru_cache
    def number() -> float:
        return proxy["number"]

    number()
    step = captured(lambda x: x * number())
    for _ in range(4):
        assert step(torch.ones(1)).item() == 1.0
    held["number"] = 5.0
    assert step(torch.ones(1)).item() == 1.0  # as eager: the result is kept
    number.cache_clear()
    assert step(torch.ones(1)).item() == 5.0
    with pytest.raises(UnsupportedError, match="mappingproxy"):
        step(torch.ones(1))


def test_results_of_a_cached_function_that_cannot_be_followed() -> None:
    numbers = functools.cache(lambda: array.array("d", [1.0]))
    step = captured(lambda x: x * numbers()[0])
    assert step(torch.ones(1)).item() == 1.0
    with pytest.raises(UnsupportedError, match="a result of"):
        step(torch.ones(1))


def test_arguments_in_one_memory() -> None:
    """Two arguments that share memory in one call and not in the next are different calls."""
    step = captured(lambda u, v: u * 3 + v.data * 2)
    shared = torch.ones(4)
    for _ in range(3):
        assert torch.equal(step(shared, shared.detach()), torch.full((4,), 5.0))
    for _ in range(3):
        assert torch.equal(step(torch.ones(4), torch.full((4,), 7.0)), torch.full((4,), 17.0))
    assert len(step.programs) == 2


def test_a_context_variable_has_a_value_in_each_thread() -> None:
    variable = contextvars.ContextVar("scale", default=1.0)
    step = captured(lambda x: x * variable.get())
    x = on_mesh(torch.ones(4))

    def elsewhere() -> None:
        variable.set(3.0)
        found.extend(step(x).full_tensor()[0].item() for _ in range(4))

    found: list[float] = []
    for _ in range(2):
        assert [step(x).full_tensor()[0].item() for _ in range(20)] == [1.0] * 20
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [3.0] * 8
    assert len(step.programs) == 2


def test_a_program_draws_from_a_generator_of_the_program() -> None:
    generator = torch.Generator().manual_seed(5)
    step = captured(lambda x: x * torch.rand((), generator=generator))
    x = on_mesh(torch.ones(4))
    found = [step(x).full_tensor()[0].item() for _ in range(5)]
    assert len(step.programs) == 1
    again = torch.Generator().manual_seed(5)
    assert found == [torch.rand((), generator=again).item() for _ in range(5)]


def test_a_refused_call_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(5)
    step = captured(lambda x: x * torch.rand((), generator=generator).item())
    before = generator.get_state()
    for _ in range(3):
        with pytest.raises(UnsupportedError, match="the value of a tensor is read"):
            step(on_mesh(torch.ones(4)))
        assert torch.equal(generator.get_state(), before)


def test_which_code_belongs_to_the_program() -> None:
    """Packages whose names begin like torch's, and those installed in the folder of the standard library."""
    torch_folder, standard = Path(torch.__file__).parent, Path(os.__file__).parent
    assert not is_program_code(str(torch_folder / "nn" / "functional.py"))
    assert is_program_code(f"{torch_folder}vision/ops.py")
    assert not is_program_code(str(standard / "contextlib.py"))
    assert is_program_code(str(standard / "site-packages" / "transformers" / "__init__.py"))
    assert is_program_code(str(standard / "dist-packages" / "transformers" / "__init__.py"))
    assert not is_program_code(str(Path(np.__file__).parent / "_core" / "numeric.py"))


def test_other_threads_are_not_recorded() -> None:
    weight = nn.Parameter(on_mesh(torch.ones(4, 4), sw.Shard(0)))
    other = nn.Parameter(torch.ones(4))
    optimizer, others = torch.optim.SGD([weight], lr=0.5), torch.optim.SGD([other], lr=0.5)
    done, taken = threading.Event(), [0]

    def elsewhere() -> None:
        while not done.is_set():
            other.grad = torch.ones(4)
            others.step()
            taken[0] += 1

    def function(x: Any) -> Any:
        (x @ weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return weight.detach().clone()

    x = on_mesh(torch.ones(2, 4))
    steps = [captured(function) for _ in range(4)]
    thread = threading.Thread(target=elsewhere)
    thread.start()
    try:
        for step in steps:
            for _ in range(4):
                step(x)
    finally:
        done.set()
        thread.join()
    assert taken[0] > 0
    assert all(len(step.programs) == 1 and step.source().count("sgd_step") == 1 for step in steps)
    assert torch.equal(weight.full_tensor(), torch.full((4, 4), 1.0 - 16 * 0.5 * 2))
    assert torch.equal(other.detach(), torch.full((4,), 1.0 - taken[0] * 0.5))
