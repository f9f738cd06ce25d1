"""What other systems call our keys: one table, read by the error for unknown keys and by the page docs/names.md.

The names were looked up in verl 0.9, TRL 1.16 with transformers 5, the PPO command of OpenRLHF as of 2025 and the
configuration classes and recipes of MindSpeed RL as of 2025; a few are from earlier releases of TRL.
`make names` writes the page.
"""

from __future__ import annotations

from typing import NamedTuple


class Name(NamedTuple):
    """One name of another system. note: where its unit or its values differ from ours."""

    system: str
    name: str
    key: str
    note: str = ""


_PROMPTS = "counts prompts; ours counts samples: multiply by rollout.group_size"
_PROMPTS_MINI = "counts the prompts of one optimizer step; ours is the number of optimizer steps per batch"
_SAMPLES_MINI = "counts the samples of one optimizer step; ours is the number of optimizer steps per batch"
_ROWS = "counts rows; ours is the most packed tokens of one forward pass"
_TOP_K = "-1 means all tokens there, 0 here"
_NEVER = "-1 means never there, 0 here"
_EPOCHS = "counts passes over the data; ours counts batches"
_RATIO = "a share of the steps; ours is a number of steps"
_BF16 = "true is bf16 here, false fp32"
_SPELLING = "bfloat16 and float32 are bf16 and fp32 here"
_MODES = "token-mean, seq-mean-token-sum, seq-mean-token-mean and seq-mean-token-sum-norm are the same here"
_LOSS_TYPES = (
    "dapo is token-mean here, grpo seq-mean-token-mean, dr_grpo seq-mean-token-sum-norm (with no scaling by std)"
)
_KL_TYPES = "kl is k1 here, mse k2, low_var_kl k3"
_CLIP_BOTH = "sets both bounds; here also algorithm.clip_high"
_KL_SWITCH = "false is 0 here"
_FILTER = "the other way round: groups without signal are left out here unless this is true; nothing is sampled again"
_OVERLONG = "true is too_long: drop here, false too_long: refuse"
_RESUME = "true is auto here, false never"
_BETAS = "both betas are one list here, [0.9, 0.999]"

