"""The one configuration: typed, frozen, strict. Each default stands on its field, once; derived values are properties.

Checks here need no file, no model and no device; those that do are made by `tranship.trainer.preflight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tranship.config.presets import ALGORITHMS, DOCKS, dock_preset, preset

_DOCK = DOCKS["standard"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class Section(BaseModel):
    """What all sections share: nothing unknown, nothing converted in silence, nothing changed later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Section):
    """Which language model."""

    path: str = Field(description="A Hugging Face folder, a hub name, or a name that `tranship model get` knows.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model folder brings.")


class MixturePartConfig(Section):
    """One source of a mixture."""

    source: str = Field(description="As data.train.source.")
    args: dict[str, Any] = Field(default_factory=dict, description="As data.train.args.")
    limit: int | None = Field(default=None, ge=1, description="As data.train.limit.")
    weight: float = Field(default=1.0, gt=0, description="Its share of the prompts, relative to the other parts.")
    name: str | None = Field(default=None, description="Its data_source in metrics; null: what its rows say.")


class DataSourceConfig(Section):
    """Where prompts come from: one source, or a mixture of several."""

    source: str | None = Field(
        default=None,
        description="`sums`, reasoning_gym:task, a .jsonl or .parquet file, hub:name, or module:name.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the source (`sums`: low, high, ...).")
    limit: int | None = Field(default=None, ge=1, description="Use only the first so many rows.")
    mixture: tuple[MixturePartConfig, ...] = Field(
        default=(), description="Several sources with weights, in place of source."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> DataSourceConfig:
        if (self.source is None) == (not self.mixture):
            raise ValueError(
                "a data section has both source and mixture: keep one of them"
                if self.mixture
                else "a data section names no source: set source (sums, a file, hub:name, module:name), or mixture"
            )
        if self.mixture and (self.args or self.limit):
            raise ValueError("args and limit belong to the parts of a mixture: move them there")
        return self


class DataConfig(Section):
    """Prompts for training and for validation."""

    train: DataSourceConfig
    val: DataSourceConfig | None = None
    max_prompt_tokens: int = Field(default=1024, ge=1, description="Longer prompts are handled by `too_long`.")
    too_long: Literal["refuse", "drop"] = Field(
        default="refuse", description="refuse: stop at start and name the rows; drop: count them."
    )
    shuffle: bool = True
    system_prompt: str | None = Field(
        default=None, description="Put before each prompt that has no system message of its own."
    )
    template_args: dict[str, Any] = Field(default_factory=dict, description="Further arguments of the chat template.")
    order: str | None = Field(
        default=None,
        description="A curriculum: an entry of the table of orders (difficulty), or module:name; null: see shuffle.",
    )
    order_args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the order (difficulty: key).")
    max_tokens: int | None = Field(
        default=None, ge=2, description="sft, dpo: longest prompt plus recorded response; null: the model's context."
    )


class RolloutConfig(Section):
    """How responses are sampled. Nothing is taken from the model's own generation settings."""

    engine: str = Field(default="native", description="native, vllm, or module:name (docs/rollout.md).")
    group_size: int = Field(default=8, ge=1, description="Samples of one prompt.")
    max_response_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0: all.")
    min_p: float = Field(default=0.0, ge=0, lt=1)
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="Ends of a response besides the model's own end-of-text ids."
    )
    stop_strings: tuple[str, ...] = Field(
        default=(), description="A response also ends with the token that completes one of these; nothing is cut off."
    )
    ignore_eos: bool = Field(default=False, description="Let every response run to the cap (benchmarks).")
    dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="The precision of the sampler's weights and cache."
    )
    max_running: int = Field(default=64, ge=1, description="Samples that are decoded at the same time.")
    on_update: Literal["recompute", "keep"] = Field(
        default="recompute", description="The KV cache of unfinished responses when new weights arrive."
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="Processes that hold one sampler's model together (native; placement.layout=split).",
    )
    cuda_graphs: bool = Field(
        default=False,
        description="Decode steps are recorded and replayed (native; dense models on CUDA; never run there).",
    )


