"""The config of each program. A config file is a Python file that defines `config`, one of these.

Nothing in this folder imports torch, so that a wrong key costs a fraction of a second, and reward
workers stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from spmdrl.config.algo import AlgoConfig, DistillationConfig
from spmdrl.config.base import Environment, RewardFn
from spmdrl.config.data import AnswerDataConfig, DataConfig, PreferenceDataConfig, SftDataConfig
from spmdrl.config.rewards import JudgeConfig, RewardConfig, RewardModelConfig, SandboxConfig
from spmdrl.config.rollout import AgentConfig, MultiTurnConfig, RolloutConfig, ServeConfig
from spmdrl.config.run import CheckpointConfig, KeepSamplesConfig, RunConfig, WeightsConfig
from spmdrl.config.training import OptimConfig, TeacherEndpoint, TrainConfig


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
    # several teachers in place of ref: data_source -> its teacher, or another source that has the
    # same; "*": of all other sources. docs/distillation.md
    teachers: Mapping[str, TrainConfig | TeacherEndpoint | str] = field(default_factory=dict)
    critic: TrainConfig | None = None  # required by gae
    prm: TrainConfig | None = None  # process reward model, trained online; required by prime
    # role -> ranks: {"actor": "0-3", "rollout": "4-7", "reward": "4"}; roles: actor, rollout, ref,
    # teachers.<data_source>, critic, prm, reward. Not named: actor, rollout on all; the others with
    # actor, reward: rollout
    placement: Mapping[str, str | int | tuple[int, ...]] = field(default_factory=dict)
    # rollout and trainer logprobs are equal in every bit, or the run stops; not compared in steps
    # that learn from older weights' samples, or in which the critic alone learns
    strict: bool = False
    # names, in each step, the first module by which the sample whose log-probabilities differ most
    # is computed otherwise by the rollout engine than by the actor: run_dir/mismatch. It takes one
    # more pass of each model over that sample, and a comparison of all weights. docs/mismatch.md
    explain_mismatch: bool = False
    # the same for one step of the run, the first whose actor/logprob_diff_max is above this; nats
    explain_mismatch_above: float | None = None
    async_steps: int = 0  # steps that sampling may run ahead of training; needs its own ranks
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log_samples: int = 16  # per step, written to samples/
    # of each of these: the first tokens, with log-probabilities and advantages; 0: none of them
    log_sample_tokens: int = 1024
    keep_samples: KeepSamplesConfig = field(default_factory=KeepSamplesConfig)
    judge: JudgeConfig | None = None  # reward="judge": its score and nothing else
    sandbox: SandboxConfig | None = None  # None: of this machine, docs/sandbox.md


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
    """Supervised fine-tuning: cross-entropy on the responses, a teacher's distribution over their
    tokens, or both.
    """

    data: SftDataConfig = field(kw_only=False)
    run_dir: str = "runs/sft"
    # learn from the distribution of ref.model in each place of the responses. docs/distillation.md
    distillation: DistillationConfig | None = None
    ref: TrainConfig = field(default_factory=TrainConfig)  # of distillation: the teacher
    cross_entropy_coef: float = 1.0  # beside distillation; 0: the teacher alone


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
