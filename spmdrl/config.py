"""A run is a value: frozen dataclasses, functions as field values.

A config file is a Python file that defines `config`: a `PpoConfig`, an `SftConfig`, a
`PreferenceTrainingConfig` or a `RewardTrainingConfig`. Nothing here imports torch, so that a wrong
key costs a fraction of a second, and reward workers stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

RewardFn = Callable[..., Any]
Environment = Callable[..., Any]  # a function, or a class of which each sample has an object
Change = Literal["data", "tokenizer", "chat_template", "model", "reward", "tools"]


class ConfigError(ValueError):
    """The user's input is wrong: says where, what was given and what to do. Exit code 2."""


class NotGiven(int):
    """A default value, told apart from the same number where somebody has written it."""


class DerivedCount(NotGiven):
    """A number that follows from other fields and the data; config.py of a run leaves it out."""


@dataclass(frozen=True)
class SamplerConfig:
    """Sets which prompts a step asks: mixtures and curricula. As it is here a run walks through the
    data epoch by epoch. docs/mixtures.md"""

    # data_source -> its share of a step's prompts, relative to the others'; 0: none of it. Empty:
    # as many as it has rows
    weights: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0  # shares are weight ** (1 / temperature); above 1 evens them out
    # difficulty: the easiest first, and more of the data with each step; success_rate: rather
    # prompts that are answered rightly at about target_rate
    curriculum: Literal["difficulty", "success_rate"] | None = None
    difficulty_key: str = "extra_info.difficulty"  # a column of numbers, the larger the harder
    pace_start: float = 0.1  # share of the data, its easiest prompts, that the first step may ask
    pace_steps: int = 0  # steps from there until all of it may be asked
    target_rate: float = 0.5
    floor: float = 0.05  # weight of a prompt at the worst rate; at target_rate it is 1 + floor
    # what earlier answers to a prompt count for its rate when it is asked again; 1: as new ones
    rate_decay: float = 0.5
    # a sample succeeds with this reward or a higher one. None: 1, and rates are kept only where
    # another field of this group is set
    success_reward: float | None = None
    # a prompt all of whose answers succeeded so many times in a row is not asked; 0: it is
    drop_solved: int = 0
    return_after: int = 0  # steps after which it is asked again; 0: never
    # a function (state, step, count, rng) that returns the prompts of a step, or a class of which
    # the run has an object, instead of all the above but success_reward and rate_decay
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class DataConfig:
    """Prompts in verl's schema, or that of TRL, OpenRLHF or slime; Parquet or JSONL."""

    # files; or data of a hub: "openai/gsm8k:main:train", "hf://datasets/owner/name/file.parquet",
    # "modelscope:owner/name:config:split". docs/hubs.md
    train: str | tuple[str, ...]
    eval: str | tuple[str, ...] | None = None
    # the column with the prompt, a chat list or a string; dotted keys reach into structs:
    # "extra_info.question". Where a row has none of the default's name, OpenRLHF's are read
    prompt_key: str = "prompt"
    apply_chat_template: bool = False  # to a prompt that is a string: it is one turn of the user's
    # the column with the reference answer; where a row has none of the default's, its column
    # ground_truth, label, answer or solution is read, if it has one of them
    ground_truth_key: str = "reward_model.ground_truth"
    prompts_per_step: int = 64
    max_prompt_tokens: int = 1024
    overlong_prompts: Literal["filter", "truncate", "error"] = "filter"  # truncate keeps the end
    shuffle: bool = True
    max_eval_prompts: int | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    on_bad_row: Literal["error", "skip"] = "error"  # skip: counted and reported
    # names of control tokens in the text of a chat: made ordinary text, refused, or obeyed
    control_tokens: Literal["escape", "error", "keep"] = "escape"
    # images are scaled to have so many pixels; None: what the model's image processor says
    image_min_pixels: int | None = None
    image_max_pixels: int | None = None
    sampler: SamplerConfig = field(default_factory=SamplerConfig)


@dataclass(frozen=True)
class RewardConfig:
    """Sets how rewards run; `PpoConfig.reward` says which ones."""

    workers: int = 2  # processes per rank for plain functions; async ones share another
    timeout_s: float = 30.0  # per sample, from when its turn has come
    max_concurrent: int = 0  # async calls at a time, of all ranks together; 0: no limit
    max_per_minute: float = 0.0  # async calls begun, of all ranks together; 0: no limit
    max_invalid_fraction: float = 0.5  # of samples scored together, on all ranks; above: stop
    # functions return {"turns": [a number for each turn of the policy's], ...}. docs/rewards.md
    per_turn: bool = False


