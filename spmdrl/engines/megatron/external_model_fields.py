"""Says what each field of Megatron's TransformerConfig means for a host's model.

Every field of megatron-core 0.16.1 stands in one of these sets, which a test compares with the
dataclasses themselves. A field that a later version adds is refused unless it has its default.
"""

from __future__ import annotations

import dataclasses
from typing import Any

# compared with what the Hugging Face config means: they change what is computed, or the weights
SAME = frozenset({
    "ffn_hidden_size", "add_qkv_bias", "qk_layernorm", "rotary_interleaved",
    "layernorm_zero_centered_gamma", "num_moe_experts", "window_size", "multi_latent_attention",
    "activation_func_clamp_value", "glu_linear_offset", "softmax_type", "qk_l2_norm",
    "attention_output_gate", "apply_residual_connection_post_layernorm",
    "experimental_attention_variant", "linear_attention_freq", "heterogeneous_block_specs",
    "is_hybrid_model", "mrope_section", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
})  # fmt: skip
SAME_LATENT = frozenset({
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    "mscale_all_dim",
})  # fmt: skip
SAME_EXPERTS = frozenset({
    "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_router_score_function",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_enable_expert_bias", "moe_expert_capacity_factor", "moe_token_dropping",
    "moe_router_force_load_balancing", "moe_router_topk_limited_devices", "moe_shared_expert_gate",
    "moe_latent_size", "moe_apply_probs_on_input",
})  # fmt: skip
# compared too, by rules of their own (external_model.py)
COMPARED = frozenset({
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "layernorm_epsilon", "normalization", "add_bias_linear", "gated_linear_unit",
    "activation_func", "softmax_scale", "no_rope_freq", "moe_layer_freq",
    "moe_shared_expert_intermediate_size", "moe_router_load_balancing_type", "params_dtype",
    "window_attn_skip_freq",
})  # fmt: skip

PRECISION = "build the model in bfloat16 or float32, which is what the rollout engine is given"
GRAPHS = "a CUDA graph replays one shape, and the sequences of a step have different lengths"
SCHEDULE = "it needs a schedule and a forward_step of pretrain_gpt.py's own; turn it off"
# field: the value that is accepted, and what to do about another
REFUSED: dict[str, tuple[Any, str]] = {
    "fp8": (None, PRECISION), "fp8_param": (False, PRECISION), "fp4": (None, PRECISION),
    "fp4_param": (False, PRECISION), "quant_recipe": (None, PRECISION),
    "use_kitchen": (False, PRECISION), "use_kitchen_attention": (False, PRECISION),
    "fp8_dot_product_attention": (False, PRECISION),
    "fp8_multi_head_attention": (False, PRECISION),
    "fp16": (False, "its loss scale skips steps; use bfloat16 or float32"),
    "cuda_graph_impl": ("none", GRAPHS + ": --cuda-graph-impl none"),
    "enable_cuda_graph": (False, GRAPHS + ": leave --enable-cuda-graph out"),
    "external_cuda_graph": (False, GRAPHS + ": leave --external-cuda-graph out"),
    "mtp_num_layers": (None, "RL does not train multi-token prediction heads; build the model "
                             "without them"),
    "mtp_standalone": (False, "RL does not train multi-token prediction heads"),
    "qk_clip": (False, "the host's train_step calls clip_qk() after the optimizer, and the step "
                       "that replaces it does not"),
    "init_model_with_meta_device": (False, "it goes with Megatron-FSDP; use Megatron's "
                                           "DistributedDataParallel"),
    "flash_decode": (False, "it is for inference"),
    "use_inference_optimized_layers": (False, "these layers are for inference"),
    "moe_enable_routing_replay": (False, "recorded routes of other micro-batches do not fit"),
    "moe_router_padding_for_quantization": (False, PRECISION),
    "moe_router_padding_for_fp8": (False, PRECISION),
    "hybrid_context_parallel": (False, "it needs the host's own data iterator; use "
                                       "context_parallel_size"),
    "overlap_moe_expert_parallel_comm": (False, SCHEDULE),
    "delay_wgrad_compute": (False, SCHEDULE),
    "defer_embedding_wgrad_compute": (False, SCHEDULE),
    "num_microbatches_with_partial_activation_checkpoints": (None, SCHEDULE),
}  # fmt: skip

