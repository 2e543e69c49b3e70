"""Every architecture of the installed transformers that carries a plan, parallel by it, against the plain model.

`python -m tests.models.hf_architectures` runs them all; names of configurations choose some, `--checks plans files
generate` some of the checks, and `--jobs N` takes N processes. With `--results FILE` what was found is added there, a
line of JSON for each configuration with the versions, and a later run with the same versions does only what is missing;
`--write PAGE` writes the page of the documentation from it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from tests.models.architectures import missing, version_of
from tests.models.hf_programs import file_differences, generation_differences
from tests.models.hf_tiny_models import Carrier, TinyModel, carriers, tiny_model
from tests.models.model_check import PASSED, differences

__all__ = ["CHECKS", "WAYS", "check_carrier", "page"]

LOSS, GRADIENTS = 1e-5, 1e-4
WAYS = ("(2,)", "(4,)", "(2, 2) and fully_shard")
CHECKS = ("plans", "files", "generate")
DOES_NOT_APPLY = "does not apply"
# Families that are run first, where the time is short.
FIRST = [
    "Llama",
    "Qwen3",
    "Mixtral",
    "GptOss",
    "Gemma3Text",
    "Qwen3Moe",
    "DeepseekV3",
    "Qwen3Next",
    "Mistral",
    "Phi3",
    "Gemma2",
    "Qwen2",
    "Olmo2",
    "Cohere",
    "Llama4Text",
    "Glm4Moe",
    "DeepseekV2",
    "Starcoder2",
    "GraniteMoeHybrid",
    "Jamba",
]
State = dict[str, dict[str, torch.Tensor]]
Results = dict[str, dict[str, str]]  # of each configuration: "tp (2,)" and what was found


@dataclass(frozen=True)
class Entry:
    """What a run found of one configuration."""

    name: str
    found: dict[str, str]
    transformers: str
    torch: str
    date: str
    seconds: float


def parallel_step(tiny: TinyModel, plan: str, way: str) -> State:
    """Forward and backward on a mesh."""
    batch: dict[str, Any] = dict(tiny.batch)
    if way == WAYS[2]:
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sw.fully_shard(sw.hf.parallelize(tiny.model, mesh["tp"], plan), mesh["dp"])
        batch = {
            k: sw.distribute_tensor(v, mesh, [sw.Shard(0), sw.Replicate()]) if isinstance(v, torch.Tensor) else v
            for k, v in batch.items()
        }
    else:
        mesh = sw.init_device_mesh("cpu", (2,) if way == WAYS[0] else (4,))
        sw.hf.parallelize(tiny.model, mesh, plan)
    placements = [each for p in tiny.model.parameters() if isinstance(p, sw.DTensor) for each in p.placements]
    if all(each.is_replicate() for each in placements):
        raise AssertionError("the plan shards no parameter")
    return _step(tiny, tiny.model, batch)


def _step(tiny: TinyModel, model: nn.Module, batch: dict[str, Any]) -> State:
    torch.manual_seed(2)
    loss = tiny.loss(model, batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": {"": _global(loss)}, "gradient": {name: _global(value) for name, value in gradients.items()}}


def _global(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, sw.DTensor) else value).detach().clone()


def check_carrier(carrier: Carrier, checks: Iterable[str] = CHECKS, trace: bool = False) -> dict[str, str]:
    """What is found of one configuration: by check and mesh `passed`, or what is wrong; or why it was not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tiny = tiny_model(carrier)
            wanted = _step(tiny, tiny.model, tiny.batch)
        except Exception as error:
            if trace:
                traceback.print_exc()
            return {"not run": _words(error)}
        if not wanted["loss"][""].isfinite():
            return {"not run": "the loss of the plain model is not finite"}
        plans = [plan for plan, has in (("tp", carrier.tensor), ("ep", carrier.experts)) if has and "plans" in checks]
        found = {f"{plan} {way}": _found(carrier, plan, way, wanted, trace) for plan in plans for way in WAYS}
        if "files" in checks:
            found["files"] = _first(lambda: file_differences(carrier), trace)
        if "generate" in checks:
            generates = tiny.class_name.endswith("ForCausalLM")
            found["generate"] = _first(lambda: generation_differences(carrier), trace) if generates else DOES_NOT_APPLY
        return found