@dataclass(frozen=True)
class RewardModelConfig:
    """A sequence classifier with one output, on the ranks of `reward`: what it says of a sample is
    the parameter `model_score` of reward functions. docs/rewards.md"""

    model: str = ""  # required
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of compute
    fsdp: int = -1  # ranks that share one copy of the weights; -1: all of `reward`
    micro_batch_tokens: int = 16384  # per rank and forward pass
    offload_params: bool = False  # to the CPU while nothing is scored
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # of its own template


@dataclass(frozen=True)
class SandboxConfig:
    """Remote sandboxes, in which the reward "code" and the tool "python" run programs instead of in
    bubblewrap on this machine. docs/remote_sandboxes.md"""

    # SandboxFusion's HTTP API; E2B (package e2b, E2B_API_KEY); Modal (package modal, its token)
    kind: Literal["fusion", "e2b", "modal"] = "fusion"
    urls: tuple[str, ...] = ()  # of fusion: servers, used in turn: ("http://10.0.0.7:8080",)
    image: str = ""  # of e2b: the name of a template; of modal: an image of a registry
    max_concurrent: int = 4  # tests of a response at a time; responses: rewards.workers per rank
    retries: int = 4  # of a call for which there is no room (429, 5xx), or no connection
    backoff_s: float = 0.5  # before the first retry; twice as long before each further one
    # assert statements run beside the program there, so that it can forge their passing
    allow_asserts: bool = False


@dataclass(frozen=True)
class JudgeConfig:
    """A frozen language model that judges answers in words, in an engine on the ranks of `reward`:
    its score is the parameter `judge_score` of reward functions. docs/judge.md"""

    model: str = ""  # required
    # each: an answer by itself; pairs: which of two answers to a prompt is better, and the score of
    # an answer is the share of its comparisons that it wins
    compare: Literal["each", "pairs"] = "each"
    rubric: str = ""  # what makes a good answer; "": it is right, complete and to the point
    # text of a user's message, with {question}, {answer}, {ground_truth}, {rubric}, or a function
    # of these that returns such a text or a list of messages; None: docs/judge.md has it
    template: str | Callable[..., Any] | None = None
    # a regular expression, whose last match has the score as its first group, or a function of the
    # verdict's text; None: what the template of None asks for
    verdict: str | Callable[[str], Any] | None = None
    # the score of a sample none of whose verdicts can be read; "invalid": it has none
    unparsable: Literal["invalid"] | float = "invalid"
    # of pairs: other answers that each is compared with as the first of both, and as the second of
    # both; 0: all of the group
    opponents: int = 0
    engine: Literal["vllm", "hf"] | None = None  # None: as rollout.engine
    tensor_parallel: int = 1
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    max_prompt_tokens: int = 4096  # of what it reads
    max_tokens: int = 1024  # of a verdict
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    max_num_seqs: int = 256  # verdicts written at once, per engine
    gpu_memory_utilization: float = 0.3  # vLLM's, on a GPU
    kv_cache_mib: int | None = None  # as rollout.kv_cache_mib
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # as rollout.engine_args
    sleep: bool = True  # give its memory back while others work on its ranks
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # of its own template


@dataclass(frozen=True)
class MultiTurnConfig:
    """Turns of a sample, where `PpoConfig.tools` or `.environment` answer. docs/multi_turn.md"""

    max_turns: int = 8  # of the policy, per sample
    max_calls: int = 16  # of tools, per turn; more are answered with an error
    parser: str = "hermes"  # vLLM's name for how the model writes a tool call
    max_reply_tokens: int = 512  # of a message; the middle of a longer one is left out
    max_images: int = 0  # that replies may show in a sample; 0: they are text. docs/vision.md
    max_image_tokens: int = 1024  # of each of these images
    workers: int = 2  # processes per engine for plain functions; async ones share another
    timeout_s: float = 30.0  # per call, from when its turn has come
    max_concurrent: int = 0  # async calls at a time, of all engines together; 0: no limit
    max_per_minute: float = 0.0  # async calls begun, of all engines together; 0: no limit


