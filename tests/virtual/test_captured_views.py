"""Results that are views: writes to them, and to what they are views of, show as after an eager call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import UnsupportedError


def given(call: int, **options: Any) -> Any:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = torch.arange(24.0).reshape(4, 6) + call
    return sw.distribute_tensor(x, mesh, [sw.Shard(0)]).requires_grad_(options.get("requires_grad", False))


def values(*tensors: Any) -> list[Any]:
    return [tensor.detach().full_tensor().tolist() for tensor in tensors]


def doubled(x: Any) -> tuple[Any, ...]:
    y = x * 2
    return y, y[1:3]


def two_of_one(x: Any) -> tuple[Any, ...]:
    y = x * 2
    return y[0:2], y[1:3]


def written_before(x: Any) -> tuple[Any, ...]:
    part = x[1:3]
    x.add_(1)
    return (part,)


def several(x: Any) -> tuple[Any, ...]:
    return (x * 2).chunk(2)


def detached(x: Any) -> tuple[Any, ...]:
    weight = torch.ones(6, requires_grad=True)
    first, second = (x * sw.distribute_tensor(weight, x.device_mesh, [sw.Replicate()])).chunk(2)
    return first.detach(), second.detach(), first.detach()


RETURNED: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "of an argument": lambda x: (x[1:3],),
    "of an argument, by a number": lambda x: (x[1],),
    "with its base": doubled,
    "two of one tensor": two_of_one,
    "of an argument that is written to": written_before,
    "without its base": several,
    "without its graph": detached,
}


@pytest.mark.parametrize("name", RETURNED)
def test_writes_to_views_and_to_their_bases(name: str) -> None:
    """Views of some rows of a sharded tensor share no memory with it."""
    function = RETURNED[name]
    step, ran = sw.captured(function), 0
    for call in range(4):
        outcomes = []
        for run in (function, step):
            x, count = given(call), len(step.programs)
            results = run(x)
            ran += run is step and len(step.programs) == count > 0
            found = [values(x, *results)]
            for tensor in (x, *results):
                tensor.mul_(0.5).add_(1)
                found.append(values(x, *results))
            outcomes.append(found)
        assert outcomes[0] == outcomes[1]
    assert ran == 2


@pytest.mark.parametrize("function", [lambda x: x.detach()[1:3], lambda x: x[1:3][0:1], lambda x: (x[1:3], x.t())])
def test_a_view_of_another_view_is_refused(function: Callable[[Any], Any]) -> None:
    step = sw.captured(function)
    step(given(0))
    x = given(1)
    with pytest.raises(UnsupportedError, match="shares no memory with its base"):
        step(x)
    assert torch.equal(x.full_tensor(), given(1).full_tensor())


def test_a_result_that_backward_has_passed_can_be_written_to() -> None:
    def function(x: Any) -> Any:
        y = x * 2
        y.sum().backward()
        return y

    step = sw.captured(function)
    for call in range(4):
        y = step(given(call, requires_grad=True))
        with torch.no_grad():
            y.detach().add_(1)
        assert y.grad_fn is not None
        assert torch.equal(y.detach().full_tensor(), 2 * given(call).full_tensor() + 1)


class Cache:
    """A tensor that is kept from call to call."""

    kept: Any


def test_inference_tensors_that_are_kept() -> None:
    """A call in inference mode writes to them; a function that enters the mode itself is refused."""
    cache = Cache()

    def function(x: Any) -> Any:
        with torch.inference_mode():
            cache.kept.add_(x)
            return cache.kept * 2

    with torch.inference_mode():
        cache.kept = given(0)
        step = sw.captured(function)
        found = [step(given(1)).full_tensor()[0, 0].item() for _ in range(4)]
        assert found == [2.0, 4.0, 6.0, 8.0]
        assert len(step.programs) == 1
    before = cache.kept.full_tensor()
    with pytest.raises(UnsupportedError, match=r"inside torch.inference_mode"):
        step(given(1))
    assert torch.equal(cache.kept.full_tensor(), before)


def test_inference_tensors_that_are_read() -> None:
    cache = Cache()
    with torch.inference_mode():
        cache.kept = given(0)

    def function(x: Any) -> Any:
        with torch.inference_mode():
            return cache.kept + x

    step = sw.captured(function)
    for call in range(4):
        assert torch.equal(step(given(call)).full_tensor(), given(0).full_tensor() + given(call).full_tensor())
    assert len(step.programs) == 1


def test_an_expanded_tensor_that_is_kept() -> None:
    cache = Cache()
    cache.kept = torch.arange(6.0).expand(4, 6)

    def function(x: Any) -> Any:
        cache.kept = (x.full_tensor()[0] * 2).expand(4, 6)
        return cache.kept + 1

    step = sw.captured(function)
    for call in range(4):
        wanted = (given(call).full_tensor()[0] * 2).expand(4, 6)
        assert torch.equal(step(given(call)), wanted + 1)
        assert torch.equal(cache.kept, wanted)
        assert cache.kept.stride() == wanted.stride()
    assert len(step.programs) == 1


def test_numbers_that_become_tensors_in_inference_mode() -> None:
    def function(x: Any) -> Any:
        return x.full_tensor().index_select(1, torch.tensor([1, 0]))

    step = sw.captured(function)
    with torch.inference_mode():
        for call in range(4):
            assert torch.equal(step(given(call)), given(call).full_tensor()[:, [1, 0]])
    assert len(step.programs) == 1


def test_results_are_inference_tensors_where_they_are_in_eager() -> None:
    def function(x: Any) -> Any:
        with torch.inference_mode():
            return x * 2, x.t()

    step = sw.captured(function)
    for call in range(4):
        for ambient in (False, True):
            with torch.inference_mode(ambient):
                x = given(call)
                found, wanted = step(x), function(x)
                assert [t.is_inference() for t in found] == [t.is_inference() for t in wanted]