class EnvConfig(Section):
    """A world that answers the model: several turns, tools."""

    name: str | None = Field(default=None, description="An entry of the table of environments, or module:name.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the environment.")
    max_turns: int = Field(default=8, ge=1, description="Turns of the model in one sample.")
    max_turn_tokens: int | None = Field(default=None, ge=1, description="Of one turn; null: what is left of the cap.")
    max_observation_tokens: int = Field(default=512, ge=1, description="Longer answers of the world are cut, and said.")
    step_timeout_s: float = Field(default=10.0, gt=0, description="Of one reset, step or tool call.")
    num_workers: int = Field(default=2, ge=1, description="Processes that work at the same time.")
    memory_bytes: int | None = Field(
        default=2 << 30, ge=1 << 26, description="Of the address space of one sample's process; null: no limit."
    )


class RewardTermConfig(Section):
    """One of several rewards."""

    function: str = Field(description="As reward.function.")
    args: dict[str, Any] = Field(default_factory=dict, description="As reward.args.")
    weight: float = Field(default=1.0, description="Its factor in the sum.")
    name: str | None = Field(default=None, description="Its name in metrics; null: the function's.")


class RewardModelConfig(Section):
    """A model that scores responses (sequence classification with one label)."""

    path: str | None = Field(default=None, description="A Hugging Face folder, a hub name; null: no reward model.")
    weight: float = Field(default=1.0, description="The factor of its score in the sum.")
    batch_tokens: int = Field(default=8192, ge=1, description="Most tokens of one forward pass.")
    placement: Literal["shared", "own"] = Field(
        default="shared", description="shared: the process that trains; own: one of its own (runtime ray)."
    )


class OverlongConfig(Section):
    """DAPO's soft punishment of long responses: 0 up to max - cache tokens, then linear down to -factor at max."""

    cache_tokens: int = Field(default=0, ge=0, description="Tokens before the cap over which it grows; 0: off.")
    factor: float = Field(default=1.0, gt=0)


class RewardConfig(Section):
    """How responses are scored."""

    function: str = Field(
        default="exact_integer",
        description="A built-in name, file.py:function, module:function, http://..., or none (a model or env alone).",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments of the function.")
    weight: float = Field(default=1.0, description="Its factor in the sum.")
    terms: tuple[RewardTermConfig, ...] = Field(default=(), description="Further rewards that are added to it.")
    model: RewardModelConfig = RewardModelConfig()
    overlong: OverlongConfig = OverlongConfig()
    mask_truncated: bool = Field(
        default=False, description="Leave responses out of the loss that reached the cap without an end."
    )
    num_workers: int = Field(default=1, ge=1, description="Processes that run the function.")
    timeout_s: float = Field(
        default=10.0, gt=0, description="A call that takes longer is stopped; its sample is invalid."
    )
    concurrency: int = Field(
        default=32, ge=1, description="Samples in flight in each process where a function is async or http."
    )
    memory_mb: int | None = Field(
        default=4096, ge=256, description="Address space of each process that runs functions; null: no limit."
    )
    max_invalid_steps: int = Field(
        default=3, ge=1, description="Stop after so many steps in a row without a scored sample."
    )

    @property
    def has_source(self) -> bool:
        """Whether a function, a further term or a model gives a reward (an environment may too)."""
        return self.function != "none" or bool(self.terms) or self.model.path is not None


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    min_learning_rate: float = Field(default=0.0, ge=0, description="Where linear and cosine end.")
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="null: no clipping.")


_ADVANTAGE = "grpo"


class KlConfig(Section):
    """A pull towards the reference (the model before training)."""

    coef: float = Field(default=0.0, ge=0, description="0: no KL term, no reference model, no forward pass of one.")
    estimator: str = Field(default="k3", description="k1, k2, k3, or module:name.")
    where: Literal["loss", "reward"] = Field(
        default="loss", description="loss: a term of the loss; reward: taken off the reward, token by token."
    )


