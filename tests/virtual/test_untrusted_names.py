"""Names that a program chooses are shown as text: in the page of `explain`, and in notebook cells."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw

NAME = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


def report_of_hostile_names() -> Any:
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential()
    model.add_module(NAME, nn.Linear(4, 4))
    sw.fully_shard(model, mesh)
    with sw.explain() as report:
        model(sw.distribute_tensor(torch.ones(4, 4), mesh, [sw.Shard(0)])).sum().backward()
    return report


def test_the_page_has_no_markup_of_names(tmp_path: Path) -> None:
    report = report_of_hostile_names()
    report.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "onerror" in text  # the name is there
    assert "<img" not in text
    assert len(re.findall(r"<script", text)) == len(re.findall(r"</script>", text))
    assert "alert(2)</script>" not in text


def test_cells_of_notebooks_escape_names() -> None:
    report = report_of_hostile_names()
    cell = report._repr_html_()
    assert "<img" not in cell
    assert "<script" not in cell
