"""Forwards on local tensors: which modules run on them, with layouts that the rules give, and numbers of one device."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import silu as activation
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.core.cache import BoundedCache
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from shardwise.parallel.tensor_parallel import forward_layouts as search
from shardwise.parallel.tensor_parallel.forward_layouts import forward_layouts
from shardwise.parallel.tensor_parallel.layer import layer_of

aten = torch.ops.aten
MESH = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
SCALE = [2.0]


class Norm(nn.Module):
    """A norm as models of other libraries write it. `mean` multiplies by the mean over the dim that is sharded."""

    def __init__(self, mean: Any = False) -> None:
        super().__init__()
        self.weight, self.eps, self.mean = nn.Parameter(torch.linspace(1, 2, 8)), 1e-5, mean

    def forward(self, x: Any) -> Any:
        wide = x.to(torch.float64)
        found = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return found.mean(1, keepdim=True) * found if self.mean is True else found


class Length(Norm):
    def forward(self, x: Any) -> Any:
        return x * self.weight / x.size(1)


class GlobalState(Norm):
    def forward(self, x: Any) -> Any:
        return x * self.weight * SCALE[0]


class Counting(Norm):
    def forward(self, x: Any) -> Any:
        self.eps = self.eps + 1
        return x * self.weight * self.eps


class Buffered(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Any) -> Any:
        return x * self.weight + self.shift


class Inherited(Norm):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 3


class Sliced(Norm):
    def forward(self, x: Any) -> Any:
        return x[:, :4] * self.weight


class Unpacked(Norm):
    def forward(self, x: Any) -> Any:
        first, second = x.chunk(2, 1)
        return (first + second) * self.weight


class Settings:
    mean = False


class Options(Norm):
    def forward(self, x: Any, settings: Any = Settings) -> Any:
        found = x * self.weight
        return found * found.mean(1, keepdim=True) if settings.mean else found


class Classes(Norm):
    def forward(self, x: Any) -> Any:
        return x * self.weight * 3 if isinstance(self.weight, nn.Parameter) else x * self.weight


class Attribute(Norm):
    def forward(self, x: Any) -> Any:
        return x * self.weight / x.__getattribute__("shape").__getitem__(1)


class Pieces(Norm):
    def forward(self, x: Any) -> Any:
        return torch.stack([part * self.weight for part in x], 0)


class Writes(Norm):
    def forward(self, x: Any) -> Any:
        found = x * self.weight
        found.transpose(0, 1).mul_(2)
        return found


class Helped(Norm):
    def helper(self, x: Any) -> Any:
        return x * 2

    def forward(self, x: Any) -> Any:
        return activation(self.helper(x)) * self.weight


class Functional(Norm):
    def forward(self, x: Any) -> Any:
        return F.silu(x) * self.weight


class ByDtype(nn.Linear):
    def forward(self, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = F.linear(x, self.weight)
        return found * 2 if found.dtype == torch.bfloat16 else found


class InPlace(Norm):
    def forward(self, x: Any) -> Any:
        x.mul_(2)
        return x * self.weight


def runs_on_locals(module: nn.Module) -> bool:
    layer: Any = layer_of(module)
    return any(layer.programs[key].program is not None for key in layer.programs)


def check(reference: nn.Module, module: Any, x: torch.Tensor, placement: Any) -> None:
    """Forward and backward are those of one device."""
    given, own = sw.distribute_tensor(x, MESH, [placement]).requires_grad_(), x.clone().requires_grad_()
    reference.zero_grad()
    module.zero_grad()
    result, expected = module(given), reference(own)
    result, weights = (result.full_tensor() if isinstance(result, sw.DTensor) else result), torch.randn_like(expected)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close((result * weights).sum(), (expected * weights).sum())
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(given.grad.full_tensor(), own.grad)  # pyright: ignore[reportOptionalMemberAccess]
    for (name, parameter), (_, one) in zip(module.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), one.grad, msg=name)


def parallel(module: nn.Module, style: Any = None) -> tuple[nn.Module, Any]:
    reference = copy.deepcopy(module)
    return reference, parallelize_module(module, MESH, style or SequenceParallel())


@pytest.mark.parametrize("sizes", [(3, 8), (2, 4), (3, 5), (1, 2)])
@pytest.mark.parametrize(
    "make", [Norm, lambda: nn.RMSNorm(8), lambda: nn.LayerNorm(8), lambda: nn.LayerNorm(8, bias=False)]
)
def test_a_norm_of_any_library_runs_on_locals(make: Any, sizes: tuple[int, int]) -> None:
    reference, module = parallel(make())
    for batch in (sizes, (sizes[0] + 1, sizes[1]), sizes):
        check(reference, module, torch.randn(*batch, 8), Shard(1))
    assert runs_on_locals(module) == (sizes[1] % 2 == 0)


def test_a_change_of_an_attribute_is_seen() -> None:
    reference, module = parallel(Norm())
    for eps, mean in [(1e-5, False), (3.0, 1), (1e-5, True), (1e-5, 1), (1e-5, False)]:  # 1 equals True
        reference.eps = module.eps = eps
        reference.mean = module.mean = mean
        check(reference, module, torch.randn(2, 8, 8), Shard(1))
        known = layer_of(module).programs  # pyright: ignore[reportOptionalMemberAccess]
        assert all((known[key].program is None) == (mean is True) for key in known)


@pytest.mark.parametrize(
    "make",
    [
        GlobalState,
        Counting,
        Buffered,
        Inherited,
        Length,
        lambda: Norm(True),
        Options,
        Classes,
        Attribute,
        Pieces,
        Writes,
    ],
)
def test_what_reads_more_than_its_input_and_constants_runs_on_dtensors(make: Any) -> None:
    reference, module = parallel(make())
    for factor in (2.0, 5.0):
        SCALE[0] = factor
        check(reference, module, torch.randn(2, 8, 8), Shard(1))
    assert not runs_on_locals(module)


def test_a_setting_of_a_default_argument_is_seen() -> None:
    reference, module = parallel(Options())
    for Settings.mean in (False, True, False):
        check(reference, module, torch.randn(2, 8, 8), Shard(1))


def times_mean(x: Any) -> Any:
    return x * x.mean(1, keepdim=True)


def replace_method(reference: Any, module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Helped, "helper", lambda self, x: times_mean(x))


def override_method(reference: Any, module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(module), "helper", lambda self, x: times_mean(x), raising=False)
    patch.setattr(type(reference), "helper", lambda self, x: times_mean(x), raising=False)


def shadow_method(reference: Any, module: Any, patch: pytest.MonkeyPatch) -> None:
    reference.helper = module.helper = times_mean


def replace_global(reference: Any, module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "activation", times_mean)


def shadow_builtin(reference: Any, module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "float", lambda text: 3.0)


class Derived(Helped):
    def forward(self, x: Any) -> Any:
        return activation(self.helper(x)) * self.weight * float("2")


@pytest.mark.parametrize("change", [replace_method, override_method, shadow_method, replace_global, shadow_builtin])
def test_a_new_meaning_of_a_name_is_seen(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, module = parallel(type("Own", (Derived,), {})())
    check(reference, module, torch.randn(2, 8, 8), Shard(1))
    assert runs_on_locals(module)
    change(reference, module, monkeypatch)
    check(reference, module, torch.randn(2, 8, 8), Shard(1))
    monkeypatch.undo()
    copied = copy.deepcopy(module)
    change(reference, copied, monkeypatch)
    check(reference, copied, torch.randn(2, 8, 8), Shard(1))


class OtherHelper(Derived):
    def helper(self, x: Any) -> Any:
        return x / x.size(1)


def test_a_class_has_methods_of_its_own() -> None:
    for make in (Derived, OtherHelper):
        reference, module = parallel(make())
        check(reference, module, torch.randn(2, 8, 8), Shard(1))
        assert runs_on_locals(module) == (make is Derived)


def test_autocast_changes_dtypes_inside() -> None:
    reference, module = parallel(ByDtype(8, 8, bias=False))
    check(reference, module, torch.ones(2, 8, 8), Shard(1))
    given = torch.ones(2, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = reference(given), module(sw.distribute_tensor(given, MESH, [Shard(1)]))
    torch.testing.assert_close(found.full_tensor() if isinstance(found, sw.DTensor) else found, expected)


def normalized(weight: Any) -> Any:
    return weight / weight.norm()


class ByProperty(nn.Linear):
    @property
    def weight(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return normalized(self._parameters["weight"])


class ByGetattr(nn.Linear):
    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return normalized(found) if name == "weight" else found


class ByGetattribute(nn.Linear):
    def __getattribute__(self, name: str) -> Any:
        if name != "weight":
            return super().__getattribute__(name)
        return normalized(self._parameters["weight"])


@pytest.mark.parametrize("kind", [ByProperty, ByGetattr, ByGetattribute])
def test_a_class_that_computes_its_parameters_runs_on_dtensors(kind: Any) -> None:
    style = ColwiseParallel(use_local_output=False)
    module: nn.Module = nn.Linear(8, 16)
    module.__class__ = kind
    reference, module = parallel(module, style)
    check(reference, module, torch.randn(2, 8), Replicate())
    assert not runs_on_locals(module)

    own: Any = type("Own", (nn.Linear,), {})  # and if its class changes later
    reference, module = parallel(own(8, 16), style)
    check(reference, module, torch.randn(2, 8), Replicate())
    assert runs_on_locals(module)
    own.__bases__ = (kind,)
    check(reference, module, torch.randn(2, 8), Replicate())


class Optional(nn.Linear):
    shift: Any

    def __init__(self) -> None:
        super().__init__(8, 8, bias=False)
        self.register_parameter("shift", None)

    def forward(self, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = F.linear(x, self.weight)
        return found if self.shift is None else found + self.shift


def test_a_parameter_that_was_none_is_seen() -> None:
    reference, module = parallel(Optional(), RowwiseParallel(input_layouts=Replicate(), use_local_output=False))
    check(reference, module, torch.randn(2, 8), Replicate())
    assert runs_on_locals(module)
    value = torch.randn(8)
    reference.shift = nn.Parameter(value)
    module.shift = nn.Parameter(sw.distribute_tensor(value, MESH, [Replicate()]))
    check(reference, module, torch.randn(2, 8), Replicate())
    other = parallelize_module(copy.deepcopy(reference), MESH, RowwiseParallel(input_layouts=Replicate()))
    other.shift = nn.Parameter(value)
    expected = reference(torch.ones(2, 8))
    torch.testing.assert_close(other(sw.distribute_tensor(torch.ones(2, 8), MESH, [Replicate()])), expected)


@pytest.mark.parametrize(("make", "name"), [(lambda: nn.LayerNorm(8), "layer_norm"), (Functional, "silu")])
def test_a_replaced_function_of_torch_is_seen(make: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, module = parallel(make())
    original = getattr(F, name)
    check(reference, module, torch.randn(2, 8, 8), Shard(1))
    assert runs_on_locals(module)
    monkeypatch.setattr(F, name, lambda *args: times_mean(original(*args)))
    check(reference, module, torch.randn(2, 8, 8), Shard(1))
    monkeypatch.undo()
    check(reference, module, torch.randn(2, 8, 8), Shard(1))
    assert runs_on_locals(module)


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * found.mean() if func in (F.linear, F.silu) else found


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * found.mean() if func in (aten.addmm.default, aten.silu.default) else found


@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode])
@pytest.mark.parametrize("before", [False, True])
def test_modes_get_dtensors(mode: Any, before: bool) -> None:
    """A mode that scales by a mean over all elements: of locals it would be another one."""
    for make, style, placement, x in (
        (lambda: nn.Linear(8, 16), ColwiseParallel(use_local_output=False), Replicate(), torch.randn(4, 8)),
        (Functional, SequenceParallel(), Shard(1), torch.randn(2, 8, 8)),
    ):
        reference, module = parallel(make(), style)
        if not before:
            check(reference, module, x, placement)
            assert runs_on_locals(module)
        with mode():
            expected, found = reference(x), module(sw.distribute_tensor(x, MESH, [placement]))
        torch.testing.assert_close(found.full_tensor(), expected)


def pre_hook(module: nn.Module) -> Any:
    return module.register_forward_pre_hook(lambda _, args: (times_mean(args[0]),))


def hook(module: nn.Module) -> Any:
    return module.register_forward_hook(lambda _, args, result: times_mean(result))


def backward_hook(module: nn.Module) -> Any:
    return module.register_full_backward_hook(lambda _, given, got: (times_mean(given[0]),))


def backward_pre_hook(module: nn.Module) -> Any:
    return module.register_full_backward_pre_hook(lambda _, got: (times_mean(got[0]),))


HOOKS = [pre_hook, hook, backward_hook, backward_pre_hook]


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("make", [Helped, lambda: nn.LayerNorm(8)])
def test_hooks_get_dtensors(make: Any, before: bool, register: Any) -> None:
    module = make()
    if before:
        register(module)
    reference, module = parallel(module)
    if not before:
        check(reference, module, torch.randn(2, 8, 8), Shard(1))
        register(reference)
        register(module)
    check(reference, module, torch.randn(2, 8, 8), Shard(1))


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_hooks_of_linear_layers_get_dtensors(style: Any, register: Any) -> None:
    own = style(input_layouts=Shard(1), output_layouts=Shard(1), use_local_output=False)
    reference, module = parallel(nn.Linear(8, 16), own)
    check(reference, module, torch.randn(2, 8, 8), Shard(1))
    assert runs_on_locals(module)
    handles = [register(reference), register(module)]
    check(reference, module, torch.randn(2, 8, 8), Shard(1))
    for handle in handles:
        handle.remove()
    check(reference, module, torch.randn(2, 8, 8), Shard(1))


@pytest.mark.parametrize(
    "register",
    [
        lambda: nn_module.register_module_forward_pre_hook(lambda _, args: (times_mean(args[0]),)),
        lambda: nn_module.register_module_forward_hook(lambda _, args, result: times_mean(result)),
        lambda: nn_module.register_module_full_backward_hook(lambda _, given, got: (times_mean(given[0]),)),
    ],
)
@pytest.mark.parametrize("make", [Helped, lambda: nn.LayerNorm(8)])
def test_hooks_of_all_modules_get_dtensors(make: Any, register: Any) -> None:
    reference, module = parallel(make())
    check(reference, module, torch.randn(2, 8, 8), Shard(1))
    handle = register()
    try:
        check(reference, module, torch.randn(2, 8, 8), Shard(1))
    finally:
        handle.remove()


@pytest.mark.parametrize("make", [Sliced, Unpacked])
def test_positions_and_sizes_are_global(make: Any) -> None:
    reference, module = parallel(make())
    for size in (4, 16, 4, 6, 8):  # four rows are all of them first, and later the first ones
        check(reference, module, torch.randn(2, size, 8), Shard(1))
    assert not runs_on_locals(module)


def test_a_write_to_the_input() -> None:
    reference, module = parallel(InPlace())
    x = torch.randn(2, 8, 8)
    with torch.no_grad():
        given, own = sw.distribute_tensor(x, MESH, [Shard(1)]), x.clone()
        torch.testing.assert_close(module(given).full_tensor(), reference(own))
        torch.testing.assert_close(given.full_tensor(), own)
    assert not runs_on_locals(module)


def test_a_forward_of_its_own_and_hooks_are_respected() -> None:
    reference, module = parallel(Norm())
    check(reference, module, torch.randn(2, 8, 8), Shard(1))
    seen: list[Any] = []
    handle = module.register_forward_pre_hook(lambda module, args: seen.append(type(args[0])))
    check(reference, module, torch.randn(2, 8, 8), Shard(1))
    handle.remove()
    assert seen == [sw.DTensor]
    for each in (reference, module):
        each.forward = lambda x, each=each: x * each.weight / x.shape[1]
    check(reference, module, torch.randn(2, 8, 8), Shard(1))


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"scale_grad_by_freq": True}])
def test_embeddings(style: Any, options: dict[str, Any]) -> None:
    reference, module = parallel(
        nn.Embedding(12, 8, **options), style(input_layouts=Replicate(), output_layouts=Replicate())
    )
    tokens = torch.randint(12, (3, 5))
    for _ in range(2):
        result, expected = module(tokens), reference(tokens)
        torch.testing.assert_close(result, expected)
        result.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        torch.testing.assert_close(module.weight.grad.full_tensor(), reference.weight.grad)  # pyright: ignore[reportAttributeAccessIssue]
    assert runs_on_locals(module) == (style is ColwiseParallel or not options)


def spec(shape: tuple[int, ...], placement: Any, dtype: torch.dtype = torch.float32) -> DTensorSpec:
    return DTensorSpec(MESH, (placement,), TensorMeta(shape, dtype=dtype))


@pytest.mark.parametrize(
    ("module", "operands", "needed", "gradients", "result"),
    [
        (nn.Linear(8, 16), [Shard(0), Shard(0), Replicate()], None, [Shard(0), Shard(0), Partial()], Shard(2)),
        (
            nn.Linear(8, 16),
            [Shard(1), Replicate(), Shard(2)],
            [Shard(1), Partial(), Shard(2)],
            [Shard(1), Replicate(), Shard(2)],
            Partial(),
        ),
        (nn.Linear(8, 16), [Replicate()] * 3, None, [Replicate()] * 3, Replicate()),
        (nn.Linear(8, 16), [Replicate(), Replicate(), Shard(0)], None, [Partial(), Partial(), Shard(0)], Shard(0)),
        (nn.LayerNorm(8), [Replicate(), Replicate(), Shard(1)], None, [Partial(), Partial(), Shard(1)], Shard(1)),
        (nn.Linear(8, 16, bias=False), [Shard(0), Replicate()], None, [Shard(0), Partial()], Shard(2)),
        (nn.Linear(8, 16, bias=False), [Shard(1), Shard(2)], None, [Shard(1), Shard(2)], Partial()),
        (nn.RMSNorm(8), [Replicate(), Shard(1)], None, [Partial(), Shard(1)], Shard(1)),
    ],
)
def test_layouts_come_from_the_rules(
    module: nn.Module, operands: Any, needed: Any, gradients: Any, result: Any
) -> None:
    names = [name for name, _ in module.named_parameters()]
    shapes = [tuple(parameter.shape) for parameter in module.parameters()] + [(4, 6, 8)]
    found: Any = forward_layouts(module, names, [spec(*each) for each in zip(shapes, operands, strict=True)])[1]
    assert [each.placements[0] for each in found.operands] == (needed or operands)
    assert [each.placements[0] for each in found.gradients] == gradients
    assert (found.result.placements, found.result.mesh) == ((result,), MESH)


@pytest.mark.parametrize("operands", [[Replicate(), Replicate(), Shard(2)], [Shard(0), Replicate(), Shard(1)]])
def test_what_would_communicate_has_no_layouts(operands: Any) -> None:
    names, shapes = ["weight", "bias"], [(8,), (8,), (4, 6, 8)]
    assert (
        forward_layouts(nn.LayerNorm(8), names, [spec(*each) for each in zip(shapes, operands, strict=True)])[1] is None
    )


def test_a_first_call_in_a_captured_function_finds_the_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for layouts computes gradients, which are none of the function that is recorded."""
    for cache in ("_known", "_known_of_any_size"):  # of earlier tests
        monkeypatch.setattr(search, cache, BoundedCache[Any, Any](8))
    layer = _colwise()
    sw.captured(lambda x: layer(x).detach())(torch.randn(3, 8))
    assert runs_on_locals(layer)


