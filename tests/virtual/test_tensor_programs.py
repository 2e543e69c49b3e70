"""Short programs that were once other than one device's, each beside plain torch, in float64."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise as sw

R, S0, S1 = sw.Replicate(), sw.Shard(0), sw.Shard(1)


@pytest.fixture
def line() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (3,))


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------- views

SIZES: list[Any] = [(4, 4, 4), (0, 7, 5), (5, 5, 2), (8, 0, 4), (0, 12, 0)]
DEALT = [
    sw.Ragged(0, (4, 4, 4, 0, 0, 0), blocks=(0, 3, 1, 4, 2, 5)),
    sw.Ragged(0, (2, 4, 2, 0, 2, 2), (0, 3, 2, 1, 4, 5)),
]


@pytest.mark.parametrize("placement", [*(sw.Ragged(0, sizes) for sizes in SIZES), *DEALT, sw.Owned(1)], ids=str)
def test_views_that_split_a_dim_of_given_sizes(placement: sw.Placement, line: sw.DeviceMesh) -> None:
    """Ranks whose given parts are not those of any split after the view exchange them; equal parts are no exception."""
    x = values(12)
    for shape in ((2, 6), (6, 2), (3, 4), (4, 3), (2, 2, 3), (2, 3, 2), (1, 12), (12, 1), (2, 1, 6)):
        given = sw.distribute_tensor(x, line, [placement]).requires_grad_()
        viewed = given.view(shape)
        torch.testing.assert_close(viewed.full_tensor(), x.view(shape))
        (viewed * torch.arange(12.0, dtype=torch.float64).view(shape)).sum().backward()
        torch.testing.assert_close(given.grad.full_tensor(), torch.arange(12.0, dtype=torch.float64))


# ---------------------------------------------------------------- functions that torch traces

LINEARIZED = {
    "sin": lambda x, y: x.sin() * y,
    "matmul": lambda x, y: (x @ y.t()).tanh(),
    "softmax": lambda x, y: (x * y).softmax(0).logsumexp(1),
    "cat": lambda x, y: torch.cat([x, y, x.cos()]),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("name", LINEARIZED)
@pytest.mark.parametrize("layouts", list(itertools.product((S0, S1, R), (S0, S1))), ids=str)
def test_functions_linearized_and_traced(name: str, layouts: Any, line: sw.DeviceMesh) -> None:
    """Tensors of the trace meet DTensors from outside of it: those are constants of the graph, and not the others."""
    x, y, tangent = values(4, 5), values(4, 5).flip(0), values(4, 5).flip(1)
    function = LINEARIZED[name]
    expected, expected_jvp = torch.func.linearize(lambda x: function(x, y), x)
    one, two, step = (sw.distribute_tensor(t, line, [p]) for t, p in ((x, layouts[0]), (y, layouts[1]), (tangent, S1)))
    result, jvp = torch.func.linearize(lambda x: function(x, two), one)
    torch.testing.assert_close(result.full_tensor(), expected)
    torch.testing.assert_close(jvp(step).full_tensor(), expected_jvp(tangent))
    torch.testing.assert_close(jvp(one).full_tensor(), expected_jvp(x))  # another tangent, in another layout
    graph = make_fx(lambda x: function(x, two))(one)
    torch.testing.assert_close(graph(step).full_tensor(), function(tangent, y))


# ---------------------------------------------------------------- leaves made of results

CONSTANT_ALONG_A_DIM = {
    "row": lambda x: x[:1].expand(6, 5) * 2,
    "sums": lambda x: x.sum(1, keepdim=True).expand(6, 5).exp(),
    "number": lambda x: x.mean().expand(4, 4) + 1,
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("name", CONSTANT_ALONG_A_DIM)
def test_parameters_made_of_results_that_are_stored_once(name: str, requires_grad: bool, line: sw.DeviceMesh) -> None:
    """A parameter shares the memory of its tensor, so writes to one are seen by the other and by its views."""
    x = values(6, 5)
    seen: list[list[torch.Tensor]] = []
    for tensor in (x, sw.distribute_tensor(x, line, [S0])):
        base = CONSTANT_ALONG_A_DIM[name](tensor)
        row = base[0]
        parameter = torch.nn.Parameter(base, requires_grad=requires_grad)
        assert isinstance(parameter, torch.nn.Parameter)
        if requires_grad:
            parameter.square().sum().backward()
        with torch.no_grad():
            parameter[1:] *= 3
        base[0, 0] = 5
        seen.append([parameter.detach(), base, row, parameter.grad if requires_grad else parameter])
    for expected, given in zip(*seen, strict=True):
        torch.testing.assert_close(given.full_tensor(), expected)  # pyright: ignore[reportAttributeAccessIssue]


# ---------------------------------------------------------------- writes to `data`, which torch counts separately

WRITES_TO_DATA = """
v = z[1:3]; a = v * 1; z.data.mul_(2); r = v, v * 1, z
v = z[1:3]; a = v * 1; z.data[1] = 5; r = v, v * 1, z
u = z.data; v = u[1:3]; a = v * 1; z.mul_(2); r = v, v * 1, z, u
v = z[1:3]; v.data.mul_(2); r = v, z
v = z.view(2, 10); w = z.t()[1]; v.data.mul_(2); r = v, w, z
v = z.data[1:3]; w = z[:, 1]; v.mul_(2); r = v, w, z
u = z.data; a = u * u; z.mul_(2); r = u * u, z * z
u = z.data; a = z * z; u.mul_(2); r = u * u, z * z, z.sum(), u.sum()
a = z.exp(); z.data[0, 0] = 3; r = z.exp(), z.max(), z.sum(0)
v = z.diagonal(); z.data.zero_(); r = v,
a, b = z.chunk(2); z.data.zero_(); r = a, b
v = z[::2].t(); z.data.fill_(3); r = v,
v = z[1:3]; z.detach().data.data.mul_(2); r = v,
v = z[1:3].data; z.data.mul_(2); r = v,
v = z[0].expand(3, 5); z.data.mul_(2); r = v,
v = z[1:3]; r = v,; z.data.mul_(2); z.data.add_(1); a = v * 1; z.data.add_(1); r = v * 1, a
a = z.exp(); u = inferred(lambda: z.data); u.mul_(2); z.add_(1); r = z.exp(), z, u
v = z[1:3]; u = inferred(lambda: z.data); u.mul_(2); z.add_(1); r = v, z, u
a = z.exp(); inferred(lambda: z.data.mul_(2)); b = z.exp(); z.add_(1); r = b, z.exp(), z
""".strip().splitlines()

OTHER_ALIASES = """
v = z[1:3]; w = copy.copy(z); w.mul_(2); r = v, z, w
v = z[1:3]; w = copy.copy(v); w.mul_(2); r = v, z, w
v = z[1:3]; torch._foreach_add_([z, v], 2.0); r = v, z
v = z[1:3]; w = z[2:]; torch._foreach_mul_([v, w, z[:, 1:]], [2.0, 3.0, 4.0]); r = v, z, w
v = z.view(torch.int64)[1:3]; z.mul_(2); r = v, z
v = z[1:3]; u = v.detach(); u.mul_(2); z.add_(1); r = u, v, z
""".strip().splitlines()


def inferred(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return function()


@pytest.mark.parametrize("program", [*WRITES_TO_DATA, *OTHER_ALIASES])
def test_writes_reach_copies(program: str) -> None:
    """Views that had to be copied, and reductions that are remembered, are computed again after a write."""
    for shape, placements in (
        ((3,), [S0]), ((3,), [S1]), ((3,), [sw.Zigzag(0)]), ((3,), [sw.Owned(1)]), ((3,), [sw.Partial()]),
        ((3,), [sw.Partial("max")]), ((2, 2), [S1, sw.Partial("avg")]), ((2, 2), [sw.Owned(1), sw.Ragged(1, (4, 1))]),
    ):  # fmt: skip
        x, mesh = values(4, 5), sw.init_device_mesh("cpu", shape)
        results: list[tuple[torch.Tensor, ...]] = []
        for given in (x.clone(), sw.distribute_tensor(x, mesh, placements)):
            names: dict[str, Any] = {"z": given, "copy": copy, "torch": torch, "inferred": inferred}
            exec(program, names)
            results.append(names["r"])
        for expected, result in zip(*results, strict=True):
            torch.testing.assert_close(result.full_tensor(), expected)  # pyright: ignore[reportAttributeAccessIssue]


def test_writes_to_data_are_not_counted_by_autograd(line: sw.DeviceMesh) -> None:
    x = sw.distribute_tensor(values(4, 5), line, [S0]).requires_grad_()
    loss = x.square().sum()
    x.data.mul_(2)
    assert x._version == 0
    loss.backward()
    torch.testing.assert_close(x.grad.full_tensor(), 4 * values(4, 5))  # as on one device: of what it is now


@pytest.mark.parametrize("change", ["z.t_()", "z.data = y * 2", "z.set_(y)", "z.transpose_(0, 1)"])
def test_views_of_a_tensor_that_became_another(change: str, line: sw.DeviceMesh) -> None:
    """A view that was copied does not take the values of what its base is now; it is refused once it is out of date."""
    x = values(5, 5)
    z, y = (sw.distribute_tensor(t, line, [S0]) for t in (x, x + 1))
    view = z[1:3]
    exec(change, {"z": z, "y": y})
    z.mul_(2)
    with pytest.raises(sw.UnsupportedError, match="other memory or another shape"):
        view.full_tensor()
    with pytest.raises(sw.UnsupportedError, match="other memory or another shape"):
        view.mul_(2)
    torch.testing.assert_close(z[1:3].full_tensor(), z.full_tensor()[1:3])


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("operator", ["add_", "mul_", "sub_"])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.complex128), (torch.int64, torch.float64)], ids=str)
def test_results_that_a_tensor_cannot_hold(dtypes: Any, operator: str, line: sw.DeviceMesh) -> None:
    """What torch refuses in place is refused in every layout, and nothing is written."""
    x, y = (torch.arange(20).view(4, 5).to(dtype) for dtype in dtypes)
    with pytest.raises(RuntimeError, match="can't be cast"):
        getattr(x.clone(), operator)(y)
    other = sw.distribute_tensor(y, line, [S1])
    row = sw.distribute_tensor(x[:1], line, [R])
    for given in (
        *(sw.distribute_tensor(x, line, [p]) for p in (S0, R, sw.Partial(), sw.Partial("max"))),
        row.expand(4, 5) * 1,
    ):
        before = given.full_tensor().clone()
        with pytest.raises(RuntimeError, match=r"can't be cast|Promotion"):
            getattr(given, operator)(other)
        assert torch.equal(given.full_tensor(), before)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", ["view_as", "reshape_as"])
def test_writes_to_views_in_the_size_of_another_tensor(name: str, mode: Any) -> None:
    """In inference mode these are operators of their own, with a DTensor as second argument."""
    mesh = sw.init_device_mesh("cpu", (2,))
    with mode():
        plain, size = torch.arange(8.0), torch.zeros(2, 4)
        base = sw.distribute_tensor(plain, mesh, [sw.Shard(0)])
        wanted = getattr(plain, name)(size)
        view = getattr(base, name)(sw.distribute_tensor(size, mesh, [sw.Shard(0)]))
        for each in (wanted, view):
            each[0, 0] = 9
            each[1] += 1
        assert torch.equal(base.full_tensor(), plain)
        for each in (plain, base):
            each.mul_(2)
        assert torch.equal(view.full_tensor(), wanted)


VIEWS_OR_COPIES: dict[str, Callable[[Any], Any]] = {
    "to": lambda x: x.to(torch.float32),
    "to the same": lambda x: x.to(torch.float64),
    "to a copy": lambda x: x.to(torch.float64, copy=True),
    "type_as": lambda x: x.type_as(torch.zeros(1)),
    "contiguous": lambda x: x.contiguous(),
    "contiguous of a view": lambda x: x.t().contiguous(),
    "reshape": lambda x: x.reshape(-1),
    "reshape of a view": lambda x: x.t().reshape(-1),
    "reshape_as": lambda x: x.reshape_as(x),
    "flatten of a view": lambda x: x.t().flatten(),
    "ravel of a view": lambda x: x.t().ravel(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "view_as": lambda x: x.view_as(x),
    "unflatten": lambda x: x.unflatten(0, (2, 2)),
    "movedim": lambda x: x.movedim(0, 1),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "chunk": lambda x: x.chunk(2, 1)[0],
    "tensor_split": lambda x: x.tensor_split(2)[0],
    "broadcast_to": lambda x: x.broadcast_to(1, *x.shape),
    "positive": lambda x: +x,
    "conj": lambda x: x.conj(),
    "as_strided_copy": lambda x: torch.as_strided_copy(x, (2, 2, 2), (1, 1, 1)),
    "repeat_interleave": lambda x: x[0, 0].repeat_interleave(2),
    "pixel_shuffle": lambda x: torch.pixel_shuffle(x.unsqueeze(0), 1),
    "rows stored once": lambda x: x[:1].expand(2, 4).clone().view(8),
    "dropout in eval": lambda x: torch.dropout(x, 0.5, False),
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_writes_reach_views_and_not_copies(shape: tuple[int, ...], mode: Any) -> None:
    """In inference mode operators that may copy come to DTensors as one, and were taken for views."""
    mesh = sw.init_device_mesh("cpu", shape)
    for placements, (name, function), of_a_view in itertools.product(
        ([sw.Shard(0), sw.Shard(1)], [sw.Shard(1), sw.Shard(0)]), VIEWS_OR_COPIES.items(), (False, True)
    ):
        with mode():
            plain = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)
            found: list[list[torch.Tensor]] = []
            for base in (plain.clone(), sw.distribute_tensor(plain, mesh, placements[: len(shape)])):
                torch.manual_seed(0)
                result = function(base.view(16).view(4, 4) if of_a_view else base)
                result.mul_(0.5).add_(1)
                base.add_(100)
                found.append([each.full_tensor() if isinstance(each, sw.DTensor) else each for each in (base, result)])
            for wanted, given in zip(*found, strict=True):
                assert torch.equal(wanted, given), (name, placements, of_a_view)
