"""Ranks that share the tokens of their sequences: the numbers of ranks that do not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_calls
from tiny_models import save_qwen3
from training_batches import CONFIG, LENS, whole_batch, with_shared_prompts

from spmdrl.config import AlgoConfig, ConfigError, OptimConfig, TrainConfig
from spmdrl.segments import lengths_to_cu_seqlens

PLAIN = replace(CONFIG, optim=OptimConfig(lr=1e-3, weight_decay=0.0, clip_norm=1e9))
LAYERS = 2


def save_models(folder):
    """By name: grouped queries, one key-value head, heads in no proportion; windows, experts and
    values of another size than keys."""
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        GptOssConfig,
        GptOssForCausalLM,
        Llama4ForCausalLM,
        Llama4TextConfig,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    small = {
        "vocab_size": 71, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "max_position_embeddings": 128,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    experts = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
    torch.manual_seed(3)
    models = {
        "window": Qwen3ForCausalLM(Qwen3Config(
            **small, head_dim=16, use_sliding_window=True, sliding_window=9, max_window_layers=1)),
        "moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**small, **experts, head_dim=16, num_experts=4)),
        "mla": DeepseekV3ForCausalLM(DeepseekV3Config(**(small | experts | {
            "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4,
            "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}))),
        "sinks": GptOssForCausalLM(GptOssConfig(
            **small, head_dim=16, sliding_window=9, num_local_experts=4, num_experts_per_tok=2)),
        "chunks": Llama4ForCausalLM(Llama4TextConfig(
            **small, head_dim=16, attention_chunk_size=9, num_local_experts=4,
            num_experts_per_tok=1, intermediate_size_mlp=64, no_rope_layers=[1, 0])),
    }  # fmt: skip
    models["sinks"].apply(draw_sinks)
    for name, model in models.items():
        model.save_pretrained(folder / name)
    save_qwen3(folder / "gqa", num_hidden_layers=LAYERS)
    save_qwen3(folder / "mqa", num_key_value_heads=1, tie_word_embeddings=False)
    save_qwen3(folder / "odd", num_attention_heads=12, num_key_value_heads=4, head_dim=8)
    return str(folder)


def draw_sinks(module):
    """Sinks that matter, each head's another; they are near 0 at first."""
    if hasattr(module, "sinks"):
        module.sinks.data = torch.linspace(-1.0, 2.0, len(module.sinks))


def batch_of(name):
    """whole: 168 tokens, some sequences all masked. long: one above all others, 107 tokens. few:
    fewer tokens than ranks. prompts: as whole, with shared beginnings of 6, 11 and 2 tokens."""
    if name == "whole":
        return whole_batch()
    if name == "prompts":
        return with_shared_prompts(whole_batch(seed=5), [(3, 6), (2, 11), (4, 2)])
    batch = whole_batch(seed=7)
    lens = torch.tensor({"long": [97, 2, 3, 5], "few": [3]}[name])
    n = int(lens.sum())
    cut = {key: value[:n] for key, value in batch.tensors() if len(value) == sum(LENS)}
    cut |= {key: value[: len(lens)] for key, value in batch.tensors() if key not in cut}
    part = replace(batch, **cut, cu_seqlens=lengths_to_cu_seqlens(lens))
    part.loss_mask[part.cu_seqlens[:-1]] = 0
    part.loss_mask[1] = 1
    part.loss_weights = part.loss_mask / part.loss_mask.sum()
    return part


def case(model, kind, ranks, batch="whole", **settings):
    return model, kind, ranks, batch, replace(PLAIN, **settings)


