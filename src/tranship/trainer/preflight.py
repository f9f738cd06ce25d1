"""Everything that can be known to be wrong before a worker starts, found and said in one line each."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tranship.algorithms.objective import make_loss
from tranship.config import Config
from tranship.data.prompts import PromptSet, load_prompts
from tranship.models.folder import ModelInfo, locate
from tranship.models.folder import check as check_folder
from tranship.models.tokenizer import load_tokenizer, template_system_prompt
from tranship.observe import check_port, check_trackers
from tranship.rewards import RewardPool
from tranship.runtime import check_runtime
from tranship.runtime.device import check_processes, num_cores, resolve_device
from tranship.stages import check_table, stage_table
from tranship.trainer.placement import WorkerPlan, place
from tranship.types import UserError
from tranship.worker import WorkerSpec
from tranship.worker.build import build_estimate

_MAX_PROBE_TOKENS = 16
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Report:
    """What a run will use; `lines` says it to people."""

    config: Config
    model: ModelInfo
    tokenizer: Any
    train: PromptSet
    val: PromptSet | None
    workers: tuple[WorkerPlan, ...]
    device: str
    num_threads: int
    system_prompt: str | None

    def spec(self, plan: WorkerPlan) -> WorkerSpec:
        """What a worker of this run is told at its start."""
        longest = max(len(prompt.token_ids) for prompt in self._prompts())
        return WorkerSpec(
            config=self.config,
            stages=plan.stages,
            model_dir=str(self.model.path),
            device=self.device,
            num_threads=self.num_threads,
            probe_ids=tuple(int(i) for i in self.train.prompts[0].token_ids[-_MAX_PROBE_TOKENS:]),
            max_tokens=longest + self.config.rollout.max_response_tokens,
            eos_token_ids=self.model.eos_token_ids,
        )

    def lines(self) -> list[str]:
        """One fact a line."""
        config, model = self.config, self.model
        lengths = [len(prompt.token_ids) for prompt in self._prompts()]
        sampling = config.rollout
        lines = [
            f"model     {model.path} ({model.architecture}, {model.num_parameters / 1e6:.1f} M parameters, "
            f"context {model.context_length}, ends at {list(model.eos_token_ids)})",
            f"prompts   {len(self.train.prompts)} for training, {len(self.val.prompts) if self.val else 0} held out, "
            f"{min(lengths)} to {max(lengths)} tokens",
            f"batch     {config.groups_per_step} prompts x {sampling.group_size} samples, {config.train.steps} steps, "
            f"staleness bound {config.dock.staleness}",
            f"sampling  temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k or 'off'}, "
            f"min_p {sampling.min_p}, at most {sampling.max_response_tokens} tokens",
            f"placement {config.placement.runtime}, {config.placement.layout}: "
            + "; ".join(f"{plan.name} ({', '.join(plan.stages)})" for plan in self.workers)
            + f"; {self.num_threads} threads each on {self.device}",
        ]
        if self.system_prompt:
            lines.append(f"template  adds a system prompt of its own: {self.system_prompt!r}")
        for name, prompts in (("training", self.train), ("held-out", self.val)):
            lines += [f"note      {note}" for note in (prompts.notes if prompts else ())]
            if prompts and prompts.dropped:
                shown = ", ".join(f"row {row}: {reason}" for row, reason in prompts.dropped[:3])
                lines.append(f"dropped   {len(prompts.dropped)} {name} prompts ({shown}, ...)")
        return lines

    def _prompts(self) -> list[Any]:
        return [*self.train.prompts, *(self.val.prompts if self.val else [])]


def preflight(config: Config) -> Report:
    """Check a configuration against this machine, the model and the data. Raises UserError at the first fault."""
    device = resolve_device(config.placement.device)
    table = stage_table(config.algorithm)
    check_table(table)
    workers = place(config.placement, table)
    check_runtime(config.placement.runtime)
    _check_shared_memory(config)
    num_threads = _threads(config, len(workers), device)
    _check_reward_workers(config)
    build_estimate(config.algorithm)
    make_loss(config.algorithm)
    check_trackers(config.observe.trackers)
    if config.observe.tensorboard_port is not None:
        check_port(config.observe.tensorboard_port)
    model_dir = locate(config.model.path)
    model = check_folder(model_dir, need_chat_template=False, trust_remote_code=config.model.trust_remote_code)
    tokenizer = load_tokenizer(model_dir, config.model.trust_remote_code)
    train = _load("data.train", config, tokenizer)
    val = _load("data.val", config, tokenizer) if config.data.val else None
    report = Report(
        config, model, tokenizer, train, val, workers, device, num_threads, _own_system_prompt(config, tokenizer)
    )
    _check_context(report)
    _check_disk(config, model)
    _check_reward(config)
    return report


def _threads(config: Config, num_workers: int, device: str) -> int:
    asked = config.placement.threads_per_process
    if asked is not None:
        check_processes(num_workers, asked)
        return asked
    check_processes(num_workers, 1)
    return 1 if config.run.deterministic else max(1, num_cores() // num_workers)


def _check_reward_workers(config: Config) -> None:
    most = max(4, 2 * num_cores())
    if config.reward.num_workers > most:
        raise UserError(
            f"reward.num_workers {config.reward.num_workers} is more than {most} processes for {num_cores()} cores: "
            f"use reward.num_workers={num_cores()}"
        )


def _load(key: str, config: Config, tokenizer: Any) -> PromptSet:
    source = config.data.train if key == "data.train" else config.data.val
    assert source is not None
    prompts = load_prompts(source, tokenizer, data=config.data)
    if not prompts.prompts:
        raise UserError(f"{key}: {source.source!r} has no prompt that can be used ({len(prompts.dropped)} dropped)")
    return prompts


def _own_system_prompt(config: Config, tokenizer: Any) -> str | None:
    has_template = getattr(tokenizer, "chat_template", None) is not None
    return template_system_prompt(tokenizer) if has_template and config.data.system_prompt is None else None


def _check_context(report: Report) -> None:
    longest = max(report._prompts(), key=lambda prompt: len(prompt.token_ids))
    need = len(longest.token_ids) + report.config.rollout.max_response_tokens
    if need > report.model.context_length:
        raise UserError(
            f"prompt {longest.index} has {len(longest.token_ids)} tokens, and with rollout.max_response_tokens "
            f"{report.config.rollout.max_response_tokens} it needs {need}, but the model's context is "
            f"{report.model.context_length}: lower one of them, or set data.max_prompt_tokens and data.too_long=drop"
        )


def _check_shared_memory(config: Config) -> None:
    """Each process that puts needs a slab, and the one that it fills next."""
    if config.placement.runtime == "inline" or not _SHARED_MEMORY.is_dir():
        return
    need = 2 * config.dock.slab_bytes * (2 + config.placement.num_samplers)
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free < need:
        raise UserError(
            f"{_SHARED_MEMORY} has {free >> 20} MiB free and the dock needs {need >> 20} MiB for its slabs: enlarge it "
            f"(docker: --shm-size), or use a smaller dock.slab_bytes than {config.dock.slab_bytes}"
        )


def _check_disk(config: Config, model: ModelInfo) -> None:
    # Weights, two moments and the exported folder in fp32; a new checkpoint stands beside the ones that are kept.
    need = 16 * model.num_parameters
    parent = next(path for path in [Path(config.run.dir), *Path(config.run.dir).absolute().parents] if path.exists())
    free = shutil.disk_usage(parent).free
    if free < need:
        raise UserError(
            f"run.dir {config.run.dir} has {free / 1e9:.1f} GB free and one checkpoint takes {need / 1e9:.1f} GB: "
            "free some space, or choose another run.dir"
        )


def _check_reward(config: Config) -> None:
    """A pool checks at its start that the function imports and takes the four arguments."""
    reward = config.reward
    RewardPool(reward.function, reward.args, 1, reward.timeout_s).close()
