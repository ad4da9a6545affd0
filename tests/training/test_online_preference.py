"""Online preference optimisation: pairs of a step's own samples, on two ranks, against plain loops.

That a whole step does not depend on ranks and micro-batches, test_invariance.py shows.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from programs import metrics_of, samples_of, set_up, train
from ranks import run_calls
from tiny_models import save_qwen3

from spmdrl.algo.preference_losses import PREFERENCE_LOSSES, Pairs, PreferenceLoss
from spmdrl.algo.selection import best_and_worst_of_groups
from spmdrl.cli.arguments import checked
from spmdrl.config import (
    PAIR_LOSSES,
    REFERENCE_LOSSES,
    AlgoConfig,
    ConfigError,
    CorrectionConfig,
    DataConfig,
    OptimConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from spmdrl.data.packing import pack_samples
from spmdrl.distributed.placement import place, training_roles
from spmdrl.training.checks.algorithms import check_algo
from spmdrl.training.checks.rl import check_schedule
from spmdrl.types import DEMONSTRATED, Batch, Prompt, Sample

BETA, N, GROUPS = 0.3, 4, 5
BASE = PpoConfig(
    model="-", data=DataConfig(train="-"), reward="gsm8k", rollout=RolloutConfig(n=N, max_tokens=9),
    algo=AlgoConfig(policy_loss="dpo", loss_args={"beta": BETA}),
)  # fmt: skip


def with_algo(**fields: Any) -> PpoConfig:
    return replace(BASE, algo=AlgoConfig(**fields))


# ---- which answers are a pair


def test_pairs_are_the_best_and_the_worst_of_each_group() -> None:
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])
    rewards = torch.tensor([0.5, 1.0, 0.0, 1.0, 1.0, 0.2, 0.9, 0.2, 4.0]).double()
    usable = torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 1]) > 0
    assert best_and_worst_of_groups(groups, rewards, usable).tolist() == [[1, 2], [6, 5]]
    usable[[2, 6]] = False  # then the third group has equal rewards
    assert best_and_worst_of_groups(groups, rewards, usable).tolist() == [[1, 0]]
    assert best_and_worst_of_groups(groups, rewards, usable & False).shape == (0, 2)


def sample_of(group: int, index: int) -> Sample:
    """Some are invalid, some empty, and the answers to the last prompt have the same reward."""
    rng = random.Random(10 * group + index)
    length = 0 if (group, index) == (1, 0) else rng.randint(1, 9)
    invalid = "boom" if (group, index) in ((0, 1), (2, 3)) else None
    reward = 0.5 if group == GROUPS - 1 else rng.choice([0.0, 0.25, 1.0, rng.random()])
    if (group, index) in ((1, 0), (2, 3)):
        reward = 9.0  # the best of all, if they counted
    mask = [1] * min(length, 1) + [int(rng.random() > 0.3) for _ in range(length - 1)]
    return Sample(
        Prompt(group, [3] * (2 + group), "d", None, "p"), group, index,
        response_ids=[rng.randint(3, 60) for _ in range(length)], loss_mask=mask,
        rollout_logprobs=[-1.0] * length, policy_version=[0] * length, finish_reason="stop",
        reward=None if invalid else reward, invalid=invalid,
        penalty=-0.1 * (length > 6 and group < GROUPS - 1),
    )  # fmt: skip


def trajectory_of(group: int, index: int) -> Sample:
    """Two rows, as an agent's trajectory may have."""
    rows = [sample_of(group, index), replace(sample_of(group, index), response_ids=[7, 8],
            loss_mask=[0, 1], rollout_logprobs=[0.0, -2.0], policy_version=[-1, 0])]  # fmt: skip
    return replace(rows[0], rows=rows)


def with_demonstration_of(group: int, index: int) -> Sample:
    """The last answer to each prompt is one that its row has."""
    sample = sample_of(group, index)
    if index == N - 1:
        sample.policy_version = [DEMONSTRATED] * len(sample.response_ids)
    return sample


ADDRESSES = [(group, index) for group in range(GROUPS) for index in range(N)]


def numbers_for(batch: Batch, salt: int) -> torch.Tensor:
    """(num_tokens,): log-probabilities that a token has wherever it lies."""
    found = []
    for group, index, length in zip(batch.groups, batch.indices, batch.seq_lens, strict=True):
        rng = random.Random(1000 * salt + 100 * int(group) + int(index))
        found += [-3 * rng.random() for _ in range(int(length))]
    return torch.tensor(found, dtype=torch.float32) * batch.loss_mask


