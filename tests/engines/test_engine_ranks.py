"""The training engine on real gloo ranks: results do not depend on how the work is split."""

from dataclasses import replace

import pytest
import torch
from ranks import run_calls
from tiny_models import save_qwen3
from training_batches import CONFIG, engine_on, whole_batch

from spmdrl.algo.own_functions import fault_of
from spmdrl.config import AlgoConfig, OptimConfig

pytestmark = [pytest.mark.ranks, pytest.mark.strict_nccl]


def update_on(topology, kind, model, config, order):
    """Two updates on this rank's stride of the batch; metrics and all weights afterwards."""
    from spmdrl.algo.objectives import policy_objective, value_objective

    engine = engine_on(topology, kind, model, config)
    batch = whole_batch().select(order[topology.rank :: topology.world])
    algo = AlgoConfig(entropy_coef=0.01)
    loss_fn = policy_objective(algo) if kind == "policy" else value_objective(algo)
    metrics = [engine.update(batch, loss_fn, temperature=0.8) for _ in range(2)]
    weights = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
    return metrics, weights


ORDERS = {"given": list(range(9)), "shuffled": [4, 0, 8, 2, 6, 1, 7, 3, 5]}


UPDATES = [
    (1, replace(CONFIG, micro_batch_tokens=1000), "shuffled"),
    (2, replace(CONFIG, micro_batch_tokens=41), "given"),
    (2, replace(CONFIG, fsdp=1), "shuffled"),  # two replicas
    (3, replace(CONFIG, micro_batch_tokens=200, activation_checkpointing=True), "shuffled"),
]


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_updates_do_not_depend_on_ranks_micro_batches_or_order(runs, kind):
    base, weights = runs[1, "update", kind][0]
    for number, (world, config, _) in enumerate(UPDATES):
        results = runs[world, "update", kind, number]
        for metrics, other_weights in results:
            for step, want in zip(metrics, base, strict=True):
                assert step.keys() == want.keys()
                for name in want:
                    assert step[name] == pytest.approx(want[name], rel=1e-6, abs=1e-7), (
                        world, config, name,
                    )  # fmt: skip
            for name, want in weights.items():
                # Adam divides by the root of tiny second moments, which amplifies the last bits
                torch.testing.assert_close(other_weights[name], want, rtol=0, atol=2e-5, msg=name)


def gradient_on(topology, model, config, order):
    engine = engine_on(topology, "policy", model, config)
    batch = whole_batch().select(order[topology.rank :: topology.world])
    from spmdrl.algo.objectives import policy_objective

    grads = {}

    def step():  # in place of Adam's: full gradients before they are zeroed
        for name, p in engine.module.named_parameters():
            grads[name] = (
                p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            ).clone()

    engine.config = replace(config, optim=OptimConfig(clip_norm=1e9))
    engine.optimizer.step = step
    metrics = engine.update(batch, policy_objective(AlgoConfig()), temperature=1.0)
    return metrics, grads


GRADIENTS = [(1, 30), (1, 10_000), (2, 64), (2, 128)]  # (world, micro-batch budget)


def test_gradients_agree_to_1e_6(runs):
    want_metrics, want = runs[1, "gradient"][0]
    for world, budget in GRADIENTS:
        metrics, got = runs[world, "gradient", budget][0]
        assert metrics["loss"] == pytest.approx(want_metrics["loss"], rel=1e-6, abs=1e-7)
        assert metrics["grad_norm"] == pytest.approx(want_metrics["grad_norm"], rel=1e-6)
        for name, g in want.items():
            difference = (got[name] - g).norm() / g.norm()
            assert difference < 1e-6, (world, budget, name, difference)


def on_policy_on(topology, model):
    """Ratio in the first update when old logprobs come from a pass of their own."""
    from spmdrl.algo.objectives import policy_objective

    engine = engine_on(topology, "policy", model, CONFIG)
    batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
    batch.old_logprobs = engine.logprobs(batch, temperature=0.8).logprobs
    return engine.update(batch, policy_objective(AlgoConfig()), temperature=0.8)


@pytest.mark.parametrize("world", [1, 2])
def test_ratio_is_exactly_one_on_policy(runs, world):
    metrics = runs[world, "on policy"][0]
    assert metrics["ratio_max"] == 1.0
    assert metrics["ppo_kl"] == 0.0


