"""A run is a value: frozen dataclasses, functions as field values.

A config file is a Python file that defines `config`, a `PpoConfig` or an `SftConfig`. Nothing here
imports torch, so that a wrong key costs a fraction of a second, and reward workers stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RewardFn = Callable[..., Any]
Shape = dict[str, int]


class ConfigError(ValueError):
    """The user's input is wrong: says where, what was given and what to do. Exit code 2."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts in verl's schema, Parquet or JSONL."""

    train: str | tuple[str, ...]
    eval: str | tuple[str, ...] | None = None
    prompts_per_step: int = 64
    max_prompt_tokens: int = 1024
    overlong_prompts: Literal["filter", "truncate", "error"] = "filter"  # truncate keeps the end
    shuffle: bool = True
    max_eval_prompts: int | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardConfig:
    """How rewards run; which ones is `PpoConfig.reward`."""

    workers: int = 2  # processes per rank for plain functions; async functions share one loop
    timeout_s: float = 30.0  # per sample
    max_invalid_fraction: float = 0.5  # of a step's samples, over all ranks; above: the run stops


@dataclass(frozen=True)
class RolloutConfig:
    """The engine that samples, and how it samples while training."""

    engine: Literal["vllm", "hf"] = "vllm"
    n: int = 8  # samples per prompt
    temperature: float = 1.0
    top_p: float = 1.0  # below 1, like top_k, cuts what is sampled but not the policy trained on
    top_k: int = 0  # 0: off
    min_tokens: int = 0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    tensor_parallel: int = 1
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    max_num_seqs: int = 256  # sequences decoded at once, per engine
    enforce_eager: bool = False  # no CUDA graphs; always so on a CPU
    gpu_memory_utilization: float = 0.5
    kv_cache_mib: int = 512  # on a CPU, per rank
    sleep: bool = True  # give the engine's memory back while training


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule, counted in optimizer steps."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0  # optimizer steps until min_lr_ratio is reached; linear and cosine need it
    min_lr_ratio: float = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """One training role: precision, sharding, memory, optimizer."""

    model: str | None = None  # None: the run's model
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of compute; weights and Adam are float32
    fsdp: int = -1  # ranks that share one copy of the weights; -1: all
    micro_batch_tokens: int = 16384  # per rank and forward pass
    activation_checkpointing: bool = False
    offload_params: bool = False  # to the CPU while the role is idle
    offload_optimizer: bool = False
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True)
class AlgoConfig:
    """The algorithm. Formulas and sources: docs/algorithms.md."""

    advantage: Literal["grpo", "gae"] = "grpo"
    policy_loss: Literal["ppo"] = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    gamma: float = 1.0
    lam: float = 1.0
    value_clip: float = 0.5
    kl_coef: float = 0.0  # above 0: a reference model is loaded
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = 0.0
    epochs: int = 1  # passes over a rollout
    mini_batches: int = 1  # optimizer steps per pass
    critic_warmup_steps: int = 0  # steps in which only the critic learns


@dataclass(frozen=True)
class WeightsConfig:
    """Trainer -> engine."""

    bucket_mib: int = 512  # bound on extra memory while gathering
    check: bool = False  # prove after every sync, bit by bit, that engine and trainer agree


@dataclass(frozen=True)
class CheckpointConfig:
    """Saved after every `every_steps` steps and after the last; 0: never."""

    every_steps: int = 50
    keep: int = 2


@dataclass(frozen=True)
class PpoConfig:
    """A reinforcement-learning run. Required: model, data, reward."""

    model: str
    data: DataConfig
    reward: RewardFn | str | Mapping[str, RewardFn | str]  # one, or one per data_source
    steps: int = 100
    run_dir: str = "runs/ppo"
    seed: int = 0
    resume: str = "never"  # "never" | "auto" | a checkpoint folder
    eval_every: int = 10  # steps; 0: only before and after
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    actor: TrainConfig = field(default_factory=TrainConfig)
    ref: TrainConfig = field(default_factory=TrainConfig)
    critic: TrainConfig | None = None  # required by gae
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tensorboard: bool = True
    log_samples: int = 16  # per step, written to samples/
    stall_timeout_s: float = 1800.0  # a rank that makes no progress for so long ends the run


@dataclass(frozen=True)
class SftDataConfig:
    """Rows with a `messages` chat (the last turn is learnt), or a prompt and a response column."""

    train: str | tuple[str, ...]
    prompt_key: str = "prompt"  # dotted keys reach into structs: "extra_info.question"
    response_key: str = "response"
    batch_size: int = 64
    max_tokens: int = 2048
    shuffle: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning: cross-entropy on the responses."""

    model: str
    data: SftDataConfig
    out: str  # folder for the trained model, in Hugging Face format
    steps: int = 100
    run_dir: str = "runs/sft"
    seed: int = 0
    actor: TrainConfig = field(default_factory=lambda: TrainConfig(optim=OptimConfig(lr=1e-5)))
    tensorboard: bool = True
    stall_timeout_s: float = 1800.0
