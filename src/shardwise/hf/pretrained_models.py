"""from_pretrained and save_pretrained: models of transformers from and to files, each rank its slices."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.io.range_reader import OpenDirectory
from shardwise.checkpoint.io.safetensors_header import find_tensors
from shardwise.checkpoint.operations.load_checkpoint import mismatch
from shardwise.checkpoint.operations.safetensors_models import export_safetensors, load_safetensors
from shardwise.errors import CheckpointError, UnsupportedError
from shardwise.fabric.world import as_mesh, is_main
from shardwise.hf.file_sources import sources_of
from shardwise.hf.parallel_models import parallelize
from shardwise.hf.transformers_version import load_transformers
from shardwise.tensor import is_dtensor

__all__ = ["fill_from_files", "from_pretrained", "save_pretrained"]


def from_pretrained(
    path: str | Path,
    device_mesh: Any = None,
    plan: str | Mapping[str, Any] = "auto",
    *,
    dtype: torch.dtype | None = None,
    model_class: Any = None,
    attn_implementation: str | None = None,
) -> Any:
    """Load a model of transformers from a directory, parallel over a mesh: each rank reads only its slices.

    Every process calls it. Renamed, stacked or fused weights are converted by the converters of transformers, and cast
    to the model's dtype. Peak memory is that of the rank's slices and one tensor.

    Args:
        path: a directory with `config.json` and safetensors files.
        device_mesh: a mesh of one axis: `mesh["tp"]` where there are several.
        plan: as in `parallelize`.
        dtype: of the weights; by default that of the configuration, else float32.
        model_class: the class of the model; default: the one that the configuration names.
        attn_implementation: as in transformers: `"eager"`, `"sdpa"`, `"flex_attention"`.

    Returns:
        The model, in evaluation mode.

    Example:
        >>> model = from_pretrained("path", mesh["tp"])  # doctest: +SKIP
        >>> model.generate(ids, max_new_tokens=20)  # doctest: +SKIP
    """
    transformers = load_transformers()
    mesh = as_mesh(device_mesh)
    config = transformers.AutoConfig.from_pretrained(path)
    _check_not_quantized(config, path)
    _check_safetensors(Path(path))
    kind = model_class or _class_of(transformers, config, path)
    chosen = dtype or getattr(config, "dtype", None) or torch.float32
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with _parameters_on_meta():
        model = kind._from_config(config, dtype=chosen, **options)
    _keep_precision(model, chosen)
    sources = sources_of(model, _shapes_in(path))
    parallelize(model, mesh, plan, src_data_rank=None)
    _allocate(model, torch.device(mesh.device_type))
    fill_from_files(model, path, sources)
    with contextlib.suppress(Exception):  # a model that does not generate has none
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model.eval()


def _check_not_quantized(config: Any, path: str | Path) -> None:
    settings = getattr(config, "quantization_config", None)
    if settings is not None:
        known = settings if isinstance(settings, Mapping) else vars(settings)
        raise UnsupportedError(
            f"{path} is quantized by {known.get('quant_method', 'an unknown method')}",
            hint="load weights that are not quantized",
        )


def _check_safetensors(path: Path) -> None:
    pickled = sorted(each.name for each in path.glob("*.bin") if each.name.startswith("pytorch_model"))
    if pickled and not any(path.glob("*.safetensors")):
        raise UnsupportedError(
            f"{path} has {pickled[0]} and no safetensors file: a rank cannot read slices of pickled files",
            hint="convert it once, with from_pretrained and save_pretrained of transformers",
        )


def _class_of(transformers: Any, config: Any, path: str | Path) -> Any:
    names = getattr(config, "architectures", None) or ()
    kind = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    if kind is None:
        raise CheckpointError(
            f"the config.json of {path} names the architectures {list(names)}, none of which transformers has",
            hint="pass model_class=",
        )
    return kind


# ---------------------------------------------------------------- a model without memory


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside have parameters on the meta device, and real buffers, which are computed, not loaded."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register_on_meta  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _keep_precision(model: Any, dtype: torch.dtype) -> None:
    """Cast the parameters that a model always keeps in float32."""
    names = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype is torch.float16 else set()
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if not names:
        return
    kept = re.compile(rf"(^|\.)({'|'.join(map(re.escape, sorted(names)))})(\.|$)")
    for path, parameter in model.named_parameters():
        if kept.search(path):
            parameter.data = parameter.data.float()


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate uninitialized memory for parameters. Shared parameters stay shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter.detach(), device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_dtensor(buffer):
                module._buffers[name] = buffer.to(device)


def _shapes_in(path: str | Path) -> dict[str, tuple[int, ...]]:
    with OpenDirectory(Path(path)) as directory:
        _, found = find_tensors(directory, None)
    return {name: tuple(tensor.shape) for name, tensor in found.items()}


def fill_from_files(model: Any, path: str | Path, sources: Mapping[str, Any] | None = None) -> None:
    """Read the values. Missing tensors are an error; unexpected ones are a warning, as in transformers."""
    if sources is None:
        sources = sources_of(model, _shapes_in(path))
    loaded = load_safetensors(model, path, sources, strict=False, staged=False)
    if loaded.missing or loaded.mismatched:
        raise mismatch(loaded.missing, (), loaded.mismatched)
    ignored = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    left = [name for name in loaded.unexpected if not any(each.search(name) for each in ignored)]
    if left:
        warnings.warn(f"{path} has tensors that {type(model).__name__} lacks: {', '.join(left[:8])}", stacklevel=4)


# ---------------------------------------------------------------- to files


def save_pretrained(model: Any, path: str | Path, max_shard_size: int | str = "5GB") -> None:
    """Write a parallel model in the layout that `from_pretrained` of transformers reads: safetensors and config.json.

    Every process calls it; each rank writes its slices. Tensors have the names of the model's parameters; tied ones are
    written once, under the first name.

    Args:
        model: a model of transformers, parallel or not, also after `fully_shard`.
        path: the directory; it must not have safetensors files of a model.
        max_shard_size: the most bytes of tensors in a file, as a number or as "5GB", "200MiB".

    Example:
        >>> save_pretrained(model, "path")  # doctest: +SKIP
    """
    load_transformers()
    if not hasattr(model, "config") or hasattr(model, "peft_config"):
        raise UnsupportedError(
            f"{type(model).__name__} is not a model of transformers itself",
            hint="for an adapter of peft, pass model.get_base_model()",
        )
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    export_safetensors(tensors, path, max_shard_size)
    if is_main():
        config = model.config
        config.architectures = [type(model).__name__]
        config.dtype = next(each.dtype for each in tensors.values() if each.is_floating_point())
        config.save_pretrained(path)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(path)