def uneven_on(topology, model):
    """Rank 1 has a single sequence, rank 0 many micro-batches, rank 2 nothing at all."""
    from spmdrl.algo.objectives import policy_objective

    engine = engine_on(topology, "policy", model, CONFIG)
    mine = {0: list(range(8)), 1: [8], 2: []}[topology.rank]
    batch = whole_batch().select(mine)
    logprobs = engine.logprobs(batch, 1.0).logprobs
    return logprobs, engine.update(batch, policy_objective(AlgoConfig()), temperature=0.8)


def test_ranks_with_nothing_to_do_take_part(runs):
    base, _ = runs[1, "update", "policy"][0]
    results = runs[3, "uneven"]
    assert [len(logprobs) for logprobs, _ in results] == [159, 9, 0]
    assert results[0][1] == results[2][1]
    assert results[0][1]["logprob_diff_mean"] == pytest.approx(
        base[0]["logprob_diff_mean"], rel=1e-6
    )


def weights_on(topology, model, bucket_bytes):
    engine = engine_on(topology, "policy", model, CONFIG)
    peak = 0
    largest = max(t.numel() for t in engine.params) * 4
    full = {}
    for name, tensor in engine.named_weights(torch.float32, bucket_bytes):
        peak = max(peak, tensor.untyped_storage().nbytes())
        full[name] = tensor.clone()
    return full, peak, largest


BUCKETS = (1, 40_000, 1 << 30)  # bytes


@pytest.mark.parametrize("world", [1, 2, 3])
def test_named_weights_are_the_models_in_bounded_buckets(runs, qwen3, world):
    from transformers import AutoModelForCausalLM

    want = AutoModelForCausalLM.from_pretrained(qwen3).state_dict()
    for bucket_bytes in BUCKETS:
        results = runs[world, "weights", bucket_bytes]
        for full, peak, largest in results:
            assert set(full) == set(want) - {"lm_head.weight"}  # tied
            assert all(torch.equal(full[name], want[name]) for name in full)
            assert peak <= max(bucket_bytes, largest + 4 * 128 * world)  # padding rows


def gathered_on(topology, models):
    """By model and pass: whether embedding and head are gathered while the last layer computes."""
    from spmdrl.algo.objectives import policy_objective

    found = []
    for model in models:
        engine = engine_on(topology, "policy", model, CONFIG)
        hf, seen = engine.module.hf, []

        def note(*_, hf=hf, seen=seen):
            held = (hf.get_input_embeddings().weight, hf.get_output_embeddings().weight)
            seen.append(tuple(not hasattr(weight, "full_tensor") for weight in held))

        hf.model.layers[-1].register_forward_hook(note)
        hf.model.layers[-1].register_full_backward_hook(note)
        batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
        engine.logprobs(batch, 1.0)
        engine.update(batch, policy_objective(AlgoConfig()), temperature=1.0)
        found.append(set(seen))
    return found


def test_an_untied_embedding_is_not_gathered_while_layers_compute(runs):
    for tied, apart in runs[2, "gathered"]:
        assert tied == {(True, True)} and apart == {(False, True)}


def kept_on(topology, model):
    """By reshard_after_forward: whether the first layer is gathered while the last one computes, in
    a pass without gradient, in an update, and in such a pass again; and whether all is given back.
    """
    from spmdrl.algo.objectives import policy_objective

    found = {}
    for reshard in (True, False):
        config = replace(CONFIG, micro_batch_tokens=10_000, reshard_after_forward=reshard)
        engine = engine_on(topology, "policy", model, config)
        layers, seen = engine.module.hf.model.layers, []

        def note(*_, layers=layers, seen=seen):
            seen.append(not hasattr(layers[0].input_layernorm.weight, "full_tensor"))

        layers[-1].register_forward_hook(note)
        batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
        engine.logprobs(batch, 1.0)
        engine.update(batch, policy_objective(AlgoConfig()), temperature=1.0)
        engine.logprobs(batch, 1.0)
        sharded = all(hasattr(p, "full_tensor") for p in engine.module.parameters())
        found[reshard] = (seen, sharded)
    return found


def test_layers_keep_what_they_gathered_until_the_backward_pass(runs):
    for found in runs[2, "kept"]:
        assert found == {
            True: ([False, False, False], True), False: ([False, True, False], True),
        }  # fmt: skip


