"""What users do with a parallel model beside training it: loading, saving, generating; against plain transformers."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import shardwise as sw
from tests.models.hf_tiny_models import VOCABULARY, Carrier, tiny_model

__all__ = ["GENERATIONS", "file_differences", "generation_differences"]

GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beam search": {"do_sample": False, "num_beams": 3},
    "a static cache": {"do_sample": False, "cache_implementation": "static"},
}


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, sw.DTensor) else value).detach()


def file_differences(carrier: Carrier) -> Iterator[str]:
    """Files of plain transformers read by `sw.hf.from_pretrained` on (4,), written again, and read by transformers."""
    tiny = tiny_model(carrier)
    kind: Any = type(tiny.model)
    mesh = sw.init_device_mesh("cpu", (4,))
    with tempfile.TemporaryDirectory() as folder:
        tiny.model.eval().save_pretrained(f"{folder}/theirs")
        plain = kind.from_pretrained(f"{folder}/theirs").eval()
        parallel = sw.hf.from_pretrained(f"{folder}/theirs", mesh, model_class=kind)
        yield from _unequal("loaded", plain, parallel)
        torch.manual_seed(2)
        wanted = tiny.loss(plain, tiny.batch)
        torch.manual_seed(2)
        got = whole(tiny.loss(parallel, dict(tiny.batch)))
        if not torch.allclose(got, wanted, rtol=1e-5, atol=1e-5):
            yield f"the loss of the loaded model is {got.item()}, not {wanted.item()}"
        sw.hf.save_pretrained(parallel, f"{folder}/ours")
        yield from _unequal("saved", plain, kind.from_pretrained(f"{folder}/ours"))


def _unequal(what: str, plain: nn.Module, other: nn.Module) -> Iterator[str]:
    wanted, found = plain.state_dict(), other.state_dict()
    if names := wanted.keys() ^ found.keys():
        yield f"{what}: tensors on one side alone: {', '.join(sorted(names)[:3])}"
    for name in wanted.keys() & found.keys():
        value = whole(found[name])
        if value.dtype != wanted[name].dtype or not torch.equal(value, wanted[name]):
            yield f"{what}: {name} differs"
    for (name, value), (_, buffer) in zip(other.named_buffers(), plain.named_buffers(), strict=True):
        if not torch.equal(whole(value), buffer):
            yield f"{what}: the buffer {name} differs"


def generation_differences(carrier: Carrier, ways: dict[str, dict[str, Any]] = GENERATIONS) -> Iterator[str]:
    """`generate` on (4,) from two prompts of different lengths, in each way, against one device."""
    importlib.import_module("transformers").logging.set_verbosity_error()
    torch.manual_seed(1)
    ids = torch.randint(4, VOCABULARY, (2, 5))
    mask = torch.ones_like(ids)
    ids[1, :2], mask[1, :2] = 0, 0
    plain: Any = tiny_model(carrier).model.eval()
    parallel: Any = sw.hf.parallelize(tiny_model(carrier).model.eval(), sw.init_device_mesh("cpu", (4,)))

    def text(model: Any, options: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(2)
        return whole(model.generate(ids, attention_mask=mask, max_new_tokens=6, pad_token_id=0, **options))

    for way, options in ways.items():
        try:
            wanted = text(plain, options)
        except Exception:
            if way == "greedy":
                raise
            continue  # the plain model cannot do it: some have no static cache, some no beams
        found = text(parallel, options)
        if not torch.equal(found, wanted):
            yield f"{way}: {found.tolist()}, not {wanted.tolist()}"
