"""Configs of what scores samples: functions, models, sandboxes, judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


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
