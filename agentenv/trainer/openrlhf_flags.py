"""The names that OpenRLHF's flags had from 0.8.9 to 0.11.2, beside those of TrainConfig. Nothing else is here.

`tests/trainer/test_launch.py` holds them against what each version's own parser takes.
"""

from __future__ import annotations

VERSIONS = (
    "0.8.9", "0.8.9.post1", "0.8.10", "0.8.11", "0.9.0", "0.9.1", "0.9.1.post1", "0.9.2", "0.9.3", "0.9.4", "0.9.5",
    "0.9.6", "0.9.7", "0.9.8", "0.9.9", "0.9.10", "0.10.0", "0.10.1", "0.10.1.post1", "0.10.1.post2", "0.10.2",
    "0.10.3", "0.10.4", "0.11.0", "0.11.1", "0.11.2",
)  # fmt: skip
"""Releases, oldest first."""
DOTTED_SINCE = "0.10.2"
"""Before it, a flag has the name of TrainConfig's field; from it, the one in DOTTED."""

DOTTED = {
    "agent_func_path": "train.agent_func_path",
    "remote_rm_url": "reward.remote_url",
    "pretrain": "actor.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "prompt_data": "data.prompt_dataset",
    "prompt_split": "data.prompt_split",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "max_samples": "data.max_samples",
    "apply_chat_template": "data.apply_chat_template",
    "num_episodes": "train.num_episodes",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "train_batch_size": "train.batch_size",
    "max_epochs": "train.max_epochs",
    "max_len": "data.max_len",
    "max_new_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size",
    "partial_rollout": "train.partial_rollout_enable",
    "vllm_generate_batch_size": "rollout.vllm_generate_batch_size",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "reward_clip_range": "reward.clip_range",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef",
    "advantage_estimator": "algo.advantage.estimator",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "policy_loss_type": "actor.policy_loss_type",
    "loss_agg_mode": "actor.loss_agg_mode",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "value_clip": "critic.value_clip",
    "freezing_actor_steps": "critic.freezing_steps",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "entropy_loss_coef": "actor.entropy_coef",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "l2": "actor.adam.weight_decay",
    "adam_betas": "actor.adam.betas",
    "max_norm": "actor.max_norm",
    "micro_train_batch_size": "train.micro_batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "packing_samples": "ds.packing_samples",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "param_dtype": "ds.param_dtype",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules",
    "seed": "train.seed",
    "full_determinism": "train.full_determinism_enable",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "enforce_eager": "vllm.enforce_eager",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "eval_steps": "eval.steps",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "save_path": "ckpt.output_dir",
    "save_steps": "ckpt.save_steps",
    "ckpt_path": "ckpt.path",
    "max_ckpt_num": "ckpt.max_num",
    "load_checkpoint": "ckpt.load_enable",
    "logging_steps": "logger.logging_steps",
    "use_wandb": "logger.wandb.key",
    "wandb_org": "logger.wandb.org",
    "wandb_group": "logger.wandb.group",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir",
}
"""TrainConfig's field: the dotted flag that means the same."""

PLACEMENT = {
    "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "colocate_all_models": "train.colocate_all",
}
"""As DOTTED, of the fields that only `agentenv launch` has."""

DEFAULTS: dict[str, object] = {
    "input_key": "input", "prompt_split": "train", "num_episodes": 1, "rollout_batch_size": 1024,
    "n_samples_per_prompt": 1, "train_batch_size": 128, "max_epochs": 1, "max_len": 2048, "temperature": 1.0,
    "top_p": 1.0, "async_queue_size": 1, "dynamic_filtering_reward_range": (0, 1), "reward_clip_range": (-10, 10),
    "overlong_penalty_factor": 1, "advantage_estimator": "gae", "gamma": 1, "lambd": 1, "policy_loss_type": "ppo",
    "loss_agg_mode": "token-mean", "eps_clip": 0.2, "value_clip": 0.5, "freezing_actor_steps": -1,
    "init_kl_coef": 0.01, "kl_estimator": "k1", "actor_learning_rate": 1e-6, "critic_learning_rate": 9e-6,
    "lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": 0.03, "l2": 0.0, "adam_betas": (0.9, 0.95),
    "max_norm": 1.0, "train_max_tokens_per_gpu": 16192, "lora_rank": 0, "lora_alpha": 16, "lora_dropout": 0,
    "seed": 42, "vllm_tensor_parallel_size": 1, "vllm_gpu_memory_utilization": 0.95, "eval_split": "train",
    "eval_steps": -1, "eval_temperature": 0.6, "eval_n_samples_per_prompt": 4, "save_path": "./ckpt",
    "save_steps": -1, "max_ckpt_num": 3, "logging_steps": 1, "actor_num_nodes": 1, "actor_num_gpus_per_node": 8,
}  # fmt: skip
"""What OpenRLHF takes where a flag is left out, where every version takes the same."""

