"""Everything that can be known to be wrong before a worker starts, found and said in one line each."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tranship.algorithms.estimate import make_estimate
from tranship.algorithms.objective import make_loss, make_value_loss
from tranship.config import Config
from tranship.data.prompts import load_prompts
from tranship.data.promptset import PromptSet, shared_prompts
from tranship.data.stream import make_stream
from tranship.layouts import Share
from tranship.lookup import resolve
from tranship.models.folder import ModelInfo, locate
from tranship.models.folder import check as check_folder
from tranship.models.tokenizer import load_tokenizer, template_system_prompt
from tranship.observe import check_port, check_trackers
from tranship.rewards import make_pool
from tranship.rollout import ROLLOUT_ENGINES
from tranship.rollout.native.recorded import check_recordable
from tranship.rollout.native.shape import read_shape
from tranship.rollout.native.split import split_shape
from tranship.rollout.vllm.core import check_installed
from tranship.runtime import check_runtime
from tranship.runtime.device import check_processes, num_cores, resolve_device
from tranship.stages import StageSpec, check_table, stage_table
from tranship.stages.env_setup import EnvPrompts, agent_roles, check_env, check_messages
from tranship.train.reward_model import check_one_label, check_same_tokens
from tranship.trainer.best import check_best_metric
from tranship.trainer.dock_room import check_room, check_shared_memory
from tranship.trainer.placement import WorkerPlan, place
from tranship.types import Prompt, UserError
from tranship.worker import WorkerSpec
from tranship.worker.dock_service import stage_needs

_PROBE_TOKENS = 16
_NO_RATIO = ("reinforce",)


@dataclass(frozen=True)
class Report:
    """What a run will use; `lines` says it to people."""

    config: Config
    model: ModelInfo
    tokenizer: Any
    train: PromptSet
    val: PromptSet | None
    table: tuple[StageSpec, ...]
    workers: tuple[WorkerPlan, ...]
    device: str
    num_threads: int
    system_prompt: str | None
    reward_model_dir: Path | None = None
    critic_dir: Path | None = None

    def spec(self, plan: WorkerPlan) -> WorkerSpec:
        """What a worker of this run is told at its start."""
        longest = max(len(prompt.token_ids) for prompt in self._prompts())
        max_response = self.config.rollout.max_response_tokens
        return WorkerSpec(
            config=self.config,
            table=self.table,
            stages=plan.stages,
            model_dir=str(self.model.path),
            device=self.device,
            num_threads=self.num_threads,
            probe_ids=_probe_ids(self.train.prompts, min(_PROBE_TOKENS, longest + max_response)),
            max_tokens=longest + max_response,
            eos_token_ids=self.model.eos_token_ids,
            reward_model_dir=None if self.reward_model_dir is None else str(self.reward_model_dir),
            critic_dir=None if self.critic_dir is None else str(self.critic_dir),
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
            f"algorithm {config.algorithm.name}: {' > '.join(row.name for row in self.table)}",
            f"batch     {config.groups_per_step} prompts x {config.group_size} samples, {config.train.steps} steps, "
            f"staleness bound {config.dock.staleness}",
            f"sampling  temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k or 'off'}, "
            f"min_p {sampling.min_p}, at most {sampling.max_response_tokens} tokens",
            f"placement {config.placement.runtime}, {config.placement.layout}: "
            + "; ".join(f"{plan.name} ({', '.join(plan.stages)}{_on_ranks(plan)})" for plan in self.workers)
            + f"; {self.num_threads} threads each on {self.device}",
        ]
        if config.serve.enabled:
            lines.append(f"endpoint  {config.serve.name!r}, at the address in {config.run.dir}/serve")
        if config.serve.agents:
            limit_s = config.serve.agent_timeout_s
            lines.append(f"agents    make the samples; each has {limit_s:g} s to be claimed, and {limit_s:g} s then")
        if _is_biased(config):
            lines.append(
                f"note      loss {config.algorithm.loss} has no ratio: with a staleness bound above 0 its gradient is "
                "biased, unless algorithm.correction is set"
            )
        if self.system_prompt:
            lines.append(f"template  adds a system prompt of its own: {self.system_prompt!r}")
        for name, prompts in self.prompt_sets().items():
            lines += [f"{name:<9} {line}" for line in prompts.report()]
        if self.val and (shared := shared_prompts(self.train, self.val)):
            lines.append(f"note      {len(shared)} of the {len(self.val.prompts)} held-out prompts are trained on too")
        return lines

    def prompt_sets(self) -> dict[str, PromptSet]:
        """The prompts by their part in the run."""
        return {"train": self.train, **({"val": self.val} if self.val else {})}

    def held_out(self) -> list[Prompt]:
        """The prompts of validation."""
        return self.val.prompts if self.val else []

    def _prompts(self) -> list[Prompt]:
        return [*self.train.prompts, *self.held_out()]


def preflight(config: Config, *, training: bool = True) -> Report:
    """Check a configuration against this machine, the model and the data. Raises UserError at the first fault.

    training: whether anything will be trained, which needs room for checkpoints, and samples that differ.
    """
    device = resolve_device(config.placement.device)
    table = stage_table(config.algorithm, config.reward.model)
    check_table(table)
    own_reward_model = config.reward.model.path is not None and config.reward.model.placement == "own"
    num_ranks = config.rollout.tensor_parallel
    workers = place(config.placement, table, own_reward_model=own_reward_model, num_ranks=num_ranks)
    check_runtime(config.placement.runtime)
    stage_needs(config, table)
    check_shared_memory(config)
    _check_serve(config, workers)
    num_threads = _threads(config, sum(plan.num_ranks for plan in workers), device)
    _check_reward_workers(config)
    _check_rollout_engine(config)
    _check_algorithm(config)
    check_trackers(config.observe.trackers)
    if config.observe.tensorboard_port is not None:
        check_port(config.observe.tensorboard_port)
    model_dir = locate(config.model.path)
    model = check_folder(model_dir, need_chat_template=False, trust_remote_code=config.model.trust_remote_code)
    if num_ranks > 1:
        split_shape(read_shape(model_dir, max_tokens=1), Share(0, num_ranks))
    if config.rollout.cuda_graphs:
        _check_cuda_graphs(model_dir, device)
    tokenizer = load_tokenizer(model_dir, config.model.trust_remote_code)
    encoding = _env_prompts(config, tokenizer, model)
    train = _load("data.train", config, tokenizer, model.context_length, encoding)
    val = _load("data.val", config, tokenizer, model.context_length, encoding) if config.data.val else None
    make_stream(train, config.data, config.run.seed)
    if config.env.name is not None:
        check_messages([*train.prompts, *(val.prompts if val else [])])
    if config.serve.agents:
        agent_roles(tokenizer, model.eos_token_ids, config.data.template_args)
        check_messages([*train.prompts, *(val.prompts if val else [])], "serve.agents")
    check_best_metric(config, {prompt.data_source for prompt in val.prompts} if val else ())
    report = Report(
        config=config,
        model=model,
        tokenizer=tokenizer,
        train=train,
        val=val,
        table=table,
        workers=workers,
        device=device,
        num_threads=num_threads,
        system_prompt=_own_system_prompt(config, tokenizer),
        reward_model_dir=_reward_model(config, model_dir),
        critic_dir=_other_model(config, config.algorithm.critic.path, model_dir)
        if config.algorithm.flow == "ppo"
        else None,
    )
    _check_context(report)
    _check_stop_ids(config, tokenizer)
    if training:
        check_room(config, table, len(workers), max(len(prompt.token_ids) for prompt in train.prompts))
        _check_temperature(config)
        _check_disk(config, model)
    _check_reward(config)
    return report


def _on_ranks(plan: WorkerPlan) -> str:
    return f", {plan.num_ranks} ranks" if plan.num_ranks > 1 else ""


def _check_serve(config: Config, workers: Sequence[WorkerPlan]) -> None:
    if not config.serve.enabled:
        return
    samplers = [plan.name for plan in workers if "rollout" in plan.stages]
    if len(samplers) > 1 and config.serve.port:
        raise UserError(f"serve.port {config.serve.port} cannot be that of {len(samplers)} samplers: use serve.port=0")
    missing = [package for package in ("starlette", "uvicorn") if find_spec(package) is None]
    if missing:
        raise UserError(f"serve.enabled needs {' and '.join(missing)}: pip install 'tranship[serve]'")


def _probe_ids(prompts: Sequence[Prompt], count: int) -> tuple[int, ...]:
    """`count` token ids: the end of the first prompt, and where that is too short, prompts one after the other.

    A prompt's beginning is mostly its template, whose tokens are improbable without what stands before them: there the
    log-probs of bf16 are at their least exact.
    """
    first = prompts[0].token_ids.tolist()
    if len(first) >= count:
        return tuple(first[-count:])
    ids = itertools.chain.from_iterable(itertools.cycle([prompt.token_ids.tolist() for prompt in prompts]))
    return tuple(itertools.islice(ids, max(2, count)))


def _check_algorithm(config: Config) -> None:
    """Every name of the algorithm resolves, and takes the arguments that it is given."""
    algorithm = config.algorithm
    if algorithm.flow in ("policy", "ppo"):
        make_estimate(algorithm)
    make_loss(algorithm)
    if algorithm.flow == "ppo":
        make_value_loss(algorithm.critic)


def _reward_model(config: Config, model_dir: Path) -> Path | None:
    folder = _other_model(config, config.reward.model.path, model_dir)
    if folder is not None:
        check_one_label(folder, config.model.trust_remote_code)
    return folder


def _other_model(config: Config, path: str | None, model_dir: Path) -> Path | None:
    """The folder of a model that reads the policy's token ids."""
    if path is None:
        return None
    folder = locate(path)
    check_same_tokens(model_dir, folder, config.model.trust_remote_code)
    return folder


