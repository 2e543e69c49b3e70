"""Broadcast dims: a tensor that is constant along a dim is stored once; only its memory shows that."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw

MESHES = ((4,), (3,), (2, 2))


class Both:
    """The same program on plain tensors and on DTensors."""

    def __init__(self, mesh: sw.DeviceMesh | None) -> None:
        self.mesh = mesh
        self.generator = torch.Generator().manual_seed(0)

    def tensor(self, *shape: int, dim: int | None = None, partial: bool = False) -> Any:
        """A leaf, sharded along `dim` over the first axis of the mesh, or a sum over the last."""
        value = torch.randn(shape, dtype=torch.float64, generator=self.generator)
        if self.mesh is None:
            return value.requires_grad_()
        placements: list[Any] = [sw.Replicate()] * self.mesh.ndim
        if dim is not None:
            placements[0] = sw.Shard(dim)
        if partial:
            placements[-1] = sw.Partial()
        return sw.distribute_tensor(value, self.mesh, placements).requires_grad_()


def plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    return value.full_tensor().detach().clone() if isinstance(value, sw.DTensor) else value.detach().clone()


def agree(program: Callable[[Both], Any], shape: tuple[int, ...]) -> None:
    expected = plain(program(Both(None)))
    got = plain(program(Both(sw.init_device_mesh("cpu", shape))))
    torch.testing.assert_close(got, expected)


def lazy(both: Both, rows: int = 8) -> Any:
    """A tensor that is constant along dim 0, which one device stores."""
    with torch.no_grad():
        made = both.tensor(4).expand(rows, 4) * 2
    assert both.mesh is None or made.spec.is_lazy
    return made


# ---------------------------------------------------------------- writes and views


def view_sees_write(b: Both) -> Any:
    y = lazy(b)
    row, flat, turned = y[3], y.view(-1), y.t()
    y.add_(1)
    return y, row, flat, turned


def write_to_view(b: Both) -> Any:
    y = lazy(b)
    row, pairs = y[3], y.view(4, 2, 4)
    row.mul_(3)
    pairs[1].zero_()
    y[5] = 7
    return y, row, pairs


def write_of_sharded(b: Both) -> Any:
    y, x = lazy(b), b.tensor(8, 4, dim=0).detach()
    row = y[7]
    y.add_(x)
    y.add_(x)
    y[2:5] = x[1:4]
    return y, row, x


def view_of_view(b: Both) -> Any:
    y = lazy(b)
    outer = y.view(2, 4, 4)
    inner = outer[1]
    outer.mul_(2)
    inner[0].add_(1)
    y.sub_(1)
    return y, outer, inner


def detached(b: Both) -> Any:
    y = lazy(b)
    other, alias = y.detach(), y.view_as(y)
    other.add_(1)
    alias.mul_(2)
    return y, other, alias


def reshaping(b: Both) -> Any:
    y = lazy(b)
    y.t_()
    y.unsqueeze_(0)
    y.add_(1)
    y.squeeze_(0)
    return y


def overwriting(b: Both) -> Any:
    x = b.tensor(8, 4, dim=0).detach()
    made = []
    for write in (
        lambda y: y.copy_(x),
        lambda y: y.zero_(),
        lambda y: y.fill_(3),
        lambda y: y.masked_fill_(x > 0, 1),
        lambda y: y.clamp_(max=0.5),
        lambda y: y.index_fill_(0, constant(b, torch.tensor([1, 3])), 9.0),
        lambda y: y.mul_(x[0]),
        lambda y: y.addcmul_(x, x),
        lambda y: y.cumsum_(0),
        lambda y: y.tril_(),
        lambda y: torch.add(x, 1, out=y),
        lambda y: torch._foreach_add_([y, y], 1.0),
        lambda y: y.data.add_(1),
    ):  # fmt: skip
        y = lazy(b)
        row = y[2]
        write(y)
        made += [y, row]
    return made


def random_in_place(b: Both) -> Any:
    torch.manual_seed(3)
    y = lazy(b)
    row = y[1]
    y.normal_()
    z = lazy(b)
    z.bernoulli_(0.5)
    return y, row, z, F.dropout(lazy(b), 0.5), torch.rand_like(lazy(b)), torch.bernoulli(lazy(b).sigmoid())


def copies(b: Both) -> Any:
    y = lazy(b)
    deep, cloned = copy.deepcopy(y), y.clone()
    stream = io.BytesIO()
    torch.save(y, stream)
    stream.seek(0)
    loaded = torch.load(stream)
    for one in (deep, cloned, loaded):
        one[2] = 5
    return y, deep, cloned, loaded


# ---------------------------------------------------------------- operators


def operators(b: Both) -> Any:
    y, x, w = lazy(b), b.tensor(8, 4, dim=0).detach(), b.tensor(4, 5).detach()
    index, kernel = constant(b, torch.tensor([1, 0, 5])), constant(b, torch.ones(1, 8, 3, dtype=torch.float64))
    return [
        y + x, y * y, -y, y @ w, y.t() @ x, x.t() @ y, y.sum(), y.sum(0), y.sum(1), y.mean(0), y.prod(0), y.amax(0),
        y.var(0), y.softmax(0), y.softmax(1), y.log_softmax(0), y.cumsum(0), y.cumsum(1), y.sort(0).values,
        y.topk(2, 0).values, y.argmax(0), y.flip(0), y.roll(1, 0), y.tril(), y.triu(1), y.unfold(0, 3, 2),
        y.norm(dim=0), y.logsumexp(0), torch.cat([y, x]), torch.cat([y, x], 1), torch.cat([y, y]),
        torch.cat([y, y], 1), torch.stack([y, x]), torch.stack([y, y], 1), torch.where(x > 0, y, x),
        torch.where(y > 0, y, -y), y.masked_fill(x > 0, 1.0), y.repeat(2, 1), y.reshape(-1), y.reshape(2, 16), y[::2],
        y[1:5, 2], y[-1], y.unbind(0)[2], y.split(3)[2], y.chunk(2, 1)[1], y.diagonal(), y.diag_embed()[0],
        y.expand(3, 8, 4), F.layer_norm(y, (4,)), F.layer_norm(y, (8, 4)), F.pad(y, (1, 1)), F.conv1d(y[None], kernel),
        y.view(2, 4, 4).sum(0), y.view(2, 16), y.view(4, 8), y.view(16, 2),
        y.reshape(2, 2, 2, 4), y[None].expand(3, 8, 4).reshape(24, 4), y[None].expand(3, 8, 4).reshape(6, 16),
        y.t().reshape(2, 16), y.view(2, 4, 4).permute(2, 0, 1), y.t().contiguous().view(-1), y.to(torch.float32),
        y.abs().max(0).values, torch.einsum("bi,bj->bij", y, x), torch.einsum("bi,bi->b", y, x), torch.cdist(y, x),
        y.std(), y.nansum(), (y > 0).any(0), y.bool().sum(0), y.int().sum(0), torch.addmm(y[:, :3], y, w[:, :3]),
        y.index_select(0, index), y.gather(0, index[:, None].expand(3, 4)), y[index], y.median(0).values,
        y.renorm(2, 0, 1.0), torch.outer(y[:, 0], y[0]),
    ]  # fmt: skip


def constant(b: Both, value: torch.Tensor) -> Any:
    return value if b.mesh is None else sw.distribute_tensor(value, b.mesh, [sw.Replicate()] * b.mesh.ndim)


def sums_of_ranks(b: Both) -> Any:
    with torch.no_grad():
        y = b.tensor(4, partial=True).expand(8, 4) * 2
        x = b.tensor(8, 4, dim=0).detach()
        scalar = b.tensor(partial=True).expand(8, 4) / 3
        return (
            y + x,
            y * x,
            y.sum(0),
            y.exp(),
            scalar + x,
            scalar + scalar,
            scalar.view(-1)[3],
            y.add_(x),
            scalar.add_(1),
        )


# ---------------------------------------------------------------- gradients


def backward(*formulas: Callable[..., Any]) -> Callable[[Both], Any]:
    def program(b: Both) -> Any:
        found = []
        for formula in formulas:
            x, y = b.tensor(8, 4, dim=0), b.tensor(8, 4, dim=0)
            formula(x, y).backward()
            found += [leaf.grad for leaf in (x, y) if leaf.grad is not None]
        return found

    return program


def _picked(x: Any, like: Any) -> Any:
    """Rows of a tensor by index, in three ways."""
    index = torch.tensor([5, 0, 5])
    if isinstance(like, sw.DTensor):
        index = sw.distribute_tensor(index, like.device_mesh, [sw.Replicate()] * like.device_mesh.ndim)
    return x.index_select(0, index) + x[index] + x.gather(0, index[:, None].expand(3, 4))


GRADIENTS = backward(
    lambda x, y: x.mean(),
    lambda x, y: x.sum(),
    lambda x, y: ((x - y) ** 2).mean(),
    lambda x, y: (x - x.mean()).square().sum(),
    lambda x, y: (x - x.mean(0)).square().sum(),
    lambda x, y: (x - x.mean(1, keepdim=True)).square().mean(),
    lambda x, y: torch.cat([x, y]).mean(),
    lambda x, y: torch.cat([x, y], 1).mean(),
    lambda x, y: torch.stack([x, y]).mean() + x[0].sum() + y[:, 1:].mean() + x[::2].sum(),
    lambda x, y: (x * y)[0].square().sum() + (x * y)[-2].sum() + (x * y)[:, 1].mean() + (x + y)[3:5].mean(),
    lambda x, y: (x * y)[1:].square().mean() + (x + y)[::3].sum() + (x * 2)[-3:].sum() + (x * y)[2:7:2].mean(),
    lambda x, y: x[5].square().sum() + (x.t() * 1)[1].sum() + (x.t() * 1)[:, 2:4].sum() + x.view(4, 2, 4)[1].sum(),
    lambda x, y: (torch.stack([x, y]).unbind(0)[1] * 2).sum() + sum(part.sum() for part in x.unbind(1)[:2]),
    lambda x, y: x.view(4, 2, 4).tril().sum() + torch.fft.rfft(x).abs().square().sum() + x.diagonal().sum(),
    lambda x, y: _picked(x, x).sum() + _picked(y, x).sum() + _picked(x * y, x).square().sum(),
    lambda x, y: x.cumsum(0).mean() + x.flatten().sum() + x.t().mean(),
    lambda x, y: torch.where(x > y, x, y).mean() + x.masked_fill(y > 0, 0.0).sum(),
    lambda x, y: x.view(4, 2, 4).sum(0).mean() + x.view(-1).sum() + x.view(2, 4, 4).mean(1).sum(),
    lambda x, y: (x.mean(0) * x.mean(0)).sum() + x.expand(3, 8, 4).mean(),
    lambda x, y: x.max(0).values.sum() + x.sort(1).values.mean() + x.gather(1, (y > 0).long()).mean(),
    lambda x, y: F.layer_norm(x, (4,)).mean() + x.softmax(0).mean() + x.logsumexp(0).sum() + x.var() + x.std(1).mean(),
    lambda x, y: (x.t() @ y).mean() + (x @ y.t()).mean() + torch.cdist(x, y).mean(),
    lambda x, y: sum(part.mean() for part in x.chunk(2, 1)) + sum(part.sum() for part in y.unbind(1)),
    lambda x, y: x.chunk(2, 1)[0].mean() + (x * 1).split([1, 3], 1)[1].mean() + y.unbind(0)[1].sum(),
    lambda x, y: x.split(3)[2].mean() + (x + y).split([2, 6])[0].square().mean(),
    lambda x, y: x.chunk(2, 1)[1].square().mean() + ((y * 1).chunk(2)[0] * y[:4]).mean() + (x * y).unbind(1)[0].mean(),
)


def written_views(b: Both) -> Any:
    """Autograd copies the gradient of what was written to a view of."""
    x, y = b.tensor(8, 4, dim=0), b.tensor(4)
    z = x * 1
    z[:, 3] = 0
    z[:, :2] *= 2
    z[2:5].mul_(3)
    z.t()[1].add_(y[0])
    z.view(4, 2, 4)[:, 1] = y
    z.mean().backward()
    (first,) = torch.autograd.grad((x * 1).t()[0].square_().mean(), [x], create_graph=True)
    first.square().sum().backward()
    return x.grad, y.grad


def accumulated(b: Both) -> Any:
    x = b.tensor(8, 4, dim=0)
    for _ in range(2):
        x.mean().backward()
        x.square().sum().backward()
        x.sum().backward()
    return x.grad


def hooks(b: Both) -> Any:
    x, kept = b.tensor(8, 4, dim=0), []
    x.register_hook(lambda grad: grad.mul_(2))
    x.register_hook(kept.append)
    middle = x * 1
    middle.retain_grad()
    middle.register_hook(lambda grad: grad.add(1))
    middle.mean().backward()
    middle.grad.add_(1)
    x.grad.sub_(1)
    return x.grad, middle.grad, kept


def asked_for(b: Both) -> Any:
    x, y = b.tensor(8, 4, dim=0), b.tensor(8, 4)
    first, second = torch.autograd.grad((x * 1).mean() + y.mean(), [x, y])
    row = first[0]
    first.mul_(3)
    second[1] = 0
    return first, second, row


def twice(b: Both) -> Any:
    x, y = b.tensor(8, 4, dim=0), b.tensor(8, 4, dim=0)
    (first,) = torch.autograd.grad((x * y).square().mean(), [x], create_graph=True)
    (first.square().sum() + (x - first.mean()).square().mean()).backward()
    return first, x.grad, y.grad


def stepped(b: Both) -> Any:
    x = b.tensor(8, 4, dim=0)
    optimizer = torch.optim.AdamW([x], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (x.mean() + (x - x.mean(0)).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_([x], 0.1)
        optimizer.step()
    return x


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize(
    "program",
    [
        view_sees_write, write_to_view, write_of_sharded, view_of_view, detached, reshaping, overwriting,
        random_in_place, copies, operators, sums_of_ranks, GRADIENTS, accumulated, hooks, asked_for, twice, stepped,
        written_views,
    ],
)  # fmt: skip
def test_as_on_one_device(program: Callable[[Both], Any], shape: tuple[int, ...]) -> None:
    agree(program, shape)


# ---------------------------------------------------------------- compiled; layouts


def test_compiled_programs_write_to_their_own_and_refuse_inputs() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    row = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Replicate()])

    def program(row: Any) -> Any:
        made = row.expand(8, 4) * 2
        first = made[0]
        made.add_(1)
        first.mul_(2)
        return made * 1

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(row).full_tensor(), program(torch.arange(4.0)))
    given = row.expand(8, 4) * 2
    with pytest.raises(Exception, match="stored once along a dim"):
        torch.compile(lambda y: y.add_(1), backend="aot_eager", fullgraph=True)(given)
    dense = given.redistribute(placements=given.placements)
    torch.compile(lambda y: y.add_(1), backend="aot_eager", fullgraph=True)(dense)
    assert torch.equal(dense.full_tensor(), given.full_tensor() + 1)


def test_gradients_of_leaves_lie_as_the_leaves_do() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    for placements in ([sw.Shard(0), sw.Shard(1)], [sw.Replicate(), sw.Shard(0)], [sw.Replicate()] * 2):
        x = sw.distribute_tensor(torch.ones(8, 4), mesh, placements).requires_grad_()
        for loss in (x.sum(), x.mean(), (x - x.mean()).square().sum(), x.sum(0).square().sum()):
            loss.backward()
            assert x.grad is not None
            assert x.grad.spec is x.spec


def test_nothing_is_stored_or_moved_along_a_broadcast_dim() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    with torch.no_grad():
        total = sw.distribute_tensor(torch.tensor(1.0), mesh, [sw.Partial()])
        made = (total.expand(1024, 64) / 7).unsqueeze(0).neg()
        x = sw.ones(1, 1024, 64, device_mesh=mesh, placements=[sw.Shard(1)])
        assert made.spec.broadcast == (1, 2)
        assert [part.untyped_storage().nbytes() for part in made._local_tensor.tensors] == [4] * 4
        with sw.debug.CommDebugMode() as comm:
            (x + made).mean()
    assert comm.get_total_counts() == 1
    route = sw.DTensorRedistributePlanner().plan(made.spec, x.spec)
    assert route.received <= 8, "one number is reduced"


@pytest.mark.parametrize("make", [lambda x: x.expand(6, 2) * 2, lambda x: x.expand(6, 2).clone()], ids=["mul", "clone"])
def test_a_view_of_a_constant_tensor_sees_a_later_write_to_it(make: Any) -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    column, values = (torch.arange(n, dtype=torch.float64).view(6, -1) for n in (6, 12))
    base = make(sw.distribute_tensor(column, mesh, [sw.Replicate()]))
    view = base.t()
    base.copy_(sw.distribute_tensor(values, mesh, [sw.Replicate()]))
    assert torch.equal(view.full_tensor(), values.t())
    assert torch.equal((view + 0).full_tensor(), values.t())


def test_a_hook_of_a_part_may_join_what_it_likes() -> None:
    rows = torch.full((3, 2), 5.0)

    def gradient(x: Any) -> Any:
        part, _ = x.split(4)
        part.register_hook(lambda grad: torch.cat([grad[:1], rows]))
        (part * 2).sum().backward()
        return x.grad

    mesh = sw.init_device_mesh("cpu", (4,))
    wanted = gradient(torch.ones(8, 2).requires_grad_())
    found = gradient(sw.ones(8, 2, device_mesh=mesh, placements=[sw.Shard(0)]).requires_grad_())
    torch.testing.assert_close(found.full_tensor(), wanted)