@dataclass(frozen=True)
class AgentConfig:
    """Sets how `PpoConfig.agent` runs. docs/agents.md"""

    workers: int = 2  # processes per engine for plain functions; async ones, programs share another
    timeout_s: float = 600.0  # of a trajectory, from when its turn has come
    retries: int = 0  # times that a trajectory is begun anew after its agent failed
    max_turns: int = 64  # requests that are answered in a trajectory
    max_concurrent: int = 0  # async agents and programs at a time, of all engines; 0: no limit
    max_per_minute: float = 0.0  # async agents and programs begun, of all engines; 0: no limit
    # with rollout.oversample: a trajectory that goes on from step to step is begun anew where its
    # first token is of weights older by more steps than this; None: it goes on
    max_staleness: int | None = None
    parser: str = "hermes"  # vLLM's name for how the model writes a tool call
    max_images: int = 0  # that the messages of a request may show; 0: they are text
    max_image_tokens: int = 1024  # of each of these images
    # where an agent that is a command line runs; bubblewrap: with the host's network, and its file
    # system read-only but /tmp
    runner: Literal["process", "bubblewrap", "docker", "podman", "srun"] = "process"
    runner_args: tuple[str, ...] = ()  # behind the runner's own: ("--image", ...), ("my/image",)


@dataclass(frozen=True)
class ServeConfig:
    """The HTTP endpoint that each rollout engine has for `PpoConfig.agent`. docs/agents.md"""

    host: str = "127.0.0.1"  # the address that it listens at; others are open to the network
    port: int = 0  # of engine 0; engine e listens at port + e. 0: any that is free
    max_body_mib: float = 16.0  # of a request
    max_requests: int = 4096  # that an endpoint answers at a time; more get status 429


CPU_KV_CACHE_MIB = 512


@dataclass(frozen=True)
class RolloutConfig:
    """The engine that samples, and how it samples while training."""

    engine: Literal["vllm", "hf", "sglang"] = "vllm"
    n: int = 8  # samples per prompt
    temperature: float = 1.0
    # below 1, like top_k, min_p, min_tokens and repetition_penalty, samples from another policy:
    # needs algo.correction
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # tokens less likely than this times the likeliest are not drawn; 0: off
    # logits of tokens that prompt or answer have are divided by this where they are above 0, else
    # multiplied; 1: off
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    tensor_parallel: int = 1
    # vLLM's: each tensor-parallel rank has whole experts of a layer, not a part of every expert.
    # docs/experts.md
    expert_parallel: bool = False
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    quantization: Literal["fp8"] | None = None  # linear layers in e4m3, 128 x 128 blocks: vLLM
    max_num_seqs: int = 256  # sequences decoded at once, per engine
    # vLLM's and SGLang's: compile nothing, capture no CUDA graphs. auto: True on CPUs, where False
    # makes vLLM compile: some 20 s, then 0.7 of the time of a token; docs/placement.md
    enforce_eager: bool | Literal["auto"] = "auto"
    gpu_memory_utilization: float = 0.5  # vLLM's, on a GPU
    # vLLM's, per rank. None: on a CPU CPU_KV_CACHE_MIB, on a GPU what gpu_memory_utilization leaves
    kv_cache_mib: int | None = None
    # further ones of vLLM's EngineArgs, by name: {"max_num_batched_tokens": 16384}; any of
    # rollout/vllm/core.py's MAY_BE_SET
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    sleep: bool = True  # give the engine's memory back while training, where ranks do both
    # engine e takes a fixed share, whatever its speed: for GPU and hf runs that are to repeat bit
    # for bit
    static_split: bool = False
    # ask so many times the prompts, stop when prompts_per_step are complete, and go on with the
    # rest in the next step; above 1 needs algo.correction
    oversample: float = 1.0
    greedy_baseline: bool = False  # ask each prompt once more, greedily: the baseline of remax


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
    # of megatron, of the actor: weight of the loss of the model's layers for multi-token
    # prediction, which then learn to predict what the policy says; 0: they stay as they are.
    # docs/megatron_families.md
    mtp_loss_scaling_factor: float = 0.0
    micro_batch_tokens: int = 16384  # per rank and forward pass; ranks that share have the sum
    kernels: Literal["spmdrl", "liger", "torch"] = "spmdrl"  # of fsdp: RMSNorm, SwiGLU, RoPE
    attention: Literal["auto", "flash_attn", "torch"] = "auto"  # of fsdp, on GPUs in bfloat16
    compile: bool = False  # of fsdp: torch.compile of each decoder layer
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
    lora: LoraConfig | None = None  # train adapters only. docs/lora.md
    freeze_vision: bool = False  # of a model that sees images: its tower stays as it is
    optim: OptimConfig = field(default_factory=OptimConfig)