def _check_cuda_graphs(model_dir: Path, device: str) -> None:
    if device != "cuda":
        raise UserError(f"rollout.cuda_graphs needs a CUDA device, and this run has {device}: set it to false")
    check_recordable(read_shape(model_dir, max_tokens=1), model_dir)


def _threads(config: Config, num_workers: int, device: str) -> int:
    asked = config.placement.threads_per_process
    if config.placement.ray_address is not None:
        # The processes are spread over the cluster's nodes: Ray finds the cores.
        return asked or 1
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


def _check_rollout_engine(config: Config) -> None:
    """The engine's name resolves, and the library behind it is installed."""
    resolve(config.rollout.engine, ROLLOUT_ENGINES, "rollout.engine")
    if config.rollout.engine == "vllm":
        check_installed()


def _is_biased(config: Config) -> bool:
    """Whether samples of older policies are trained on as if they were of the current one."""
    algorithm = config.algorithm
    uncorrected = algorithm.loss in _NO_RATIO and algorithm.correction.name == "none"
    return uncorrected and algorithm.flow == "policy" and config.dock.staleness > 0


def _check_temperature(config: Config) -> None:
    if config.rollout.temperature == 0 and config.algorithm.flow in ("policy", "ppo"):
        raise UserError(
            "rollout.temperature 0 gives every sample of a prompt the same response, so that there is nothing to learn "
            "from: use temperature=1.0 (a greedy response of each held-out prompt is scored by validation.greedy)"
        )