def test_a_layer_that_runs_on_locals_is_not_called_by_another_thread() -> None:
    """It has local tensors for parameters meanwhile, which the other call would take for its own."""
    layer, x = _colwise(), torch.randn(3, 8)
    wanted = layer(x)
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(layer(x))
        except sw.UnsupportedError as error:
            found.append(error)

    def pack(saved: torch.Tensor) -> torch.Tensor:  # torch calls it inside the forward
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        again = layer(x)
    assert found
    assert all("two threads call one Linear" in str(error) for error in found)
    torch.testing.assert_close(again.full_tensor(), wanted.full_tensor())
    assert isinstance(layer.weight, sw.DTensor)
    call()
    torch.testing.assert_close(found[-1].full_tensor(), wanted.full_tensor())


def test_a_layer_after_an_interrupt_has_its_own_parameters() -> None:
    """torch calls no hooks after a KeyboardInterrupt."""
    layer, x = _colwise(), torch.randn(3, 8)
    wanted = layer(x)

    def interrupt(saved: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    for call in (lambda: layer(x), lambda: layer(input=x)):
        with (
            pytest.raises(KeyboardInterrupt),
            torch.autograd.graph.saved_tensors_hooks(interrupt, lambda saved: saved),
        ):
            layer(x)
        torch.testing.assert_close(call().full_tensor(), wanted.full_tensor())
        assert isinstance(layer.weight, sw.DTensor)


def _colwise() -> Any:
    mesh = sw.init_device_mesh("cpu", (2,))
    style = ColwiseParallel(output_layouts=sw.Replicate(), use_local_output=False)
    return parallelize_module(nn.Linear(8, 8), mesh, style)