def is_eager(rollout: RolloutConfig, on_gpu: bool, strict: bool = False) -> bool:
    """Returns what enforce_eager means where the engine runs. strict: of the run."""
    return strict or (not on_gpu if rollout.enforce_eager == "auto" else rollout.enforce_eager)


def checkpointing_of(role: TrainConfig, on_gpu: bool) -> bool | Literal["selective"]:
    """Returns what activation_checkpointing means where the role is trained."""
    if role.activation_checkpointing != "auto":
        return role.activation_checkpointing
    return on_gpu and not role.activation_offload


# The names that algo/*.py define; tests/algo/test_algorithm_names.py holds both lists together.
Aggregation = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean",
    "seq_mean_token_sum_norm",
]  # fmt: skip
KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]
SampleFilter = Literal["pow", "max_min", "max_random"]


@dataclass(frozen=True)
class CorrectionConfig:
    """Rollout correction: importance of the trainer's policy over the one that sampled.

    rho is the ratio of a token's probability under the trainer's policy to that under the
    engine's, for the numerics of the engine, for truncated sampling and for older weights.
    """

    # of the weight. token: rho; sequence: the product over the sequence; geometric: the geometric
    # mean over the sequence
    level: Literal["off", "token", "sequence", "geometric"] = "off"
    # truncate: min(weight, high) (TIS); mask: 0 out of the bounds (IcePop)
    mode: Literal["truncate", "mask"] = "truncate"
    low: float = 0.5  # bound of "mask"
    high: float = 2.0
    normalize: bool = False  # divide the weights by their mean over the global batch
    # tests that a token or a sequence must pass to be trained on: {"token_k1": (0.5, 2.0)} bounds
    # the ratio, {"seq_mean_k3": 0.01} a divergence; names: docs/correction.md
    reject: Mapping[str, float | tuple[float, float]] = field(default_factory=dict)
    bypass: bool = False  # old logprobs := the engine's; saves a pass, the ratio then corrects


# Former fields of AlgoConfig, which are options of one policy loss or of one estimator now.
MOVED = {
    **{name: f"loss_args.{name}" for name in (
        "clip_low", "clip_high", "dual_clip", "cov_fraction", "cov_low", "cov_high", "cov_kl_coef",
    )},
    "sapo_tau_pos": "loss_args.tau_pos", "sapo_tau_neg": "loss_args.tau_neg",
    "dppo_ratio_cap": "loss_args.ratio_cap",
    "dro_beta": "loss_args.beta", "sppo_beta": "loss_args.beta",
    **{name: f"advantage_args.{name}" for name in (
        "gamma", "lam", "lam_critic", "lam_alpha", "reward_keys",
    )},
    "otb_zero_tail": "advantage_args.zero_tail", "prime_beta": "advantage_args.beta",
}  # fmt: skip


