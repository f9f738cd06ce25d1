"""The wheel builds, installs alone and runs a recipe outside the checkout."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = """
run: {dir: out}
model: {path: tiny-random}
data:
  train: {source: sums, args: {low: 1, high: 20}}
rollout: {group_size: 4, max_response_tokens: 8}
train: {steps: 2, batch_size: 8}
observe: {console: plain}
"""


def execute(command: list[str], cwd: Path, timeout_s: float, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=cwd, env=env | environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, (
        f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that the build leaves nothing in the checkout."""
    source = tmp_path_factory.mktemp("source")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".*", "runs")
    shutil.copytree(ROOT / "src", source / "src", ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    execute([*pip, "--wheel-dir", str(out), "."], source, 300)
    (file,) = out.glob("tranship-*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel in it, which sees this one's packages but not its tranship."""
    folder = tmp_path_factory.mktemp("environment")
    execute([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder, 120)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    execute([*pip, str(wheel)], folder, 120)
    purelib = execute([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder, 60).strip()
    seen = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    # Paths that a .pth file adds come after the environment's own, and .pth files inside them are not read, so the
    # editable install of this checkout stays out of sight.
    (Path(purelib) / "packages_of_the_tests.pth").write_text("\n".join(seen) + "\n")
    return folder / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        fields = message_from_bytes(archive.read(metadata))
    assert {name.split("/")[0] for name in names} == {"tranship", metadata.split("/")[0]}
    modules = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src" / "tranship").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}
    assert "tranship/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.11"
    assert {"ray", "convert", "plot", "all", "dev"} <= set(fields.get_all("Provides-Extra", []))
    core = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in core if line.startswith(("ray", "matplotlib", "gguf", "pytest"))]


def test_the_installed_package_is_the_wheels_own(installed: Path, tmp_path: Path) -> None:
    where = execute([str(installed / "python"), "-c", "import tranship; print(tranship.__file__)"], tmp_path, 60)
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_the_wheel_runs_a_recipe_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    tranship = str(installed / "tranship")
    cache = {"TRANSHIP_CACHE": str(tmp_path / "cache")}
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert execute([tranship, "--version"], tmp_path, 60).startswith("tranship ")
    shown = execute([tranship, "show", "recipe.yaml", "train.steps=3"], tmp_path, 60)
    assert "steps: 3" in shown
    folder = execute([tranship, "model", "get", "tiny-random"], tmp_path, 120, **cache).splitlines()[-1]
    assert (Path(folder) / "config.json").is_file()
    execute([tranship, "check", "recipe.yaml"], tmp_path, 120, **cache)
    execute([tranship, "train", "recipe.yaml"], tmp_path, 300, **cache)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "out" / "model" / "config.json").is_file()
