"""The PPO command of OpenRLHF as of 2025, and what its DPO command calls the loss's settings."""

from __future__ import annotations

from tranship.config.names import name as note
from tranship.config.names.name import Name

_ESTIMATORS = (
    "gae is ppo here, group_norm grpo, reinforce reinforce_pp, reinforce_baseline reinforce_pp_baseline; rloo and "
    "dr_grpo are the same"
)

_NAMES: tuple[tuple[str, str, str], ...] = (
    ("pretrain", "model.path", ""),
    ("prompt_data", "data.train.source", ""),
    ("prompt_data_probs", "data.train.mixture", "weight of each part of the mixture"),
    ("eval_dataset", "data.val.source", ""),
    ("max_samples", "data.train.limit", ""),
    ("prompt_max_len", "data.max_prompt_tokens", ""),
    ("generate_max_len", "rollout.max_response_tokens", ""),
    ("n_samples_per_prompt", "rollout.group_size", ""),
    ("eval_n_samples_per_prompt", "validation.samples_per_prompt", ""),
    ("temperature", "rollout.temperature", ""),
    ("top_p", "rollout.top_p", ""),
    ("agent_func_path", "env.name", "file.py:Class here"),
    ("remote_rm_url", "reward.function", "http://... or file.py:function here"),
    ("reward_pretrain", "reward.model.path", ""),
    ("overlong_buffer_len", "reward.overlong.cache_tokens", ""),
    ("overlong_penalty_factor", "reward.overlong.factor", ""),
    ("rollout_batch_size", "train.batch_size", note.PROMPTS),
    ("train_batch_size", "train.minibatches", note.SAMPLES_MINI),
    ("max_epochs", "train.minibatches", note.ONE_PASS),
    ("micro_train_batch_size", "train.microbatch_tokens", note.ROWS),
    ("train_max_tokens_per_gpu", "train.microbatch_tokens", ""),
    ("num_episodes", "train.steps", note.EPOCHS),
    ("advantage_estimator", "algorithm.name", _ESTIMATORS),
    ("no_advantage_std_norm", "algorithm.advantage_args", "scale_by_std: false here"),
    ("policy_loss_type", "algorithm.loss", "ppo is clip here; gspo is the same"),
    ("eps_clip", "algorithm.clip_low", note.CLIP_BOTH),
    ("eps_clip_low_high", "algorithm.clip_low", "two values there; here also algorithm.clip_high"),
    ("dual_clip", "algorithm.dual_clip", ""),
    ("init_kl_coef", "algorithm.kl.coef", "0.01 there, 0 here"),
    ("use_kl_loss", "algorithm.kl.where", note.KL_WHERE),
    ("kl_estimator", "algorithm.kl.estimator", ""),
    ("entropy_loss_coef", "algorithm.entropy_coef", ""),
    ("dynamic_filtering", "algorithm.dynamic_sampling", note.REPLACED),
    ("enable_vllm_is_correction", "algorithm.correction.name", note.TIS),
    ("vllm_is_truncated_threshold", "algorithm.correction.args", note.CAP),
    ("critic_pretrain", "algorithm.critic.path", ""),
    ("critic_learning_rate", "algorithm.critic.optimizer.learning_rate", ""),
    ("value_clip", "algorithm.critic.value_clip", note.VALUE_CLIP),
    ("gamma", "algorithm.critic.gamma", ""),
    ("lambd", "algorithm.critic.lam", note.LAM),
    ("freezing_actor_steps", "algorithm.critic.warmup_steps", note.NO_CRITIC_ONLY),
    ("beta", "algorithm.loss_args", "the entry beta of dpo"),
    ("ipo", "algorithm.loss", "true is ipo here, false dpo"),
    ("label_smoothing", "algorithm.loss_args", "the entry label_smoothing of dpo"),
    ("actor_learning_rate", "train.optimizer.learning_rate", ""),
    ("lr_scheduler", "train.optimizer.schedule", ""),
    ("lr_warmup_ratio", "train.optimizer.warmup_steps", note.RATIO),
    ("adam_betas", "train.optimizer.betas", ""),
    ("l2", "train.optimizer.weight_decay", ""),
    ("max_norm", "train.optimizer.max_grad_norm", ""),
    ("bf16", "train.precision", note.BF16),
    ("gradient_checkpointing", "train.activation_checkpointing", ""),
    ("colocate_all_models", "placement.layout", "true is fused here"),
    ("vllm_num_engines", "placement.num_samplers", ""),
    ("vllm_tensor_parallel_size", "rollout.tensor_parallel", ""),
    ("enforce_eager", "rollout.cuda_graphs", "the opposite; of the native engine here"),
    ("async_queue_size", "dock.staleness", "a bound on batches in the queue there"),
    ("save_steps", "checkpoint.every_steps", note.NEVER),
    ("max_ckpt_num", "checkpoint.keep_last", ""),
    ("eval_steps", "validation.every_steps", note.NEVER),
    ("load_checkpoint", "run.resume", note.RESUME),
    ("save_path", "run.dir", ""),
    ("use_tensorboard", "observe.trackers", note.TENSORBOARD),
    ("use_wandb", "observe.trackers", note.WANDB),
    ("wandb_project", "observe.project", ""),
    ("full_determinism", "run.deterministic", ""),
    ("seed", "run.seed", ""),
)

OPENRLHF = tuple(Name("OpenRLHF", *row) for row in _NAMES)
