"""GRPO as a user would write it in one file: transformers' `generate`, padded batches, torch. One side of `bench e2e`.

It has the two public lines that make it fast on a CPU, fp32 products by oneDNN and a fused AdamW; it computes logits
for response positions only, and trains in microbatches. Run as `python -m tranship.bench.plain_loop SPEC`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

CLIP = 0.2
MAX_GRAD_NORM = 1.0


class DrawnLengths(StoppingCriteria):
    """Ends row i after lengths[i] new tokens."""

    def __init__(self, prompt_tokens: int, lengths: list[int]) -> None:
        self._ends = torch.tensor(lengths) + prompt_tokens

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        return self._ends <= input_ids.shape[1]


class PlainLoop:
    """The model, its optimizer and one step of GRPO."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_float32_matmul_precision("medium")
        torch.manual_seed(spec["seed"])
        self.spec = spec
        self.tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model: Any = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=spec["learning_rate"], weight_decay=0.0, fused=True
        )
        eos = self.model.generation_config.eos_token_id
        self.eos_ids = torch.tensor(eos if isinstance(eos, list) else [eos])
        self.score = load_reward(spec["reward_file"])

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 autocast, if asked for."""
        if self.spec["dtype"] == "bf16":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def step(self, prompts: list[Any], lengths: list[int] | None) -> dict[str, Any]:
        """Sample, score, update: what was made and the seconds of each stage."""
        began = time.perf_counter()
        batch = self.generate(prompts, lengths)
        generated = time.perf_counter()
        texts = self.tokenizer.batch_decode(batch["responses"], skip_special_tokens=True)
        rewards = torch.tensor([self.score("sums", text, "") for text in texts])
        groups = rewards.view(-1, self.spec["group_size"])
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1)
        scored = time.perf_counter()
        loss = self.update(batch, advantages)
        ended = time.perf_counter()
        mask = batch["mask"]
        return {
            "seconds": ended - began,
            "stages": {"gen": generated - began, "reward": scored - generated, "train": ended - scored},
            "tokens": int(mask.sum()),
            "samples": len(mask),
            "longest": int(mask.sum(1).max()),
            "prompt_tokens": int(batch["prompt_mask"].sum()),
            "loss": loss,
        }

    @torch.no_grad()
    def generate(self, prompts: list[Any], lengths: list[int] | None) -> dict[str, torch.Tensor]:
        """ids [N, P + T], prompt_mask [N, P], responses [N, T] and their mask [N, T]."""
        self.model.eval()
        encoded = self.tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
        )
        width = encoded["input_ids"].shape[1]
        config = GenerationConfig(
            max_new_tokens=self.spec["max_new_tokens"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=self.spec["group_size"],
            eos_token_id=None if lengths else self.eos_ids.tolist(),
            pad_token_id=self.tokenizer.pad_token_id,
        )
        stop = StoppingCriteriaList([DrawnLengths(width, lengths)] if lengths else [])
        with self.precision():
            ids = self.model.generate(**encoded, generation_config=config, stopping_criteria=stop)
        responses = ids[:, width:]
        positions = torch.arange(responses.shape[1])
        if lengths:
            mask = positions < torch.tensor(lengths)[:, None]
        else:
            ended = torch.isin(responses, self.eos_ids)
            mask = ended.cumsum(1) - ended.long() == 0
        prompt_mask = encoded["attention_mask"].repeat_interleave(self.spec["group_size"], 0)
        return {"ids": ids, "responses": responses, "mask": mask, "prompt_mask": prompt_mask}

    def update(self, batch: dict[str, torch.Tensor], advantages: torch.Tensor) -> float:
        """One optimizer step on the clipped loss, its mean over the batch's response tokens; the loss."""
        self.model.train()
        num_tokens = batch["mask"].sum()
        total = 0.0
        for rows in torch.arange(len(advantages)).split(self.spec["plain_rows"]):
            mask = batch["mask"][rows]
            with self.precision():
                logprobs = self.logprobs(batch["ids"][rows], batch["prompt_mask"][rows], mask)
            # One update per batch: the old log-probs are these.
            ratio = (logprobs - logprobs.detach()).exp()
            advantage = advantages[rows, None]
            token_loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            loss = token_loss.masked_fill(~mask, 0.0).sum() / num_tokens
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def logprobs(self, ids: torch.Tensor, prompt_mask: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """float32 [rows, T]: the log-prob of each response token."""
        attention = torch.cat([prompt_mask, mask.long()], 1)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        width = mask.shape[1]
        logits = self.model(
            ids, attention_mask=attention, position_ids=positions, logits_to_keep=width + 1, use_cache=False
        ).logits
        flat = logits[:, :-1].float().flatten(0, 1)
        return -F.cross_entropy(flat, ids[:, -width:].flatten(), reduction="none").view(mask.shape)


def load_reward(path: str) -> Any:
    """`compute_score` of a file."""
    spec = importlib.util.spec_from_file_location("bench_reward", path)
    assert spec is not None and spec.loader is not None, path  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score


def main(spec_file: str) -> None:
    """Run the steps of the spec and write the report."""
    with open(spec_file) as file:
        spec = json.load(file)
    with open(spec["prompts"]) as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    loop = PlainLoop(spec)
    weight = next(loop.model.parameters()).detach()
    before = weight.clone()
    first_step_at = time.time()
    steps = []
    for step in range(spec["steps"]):
        groups = slice(step * spec["num_prompts"], (step + 1) * spec["num_prompts"])
        lengths = [n for group in spec["lengths"][groups] for n in group] if spec["lengths"] else None
        steps.append(loop.step(prompts[groups], lengths))
    report = {
        "first_step_at": first_step_at,
        "steps": steps,
        "weights_changed": not torch.equal(before, weight),
        "versions": {"torch": torch.__version__, "transformers": __import__("transformers").__version__},
    }
    with open(spec["report"], "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main(sys.argv[1])
