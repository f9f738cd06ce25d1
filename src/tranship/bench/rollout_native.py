"""The native engine in `bench rollout`: `python -m tranship.bench.rollout_native`, which answers lines of JSON."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tranship.bench.rollout_work import CHECK_TOKENS, GROUP, LONGEST, NEW_TOKENS, answer, check_made, prompts
from tranship.layouts import Layout
from tranship.layouts.pieces import Piece, full_box
from tranship.reshard import WeightSource, make_plan
from tranship.rollout import GroupRequest
from tranship.rollout.native import NativeEngine, load_folder
from tranship.types import Response, SampleId, Sampling, sample_seed

_BUCKET_BYTES = 16 << 20


class Side:
    """One engine, from `open` on."""

    def __init__(self) -> None:
        self._engine: NativeEngine | None = None
        self._vocab = 0

    def open(self, model: str, dtype: str, threads: int, max_batch: int) -> dict[str, Any]:
        """Load the model."""
        torch.set_num_threads(threads)
        assert dtype in ("fp32", "bf16"), dtype
        self._engine = NativeEngine(
            Path(model),
            dtype=dtype,
            device="cpu",
            max_running=max_batch,
            max_tokens=LONGEST,
            on_update="keep",
            deterministic=False,
            eos_token_ids=(),
            ignore_eos=True,
        )
        load_folder(self._engine, Path(model), 0)
        self._vocab = self._engine.storage("embed").shape[0]
        return {"versions": {"torch": torch.__version__}}

    def first(self) -> dict[str, Any]:
        """One token of one prompt."""
        self._run([self._request(0, prompts(1, self._vocab, 0)[0], 0, 1, samples=1)], [])
        return {}

    def generate(self, batch: int, seed: int) -> dict[str, Any]:
        """A batch: seconds, and milliseconds of the median decode step (all of the batch running)."""
        asked = prompts(batch // GROUP, self._vocab, seed)
        requests = [self._request(number, prompt, seed, NEW_TOKENS) for number, prompt in enumerate(asked)]
        steps: list[float] = []
        began = time.perf_counter()
        made = self._run(requests, steps)
        seconds = time.perf_counter() - began
        check_made([r.token_ids.tolist() for r in made], [r.logprobs.tolist() for r in made], batch, NEW_TOKENS)
        # The first step is the prefill and a token.
        return {"seconds": seconds, "tokens": batch * NEW_TOKENS, "decode_ms": 1e3 * statistics.median(steps[1:])}

    def check(self) -> dict[str, Any]:
        """What two groups made: prompts, ids and log-probs of every response."""
        asked = prompts(2, self._vocab, 1)
        made = self._run([self._request(number, prompt, 1, CHECK_TOKENS) for number, prompt in enumerate(asked)], [])
        return {
            "prompts": [asked[r.sample.group_id] for r in made],
            "ids": [r.token_ids.tolist() for r in made],
            "logprobs": [r.logprobs.tolist() for r in made],
        }

    def update(self, repeats: int) -> dict[str, Any]:
        """Seconds of moving all weights into the engine with digests, of re-packing them, and of copying as many
        bytes: lists."""
        assert self._engine is not None
        engine, names = self._engine, {}
        for piece in engine.pieces():
            names.setdefault(piece.name, torch.empty(piece.shape, dtype=getattr(torch, piece.dtype)))
            box = tuple(slice(*bounds) for bounds in piece.storage_box)
            names[piece.name][tuple(slice(*bounds) for bounds in piece.box)] = engine.storage(piece.storage)[box]
        source = tuple(
            Piece(name, tuple(t.shape), full_box(tuple(t.shape)), name, full_box(tuple(t.shape)), str(t.dtype)[6:])
            for name, t in names.items()
        )
        plan = make_plan(
            Layout((source,)), Layout((tuple(engine.pieces()),)), bucket_bytes=_BUCKET_BYTES, colocated=True
        )
        push = WeightSource(plan, names.__getitem__)
        flat = torch.zeros(sum(t.numel() * t.element_size() for t in names.values()), dtype=torch.uint8)
        other = torch.ones_like(flat)
        out: dict[str, Any] = {"transfer_s": [], "repack_s": [], "memcpy_s": [], "bytes": len(flat)}
        for version in range(1, repeats + 2):
            engine.begin_update()
            times = [time.perf_counter()]
            push.push(version, engine.storage)
            times.append(time.perf_counter())
            engine.finish_update(version)
            times.append(time.perf_counter())
            other.copy_(flat)
            times.append(time.perf_counter())
            # The first round warms up.
            for name, seconds in zip(("transfer_s", "repack_s", "memcpy_s"), np.diff(times), strict=True):
                out[name] += [float(seconds)] if version > 1 else []
        return out

    def _request(self, number: int, prompt: list[int], seed: int, cap: int, samples: int = GROUP) -> GroupRequest:
        names = tuple(SampleId(number, index) for index in range(samples))
        seeds = tuple(sample_seed(seed, name) for name in names)
        return GroupRequest(np.array(prompt, np.int32), names, seeds, Sampling(cap))

    def _run(self, requests: list[GroupRequest], steps: list[float]) -> list[Response]:
        assert self._engine is not None
        for request in requests:
            self._engine.submit(request)
        made: list[Response] = []
        while self._engine.num_unfinished:
            began = time.perf_counter()
            made += self._engine.step()
            steps.append(time.perf_counter() - began)
        return made


if __name__ == "__main__":
    side = Side()
    answer(
        {
            "open": side.open,
            "first": side.first,
            "generate": side.generate,
            "check": side.check,
            "update": side.update,
        }
    )