VOCABULARY: tuple[Name, ...] = (
    Name("verl", "actor_rollout_ref.model.path", "model.path"),
    Name("verl", "actor_rollout_ref.model.trust_remote_code", "model.trust_remote_code"),
    Name("verl", "actor_rollout_ref.model.enable_gradient_checkpointing", "train.activation_checkpointing"),
    Name("verl", "data.trust_remote_code", "model.trust_remote_code"),
    Name("verl", "data.train_files", "data.train.source"),
    Name("verl", "data.val_files", "data.val.source"),
    Name("verl", "data.train_max_samples", "data.train.limit", "-1 means all there, null here"),
    Name("verl", "data.val_max_samples", "data.val.limit", "-1 means all there, null here"),
    Name("verl", "data.train_batch_size", "train.batch_size", _PROMPTS),
    Name("verl", "data.max_prompt_length", "data.max_prompt_tokens"),
    Name("verl", "data.max_response_length", "rollout.max_response_tokens"),
    Name("verl", "data.filter_overlong_prompts", "data.too_long", _OVERLONG),
    Name("verl", "data.truncation", "data.too_long", "error is refuse here; prompts are never cut"),
    Name("verl", "data.shuffle", "data.shuffle"),
    Name("verl", "data.seed", "run.seed", "one seed for everything here"),
    Name("verl", "data.apply_chat_template_kwargs", "data.template_args"),
    Name("verl", "actor_rollout_ref.rollout.name", "rollout.engine"),
    Name("verl", "actor_rollout_ref.rollout.n", "rollout.group_size"),
    Name("verl", "actor_rollout_ref.rollout.temperature", "rollout.temperature"),
    Name("verl", "actor_rollout_ref.rollout.top_p", "rollout.top_p"),
    Name("verl", "actor_rollout_ref.rollout.top_k", "rollout.top_k", _TOP_K),
    Name("verl", "actor_rollout_ref.rollout.dtype", "rollout.dtype", _SPELLING),
    Name("verl", "actor_rollout_ref.rollout.ignore_eos", "rollout.ignore_eos"),
    Name("verl", "actor_rollout_ref.rollout.max_num_seqs", "rollout.max_running"),
    Name("verl", "actor_rollout_ref.rollout.response_length", "rollout.max_response_tokens"),
    Name("verl", "actor_rollout_ref.rollout.prompt_length", "data.max_prompt_tokens"),
    Name("verl", "actor_rollout_ref.rollout.val_kwargs.n", "validation.samples_per_prompt"),
    Name("verl", "actor_rollout_ref.rollout.val_kwargs.do_sample", "validation.greedy", "both are scored here"),
    Name("verl", "actor_rollout_ref.rollout.full_determinism", "run.deterministic"),
    Name("verl", "actor_rollout_ref.actor.strategy", "train.engine"),
    Name("verl", "actor_rollout_ref.actor.fsdp_config.dtype", "train.precision", _SPELLING),
    Name("verl", "actor_rollout_ref.actor.ppo_mini_batch_size", "train.minibatches", _PROMPTS_MINI),
    Name("verl", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "train.microbatch_tokens", _ROWS),
    Name("verl", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "train.microbatch_tokens"),
    Name("verl", "actor_rollout_ref.actor.clip_ratio", "algorithm.clip_low", _CLIP_BOTH),
    Name("verl", "actor_rollout_ref.actor.clip_ratio_low", "algorithm.clip_low"),
    Name("verl", "actor_rollout_ref.actor.clip_ratio_high", "algorithm.clip_high"),
    Name("verl", "actor_rollout_ref.actor.clip_ratio_c", "algorithm.dual_clip", "on at 3.0 there, off here"),
    Name("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.loss", "vanilla is clip here"),
    Name("verl", "actor_rollout_ref.actor.loss_agg_mode", "algorithm.aggregation", _MODES),
    Name("verl", "actor_rollout_ref.actor.use_kl_loss", "algorithm.kl.coef", _KL_SWITCH),
    Name("verl", "actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl.coef"),
    Name("verl", "actor_rollout_ref.actor.kl_loss_type", "algorithm.kl.estimator", _KL_TYPES),
    Name("verl", "actor_rollout_ref.actor.grad_clip", "train.optimizer.max_grad_norm"),
    Name("verl", "actor_rollout_ref.actor.optim.lr", "train.optimizer.learning_rate"),
    Name("verl", "actor_rollout_ref.actor.optim.lr_scheduler_type", "train.optimizer.schedule"),
    Name("verl", "actor_rollout_ref.actor.optim.lr_warmup_steps", "train.optimizer.warmup_steps"),
    Name("verl", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "train.optimizer.warmup_steps", _RATIO),
    Name(
        "verl",
        "actor_rollout_ref.actor.optim.min_lr_ratio",
        "train.optimizer.min_learning_rate",
        "a share of the learning rate; ours is the rate itself",
    ),
    Name("verl", "actor_rollout_ref.actor.optim.betas", "train.optimizer.betas"),
    Name("verl", "actor_rollout_ref.actor.optim.weight_decay", "train.optimizer.weight_decay", "0.01 there, 0 here"),
    Name("verl", "actor_rollout_ref.actor.optim.clip_grad", "train.optimizer.max_grad_norm"),
    Name("verl", "algorithm.adv_estimator", "algorithm.advantage"),
    Name("verl", "algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage_args", "its entry scale_by_std"),
    Name("verl", "algorithm.filter_groups.enable", "algorithm.keep_groups_without_signal", _FILTER),
    Name("verl", "custom_reward_function.path", "reward.function", "file.py:function in one value here"),
    Name("verl", "custom_reward_function.name", "reward.function", "file.py:function in one value here"),
    Name("verl", "reward.custom_reward_function.path", "reward.function", "file.py:function in one value here"),
    Name("verl", "reward.custom_reward_function.name", "reward.function", "file.py:function in one value here"),
    Name("verl", "reward.num_workers", "reward.num_workers"),
    Name("verl", "reward_model.num_workers", "reward.num_workers"),
    Name("verl", "trainer.total_training_steps", "train.steps"),
    Name("verl", "trainer.total_epochs", "train.steps", _EPOCHS),
    Name("verl", "trainer.save_freq", "checkpoint.every_steps", _NEVER),
    Name("verl", "trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last"),
    Name("verl", "trainer.test_freq", "validation.every_steps", _NEVER),
    Name("verl", "trainer.val_before_train", "validation.before_training"),
    Name("verl", "trainer.resume_mode", "run.resume", "disable is never here"),
    Name("verl", "trainer.default_local_dir", "run.dir"),
    Name("verl", "trainer.logger", "observe.trackers"),
    Name("verl", "trainer.log_val_generations", "observe.samples_per_step", "training samples here, all by default"),
    Name("verl", "trainer.device", "placement.device"),
    Name("verl", "trainer.v1.trainer_mode", "placement.layout", "sync and colocate_async are fused here"),
    Name("verl", "trainer.v1.sampler.max_off_policy_threshold", "dock.staleness"),
    Name("verl", "trainer.v1.sampler.max_off_policy_strategy", "dock.on_stale", "drop is discard here"),
    Name("TRL", "model_name_or_path", "model.path"),
    Name("TRL", "trust_remote_code", "model.trust_remote_code"),
    Name("TRL", "dataset_name", "data.train.source"),
    Name("TRL", "shuffle_dataset", "data.shuffle"),
    Name("TRL", "chat_template_kwargs", "data.template_args"),
    Name("TRL", "max_prompt_length", "data.max_prompt_tokens", "longer prompts were cut there, never here"),
    Name("TRL", "max_completion_length", "rollout.max_response_tokens"),
    Name("TRL", "num_generations", "rollout.group_size"),
    Name("TRL", "num_generations_eval", "validation.samples_per_prompt"),
    Name("TRL", "temperature", "rollout.temperature"),
    Name("TRL", "top_p", "rollout.top_p"),
    Name("TRL", "top_k", "rollout.top_k"),
    Name("TRL", "min_p", "rollout.min_p"),
    Name("TRL", "use_vllm", "rollout.engine"),
    Name("TRL", "vllm_mode", "placement.layout", "colocate is fused here, server is split"),
    Name("TRL", "reward_funcs", "reward.function", "one function here"),
    Name("TRL", "scale_rewards", "algorithm.advantage_args", "its entry scale_by_std, true or false"),
    Name("TRL", "loss_type", "algorithm.aggregation", _LOSS_TYPES),
    Name("TRL", "epsilon", "algorithm.clip_low", _CLIP_BOTH),
    Name("TRL", "epsilon_high", "algorithm.clip_high"),
    Name("TRL", "delta", "algorithm.dual_clip"),
    Name("TRL", "beta", "algorithm.kl.coef"),
    Name("TRL", "learning_rate", "train.optimizer.learning_rate"),
    Name("TRL", "lr_scheduler_type", "train.optimizer.schedule"),
    Name("TRL", "warmup_steps", "train.optimizer.warmup_steps"),
    Name("TRL", "warmup_ratio", "train.optimizer.warmup_steps", _RATIO),
    Name("TRL", "adam_beta1", "train.optimizer.betas", _BETAS),
    Name("TRL", "adam_beta2", "train.optimizer.betas", _BETAS),
    Name("TRL", "adam_epsilon", "train.optimizer.eps"),
    Name("TRL", "weight_decay", "train.optimizer.weight_decay"),
    Name("TRL", "max_grad_norm", "train.optimizer.max_grad_norm", "0 means no clipping there, null here"),
    Name("TRL", "max_steps", "train.steps", "counts optimizer steps; ours counts batches"),
    Name("TRL", "num_train_epochs", "train.steps", _EPOCHS),
    Name(
        "TRL",
        "generation_batch_size",
        "train.batch_size",
        "counts samples, as ours does",
    ),
    Name("TRL", "steps_per_generation", "train.minibatches", "counts microbatches; ours counts optimizer steps"),
    Name("TRL", "per_device_train_batch_size", "train.microbatch_tokens", _ROWS),
    Name("TRL", "gradient_accumulation_steps", "train.microbatch_tokens", "follows from the tokens here"),
    Name("TRL", "bf16", "train.precision", _BF16),
    Name("TRL", "gradient_checkpointing", "train.activation_checkpointing"),
    Name("TRL", "save_steps", "checkpoint.every_steps"),
    Name("TRL", "save_total_limit", "checkpoint.keep_last"),
    Name("TRL", "eval_steps", "validation.every_steps"),
    Name("TRL", "eval_on_start", "validation.before_training"),
    Name("TRL", "report_to", "observe.trackers"),
    Name("TRL", "output_dir", "run.dir"),
    Name("TRL", "resume_from_checkpoint", "run.resume", _RESUME),
    Name("TRL", "full_determinism", "run.deterministic"),
    Name("TRL", "seed", "run.seed"),
    Name("OpenRLHF", "pretrain", "model.path"),
    Name("OpenRLHF", "prompt_data", "data.train.source"),
    Name("OpenRLHF", "eval_dataset", "data.val.source"),
    Name("OpenRLHF", "max_samples", "data.train.limit"),
    Name("OpenRLHF", "prompt_max_len", "data.max_prompt_tokens"),
    Name("OpenRLHF", "generate_max_len", "rollout.max_response_tokens"),
    Name("OpenRLHF", "n_samples_per_prompt", "rollout.group_size"),
    Name("OpenRLHF", "eval_n_samples_per_prompt", "validation.samples_per_prompt"),
    Name("OpenRLHF", "temperature", "rollout.temperature"),
    Name("OpenRLHF", "top_p", "rollout.top_p"),
    Name("OpenRLHF", "remote_rm_url", "reward.function"),
    Name("OpenRLHF", "rollout_batch_size", "train.batch_size", _PROMPTS),
    Name("OpenRLHF", "train_batch_size", "train.minibatches", _SAMPLES_MINI),
    Name("OpenRLHF", "micro_train_batch_size", "train.microbatch_tokens", _ROWS),
    Name("OpenRLHF", "train_max_tokens_per_gpu", "train.microbatch_tokens"),
    Name("OpenRLHF", "num_episodes", "train.steps", _EPOCHS),
    Name("OpenRLHF", "advantage_estimator", "algorithm.advantage", "group_norm is grpo here"),
    Name("OpenRLHF", "no_advantage_std_norm", "algorithm.advantage_args", "scale_by_std: false here"),
    Name("OpenRLHF", "policy_loss_type", "algorithm.loss", "ppo is clip here"),
    Name("OpenRLHF", "eps_clip", "algorithm.clip_low", _CLIP_BOTH),
    Name("OpenRLHF", "eps_clip_low_high", "algorithm.clip_low", "two values there; here also algorithm.clip_high"),
    Name("OpenRLHF", "dual_clip", "algorithm.dual_clip"),
    Name("OpenRLHF", "init_kl_coef", "algorithm.kl.coef", "in the loss here, as with use_kl_loss there"),
    Name("OpenRLHF", "use_kl_loss", "algorithm.kl.coef", _KL_SWITCH),
    Name("OpenRLHF", "kl_estimator", "algorithm.kl.estimator"),
    Name("OpenRLHF", "dynamic_filtering", "algorithm.keep_groups_without_signal", _FILTER),
    Name("OpenRLHF", "actor_learning_rate", "train.optimizer.learning_rate"),
    Name("OpenRLHF", "lr_scheduler", "train.optimizer.schedule"),
    Name("OpenRLHF", "lr_warmup_ratio", "train.optimizer.warmup_steps", _RATIO),
    Name("OpenRLHF", "adam_betas", "train.optimizer.betas"),
    Name("OpenRLHF", "l2", "train.optimizer.weight_decay"),
    Name("OpenRLHF", "max_norm", "train.optimizer.max_grad_norm"),
    Name("OpenRLHF", "bf16", "train.precision", _BF16),
    Name("OpenRLHF", "gradient_checkpointing", "train.activation_checkpointing"),
    Name("OpenRLHF", "colocate_all_models", "placement.layout", "true is fused here"),
    Name("OpenRLHF", "vllm_num_engines", "placement.num_samplers"),
    Name("OpenRLHF", "async_queue_size", "dock.staleness", "a bound on batches in the queue there"),
    Name("OpenRLHF", "save_steps", "checkpoint.every_steps", _NEVER),
    Name("OpenRLHF", "max_ckpt_num", "checkpoint.keep_last"),
    Name("OpenRLHF", "eval_steps", "validation.every_steps", _NEVER),
    Name("OpenRLHF", "load_checkpoint", "run.resume", _RESUME),
    Name("OpenRLHF", "save_path", "run.dir"),
    Name("OpenRLHF", "use_tensorboard", "observe.trackers", "tensorboard is an entry of this list"),
    Name("OpenRLHF", "full_determinism", "run.deterministic"),
    Name("OpenRLHF", "seed", "run.seed"),
    Name("MindSpeed RL", "megatron_training.tokenizer_name_or_path", "model.path"),
    Name("MindSpeed RL", "megatron_training.data_path", "data.train.source"),
    Name("MindSpeed RL", "megatron_training.no_shuffle", "data.shuffle", "the other way round"),
    Name("MindSpeed RL", "megatron_training.global_batch_size", "train.batch_size", _PROMPTS),
    Name("MindSpeed RL", "megatron_training.train_iters", "train.steps"),
    Name("MindSpeed RL", "megatron_training.save_interval", "checkpoint.every_steps"),
    Name("MindSpeed RL", "megatron_training.eval_interval", "validation.every_steps"),
    Name("MindSpeed RL", "megatron_training.bf16", "train.precision", _BF16),
    Name("MindSpeed RL", "megatron_training.recompute_granularity", "train.activation_checkpointing", "full is true"),
    Name("MindSpeed RL", "megatron_training.seed", "run.seed"),
    Name("MindSpeed RL", "actor_config.load", "model.path", "a Hugging Face folder here"),
    Name("MindSpeed RL", "actor_config.save", "run.dir"),
    Name("MindSpeed RL", "actor_config.lr", "train.optimizer.learning_rate"),
    Name("MindSpeed RL", "actor_config.min_lr", "train.optimizer.min_learning_rate"),
    Name("MindSpeed RL", "actor_config.lr_decay_style", "train.optimizer.schedule"),
    Name("MindSpeed RL", "actor_config.lr_warmup_fraction", "train.optimizer.warmup_steps", _RATIO),
    Name("MindSpeed RL", "actor_config.weight_decay", "train.optimizer.weight_decay"),
    Name("MindSpeed RL", "actor_config.clip_grad", "train.optimizer.max_grad_norm"),
    Name("MindSpeed RL", "actor_config.adam_beta1", "train.optimizer.betas", _BETAS),
    Name("MindSpeed RL", "actor_config.adam_beta2", "train.optimizer.betas", _BETAS),
    Name("MindSpeed RL", "actor_config.micro_batch_size", "train.microbatch_tokens", _ROWS),
    Name("MindSpeed RL", "rl_config.update_max_packing_token_size", "train.microbatch_tokens"),
    Name("MindSpeed RL", "rl_config.mini_batch_size", "train.minibatches", _PROMPTS_MINI),
    Name("MindSpeed RL", "rl_config.n_samples_per_prompt", "rollout.group_size"),
    Name("MindSpeed RL", "rl_config.max_prompt_length", "data.max_prompt_tokens"),
    Name("MindSpeed RL", "rl_config.rollout_max_tokens", "rollout.max_response_tokens"),
    Name("MindSpeed RL", "rl_config.adv_estimator", "algorithm.advantage", "group_norm is grpo here"),
    Name("MindSpeed RL", "rl_config.token_level_loss", "algorithm.aggregation", "true is token-mean here"),
    Name("MindSpeed RL", "rl_config.clip_ratio", "algorithm.clip_low", _CLIP_BOTH),
    Name("MindSpeed RL", "rl_config.clip_ratio_low", "algorithm.clip_low"),
    Name("MindSpeed RL", "rl_config.clip_ratio_high", "algorithm.clip_high"),
    Name("MindSpeed RL", "rl_config.init_kl_coef", "algorithm.kl.coef"),
    Name("MindSpeed RL", "rl_config.kl_penalty", "algorithm.kl.estimator", _KL_TYPES),
    Name("MindSpeed RL", "rl_config.filter_groups_enable", "algorithm.keep_groups_without_signal", _FILTER),
    Name("MindSpeed RL", "rl_config.verifier_function", "reward.function", "one function here"),
    Name("MindSpeed RL", "rl_config.verifier_parallel", "reward.num_workers"),
    Name("MindSpeed RL", "rl_config.verifier_timeout", "reward.timeout_s"),
    Name("MindSpeed RL", "rl_config.use_tensorboard", "observe.trackers", "tensorboard is an entry of this list"),
    Name("MindSpeed RL", "rl_config.use_integrated_worker", "placement.layout", "true is fused here, false split"),
    Name("MindSpeed RL", "generate_config.trust_remote_code", "model.trust_remote_code"),
    Name("MindSpeed RL", "generate_config.dtype", "rollout.dtype", _SPELLING),
    Name("MindSpeed RL", "generate_config.max_num_seqs", "rollout.max_running"),
    Name("MindSpeed RL", "generate_config.sampling_config.max_tokens", "rollout.max_response_tokens"),
    Name("MindSpeed RL", "generate_config.sampling_config.temperature", "rollout.temperature"),
    Name("MindSpeed RL", "generate_config.sampling_config.top_p", "rollout.top_p"),
    Name("MindSpeed RL", "generate_config.sampling_config.top_k", "rollout.top_k", _TOP_K),
    Name("MindSpeed RL", "generate_config.sampling_config.min_p", "rollout.min_p"),
)


