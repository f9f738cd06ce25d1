"""vLLM behind the `RolloutEngine` protocol: it runs the model, and we draw the tokens and hand over the weights.

One `LLMEngine` in this process. Its scheduler, cache and kernels are vLLM's own; what a sample is, how it is drawn, how
it ends and which weights are in use is decided here, as for the native engine.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tranship.layouts.pieces import Piece
from tranship.rollout.engine import Capabilities, GroupRequest, SamplesFailed
from tranship.rollout.native.requests import Sample, make_group
from tranship.rollout.native.stop_strings import Decode, text_ended
from tranship.rollout.vllm.core import keep_until_last, make_core, read_config
from tranship.rollout.vllm.draws import ROW_KEY, Row
from tranship.rollout.vllm.weights import StagedWeights
from tranship.types import FinishReason, Response, RunError, SampleId, Sampling, UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PROBE = SampleId(-1, -1)


class VllmEngine:
    """Every model that vLLM and the trainer know, on one device. See `RolloutEngine` for what each method promises.

    model_dir: a Hugging Face folder, of which config.json and the headers of the safetensors are read: weights come in
    through `pieces` and `storage`. Settings as in `NativeEngine`; deterministic is refused. compiled: vLLM compiles the
    model, which takes some ten seconds to a minute when it is first met.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: Literal["fp32", "bf16"],
        device: str,
        max_running: int,
        max_tokens: int,
        on_update: Literal["recompute", "keep"],
        deterministic: bool,
        eos_token_ids: tuple[int, ...],
        ignore_eos: bool = False,
        decode: Decode | None = None,
        compiled: bool = True,
    ) -> None:
        if deterministic:
            raise UserError(
                "rollout.engine=vllm has no deterministic mode: its kernels' results depend on what else is in the "
                "batch: use rollout.engine=native, or run.deterministic=false"
            )
        config = read_config(model_dir, max_tokens, torch.device(device))
        self.capabilities = Capabilities(deterministic=False, partial_rollout=True)
        self._max_running = max_running
        self._max_tokens = max_tokens
        self._vocab = int(config.vocab_size)
        self._recompute = on_update == "recompute"
        self._eos_token_ids = eos_token_ids
        self._ignore_eos = ignore_eos
        self._decode = decode
        self._weights = StagedWeights(
            model_dir, DTYPES[dtype], torch.device(device), tied=bool(config.tie_word_embeddings)
        )
        self._rows: dict[str, Row] = {}
        self._queue: deque[Row] = deque()
        self._ended: list[Response] = []
        self._names: set[SampleId] = set()
        self._keys = map(str, itertools.count())
        self._policy_version = -1
        self._updating = False
        self._core: Any = make_core(
            model_dir,
            config,
            self._rows,
            dtype=DTYPES[dtype],
            device=torch.device(device),
            # One more, so that a probe never waits for a sample.
            num_rows=max_running + 1,
            max_tokens=max_tokens,
            compiled=compiled,
        )
        keep_until_last(self, self._core)

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def num_unfinished(self) -> int:
        return len(self._names)

    @property
    def num_free(self) -> int:
        return max(0, self._max_running - len(self._rows) - len(self._queue))

    def submit(self, request: GroupRequest) -> None:
        ends = () if self._ignore_eos else (*self._eos_token_ids, *request.sampling.stop_token_ids)
        strings = () if self._ignore_eos else request.sampling.stop_strings
        if strings and self._decode is None:
            raise UserError("sampling.stop_strings needs a rollout engine that was given a tokenizer's decode function")
        group, ended = make_group(
            request, vocab=self._vocab, max_tokens=self._max_tokens, end_ids=ends, stop_strings=strings
        )
        twice = self._names.intersection(request.samples)
        if twice:
            raise UserError(f"{min(twice)} is running already: abort it first, or give another attempt number")
        self._names.update(request.samples)
        self._ended += ended
        self._queue += [_row(sample, group.prompt_ids, group.sampling, ends, strings) for sample in group.waiting]

    def step(self) -> list[Response]:
        """See `RolloutEngine.step`. Raises RunError naming samples whose logits are not finite; they are dropped, and
        the next step goes on with the others (and returns what finished in this one)."""
        assert not self._updating, "a step between begin_update and finish_update"
        if self._rows or self._queue:
            self._need_weights()
            while self._queue and len(self._rows) < self._max_running:
                self._start(self._queue.popleft())
            self._advance()
        finished, self._ended = self._ended, []
        self._names.difference_update(response.sample for response in finished)
        return finished

    def peek(self, starts: Mapping[SampleId, int]) -> list[Response]:
        found = []
        for row in self._rows.values():
            start = starts.get(row.sample)
            if start is not None and row.forced is None and len(row.tokens) > start:
                found.append(row.response("abort", start))
        return found

    def abort(self, samples: Sequence[SampleId] | None = None) -> list[Response]:
        """See `RolloutEngine.abort`. Samples that are not unfinished are passed over."""
        wanted = set(self._names) if samples is None else self._names.intersection(samples)
        stopped = [response for response in self._ended if response.sample in wanted]
        self._ended = [response for response in self._ended if response.sample not in wanted]
        stopped += [row.response("abort") for row in self._queue if row.sample in wanted]
        self._queue = deque(row for row in self._queue if row.sample not in wanted)
        running = [key for key, row in self._rows.items() if row.sample in wanted]
        stopped += [row.response("abort") for row in self._withdraw(running)]
        self._names -= wanted
        return stopped

    def pieces(self) -> list[Piece]:
        return self._weights.pieces()

    def storage(self, name: str) -> torch.Tensor:
        """See `RolloutEngine.storage`: it is there between `begin_update` and `finish_update` only."""
        return self._weights[name]

    def begin_update(self) -> None:
        assert not self._updating, "begin_update twice"
        self._weights.allocate()
        self._updating = True

    @torch.no_grad()
    def finish_update(self, policy_version: int) -> None:
        """See `RolloutEngine.finish_update`. The cache is computed again by the next step, not here."""
        assert self._updating, "finish_update without begin_update"
        self._core.collective_rpc("start_weight_update")
        self._core.collective_rpc("update_weights", kwargs={"update_info": {"weights": self._weights.items()}})
        self._core.collective_rpc("finish_weight_update")
        self._core.set_weight_version(str(policy_version))
        self._weights.free()
        # What has not been prefilled yet starts under the new version, also where caches are kept.
        again = [key for key, row in self._rows.items() if self._recompute or not row.tokens]
        self._queue.extendleft(reversed(self._withdraw(again)))
        self._policy_version = policy_version
        self._updating = False

    def probe(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """See `RolloutEngine.probe`; temperature 0 reports temperature 1, as sampling does. The tokens are prescribed
        one after the other, so that it goes the way that samples go; samples that run go on meanwhile."""
        self._need_weights()
        assert not self._updating, "a probe between begin_update and finish_update"
        token_ids = np.asarray(token_ids, np.int32)
        count = len(token_ids) - 1
        if count < 1:
            return np.empty(0, np.float32)
        row = _row(Sample(_PROBE, 0, *_NOTHING), token_ids[:1], Sampling(count, temperature), (), ())
        row.forced = token_ids[1:]
        key = self._start(row)
        while key in self._rows:
            self._advance()
        return np.array(row.logprobs, np.float32)

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`. vLLM's CPU build frees nothing."""
        assert not self._names, f"{len(self._names)} samples are unfinished: abort them before sleep"
        if self._policy_version >= 0:
            self._core.sleep(level=2)
        self._policy_version = -1

    def wake_up(self) -> None:
        if self._core.is_sleeping():
            self._core.wake_up()

    def _need_weights(self) -> None:
        if self._policy_version < 0:
            raise RunError("the rollout engine has no weights yet: it needs an update before it can sample")

    def _start(self, row: Row) -> str:
        """Give a row to vLLM; returns its key. Prefixes are shared among rows of one policy version alone."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        key = next(self._keys)
        self._rows[key] = row
        params = SamplingParams(
            temperature=0.0,
            max_tokens=row.sampling.max_response_tokens - len(row.tokens),
            ignore_eos=True,
            stop_token_ids=list(row.end_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={ROW_KEY: key},
        )
        ids = [*row.prompt_ids.tolist(), *row.tokens]
        self._core.add_request(key, {"prompt_token_ids": ids, "cache_salt": str(self._policy_version)}, params)
        return key

    def _advance(self) -> None:
        """One step of vLLM; what ended is in `_ended` afterwards."""
        failed: list[str] = []
        for output in self._core.step():
            row = self._rows[output.request_id]
            if row.broken and row.forced is None:
                failed.append(output.request_id)
                continue
            for token in output.outputs[0].token_ids:
                row.take(token, self._policy_version)
            reason = self._ended_by(row)
            assert output.finished is (reason is not None) or row.stop_strings, (output, reason)
            if reason is None:
                continue
            self._withdraw([output.request_id])
            if row.forced is None:
                self._ended.append(row.response(reason))
        if failed:
            names = [row.sample for row in self._withdraw(failed)]
            self._names.difference_update(names)
            raise _not_finite(names, self._policy_version)

    def _ended_by(self, row: Row) -> FinishReason | None:
        if row.tokens and row.tokens[-1] in row.end_ids:
            return "stop"
        if row.stop_strings and row.tokens:
            assert self._decode is not None
            if text_ended(np.array(row.tokens, np.int32), row.stop_strings, self._decode):
                return "stop"
        return "length" if len(row.tokens) >= row.sampling.max_response_tokens else None

    def _withdraw(self, keys: Sequence[str]) -> list[Row]:
        """Take rows back from vLLM, which may have finished them itself."""
        if keys:
            self._core.abort_request(list(keys))
        return [self._rows.pop(key) for key in keys]


_NOTHING = (np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


def _row(
    sample: Sample, prompt_ids: np.ndarray, sampling: Sampling, end_ids: tuple[int, ...], stop_strings: tuple[str, ...]
) -> Row:
    """A row that goes on where an interrupted try of the sample stopped."""
    return Row(
        sample.sample,
        prompt_ids,
        sample.seed,
        sampling,
        end_ids,
        stop_strings,
        tokens=sample.tokens.tolist(),
        logprobs=sample.logprobs.tolist(),
        versions=sample.versions.tolist(),
        tops=[] if sample.top is None else [sample.top],
    )


def _not_finite(names: Sequence[SampleId], version: int) -> SamplesFailed:
    shown = ", ".join(str(tuple(name)) for name in names[:4]) + (" ..." if len(names) > 4 else "")
    return SamplesFailed(
        f"logits are not finite at policy version {version} for {len(names)} samples "
        f"(group, sample, attempt): {shown}: check the weights of that version",
        names,
    )
