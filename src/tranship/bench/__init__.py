"""Benchmarks by name: each is a function (quick, json_file) -> exit code that prints a table. Peers live elsewhere."""

from collections.abc import Mapping

BENCHES: Mapping[str, str] = {
    "dock": "tranship.bench.dock:main",
    "e2e": "tranship.bench.e2e:main",
    "rollout": "tranship.bench.rollout:main",
}
