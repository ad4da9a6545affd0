"""The algorithm: advantages, loss, corrections, filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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


@dataclass(frozen=True)
class DistillationConfig:
    """Distillation over what a teacher finds likely. docs/distillation.md"""

    # jsd: the generalised Jensen-Shannon divergence of GKD, between both
    loss: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    topk: int = 64  # tokens of the teacher in each place, at most 64
    beta: float = 0.5  # of jsd: near 0 as forward_kl, near 1 as reverse_kl
    # all other tokens count as one; without it forward_kl is verl's forward_kl_topk
    tail: bool = True
    coef: float = 1.0  # of its loss, beside that of the rewards or of the given responses
    loss_max_clamp: float | None = None  # nats: a token's loss is at most this; verl's is 10
    # reference: ref.model, which is the run's own initial model where the data has hints; policy:
    # the policy itself, with the weights that it has at the step, and the hint (data.hint_key)
    teacher: Literal["reference", "policy"] = "reference"


# Losses of pairs, which spmdrl/algo/preference_losses.py defines; those that read a reference.
PAIR_LOSSES = ("dpo", "ipo", "orpo", "simpo", "cpo")
REFERENCE_LOSSES = ("dpo", "ipo")


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
    # by a name of spmdrl/algo/losses.py: ppo, gspo, cispo, sapo, ...; or a loss of pairs, the
    # best and the worst answer to each prompt: dpo, ipo, ...: docs/online_preference.md
    policy_loss: str | Callable[..., Any] = "ppo"
    # options of this loss, by the names of its parameters: {"clip_high": 0.28} for ppo
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    # of a loss of pairs: the answers of highest and lowest reward, or (SPIN) a demonstration and a
    # sampled answer
    pairs: Literal["best_worst", "demonstration"] = "best_worst"
    # of the rollout.n answers to a prompt, so many are those that its row has
    # (data.demonstration_key); LUFFY's is 1. docs/demonstrations.md
    demonstrations: int = 0
    # policy shaping: a demonstration's token counts pi / (pi + gamma); None: pi
    policy_shaping_gamma: float | None = 0.1
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
    reward_coef: float = 1.0  # 0: a teacher alone, by the KL in the reward or by `distillation`
    distillation: DistillationConfig | None = None  # learn from ref.model's distribution
    kl_coef: float = 0.0  # above 0: a reference model is loaded
    kl_estimator: KlEstimator | Callable[..., Any] = "k3"
    kl_cut: float | None = None  # of k3 and k3+: a token's value is at most this; verl's is 10
    kl_bias_correction: bool = False  # k3 in the loss is times r: its gradient is then the KL's
    kl_in: Literal["loss", "reward"] = "loss"
    # the reference follows the policy: after every so many steps it becomes
    # alpha policy + (1 - alpha) reference, as with TRL's sync_ref_model; 0: it stays as it was
    ref_model_sync_steps: int = 0
    ref_model_mixup_alpha: float = 0.6
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

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is read: by a KL, by distillation, or by a loss of pairs."""
        loss, free = self.policy_loss, self.loss_args.get("reference_free", False)
        record = getattr(loss, "pairs", loss)
        compares = getattr(record, "reference", False) or loss in REFERENCE_LOSSES
        distils = self.distillation is not None and not self.policy_teaches
        return self.kl_coef > 0 or distils or (compares and not free)

    @property
    def policy_teaches(self) -> bool:
        """Whether the policy is its own teacher, and the reference, if there is one, is none."""
        return self.distillation is not None and self.distillation.teacher == "policy"
