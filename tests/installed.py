"""The wheel and the sdist, installed into empty environments of several Pythons, pass a smoke test.

    python -m tests.installed                                   # the Python that runs this
    python -m tests.installed python3.12 python3.13             # others
    python -m tests.installed --without-torch python3.12        # what can be seen without torch

Each environment gets torch from the package index, which may be gigabytes; nothing of the source tree is on its path.
Without torch, the package is built and installed by that Python, every file is compiled by it with warnings as errors,
metadata and type marker are there, and an import says which package is missing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
SMOKE = """
import tempfile
import torch
import torch.nn.functional as F
import shardwise as sw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

assert "site-packages" in sw.__file__, sw.__file__
mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 6))
x = torch.randn(5, 6)
expected = F.mse_loss(model(x), x)
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
sw.fully_shard(model, mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters())
batch = sw.distribute_tensor(x, mesh, [sw.Shard(0), sw.Replicate()])
loss = F.mse_loss(model(batch), batch)
loss.backward()
optimizer.step()
assert abs(loss.item() - expected.item()) < 1e-6
with tempfile.TemporaryDirectory() as folder:
    sw.checkpoint.save({"model": model}, folder + "/one")
    sw.checkpoint.load({"model": model}, folder + "/one")
step = sw.captured(lambda a: (a @ a.T).relu().sum())
assert len({float(step(batch).full_tensor()) for _ in range(4)}) == 1
with sw.dry_run() as run:
    large = sw.init_device_mesh("cuda", (64,))
    sw.zeros(640, 64, device_mesh=large, placements=[sw.Shard(0)]).redistribute(placements=[sw.Shard(1)])
assert run.bytes == 640 * 64 * 4 // 64 * 63 // 64
print("smoke test passed:", sw.__version__)
"""

WITHOUT_TORCH = """
import compileall, importlib.metadata, sys, sysconfig
from pathlib import Path

place = Path(sysconfig.get_path("purelib")) / "shardwise"
assert compileall.compile_dir(place, quiet=1, force=True), "a file does not compile"
about = importlib.metadata.metadata("shardwise")
assert about["Requires-Python"] == ">=3.11", about["Requires-Python"]
version = f"Programming Language :: Python :: {sys.version_info.major}.{sys.version_info.minor}"
assert version in about.get_all("Classifier"), version
assert any(line.startswith("torch") for line in about.get_all("Requires-Dist"))
assert [point.name for point in importlib.metadata.entry_points(group="console_scripts", module="shardwise.cli")]
assert (place / "py.typed").exists()
assert not [path for path in place.parent.glob("*") if path.name in ("tests", "bench", "examples")]
try:
    import shardwise
except ModuleNotFoundError as error:
    assert error.name == "torch", error
else:
    raise AssertionError("torch is here")
print("without torch:", about["Version"], "on", sys.version.split()[0])
"""


def build(folder: Path) -> list[Path]:
    """The sdist, and the wheel that is made from it."""
    code = "import hatchling.build as b, sys; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
    made = []
    for kind in ("sdist", "wheel"):
        command = [sys.executable, "-c", code, kind, str(folder)]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        made.append(folder / done.stdout.split()[-1])
    return made


def try_in(python: str, package: Path, folder: Path, with_torch: bool = True) -> None:
    """Install a package into a new environment of a Python, and run the smoke test and the command line there."""
    environment = folder / f"environment-{package.suffix[1:]}"
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    inside = str(environment / "bin" / "python")
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "hatchling", "editables"], check=True)
    if not with_torch:
        subprocess.run([*pip, "--no-build-isolation", "--no-deps", str(package)], check=True)
        subprocess.run([inside, "-W", "error", "-c", WITHOUT_TORCH], cwd=folder, env=clean, check=True)
        return
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "--no-build-isolation", f"{package}[checkpoint]"], check=True)
    subprocess.run([inside, "-c", SMOKE], cwd=folder, env=clean, check=True)
    subprocess.run([str(environment / "bin" / "shardwise"), "--version"], cwd=folder, env=clean, check=True)
    plan = [str(environment / "bin" / "shardwise"), "plan", "f32[8,8] S0 -> S1", "--mesh", "4"]
    subprocess.run(plan, cwd=folder, env=clean, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("pythons", nargs="*", default=[sys.executable])
    parser.add_argument("--without-torch", action="store_true", help="do not download torch: build, install, compile")
    asked = parser.parse_args()
    for python in asked.pythons:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for package in build(folder):
                try_in(python, package, folder, with_torch=not asked.without_torch)
                print(f"{python}: {package.name} is fine", flush=True)


if __name__ == "__main__":
    main()