CASES = [
    case("gqa", "policy", 4, ulysses=4, micro_batch_tokens=5),  # two ranks have a key-value head
    case("gqa", "value", 4, ulysses=2, activation_checkpointing=True),
    case("gqa", "policy", 4, ulysses=2, fsdp=2),  # two copies of the weights
    case("gqa", "policy", 4, "few", ulysses=4),
    case("gqa", "policy", 4, "few", ulysses=2),  # the other two get stand-ins
    case("mqa", "policy", 4, "long", ulysses=4),
    case("mqa", "value", 2, "long", ulysses=2, micro_batch_tokens=2),
    case("odd", "policy", 3, ulysses=3),
    case("odd", "policy", 4, "long", ulysses=4),
    case("window", "policy", 2, ulysses=2),
    case("moe", "policy", 4, ulysses=4),
    case("mla", "policy", 2, ulysses=2, activation_checkpointing=True),
    case("sinks", "policy", 4, ulysses=4),  # a sink belongs to a head, not to a rank
    case("sinks", "policy", 2, "prompts", ulysses=2),
    case("chunks", "policy", 2, "long", ulysses=2),
    case("gqa", "policy", 4, "prompts", ulysses=2, micro_batch_tokens=40),
    case("gqa", "value", 4, "prompts", ulysses=4, activation_checkpointing=True),
    case("window", "policy", 2, "prompts"),
    case("moe", "policy", 2, "prompts", ulysses=2),
    case("mla", "policy", 3, "prompts", micro_batch_tokens=1000),
]


PLACES = {}  # by the number of ranks


def engine_on(topology, folder, case):
    """On the first of the ranks; the head of values is not 0, so that gradients flow through it.
    Returns it and this rank's sequences: those of the last team get none where there are three."""
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.fsdp.engine import FsdpEngine

    model, kind, ranks, batch, config = case
    if ranks not in PLACES:  # whose groups serve for all engines on as many ranks
        PLACES[ranks] = Topology.build(topology.device, range(ranks), dp=-1)
    share = PLACES[ranks]
    place = Topology.build(topology.device, range(ranks), share, **train_degrees(config))
    if not place.here:
        return None, batch_of(batch).select([])
    engine = FsdpEngine.build(kind, str(Path(folder, model)), config, place)
    if kind == "value":
        with torch.no_grad():
            engine.module.value_head.weight.fill_(0.05)
    own, whole = place.data_ranks, batch_of(batch)
    given = []
    if topology.rank in own:
        place = own.index(topology.rank)
        given = list(range(whole.num_seqs))[place :: len(own)]
        if batch == "prompts":  # a group stays together
            given = [i for i in range(whole.num_seqs) if int(whole.groups[i]) % len(own) == place]
    return engine, whole.select(given)


def loss_of(kind):
    from spmdrl.algo.objectives import policy_objective, value_objective

    algo = AlgoConfig(entropy_coef=0.01, policy_loss="gspo")
    return policy_objective(algo) if kind == "policy" else value_objective(algo)


def watched(engine):
    """Full gradients of the last update, filled in by the optimizer's step."""
    grads, step = {}, engine.optimizer.step

    def look_and_step():
        for name, p in engine.module.named_parameters():
            grads[name] = p.grad.full_tensor().clone()
        step()

    engine.optimizer.step = look_and_step
    return grads


def results_on(topology, folder, cases):
    """Of each case what a pass finds of this rank's sequences, metrics and gradients of an update,
    metrics of a second one; None on ranks outside."""
    results = []
    for case in cases:
        engine, batch = engine_on(topology, folder, case)
        if engine is None:
            results.append(None)
            continue
        kind = case[1]
        if kind == "policy":
            found = engine.logprobs(batch, 0.8, True)[:3]  # the rest is of the most probable tokens
        else:
            found = [engine.values(batch)]
        grads = watched(engine)
        first = engine.update(batch, loss_of(kind), temperature=0.8)
        grads = dict(grads)
        second = engine.update(batch, loss_of(kind), temperature=0.8)
        addresses = batch.cu_seqlens.diff().tolist(), batch.token_ids.tolist()
        results.append((addresses, torch.stack(list(found)), [first, second], grads))
    return results


def by_sequence(results):
    """{token ids of a sequence: what was found of it}, from all ranks."""
    table = {}
    for (lens, tokens), found, *_ in results:
        ids = torch.tensor(tokens).split(lens)
        for sequence, columns in zip(ids, found.split(lens, dim=1), strict=True):
            assert tuple(sequence.tolist()) not in table  # no rank answers for another
            table[tuple(sequence.tolist())] = columns
    return table