# ---- the coefficient of each answer


LOSSES = {
    "dpo": with_algo(policy_loss="dpo", loss_args={"beta": BETA}),
    "ipo": with_algo(policy_loss="ipo", loss_args={"beta": BETA, "length_normalized": False}),
    "clipped": with_algo(policy_loss="dpo", loss_args={"beta": BETA}, reward_clip=(0.1, 0.3)),
    "agents": replace(BASE, agent=len),
    "spin": with_algo(policy_loss="dpo", loss_args={"beta": BETA}, pairs="demonstration"),
}


def maker_of(config):
    if config.algo.pairs == "demonstration":
        return with_demonstration_of
    return trajectory_of if config.agent is not None else sample_of


def coefficients_on(topology, name):
    """{address: (advantage of each token)} of this rank's answers in pairs, and the metrics."""
    from spmdrl.rollout.agents.samples import training_rows
    from spmdrl.training.online_preference import keep_pairs, prepare_pairs, weigh_pairs

    config = LOSSES[name]
    make = maker_of(config)
    mine = [make(*address) for address in ADDRESSES[topology.rank :: topology.world]]
    kept, metrics = keep_pairs(mine, config, topology)
    batch = pack_samples(kept if config.agent is None else training_rows(kept, N))
    prepare_pairs([batch], topology)
    batch.ref_logprobs = numbers_for(batch, salt=1)
    metrics |= weigh_pairs(batch, numbers_for(batch, salt=2), config, topology)
    parts = (batch.advantages * batch.loss_weights).split(batch.seq_lens.tolist())
    addresses = zip(batch.groups.tolist(), batch.indices.tolist(), strict=True)
    return {a: part.tolist() for a, part in zip(addresses, parts, strict=True)}, metrics