def _first(check: Callable[[], Iterator[str]], trace: bool) -> str:
    try:
        wrong = list(check())
    except Exception as error:
        if trace:
            traceback.print_exc()
        return _words(error)
    return wrong[0][:300] if wrong else PASSED


def _found(carrier: Carrier, plan: str, way: str, wanted: State, trace: bool) -> str:
    try:
        got = parallel_step(tiny_model(carrier), plan, way)
    except Exception as error:
        if trace:
            traceback.print_exc()
        return _words(error)
    wrong = [
        *differences({"loss": got["loss"]}, {"loss": wanted["loss"]}, LOSS),
        *differences({"gradient": got["gradient"]}, {"gradient": wanted["gradient"]}, GRADIENTS),
    ]
    return f"{wrong[0]} (and {len(wrong) - 1} more)" if wrong else PASSED


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]


# ---------------------------------------------------------------- the page

PAGE = """# Architectures of transformers

<!-- generated by `python -m tests.models.hf_architectures`; edit tests/models instead -->

Every configuration of transformers {transformers} that carries a tensor-parallel plan (TP) or an expert-parallel plan
(EP), as a tiny model with random weights. `sw.hf.parallelize` applies the plan on virtual ranks; forward and backward
are compared with the plain model in float32: the loss within 1e-5, each gradient within 1e-4 of its largest element.
Some sizes do not divide over the ranks. On (2, 2) the plan is over one axis, `fully_shard` and the batch over the
other. Run on {dates}, with torch {torch}.

*files*: `sw.hf.from_pretrained` on (4,) from files that transformers wrote gives the values of its own
`from_pretrained`, bit by bit, and the loss; `sw.hf.save_pretrained` writes files that transformers reads. *generate*:
the tokens of one device on (4,), from two prompts of different lengths: greedy, sampling, beam search, with a static
cache (without those that the plain model cannot do). An empty cell does not apply: another plan, or a model that does
not generate text by itself.

{summary}

| configuration | {head} |
| --- | {dashes} |
{rows}
{rest}"""


def summary(results: Results) -> str:
    """The counts, in one line."""
    run = [found for found in results.values() if "not run" not in found]
    cells = Counter(each == PASSED for found in run for each in _applying(found).values())
    whole = sum(all(each == PASSED for each in _applying(found).values()) for found in run)
    return (
        f"{len(results)} configurations: {whole} pass everywhere, {len(run) - whole} do not, {len(results) - len(run)} "
        f"were not run. {cells[True]} of {sum(cells.values())} runs pass."
    )


def _applying(found: Mapping[str, str]) -> dict[str, str]:
    return {key: each for key, each in found.items() if each != DOES_NOT_APPLY}


def page(results: Results, versions: Mapping[str, str]) -> str:
    """The page of the documentation."""
    keys = [f"{plan} {way}" for plan in ("tp", "ep") for way in WAYS] + ["files", "generate"]
    run = {name: found for name, found in results.items() if "not run" not in found}
    words = {None: " ", DOES_NOT_APPLY: " ", PASSED: "yes"}
    rows = [
        f"| {name} | {' | '.join(words.get(found.get(key), 'no') for key in keys)} |" for name, found in run.items()
    ]
    failures = [
        f"- {name}, {key}: {_escaped(each)}"
        for name, found in run.items()
        for key, each in found.items()
        if each not in (PASSED, DOES_NOT_APPLY)
    ]
    skipped = [f"- {name}: {_escaped(found['not run'])}" for name, found in results.items() if "not run" in found]
    parts = [("What does not pass", failures), ("Not run", skipped)]
    return PAGE.format(
        summary=summary(results),
        head=" | ".join(key.replace("tp", "TP").replace("ep (", "EP (") for key in keys),
        dashes=" | ".join(["---"] * len(keys)),
        rows="\n".join(rows),
        rest="".join(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in parts if lines),
        **versions,
    )


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def entries_of(path: Path | None) -> list[Entry]:
    """The lines of a file of results. A last line that was cut off is left out."""
    if path is None or not path.exists():
        return []
    found: list[Entry] = []
    for line in path.read_text().splitlines():
        try:
            found.append(Entry(**json.loads(line)))
        except ValueError:
            print(f"{path}: a line is not JSON and is left out: {line[:60]}")
    return found