@pytest.mark.ranks
@pytest.mark.strict_nccl
def test_numbers_do_not_depend_on_how_many_ranks_share(runs):
    (first,), every = runs["alone"], runs["shared"]
    for case, rank0 in zip(CASES, first, strict=True):
        results = [r[CASES.index(case)] for r in every if r[CASES.index(case)] is not None]
        assert len(results) == case[2]
        want, got = by_sequence([rank0]), by_sequence(results)
        assert want.keys() == got.keys()
        for key, columns in want.items():
            torch.testing.assert_close(got[key], columns, rtol=1e-6, atol=1e-6)
        for _, _, metrics, grads in results:
            for now, then in zip(metrics, rank0[2], strict=True):
                assert now.keys() == then.keys()
                for name, value in then.items():
                    assert now[name] == pytest.approx(value, rel=2e-6, abs=3e-7), (case, name)
            for name, grad in rank0[3].items():
                error = (grads[name] - grad).norm() / grad.norm().clamp(min=1e-9)
                # three tokens: attention's gradient is a small difference of large numbers
                assert error < (3e-6 if case[3] == "few" else 1e-6), (case, name, error)


def exchanges_on(topology, folder, checkpointing):
    """(how often, of how many bytes) tokens and heads are exchanged in an update; gathers of hidden
    states would be seen as such."""
    import torch.distributed as dist

    batch = "long"
    engine, own = engine_on(topology, folder, case(
        "gqa", "policy", 4, batch, ulysses=4, micro_batch_tokens=64,
        activation_checkpointing=checkpointing,
    ))  # fmt: skip
    sizes, real = [], dist.all_to_all_single

    def counted(out, rows, group):
        sizes.append(rows.numel())
        real(out, rows, group=group)

    dist.all_to_all_single = counted
    try:
        engine.update(own, loss_of("policy"), 1.0)
    finally:
        dist.all_to_all_single = real
    return sizes


@pytest.mark.ranks
@pytest.mark.strict_nccl
def test_two_exchanges_a_layer_and_pass(runs):
    tokens = 27 * 4  # of 107
    attention = tokens // 4 * 4 * 32  # 4 heads of 32 for its own tokens
    projected = attention + tokens // 4 * 2 * 4 * 32  # a key-value head to each rank
    for sizes in runs["exchanges"]:
        assert sizes == [projected, attention] * LAYERS + [attention, projected] * LAYERS
    for sizes in runs["recomputed"]:
        assert len(sizes) == 6 * LAYERS
        assert sum(sizes) == 3 * LAYERS * (projected + attention)


def checkpoint_on(topology, folder, target):
    """Saved by teams of 2 after an update, loaded by one of 4; metrics of the update after that."""
    metrics, target = [], Path(target)
    for degree in (2, 4):
        engine, batch = engine_on(
            topology, folder, case("mqa", "policy", 4, ulysses=degree, offload_params=True)
        )
        if degree == 2:
            engine.update(batch, loss_of("policy"), 1.0)
            if topology.rank == 0:
                target.mkdir()
            torch.distributed.barrier()
            engine.save(target)
        else:
            engine.load(target)
        engine.offload()
        engine.onload()
        weights = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
        metrics.append((engine.update(batch, loss_of("policy"), 1.0), weights))
    return metrics


@pytest.mark.ranks
@pytest.mark.strict_nccl
def test_another_number_of_ranks_goes_on_from_a_checkpoint(runs):
    for (want, before), (got, after) in runs["checkpoint"]:
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        assert got == pytest.approx(want, rel=1e-6, abs=1e-7)


def bf16_on(topology, folder):
    """Policy logprobs twice: before an update as the policy that sampled, and in it."""
    engine, batch = engine_on(
        topology, folder, case("gqa", "policy", 4, ulysses=4, dtype="bfloat16")
    )
    batch.old_logprobs = engine.logprobs(batch, temperature=0.8).logprobs
    return engine.update(batch, loss_of("policy"), temperature=0.8)


