"""A Megatron model as another program builds it, the config of RL steps inside a program, and what
`attach` says where it refuses it.
"""

from collections.abc import Callable
from typing import Any

import torch

from spmdrl.config import (
    ConfigError,
    DataConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)


def host_model(
    model: str, per_token: bool, vocab: int = 0, layer_wise: bool = False, **sizes: int
) -> tuple[list[Any], Any]:
    """As a program builds it: stock layers with dropout, whatever it is trained for.

    layer_wise: its optimizer updates whole parameters on one data rank each, as dist_muon's does.
    """
    import torch.nn.functional as F
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from spmdrl.engines.megatron.hf_mapping import load_pretrained
    from spmdrl.hub.hf_folder import load_hf_config

    ps.destroy_model_parallel()
    ps.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    hf = load_hf_config(model)
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size, kv_channels=hf.head_dim,
        num_attention_heads=hf.num_attention_heads, num_query_groups=hf.num_key_value_heads,
        qk_layernorm=True, normalization="RMSNorm", layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        hidden_dropout=0.1, attention_dropout=0.1, calculate_per_token_loss=per_token,
        pipeline_dtype=torch.float32, gradient_accumulation_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        apply_rope_fusion=False, deallocate_pipeline_outputs=False, **sizes,
    )  # fmt: skip
    chunk = GPTModel(
        config, get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=vocab or hf.vocab_size, max_sequence_length=512,
        pre_process=ps.is_pipeline_first_stage(), post_process=ps.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope", rotary_base=int(hf.rope_parameters["rope_theta"]),
    )  # fmt: skip
    load_pretrained([chunk], model, hf)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=not per_token
    )
    chunks = [DistributedDataParallel(config, settings, chunk)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, weight_decay=0.0, clip_grad=1.0,
            use_distributed_optimizer=not per_token,
        ),
        chunks,
    )  # fmt: skip
    if layer_wise:
        optimizer = layer_wise_optimizer(optimizer)
    return chunks, optimizer


def layer_wise_optimizer(optimizer: Any) -> Any:
    """dist_muon's wrapper around Adam: who does not call its step() lets data ranks diverge."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    return LayerWiseDistributedOptimizer(
        optimizer.chained_optimizers, optimizer.config,
        ProcessGroupCollection.use_mpu_process_groups(),
    )  # fmt: skip


def rl_config(model: str, folder: str | None = None, **changes: Any) -> PpoConfig:
    """A small config with the task that `programs.write_task` wrote into the folder."""
    settings: dict[str, Any] = {
        "model": model, "reward": reward, "run_dir": f"{folder}/run",
        "data": DataConfig(train=f"{folder}/train.jsonl", eval=f"{folder}/eval.jsonl",
                           prompts_per_step=8, max_prompt_tokens=16),
        "rewards": RewardConfig(workers=1), "trackers": (),
        "rollout": RolloutConfig(engine="hf", n=4, max_tokens=8, dtype="float32"),
        "actor": TrainConfig(micro_batch_tokens=64),
    } | changes  # fmt: skip
    return PpoConfig(**settings)


def reward(response: str, ground_truth: str) -> float:
    return float(response.startswith(ground_truth)) + 0.01 * len(response)


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}


def refusal(attach: Callable[..., Any], *args: Any) -> str:
    """What attach says; nothing is left of it."""
    import torch.distributed.distributed_c10d as c10d

    groups = set(c10d._world.pg_map)
    try:
        attach(*args)
    except ConfigError as error:
        assert set(c10d._world.pg_map) == groups
        return str(error)
    return "it was accepted"
