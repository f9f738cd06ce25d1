"""The one configuration: typed, frozen, strict. Each default stands on its field, once; derived values are properties.

Checks here need no file, no model and no device; those that do are made by `tranship.trainer.preflight`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class Section(BaseModel):
    """What all sections share: nothing unknown, nothing converted in silence, nothing changed later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Section):
    """Which language model."""

    path: str = Field(description="A Hugging Face folder, a hub name, or a name that `tranship model get` knows.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that the model folder brings.")


class DataSourceConfig(Section):
    """Where prompts come from."""

    source: str = Field(description="`sums`, a .jsonl or .parquet file in verl's schema, or module:name.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the source (`sums`: low, high, ...).")
    limit: int | None = Field(default=None, ge=1, description="Use only the first so many rows.")


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


class RolloutConfig(Section):
    """How responses are sampled. Nothing is taken from the model's own generation settings."""

    engine: str = Field(default="native", description="An entry of the table of rollout engines.")
    group_size: int = Field(default=8, ge=1, description="Samples of one prompt.")
    max_response_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0: all.")
    min_p: float = Field(default=0.0, ge=0, lt=1)
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="Ends of a response besides the model's own end-of-text ids."
    )
    ignore_eos: bool = Field(default=False, description="Let every response run to the cap (benchmarks).")
    dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="The precision of the sampler's weights and cache."
    )
    max_running: int = Field(default=64, ge=1, description="Samples that are decoded at the same time.")
    on_update: Literal["recompute", "keep"] = Field(
        default="recompute", description="The KV cache of unfinished responses when new weights arrive."
    )


class RewardConfig(Section):
    """How responses are scored."""

    function: str = Field(default="exact_integer", description="A built-in name, file.py:function, or module:function.")
    args: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments of the function.")
    num_workers: int = Field(default=1, ge=1, description="Processes that run the function.")
    timeout_s: float = Field(
        default=10.0, gt=0, description="A call that takes longer is stopped; its sample is invalid."
    )
    max_invalid_steps: int = Field(
        default=3, ge=1, description="Stop after so many steps in a row without a scored sample."
    )


class KlConfig(Section):
    """A pull towards the reference (the model before training)."""

    coef: float = Field(default=0.0, ge=0, description="0: no KL term, no reference model, no forward pass of one.")
    estimator: str = Field(default="k3", description="k1, k2, k3, or module:name.")


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    name: Literal["grpo"] = Field(default="grpo", description="The table of stages.")
    advantage: str = Field(default="grpo", description="An entry of the table of advantage estimators, or module:name.")
    advantage_args: dict[str, Any] = Field(default_factory=dict, description="grpo: scale_by_std (true).")
    loss: str = Field(default="clip", description="An entry of the table of policy losses, or module:name.")
    aggregation: Aggregation = "token-mean"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0)
    dual_clip: float | None = Field(
        default=None, gt=1, description="Bound of the loss for negative advantages; null: off."
    )
    kl: KlConfig = KlConfig()
    keep_groups_without_signal: bool = Field(
        default=False, description="Train on groups whose advantages are all 0 too (they only add to the normaliser)."
    )


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
    slab_bytes: int = Field(default=16 << 20, ge=1 << 16)
    capacity_bytes: int = Field(default=1 << 30, ge=1 << 20, description="Most payload held at once.")


class CheckpointConfig(Section):
    """Consistent cuts to go on from."""

    every_steps: int = Field(default=0, ge=0, description="0: only at the end and when stopped.")
    keep_last: int = Field(default=2, ge=1)


class ValidationConfig(Section):
    """Scores on held-out prompts, under sampling and greedy."""

    every_steps: int = Field(default=0, ge=0, description="0: only before and after.")
    before_training: bool = True
    after_training: bool = True
    samples_per_prompt: int = Field(default=1, ge=1)
    greedy: bool = Field(default=True, description="Score one greedy response of each prompt too.")


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
    export: bool = Field(default=True, description="Leave the trained model as a Hugging Face folder, RUN/model.")


class Config(Section):
    """Everything that one run needs."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig
    placement: PlacementConfig = PlacementConfig()
    dock: DockConfig = DockConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def groups_per_step(self) -> int:
        """Prompts of one batch."""
        return self.train.batch_size // self.rollout.group_size

    @property
    def groups_total(self) -> int:
        """Prompt occurrences that the whole run admits."""
        return self.groups_per_step * self.train.steps

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        batch, group, mini = self.train.batch_size, self.rollout.group_size, self.train.minibatches
        if batch % group:
            near = max(group, round(batch / group) * group)
            raise ValueError(
                f"train.batch_size {batch} is not a multiple of rollout.group_size {group}: use batch_size={near}"
            )
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
        optimizer = self.train.optimizer
        if optimizer.min_learning_rate > optimizer.learning_rate:
            raise ValueError(
                f"train.optimizer.min_learning_rate {optimizer.min_learning_rate} is above "
                f"learning_rate {optimizer.learning_rate}"
            )
        return self
