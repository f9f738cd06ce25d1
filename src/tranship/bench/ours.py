"""Our side of `bench e2e`: a recipe made in code, run by `tranship.run`, its step times read from RUN/metrics.jsonl."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tranship.config.schema import Config
from tranship.observe.jsonl import read_jsonl
from tranship.observe.machine import versions


def make_config(spec: dict[str, Any]) -> Config:
    """The workload as a configuration: validation and console off, groups without signal kept, so that every sample is
    trained on as in the other sides."""
    num_samples = spec["num_prompts"] * spec["group_size"]
    engine = "tranship.bench.drawn_lengths:DrawnLengthsEngine" if spec["lengths"] else "native"
    return Config.model_validate(
        {
            "run": {"dir": str(Path(spec["folder"]) / "run"), "seed": spec["seed"], "export": False},
            "model": {"path": spec["model"]},
            "data": {"train": {"source": spec["prompts"]}, "shuffle": False},
            "rollout": {
                "engine": engine,
                "group_size": spec["group_size"],
                "max_response_tokens": spec["max_new_tokens"],
                "dtype": spec["dtype"],
                "max_running": num_samples,
                "ignore_eos": bool(spec["lengths"]),
            },
            "reward": {"function": f"{spec['reward_file']}:compute_score"},
            "algorithm": {"keep_groups_without_signal": True},
            "train": {
                "steps": spec["steps"],
                "batch_size": num_samples,
                "precision": spec["dtype"],
                "optimizer": {"learning_rate": spec["learning_rate"]},
            },
            "placement": {"runtime": spec.get("runtime", "inline"), "layout": spec.get("layout", "fused")},
            "validation": {"before_training": False, "after_training": False},
            "observe": {"console": "off", "trackers": (), "samples_per_step": 0},
        }
    )


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The steps of a run as the other sides report them, with the share of time that stages waited for the dock."""
    steps = []
    for row in read_jsonl(run_dir / "metrics.jsonl"):
        if row["kind"] != "step":
            continue
        tokens = row["perf/tokens_generated"]
        steps.append(
            {
                "ended_at": row["time"],
                "seconds": row["timing_s/step"],
                "stages": {
                    "gen": row["timing_s/gen"],
                    "reward": row.get("timing_s/reward", 0.0),
                    "train": row["timing_s/update_actor"],
                    "weights": row.get("timing_s/update_weights", 0.0),
                },
                "tokens": tokens,
                "samples": row["samples/scored"] + row["samples/masked"] + row["samples/invalid"],
                "invalid": row["samples/invalid"],
                "longest": row["response_length/max"],
                "prompt_tokens": row["perf/total_num_tokens"] - tokens,
                "loss": row["actor/loss"],
                "dock_share": row["dock/wait_share"],
                "logprob_gap_max": row.get("mismatch/logprob_gap_max"),
            }
        )
    return steps


def weights_changed(before: Path, run_dir: Path) -> bool:
    """Whether the first tensor of the run's last checkpoint differs from the one of the same name in a model folder."""
    checkpoints = run_dir / "checkpoints"
    after = checkpoints / (checkpoints / "latest").read_text().strip() / "model"
    with safe_open(before / "model.safetensors", "pt") as old, safe_open(after / "model.safetensors", "pt") as new:
        name = next(name for name in sorted(old.keys()) if name in set(new.keys()))
        return not bool((old.get_tensor(name).float() == new.get_tensor(name).float()).all())


def main(spec_file: str) -> None:
    """Run the steps of the spec and write the report."""
    from tranship.trainer import run

    spec = json.loads(Path(spec_file).read_text())
    result = run(make_config(spec))
    steps = read_steps(result.run_dir)
    report = {
        "first_step_at": steps[0]["ended_at"] - steps[0]["seconds"],
        "steps": steps,
        "weights_changed": weights_changed(Path(spec["model"]), result.run_dir),
        "versions": versions(),
    }
    Path(spec["report"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
