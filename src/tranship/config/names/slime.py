"""slime's command line (slime/utils/arguments.py, 2026) with _ for -, and the options of Megatron that it uses."""

from __future__ import annotations

from tranship.config.names import name as note
from tranship.config.names.name import Name

_ESTIMATORS = (
    "reinforce_plus_plus is reinforce_pp here, reinforce_plus_plus_baseline reinforce_pp_baseline; grpo, gspo, cispo "
    "and ppo are the same"
)
_PER_TOKEN = "true is token-mean here, false seq-mean-token-mean"
_FILTER = "here it is always groups whose rewards are all equal; they are replaced one by one"
_USE_ROLLOUT = "true is none here: the ratio is taken against the sampler's log-probs"

_NAMES: tuple[tuple[str, str, str], ...] = (
    ("hf_checkpoint", "model.path", ""),
    ("ref_load", "model.path", "the reference is the model before training here"),
    ("prompt_data", "data.train.source", ""),
    ("eval_prompt_data", "data.val.source", "pairs of name and path there; a mixture here"),
    ("apply_chat_template_kwargs", "data.template_args", ""),
    ("rollout_shuffle", "data.shuffle", "off there, on here"),
    ("rollout_max_prompt_len", "data.max_prompt_tokens", "longer ones are left out there: data.too_long=drop here"),
    ("rollout_max_response_len", "rollout.max_response_tokens", ""),
    ("rollout_temperature", "rollout.temperature", ""),
    ("rollout_top_p", "rollout.top_p", ""),
    ("rollout_top_k", "rollout.top_k", note.TOP_K),
    ("rollout_stop_token_ids", "rollout.stop_token_ids", ""),
    ("n_samples_per_prompt", "rollout.group_size", ""),
    ("n_samples_per_eval_prompt", "validation.samples_per_prompt", ""),
    ("custom_generate_function_path", "env.name", "an environment answers the model here; it does not sample"),
    ("custom_rm_path", "reward.function", "file.py:function here, with verl's signature"),
    ("rm_type", "reward.function", "the built-in ones have other names here"),
    ("rm_url", "reward.function", "http://... as the function here"),
    ("rollout_batch_size", "train.batch_size", note.PROMPTS),
    ("num_steps_per_rollout", "train.minibatches", ""),
    ("global_batch_size", "train.minibatches", note.SAMPLES_MINI),
    ("micro_batch_size", "train.microbatch_tokens", note.ROWS),
    ("max_tokens_per_gpu", "train.microbatch_tokens", ""),
    ("num_rollout", "train.steps", ""),
    ("num_epoch", "train.steps", note.EPOCHS),
    ("advantage_estimator", "algorithm.name", _ESTIMATORS),
    ("loss_type", "algorithm.name", "sft_loss is sft here"),
    ("pg_loss_type", "algorithm.loss", "ppo is clip here; reinforce is the same"),
    ("custom_loss_function_path", "algorithm.loss", "file.py:function here"),
    ("custom_advantage_function_path", "algorithm.advantage", "file.py:function here"),
    ("normalize_advantages", "algorithm.whiten_advantages", ""),
    ("disable_grpo_std_normalization", "algorithm.advantage_args", "scale_by_std: false here"),
    ("calculate_per_token_loss", "algorithm.aggregation", _PER_TOKEN),
    ("eps_clip", "algorithm.clip_low", note.CLIP_BOTH),
    ("eps_clip_high", "algorithm.clip_high", ""),
    ("eps_clip_c", "algorithm.dual_clip", ""),
    ("kl_coef", "algorithm.kl.coef", note.KL_REWARD),
    ("use_kl_loss", "algorithm.kl.where", note.KL_WHERE),
    ("kl_loss_coef", "algorithm.kl.coef", ""),
    ("kl_loss_type", "algorithm.kl.estimator", "low_var_kl is k3 here"),
    ("entropy_coef", "algorithm.entropy_coef", ""),
    ("use_tis", "algorithm.correction.name", note.TIS),
    ("tis_clip", "algorithm.correction.args", "the entry cap of truncated_token"),
    ("custom_tis_function_path", "algorithm.correction.name", "file.py:function here"),
    ("use_rollout_logprobs", "algorithm.correction.name", _USE_ROLLOUT),
    ("dynamic_sampling_filter_path", "algorithm.dynamic_sampling", _FILTER),
    ("value_clip", "algorithm.critic.value_clip", ""),
    ("gamma", "algorithm.critic.gamma", ""),
    ("lambd", "algorithm.critic.lam", note.LAM),
    ("num_critic_only_steps", "algorithm.critic.warmup_steps", ""),
    ("lr", "train.optimizer.learning_rate", ""),
    ("lr_decay_style", "train.optimizer.schedule", ""),
    ("weight_decay", "train.optimizer.weight_decay", ""),
    ("adam_beta1", "train.optimizer.betas", note.BETAS),
    ("adam_beta2", "train.optimizer.betas", note.BETAS),
    ("clip_grad", "train.optimizer.max_grad_norm", ""),
    ("recompute_granularity", "train.activation_checkpointing", "full is true"),
    ("colocate", "placement.layout", "true is fused here, false split"),
    ("save_interval", "checkpoint.every_steps", ""),
    ("eval_interval", "validation.every_steps", ""),
    ("skip_eval_before_train", "validation.before_training", "the other way round"),
    ("save", "run.dir", ""),
    ("load", "run.resume", "auto goes on in run.dir here"),
    ("use_tensorboard", "observe.trackers", note.TENSORBOARD),
    ("use_wandb", "observe.trackers", note.WANDB),
    ("wandb_project", "observe.project", ""),
    ("rollout_seed", "run.seed", "one seed for everything here"),
    ("seed", "run.seed", "one seed for everything here"),
)

SLIME = tuple(Name("slime", *row) for row in _NAMES)
