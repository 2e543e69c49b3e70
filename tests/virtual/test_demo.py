"""The demo: its output describes its own run and fits a terminal of 80 columns; it can be stopped."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise import demo
from shardwise.cli import main
from shardwise.demo.corpus import Corpus, read_corpus
from shardwise.demo.page import Page
from shardwise.demo.tour import common_speakers
from shardwise.demo.training import Size, Trainer, as_it_is, sample

STEPS = 4


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a short run prints, and the page that it writes."""
    page = tmp_path_factory.mktemp("demo") / "report.html"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "shardwise.demo", "--steps", str(STEPS), "--html", str(page)],
        env=surroundings(NO_COLOR="1", COLUMNS="200"), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, page


def surroundings(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
    return clean | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | more


def test_into_a_file_it_is_plain_and_narrow(told: tuple[str, Path]) -> None:
    lines = told[0].splitlines()
    assert "\x1b" not in told[0]
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)
    assert "…" not in told[0]
    headings = [line[0] for line in lines if re.match(r"\d\. ", line)]
    assert "".join(headings) == "12345678"


def test_the_losses_are_those_of_one_device(told: tuple[str, Path]) -> None:
    losses = re.findall(r"mesh (\d\.\d+)   one device (\d\.\d+)", told[0])
    assert len(losses) == STEPS
    for together, alone in losses:
        assert float(together) == pytest.approx(float(alone), abs=1e-4)
    assert float(losses[-1][0]) < float(losses[0][0])
    furthest = re.search(r"in float64, differ by (\S+) at most", told[0])
    assert furthest is not None
    assert float(furthest[1]) < 1e-12
    size = Size()
    torch.manual_seed(0)
    trainer = Trainer(size.make(), as_it_is, STEPS)
    batch = next(read_corpus().batches(1, size.windows, size.length))
    assert float(losses[0][1]) == pytest.approx(trainer.loss(batch).item(), abs=1e-4)


def test_what_moved_is_what_the_axes_are_for(told: tuple[str, Path]) -> None:
    moved = re.findall(r"^(dp|tp) +(\w+) +(\S+) +(\S+) +", told[0], re.MULTILINE)
    kinds = {(axis, collective) for axis, collective, _, _ in moved}
    assert {("tp", "all_gather"), ("tp", "reduce_scatter"), ("dp", "all_gather"), ("dp", "reduce_scatter")} <= kinds
    assert ("dp", "reduce_scatter", "-", "3") in moved  # gradients, of two blocks and of what is around them


def test_the_checkpoint_is_the_same_on_three_devices(told: tuple[str, Path]) -> None:
    assert "parameters, 0 differ" in told[0]
    first, second = (float(number) for number in re.findall(r"^dp=\d.* (\d\.\d{6})$", told[0], re.MULTILINE))
    assert first == pytest.approx(second, abs=1e-5)


def test_the_dry_run_is_of_a_thousand_devices(told: tuple[str, Path]) -> None:
    assert "on 1,024 devices" in told[0]
    parameters = re.findall(r"^parameters of the model +([\d,]+) +([\d,]+) +([\d,]+)$", told[0], re.MULTILINE)
    counted = sum(parameter.numel() for parameter in Size().make().parameters())
    assert int(parameters[0][0].replace(",", "")) == int(parameters[0][1].replace(",", "")) == counted
    assert f"{counted:,} parameters" in told[0]


def test_the_page_is_written(told: tuple[str, Path]) -> None:
    assert str(told[1].name) in told[0].replace("\n", "")
    page = told[1].read_text()
    assert "</html>" in page
    assert "model.py:" in page  # the demo's own lines, not the command's


def in_a_terminal(*words: str, until: bytes, then: signal.Signals) -> tuple[int, bytes]:
    """Start a command on a terminal of 80 columns; send it a signal once it has written something."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *words], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=surroundings(TERM="xterm-256color", COLUMNS="80"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as terminals have it
    )  # fmt: skip
    os.close(theirs)
    written, sent, deadline = b"", False, time.monotonic() + 240
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 1.0)[0]:
                try:
                    written += os.read(ours, 65536)
                except OSError:  # it has closed its end
                    break
            if not sent and until in written:
                process.send_signal(then)
                sent = True
        return process.wait(timeout=30), written
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_an_interrupt_leaves_the_terminal_clean() -> None:
    status, written = in_a_terminal("-m", "shardwise", "demo", until=b"1/180", then=signal.SIGINT)
    assert status == 130
    assert b"Traceback" not in written
    assert b"shardwise demo: interrupted" in written
    assert b"\x1b[1m" in written  # headings are bold: it is a terminal
    assert written.rindex(b"\x1b[?25h") > written.rindex(b"\x1b[?25l")  # the cursor is shown again


def test_texts_of_different_lengths_grow_alike() -> None:
    corpus, size = read_corpus(), Size(width=16, heads=2, blocks=1, length=8)
    trainer = Trainer(size.make(), as_it_is, 1)
    trainer.model.register_forward_hook(lambda module, given, result: Whole(result))
    grown = list(sample(trainer, corpus, ["To be", "or not to be, that"], 5, size.length))
    assert [[len(text) for text in texts] for texts in grown] == [[5 + n, 18 + n] for n in range(1, 6)]
    assert grown[-1][0].startswith("To be")
    assert grown[-1][1].startswith("or not to be, that")


class Whole:
    """What has a `full_tensor`, as a DTensor has."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def full_tensor(self) -> torch.Tensor:
        return self.tensor


def test_the_play() -> None:
    corpus = read_corpus()
    assert corpus.text.isascii()
    assert len(corpus.text) < 200_000
    assert len(corpus.characters) <= Size().characters
    assert common_speakers(corpus, 2) == ["ROSALIND:\n", "ORLANDO:\n"]
    batch = next(corpus.batches(1, 3, 10))
    assert torch.equal(batch.texts[:, 1:], batch.following[:, :-1])
    assert corpus.decode(batch.texts[0].tolist()) in corpus.text
    assert Corpus("abcab").encode("cab") == [2, 0, 1]


def test_a_bar_off_a_terminal_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Page().bar("step", 100, ["loss"]) as show:
        for number in range(100):
            show(f"{number}")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step   1/100   loss 0"
    assert lines[-1] == "step 100/100   loss 99"
    assert len(lines) <= 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "expected a number of steps, at least 1, found '0'"),
        (["--steps", "many"], "found 'many'"),
        (["--html", "nowhere/at/all.html"], "there is no folder nowhere/at"),
    ],
)
def test_what_cannot_be_is_said_before_the_work(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


def test_threads_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def fail(*arguments: object) -> None:
        seen.append(torch.get_num_threads())
        raise sw.ShardwiseError("enough")

    monkeypatch.setattr(demo, "present", fail)
    before = torch.get_num_threads()
    with pytest.raises(sw.ShardwiseError, match="enough"):
        demo.main()
    assert (seen, torch.get_num_threads()) == ([1], before)
