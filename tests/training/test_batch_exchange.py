"""Samples move between ranks whole, evenly, and independent of who made them."""

import pytest
import torch
from ranks import run_calls, run_ranks

pytestmark = pytest.mark.ranks


def make_sample(group, index):
    from spmdrl.types import Prompt, Sample

    g = torch.Generator().manual_seed(100 * group + index)
    n = int(torch.randint(1, 40, (1,), generator=g))
    ids = torch.randint(3, 60, (n,), generator=g).tolist()
    prompt = Prompt(group, list(range(3, 5 + group)), "d", "1", "p")
    invalid = "boom" if (group, index) == (1, 1) else None
    reward = None if invalid else group + index / 10
    return Sample(prompt, group, index, ids, [-i / 10 for i in ids], [1] * n, [7] * n, "stop",
                  reward=reward, invalid=invalid, penalty=-0.25, greedy_reward=group / 8,
                  reward_info={"format": index / 16})  # fmt: skip


def dealt(topology, samples, mini_batches, keys=(), roles=None):
    """(BatchAssignment, {ranks of a role: this rank's mini-batches}); roles: as tuples of ranks."""
    from spmdrl.data.packing import assign_to_ranks, pack_samples
    from spmdrl.distributed.collectives import all_gather_rows
    from spmdrl.training.batch_exchange import (
        FIELDS,
        P2PChannel,
        packing_order,
        receive_batch,
        send_batch,
    )

    roles, me = roles or [topology.ranks], topology.rank
    rows = [(s.group, s.index, s.num_tokens, len(s.prompt.token_ids), me) for s in samples]
    table = torch.cat(
        all_gather_rows(torch.tensor(rows, dtype=torch.int64).reshape(-1, 5), topology)
    )
    found = assign_to_ranks(table, mini_batches, dict.fromkeys(roles, False))
    by_address = {(s.group, s.index): s for s in samples}
    post, own, batches = P2PChannel(topology), {}, {}
    for ranks in roles:
        order = packing_order(found, ranks, me)
        addresses = zip(found.groups[order].tolist(), found.indices[order].tolist(), strict=True)
        batch = pack_samples([by_address[address] for address in addresses], keys)
        own[ranks] = send_batch(batch, found, ranks, FIELDS, post)
    for ranks in roles:
        if me in ranks:
            batches[ranks] = receive_batch(own[ranks], found, ranks, FIELDS, len(keys), post)
    post.wait_until_delivered()
    return found, batches


def balanced_on(topology, makers):
    mine = [make_sample(g, i) for g in range(6) for i in range(4)
            if makers[(4 * g + i) % len(makers)] % topology.world == topology.rank]  # fmt: skip
    found, batches = dealt(topology, mine, 2, ["format"])
    rows = [
        (m, int(b.groups[i]), int(b.indices[i]), one.token_ids.tolist(), one.loss_mask.tolist(),
         one.rollout_logprobs.tolist(), one.policy_version.tolist(), float(b.rewards[i]),
         float(b.valid[i]), float(b.greedy_rewards[i]), b.reward_components[i].tolist())
        for m, b in enumerate(batches[topology.ranks])
        for i in range(b.num_seqs) for one in [b.select([i])]
    ]  # fmt: skip
    return rows, found.imbalance(topology.ranks, shares=False)


def results_on(topology, roles, makers):
    """What rank r of a role says of a token must reach whoever has it in another role."""
    from spmdrl.training.batch_exchange import P2PChannel, receive_results, send_results

    mine = [make_sample(g, i) for g in range(5) for i in range(3)
            if makers[(g + i) % len(makers)] == topology.rank]  # fmt: skip
    found, batches = dealt(topology, mine, 2, roles=roles)
    post, wrong = P2PChannel(topology), 0
    for source in roles:
        said = None
        if source in batches:
            said = [b.token_ids * 0.5 + torch.repeat_interleave(b.groups, b.seq_lens)
                    for b in batches[source]]  # fmt: skip
        for target in roles:
            if said is not None:
                send_results(said, found, source, target, post)
            if target in batches:
                heard = receive_results(said, found, source, target, post)
                for b, values in zip(batches[target], heard, strict=True):
                    want = b.token_ids * 0.5 + torch.repeat_interleave(b.groups, b.seq_lens)
                    wrong += int((values != want).sum()) + abs(len(values) - b.num_tokens)
    post.begin(step=1, delivered=0)
    assert not post.under_way  # what has arrived is let go
    held = {ranks: [(g, i) for b in parts for g, i in zip(b.groups.tolist(), b.indices.tolist(),
                    strict=True)] for ranks, parts in batches.items()}  # fmt: skip
    return wrong, held


ROLES = {  # by world: ranks of the roles, and who makes the samples
    2: ([(0,), (1,)], [1]),
    3: ([(0, 1, 2), (2,), (0, 1)], [0, 2]),
    4: ([(2, 3), (1,), (0, 3), (0, 1, 2, 3)], [0, 2]),
}


