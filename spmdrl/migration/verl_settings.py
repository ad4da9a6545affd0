"""Tables of verl's settings: what each is called here, and which need nothing or something else.

The names are those of verl 0.7 to 0.9. verl.py, verl_algorithm.py
and verl_roles.py read these tables and translate the rest.
"""

from __future__ import annotations

import re

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
DEFAULTS = {  # of verl, where ours are others, or where the translation needs a number
    "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
    f"{ACTOR}.ppo_mini_batch_size": 256, f"{ACTOR}.optim.lr": 1e-6, "critic.optim.lr": 1e-5,
    f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.n": 1, f"{ROLLOUT}.tensor_model_parallel_size": 2,
    "algorithm.adv_estimator": "gae", "trainer.total_epochs": 30, "trainer.save_freq": -1,
    "trainer.test_freq": -1, "data.val_max_samples": -1, f"{ROLLOUT}.expert_parallel_size": 1,
}  # fmt: skip
COUNTED = (  # ends of further settings that the translation counts with
    ".lr_warmup_steps", ".lr_warmup_steps_ratio", ".lr_decay_steps", ".total_training_steps",
    ".top_k", ".temperature", ".top_p", ".repetition_penalty", ".ppo_epochs", ".lora_rank",
    ".lora.rank", ".ppo_micro_batch_size_per_gpu", ".ppo_max_token_len_per_gpu", ".lr",
    ".weight_decay", ".clip_grad", ".min_lr_ratio", ".clip_ratio", ".ppo_mini_batch_size",
)  # fmt: skip
NAMED = (".adv_estimator", ".loss_agg_mode", ".loss_mode")  # ends of settings that are names
# verl's setting -> our field, with the same meaning and value
SAME = {
    "data.train_batch_size": "data.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_tokens",
    "data.prompt_key": "data.prompt_key",
    "data.video_key": "data.video_key",
    "data.shuffle": "data.shuffle",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.model.trust_remote_code": "trust_remote_code",
    "data.trust_remote_code": "trust_remote_code",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "actor.activation_checkpointing",
    "actor_rollout_ref.model.enable_activation_offload": "actor.activation_offload",
    f"{ACTOR}.entropy_coeff": "algo.entropy_coef",
    f"{ACTOR}.ppo_epochs": "algo.epochs",
    f"{ACTOR}.loss_scale_factor": "algo.norm_length",
    f"{ACTOR}.freeze_vision_tower": "actor.freeze_vision",
    f"{ACTOR}.grad_clip": "actor.optim.clip_norm",
    f"{ROLLOUT}.n": "rollout.n",
    f"{ROLLOUT}.temperature": "rollout.temperature",
    f"{ROLLOUT}.top_p": "rollout.top_p",
    f"{ROLLOUT}.repetition_penalty": "rollout.repetition_penalty",
    f"{ROLLOUT}.dtype": "rollout.dtype",
    f"{ROLLOUT}.ignore_eos": "rollout.ignore_eos",
    f"{ROLLOUT}.enforce_eager": "rollout.enforce_eager",
    f"{ROLLOUT}.free_cache_engine": "rollout.sleep",
    f"{ROLLOUT}.max_num_seqs": "rollout.max_num_seqs",
    f"{ROLLOUT}.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    f"{ROLLOUT}.tensor_model_parallel_size": "rollout.tensor_parallel",
    f"{ROLLOUT}.val_kwargs.n": "eval_samples",
    f"{ROLLOUT}.val_kwargs.top_p": "eval_top_p",
    f"{ROLLOUT}.multi_turn.max_assistant_turns": "multi_turn.max_turns",
    f"{ROLLOUT}.multi_turn.max_parallel_calls": "multi_turn.max_calls",
    f"{ROLLOUT}.multi_turn.format": "multi_turn.parser",
    f"{ROLLOUT}.quantization": "rollout.quantization",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": "weights.bucket_mib",
    "data.seed": "seed",
    "critic.cliprange_value": "algo.value_clip",
    "critic.grad_clip": "critic.optim.clip_norm",
    "critic.model.enable_activation_offload": "critic.activation_offload",
    "trainer.critic_warmup": "algo.critic_warmup_steps",
    "trainer.default_local_dir": "run_dir",
    "trainer.log_val_generations": "log_samples",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "algorithm.pf_ppo.reweight_method": "algo.sample_filter",
    "algorithm.pf_ppo.weight_pow": "algo.filter_power",
    "reward_model.model.path": "reward_model.model",
    "reward.num_workers": "rewards.workers",
    "reward_model.num_workers": "rewards.workers",
}  # fmt: skip
MEGATRON = {  # below `megatron` of a role
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "sequence_parallel": "sequence_parallel",
    "override_transformer_config.num_layers_in_first_pipeline_stage":
        "num_layers_in_first_pipeline_stage",
    "override_transformer_config.num_layers_in_last_pipeline_stage":
        "num_layers_in_last_pipeline_stage",
    "override_transformer_config.moe_grouped_gemm": "moe_grouped_gemm",
    "override_ddp_config.overlap_grad_reduce": "overlap_grad_reduce",
    "override_ddp_config.overlap_param_gather": "overlap_param_gather",
    "override_ddp_config.bucket_size": "ddp_bucket_size",
    "param_offload": "offload_params",
    "optimizer_offload": "offload_optimizer",
    "dtype": "dtype",
}  # fmt: skip
FSDP = {
    "param_offload": "offload_params", "optimizer_offload": "offload_optimizer",
    "offload_policy": "offload_policy", "reshard_after_forward": "reshard_after_forward",
    "fsdp_size": "fsdp", "ulysses_sequence_parallel_size": "ulysses", "dtype": "dtype",
}  # fmt: skip
TRAINED = {  # what a reference has not
    "offload_optimizer", "reshard_after_forward", "overlap_grad_reduce", "overlap_param_gather",
    "ddp_bucket_size",
}  # fmt: skip
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "bfloat16": "bfloat16", "float32": "float32"}
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "_adamw": "adamw", "adamw8bit": "adamw8bit",
              "_adamw8bit": "adamw8bit", "muon": "muon", "dist_muon": "muon"}  # fmt: skip