def named(path: str) -> list[Name]:
    """The entries that a path written by a user may mean: equal, or one ends with the other (`rollout.n`, `x.beta`).

    Those of the longest overlap only, so that `rollout.n` does not also stand for every other name that ends in n.
    """
    found: list[tuple[int, Name]] = []
    for entry in VOCABULARY:
        shorter, longer = sorted((path, entry.name), key=len)
        if longer == shorter or longer.endswith(f".{shorter}"):
            found.append((len(shorter), entry))
    best = max((length for length, _ in found), default=0)
    return [entry for length, entry in found if length == best]


def page() -> str:
    """docs/names.md: for each system, its names beside ours."""
    lines = [
        "# What other systems call it",
        "",
        "A name of another system in a recipe is refused, and the error names our key from this table. `make names`",
        "writes this page from `src/tranship/config/vocabulary.py`. The names were looked up in verl 0.9, TRL 1.16 and",
        "transformers 5 (a few are from earlier releases), the PPO command of OpenRLHF, and the configuration classes",
        "and recipes of MindSpeed RL (both as of 2025).",
        "",
        "Units differ in one place above all: `train.batch_size` counts samples, which is prompts ×",
        "`rollout.group_size`.",
    ]
    for system in dict.fromkeys(entry.system for entry in VOCABULARY):
        lines += ["", f"## {system}", "", "| there | here | difference |", "|---|---|---|"]
        lines += [
            f"| `{entry.name}` | `{entry.key}` | {entry.note} |" for entry in VOCABULARY if entry.system == system
        ]
    return "\n".join(lines) + "\n"
