"""Config of how a role is trained: optimizer, adapters, engine and its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule, counted in optimizer steps.

    adamw8bit: both moments in 8 bits. muon: for the matrices of the layers, AdamW for the rest, at
    one lr, that of AdamW. See docs/optimizers.md.
    """

    name: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    muon_momentum: float = 0.95
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0  # share of the run's optimizer steps, in place of warmup_steps
    # optimizer steps until min_lr_ratio is reached; linear and cosine need it. With `epochs` 0 is
    # all of the run's
    decay_steps: int = 0
    min_lr_ratio: float = 0.0


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: a layer computes with W + scale B A, and only A and B are trained.

    scale is alpha / rank. No dropout: old and new logprobs must differ by the update alone.
    """

    rank: int = 16
    alpha: int = 32
    # "all-linear": every linear layer but the head; or the ends of layers' names: ("q_proj",)
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    use_rslora: bool = False  # scale is alpha / sqrt(rank)
    adapter: str | None = None  # folder of a peft adapter to start from, of the same rank and so on
    seed: int = 0  # of A; B starts at 0
    # of fsdp: DoRA, which also learns the length of each row of W + scale B A. docs/lora.md
    use_dora: bool = False
    # of fsdp, of a mixture: the ends of the names of weights in which transformers stacks all
    # experts of a layer, each of which is given its own A and B: ("experts.gate_up_proj",
    # "experts.down_proj")
    target_parameters: tuple[str, ...] = ()
    # of fsdp: W of the layers with an adapter in 4 bits (QLoRA), through bitsandbytes; None: as the
    # role's dtype says
    quantization: Literal["nf4"] | None = None
    # of fsdp, of the actor: several adapters that are trained in one run: data_source -> the name
    # of the adapter that answers its prompts and learns from them; "*": of all other sources.
    # Empty: there is one adapter. docs/lora.md
    by_source: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of several adapters, sorted; () where there is one."""
        return tuple(sorted(set(self.by_source.values())))


@dataclass(frozen=True)
class TrainConfig:
    """One training role: engine, precision, sharding, memory, optimizer."""

    model: str | None = None  # None: the run's model
    engine: Literal["fsdp", "megatron"] = "fsdp"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of compute; main weights, Adam: float32
    fsdp: int = -1  # of fsdp: ranks that share one copy of the weights; -1: all
    # of fsdp: give a layer's gathered weights back after its forward pass; False: keep them until
    # its backward pass, as ZeRO-2 does, which gathers once and not twice
    reshard_after_forward: bool = True
    ulysses: int = 1  # of fsdp: ranks that share the tokens of a micro-batch, out of those of fsdp
    # ranks that share the experts of a layer, out of the data-parallel ones (of fsdp: of those that
    # share a copy of the weights). docs/experts.md
    expert_parallel: int = 1
    # the layout of megatron; what the degrees leave is data parallel
    tensor_parallel: int = 1
    sequence_parallel: bool = False  # splits norms' activations over the tensor-parallel ranks
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1  # model chunks per pipeline rank; above 1: interleaved 1F1B
    # layers of the first and of the last stage, where pipeline_parallel divides them not or badly;
    # None: as many as each of the other stages has
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    context_parallel: int = 1  # ranks that share the tokens of a sequence
    expert_tensor_parallel: int = 1  # ranks that share one expert's matrices
    # of megatron: the experts of a rank are multiplied together; False: one after the other
    moe_grouped_gemm: bool = True
    # of megatron, of the actor: weight of the loss of the model's layers for multi-token
    # prediction, which then learn to predict what the policy says; 0: they stay as they are.
    # docs/megatron_families.md
    mtp_loss_scaling_factor: float = 0.0
    # of megatron: sum the gradients of complete buckets over the data-parallel ranks while the
    # backward pass goes on. docs/megatron_overlap.md
    overlap_grad_reduce: bool = False
    # of megatron, with overlap_grad_reduce: gather updated weights while the next pass begins
    overlap_param_gather: bool = False
    # of megatron, with overlap_grad_reduce: weights in a bucket, at least; None: 40 million, and of
    # more than 40 data-parallel ranks a million for each
    ddp_bucket_size: int | None = None
    micro_batch_tokens: int = 16384  # per rank and forward pass; ranks that share have the sum
    kernels: Literal["spmdrl", "liger", "torch"] = "spmdrl"  # of fsdp: RMSNorm, SwiGLU, RoPE
    attention: Literal["auto", "flash_attn", "torch"] = "auto"  # of fsdp, on GPUs in bfloat16
    compile: bool = False  # of fsdp: torch.compile of each decoder layer
    # of fsdp, in bfloat16: the linear layers of the decoder layers multiply in FP8, with scales of
    # this recipe of torchao; None: in dtype. docs/fp8.md
    fp8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    # of fsdp: tokens with which the sequences of a group begin, their prompt, are computed once in
    # a micro-batch; auto: where the model can. docs/shared_prefix.md
    shared_prefix: bool | Literal["auto"] = "auto"
    # True: keep only the input of every layer; selective: also what costs most to compute again;
    # auto: True on GPUs, False on CPUs and with activation_offload. docs/training.md
    activation_checkpointing: bool | Literal["selective", "auto"] = "auto"
    activation_offload: bool = False  # of fsdp: what is kept for the backward pass, to the CPU
    offload_params: bool = False  # to the CPU while the role is idle
    offload_optimizer: bool = False
    # of fsdp: weights, gradients and optimizer stay on the CPU, also while the role works, and the
    # optimizer steps there; a layer's weights are on the device while it is computed
    offload_policy: bool = False
    ema: float = 0.0  # decay per optimizer step of a moving average of the weights; 0: none
    # of the actor, whose model has experts. R3: its passes send each token to the experts that the
    # rollout engine sent it to (rollout routing replay); None: to those that it chooses itself.
    # docs/experts.md
    router_replay: Literal["R3"] | None = None
    # of fsdp, of a model with experts: weight of the loss by which routers learn to send the tokens
    # of each sequence to all experts alike; 0: there is none. docs/experts.md
    router_aux_loss_coef: float = 0.0
    lora: LoraConfig | None = None  # train adapters only. docs/lora.md
    freeze_vision: bool = False  # of a model that sees images: its tower stays as it is
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True)
class TeacherEndpoint:
    """A teacher of distillation behind vLLM's OpenAI-compatible server. docs/distillation.md"""

    url: str  # of its API: "http://10.0.0.7:8000/v1"
    model: str  # the name under which the server has it
    api_key_env: str | None = None  # the environment variable with the key; None: it wants none
    max_concurrent: int = 16  # requests of a rank at the same time, each about one sequence
    timeout_s: float = 300.0  # of one request
    retries: int = 4  # of a request that failed, each after twice the time


def checkpointing_of(role: TrainConfig, on_gpu: bool) -> bool | Literal["selective"]:
    """Returns what activation_checkpointing means where the role is trained."""
    if role.activation_checkpointing != "auto":
        return role.activation_checkpointing
    return on_gpu and not role.activation_offload