OPTIM = {"lr": "lr", "weight_decay": "weight_decay", "lr_warmup_steps": "warmup_steps",
         "betas": "betas", "clip_grad": "clip_norm", "min_lr_ratio": "min_lr_ratio"}  # fmt: skip
ALWAYS = {  # settings, by the beginning of their names, that need nothing here, and why
    "actor_rollout_ref.model.use_remove_padding": "sequences are always packed",
    "critic.model.use_remove_padding": "sequences are always packed",
    f"{ACTOR}.megatron.grad_offload": "gradients are freed with the update",
    f"{ACTOR}.use_dynamic_bsz": "micro-batches are always filled by tokens",
    f"{ROLLOUT}.log_prob_": "old log-probabilities use actor.micro_batch_tokens",
    "actor_rollout_ref.ref.log_prob_": "the reference fills its own micro_batch_tokens",
    "critic.use_dynamic_bsz": "micro-batches are always filled by tokens",
    f"{ROLLOUT}.enable_chunked_prefill": "vLLM's default",
    f"{ROLLOUT}.enable_prefix_caching": "on",
    f"{ROLLOUT}.load_format": "engines start without weights; the first push fills them",
    f"{ACTOR}.megatron.override_transformer_config.recompute_": "activation_checkpointing",
    f"{ROLLOUT}.data_parallel_size": "engines of rollout.tensor_parallel ranks fill all ranks",
    f"{ROLLOUT}.layered_summon": "weights are always gathered bucket by bucket",
    f"{ROLLOUT}.calculate_log_probs": "the engine's log-probabilities are always kept",
    f"{ROLLOUT}.mode": "the engine runs inside the rank",
    f"{ROLLOUT}.multi_stage_wake_up": "weights wake first, the KV cache after the push",
    f"{ROLLOUT}.multi_turn.enable": "on where there are tools or an environment",
    f"{ROLLOUT}.val_kwargs.do_sample": "follows from eval_temperature",
    f"{ACTOR}.use_prefix_grouper": "actor.shared_prefix is on by itself where it can be",
    f"{ACTOR}.strategy": "FSDP2, or Megatron-core where a megatron setting is given",
    f"{ACTOR}.megatron.use_dist_checkpointing": "checkpoints are torch.distributed's",
    f"{REF}.megatron.use_dist_checkpointing": "weights are read from the model's files",
    f"{REF}.megatron.dist_checkpointing_path": "weights are read from the model's files",
    f"{REF}.strategy": "as the actor's",
    **{f"{role}.{name}": why for role in (ACTOR, REF, "critic", "critic.model") for name, why in {
        "use_torch_compile": "verl compiles its entropy; here the LM head is fused with the loss",
        "fsdp_config.use_torch_compile": "the LM head is fused with the loss",
        "entropy_from_logits_with_chunking": "the LM head is fused with the loss",
        "entropy_checkpointing": "the LM head is fused with the loss",
        "fsdp_config.entropy_": "the LM head is fused with the loss",
        "fsdp_config.model_dtype": "weights are kept in float32; dtype is that of compute",
        "fsdp_config.forward_prefetch": "FSDP2's default",
        "fsdp_config.wrap_policy": "each layer is sharded by itself",
        "fsdp_config.strategy": "FSDP2",
        "megatron.use_mbridge": "names are mapped by spmdrl itself",
        "megatron.vanilla_mbridge": "names are mapped by spmdrl itself",
        "megatron.use_remove_padding": "sequences are always packed",
        "megatron.override_ddp_config.grad_reduce_in_fp32": "gradients are summed in float32",
        "megatron.override_ddp_config.use_distributed_optimizer": "always",
        **{f"megatron.override_transformer_config.{kernel}": "it changes the speed alone"
           for kernel in ("gradient_accumulation_fusion", "moe_permute_fusion", "apply_rope_fusion",
                          "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion",
                          "persist_layer_norm", "deallocate_pipeline_outputs", "use_flash_attn")},
        "megatron.override_transformer_config.moe_router_dtype": "routers compute in float32",
        "fused_kernel_options.": "the LM head is fused with the loss",
    }.items()},
    "actor_rollout_ref.model.fused_kernel_options.": "the LM head is fused with the loss",
    "actor_rollout_ref.hybrid_engine": "roles share all ranks unless placement says otherwise",
    f"{ACTOR}.megatron.seed": "seed",
    f"{ACTOR}.calculate_sum_pi_squared": "it is computed where the estimator wants it",
    f"{ACTOR}.megatron.override_transformer_config.attention_backend":
        "attention takes packed sequences, by flash-attn on GPUs",
    f"{ACTOR}.fsdp_config.use_orig_params": "FSDP2",
    f"{ROLLOUT}.server.": "the engine runs inside the rank",
    f"{ROLLOUT}.sglang_rollout_mode": "the engine runs inside the rank",
    "transfer_queue.": "samples go from rank to rank by collectives",
    f"{ROLLOUT}.disable_log_stats": "the run logs what its engines do",
    f"{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache":
        "images are prepared once, and not by vLLM",
    f"{ROLLOUT}.skip_tokenizer_init": "the engine takes and gives tokens",
    "critic.model.trust_remote_code": "as of actor_rollout_ref.model",
    "actor_rollout_ref.model.use_shm": "each rank reads its own part of the files",
    "actor_rollout_ref.nccl_timeout": "stall_timeout_s",
    "data.return_raw_chat": "chats are always kept",
    "data.val_batch_size": "held-out prompts are asked together",
    "data.filter_overlong_prompts_workers": "ranks share this work",
    "data.dataloader_num_workers": "prompts are prepared once",
    "data.reward_fn_key": "data_source",
    "data.image_key": "images",
    "trainer.balance_batch": "work is always balanced over ranks",
    "trainer.device": "the GPU where there is one",
    "trainer.experiment_name": "in run_dir",
    "trainer.resume_mode": "resume",
    "trainer.use_legacy_worker_impl": "there are no workers",
    "ray_kwargs.": "there is no Ray",
    "reward_model.use_reward_loop": "rewards are scored while others are sampled",
    "reward_model.launch_reward_fn_async": "rewards are scored while others are sampled",
}  # fmt: skip
DISPATCHER = "tokens go to their experts by one all-to-all: docs/experts.md"
NOTES = {  # what to do about settings, by the beginning of their names
    "--config-name": "the settings of that file are left out: translate that file, too",
    "data.gen_batch_size": "algo.dynamic_sampling asks data.prompts_per_step more at a time",
    "data.custom_cls.": "a data set is files or a hub's: write its rows as Parquet or JSONL",
    "data.sampler.": "data.sampler has curricula by difficulty and by success rate, or takes a "
    "function of yours: docs/mixtures.md",
    "data.train_max_samples": "write a file with so many rows",
    f"{ROLLOUT}.engine_kwargs.": "vLLM's are keys of rollout.engine_args",
    **{f"{role}.profiler.": "profile=ProfileConfig(...): docs/output.md"
       for role in (ACTOR, REF, ROLLOUT, "critic")},
    **{f"{role}.megatron.{name}": why for role in (ACTOR, "critic") for name, why in {
        "dist_checkpointing_path": "weights are read from the model's Hugging Face files",
        "use_dist_checkpointing": "weights are read from the model's Hugging Face files",
        "override_transformer_config.moe_token_dispatcher_type": DISPATCHER,
        "override_transformer_config.moe_enable_deepep": DISPATCHER,
        "override_transformer_config.account_for_": "num_layers_in_first_pipeline_stage and "
        "num_layers_in_last_pipeline_stage say how many layers a stage has: docs/megatron.md",
    }.items()},
    **{f"{role}.optim.override_optimizer_config.": "offload_optimizer keeps the optimizer's state "
       "on the host between updates: docs/memory.md" for role in (ACTOR, "critic")},
    **{f"{role}.checkpoint.": "a checkpoint has all that a run goes on from; spmdrl.export "
       "writes a Hugging Face folder of it" for role in (ACTOR, "critic")},
    "actor_rollout_ref.model.override_config.": "write it into the model's config.json",
    "actor_rollout_ref.model.exclude_modules": "actor.lora.target_modules names the layers",
    f"{ROLLOUT}.multi_turn.max_user_turns": "multi_turn.max_turns counts the policy's turns",
    "actor_rollout_ref.model.mtp.": "actor.mtp_loss_scaling_factor, of engine megatron: "
    "docs/megatron_families.md",
    "actor_rollout_ref.model.custom_chat_template": "write it as chat_template.jinja into the "
    "model's folder",
    f"{ACTOR}.fsdp_config.mixed_precision.": "actor.dtype is that of compute; weights and sums of "
    "gradients are float32",
    f"{ROLLOUT}.prometheus.": "trackers=(..., an object of your own): docs/trackers.md",
    f"{ROLLOUT}.over_sample_rate": "rollout.oversample: docs/placement.md",
    f"{ROLLOUT}.trace.": "samples/ in run_dir has them: python -m spmdrl.view",
    "rollout.n": "ranks that only sample: placement={...}, async_steps: docs/placement.md",
    "trainer.n_rollout_gpus_per_node": "ranks that only sample: placement={...}: docs/placement.md",
    "trainer.resume_from_path": "--resume FOLDER, of a checkpoint of spmdrl's",
    "trainer.max_critic_ckpt_to_keep": "checkpoint.keep is of all models",
    "reward_model.sandbox_fusion.": "sandbox=SandboxConfig(...): docs/remote_sandboxes.md",
    "global_profiler.": "profile=ProfileConfig(...): docs/output.md",
    "critic.model.lora": "critic.lora=LoraConfig(...): docs/lora.md",
    "actor_rollout_ref.model.lora.merge": "weights.lora is merge or adapter: docs/lora.md",
    **{f"{role}.optim.min_lr": "optim.min_lr_ratio is min_lr / lr" for role in (ACTOR, "critic")},
    "trainer.val_only": "python -m spmdrl.evaluate",
    "trainer.rollout_data_dir": "samples/ in run_dir has them: log_samples",
    "trainer.validation_data_dir": "samples/ in run_dir has them: log_samples",
}  # fmt: skip
PROGRAM = re.compile(r"[\w./]*(?:verl\.|main_)[\w./]*")  # of verl, as a module or as a file
ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
OTHER_POLICY = "top_p, top_k and the like sample from another policy: corrected"
KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
OVERLONG = re.compile(
    r"(?:reward_model|reward)\.(?:reward_kwargs\.)?overlong_buffer(?:_cfg)?\.(\w+)"
)
BY_DATA_SOURCE = {"openai/gsm8k": "gsm8k", **dict.fromkeys((
    "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_dapo",
    "math", "aime", "aime24", "aime25"), "math"), **dict.fromkeys((
    "codecontests", "apps", "codeforces", "taco"), "code")}  # fmt: skip