@dataclass(frozen=True)
class AlgoConfig:
    """The algorithm. Formulas and sources: docs/algorithms.md.

    advantage, policy_loss, aggregation and kl_estimator are a name or your own function.
    """

    # the estimator, by a name of spmdrl/algo/advantages.py: grpo, gae, rloo, reinforce, ...
    advantage: str | Callable[..., Any] = "grpo"
    # options of this estimator, by the names of its parameters: {"gamma": 0.99} for gae
    advantage_args: Mapping[str, Any] = field(default_factory=dict)
    # by a name of spmdrl/algo/losses.py: ppo, gspo, cispo, sapo, ...
    policy_loss: str | Callable[..., Any] = "ppo"
    # options of this loss, by the names of its parameters: {"clip_high": 0.28} for ppo
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    # None: what the loss's (or the estimator's) paper has, else token_mean
    aggregation: Aggregation | Callable[..., Any] | None = None
    norm_length: int | None = None  # of seq_mean_token_sum_norm; None: rollout.max_tokens
    # what seq_mean_... divide by: the mini-batch's sequences with tokens to train on, or all of
    # them, empty, invalid and rejected ones too, as verl and TRL do
    seq_mean_over: Literal["trained", "all"] = "trained"
    # where an advantage of samples is whitened: over their tokens, as verl does, or, as TRL does,
    # over samples whatever their length
    whiten_over: Literal["tokens", "samples"] = "tokens"
    value_clip: float = 0.5
    # (lowest, highest): rewards beyond are learnt from as if they were these; metrics have them as
    # they are
    reward_clip: tuple[float, float] | None = None
    reward_coef: float = 1.0  # 0: the KL in the reward alone, as in distillation
    kl_coef: float = 0.0  # above 0: a reference model is loaded
    kl_estimator: KlEstimator | Callable[..., Any] = "k3"
    kl_cut: float | None = None  # of k3 and k3+: a token's value is at most this; verl's is 10
    kl_bias_correction: bool = False  # k3 in the loss is times r: its gradient is then the KL's
    kl_in: Literal["loss", "reward"] = "loss"
    kl_target: float | None = None  # adaptive: kl_coef rises above it and falls below it
    kl_horizon: int = 10_000  # samples in which an adaptive kl_coef changes by a fifth at most
    entropy_coef: float = 0.0
    entropy_target: float | None = None  # adaptive: nats per token that are not to be fallen below
    entropy_delta: float = 0.005  # change of an adaptive entropy_coef per step
    entropy_coef_min: float = 0.0  # bounds of an adaptive entropy_coef; None: it may rise on
    entropy_coef_max: float | None = None
    # a sequence with an advantage below 0 whose mean log(engine / policy at hand) is above this, in
    # nats per token, has no policy loss; None: all have. DeepSeek-V3.2
    off_policy_mask_threshold: float | None = None
    top_entropy_fraction: float = 1.0  # of a mini-batch's tokens that have a policy loss
    positive_nll_coef: float = 0.0  # VAPO: NLL of samples with a reward above 0
    dynamic_sampling: int = 0  # DAPO: rounds at most to fill the step with unequal groups; 0: off
    # by which number that the reward function returns groups are unequal; None: the reward
    dynamic_sampling_metric: str | None = None
    overlong_buffer: int = 0  # DAPO: tokens before rollout.max_tokens where a penalty sets in
    overlong_penalty: float = 1.0  # at max_tokens
    sample_filter: SampleFilter | None = None  # PF-PPO: draw the samples to train on by reward
    filter_power: float = 2.0  # of "pow"
    replay_steps: int = 0  # earlier steps whose samples the filter may draw as well
    epochs: int = 1  # passes over a rollout
    mini_batches: int = 1  # optimizer steps per pass
    critic_warmup_steps: int = 0  # steps in which only the critic learns
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    def __new__(cls, *_: Any, **fields: Any) -> AlgoConfig:
        """Raises TypeError, with the new spelling, for fields that are options of a loss or an
        estimator now.
        """
        for name, value in fields.items():
            if name in MOVED:
                group, option = MOVED[name].split(".")
                raise TypeError(
                    f"AlgoConfig has no field {name!r} any more: write "
                    f"{group}={{{option!r}: {value!r}}}"
                )
        return super().__new__(cls)


@dataclass(frozen=True)
class WeightsConfig:
    """Trainer -> engine."""

    bucket_mib: int = 512  # bound on extra memory while gathering
    check: bool = False  # prove after every sync, bit by bit, that engine and trainer agree
    # with actor.lora: "merge" sends W + scale B A; "adapter" sends W once, then A and B alone
    lora: Literal["merge", "adapter"] = "merge"


