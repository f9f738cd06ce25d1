"""The arithmetic of the sample flow on paper."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "dock_on_paper.py"


@pytest.fixture(scope="module")
def paper():
    spec = importlib.util.spec_from_file_location("dock_on_paper", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dock_on_paper"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["dock_on_paper"]


def test_one_node_needs_no_network(paper):
    assert all(load.network_bytes == 0 for load in paper.loads(1, paper.Rates(), False).values())


def test_the_central_buffer_grows_with_the_nodes_and_the_spread_ones_do_not(paper):
    few, many = (paper.loads(nodes, paper.Rates(), False) for nodes in (64, 1024))
    assert few["central"].network_bytes == pytest.approx(6.1e9, rel=0.05)
    assert many["central"].network_bytes > 15 * few["central"].network_bytes
    for design in ("hashed", "tranship"):
        assert many[design].network_bytes < 1.05 * few[design].network_bytes
    assert many["tranship"].network_bytes < many["hashed"].network_bytes


def test_wide_columns_are_most_of_the_bytes(paper):
    assert sum(paper.moved(True)) > 10 * sum(paper.moved(False))


def test_rates_come_from_the_benchmark(paper, tmp_path):
    file = tmp_path / "figures.json"
    file.write_text(json.dumps({"round_trip_ms_4x4_central": 87.2, "controller_samples_per_s": 2e6}))
    rates = paper.rates_of(file)
    assert rates.central_bytes_per_s == pytest.approx(1e9)
    assert rates.controller_samples_per_s == 2e6
    assert paper.table(rates, False).count("\n") == len(paper.NODES) + 1
