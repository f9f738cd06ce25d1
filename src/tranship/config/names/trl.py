"""TRL 1.16 with transformers 5 (GRPO, DPO, SFT, and PPO where it differs), and a few names of earlier releases."""

from __future__ import annotations

from tranship.config.names import name as note
from tranship.config.names.name import Name

_LOSS_TYPES = (
    "dapo is token-mean here, grpo seq-mean-token-mean; dr_grpo and cispo are algorithm.name, and of DPO sigmoid and "
    "ipo are algorithm.loss dpo and ipo"
)
_BETA = "of DPO: algorithm.loss_args, its entry beta"
_IS_MODES = "token_truncate is truncated_token here, sequence_truncate truncated_sequence; the masks are bands"
_TOO_LONG = "longer rows are cut there, never here"

_NAMES: tuple[tuple[str, str, str], ...] = (
    ("model_name_or_path", "model.path", ""),
    ("trust_remote_code", "model.trust_remote_code", ""),
    ("dataset_name", "data.train.source", "hub:name here"),
    ("dataset_config", "data.train.args", "the entry config of hub:name"),
    ("dataset_train_split", "data.train.args", "the entry split of hub:name"),
    ("shuffle_dataset", "data.shuffle", ""),
    ("chat_template_kwargs", "data.template_args", ""),
    ("max_prompt_length", "data.max_prompt_tokens", "longer prompts were cut there, never here"),
    ("max_length", "data.max_tokens", _TOO_LONG),
    ("max_completion_length", "rollout.max_response_tokens", ""),
    ("num_generations", "rollout.group_size", ""),
    ("num_generations_eval", "validation.samples_per_prompt", ""),
    ("temperature", "rollout.temperature", ""),
    ("top_p", "rollout.top_p", ""),
    ("top_k", "rollout.top_k", ""),
    ("min_p", "rollout.min_p", ""),
    ("use_vllm", "rollout.engine", ""),
    ("vllm_mode", "placement.layout", "colocate is fused here, server is split"),
    ("vllm_tensor_parallel_size", "rollout.tensor_parallel", ""),
    ("reward_funcs", "reward.function", "trl:file.py:function here; further ones are reward.terms"),
    ("reward_weights", "reward.terms", "reward.weight, and weight of each further term"),
    ("reward_model_path", "reward.model.path", ""),
    ("mask_truncated_completions", "reward.mask_truncated", ""),
    ("max_tool_calling_iterations", "env.max_turns", "the model's turns are counted here, its answer too"),
    ("scale_rewards", "algorithm.advantage_args", "its entry scale_by_std, true (group) or false (none)"),
    ("loss_type", "algorithm.aggregation", _LOSS_TYPES),
    ("importance_sampling_level", "algorithm.loss", "token is clip here, sequence gspo"),
    ("epsilon", "algorithm.clip_low", note.CLIP_BOTH),
    ("epsilon_high", "algorithm.clip_high", ""),
    ("delta", "algorithm.dual_clip", ""),
    ("beta", "algorithm.kl.coef", _BETA),
    ("label_smoothing", "algorithm.loss_args", "the entry label_smoothing of dpo"),
    ("vllm_importance_sampling_correction", "algorithm.correction.name", "false is none here, which is the default"),
    ("vllm_importance_sampling_mode", "algorithm.correction.name", _IS_MODES),
    ("vllm_importance_sampling_cap", "algorithm.correction.args", "the entry cap, of the bands high"),
    ("num_iterations", "train.minibatches", note.ONE_PASS),
    ("num_ppo_epochs", "train.minibatches", note.ONE_PASS),
    ("cliprange", "algorithm.clip_low", note.CLIP_BOTH),
    ("cliprange_value", "algorithm.critic.value_clip", ""),
    ("gamma", "algorithm.critic.gamma", ""),
    ("lam", "algorithm.critic.lam", ""),
    ("kl_coef", "algorithm.kl.coef", note.KL_REWARD),
    ("kl_estimator", "algorithm.kl.estimator", ""),
    ("learning_rate", "train.optimizer.learning_rate", ""),
    ("lr_scheduler_type", "train.optimizer.schedule", ""),
    ("warmup_steps", "train.optimizer.warmup_steps", ""),
    ("warmup_ratio", "train.optimizer.warmup_steps", note.RATIO),
    ("adam_beta1", "train.optimizer.betas", note.BETAS),
    ("adam_beta2", "train.optimizer.betas", note.BETAS),
    ("adam_epsilon", "train.optimizer.eps", ""),
    ("weight_decay", "train.optimizer.weight_decay", ""),
    ("max_grad_norm", "train.optimizer.max_grad_norm", "0 means no clipping there, null here"),
    ("max_steps", "train.steps", "counts optimizer steps; ours counts batches"),
    ("num_train_epochs", "train.steps", note.EPOCHS),
    ("generation_batch_size", "train.batch_size", "counts samples, as ours does"),
    ("steps_per_generation", "train.minibatches", "counts microbatches; ours counts optimizer steps"),
    ("per_device_train_batch_size", "train.microbatch_tokens", note.ROWS),
    ("gradient_accumulation_steps", "train.microbatch_tokens", "follows from the tokens here"),
    ("bf16", "train.precision", note.BF16),
    ("gradient_checkpointing", "train.activation_checkpointing", ""),
    ("save_steps", "checkpoint.every_steps", ""),
    ("save_total_limit", "checkpoint.keep_last", ""),
    ("load_best_model_at_end", "checkpoint.best_metric", "the best model is kept beside the last one here"),
    ("metric_for_best_model", "checkpoint.best_metric", ""),
    ("greater_is_better", "checkpoint.best_mode", "true is max here, false min"),
    ("eval_steps", "validation.every_steps", ""),
    ("eval_on_start", "validation.before_training", ""),
    ("report_to", "observe.trackers", ""),
    ("project", "observe.project", ""),
    ("log_completions", "observe.samples_per_step", "samples.jsonl in run.dir here, all by default"),
    ("output_dir", "run.dir", ""),
    ("resume_from_checkpoint", "run.resume", note.RESUME),
    ("full_determinism", "run.deterministic", ""),
    ("seed", "run.seed", ""),
)

TRL = tuple(Name("TRL", *row) for row in _NAMES)
