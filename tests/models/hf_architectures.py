"""Every architecture of the installed transformers that carries a plan, parallel by it, against the plain model.

`python -m tests.models.hf_architectures` runs them all, one after another; names of configurations choose some, and
`--checks plans files generate` some of the checks. With `--results FILE` what was found is kept there, and a later run
does only what is missing; `--write PAGE` writes the page of the documentation from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
State = dict[str, dict[str, torch.Tensor]]
Results = dict[str, dict[str, str]]  # of each configuration: "tp (2,)" and what was found


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
        if "generate" in checks and tiny.class_name.endswith("ForCausalLM"):
            found["generate"] = _first(lambda: generation_differences(carrier), trace)
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
other. With torch {torch}.

*files*: `sw.hf.from_pretrained` on (4,) from files that transformers wrote gives the values of its own
`from_pretrained`, bit by bit, and the loss; `sw.hf.save_pretrained` writes files that transformers reads. *generate*:
the tokens of one device on (4,), from two prompts of different lengths: greedy, sampling, beam search, with a static
cache. An empty cell was not run.

{summary}

| configuration | {head} |
| --- | {dashes} |
{rows}
{rest}"""


def page(results: Results, versions: Mapping[str, str]) -> str:
    """The page of the documentation."""
    keys = [f"{plan} {way}" for plan in ("tp", "ep") for way in WAYS] + ["files", "generate"]
    run = {name: found for name, found in results.items() if "not run" not in found}
    cells = Counter(each == PASSED for found in run.values() for each in found.values())
    whole = sum(all(each == PASSED for each in found.values()) for found in run.values())
    words = {None: " ", PASSED: "yes"}
    rows = [
        f"| {name} | {' | '.join(words.get(found.get(key), 'no') for key in keys)} |" for name, found in run.items()
    ]
    failures = [
        f"- {name}, {key}: {_escaped(each)}"
        for name, found in run.items()
        for key, each in found.items()
        if each != PASSED
    ]
    skipped = [f"- {name}: {_escaped(found['not run'])}" for name, found in results.items() if "not run" in found]
    parts = [("What does not pass", failures), ("Not run", skipped)]
    return PAGE.format(
        summary=f"{len(results)} configurations: {whole} pass everywhere, {len(run) - whole} do not, "
        f"{len(skipped)} were not run. {cells[True]} of {sum(cells.values())} runs pass.",
        head=" | ".join(key.replace("tp", "TP").replace("ep (", "EP (") for key in keys),
        dashes=" | ".join(["---"] * len(keys)),
        rows="\n".join(rows),
        rest="".join(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in parts if lines),
        **versions,
    )


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def _has(found: dict[str, str], check: str) -> bool:
    """Whether results have a check. One that does not apply (generating by an encoder) is tried again."""
    return "not run" in found or any(key == check or (check == "plans" and "(" in key) for key in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="configurations, without Config; default: all")
    parser.add_argument("--results", type=Path, help="a file of results, to go on from and to add to")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other configuration after these")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS, help="which checks; default: all")
    parser.add_argument("--trace", action="store_true", help="print the stack of each error")
    options = parser.parse_args()
    if (reason := missing("transformers")) is not None:
        print(reason)
        return 1
    torch.set_num_threads(1)
    known = list(carriers())
    kept: Results = json.loads(options.results.read_text()) if options.results and options.results.exists() else {}
    started = time.perf_counter()
    for carrier in known:
        if options.names and carrier.name not in options.names:
            continue
        checks = [check for check in options.checks if options.names or not _has(kept.get(carrier.name, {}), check)]
        if not checks or time.perf_counter() - started > options.seconds:
            continue
        found = check_carrier(carrier, checks, trace=options.trace)
        kept[carrier.name] = kept.get(carrier.name, {}) | found
        wrong = {key: each for key, each in found.items() if each != PASSED}
        print(f"{carrier.name}: {wrong or PASSED}", flush=True)
        if options.results:
            options.results.write_text(json.dumps(kept, indent=1))
    results = {carrier.name: kept[carrier.name] for carrier in known if carrier.name in kept}
    if options.write:
        versions = {"transformers": version_of("transformers"), "torch": torch.__version__.partition("+")[0]}
        options.write.write_text(page(results, versions))
    return int(any(each != PASSED for found in results.values() if "not run" not in found for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
