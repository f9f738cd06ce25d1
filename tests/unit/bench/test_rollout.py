"""Figures of the rollout benchmark: from fake rounds, and from real sides at the smallest size."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from tranship.bench import BENCHES, rollout_ceiling, rollout_sides
from tranship.bench import rollout as bench
from tranship.bench.report import Report
from tranship.bench.rollout import BARS, WORKLOADS, add_figures, main
from tranship.bench.rollout_ceiling import matrix_elements
from tranship.bench.rollout_sides import Sides
from tranship.bench.rollout_work import Case, check_made, prompts
from tranship.lookup import resolve
from tranship.models.tiny import make_tiny
from tranship.rollout.native.shape import read_shape
from tranship.types import RunError, UserError

CASE = Case("llama", "fp32", (32,))


def made(tokens: int, decode_ms: float) -> dict[str, Any]:
    return {"tokens": tokens, "seconds": 1.0, "decode_ms": decode_ms}


def round_of(native: int, other: int, ceiling_ms: float) -> bench.Round:
    return {
        ("native", 32): made(native, 10.0),
        ("vllm", 32): made(other, 20.0),
        ("generate", 32): {"tokens": other, "seconds": 2.0},
        ("ceiling", 32): {"step_ms": ceiling_ms},
    }


def test_figures_are_ratios_within_a_round_and_fractions_of_the_best_ceiling() -> None:
    report = Report("", BARS)
    add_figures(report, CASE, "", [round_of(100, 50, 8.0), round_of(300, 100, 5.0)])
    assert report.rounds["vs_vllm_e2e_b32"] == [2.0, 3.0]
    assert report.rounds["vs_vllm_decode_b32"] == [2.0, 2.0]
    assert report.rounds["vs_generate_e2e_b32"] == [4.0, 6.0]
    assert report.rounds["fraction_of_ceiling_b32"] == [0.5, 0.5]
    assert report.rounds["tokens_per_s_decode_native_b32"] == [3200.0, 3200.0]
    assert "tokens_per_s_decode_generate_b32" not in report.rounds
    add_figures(report, CASE, "_bf16", [round_of(100, 50, 8.0)])
    assert report.rounds["vs_vllm_e2e_b32_bf16"] == [2.0]


def test_a_side_that_left_within_the_rounds_gives_no_ratio() -> None:
    report = Report("", BARS)
    whole, rest = round_of(100, 50, 8.0), round_of(100, 50, 8.0)
    del rest[("vllm", 32)]
    add_figures(report, CASE, "", [whole, rest])
    assert "vs_vllm_e2e_b32" not in report.rounds
    assert report.rounds["vs_generate_e2e_b32"] == [4.0, 4.0]
    bench._add_missing(report, ["fp32"])
    assert "vs_vllm_e2e_b32" in report.missing
    assert "vs_vllm_e2e_b32_bf16" not in report.missing
    assert "vs_generate_e2e_b32" not in report.missing


def test_a_busy_machine_is_named() -> None:
    busy, quiet = Report("", BARS), Report("", BARS)
    bench._add_load(busy, 7.2)
    bench._add_load(quiet, 0.1)
    assert busy.to_json()["load_average"] == 7.2
    assert "load average 7.2" in busy.notes[0]
    assert not quiet.notes


def test_bars_are_figures_of_the_workloads() -> None:
    named = {
        f"vs_vllm_{what}_b{batch}{end}"
        for what in ("e2e", "decode")
        for batch in (8, 32, 64, 128)
        for end in ("", "_bf16")
    }
    assert named <= set(BARS)
    assert WORKLOADS["fp32"].batches == WORKLOADS["bf16"].batches == (8, 32, 64, 128)


def test_a_peer_that_is_not_there_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSHIP_CACHE", str(tmp_path / "empty"))
    report = Report("", BARS)
    sides = Sides(CASE, tmp_path, tmp_path, report)
    sides.open(["vllm"])
    assert not sides.there
    assert sides.ask("vllm", do="generate", batch=8, seed=0) is None
    assert "make bench-env" in report.notes[0]


class Said:
    """A process that answers with what it was made with."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer, self.ended = answer, False

    def ask(self, message: Any, limit_s: float) -> dict[str, Any]:
        return self.answer

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("side", ["native", "vllm"])
def test_what_a_side_makes_is_compared_with_a_plain_forward_pass(tmp_path: Path, side: str) -> None:
    report = Report("", BARS)
    sides = Sides(CASE, tmp_path, tmp_path, report)
    process: Any = Said({"prompts": [[1]], "ids": [[2, 3]], "logprobs": [[-1.0, -2.0]]})
    sides.there[side] = process
    reference: Any = Said({"logprobs": [[-1.0, -2.00001]]})
    assert sides.check(side, reference) == pytest.approx(1e-5, rel=1e-3)
    wrong: Any = Said({"logprobs": [[-1.0, -2.5]]})
    if side == "native":
        with pytest.raises(RunError, match=r"log-probs are 0\.25 off"):
            sides.check(side, wrong)
    else:
        assert sides.check(side, wrong) is None
        assert "log-probs are 0.25 off" in report.notes[0]
    assert process.ended
    assert not sides.there


