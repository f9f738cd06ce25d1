"""Scores of a model on held-out prompts, without training: the stages that sample and score, in the ordinary flow.

The sampler gets its weights as in a run: a training engine reads the folder (fp32, which it needs memory for beside the
sampler's own copy; there is no optimizer), and the moved weights are verified and probed before the first token.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tranship.config import AlgorithmConfig, Config, ObserveConfig, ServeConfig, load
from tranship.models.tokenizer import decode_response
from tranship.observe import ValidationRecord, machine, versions
from tranship.observe.jsonl import finite
from tranship.observe.scores import as_json
from tranship.runtime import Handle, Runtime, start_runtime
from tranship.stages import evaluation_table
from tranship.trainer.forecast import LengthForecast
from tranship.trainer.placement import place
from tranship.trainer.preflight import Report, preflight
from tranship.trainer.processes import runtime_options, start_processes
from tranship.trainer.signals import StopRequest
from tranship.trainer.team import members
from tranship.trainer.trained import find_model, weights_digest
from tranship.trainer.validation import Validation
from tranship.types import RunError, UserError
from tranship.worker.spec import WEIGHTS

_POLL_S = 0.5
_COMMAND_S = 3600.0


@dataclass(frozen=True)
class Prepared:
    """An evaluation that is checked and can start. out: the JSON file that it will write, with its samples beside."""

    argument: str
    recipe: Path
    report: Report
    out: Path

    @property
    def samples_file(self) -> Path:
        """All samples, one a line."""
        return self.out.with_suffix(".samples.jsonl")

    def lines(self) -> list[str]:
        """What will be done, for people."""
        report, config = self.report, self.report.config
        rollout, samples = config.rollout, config.validation.samples_per_prompt
        val = report.val
        assert val is not None
        return [
            f"model     {report.model.path} ({report.model.architecture}, "
            f"{report.model.num_parameters / 1e6:.1f} M parameters)",
            f"prompts   {len(val.prompts)} of {self.recipe}, {samples} samples each"
            + (", and a greedy one" if config.validation.greedy else ""),
            f"sampling  temperature {rollout.temperature}, top_p {rollout.top_p}, top_k {rollout.top_k or 'off'}, "
            f"min_p {rollout.min_p}, at most {rollout.max_response_tokens} tokens",
            *(f"note      {note}" for note in val.notes),
            *([f"dropped   {len(val.dropped)} prompts"] if val.dropped else []),
        ]


@dataclass(frozen=True)
class Evaluated:
    """What came of it. facts: as in the JSON file."""

    prepared: Prepared
    record: ValidationRecord
    facts: dict[str, Any]


def prepare(
    argument: str,
    recipe: Path | None,
    overrides: Sequence[str] = (),
    *,
    samples: int | None = None,
    temperature: float | None = None,
    out: Path | None = None,
) -> Prepared:
    """Check everything about an evaluation; starts nothing.

    argument: as `find_model`. recipe: says prompts (data.val), reward and sampling; None: the run's own config.yaml.
    samples, temperature: in place of validation.samples_per_prompt and rollout.temperature. out: None writes
    RUN/evals/TIME.json, or evals/TIME.json where the model comes from no run. Raises UserError, one line.
    """
    model = find_model(argument)
    if recipe is None:
        if model.run_dir is None or not (model.run_dir / "config.yaml").is_file():
            raise UserError(f"{argument} comes from no run, so nothing says what to ask it: give --recipe recipe.yaml")
        recipe = model.run_dir / "config.yaml"
    settings = [*overrides, f"model.path={json.dumps(str(model.folder))}"]
    settings += [] if samples is None else [f"validation.samples_per_prompt={samples}"]
    settings += [] if temperature is None else [f"rollout.temperature={float(temperature)}"]
    config = load(recipe, settings)
    if config.serve.agents:
        raise UserError(f"{recipe} has serve.agents=true: its samples are made by agents, which only a run waits for")
    if config.data.val is None:
        raise UserError(f"{recipe} has no held-out prompts: set data.val.source (data.val.source=prompts.jsonl)")
    file = _out_file(out, model.run_dir)
    report = preflight(evaluation_config(config, file.parent), training=False)
    table = evaluation_table(config.reward.model)
    own_reward_model = config.reward.model.path is not None and config.reward.model.placement == "own"
    num_ranks = config.rollout.tensor_parallel
    first, *others = place(config.placement, table, own_reward_model=own_reward_model, num_ranks=num_ranks)
    workers = (replace(first, stages=(WEIGHTS, *first.stages)), *others)
    return Prepared(argument, recipe, replace(report, table=table, workers=workers), file)


def evaluation_config(config: Config, folder: Path) -> Config:
    """The settings of an evaluation: those of a recipe, without what only training has.

    The algorithm and the batch are the plainest, for nothing is trained; of the prompts only the held-out ones are
    read; nothing is tracked; workers write to `folder`. At temperature 0 every sample is the greedy one, and a greedy
    round of its own is left out.
    """
    assert config.data.val is not None
    greedy = config.validation.greedy and config.rollout.temperature > 0
    changes: dict[str, Any] = {
        "run": config.run.model_copy(update={"dir": str(folder), "resume": "never"}),
        "data": config.data.model_copy(update={"train": config.data.val, "order": None, "order_args": {}}),
        "rollout": config.rollout.model_copy(update={"group_size": 1}),
        "algorithm": AlgorithmConfig(),
        "train": config.train.model_copy(update={"minibatches": 1}),
        "validation": config.validation.model_copy(update={"greedy": greedy}),
        "dock": config.dock.model_copy(update={"staleness": 0, "policies": {}, "controllers": ()}),
        "serve": ServeConfig(),
        "observe": ObserveConfig(console="off", trackers=()),
    }
    return config.model_copy(update=changes)


def evaluate(prepared: Prepared, progress: Callable[[int, int], None] = lambda done, total: None) -> Evaluated | None:
    """Sample, score, and write the files; None if Ctrl-C or SIGTERM asked to stop, and nothing is written then.

    progress(done, total) is called as prompts are scored (sampled and greedy ones count as one each). Raises RunError
    where it cannot go on, and where no sample could be scored (the samples are written then, with their reasons).
    """
    report, config = prepared.report, prepared.report.config
    start = time.monotonic()
    workers: list[Handle] = []
    with ExitStack() as stack:
        runtime = stack.enter_context(start_runtime(config.placement.runtime, runtime_options(report)))
        stop = stack.enter_context(
            StopRequest(lambda: _interrupt(workers, inline=config.placement.runtime == "inline"))
        )
        dock, started = start_processes(runtime, report, prepared.out.parent)
        workers += started
        _give_weights(report, workers)
        validation = Validation(
            dock,
            report.held_out(),
            config.validation,
            when="after",
            step=0,
            decode=lambda ids: decode_response(report.tokenizer, ids),
            forecast=LengthForecast(config.rollout.max_response_tokens),
        )
        record = _wait(runtime, validation, stop, progress)
        if record is None:
            return None
        samples = validation.samples()
    _write(prepared.samples_file, "".join(json.dumps(finite(row), ensure_ascii=False) + "\n" for row in samples))
    if not any(row["status"] == "scored" for row in samples):
        raise RunError(f"no sample could be scored ({_reasons(samples)}): see {prepared.samples_file}")
    facts = describe(prepared, record, time.monotonic() - start)
    _write(prepared.out, json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return Evaluated(prepared, record, facts)


def describe(prepared: Prepared, record: ValidationRecord, seconds: float) -> dict[str, Any]:
    """Everything that the JSON file holds: figures with their intervals, and what they were measured on and under."""
    report, config = prepared.report, prepared.report.config
    rollout, model = config.rollout, report.model
    facts = {
        "model": {
            "argument": prepared.argument,
            "path": str(model.path.resolve()),
            "digest": weights_digest(model.path),
            "architecture": model.architecture,
            "num_parameters": model.num_parameters,
        },
        "recipe": str(prepared.recipe),
        "num_prompts": record.num_prompts,
        "samples_per_prompt": record.samples_per_prompt,
        "sampling": {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "min_p": rollout.min_p,
            "max_response_tokens": rollout.max_response_tokens,
            "seed": config.run.seed,
        },
        "correct_score": config.validation.correct_score,
        "confidence": 0.95,
        "score": record.score,
        "score_greedy": record.score_greedy,
        "sampled": as_json(record.statistics),
        "greedy": as_json(record.statistics_greedy),
        "sources": {
            source: {
                "sampled": as_json(found),
                "greedy": as_json(record.by_source_greedy.get(source, {})),
            }
            for source, found in record.by_source.items()
        },
        "extra": dict(record.extra),
        "extra_greedy": dict(record.extra_greedy),
        "invalid": dict(record.invalid),
        "masked": record.masked,
        "notes": [record.no_majority] if record.no_majority else [],
        "samples_file": str(prepared.samples_file),
        "seconds": round(seconds, 3),
        "time": round(time.time(), 3),
        "config": config.model_dump(mode="json"),
        "machine": machine(),
        "versions": versions(),
    }
    return finite(facts)


def _give_weights(report: Report, workers: Sequence[Handle]) -> None:
    """All samplers use the folder's weights, as version 0, when this returns."""
    source, others = workers[0], workers[1:]
    sampling = {plan.name for plan in report.workers[1:] if "rollout" in plan.stages}
    samplers = [worker for worker in others if worker.name in sampling]
    if samplers:
        pieces = source.call("pieces", timeout_s=_COMMAND_S)
        wanted = [rank.call("pieces", timeout_s=_COMMAND_S) for rank in members(samplers[0])]
        for worker in (source, *samplers):
            worker.call("connect_weights", pieces, wanted, timeout_s=_COMMAND_S)
    ready = source.call("publish_weights", 0, timeout_s=_COMMAND_S)
    for sampler in samplers:
        sampler.call("fetch_weights", ready, timeout_s=_COMMAND_S)


