"""Files of checkpoints: damaged ones, those of Hugging Face models, and what the command line says of them."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import shardwise as sw
from shardwise.checkpoint import Fused, export_safetensors, load, load_safetensors, read, save
from shardwise.checkpoint.format.checkpoint_index import INDEX
from shardwise.checkpoint.io import progress_bar as progress
from shardwise.cli import main
from tests.virtual import corruption
from tests.virtual.checkpoints import mesh_of

# ---------------------------------------------------------------- damage


def test_damaged_checkpoints_are_refused_or_load_bit_by_bit() -> None:
    outcomes = corruption.run(100)
    assert sum(outcomes.values()) == 100
    assert sum(count for (_, outcome), count in outcomes.items() if outcome == "refused") > 80


@pytest.mark.parametrize("byte", [4096, 4099, 4096 + 4 * 8191])
def test_a_flipped_byte_names_tensor_and_file(byte: int, tmp_path: Path) -> None:
    save({"deep": {"w": torch.ones(64, 128)}}, tmp_path / "c")
    file = tmp_path / "c" / "blocks-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[byte] ^= 0x80
    file.write_bytes(data)
    w = torch.zeros(64, 128)
    with pytest.raises(sw.CheckpointError, match=r"tensor deep/w: its block at \(0, 0\) in blocks-00000.safetensors"):
        load({"deep": {"w": w}}, tmp_path / "c")
    assert not w.any()


def edited(path: Path, change: Any) -> None:
    content = json.loads((path / INDEX).read_bytes())["index"]
    change(content)
    corruption.write_body(path, json.dumps(content).encode())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["tensors"]["w"].update(shape=[2**40, 2**40]), "do not cover the shape"),
        (lambda c: c["tensors"]["w"].update(shape=[4, 5]), "do not cover the shape"),
        (lambda c: c["tensors"]["w"].update(shape=[2**63, 0]), "not a number from 0 to 2**62"),
        (lambda c: c["tensors"]["w"].update(dtype="pickle"), "has an unknown dtype 'pickle'"),
        (lambda c: c["tensors"]["w"]["blocks"][1].update(offset=[0, 0]), "overlap"),
        (lambda c: c["tensors"]["w"]["blocks"][1].update(offset=[3, 0]), "is not inside"),
        (lambda c: c["tensors"]["w"]["blocks"][1].update(start=2**61), "ends after the end of"),
        (lambda c: c["tensors"]["w"]["blocks"][1].update(start=-4), "not a number"),
        (lambda c: c["tensors"]["w"]["blocks"][1].update(c["tensors"]["w"]["blocks"][0], offset=[2, 0]), "overlap in"),
        (lambda c: c["tensors"]["w"]["blocks"][1].update(file="../x.safetensors"), "in no file"),
        (lambda c: c["files"].update({"../x.safetensors": {"bytes": 9}}), "names a file '../x.safetensors'"),
        (lambda c: c["files"].update({"/etc/passwd": {"bytes": 9}}), "names a file '/etc/passwd'"),
        (lambda c: c["files"].update({"blocks-00000.safetensors": {"bytes": 2**50}}), "instead of"),
        (lambda c: c["tensors"].pop("w"), "differ in w"),
        (lambda c: c.update(version=4), "version 4"),
        (lambda c: c.update(version=1), "must have the keys"),
        (lambda c: c.pop("saved"), "must have the keys"),
        (lambda c: c.update(saved=-1), "the time of the save is -1"),
        (lambda c: c["files"]["blocks-00000.safetensors"].update(host="a"), "must have the keys"),
        (lambda c: c.update(state={"w": {"$pickle": "x"}}), "differ in w"),
    ],
)
def test_an_index_that_lies(change: Any, message: str, tmp_path: Path) -> None:
    mesh = mesh_of((2,))
    save({"w": sw.ones(4, 4, device_mesh=mesh, placements=[sw.Shard(0)])}, tmp_path / "c")
    edited(tmp_path / "c", change)
    w = torch.zeros(4, 4)
    with pytest.raises(sw.CheckpointError) as caught:
        load({"w": w}, tmp_path / "c")
    assert message in str(caught.value)
    assert not w.any()


# ---------------------------------------------------------------- Hugging Face


def test_a_model_of_others_straight_into_shards(tmp_path: Path) -> None:
    weights = {f"layers.{i}.w": torch.randn(6, 8192).bfloat16() for i in range(4)} | {"odd": torch.arange(5)}
    first = dict(list(weights.items())[:2])
    safetensors.torch.save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    rest = {name: weights[name] for name in weights if name not in first}
    safetensors.torch.save_file(rest, tmp_path / "model-00002-of-00002.safetensors")
    named = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in weights}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    mesh = mesh_of((2, 2))
    model = {
        f"blocks.{i}": sw.zeros(6, 8192, device_mesh=mesh, placements=[sw.Shard(i % 2), sw.StridedShard(0, 2)])
        for i in range(4)
    }
    names: dict[str, Any] = {f"blocks.{i}": f"layers.{i}.w" for i in range(4)}
    with pytest.raises(sw.CheckpointMismatchError, match="not in the state: odd"):
        load_safetensors(model, tmp_path, names)
    loaded = load_safetensors(model, tmp_path, names, strict=False)
    assert loaded.unexpected == ("odd",)
    assert loaded.bytes_read == 4 * 6 * 8192 * 2
    for i in range(4):
        assert torch.equal(model[f"blocks.{i}"].full_tensor(), weights[f"layers.{i}.w"].float())


@pytest.mark.parametrize(("before", "after"), [((2,), (4,)), ((4,), (2,)), ((2, 2), (2,))])
def test_fused_weights_go_by_parts(before: tuple[int, ...], after: tuple[int, ...], tmp_path: Path) -> None:
    """Grouped queries: q is larger than k and v, and each rank holds its share of all three, one after another."""
    q, k, v = torch.randn(16, 6), torch.randn(8, 6), torch.randn(8, 6)
    fused = {"qkv": Fused(("q", "k", "v"), (16, 8, 8), by_parts=True)}

    def dealt(shape: tuple[int, ...]) -> sw.DTensor:
        mesh = mesh_of(shape)
        n = shape[-1]
        rows = [torch.cat([part.chunk(n)[i] for part in (q, k, v)]) for i in range(n)]
        placements = [sw.Replicate()] * (mesh.ndim - 1) + [sw.Shard(0)]
        return sw.distribute_tensor(torch.cat(rows), mesh, placements)

    export_safetensors({"qkv": dealt(before)}, tmp_path / "m", mapping=fused)
    stored = safetensors.torch.load_file(tmp_path / "m" / "model.safetensors")
    assert all(torch.equal(stored[name], part) for name, part in (("q", q), ("k", k), ("v", v)))
    wanted = dealt(after)
    target = sw.distribute_tensor(torch.zeros(32, 6), wanted.device_mesh, wanted.placements)
    load_safetensors({"qkv": target}, tmp_path / "m", fused)
    assert torch.equal(target.full_tensor(), wanted.full_tensor())
    in_a_row = torch.zeros(32, 6)
    load_safetensors({"qkv": in_a_row}, tmp_path / "m", {"qkv": Fused(("q", "k", "v"), (16, 8, 8))})
    assert torch.equal(in_a_row, torch.cat([q, k, v]))
    safetensors.torch.save_file({"qkv": in_a_row}, tmp_path / "one.safetensors")
    again = sw.distribute_tensor(torch.zeros(32, 6), wanted.device_mesh, wanted.placements)
    one = {"qkv": Fused(("qkv",), (16, 8, 8), by_parts=True)}
    load_safetensors({"qkv": again}, tmp_path / "one.safetensors", one)
    assert torch.equal(again.full_tensor(), wanted.full_tensor())


def test_parts_that_cannot_be_dealt(tmp_path: Path) -> None:
    x = sw.zeros(9, 2, device_mesh=mesh_of((2,)), placements=[sw.Shard(0)])
    safetensors.torch.save_file({"a": torch.zeros(6, 2), "b": torch.zeros(3, 2)}, tmp_path / "m.safetensors")
    with pytest.raises(sw.CheckpointError, match="cannot be sharded evenly over 2 ranks"):
        load_safetensors({"x": x}, tmp_path / "m.safetensors", {"x": Fused(("a", "b"), (6, 3), by_parts=True)})
    with pytest.raises(sw.CheckpointError, match="does not match"):
        load_safetensors({"x": x}, tmp_path / "m.safetensors", {"x": Fused(("a", "b"), (6, 4))})


def test_tied_weights_stand_once_in_the_files(tmp_path: Path) -> None:
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)})
    tied["b"].weight = tied["a"].weight
    safetensors.torch.save_file({"a.weight": torch.eye(3)}, tmp_path / "model.safetensors")
    assert not load_safetensors(tied, tmp_path).missing
    assert torch.equal(tied["b"].weight, torch.eye(3))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "its header size is 0 bytes"),
        ((2**40).to_bytes(8, "little") + b"{}", "its header size is 1099511627776 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "is not an object"),
        ((2).to_bytes(8, "little") + b"{x", "is not JSON"),
    ],
)
def test_files_that_are_not_safetensors(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(sw.CheckpointError, match=message):
        load_safetensors({"x": torch.zeros(1)}, tmp_path)


@pytest.mark.parametrize(
    "entry", [{"shape": [2**40], "data_offsets": [0, 2**42]}, {"data_offsets": [0, 8]}, {"dtype": 3}]
)
def test_a_header_that_lies(entry: dict[str, Any], tmp_path: Path) -> None:
    described = {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | entry}
    header = json.dumps(described).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(sw.CheckpointError, match=r"tensor x of model\.safetensors"):
        load_safetensors({"x": torch.zeros(1)}, tmp_path)


# ---------------------------------------------------------------- the command line


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = mesh_of((2,))
    a, b, c = (str(tmp_path / name) for name in "abc")
    save({"w": sw.ones(4, 4, device_mesh=mesh, placements=[sw.Shard(0)]), "step": 3}, a)
    save({"w": torch.zeros(4, 4), "step": 4, "more": None}, b)
    assert main(["checkpoint", "inspect", a]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 tensor of 64 B in 2 blocks and 2 files; 1 object",
        "w     f32[4,4]  64 B  2 blocks",
        "step  3",
    ]
    assert main(["checkpoint", "inspect", "--json", a]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"][0]["shape"] == [4, 4]
    assert main(["checkpoint", "verify", a]) == 0
    assert "is intact" in capsys.readouterr().out
    assert main(["checkpoint", "diff", a, b]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step is 3 in the first, 4 in the second",
        "more is in the second only",
        "w differs in 16 of 16 elements, by at most 1",
    ]
    assert main(["checkpoint", "reshard", a, c, "--mesh", "dp=2,tp=2"]) == 0
    assert main(["checkpoint", "diff", a, c]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no difference"
    assert len(list(Path(c).glob("*.safetensors"))) == 4
    assert read(c)["step"] == 3
    os.truncate(tmp_path / "c" / "blocks-00001.safetensors", 4097)
    assert main(["checkpoint", "verify", c]) == 2
    assert "blocks-00001.safetensors has 4,097 bytes instead of" in capsys.readouterr().err
    assert main(["checkpoint", "inspect", str(tmp_path / "none")]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    with pytest.raises(sw.CheckpointError, match="blocks-00001"):
        sw.checkpoint.reshard(c, tmp_path / "d", mesh)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_shown_on_a_terminal_alone(terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    save({"w": torch.ones(1000)}, tmp_path / "c")
    assert ("saving" in screen.getvalue()) == terminal