# these change numbers, if they do, by rounding, or only with one of the above; or they are names
# of kernels. What they really do is measured: the log-probabilities of engine and host agree
MEASURED = frozenset({
    "attention_backend", "fp32_residual_connection", "apply_query_key_layer_scaling",
    "attention_softmax_in_fp32", "disable_bf16_reduced_precision_matmul",
    "bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm",
    "memory_efficient_layer_norm", "bias_dropout_fusion", "apply_rope_fusion",
    "use_fused_weighted_squared_relu", "fused_single_qkv_rope",
    "moe_router_dtype", "moe_router_fusion", "moe_permute_fusion", "moe_grouped_gemm",
    "moe_use_legacy_grouped_gemm", "moe_token_dispatcher_type", "moe_enable_deepep",
    "moe_flex_dispatcher_backend", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy",
    "moe_shared_expert_overlap", "transformer_impl", "use_te_activation_func",
    "batch_invariant_mode", "enable_autocast", "autocast_dtype", "bf16", "rope_type",
    "rotary_base", "rotary_percent", "rotary_scaling_factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "mscale", "symmetric_ar_type", "deterministic_mode",
    "cp_comm_type", "test_mode", "tp_comm_overlap", "inference_fuse_tp_communication",
})  # fmt: skip

# without effect on a pass of ours: initialisation, memory, transfers, logs, other model families,
# inference, options of what is refused above, and what is off during our passes (Parts.configured)
WITHOUT_EFFECT = frozenset({
    "mtp_loss_scaling_factor", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "hidden_dropout", "attention_dropout", "activation_func_fp8_input_store", "qk_clip_alpha",
    "qk_clip_threshold", "log_max_attention_logit", "calculate_per_token_loss",
    "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_loss_coeff",
    "dsa_indexer_use_sparse_loss", "init_method", "output_layer_init_method",
    "init_method_std", "embedding_init_method",
    "embedding_init_method_std", "recompute_granularity", "recompute_method",
    "recompute_num_layers", "distribute_saved_activations", "recompute_modules", "fp8_recipe",
    "fp8_quantizer_factory", "fp8_margin", "fp8_interval", "fp8_amax_history_len",
    "fp8_amax_compute_algo", "fp8_wgrad", "tp_only_amax_red", "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "kitchen_attention_backend",
    "fp4_recipe", "fp4_quantizer_factory", "moe_router_bias_update_rate", "moe_aux_loss_coeff",
    "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_per_layer_logging", "moe_layer_recompute",
    "moe_deepep_num_sms", "moe_hybridep_num_sms", "cuda_graph_use_single_mempool",
    "cuda_graph_retain_backward_graph", "cuda_graph_warmup_steps", "cuda_graph_scope",
    "clone_scatter_output_in_embedding", "disable_parameter_transpose_cache",
    "barrier_with_L1_time", "config_logger_dir", "use_te_rng_tracker", "inference_rng_tracker",
    "inference_sampling_seed", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups",
    "mamba_num_heads", "use_mamba_mem_eff_path", "mlp_chunks_for_prefill",
    "hetereogenous_dist_checkpoint", "fine_grained_activation_offloading", "offload_modules",
    "min_offloaded_tensor_size", "cache_mla_latents", "tensor_model_parallel_size",
    "pipeline_model_parallel_comm_backend", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "sequence_parallel", "context_parallel_size",
    "hierarchical_context_parallel_sizes", "max_seqlen_per_dp_cp_rank",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "moe_extended_tp",
    "perform_initialization", "use_cpu_initialization", "timers", "finalize_model_grads_func",
    "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func",
    "gradient_accumulation_fusion", "async_tensor_model_parallel_allreduce",
    "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs",
    "tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag", "tp_comm_split_rs",
    "tp_comm_atomic_rs", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl",
    "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1", "tp_comm_bootstrap_backend",
    "ep_overlap_early_attn_memory_release", "pipeline_dtype", "variable_seq_lengths",
    "overlap_p2p_comm", "batch_p2p_comm", "batch_p2p_sync", "use_ring_exchange_p2p",
    "deallocate_pipeline_outputs", "wgrad_deferral_limit", "overlap_p2p_comm_warmup_flush",
    "microbatch_group_size_per_vp_stage", "cpu_offloading", "cpu_offloading_num_layers",
    "_cpu_offloading_context", "cpu_offloading_activations", "cpu_offloading_weights",
    "cpu_offloading_double_buffering",
})  # fmt: skip


def known_fields() -> list[str]:
    """All names of the sets above; one that stands in two of them comes twice."""
    groups = (SAME, SAME_LATENT, SAME_EXPERTS, COMPARED, REFUSED, MEASURED, WITHOUT_EFFECT)
    return [name for group in groups for name in group]


def refused_fields(config: Any) -> list[str]:
    """Returns a sentence for each thing that a host's config asks for and a step of ours does not
    do.
    """
    found = [
        f"{name}={getattr(config, name)!r}: {advice}"
        for name, (accepted, advice) in REFUSED.items()
        if getattr(config, name, accepted) not in (accepted, None)
    ]
    known = set(known_fields())
    for field in dataclasses.fields(config):
        if field.name in known or field.default is dataclasses.MISSING:
            continue
        if getattr(config, field.name) != field.default:
            found.append(
                f"{field.name}={getattr(config, field.name)!r}: spmdrl knows megatron-core 0.16.1, "
                "which has no such field; leave it at its default"
            )
    return found
