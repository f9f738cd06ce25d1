"""vLLM's CPU build in `bench rollout`, run by the interpreter of its own environment (`make bench-env`).

One engine in this process, compiled as it comes, without its tokenizer and detokenizer, with log-probs of the sampled
tokens. Requests have no seeds: on a CPU they make its sampling slower, and fail when a prompt is prefilled in parts.
"""

from __future__ import annotations

import os
import statistics
import time
from importlib import metadata
from typing import Any

# Before vllm is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rollout_work import CHECK_TOKENS, GROUP, LONGEST, NEW_TOKENS, answer, check_made, prompts
from vllm import LLM, SamplingParams


class Side:
    """One engine, from `open` on."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._vocab = 0
        self._count = 0

    def open(self, model: str, dtype: str, threads: int, max_batch: int) -> dict[str, Any]:
        """Load the model."""
        self._llm = LLM(
            model=model,
            dtype="bfloat16" if dtype == "bf16" else "float32",
            max_model_len=LONGEST,
            max_num_seqs=max_batch,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self._vocab = self._llm.llm_engine.model_config.get_vocab_size()
        return {"versions": {"vllm": metadata.version("vllm-cpu")}}

    def first(self) -> dict[str, Any]:
        """One token of one prompt."""
        self._run(prompts(1, self._vocab, 0), 1, [])
        return {}

    def generate(self, batch: int, seed: int) -> dict[str, Any]:
        """A batch: seconds, and milliseconds of the median step; nearly all steps decode the whole batch."""
        rows = [prompt for prompt in prompts(batch // GROUP, self._vocab, seed) for _ in range(GROUP)]
        steps: list[float] = []
        began = time.perf_counter()
        ids, logprobs = self._run(rows, NEW_TOKENS, steps)
        seconds = time.perf_counter() - began
        check_made(ids, logprobs, batch, NEW_TOKENS)
        return {"seconds": seconds, "tokens": batch * NEW_TOKENS, "decode_ms": 1e3 * statistics.median(steps)}

    def check(self) -> dict[str, Any]:
        """What two groups made: prompts, ids and log-probs of every response."""
        rows = [prompt for prompt in prompts(2, self._vocab, 1) for _ in range(GROUP)]
        ids, logprobs = self._run(rows, CHECK_TOKENS, [])
        return {"prompts": rows, "ids": ids, "logprobs": logprobs}

    def _run(self, rows: list[list[int]], cap: int, steps: list[float]) -> tuple[list[list[int]], list[list[float]]]:
        engine = self._llm.llm_engine
        names = []
        for row in rows:
            how = SamplingParams(temperature=1.0, max_tokens=cap, ignore_eos=True, logprobs=0, detokenize=False)
            names.append(str(self._count))
            engine.add_request(names[-1], {"prompt_token_ids": row}, how)
            self._count += 1
        made = {}
        while engine.has_unfinished_requests():
            began = time.perf_counter()
            for output in engine.step():
                if output.finished:
                    made[output.request_id] = output.outputs[0]
            steps.append(time.perf_counter() - began)
        ids = [list(made[name].token_ids) for name in names]
        logprobs = [
            [float(place[token].logprob) for token, place in zip(row, made[name].logprobs, strict=True)]
            for row, name in zip(ids, names, strict=True)
        ]
        return ids, logprobs


if __name__ == "__main__":
    side = Side()
    answer({"open": side.open, "first": side.first, "generate": side.generate, "check": side.check})
