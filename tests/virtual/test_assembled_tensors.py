"""Tensors assembled of slices of files' tensors: the functions on real tensors are the reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import export_safetensors, load_safetensors
from shardwise.checkpoint.operations import safetensors_models
from shardwise.checkpoint.partition.assembled_tensors import LazyTensor

FILES = {
    **{f"experts.{i}.{name}": torch.randn(6, 4) for i in range(4) for name in ("gate", "up")},
    "fused": torch.randn(9, 4),
    "plain": torch.randn(3, 5),
}


def experts(files: dict[str, Any]) -> Any:
    """Experts stacked, gates and ups side by side."""
    stacked = [torch.stack([files[f"experts.{i}.{name}"] for i in range(4)]) for name in ("gate", "up")]
    return torch.cat(stacked, dim=1)


CONVERSIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "experts": experts,
    "experts, transposed": lambda files: torch.transpose(experts(files), 1, 2).contiguous(),
    "stacked in the middle": lambda files: torch.stack([files["experts.0.up"], files["experts.1.up"]], dim=1),
    "a chunk": lambda files: torch.chunk(files["fused"], 3)[1],
    "an uneven chunk": lambda files: torch.chunk(files["fused"], 2, dim=0)[1],
    "a split, joined": lambda files: torch.cat(torch.split(files["fused"], [2, 4, 3])[::2]),
    "a chunk of a transposed one": lambda files: torch.transpose(files["fused"], 0, 1).chunk(2, dim=-1)[0],
    "the features of heads permuted": lambda files: (
        files["experts.0.up"].view(1, 3, 2, files["experts.0.up"].shape[1]).transpose(1, 2).reshape(6, 4)
    ),
    "two of them, permuted": lambda files: (
        torch.cat([files["experts.0.up"], files["experts.1.up"]]).view(2, 2, 3, -1).transpose(1, 2).reshape(12, 4)
    ),
    "a dim inserted": lambda files: torch.transpose(files["fused"], 0, 1).reshape(4, 1, 9),
    "as it is": lambda files: files["plain"],
}
LAYOUTS = [sw.Shard(0), sw.Shard(1), sw.StridedShard(1, split_factor=2), sw.Replicate()]


@pytest.mark.parametrize("placement", LAYOUTS, ids=repr)
@pytest.mark.parametrize("conversion", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_rank_reads_its_slices_and_no_more(
    conversion: Callable[[dict[str, Any]], Any],
    placement: sw.Placement,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(safetensors_models, "GAP", 0)  # shorter runs are read with the gaps between them
    wanted = conversion(FILES)
    export_safetensors(FILES, tmp_path / "files")
    lazy = conversion({name: LazyTensor.of_file(name, tuple(value.shape)) for name, value in FILES.items()})
    assert lazy.shape == wanted.shape
    assert lazy.assembled().is_renamed == (conversion is CONVERSIONS["as it is"])

    mesh = sw.init_device_mesh("cpu", (3,))
    target = sw.zeros(*wanted.shape, device_mesh=mesh, placements=[placement])
    for staged in (True, False):
        target.zero_()
        source = {"target": lazy.assembled()}
        loaded = load_safetensors({"target": target}, tmp_path / "files", source, strict=False, staged=staged)
        assert not loaded.missing
        assert torch.equal(target.full_tensor(), wanted)
        assert loaded.bytes_read == sum(local.nbytes for local in target.to_local().tensors)


def test_what_does_more_than_move_slices_is_refused(tmp_path: Path) -> None:
    lazy = LazyTensor.of_file("fused", (9, 4))
    with pytest.raises(sw.UnsupportedError, match="converted by mul"):
        torch.mul(lazy, 2.0)
    for convert, name in (
        (lambda: lazy.view(36), r"a view of \(9, 4\) as \(36,\)"),
        (lambda: lazy.view(3, 3, 5), "a view of"),
        (lambda: lazy.permute(1, 0), "permute"),
        (lambda: lazy[0], "indexing"),
    ):
        with pytest.raises(sw.UnsupportedError, match=f"converted by {name}"):
            convert()
    with pytest.raises(sw.UnsupportedError, match="not slices of assembled ones"):
        export_safetensors({"a": torch.zeros(9, 4)}, tmp_path / "files", mapping={"a": lazy.assembled()})
    assert not (tmp_path / "files").exists()
