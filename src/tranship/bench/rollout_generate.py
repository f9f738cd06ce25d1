"""transformers' `generate` in `bench rollout`, and the plain forward pass that log-probs are compared with.

Run as `python -m tranship.bench.rollout_generate`; it answers lines of JSON.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from tranship.bench.rollout_work import GROUP, NEW_TOKENS, answer, check_made, prompts


class Side:
    """One model, from `open` on."""

    def __init__(self) -> None:
        self._model: Any = None

    def open(self, model: str, dtype: str, threads: int, max_batch: int) -> dict[str, Any]:
        """Load the model."""
        torch.set_num_threads(threads)
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=kind, local_files_only=True)
        # A folder's own settings would cut the distribution.
        self._model.generation_config = GenerationConfig(pad_token_id=0)
        return {"versions": {"transformers": transformers.__version__}}

    @torch.no_grad()
    def generate(self, batch: int, seed: int) -> dict[str, Any]:
        """A batch, with the log-probs of its tokens, in torch's default settings: seconds."""
        torch.manual_seed(seed)
        asked = prompts(batch // GROUP, self._model.config.vocab_size, seed)
        rows = [prompt for prompt in asked for _ in range(GROUP)]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        began = time.perf_counter()
        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        made = out.sequences[:, longest:]
        logprobs = [
            torch.log_softmax(logits.float(), -1).gather(1, made[:, at, None])[:, 0]
            for at, logits in enumerate(out.logits)
        ]
        seconds = time.perf_counter() - began
        check_made(made.tolist(), torch.stack(logprobs, 1).tolist(), batch, NEW_TOKENS)
        return {"seconds": seconds, "tokens": batch * NEW_TOKENS}

    @torch.no_grad()
    def score(self, prompts: list[list[int]], ids: list[list[int]]) -> dict[str, Any]:
        """Log-probs of the responses by a plain forward pass, one sequence at a time."""
        rows = []
        for prompt, response in zip(prompts, ids, strict=True):
            sequence = torch.tensor([prompt + response])
            logprobs = torch.log_softmax(self._model(sequence).logits[0, len(prompt) - 1 : -1].float(), -1)
            rows.append(logprobs.gather(1, sequence[0, len(prompt) :, None])[:, 0].tolist())
        return {"logprobs": rows}


if __name__ == "__main__":
    side = Side()
    answer({"open": side.open, "generate": side.generate, "score": side.score})