def _check_stop_ids(config: Config, tokenizer: Any) -> None:
    beyond = [token for token in config.rollout.stop_token_ids if token >= len(tokenizer)]
    if beyond:
        raise UserError(f"rollout.stop_token_ids {beyond[0]} is no token of the model, which has {len(tokenizer)}")


def _env_prompts(config: Config, tokenizer: Any, model: ModelInfo) -> EnvPrompts:
    """How prompts are encoded: as the recipe says, and with the tools of its environment."""
    if config.env.name is None:
        return EnvPrompts(config.data, ())
    return check_env(config.env, config.data, tokenizer, model.eos_token_ids)


def _load(key: str, config: Config, tokenizer: Any, context_length: int, encoding: EnvPrompts) -> PromptSet:
    source = config.data.train if key == "data.train" else config.data.val
    assert source is not None
    flow = config.algorithm.flow
    kinds: dict[str, Literal["demonstration", "preference"]] = {"sft": "demonstration", "dpo": "preference"}
    recorded = kinds.get(flow) if key == "data.train" else None
    if key == "data.val" and any(part.weight != 1 for part in source.mixture):
        raise UserError(
            "data.val.mixture: weights have no meaning in validation, which asks each prompt once: leave them out"
        )
    return load_prompts(
        source,
        tokenizer,
        data=encoding.data,
        recorded=recorded,
        context_length=context_length,
        tools=encoding.tools,
    )


def _own_system_prompt(config: Config, tokenizer: Any) -> str | None:
    has_template = getattr(tokenizer, "chat_template", None) is not None
    return template_system_prompt(tokenizer) if has_template and config.data.system_prompt is None else None


def _check_context(report: Report) -> None:
    sampled = report._prompts() if report.config.algorithm.flow in ("policy", "ppo") else report.held_out()
    if not sampled:
        return
    longest = max(sampled, key=lambda prompt: len(prompt.token_ids))
    need = len(longest.token_ids) + report.config.rollout.max_response_tokens
    if need > report.model.context_length:
        raise UserError(
            f"prompt {longest.index} has {len(longest.token_ids)} tokens, and with rollout.max_response_tokens "
            f"{report.config.rollout.max_response_tokens} it needs {need}, but the model's context is "
            f"{report.model.context_length}: lower one of them, or set data.max_prompt_tokens and data.too_long=drop"
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
    if reward.function != "none" or reward.terms:
        make_pool(reward.model_copy(update={"num_workers": 1})).close()