class CorrectionConfig(Section):
    """What is done about samples whose policy (or engine) is not the one that is trained."""

    name: str = Field(
        default="none",
        description="none, truncated_token, truncated_sequence, band_token, band_sequence, decoupled, or module:name.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="truncated_*: cap; band_*: low, high.")


class CriticConfig(Section):
    """PPO's model of the value of each token."""

    path: str | None = Field(default=None, description="null: begins as the policy with a value head of zeros.")
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    value_clip: float | None = Field(default=0.2, gt=0, description="null: off.")
    warmup_steps: int = Field(default=0, ge=0, description="Batches on which only the critic is trained.")


class AlgorithmConfig(Section):
    """From rewards to a loss. `name` sets the table of stages and what the other keys are where a recipe is silent."""

    name: Literal[
        "grpo",
        "dr_grpo",
        "dapo",
        "rloo",
        "reinforce",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gspo",
        "cispo",
        "ppo",
        "dpo",
        "sft",
    ] = Field(default="grpo", description="Which algorithm; docs/algorithms says what each one sets.")
    advantage: str = Field(
        default=_ADVANTAGE, description="An entry of the table of advantage estimators, or module:name."
    )
    advantage_args: dict[str, Any] = Field(default_factory=dict, description="grpo: scale_by_std (true).")
    whiten_advantages: bool = Field(
        default=False, description="Shift and scale the advantages of a batch's tokens to mean 0 and deviation 1."
    )
    loss: str = Field(default="clip", description="An entry of the table of policy losses, or module:name.")
    loss_args: dict[str, Any] = Field(default_factory=dict, description="Further arguments of the loss (dpo: beta).")
    aggregation: Aggregation = "token-mean"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0)
    dual_clip: float | None = Field(
        default=None, gt=1, description="Bound of the loss for negative advantages; null: off."
    )
    kl: KlConfig = KlConfig()
    entropy_coef: float = Field(default=0.0, ge=0, description="The weight of an entropy bonus; 0: none is computed.")
    correction: CorrectionConfig = CorrectionConfig()
    keep_groups_without_signal: bool = Field(
        default=False, description="Train on groups whose advantages are all 0 too (they only add to the normaliser)."
    )
    dynamic_sampling: bool = Field(
        default=False, description="Put another prompt in the place of each group without signal."
    )
    max_refills: int = Field(
        default=10, ge=1, description="Stop when a batch has taken so many times its prompts and is still not full."
    )
    critic: CriticConfig = CriticConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        return preset(values) if isinstance(values, Mapping) else values

    @property
    def flow(self) -> Literal["policy", "ppo", "dpo", "sft"]:
        """The table of stages."""
        return ALGORITHMS[self.name].flow

    @model_validator(mode="after")
    def _fits(self) -> AlgorithmConfig:
        if self.dynamic_sampling and self.keep_groups_without_signal:
            raise ValueError(
                "algorithm.dynamic_sampling replaces groups without signal, and keep_groups_without_signal keeps "
                "them: set one of them to false"
            )
        if self.flow == "ppo" and not self.keep_groups_without_signal:
            raise ValueError("algorithm.name ppo has no groups to compare: set keep_groups_without_signal=true")
        if self.flow in ("dpo", "sft"):
            for key, wrong, remedy in (
                ("kl.where", self.kl.where == "reward", "kl.where=loss"),
                ("correction.name", self.correction.name != "none", "correction.name=none"),
                ("dynamic_sampling", self.dynamic_sampling, "dynamic_sampling=false"),
                ("whiten_advantages", self.whiten_advantages, "whiten_advantages=false"),
                ("advantage", self.advantage != _ADVANTAGE, "leave it out"),
                ("advantage_args", bool(self.advantage_args), "leave it out"),
            ):
                if wrong:
                    raise ValueError(f"algorithm.{key} has no meaning for {self.name}, which samples nothing: {remedy}")
        if self.flow != "ppo" and self.critic != CriticConfig():
            raise ValueError(
                f"algorithm.critic has no meaning for {self.name}: use algorithm.name=ppo, or leave it out"
            )
        return self