@pytest.mark.ranks
@pytest.mark.strict_nccl
def test_on_policy_the_ratio_is_one_in_half_precision(runs):
    for metrics in runs["bf16"]:
        assert (metrics["ratio_max"], metrics["ppo_kl"]) == (1.0, 0.0)
        assert metrics["grad_norm"] == pytest.approx(
            runs["alone"][0][0][2][0]["grad_norm"], rel=0.05
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{case: what each rank got}; one start on four ranks."""
    folder = save_models(tmp_path_factory.mktemp("models"))
    plain = replace(PLAIN, shared_prefix=False)
    alone = [(model, kind, 1, batch, plain) for model, kind, _, batch, _ in CASES]
    calls = {
        "alone": (results_on, (folder, alone)),
        "shared": (results_on, (folder, CASES)),
        "exchanges": (exchanges_on, (folder, False)),
        "recomputed": (exchanges_on, (folder, True)),
        "checkpoint": (checkpoint_on, (folder, folder + "/checkpoint")),
        "bf16": (bf16_on, (folder,)),
    }
    found = dict(zip(calls, run_calls(4, calls.values(), timeout_s=240), strict=True))
    found["alone"] = found["alone"][:1]
    return found


# ---- without ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12])
def test_every_query_meets_its_key_value_head(ranks):
    from spmdrl.engines.fsdp.ulysses import dealt_kv_heads

    for heads in range(ranks, 49, ranks):
        for kv_heads in (k for k in range(1, heads + 1) if heads % k == 0):
            dealt, here = dealt_kv_heads(heads, kv_heads, ranks), heads // ranks
            each = len(dealt) // ranks
            for query in range(heads):
                rank, number = divmod(query, here)
                place = rank * each + number // (here // each)  # as grouped attention counts
                assert dealt[place] == query // (heads // kv_heads)
            if kv_heads % ranks == 0:
                assert dealt == list(range(kv_heads))
            elif ranks % kv_heads == 0:
                assert each == 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_shares_are_equal_and_make_up_the_micro_batch(size):
    from spmdrl.data.shared_prefix import single_units
    from spmdrl.engines.fsdp.ulysses import SequenceParallelGroup, share_of

    cpu = torch.device("cpu")
    for name in ("whole", "long", "few"):
        mb = batch_of(name)
        parts = [
            share_of(mb, single_units(mb), team, cpu)
            for rank in range(size)
            for team in [SequenceParallelGroup(None, size, rank) if size > 1 else None]
        ]
        assert len({len(part.token_ids) for part in parts}) == 1
        tokens = torch.cat([part.token_ids for part in parts])
        assert torch.equal(tokens[: mb.num_tokens], mb.token_ids)
        assert int(parts[0].seq_lens.sum()) == len(tokens) < mb.num_tokens + size
        firsts = torch.cat([part.positions for part in parts]) == 0
        assert torch.equal(
            firsts.nonzero().flatten(), lengths_to_cu_seqlens(parts[0].seq_lens)[:-1]
        )
        rows = torch.cat([part.rows for part in parts])
        assert torch.equal(rows, mb.loss_mask.nonzero().flatten())
        for rank, part in enumerate(parts):
            assert torch.equal(part.states + rank * len(part.token_ids) + 1, part.rows)


def test_a_topology_of_teams():
    from spmdrl.distributed.topology import train_degrees

    assert train_degrees(TrainConfig(ulysses=2)) == {"dp": 1, "fsdp": -1, "sp": 2}
    assert train_degrees(TrainConfig(ulysses=2, fsdp=4)) == {"dp": -1, "fsdp": 2, "sp": 2}
    for settings in ({"ulysses": 2, "fsdp": 3}, {"ulysses": 0}, {"ulysses": -1}):
        with pytest.raises(ConfigError, match="multiple of ulysses"):
            train_degrees(TrainConfig(**settings))