def _wait(
    runtime: Runtime, validation: Validation, stop: StopRequest, progress: Callable[[int, int], None]
) -> ValidationRecord | None:
    progress(0, validation.num_groups)
    while not stop.requested:
        runtime.poll(_POLL_S)
        runtime.events()
        record = validation.collect()
        progress(validation.num_done, validation.num_groups)
        if record is not None:
            return record
    return None


def _interrupt(workers: Sequence[Handle], *, inline: bool) -> None:
    """In one process the work is under the signal handler, and has to be told at once."""
    if inline:
        for worker in workers:
            worker.submit("interrupt")


def _out_file(out: Path | None, run_dir: Path | None) -> Path:
    file = out or (run_dir or Path()) / "evals" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    if file.is_dir() or file.suffix != ".json":
        raise UserError(f"--out {file}: give the name of a file that ends in .json")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {file} cannot be written: {error.strerror}: choose another place") from error
    if not os.access(file.parent, os.W_OK):
        raise UserError(f"--out {file} cannot be written: {file.parent} is not writable: choose another place")
    return file


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written: {error}") from error


def _reasons(samples: Sequence[Mapping[str, Any]]) -> str:
    reasons = Counter(row["reason"] or "masked" for row in samples).most_common(3)
    return "; ".join(f"{count} x {reason}" for reason, count in reasons)