def nan_on(topology, model):
    engine = engine_on(topology, "policy", model, CONFIG)
    before = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
    batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
    poison = float("nan") if topology.rank == 1 else 1.0

    def loss_fn(logprobs, entropy, mb):
        losses = logprobs * mb.loss_weights * poison
        return losses.sum(), fault_of("my loss", losses, logprobs)

    try:
        engine.update(batch, loss_fn, 1.0)
    except FloatingPointError as error:
        after = dict(engine.named_weights(torch.float32, 1 << 20))
        return str(error), all(torch.equal(before[n], t) for n, t in after.items())
    return None


def test_a_loss_that_is_not_finite_stops_all_ranks_and_keeps_the_weights(runs):
    for result in runs[2, "nan"]:
        assert result is not None
        assert "update 1: loss nan" in result[0]
        assert ", as my loss returned losses that are not finite; the weights" in result[0]
        assert result[1]


def bf16_on(topology, kind, model):
    """Compute in bf16 from float32 weights; the reference is float32 throughout."""
    from spmdrl.algo.objectives import policy_objective, value_objective
    from spmdrl.config import AlgoConfig

    batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
    out = {}
    for dtype in ("float32", "bfloat16"):
        engine = engine_on(topology, kind, model, replace(CONFIG, dtype=dtype))
        passes = {"value": engine.values, "policy": lambda b, e=engine: e.logprobs(b, 1.0)[0]}
        compute = passes[kind]
        loss_fn = (value_objective if kind == "value" else policy_objective)(AlgoConfig())
        first = engine.update(batch, loss_fn, 1.0)
        engine.update(batch, loss_fn, 1.0)
        out[dtype] = (first, compute(batch))
    return out


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_bf16_is_near_float32(runs, kind):
    for out in runs[2, "bf16", kind]:
        (first32, values32), (first16, values16) = out["float32"], out["bfloat16"]
        assert values16.dtype == torch.float32
        assert not torch.equal(values16, values32)
        torch.testing.assert_close(values16, values32, rtol=0.05, atol=0.05)
        assert first16["grad_norm"] == pytest.approx(first32["grad_norm"], rel=0.05)


def untouched_on(topology, model):
    """A pass without gradient and a look at the state must leave no trace."""
    engine = engine_on(topology, "policy", model, replace(CONFIG, dtype="bfloat16"))
    before = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
    engine.logprobs(whole_batch().select([topology.rank]), 1.0)
    state = engine.state_dict()
    after = dict(engine.named_weights(torch.float32, 1 << 20))
    steps = {float(s["step"]) for s in engine.optimizer.state.values()}
    sharded = all(hasattr(p, "to_local") for p in engine.module.parameters())
    return all(torch.equal(before[n], t) for n, t in after.items()), steps, sharded, len(state)


def test_looking_changes_nothing(runs):
    assert runs[2, "untouched"] == [(True, {0.0}, True, 3)] * 2


@pytest.fixture(scope="module")
def runs(qwen3, tmp_path_factory):
    """{(world, case, ...): what each rank got}; each world starts once."""
    model = str(qwen3)
    apart = save_qwen3(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)
    calls = {(1, "gradient"): (gradient_on, (model, CONFIG, ORDERS["given"]))}
    for kind in ("policy", "value"):
        calls[1, "update", kind] = (update_on, (kind, model, CONFIG, ORDERS["given"]))
        for number, (world, config, order) in enumerate(UPDATES):
            args = (kind, model, config, ORDERS[order])
            calls[world, "update", kind, number] = (update_on, args)
        calls[2, "bf16", kind] = (bf16_on, (kind, model))
    for world, budget in GRADIENTS:
        config = replace(CONFIG, micro_batch_tokens=budget)
        calls[world, "gradient", budget] = (gradient_on, (model, config, ORDERS["shuffled"]))
    for world in (1, 2, 3):
        for num_bytes in BUCKETS:
            calls[world, "weights", num_bytes] = (weights_on, (model, num_bytes))
    for world in (1, 2):
        calls[world, "on policy"] = (on_policy_on, (model,))
    calls |= {(3, "uneven"): (uneven_on, (model,)), (2, "nan"): (nan_on, (model,)),
              (2, "untouched"): (untouched_on, (model,)),
              (2, "gathered"): (gathered_on, ([model, str(apart)],)),
              (2, "kept"): (kept_on, (model,))}  # fmt: skip
    found = {}
    for world in (1, 2, 3):
        here = {key: call for key, call in calls.items() if key[0] == world}
        found |= zip(here, run_calls(world, here.values()), strict=True)
    return found