def test_responses_are_counted() -> None:
    check_made([[1, 2], [1, 3]], [[-1.0, -2.0]] * 2, 2, 2)
    for ids, logprobs, batch in (
        ([[1, 2]], [[-1.0, -2.0]], 2),
        ([[1, 2], [1]], [[-1.0, -2.0]] * 2, 2),
        ([[1, 2], [1, 2]], [[-1.0, -2.0]] * 2, 2),
        ([[1, 2], [1, 3]], [[-1.0, float("nan")], [-1.0, -2.0]], 2),
        ([[1, 2], [1, 3]], [[-1.0, 0.5], [-1.0, -2.0]], 2),
    ):
        with pytest.raises(AssertionError):
            check_made(ids, logprobs, batch, 2)


def test_prompts_are_of_about_seventy_tokens_and_new_with_every_seed() -> None:
    first, again, other = prompts(16, 300, 0), prompts(16, 300, 0), prompts(16, 300, 1)
    assert first == again != other
    assert {len(prompt) for prompt in first} <= set(range(66, 75))
    assert all(0 <= token < 300 for prompt in first for token in prompt)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_the_ceiling_counts_every_matrix_once(tmp_path: Path, family: str) -> None:
    folder = make_tiny(tmp_path, family, vocab_size=300, hidden=64, layers=2)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    wanted = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    read, used = matrix_elements(read_shape(folder, 100), rows=1000)
    assert read == wanted
    assert (used < read) == (family != "llama")
    assert matrix_elements(read_shape(folder, 100), rows=1)[0] == used


def test_the_ceiling_rests_on_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_ceiling, "_MEASURE_S", 0.02)
    monkeypatch.setattr(rollout_ceiling, "_COPY_BYTES", 1 << 20)
    side = rollout_ceiling.Side()
    folder = make_tiny(tmp_path, vocab_size=300, hidden=64, layers=2)
    side.open(str(folder), "fp32", torch.get_num_threads(), 8)
    said = side.measure(8)
    read, used = matrix_elements(read_shape(folder, 100), 8)
    seconds = 4 * read / (said["bandwidth_gb_s"] * 1e9) + 2 * 8 * used / (said["gemm_gflops"] * 1e9)
    assert said["step_ms"] == pytest.approx(1e3 * seconds, rel=1e-6)


def test_real_sides_at_the_smallest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("rollout", BENCHES, "bench") is main
    monkeypatch.setenv("TRANSHIP_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(bench, "make_tiny", lambda folder, name: make_tiny(folder, name, 300, hidden=64, layers=2))
    monkeypatch.setattr(bench, "_QUICK_BATCHES", (32,))
    monkeypatch.setattr(bench, "Console", lambda: Console(file=io.StringIO(), width=200))
    monkeypatch.setattr(rollout_sides.os, "sched_getaffinity", lambda pid: {0})
    file = tmp_path / "rollout.json"
    assert main(quick=True, json_file=file, workloads="tiny", sides="native,generate,vllm", rounds=1) == 0
    values = json.loads(file.read_text())
    assert values["logprob_gap_max_tiny"] <= 1e-4
    for name in ("vs_generate_e2e_b32", "update_vs_memcpy", "repack_vs_memcpy"):
        assert values[f"{name}_tiny"] > 0, name
    assert "vs_vllm_e2e_b32_tiny" not in values
    assert any("make bench-env" in note for note in values["notes"])


@pytest.mark.parametrize(("named", "message"), [({"sides": "vllm"}, "native"), ({"workloads": "W"}, "has no 'W'")])
def test_a_choice_that_is_not_there_is_refused(named: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(quick=True, json_file=None, **named)
