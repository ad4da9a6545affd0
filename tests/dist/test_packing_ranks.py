"""Samples move between ranks whole, evenly, and independent of who made them."""

import torch
from ranks import run_ranks


def make_sample(group, index):
    from spmdrl.types import Prompt, Sample

    g = torch.Generator().manual_seed(100 * group + index)
    n = int(torch.randint(1, 40, (1,), generator=g))
    ids = torch.randint(3, 60, (n,), generator=g).tolist()
    prompt = Prompt(group, list(range(3, 5 + group)), "d", "1", "p")
    invalid = "boom" if (group, index) == (1, 1) else None
    reward = None if invalid else group + index / 10
    return Sample(prompt, group, index, ids, [-i / 10 for i in ids], [1] * n, [7] * n, "stop",
                  reward=reward, invalid=invalid)  # fmt: skip


def balanced_on(topology, makers):
    from spmdrl.packing import balance

    mine = [make_sample(g, i) for g in range(6) for i in range(4)
            if makers[(4 * g + i) % len(makers)] % topology.world == topology.rank]  # fmt: skip
    batches, imbalance = balance(mine, 6, 2, topology)
    rows = [
        (m, int(b.groups[i]), int(b.indices[i]), one.token_ids.tolist(), one.loss_mask.tolist(),
         one.rollout_logprobs.tolist(), one.policy_version.tolist(), float(b.rewards[i]),
         float(b.valid[i]))
        for m, b in enumerate(batches) for i in range(b.num_seqs) for one in [b.select([i])]
    ]  # fmt: skip
    return rows, imbalance


def test_balance_keeps_every_sample_whole_and_once():
    want, _ = run_ranks(1, balanced_on, [0])[0]
    assert [(r[0], r[1], r[2]) for r in want] == [
        (g // 3, g, i) for g in range(6) for i in range(4)
    ]
    for world in (2, 3):
        results = run_ranks(world, balanced_on, [0, 1, 2])
        merged = sorted(row for rows, _ in results for row in rows)
        assert merged == want
        assert results[0][1] < 1.1
        tokens = [sum(len(r[3]) for r in rows) for rows, _ in results]
        assert max(tokens) < 1.15 * sum(tokens) / world
        # one maker for all: the deal is by address, so every rank gets the same
        alone = run_ranks(world, balanced_on, [0])
        assert [rows for rows, _ in alone] == [rows for rows, _ in results]


def advantages_on(topology, estimator):
    from spmdrl.config import AlgoConfig
    from spmdrl.packing import balance
    from spmdrl.step import add_advantages

    mine = [make_sample(g, i) for g in range(6) for i in range(4)
            if (g + i) % topology.world == topology.rank]  # fmt: skip
    batches, _ = balance(mine, 6, 2, topology)
    for b in batches:
        b.values = torch.sin(b.token_ids.float()) * b.loss_mask
    metrics = add_advantages(batches, AlgoConfig(advantage=estimator, lam=0.9), topology)
    return metrics, {
        (int(b.groups[i]), int(b.indices[i])): (one.advantages, one.loss_weights)
        for b in batches for i in range(b.num_seqs) for one in [b.select([i])]
    }  # fmt: skip


def few_on(topology, estimator):
    """Two samples on three ranks."""
    from spmdrl.config import AlgoConfig
    from spmdrl.packing import balance
    from spmdrl.step import add_advantages

    mine = [make_sample(0, i) for i in range(2)] if topology.rank == 0 else []
    batches, _ = balance(mine, 1, 1, topology)
    batches[0].values = batches[0].loss_mask * 0.5
    return batches[0].num_seqs, add_advantages(batches, AlgoConfig(advantage=estimator), topology)


def test_fewer_samples_than_ranks():
    for estimator in ("grpo", "gae"):
        results = run_ranks(3, few_on, estimator)
        assert sorted(n for n, _ in results) == [0, 1, 1]
        assert results[0][1] == results[1][1] == results[2][1]


def test_advantages_are_of_the_global_batch():
    for estimator in ("grpo", "gae"):
        want_metrics, want = run_ranks(1, advantages_on, estimator)[0]
        for world in (2, 3):
            results = run_ranks(world, advantages_on, estimator)
            got = {k: v for _, part in results for k, v in part.items()}
            assert got.keys() == want.keys()
            for key, (advantages, weights) in want.items():
                torch.testing.assert_close(got[key][0], advantages, rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(got[key][1], weights)
            for metrics, _ in results:
                for name, value in want_metrics.items():
                    assert abs(metrics[name] - value) < 1e-6
        assert float(want[1, 1][0].abs().sum()) == 0  # the invalid sample
        assert sum(float(w.sum()) for _, w in want.values()) > 1.99  # two mini-batches, 1 each