def test_every_role_gets_every_sample_once_and_results_find_their_token(runs):
    everything = [(g, i) for g in range(5) for i in range(3)]
    for world, (roles, _) in ROLES.items():
        ranks = runs[world]["results"]
        assert [wrong for wrong, _ in ranks] == [0] * world
        for role in roles:
            held = [address for rank in role for address in ranks[rank][1][role]]
            assert sorted(held) == everything, (world, role)


def test_balance_keeps_every_sample_whole_and_once(runs):
    want, _ = runs[1]["one maker"][0]
    assert [(r[0], r[1], r[2]) for r in want] == [
        (g // 3, g, i) for g in range(6) for i in range(4)
    ]
    for _mini, group, index, *_, reward, valid, greedy, keys in want:
        assert (valid, greedy) == (float((group, index) != (1, 1)), group / 8)
        assert keys == [valid * index / 16]
        assert reward == pytest.approx(valid * (group + index / 10 - 0.25))
    for world in (2, 3):
        results = runs[world]["three makers"]
        merged = sorted(row for rows, _ in results for row in rows)
        assert merged == want
        assert results[0][1] < 1.1
        tokens = [sum(len(r[3]) for r in rows) for rows, _ in results]
        assert max(tokens) < 1.15 * sum(tokens) / world
        # one maker for all: the deal is by address, so every rank gets the same
        alone = runs[world]["one maker"]
        assert [rows for rows, _ in alone] == [rows for rows, _ in results]


def few_on(topology, estimator):
    """Two samples on three ranks."""
    from spmdrl.algo.algorithm import Algorithm
    from spmdrl.config import AlgoConfig, DataConfig, PpoConfig
    from spmdrl.training.credit import add_advantages

    config = PpoConfig("-", DataConfig("-"), "gsm8k", algo=AlgoConfig(advantage=estimator))
    mine = [make_sample(0, i) for i in range(2)] if topology.rank == 0 else []
    batches = dealt(topology, mine, 1)[1][topology.ranks]
    batches[0].values = batches[0].loss_mask * 0.5
    algorithm = Algorithm.of(config.algo)
    return batches[0].num_seqs, add_advantages(batches, config, algorithm, 0.0, topology)


def test_fewer_samples_than_ranks(runs):
    for estimator in ("grpo", "gae"):
        results = runs[3][estimator]
        assert sorted(n for n, _ in results) == [0, 1, 1]
        assert results[0][1] == results[1][1] == results[2][1]


def kth_on(topology, values, ks):
    from spmdrl.distributed.collectives import kth_largest

    mine = torch.tensor(values[topology.rank :: topology.world], dtype=torch.float64)
    return [kth_largest(mine, k, topology) for k in ks]


VALUES = [3.0, -1.5, 0.0, 2.25, -1e300, 1e-320, 7.0, 3.0, -0.25, 1e300, -float("inf")]


def test_kth_largest_over_all_ranks(runs):
    want = [*sorted(VALUES, reverse=True), -float("inf")]
    for world in (1, 3):
        assert runs[world]["kth"] == [want] * world


def few_groups_on(topology):
    """Two groups left of many, and three mini-batches asked for."""
    mine = [
        make_sample(g, i) for g in (3, 5) for i in range(4) if i % topology.world == topology.rank
    ]
    batches = dealt(topology, mine, 3)[1][topology.ranks]
    return [sorted({int(g) for g in b.groups}) for b in batches]


def test_there_is_no_mini_batch_without_a_group(runs):
    for groups in runs[2]["few groups"]:
        assert groups in ([[3], [5]], [[3], []], [[], [5]])
        assert len(groups) == 2


@pytest.fixture(scope="module")
def runs():
    """{world: {case: what each rank got}}; each world starts once."""
    kth = (kth_on, (VALUES, list(range(1, 13))))
    one, three = (balanced_on, ([0],)), (balanced_on, ([0, 1, 2],))
    cases = {
        1: {"one maker": one, "kth": kth},
        2: {"one maker": one, "three makers": three, "few groups": (few_groups_on, ())},
        3: {"one maker": one, "three makers": three, "grpo": (few_on, ("grpo",)),
            "gae": (few_on, ("gae",)), "kth": kth},
        4: {},
    }  # fmt: skip
    for world, args in ROLES.items():
        cases[world]["results"] = (results_on, args)
    return {
        world: dict(zip(calls, run_calls(world, calls.values()), strict=True))
        for world, calls in cases.items()
    }


def one_way_on(topology):
    """Each rank sends to one that has nothing for it, before all agree; then they receive."""
    from spmdrl.training.batch_exchange import P2PChannel

    channel, me = P2PChannel(topology), topology.rank
    channel.send(torch.full((3,), float(me)), (me + 3) % 4)
    topology.lowest(me)
    place = torch.zeros(3)
    for work in channel.expect(place, (me + 1) % 4):
        work.wait()
    channel.wait_until_delivered()
    return place.tolist()


def test_a_send_does_not_wait_for_the_receiver(monkeypatch):
    """Also where gloo connects two ranks when they first talk to each other: only then the ranks
    would wait for each other in the agreement."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    found = run_ranks(4, one_way_on, timeout_s=30)
    assert found == [[float((me + 1) % 4)] * 3 for me in range(4)]