@dataclass(frozen=True)
class CheckpointConfig:
    """Saved after every `every_steps` steps and after the last; 0: never."""

    every_steps: int = 50
    keep: int = 2  # newest
    keep_best: int = 0  # of the older ones, by the value that best_metric had after their step
    best_metric: str = "eval/reward"
    best_is: Literal["largest", "smallest"] = "largest"
    # training goes on while a copy in the host's memory is written; True: it waits, with no copy
    blocking: bool = False
    # of --resume auto that finds a damaged one: the one before is used, or the run does not start.
    # Where none is whole it does not start either; "anew": it then begins again at step 0
    on_damage: Literal["previous", "stop", "anew"] = "previous"
    # what may be another than it was in the run that is resumed: ("data", "model"). Content that
    # the config only names; changes of the config itself are logged. docs/operations.md
    accept_changes: tuple[Change, ...] = ()
    # what SIGTERM, SIGUSR1 or Ctrl-C leaves the run to end its step and save: torchrun kills ranks
    # 30 s after it passed a signal on (--shutdown-timeout), Slurm KillWait after its own. 0: the
    # step is abandoned, the last checkpoint stands
    grace_s: float = 25.0


@dataclass(frozen=True)
class ProfileConfig:
    """Steps whose operators and kernels torch.profiler records, in run_dir/profile.

    A rank that writes a trace gives no sign of life: such a run's lost_timeout_s is at least
    stall_timeout_s. See docs/operations.md.
    """

    steps: str | int | tuple[int, ...] = 3  # "3-4", 3 or "3,5-7"; none is longer than its run
    ranks: str | int | tuple[int, ...] = 0  # as in placement: "0,2", "0-3", "all"
    stacks: bool = False  # with the Python functions that called: several times as large, and slow
    shapes: bool = False  # of the operators' arguments
    memory: bool = False  # each allocation
    trace: bool = True  # False: on GPUs, only nsys's window and its ranges of phases


class Tracker(Protocol):
    """A place where a run is shown. An object of your own in `trackers` has these methods, or some
    of them where its class inherits this one. They are called on the first rank alone.
    """

    def open(self, run_dir: Path, options: Mapping[str, Any], done: int) -> None:
        """Begins a run, or goes on with it. options: its config by dotted names; done: the steps
        that it has done.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the numbers of a step. A run that resumes from an earlier checkpoint gives a step
        again.
        """

    def log_answers(self, step: int, name: str, answers: list[dict[str, Any]]) -> None:
        """Takes some rows of a file in samples/. name: "samples/train", "samples/eval"."""

    def close(self) -> None:
        """Ends the run."""


TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")  # those that have a name

