"""The command line: its output, for people and for programs, and its errors for invalid input."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest

from shardwise.cli import COMMANDS, main
from shardwise.cli import bench_command as bench
from shardwise.cli.arguments import parse_change, parse_mesh
from shardwise.cli.plan_command import in_words
from shardwise.core.placement import AnyShard, Placement
from shardwise.errors import NotationError
from shardwise.plan.route import DTensorRedistributePlanner, plain_route
from shardwise.text import parse_bytes

CHANGE = "f32[64,4096,4096] dp:S0 tp:R -> dp:R tp:S2"
MESH = "dp=2,tp=4"


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


# ---------------------------------------------------------------- for people


def test_a_plan_names_steps_costs_peak_and_the_alternative(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, CHANGE, "--mesh", MESH, "--device", "cuda").splitlines() == [
        "f32[64,4096,4096] dp:S0 tp:R -> dp:R tp:S2",
        "mesh dp=2 x tp=4: 8 ranks of cuda; the global tensor is 4.00 GiB",
        "",
        "the route",
        "collective  what it does                   over    receives     time  then holds",
        "─" * 80,
        "(none)      keep a local slice                            -        -  512.00 MiB",
        "all_gather  join the parts of dim 0        dp    512.00 MiB  3.59 ms    1.00 GiB",
        "1 collective, 512.00 MiB received in 3.59 ms; a rank holds 2.00 GiB at the peak",
        "",
        "step by step: reduce, gather changed dims, slice",
        "collective  what it does                    over  receives      time  then holds",
        "─" * 80,
        "all_gather  join the parts of dim 0         dp    2.00 GiB  14.33 ms    4.00 GiB",
        "(none)      keep a local slice                           -         -    1.00 GiB",
        "1 collective, 2.00 GiB received in 14.33 ms; a rank holds 4.00 GiB at the peak",
        "",
        "Step by step, a rank receives 4.00 times the bytes, takes 3.99 times the time",
        "and holds 2.00 times as much.",
    ]


@pytest.mark.parametrize(
    ("change", "mesh", "expected"),
    [
        ("f32[8,8] S0 -> S0", "4", "Nothing to do"),
        ("f32[8,8] S0 -> R", "4", "The step-by-step route is the same"),
        ("f32[8,8] R -> P", "4", "keep the value on one rank"),
        ("f32[8,8] P(avg) S1 -> R S1", "2x2", "average of the ranks, on each"),
        ("f32[8,8] P -> S0", "4", "sum, split along dim 0"),
        ("f32[8,8] S0 -> S1", "4", "join dim 0, split dim 1"),
        ("f32[8,8] M -> P", "4", "no change of values"),
        ("f32[7,5] S0 S0 order 0:1>0 -> S0 S1", "2x2", "send each rank missing parts"),
        ("f32[] -> R", "2x2", "Nothing to do"),
        ("f32[0,4] S0 -> S1", "4", "0 B"),
    ],
)
def test_other_plans(capsys: pytest.CaptureFixture[str], change: str, mesh: str, expected: str) -> None:
    printed = plan(capsys, change, "--mesh", mesh)
    assert expected in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_a_bound_is_kept_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    printed = plan(capsys, CHANGE, "--mesh", MESH, "--max-bytes", "2GiB")
    assert "memory limit of a rank: 2.00 GiB" in printed
    assert "over the limit" in printed


def test_many_long_axes_stay_readable(capsys: pytest.CaptureFixture[str]) -> None:
    change = "bf16[4096,4096,4096] data:S0 pipeline:P tensor:S1 -> data:S2 tensor:S0"
    printed = plan(capsys, change, "--mesh", "data=16,pipeline=4,tensor=8,context=2")
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed


# ---------------------------------------------------------------- for programs


def test_json_has_these_keys_and_the_planners_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    change = "bf16[1024,512] dp:S0 pp:P tp:S1 -> dp:S1 tp:S0"
    said: dict[str, Any] = json.loads(plan(capsys, change, "--mesh", "dp=4,pp=2,tp=8", "--json"))
    assert list(said) == [
        "mesh", "target_mesh", "tensor", "source", "target", "max_bytes", "route", "step_by_step", "ratios",
    ]  # fmt: skip
    assert said["mesh"] == {"axes": ["dp", "pp", "tp"], "shape": [4, 2, 8], "ranks": 64, "device": "cpu"}
    assert said["tensor"] == {"dtype": "bf16", "shape": [1024, 512], "bytes": 1048576}
    assert said["source"] == {"layout": "dp:S0 pp:P tp:S1", "held_bytes": 32768}
    assert said["target"] == {"layout": "dp:S1 pp:R tp:S0", "held_bytes": 32768}
    assert said["max_bytes"] is None

    source, target = parse_change(change, parse_mesh("dp=4,pp=2,tp=8"))
    ours, plain = DTensorRedistributePlanner().plan(source, target), plain_route(source, target)
    for route, told in ((ours, said["route"]), (plain, said["step_by_step"])):
        assert told["collectives"] == route.collectives
        assert told["received_bytes"] == route.received
        assert told["seconds"] == route.seconds
        assert told["peak_bytes"] == route.peak_bytes
        assert told["steps"] == [
            {
                "step": step.describe(),
                "collective": step.collective,
                "does": in_words(step),
                "axes": [source.mesh.axis_name(axis) for axis in step.axes],
                "received_bytes": cost.received,
                "seconds": cost.seconds,
                "held_bytes": cost.holds,
                "layout": step.after.layout,
            }
            for step, cost in zip(route.steps, route.costs, strict=True)
        ]
    assert said["ratios"] == {
        "received_bytes": plain.received / ours.received,
        "seconds": plain.seconds / ours.seconds,
        "peak_bytes": plain.peak_bytes / ours.peak_bytes,
    }


def test_json_of_nothing_to_do_and_of_unnamed_axes(capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(plan(capsys, "f32[8,8] S0 R -> S0 R", "--mesh", "2x4", "--max-bytes", "1kB", "--json"))
    assert said["mesh"]["axes"] == ["0", "1"]
    assert said["max_bytes"] == 1000
    assert said["route"]["steps"] == []
    assert said["ratios"] == {"received_bytes": 1.0, "seconds": 1.0, "peak_bytes": 1.0}


def test_json_of_a_layout_says_who_holds_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "f32[5,8] dp:S0 tp:S1/2", "--mesh", "dp=2,tp=2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said) == ["mesh", "tensor", "layout", "ranks"]
    assert said["mesh"] == {"axes": ["dp", "tp"], "shape": [2, 2]}
    assert said["tensor"] == {"dtype": "f32", "shape": [5, 8]}
    assert said["ranks"][3] == {
        "rank": 3, "coordinate": [1, 1], "shape": [2, 4], "holds": [[[3, 5]], [[2, 4], [6, 8]]],
    }  # fmt: skip
    assert sum(math.prod(rank["shape"]) for rank in said["ranks"]) == 40


def test_bench_measures_what_it_names(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SAMPLES", 1)
    monkeypatch.setattr(bench, "AT_LEAST", 0.0)
    assert main(["bench", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said["benches"]) == list(bench.BENCHES)
    assert [row["operator"] for row in said["benches"]["operators"]] == list(bench.OPERATORS)
    assert all(row["dtensor_seconds"] > 0 and row["plain_seconds"] > 0 for row in said["benches"]["operators"])
    first = said["benches"]["redistribute"][0]
    source, target = parse_change(first["change"], parse_mesh(bench.MESH))
    assert first["received_bytes"] == DTensorRedistributePlanner().plan(source, target).received
    assert first["step_by_step_received_bytes"] == plain_route(source, target).received

    assert main(["bench", "operators", "redistribute"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*bench.OPERATORS, "dp:S0 -> tp:S1"))
    assert "plan a route" not in printed
    assert max(map(len, printed.splitlines())) <= 80


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "everything"], "unknown bench 'everything'\n  hint: there are operators, redistribute, plan"),
        (["run", "--mesh", "2x", "script.py"], "there is no script script.py"),
        (["run", "--mesh", "2x", __file__], "expected a number of ranks, found ''\n  2x\n    ^"),
        (["run", "nowhere.py"], "there is no script nowhere.py"),
        (["explain", "--html", "nowhere/page.html", __file__], "cannot write nowhere/page.html: there is no folder"),
        (["draw", "f32[8] S0", "--mesh", "2", "--svg", "nowhere/a.svg"], "cannot write nowhere/a.svg"),
        (["draw", "f32[8] S0 -> R", "--mesh", "2", "--json"], "--json supports one layout only"),
        (["draw", "f32[8] S0 -> R", "--mesh", "2"], "drawn as SVG only\n  hint: add --svg FILE"),
        (["checkpoint", "inspect", "nowhere"], "nowhere"),
    ],
)
def test_what_other_commands_refuse(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"shardwise {words[0]}: ")
    assert message in printed.err
    assert "Traceback" not in printed.err


def test_an_interrupt_is_one_line_and_status_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> list[Any]:
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.BENCHES, "plan", (interrupted, bench.plan_table))
    assert main(["bench", "plan", "--json"]) == 130
    assert capsys.readouterr().err == "\nshardwise bench: interrupted\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["f32[8,8] dp:S0 -> dp:Q", "--mesh", MESH],
            "expected a placement, found 'Q'\n  f32[8,8] dp:S0 -> dp:Q\n                       ^\n  hint:",
        ),
        (
            ["f32[8,8] pp:S0 -> dp:R", "--mesh", MESH],
            "the mesh has no axis 'pp'\n  f32[8,8] pp:S0 -> dp:R\n           ^\n  hint: it has dp, tp",
        ),
        (
            ["f99[8,8] dp:S0 -> dp:R", "--mesh", MESH],
            "unknown dtype 'f99'\n  f99[8,8] dp:S0 -> dp:R\n  ^\n  hint:",
        ),
        (
            ["f32[8,8] dp:S2 -> dp:R", "--mesh", MESH],
            "Shard(2) on axis 'dp': the tensor has dims 0 to 1\n  f32[8,8] dp:S2 -> dp:R\n              ^",
        ),
        (
            ["dp:S0 -> dp:R", "--mesh", MESH],
            "expected a dtype and sizes such as f32[8,32]\n  dp:S0 -> dp:R\n  ^",
        ),
        (["f32[8,8] S0", "--mesh", "2"], "expected '->' and the target layout\n  f32[8,8] S0\n             ^"),
        (["f32[8,8] S0 -> R -> S1", "--mesh", "2x2"], "f32[8,8] S0 -> R -> S1\n                   ^"),
        (["f32[8,8] S0 -> P", "--mesh", "2"], "would change from Shard(0) to Partial(sum)\n  hint:"),
        (["f32[8] R -> f32[9] R", "--mesh", "2"], "cannot lay f32[8] R out as f32[9] R: the shapes differ"),
        (["f32[8] R -> R", "--mesh", "dp=2,dp=4"], "axis dp is named twice\n  dp=2,dp=4\n       ^"),
        (["f32[8] R -> R", "--mesh", "dp=2,tp"], "expected an axis such as dp=2, found 'tp'\n  dp=2,tp\n       ^"),
        (["f32[8] R -> R", "--mesh", "2x0"], "expected a number of ranks, found '0'\n  2x0\n    ^"),
        (["f32[8] R -> R", "--mesh", ""], "expected a number of ranks, found ''"),
        (["f32[8] R -> R", "--mesh", "dp=two"], "found 'two'\n  dp=two\n     ^"),
        (["f32[8] R -> R", "--mesh", "4096x4096"], "more than 1,048,576 ranks\n  4096x4096\n       ^"),
        (["f32[8] R -> R", "--mesh", "2", "--max-bytes", "64q"], "'64q' is not a number of bytes\n  64q\n    ^"),
        (
            ["f32[8,8] S0 -> R", "--mesh", "4", "--max-bytes", "64"],
            "holds at most max_bytes=64 on a rank\n  hint: the smallest bound that would do is 256 bytes",
        ),
    ],
)
def test_what_cannot_be_is_one_message_and_status_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    said = refusal(capsys, *words)
    assert said.startswith("shardwise plan: ")
    assert message in said


@pytest.mark.parametrize(
    "words", [[], ["plan"], ["plan", "x"], ["fly"], ["plan", "x", "--mesh", "2", "--device", "abacus"]]
)
def test_wrong_words_are_told_the_usage(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage: shardwise" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)])
def test_help_everywhere(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "usage: shardwise" in said
    assert words or all(name in said for name in COMMANDS)
    assert max(map(len, said.splitlines())) <= 80


def test_help_of_plan_has_every_placement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    said = {word for line in capsys.readouterr().out.splitlines() for word in line.split()[:1]}
    documented = {type(placement_of(word)) for word in said if word[0] in "RSZOPM" and word[1:2] in ("", *"0123456789")}
    kinds, wanted = [Placement], set[type]()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        wanted |= {kind} if kind not in (Placement, AnyShard) else set()
    assert documented == wanted


def placement_of(text: str) -> Placement:
    """The placement of a token of the notation, on an axis of three ranks."""
    spec, _ = parse_change(f"f32[8,8] {text} -> R", parse_mesh("3"))
    return spec.placements[0]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("1000", 1000), ("64MiB", 2**26), ("64 mib", 2**26), ("1GB", 10**9), ("1.5kB", 1500), ("2TiB", 2**41),
        ("7B", 7), (" 7 ", 7),
    ],
)  # fmt: skip
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "-1", "MiB", "1e9", "64 Mi B", "1.GB"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(NotationError, match="is not a number of bytes"):
        parse_bytes(text)


def test_meshes() -> None:
    assert parse_mesh("dp=2, tp=4", "cuda").mesh_dim_names == ("dp", "tp")
    assert parse_mesh("x=2,y=4").mesh_dim_names == ("x", "y")
    assert (parse_mesh("2x3x4").shape, parse_mesh("8").shape) == ((2, 3, 4), (8,))
    assert parse_mesh("8").fabric == "dry"


# ---------------------------------------------------------------- size and pipes


def test_sixteen_thousand_ranks_are_planned_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bf16[16384,53248] dp:S0 tp:S1 pp:P -> dp:S1 tp:S0", "--mesh", "dp=64,pp=32,tp=8", "--json"]
    plan(capsys, *words)
    start = time.process_time()
    plan(capsys, *words)
    assert time.process_time() - start < 1.0  # about a hundredth of that without checks of types


def run_piped(command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment["PYTHON"] = sys.executable
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], env=environment, capture_output=True, text=True, timeout=120
    )


def test_into_a_pipe_it_is_plain_text_whatever_the_terminal() -> None:
    done = run_piped(f'COLUMNS=40 TERM=xterm-256color "$PYTHON" -m shardwise plan "{CHANGE}" --mesh {MESH} | cat')
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "join the parts of dim 0" in done.stdout
    assert all(line == line.rstrip() and len(line) <= 80 for line in done.stdout.splitlines())


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = run_piped(f'"$PYTHON" -m shardwise plan "{CHANGE}" --mesh {MESH} --json | true')
    assert (done.returncode, done.stderr) == (0, "")


def test_plan_to_another_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    change = "f32[96,64] dp:S0 tp:S1 -> tp:S1"
    printed = plan(capsys, change, "--mesh", "dp=2,tp=4", "--to-mesh", "tp=3")
    assert "to mesh tp=3: 3 other ranks" in printed
    said = json.loads(plan(capsys, change, "--mesh", "dp=2,tp=4", "--to-mesh", "tp=3", "--json"))
    assert said["target_mesh"] == {"axes": ["tp"], "shape": [3], "ranks": 3, "device": "cpu"}
    assert said["route"]["received_bytes"] == 96 * 64 * 4 / 3


def test_the_version_names_torch_and_the_fabric(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert re.fullmatch(r"shardwise 0\.\d+\.\d+, torch [\w.+]+, Python 3\.\d+\.\d+\S*, fabric virtual\n", printed), (
        printed
    )