class TrainConfig(Section):
    """The update."""

    engine: str = Field(default="transformers", description="An entry of the table of training engines.")
    steps: int = Field(ge=1, description="Batches to train on.")
    batch_size: int = Field(default=64, ge=1, description="Samples of one batch (prompts x group_size).")
    minibatches: int = Field(default=1, ge=1, description="Optimizer steps per batch.")
    microbatch_tokens: int = Field(
        default=4096, ge=1, description="Most packed tokens of one forward pass (one group is the least)."
    )
    precision: Literal["fp32", "bf16"] = Field(default="fp32", description="bf16: autocast over fp32 weights.")
    activation_checkpointing: bool = False
    optimizer: OptimizerConfig = OptimizerConfig()


class PlacementConfig(Section):
    """Which processes host which stages."""

    runtime: Literal["inline", "ray"] = Field(
        default="inline", description="inline: this process; ray: processes of a Ray cluster."
    )
    layout: Literal["fused", "split"] = Field(
        default="fused", description="fused: one group trains and generates; split: two."
    )
    num_samplers: int = Field(default=1, ge=1, description="Rollout processes of the split layout.")
    device: str = Field(default="auto", description="auto, cpu, cuda, npu: as torch.accelerator names it.")
    threads_per_process: int | None = Field(
        default=None, ge=1, description="null: cores shared evenly (1 if deterministic)."
    )
    ray_address: str | None = Field(default=None, description="null: a Ray of this run's own, on 127.0.0.1.")


class DockConfig(Section):
    """The sample flow."""

    staleness: int = Field(
        default=0, ge=0, description="Largest (version at use) - (oldest version of a token); 0: synchronous."
    )
    on_stale: Literal["finish_first", "discard"] = Field(
        default="finish_first", description="What happens to a group that would pass the bound."
    )
    lease_s: float = Field(
        default=600.0, gt=0, description="A taken group that is silent for longer goes to another reader."
    )
    policies: dict[str, str] = Field(
        default_factory=dict,
        description="Stage -> entry of the table of take policies (first_come, oldest_first, balanced, ordered, "
        "dispatch), or module:name; where a stage is not named: dispatch for several samplers, else first_come.",
    )
    preset: Literal["standard", "small"] = Field(
        default="standard", description="What the three keys below are: small is for laptops and small containers."
    )
    slab_bytes: int = Field(
        default=_DOCK["slab_bytes"], ge=1 << 16, description="Payload is set aside in slabs; each writer fills one."
    )
    capacity_bytes: int = Field(default=_DOCK["capacity_bytes"], ge=1 << 20, description="Most payload held at once.")
    prefault_slabs: int = Field(
        default=_DOCK["prefault_slabs"],
        ge=0,
        description="Slabs made at the start, so that the first writers do not wait for fresh pages.",
    )

    controllers: tuple[str, ...] = Field(
        default=(),
        description="Stages whose controller has a process of its own (placement.runtime=ray), such as [reward]; the "
        "dock's process has all others. Not those that sample or train.",
    )
    journal: bool = Field(
        default=True,
        description="Where the dock has a process of its own: another one takes its place when it is killed. Without, "
        "the run goes back to its last checkpoint then.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        return dock_preset(values) if isinstance(values, Mapping) else values


class CheckpointConfig(Section):
    """Consistent cuts to go on from."""

    every_steps: int = Field(default=0, ge=0, description="0: only at the end and when stopped.")
    keep_last: int = Field(default=2, ge=1)
    best_metric: str | None = Field(
        default=None,
        description="Keep the best validation's model as RUN/best, by score, score_greedy or score/SOURCE; null: off.",
    )
    best_mode: Literal["max", "min"] = Field(
        default="max", description="Whether more or less of best_metric is better."
    )


class ValidationConfig(Section):
    """Scores on held-out prompts, under sampling and greedy."""

    every_steps: int = Field(default=0, ge=0, description="0: only before and after.")
    before_training: bool = True
    after_training: bool = True
    samples_per_prompt: int = Field(default=1, ge=1)
    greedy: bool = Field(default=True, description="Score one greedy response of each prompt too.")
    correct_score: float = Field(
        default=1.0, description="The least score, before any shaping, that counts as right in pass@k and maj@k."
    )


class ServeConfig(Section):
    """The OpenAI-compatible endpoint of a run, over its samplers' engines."""

    enabled: bool = Field(default=False, description="Each sampler's RUN/serve/NAME.json then says where it is.")
    host: str = Field(default="127.0.0.1", description="The default is reached from this machine alone.")
    port: int = Field(default=0, ge=0, le=65535, description="0: any free one.")
    name: str = Field(default="policy", min_length=1, description="What requests call the model.")
    agents: bool = Field(default=False, description="Samples are made by agents that claim them at the endpoint.")
    agent_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Until a sample is claimed, and from then until its reward; else it is invalid.",
    )

    @model_validator(mode="after")
    def _in_use(self) -> ServeConfig:
        idle = sorted(self.model_fields_set - {"enabled"})
        if not self.enabled and any(getattr(self, name) != type(self).model_fields[name].default for name in idle):
            raise ValueError(f"serve.{idle[0]} means nothing where serve.enabled is false: set serve.enabled=true")
        return self


