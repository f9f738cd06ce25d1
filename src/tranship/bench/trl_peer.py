"""TRL's GRPOTrainer as it comes, in fp32 on a CPU: one side of `bench e2e`.

A script for an environment of its own, in which tranship is not installed: `PEERS/trl/bin/python trl_peer.py SPEC`.
Only what defines the workload is set; everything else is TRL's default (gradient checkpointing among it).
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import TrainerCallback


class Clock(TrainerCallback):
    """Wall time of each step, and what was made in it."""

    def __init__(self, trainer_box: list[Any], made: list[list[int]]) -> None:
        self.first_step_at = 0.0
        self.steps: list[dict[str, Any]] = []
        self._box = trainer_box
        self._made = made
        self._began = 0.0
        self._seen = 0
        self._gen_s = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins with its generation."""
        self.first_step_at = self.first_step_at or time.time()
        self._began = time.perf_counter()
        self._seen = len(self._made)
        self._gen_s = self._box[1]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped."""
        seconds = time.perf_counter() - self._began
        lengths = [length for call in self._made[self._seen :] for length in call]
        gen = self._box[1] - self._gen_s
        self.steps.append(
            {
                "seconds": seconds,
                "stages": {"gen": gen, "train": seconds - gen},
                "tokens": sum(lengths),
                "samples": len(lengths),
                "longest": max(lengths),
            }
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The loss, and all tokens so far, come after the step's end."""
        if logs and "loss" in logs and self.steps:
            self.steps[-1]["loss"] = float(logs["loss"])
            self.steps[-1]["all_tokens"] = int(logs["num_tokens"])


def main(spec_file: str) -> None:
    """Run the steps of the spec and write the report."""
    with open(spec_file) as file:
        spec = json.load(file)
    with open(spec["prompts"]) as file:
        rows = [json.loads(line) for line in file]
    score = load_reward(spec["reward_file"])
    made: list[list[int]] = []

    def reward(completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        made.append([len(ids) for ids in completion_ids])
        return [score("sums", completion[0]["content"], "") for completion in completions]

    samples = spec["num_prompts"] * spec["group_size"]
    config = trl.GRPOConfig(
        output_dir=spec["folder"],
        per_device_train_batch_size=spec["trl_rows"],
        gradient_accumulation_steps=samples // spec["trl_rows"],
        num_generations=spec["group_size"],
        max_completion_length=spec["max_new_tokens"],
        max_steps=spec["steps"],
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        bf16=False,
        use_cpu=True,
        seed=spec["seed"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    trainer = trl.GRPOTrainer(model=spec["model"], reward_funcs=reward, args=config, train_dataset=data)
    box: list[Any] = [trainer, 0.0]
    time_generation(trainer.model, box)
    clock = Clock(box, made)
    trainer.add_callback(clock)
    weight = next(trainer.model.parameters()).detach()
    before = weight.clone()
    trainer.train()
    report = {
        "first_step_at": clock.first_step_at,
        "steps": with_prompt_tokens(clock.steps),
        "weights_changed": not torch.equal(before, weight),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
    }
    with open(spec["report"], "w") as file:
        json.dump(report, file)


def time_generation(model: Any, box: list[Any]) -> None:
    """Add the seconds that the model spends in `generate` to box[1]."""
    generate = model.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return generate(*args, **kwargs)
        finally:
            box[1] += time.perf_counter() - began

    model.generate = timed


def with_prompt_tokens(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """TRL logs the running sum of prompt and completion tokens: take the completions out."""
    before = 0
    for step in steps:
        step["prompt_tokens"] = step["all_tokens"] - before - step["tokens"]
        before = step["all_tokens"]
    return steps


def load_reward(path: str) -> Any:
    """`compute_score` of a file."""
    spec = importlib.util.spec_from_file_location("bench_reward", path)
    assert spec is not None and spec.loader is not None, path  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score


if __name__ == "__main__":
    main(sys.argv[1])