CRITIC_TOO = ("lr_scheduler", "lr_warmup_ratio", "l2", "adam_betas", "max_norm")
"""Flat flags for actor and critic; dotted there is one of each."""

SINCE = {
    "async_queue_size": "0.9.1",
    "stop_properly_penalty_coef": "0.9.2",
    "param_dtype": "0.9.2",
    "partial_rollout": "0.9.7",
    "max_len": "0.9.8",
    "max_new_tokens": "0.9.8",
    "loss_agg_mode": "0.11.2",
}
"""The first version with a flag for a field, where it is not the oldest."""

NO_COUNTERPART = frozenset({
    "actor.adam.eps", "actor.aux_loss_coef", "actor.freeze_visual_encoder", "actor.gradient_checkpointing_reentrant",
    "actor.min_lr_ratio", "actor.muon.lr", "actor.muon.momentum", "actor.muon.nesterov", "actor.muon.no_nesterov",
    "actor.muon.ns_steps", "actor.num_gpus_per_node", "actor.num_nodes", "actor.optim", "actor_init_on_gpu",
    "actor_num_gpus_per_node", "actor_num_nodes", "adam_offload", "algo.kl.horizon", "algo.kl.target",
    "algo.kl.unbiased_gradient", "attn_implementation", "aux_loss_coef", "best_metric_key", "ckpt.best_metric_key",
    "ckpt.disable_ds", "ckpt.max_mem", "ckpt.save_hf", "colocate_actor_ref", "colocate_all_models",
    "colocate_critic_reward", "critic.adam.betas", "critic.adam.eps", "critic.adam.weight_decay",
    "critic.lr_scheduler", "critic.lr_warmup_ratio", "critic.max_norm", "critic.min_lr_ratio", "critic.muon.lr",
    "critic.muon.momentum", "critic.muon.nesterov", "critic.muon.no_nesterov", "critic.muon.ns_steps",
    "critic.num_gpus_per_node", "critic.num_nodes", "critic.optim", "critic.save_value_network",
    "critic_num_gpus_per_node", "critic_num_nodes", "data.dataloader_num_workers", "data.disable_fast_tokenizer",
    "data.image_key", "data.input_template", "data.max_images_per_prompt", "data.prompt_probs",
    "dataloader_num_workers", "deepcompile", "deepspeed_enable_sleep", "disable_ds_ckpt", "disable_fast_tokenizer",
    "ds.adam_offload", "ds.attn_implementation", "ds.deepcompile", "ds.enable_sleep", "ds.experts_implementation",
    "ds.grad_accum_dtype", "ds.load_in_4bit", "ds.overlap_comm", "ds.ring_attn_head_stride", "ds.ring_attn_size",
    "ds.tensor_parallel_size", "ds.use_liger_kernel", "ds.use_universal_ckpt", "ds.value_head_prefix",
    "ds.zero_stage", "ds.zpg", "ds_tensor_parallel_size", "ema_beta", "enable_ema", "flash_attn",
    "freeze_visual_encoder", "grad_accum_dtype", "gradient_checkpointing_use_reentrant", "image_key",
    "input_template", "kl_horizon", "kl_target", "load_in_4bit", "local_rank", "max_ckpt_mem",
    "max_images_per_prompt", "normalize_reward", "overlap_comm", "perf", "prompt_data_probs", "ptx_coef",
    "ref.num_gpus_per_node", "ref.num_nodes", "ref.offload", "ref_num_gpus_per_node", "ref_num_nodes",
    "ref_reward_offload", "reward.model_name_or_path", "reward.normalize_enable", "reward.num_gpus_per_node",
    "reward.num_nodes", "reward.offload", "reward_num_gpus_per_node", "reward_num_nodes", "reward_pretrain",
    "ring_attn_size", "ring_head_stride", "rollout.max_tokens_per_gpu", "rollout_max_tokens_per_gpu", "save_hf_ckpt",
    "save_value_network", "train.colocate_actor_ref", "train.colocate_all", "train.colocate_critic_reward",
    "train.ema_beta", "train.enable_ema", "use_ds_universal_ckpt", "use_liger_kernel", "use_ms", "value_head_prefix",
    "vllm.sync_backend", "vllm.sync_with_ray", "vllm_sync_backend", "vllm_sync_with_ray", "zero_stage", "zpg",
})  # fmt: skip
"""OpenRLHF's other flags, which TrainConfig has no field for."""