def _of_these_versions(entry: Entry) -> bool:
    return (entry.transformers, entry.torch) == (version_of("transformers"), _torch_version())


def _torch_version() -> str:
    return torch.__version__.partition("+")[0]


def _merged(entries: Iterable[Entry]) -> Results:
    found: Results = {}
    for entry in entries:
        found[entry.name] = found.get(entry.name, {}) | entry.found
    return found


def _has(found: Mapping[str, str], check: str) -> bool:
    """Whether results have a check."""
    return "not run" in found or any(key == check or (check == "plans" and "(" in key) for key in found)


@functools.cache
def _known() -> dict[str, Carrier]:
    return {carrier.name: carrier for carrier in carriers()}


def run_one(name: str, checks: Sequence[str], trace: bool = False) -> Entry:
    """The checks of one configuration, in this process."""
    torch.set_num_threads(1)
    known = _known()
    for quiet in ("set_verbosity_error", "disable_progress_bar"):
        getattr(importlib.import_module("transformers.utils.logging"), quiet)()
    started = time.perf_counter()
    found = check_carrier(known[name], checks, trace=trace)
    seconds = round(time.perf_counter() - started, 2)
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    return Entry(name, found, version_of("transformers"), _torch_version(), today, seconds)


def run_all(missing_checks: Mapping[str, Sequence[str]], jobs: int, seconds: float, trace: bool) -> Iterator[Entry]:
    """Results as they come. After `seconds` no other configuration begins."""
    started = time.perf_counter()
    waiting = list(missing_checks)
    if jobs == 1:
        for name in waiting:
            if time.perf_counter() - started < seconds:
                yield run_one(name, missing_checks[name], trace)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running: set[Future[Entry]] = set()
        while waiting or running:
            while waiting and len(running) < jobs and time.perf_counter() - started < seconds:
                name = waiting.pop(0)
                running.add(pool.submit(run_one, name, missing_checks[name], trace))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                yield each.result()


def _checks_left(names: Iterable[str], kept: Results, checks: Sequence[str], again: bool) -> dict[str, list[str]]:
    order = sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    left = {name: [each for each in checks if again or not _has(kept.get(name, {}), each)] for name in order}
    return {name: each for name, each in left.items() if each}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="configurations, without Config; default: all that have no results")
    parser.add_argument("--results", type=Path, help="a file of results, to go on from and to add to")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other configuration after these")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS, help="which checks; default: all")
    parser.add_argument("--trace", action="store_true", help="print the stack of each error")
    options = parser.parse_args()
    if (reason := missing("transformers")) is not None:
        print(reason)
        return 1
    if unknown := set(options.names) - _known().keys():
        parser.error(f"no configuration with a plan is called {', '.join(sorted(unknown))}")
    print(f"transformers {version_of('transformers')}, torch {_torch_version()}, {len(_known())} configurations")
    entries = [entry for entry in entries_of(options.results) if _of_these_versions(entry)]
    left = _checks_left(options.names or _known(), _merged(entries), options.checks, again=bool(options.names))
    for entry in run_all(left, options.jobs, options.seconds, options.trace):
        entries.append(entry)
        wrong = {key: each for key, each in _applying(entry.found).items() if each != PASSED}
        print(f"{entry.name}: {wrong or PASSED} ({entry.seconds} s)", flush=True)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(asdict(entry)) + "\n")
    merged = _merged(entries)
    results = {name: merged[name] for name in _known() if name in merged}
    print(summary(results))
    if options.write:
        dates = sorted({entry.date for entry in entries})
        versions = {"transformers": version_of("transformers"), "torch": _torch_version(), "dates": ", ".join(dates)}
        options.write.write_text(page(results, versions))
    return int(
        any(
            each != PASSED for found in results.values() if "not run" not in found for each in _applying(found).values()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