class ObserveConfig(Section):
    """What is shown and written."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    trackers: tuple[str, ...] = Field(
        default=("tensorboard",), description="Entries of the table of trackers, or module:name."
    )
    tensorboard_port: int | None = Field(
        default=None, ge=1, le=65535, description="Serve TensorBoard on 127.0.0.1 at this port."
    )
    samples_per_step: int = Field(
        default=-1, ge=-1, description="Samples written to samples.jsonl at each step; -1: all."
    )
    project: str = Field(default="tranship", description="Where W&B, MLflow and trackio file the run.")
    profile_steps: tuple[int, ...] = Field(
        default=(), description="Steps of which torch's profiler writes a trace to RUN/profile."
    )
    snapshot_reward_drop: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Write RUN/snapshots when a step's reward falls by this share of its running mean; 0: never.",
    )
    snapshot_kl: float = Field(
        default=0.5, ge=0, description="Write RUN/snapshots when a step's KL passes this; 0: never."
    )


class RunConfig(Section):
    """Where the run lives and how it is repeated."""

    dir: str = Field(default="runs/run", description="The run's folder.")
    seed: int = Field(default=0, ge=0)
    deterministic: bool = Field(
        default=False, description="fp32, CPU, one thread per process, ordered decisions: bit-equal repeats."
    )
    resume: Literal["never", "auto"] = Field(
        default="never", description="auto: go on from the folder's last checkpoint."
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="How often the run goes back to its last checkpoint when the trainer's process dies, and another "
        "process is started again without a trained batch between; 0: it stops.",
    )
    export: bool = Field(default=True, description="Leave the trained model as a Hugging Face folder, RUN/model.")


class Config(Section):
    """Everything that one run needs."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    env: EnvConfig = EnvConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig
    placement: PlacementConfig = PlacementConfig()
    dock: DockConfig = DockConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    serve: ServeConfig = ServeConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def group_size(self) -> int:
        """Samples of one prompt in a training batch: 2 of a preference (dpo), 1 of a demonstration (sft)."""
        return {"dpo": 2, "sft": 1}.get(self.algorithm.flow, self.rollout.group_size)

    @property
    def train_temperature(self) -> float:
        """What the trainer divides logits by: the samplers' temperature (0 counts as 1); 1 for recorded responses."""
        return 1.0 if self.algorithm.flow in ("dpo", "sft") else self.rollout.temperature or 1.0

    @property
    def groups_per_step(self) -> int:
        """Prompts of one batch."""
        return self.train.batch_size // self.group_size

    @property
    def groups_total(self) -> int:
        """Prompt occurrences that the whole run admits."""
        return self.groups_per_step * self.train.steps

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        batch, group, mini = self.train.batch_size, self.group_size, self.train.minibatches
        if batch % group:
            near = max(group, round(batch / group) * group)
            said = "rollout.group_size" if self.algorithm.flow in ("policy", "ppo") else "a preference's samples,"
            raise ValueError(f"train.batch_size {batch} is not a multiple of {said} {group}: use batch_size={near}")
        if (batch // group) % mini:
            raise ValueError(
                f"train.minibatches {mini} does not divide the {batch // group} groups of a batch "
                f"(batch_size {batch} / group_size {group}): use a divisor of {batch // group}"
            )
        if self.run.deterministic:
            for key, value, wanted in (
                ("train.precision", self.train.precision, "fp32"),
                ("rollout.dtype", self.rollout.dtype, "fp32"),
            ):
                if value != wanted:
                    raise ValueError(
                        f"run.deterministic needs {key}={wanted}, not {value}: set it, or deterministic=false"
                    )
            if self.rollout.engine == "vllm":
                raise ValueError(
                    "run.deterministic needs rollout.engine=native: vLLM's results depend on what else is in the batch"
                )
            if self.placement.threads_per_process not in (None, 1):
                raise ValueError(
                    f"run.deterministic needs placement.threads_per_process=1, not {self.placement.threads_per_process}"
                )
            if self.placement.device not in ("auto", "cpu"):
                raise ValueError(f"run.deterministic needs placement.device=cpu, not {self.placement.device}")
        if self.placement.runtime == "inline" and self.placement.layout == "split":
            raise ValueError(
                "placement.layout=split needs processes of its own: use placement.runtime=ray, or layout=fused"
            )
        if self.placement.layout == "fused" and self.placement.num_samplers != 1:
            raise ValueError(
                f"placement.num_samplers {self.placement.num_samplers} needs placement.layout=split: "
                "in the fused layout the one group trains and generates"
            )
        if self.rollout.tensor_parallel > 1:
            self._check_tensor_parallel()
        if self.rollout.cuda_graphs:
            self._check_cuda_graphs()
        if self.dock.capacity_bytes < 2 * self.dock.slab_bytes:
            raise ValueError(
                f"dock.capacity_bytes {self.dock.capacity_bytes} has no room for two slabs of dock.slab_bytes "
                f"{self.dock.slab_bytes}: raise it, or use smaller slabs"
            )
        if self.reward.model.placement == "own" and self.placement.runtime == "inline":
            raise ValueError(
                "reward.model.placement=own needs processes of its own: use placement.runtime=ray, or placement=shared"
            )
        if not self.reward.has_source and self.env.name is None and not self.serve.agents:
            raise ValueError("reward.function is none, and there is no reward.model and no env: nothing gives a reward")
        if self.env.name is not None and self.algorithm.flow in ("dpo", "sft"):
            raise ValueError(f"env.name {self.env.name!r} has no meaning for {self.algorithm.name}: leave env out")
        self._check_agents()
        self._check_switched_off()
        optimizer = self.train.optimizer
        if optimizer.min_learning_rate > optimizer.learning_rate:
            raise ValueError(
                f"train.optimizer.min_learning_rate {optimizer.min_learning_rate} is above "
                f"learning_rate {optimizer.learning_rate}"
            )
        self._check_learnable()
        return self

    def _check_tensor_parallel(self) -> None:
        size = self.rollout.tensor_parallel
        if self.rollout.engine != "native":
            raise ValueError(
                f"rollout.tensor_parallel {size} needs rollout.engine=native, not {self.rollout.engine}: set it, or "
                "tensor_parallel=1"
            )
        if self.placement.layout != "split":
            raise ValueError(
                f"rollout.tensor_parallel {size} needs processes that only sample: use placement.runtime=ray and "
                "placement.layout=split, or tensor_parallel=1"
            )

    def _check_cuda_graphs(self) -> None:
        for key, value, fits in (
            ("rollout.engine", self.rollout.engine, self.rollout.engine == "native"),
            ("rollout.tensor_parallel", self.rollout.tensor_parallel, self.rollout.tensor_parallel == 1),
            ("placement.device", self.placement.device, self.placement.device in ("auto", "cuda")),
            ("run.deterministic", "true", not self.run.deterministic),
        ):
            if not fits:
                raise ValueError(
                    f"rollout.cuda_graphs is for the native engine in one process on CUDA, and {key} is {value}: set "
                    "cuda_graphs=false"
                )

    def _check_agents(self) -> None:
        if not self.serve.agents:
            return
        for key, wrong, remedy in (
            (f"env.name {self.env.name!r}", self.env.name is not None, "two worlds cannot make one sample: drop one"),
            (f"algorithm.name {self.algorithm.name}", self.algorithm.flow in ("dpo", "sft"), "its responses are given"),
            ("run.deterministic", self.run.deterministic, "agents do not repeat: use deterministic=false"),
        ):
            if wrong:
                raise ValueError(f"serve.agents cannot go with {key}: {remedy}")

    def _check_learnable(self) -> None:
        """Refuse what leaves the weights as they are, whatever the data."""
        algorithm, steps = self.algorithm, self.train.steps
        compares = algorithm.flow == "policy" and algorithm.advantage in ("grpo", "rloo")
        if compares and self.group_size == 1:
            raise ValueError(
                f"algorithm.name {algorithm.name} compares the samples of a prompt, and rollout.group_size is 1: use "
                "group_size=8, or an algorithm without a baseline (reinforce, reinforce_pp, ppo)"
            )
        if algorithm.flow == "ppo" and algorithm.critic.warmup_steps >= steps:
            raise ValueError(
                f"algorithm.critic.warmup_steps {algorithm.critic.warmup_steps} leaves no step for the policy "
                f"(train.steps {steps}): use fewer"
            )
        for key, value in (("train", self.train.optimizer), ("algorithm.critic", algorithm.critic.optimizer)):
            if not all(0 <= beta < 1 for beta in value.betas):
                raise ValueError(f"{key}.optimizer.betas {list(value.betas)} must be at least 0 and below 1")
            if value.warmup_steps > steps:
                raise ValueError(f"{key}.optimizer.warmup_steps {value.warmup_steps} is more than train.steps {steps}")
        if any(token < 0 for token in self.rollout.stop_token_ids):
            raise ValueError(f"rollout.stop_token_ids {list(self.rollout.stop_token_ids)} must be token ids, from 0 on")
        late = [step for step in self.observe.profile_steps if not 1 <= step <= steps]
        if late:
            raise ValueError(f"observe.profile_steps {late[0]} is no step of this run: they count from 1 to {steps}")

    def _check_switched_off(self) -> None:
        """Refuse settings of something that is not there: they would be accepted and ignored."""
        cap = self.rollout.max_response_tokens
        recorded = self.algorithm.flow in ("dpo", "sft")
        for key, wrong, remedy in (
            (
                "serve.agent_timeout_s",
                not self.serve.agents
                and self.serve.agent_timeout_s != ServeConfig.model_fields["agent_timeout_s"].default,
                "set serve.agents=true, or leave it out",
            ),
            ("env", self.env.name is None and self.env != EnvConfig(), "set env.name, or leave env out"),
            (
                "reward.model",
                self.reward.model.path is None and self.reward.model != RewardModelConfig(),
                "set reward.model.path, or leave reward.model out",
            ),
            (
                "data.max_tokens",
                self.data.max_tokens is not None and not recorded,
                f"{self.algorithm.name} has no recorded responses; use rollout.max_response_tokens",
            ),
            (
                "reward.overlong.cache_tokens",
                self.reward.overlong.cache_tokens > cap,
                f"it is above rollout.max_response_tokens {cap}: use a smaller one",
            ),
            (
                "algorithm.max_refills",
                not self.algorithm.dynamic_sampling
                and self.algorithm.max_refills != AlgorithmConfig.model_fields["max_refills"].default,
                "set algorithm.dynamic_sampling=true, or leave it out",
            ),
            (
                "dock.on_stale=discard",
                self.dock.on_stale == "discard" and not self.dock.staleness,
                "with a bound of 0 nothing can be too old; set dock.staleness, or leave it out",
            ),
            (
                "reward.overlong.factor",
                not self.reward.overlong.cache_tokens and self.reward.overlong != OverlongConfig(),
                "set reward.overlong.cache_tokens, or leave it out",
            ),
        ):
            if wrong:
                raise ValueError(f"{key} would have no effect: {remedy}")