# Former fields of every run -> how they are written now.
REPLACED = {"tensorboard": "trackers", "wandb": "trackers and project"}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Holds what every run has; the configs of the programs add their own."""

    # a folder; or a model of a hub: "Qwen/Qwen3-0.6B", with @revision, or "modelscope:owner/name".
    # So is every other model of a config, and an adapter. docs/hubs.md
    model: str = field(kw_only=False)
    data: Any = field(kw_only=False)  # the rows, and how they are read
    steps: int = NotGiven(100)
    epochs: float = 0.0  # passes over data.train, in place of steps. docs/mixtures.md
    run_dir: str
    seed: int = 0
    trust_remote_code: bool = False  # run Python files that a model's folder brings along
    # train the tower for images of a model whose language model could be loaded alone, too
    vision_tower: bool = False
    resume: str = "never"  # "never" | "auto" | a checkpoint folder
    eval_every: int  # steps; 0: only before and after
    # what is trained; it is saved under this name in every program
    actor: TrainConfig
    checkpoint: CheckpointConfig
    # where numbers and answers go, beside the run's own files: "tensorboard", "wandb", "mlflow",
    # "swanlab", "trackio", or an object of your own (Tracker). docs/trackers.md
    trackers: tuple[Any, ...] = ("tensorboard",)
    project: str = "spmdrl"  # in wandb, mlflow, swanlab and trackio
    profile: ProfileConfig | None = None
    # more metrics in the line of a step, by their names in metrics.jsonl: ("actor/entropy",)
    show_metrics: tuple[str, ...] = ()
    # the line of a step: in 100 columns; or with every part of the reward and every phase of the
    # step, as long as that is. docs/output.md
    log_lines: Literal["short", "full"] = "short"
    # updates in a row that may be skipped for a loss or a gradient that is not finite; one more
    # ends the run
    nan_updates: int = 0
    # what to do with a run whose memory plan is more than its GPUs have; the plan is an estimate
    memory_check: Literal["refuse", "warn"] = "refuse"
    start_timeout_s: float = 600.0  # until all ranks have started and are connected
    stall_timeout_s: float = 1800.0  # a rank that makes no progress for so long ends the run
    lost_timeout_s: float = 10.0  # so does one without a sign of life: frozen, or cut off

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        """Raises TypeError, with the new spelling, for a former field."""
        for name in REPLACED.keys() & fields.keys():
            raise TypeError(
                f"{cls.__name__} has no field {name!r} any more; it is {REPLACED[name]}: "
                'trackers=("tensorboard", "wandb"), project="sums"'
            )
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class PpoConfig(RunConfig):
    """A reinforcement-learning run. Required: model, data, reward."""

    data: DataConfig = field(kw_only=False)
    # one, or one per data_source
    reward: RewardFn | str | Mapping[str, RewardFn | str] = field(kw_only=False)
    run_dir: str = "runs/ppo"
    eval_every: int = 10
    eval_samples: int = 1  # answers per held-out prompt; above 1: best@k, ..: docs/training.md
    eval_temperature: float = 0.0  # 0: greedy
    eval_top_p: float = 1.0
    eval_top_k: int = 0  # 0: off
    eval_min_p: float = 0.0
    eval_repetition_penalty: float = 1.0  # of greedy answers, too
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig | None = None  # reward="model": its score and nothing else
    # functions that the policy may call, with type hints and a docstring, or classes of such
    # methods, of which each sample has an object; "python": the sandbox
    tools: tuple[Callable[..., Any] | Literal["python"], ...] = ()
    # answers a turn without a tool call: takes `messages`, returns messages; None: it was the last.
    # Or a class with a method `step`. One, or one per data_source
    environment: Environment | Mapping[str, Environment | None] | None = None
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    # a function or a command line that makes a sample by requests to an OpenAI or Anthropic
    # endpoint inside the ranks, or one per data_source. docs/agents.md
    agent: Callable[..., Any] | Sequence[str] | Mapping[str, Any] | None = None
    agents: AgentConfig = field(default_factory=AgentConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    actor: TrainConfig = field(default_factory=TrainConfig)
    ref: TrainConfig = field(default_factory=TrainConfig)
    critic: TrainConfig | None = None  # required by gae
    prm: TrainConfig | None = None  # process reward model, trained online; required by prime
    # role -> ranks: {"actor": "0-3", "rollout": "4-7", "reward": "4"}; roles: actor, rollout, ref,
    # critic, prm, reward. Not named: actor, rollout on all; the others with actor, reward: rollout
    placement: Mapping[str, str | int | tuple[int, ...]] = field(default_factory=dict)
    # rollout and trainer logprobs are equal in every bit, or the run stops; not compared in steps
    # that learn from older weights' samples, or in which the critic alone learns
    strict: bool = False
    async_steps: int = 0  # steps that sampling may run ahead of training; needs its own ranks
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log_samples: int = 16  # per step, written to samples/
    # of each of these: the first tokens, with log-probabilities and advantages; 0: none of them
    log_sample_tokens: int = 1024
    judge: JudgeConfig | None = None  # reward="judge": its score and nothing else
    sandbox: SandboxConfig | None = None  # None: of this machine, docs/sandbox.md


@dataclass(frozen=True)
class SftDataConfig:
    """Rows with a `messages` chat, whose last turn is learnt, or a prompt and a response column."""

    # files, or data of a hub as in DataConfig
    train: str | tuple[str, ...]
    eval: str | tuple[str, ...] | None = None
    turns: Literal["last", "all"] = "last"  # of `messages`: "all" learns every assistant turn
    prompt_key: str = "prompt"  # dotted keys reach into structs: "extra_info.question"
    response_key: str = "response"
    batch_size: int = 64
    max_tokens: int = 2048
    shuffle: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    on_bad_row: Literal["error", "skip"] = "error"  # skip: counted and reported
    # names of control tokens in the text of a chat: made ordinary text, refused, or obeyed
    control_tokens: Literal["escape", "error", "keep"] = "escape"
    # images are scaled to have so many pixels; None: what the model's image processor says
    image_min_pixels: int | None = None
    image_max_pixels: int | None = None


@dataclass(frozen=True)
class PreferenceDataConfig:
    """Rows of two answers, the better and the worse: a chat list each, or a string.

    A column of a name that is not the default must be there in every row.
    """

    # files, or data of a hub as in DataConfig
    train: str | tuple[str, ...]
    eval: str | tuple[str, ...] | None = None
    chosen_key: str = "chosen"  # dotted keys reach into structs, as in SftDataConfig
    rejected_key: str = "rejected"
    prompt_key: str | None = "prompt"  # what stands before both; None: not read
    margin_key: str | None = "margin"  # by how much the chosen one is better; None: not read
    batch_size: int = 64  # pairs
    max_tokens: int = 2048  # of a conversation; pairs with a longer one are left out
    shuffle: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    on_bad_row: Literal["error", "skip"] = "error"  # skip: counted and reported
    # names of control tokens in the text of a chat; a reward model that scores has no "keep"
    control_tokens: Literal["escape", "error"] = "escape"
    # EOS behind rows that are strings, if they do not end in it, as TRL puts it; it is noted in the
    # model's config.json, so that scoring does the same. None: as that of `model` says, else not
    append_eos: bool | None = None


@dataclass(frozen=True)
class AnswerDataConfig:
    """Rows with answers to prompts that the policy is to prefer, or to avoid.

    A pair: a prompt, a better and a worse answer. A labelled answer: a prompt, an answer, and
    whether it is desirable. docs/preference.md
    """

    # files, or data of a hub as in DataConfig
    train: str | tuple[str, ...]
    eval: str | tuple[str, ...] | None = None
    # what both answers are to; dotted keys reach into structs. None: not read; the answers are then
    # whole chats that differ in their last turn alone
    prompt_key: str | None = "prompt"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    completion_key: str = "completion"  # of a labelled answer
    label_key: str = "label"  # of a labelled answer: true, if it is desirable
    batch_size: int = 64  # pairs; of a loss of labelled answers: answers
    max_tokens: int = 2048  # of a prompt with an answer; rows with a longer one are left out
    shuffle: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    on_bad_row: Literal["error", "skip"] = "error"  # skip: counted and reported
    # names of control tokens in the text of a chat: made ordinary text, refused, or obeyed
    control_tokens: Literal["escape", "error", "keep"] = "escape"
    # images are scaled to have so many pixels; None: what the model's image processor says
    image_min_pixels: int | None = None
    image_max_pixels: int | None = None


@dataclass(frozen=True)
class PreferenceConfig:
    """The loss of preference optimisation. Formulas and sources: docs/preference.md."""

    # by a name of spmdrl/algo/preference_losses.py: dpo, ipo, kto, orpo, simpo, cpo; or your own
    # function
    loss: str | Callable[..., Any] = "dpo"
    # options of this loss, by the names of its parameters: {"beta": 0.05} for dpo
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    # LD-DPO: tokens of an answer behind the length of the pair's shorter one count so much in its
    # log-probability; None: as all others
    ld_alpha: float | None = None


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(RunConfig):
    """Holds what the programs have that learn from rows as they stand: fine-tuning, preference
    optimisation, reward models.
    """

    out: str = field(kw_only=False)  # folder for the trained model, in Hugging Face format
    # of the weights in `out`, which are trained in float32; None: that of `model`
    out_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    eval_every: int = 50
    actor: TrainConfig = field(default_factory=lambda: TrainConfig(optim=OptimConfig(lr=1e-5)))
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every_steps=200))


@dataclass(frozen=True, kw_only=True)
class SftConfig(SupervisedConfig):
    """Supervised fine-tuning: cross-entropy on the responses."""

    data: SftDataConfig = field(kw_only=False)
    run_dir: str = "runs/sft"


@dataclass(frozen=True, kw_only=True)
class PreferenceTrainingConfig(SupervisedConfig):
    """Preference optimisation: DPO and its relatives, on answers of a data set.

    model: the policy to train, and as it is at the start the reference.
    """

    data: AnswerDataConfig = field(kw_only=False)
    run_dir: str = "runs/preference"
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    actor: TrainConfig = field(default_factory=lambda: TrainConfig(optim=OptimConfig(lr=1e-6)))


@dataclass(frozen=True, kw_only=True)
class RewardTrainingConfig(SupervisedConfig):
    """A reward model, trained on preferences.

    model: a causal language model, or a sequence classifier with one output.
    """

    data: PreferenceDataConfig = field(kw_only=False)
    run_dir: str = "runs/reward_model"
    center_coef: float = 0.0  # of (chosen + rejected)^2: keeps rewards around 0


def require(holds: bool, problem: str) -> None:
    if not holds:
        raise ConfigError(problem)