def gradients_on(topology, folder):
    """The gradient norm of an update whose answers lie on two ranks, and that of one graph."""
    from transformers import AutoModelForCausalLM

    from spmdrl.algo.objectives import policy_objective
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.fsdp.engine import FsdpEngine
    from spmdrl.training.online_preference import keep_pairs, prepare_pairs, weigh_pairs

    optim = OptimConfig(lr=0.0, weight_decay=0.0, clip_norm=1e9)
    train = TrainConfig(dtype="float32", micro_batch_tokens=8, optim=optim)
    topology = Topology.build(topology.device, topology.ranks, **train_degrees(train))
    engine = FsdpEngine.build("policy", folder, train, topology)
    mine = [sample_of(*address) for address in ADDRESSES[topology.rank :: topology.world]]
    batch = pack_samples(keep_pairs(mine, BASE, topology)[0])
    prepare_pairs([batch], topology)
    batch.ref_logprobs = numbers_for(batch, salt=1)
    loss = weigh_pairs(batch, engine.logprobs(batch, 1.0).logprobs, BASE, topology)["loss"]
    found = engine.update(batch, policy_objective(BASE.algo), 1.0)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = pack_samples([sample_of(*address) for address in ADDRESSES])
    ref = numbers_for(whole, salt=1)
    ratios = {}
    places = zip(whole.groups.tolist(), whole.indices.tolist(), strict=True)
    for address, (start, end) in zip(places, pairwise(whole.cu_seqlens.tolist()), strict=True):
        ids = whole.token_ids[start:end]
        scores = model(ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        ratios[address] = ((scores - ref[start + 1 : end]) * whole.loss_mask[start + 1 : end]).sum()
    differences = torch.stack([ratios[best] - ratios[worst] for best, worst in pairs_by_hand(BASE)])
    want = -torch.nn.functional.logsigmoid(BETA * differences).mean()
    want.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return loss, found["grad_norm"], float(want.detach()), float(norm)


def pairs_by_hand(config):
    """[(address of the best, of the worst)] of each group that has both."""
    low, high = config.algo.reward_clip or (-math.inf, math.inf)
    found = []
    for group in range(GROUPS):
        seen = []
        for index in range(N):
            s = sample_of(group, index)
            trained = sum(s.loss_mask) > 0 or config.agent is not None
            if s.invalid is None and trained:
                reward = min(max(s.reward + s.penalty, low), high)
                by_reward = config.algo.pairs == "best_worst"
                seen.append((reward if by_reward else float(index == N - 1), index))
        best, worst = (f(seen, key=lambda each: each[0]) for f in (max, min))
        if best[0] > worst[0]:
            found.append(((group, best[1]), (group, worst[1])))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    folder = str(save_qwen3(tmp_path_factory.mktemp("model"), 0, **small))
    calls = {name: (coefficients_on, (name,)) for name in LOSSES}
    calls["gradients"] = (gradients_on, (folder,))
    return dict(zip(calls, run_calls(2, calls.values()), strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("name", LOSSES)
def test_each_token_has_the_derivative_of_the_papers_loss(results, name):
    config = LOSSES[name]
    rows = [(g, i + N * k) for g, i in ADDRESSES for k in range(1 + (config.agent is not None))]
    make = maker_of(config)
    samples = {}
    for group, index in ADDRESSES:
        sample = make(group, index)
        for k, row in enumerate(sample.rows or [sample]):
            samples[group, index + N * k] = replace(row, index=index + N * k)
    batch = pack_samples([samples[row] for row in rows])
    policy, ref = (numbers_for(batch, salt).double() for salt in (2, 1))
    h = dict.fromkeys(ADDRESSES, 0.0)
    spans = pairwise(batch.cu_seqlens.tolist())
    for (group, index), (start, end) in zip(rows, spans, strict=True):
        h[group, index % N] += float((policy - ref)[start:end].sum())
    pairs = pairs_by_hand(config)
    assert 2 <= len(pairs) < GROUPS
    want, losses = {}, []
    for best, worst in pairs:
        d = h[best] - h[worst]
        if config.algo.policy_loss == "ipo":  # (d - 1 / (2 beta))^2
            losses.append((d - 1 / (2 * BETA)) ** 2)
            slope = 2 * (d - 1 / (2 * BETA))
        else:
            losses.append(math.log1p(math.exp(-BETA * d)))
            slope = -BETA / (1 + math.exp(BETA * d))
        want[best], want[worst] = -slope / len(pairs), slope / len(pairs)
    got = results[name][0][0] | results[name][1][0]
    in_pairs = {row for row in rows if (row[0], row[1] % N) in want}
    assert got.keys() == in_pairs
    for (group, index), tokens in got.items():
        sample = samples[group, index]
        mask = [0] * len(sample.prompt.token_ids) + sample.loss_mask
        assert tokens == pytest.approx([want[group, index % N] * m for m in mask], rel=1e-6)
    for _, metrics in results[name]:
        assert metrics["loss"] == pytest.approx(sum(losses) / len(pairs), rel=1e-9)
        assert metrics["pairs/share"] == len(pairs) / GROUPS
        right = sum(h[best] > h[worst] for best, worst in pairs)
        assert metrics["rewards/accuracies"] == pytest.approx(right / len(pairs))


@pytest.mark.ranks
def test_the_gradient_is_that_of_both_answers_in_one_graph(results):
    for loss, norm, want_loss, want_norm in results["gradients"]:
        assert loss == pytest.approx(want_loss, rel=1e-5)
        assert norm == pytest.approx(want_norm, rel=1e-5)


# ---- the config


def test_the_losses_are_those_of_preference_optimisation() -> None:
    paired = {name for name, loss in PREFERENCE_LOSSES.items() if not loss.unpaired}
    assert set(PAIR_LOSSES) == paired
    assert set(REFERENCE_LOSSES) == {name for name in paired if PREFERENCE_LOSSES[name].reference}


def hinge(answers: Pairs, *, beta: float = 0.1) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (1 - beta * answers.chosen).relu(), {}


@pytest.mark.parametrize(
    ("loss", "args", "reference"),
    [
        ("dpo", {}, True),
        ("dpo", {"reference_free": True}, False),
        ("ipo", {}, True),
        ("simpo", {"simpo_gamma": 1.0}, False),
        (PreferenceLoss(hinge), {"beta": 0.3}, True),
        (PreferenceLoss(hinge, reference=False), {}, False),
    ],
)
def test_the_reference_is_loaded_where_the_loss_reads_it(loss, args, reference) -> None:
    config = checked(with_algo(policy_loss=loss, loss_args=args), "cfg.py")
    check_algo(config)
    assert ("ref" in training_roles(config)) == reference


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (with_algo(policy_loss="kto"), ["kto", "'dpo'"]),
        (with_algo(policy_loss=PreferenceLoss(hinge, unpaired=True)), ["hinge", "use a loss of P"]),
        (with_algo(policy_loss="dpo", loss_args={"gamma": 1.0}), ["no option 'gamma'", "beta"]),
        (with_algo(policy_loss="dpo", loss_args={"beta": 0.0}), ["beta", "above 0"]),
        (with_algo(policy_loss=PreferenceLoss(lambda a, b, c: a)), ["must be f(answers"]),
        (with_algo(policy_loss="dpo", advantage="rloo"), ["advantage='rloo'", "no advantages"]),
        (with_algo(policy_loss="ipo", aggregation="token_mean"), ["mean over pairs"]),
        (with_algo(policy_loss="dpo", kl_coef=0.1), ["kl_coef=0.1", "its own beta"]),
        (with_algo(policy_loss="dpo", entropy_coef=0.1), ["entropy_coef=0.1", "bonus"]),
        (with_algo(policy_loss="dpo", positive_nll_coef=0.1), ["rpo_alpha"]),
        (with_algo(policy_loss="cpo", top_entropy_fraction=0.5), ["top_entropy_fraction"]),
        (with_algo(policy_loss="dpo", correction=CorrectionConfig(bypass=True)), ["no ratio"]),
        (with_algo(policy_loss="dpo", sample_filter="pow"), ["sample_filter", "best and the"]),
        (replace(BASE, rollout=RolloutConfig(n=1)), ["rollout.n=1", "no pair"]),
        (replace(BASE, rewards=RewardConfig(per_turn=True)), ["per_turn", "as a whole"]),
        (replace(BASE, actor=TrainConfig(mtp_loss_scaling_factor=0.1)), ["multi-token"]),
    ],
)
def test_what_a_loss_of_pairs_does_not_read_is_refused(config, words) -> None:
    with pytest.raises(ConfigError) as error:
        check_algo(config)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_cut_distribution_needs_no_correction() -> None:
    check_algo(replace(BASE, rollout=RolloutConfig(n=4, max_tokens=9, top_p=0.9)))


def test_pairs_may_be_of_older_weights() -> None:
    """No loss of pairs has a ratio to the policy that sampled."""
    apart = replace(BASE, async_steps=1, placement={"actor": "0", "rollout": "1"})
    asks_more = replace(BASE, rollout=replace(BASE.rollout, oversample=1.5))
    for config in (apart, asks_more):
        check_schedule(config, place(config, 2))
        reinforced = replace(config, algo=AlgoConfig())
        with pytest.raises(ConfigError, match="tokens of older weights"):
            check_schedule(reinforced, place(reinforced, 2))


# ---- a run of the program


@pytest.mark.ranks
def test_a_run_learns_from_pairs_and_resumes_bit_for_bit(tmp_path, qwen3) -> None:
    set_up(tmp_path, qwen3)
    asked = ["--config", "cfg.py", "--algo.policy_loss", "dpo", "--algo.loss_args.beta", "0.3",
             "--algo.epochs", "2", "--ref.dtype", "float32",
             "--checkpoint.every_steps", "1"]  # fmt: skip
    done = train(tmp_path, 1, *asked)
    assert done.code == 0, done.output[-4000:]
    rows, whole = metrics_of(tmp_path / "run"), samples_of(tmp_path / "run", 1)
    first, second = rows[-2:]
    assert [first["step"], second["step"]] == [1, 2] and "advantage/mean" not in first
    assert 0 < first["pairs/share"] <= 1 - first["reward/frac_reward_zero_std"] + 1e-9
    assert first["pairs/chosen_reward"] > first["reward/mean"] > first["pairs/rejected_reward"]
    # log 2 where policy and reference are the same, and less in the second epoch
    assert 0 < first["actor/loss"] < math.log(2) and first["actor/rewards/margins"] > 0
    assert first["actor/logprob_diff_max"] < 1e-1 and first["actor/ref_kl"] >= 0
    named = tmp_path / "run/samples/step_1_trained.jsonl"
    trained = [json.loads(line) for line in named.open()]
    rewards = {(row["group"], row["sample"]): row["reward"] for row in whole}
    of_group: dict[int, list[tuple[float, float]]] = {}
    for row in trained:
        if (row["group"], row["sample"]) in rewards:
            pair = of_group.setdefault(row["group"], [])
            pair.append((rewards[row["group"], row["sample"]], row["advantage"]))
    both = [sorted(pair) for pair in of_group.values() if len(pair) == 2]
    assert both and all(worse < 0 < better for (_, worse), (_, better) in both)
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000002")
    done = train(tmp_path, 1, *asked, "--resume", "auto")
    assert done.code == 0, done.output[-4000:]
    assert metrics_of(tmp_path / "run")[-1] == second
