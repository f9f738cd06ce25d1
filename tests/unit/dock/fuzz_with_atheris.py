"""Fuzzes one target with atheris:

    python -m tests.unit.dock.fuzz_with_atheris TARGET FOLDER SECONDS [OPTION OF LIBFUZZER ...]

What it finds is written to FOLDER. Needs atheris, which the dev extra brings where it has a build. Memory is bounded by
the kernel: libFuzzer's own limit counts a peak that a process inherits from the one that started it.
"""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tranship.dock"]):
    from tests.unit.dock import fuzz_targets

MAX_DATA_BYTES = 2 << 30


def main(name: str, folder: str, seconds: str, *options: str) -> None:
    corpus, work = Path(folder, "corpus"), Path(folder, "work")
    corpus.mkdir(parents=True, exist_ok=True)
    work.mkdir(exist_ok=True)
    target = fuzz_targets.TARGETS[name](work)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed{number}").write_bytes(seed)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    limits = [f"-max_total_time={seconds}", f"-max_len={fuzz_targets.MAX_BYTES}", "-timeout=20", "-seed=1"]
    limits.append("-rss_limit_mb=0")
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={folder}/", *options, str(corpus)], target.run)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
