"""8-bit AdamW, Muon and the moving average on real ranks: what they compute, keep and resume."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
import tiny_megatron_models
import torch
from ranks import run_calls
from tiny_models import CHARS, save_qwen3, save_tokenizer
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_batches import engine_on, whole_batch

from spmdrl.config import ConfigError, OptimConfig, TrainConfig

pytestmark = pytest.mark.ranks

NAMES = ("adamw", "adamw8bit", "muon")
LR, DECAY = 2e-3, 0.8
# of 3 ranks one holds less of 128 rows and nothing of 4 experts
MOE = {"num_hidden_layers": 1, "num_local_experts": 4, "hidden_size": 64, "head_dim": 32}


def config_of(name, **changes):
    settings = {"dtype": "float32", "micro_batch_tokens": 300, "ema": DECAY} | changes
    optim = OptimConfig(
        name=name, lr=LR, weight_decay=0.1, clip_norm=0.5, schedule="linear", decay_steps=9
    )
    return TrainConfig(**settings, optim=optim)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_qwen3(folder / "dense", hidden_size=96, intermediate_size=160, num_hidden_layers=1)
    tiny_megatron_models.save_model(
        "qwen3_moe", folder / "moe", **MOE, vocab_size=len(CHARS), eos_token_id=2, bos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    save_tokenizer(folder / "moe")
    return folder


def likelihood(logprobs, entropy, mb):
    return -(logprobs * mb.loss_weights).sum(), {}


def built(topology, model, config, kind="policy"):
    torch.manual_seed(1)
    return engine_on(topology, kind, str(model), config, share=topology)


def learn(engine, topology, steps):
    mine = list(range(topology.rank, 9, topology.world))
    results = []
    for step in range(steps):
        batch = whole_batch(seed=step % 3).select(mine)
        results.append(engine.update(batch, likelihood, 1.0))
    return results


@torch.no_grad()
def full(tensor):
    """Of a sharded one, a copy."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def named(tensors):
    return {name.removeprefix("hf."): full(tensor) for name, tensor in tensors.items()}


def kept(engine):
    """Everything a checkpoint has of the optimizer and the average, whole."""
    state = {"average": engine.average}
    for name, moments in engine.optimizer.state_dict().items():
        for key, value in moments.items():
            state[f"{name}.{key}"] = value if isinstance(value, dict) else {"": value}
    return {(a, b): full(t) for a, tensors in state.items() for b, t in tensors.items()}


def state_bytes(engine):
    """Of the tensors that the optimizer holds on this rank, but for tables of 1 KiB each."""
    total = 0
    for state in engine.optimizer.state.values():
        for value in state.values():
            held = value.to_local() if hasattr(value, "to_local") else value
            parts = [held.codes, held.scale] if hasattr(held, "codes") else [held]
            total += sum(part.nbytes for part in parts)
    return total


# ---- what they compute


def history_on(topology, model, config, steps=3, kind="policy"):
    """Weights before and after every step, and the clipped gradients that it took."""
    engine = built(topology, model, config, kind)
    weights, gradients = [named(engine.trained)], []
    step = engine.optimizer.step

    def watched():
        gradients.append(named({name: p.grad for name, p in engine.trained.items()}))
        step()
        weights.append(named(engine.trained))

    engine.optimizer.step = watched
    metrics = learn(engine, topology, steps)
    rates = [row["lr"] for row in metrics]
    return weights, gradients, rates, named(engine.average), [row["loss"] for row in metrics]


def reference_orthogonal(matrix):
    """Newton-Schulz as in https://kellerjordan.github.io/posts/muon, float64."""
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return x


def matrices_of(name, weight):
    """Views of the matrices that Muon is to find in a weight; none where it is AdamW's."""
    if "layers." not in name or name.endswith("bias") or weight.dim() < 2:
        return []
    if weight.dim() == 2:
        return [weight]
    experts = list(weight)
    return [half for e in experts for half in e.chunk(2)] if "gate_up" in name else experts


def reference_muon(weights, gradients, rates, decay=0.1, mu=0.95):
    """All steps in float64, from the gradients that the engine had."""
    now = {name: w.double() for name, w in weights.items()}
    momentum = {name: torch.zeros_like(w) for name, w in now.items()}
    second = {name: torch.zeros_like(w) for name, w in now.items()}
    for t, (given, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        for name, w in now.items():
            g = given[name].double()
            if matrices_of(name, w):
                momentum[name] = mu * momentum[name] + (1 - mu) * g
                update = (1 - mu) * g + mu * momentum[name]
                w.mul_(1 - lr * decay)
                parts = zip(matrices_of(name, w), matrices_of(name, update), strict=True)
                for matrix, change in parts:
                    change = reference_orthogonal(change)
                    matrix -= lr * 0.2 * sqrt(max(matrix.shape)) * change
                continue
            momentum[name] = 0.9 * momentum[name] + 0.1 * g
            second[name] = 0.999 * second[name] + 0.001 * g**2
            w.mul_(1 - lr * decay * (w.dim() > 1))
            root = (second[name] / (1 - 0.999**t)).sqrt() + 1e-8
            w -= lr * momentum[name] / (1 - 0.9**t) / root
    return now


WORLDS = (1, 2, 3)
MUON_CASES = [(world, model) for world in WORLDS for model in ("dense", "moe")] + [(1, "value")]


@pytest.mark.parametrize(("world", "model"), MUON_CASES)
def test_muon_is_the_plain_loop_in_float64(runs, world, model):
    for weights, gradients, rates, _, _ in runs[world, "history", "muon", model]:
        want = reference_muon(weights[0], gradients, rates)
        assert rates[0] == LR > rates[-1] > 0
        for name, w in want.items():
            moved = (w - weights[0][name]).norm()
            # a gradient of few tokens has directions of pure rounding, which are amplified
            assert (weights[-1][name] - w).norm() < 1e-3 * moved, (name, moved)


@pytest.mark.parametrize("name", NAMES)
def test_results_do_not_depend_on_how_many_ranks_there_are(runs, name):
    weights, _, _, average, losses = runs[1, "history", name, "dense"][0]
    others = [key for key in runs if key[1:3] == ("history", name) and "dense" in key[3]]
    assert len(others) == 4  # 1, 2 and 3 ranks, and two replicas
    for key in others:
        for got, _, _, got_average, got_losses in runs[key]:
            assert got_losses == pytest.approx(losses, rel=1e-5)
            for mine, theirs in ((got[-1], weights[-1]), (got_average, average)):
                for weight, value in theirs.items():
                    difference = (mine[weight] - value).abs()
                    # a last bit may turn a code, and so a moment by a percent or two
                    assert difference.max() < (2e-4 if name == "adamw8bit" else 2e-5), key
                    turned = (difference > 2e-6).float().mean()
                    assert turned < 0.02, (key, weight, turned)


@pytest.mark.parametrize("name", NAMES)
def test_the_average_is_the_closed_form(runs, name):
    for world in WORLDS:
        weights, _, _, average, _ = runs[world, "history", name, "dense"][0]
        steps = len(weights) - 1
        for weight, value in average.items():
            want = DECAY**steps * weights[0][weight].double()
            for t in range(1, steps + 1):
                want += (1 - DECAY) * DECAY ** (steps - t) * weights[t][weight].double()
            torch.testing.assert_close(value.double(), want, rtol=0, atol=3e-7)


def test_muon_in_bfloat16_is_the_librarys():
    from spmdrl.engines.fsdp.muon import Muon

    generator = torch.Generator().manual_seed(5)
    for shape in ((96, 40), (40, 96), (7, 7), (3, 130)):
        start = torch.randn(shape, generator=generator)
        mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
        whole = ((slice(None), slice(None)),)
        ours = Muon([(mine, whole)], 0.01, 0.9, 0.3, torch.bfloat16)
        library = torch.optim.Muon(
            [theirs], 0.01, 0.3, 0.9, nesterov=True, adjust_lr_fn="match_rms_adamw"
        )
        for _ in range(3):
            mine.grad = torch.randn(shape, generator=generator)
            theirs.grad = mine.grad.clone()
            ours.step()
            library.step()
        moved = (theirs - start).norm()
        assert (mine - theirs).norm() < 0.02 * moved, shape


def long_on(topology, model):
    """Losses of 12 steps and the bytes of the state, by optimizer."""
    found = {}
    for name in NAMES:
        engine = built(topology, model, config_of(name, ema=0.0))
        engine.config = replace(
            engine.config, optim=replace(engine.config.optim, schedule="constant")
        )
        losses = [row["loss"] for row in learn(engine, topology, 12)]
        found[name] = losses, state_bytes(engine)
    return found


def test_eight_bits_follow_float32_in_a_quarter_of_the_memory(runs):
    for found in runs[2, "long"]:
        (exact, exact_bytes), (eight, eight_bytes) = found["adamw"], found["adamw8bit"]
        assert exact[-1] < 0.8 * exact[0]
        assert exact != eight
        for a, b in zip(exact, eight, strict=True):
            assert b == pytest.approx(a, rel=0.03)
        assert eight_bytes < 0.3 * exact_bytes
        muon, muon_bytes = found["muon"]
        assert muon[-1] < 0.9 * muon[0]
        assert 0.5 < muon_bytes / exact_bytes < 0.6


def test_the_plan_knows_what_is_kept(runs, models):
    from spmdrl.engines.fsdp.optimizers import state_bytes
    from spmdrl.hub.hf_folder import load_hf_config, meta_model

    hf = load_hf_config(str(models / "dense"))
    for name in NAMES:
        measured = sum(found[name][1] for found in runs[2, "long"])
        assert state_bytes(meta_model(hf), {}, name) == pytest.approx(measured, rel=0.01), name


class DTensorOperations(TorchDispatchMode):
    """Notes the operations that are given a DTensor."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += [str(func)] if any(issubclass(kind, DTensor) for kind in types) else []
        return func(*args, **(kwargs or {}))


def dispatched_on(topology, model):
    """The operations on DTensors of one such sum, then of clipping and AdamW's step."""
    from spmdrl.engines.fsdp.sharding import clip_gradients

    engine = built(topology, model, config_of("adamw", ema=0.0))
    clipped = []

    def step():
        with DTensorOperations() as operations:
            clipped.append(float(clip_gradients(engine.params, 1e-3, engine.topology)))
            plain()
        clipped.append(operations.seen)

    plain, engine.optimizer.step = engine.optimizer.step, step
    with DTensorOperations() as control, torch.no_grad():
        engine.params[0] + 0
    learn(engine, topology, 1)
    return control.seen, *clipped


def test_clipping_and_adamw_ask_dtensor_for_nothing(runs):
    """It would look for a sharding of each operation on each shape."""
    for control, norm, seen in runs[2, "dispatched"]:
        assert control and norm > 1e-3  # so gradients were scaled
        assert seen == []


# ---- checkpoints


def saved_on(topology, model, folder, name):
    """Two steps, a checkpoint, two more; and what another run makes of the checkpoint."""
    config = config_of(name, offload_optimizer=True, offload_params=True)
    engine = built(topology, model, config)
    engine.offload()
    before = kept(engine)
    engine.onload()
    learn(engine, topology, 2)
    engine.offload()
    if topology.rank == 0:
        Path(folder).mkdir()
    torch.distributed.barrier()
    engine.save(Path(folder))
    at_save = kept(engine)
    engine.onload()
    rest = learn(engine, topology, 2)
    resumed = loaded_on(topology, model, folder, name)
    return before, at_save, rest, kept(engine), named(engine.trained), resumed


def loaded_on(topology, model, folder, name):
    engine = built(topology, model, config_of(name))
    engine.load(Path(folder))
    at_load = kept(engine)
    rest = learn(engine, topology, 2)
    return at_load, rest, kept(engine), named(engine.trained)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("case", [*((2, "saved", name) for name in NAMES), (3, "saved", "moe")])
def test_resume_is_bit_for_bit(runs, case):
    for before, at_save, rest, state, weights, resumed in runs[case]:
        assert before.keys() == at_save.keys()
        assert not same(before, at_save)
        assert ("average", "hf.model.norm.weight") in at_save
        at_load, other_rest, other_state, other_weights = resumed
        assert same(at_save, at_load)
        assert rest == other_rest
        assert same(state, other_state)
        assert same(weights, other_weights)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [1, 3])
def test_a_checkpoint_loads_on_another_number_of_ranks(runs, name, world):
    _, at_save, rest, _, weights, _ = runs[2, "saved", name][0]
    for at_load, other_rest, _, other_weights in runs[world, "loaded", name]:
        assert same(at_save, at_load)  # codes and scales too
        for want, got in zip(rest, other_rest, strict=True):
            assert got == pytest.approx(want, rel=1e-4)
        for weight, value in weights.items():
            atol = 2e-4 if name == "adamw8bit" else 2e-5
            torch.testing.assert_close(other_weights[weight], value, rtol=0, atol=atol)


def refused_on(topology, model, folder):
    """What is said when a checkpoint of each optimizer meets each other one."""
    said = {}
    for runs_with in NAMES:
        engine = built(topology, model, config_of(runs_with, ema=0.0))
        for wrote in NAMES:
            try:
                engine.load(Path(folder, wrote))
                said[wrote, runs_with] = ""
            except ConfigError as error:
                said[wrote, runs_with] = str(error)
    return said


def test_another_optimizers_checkpoint_is_refused_by_name(runs):
    for (wrote, runs_with), words in runs[1, "refused"][0].items():
        if wrote == runs_with:
            assert words == ""
        else:
            assert f"written with optim.name={wrote!r}, and this run has {runs_with!r}" in words


def late_average_on(topology, model, folder):
    """A checkpoint without an average, taken up by a run that has one."""
    plain = built(topology, model, config_of("adamw", ema=0.0))
    learn(plain, topology, 1)
    Path(folder, "plain").mkdir(exist_ok=True)
    plain.save(Path(folder, "plain"))
    engine = built(topology, model, config_of("adamw"))
    learn(engine, topology, 2)
    engine.load(Path(folder, "plain"))
    return named(plain.trained), named(engine.average)


def test_an_average_may_begin_at_a_checkpoint(runs):
    weights, average = runs[1, "late average"][0]
    assert same(weights, average)


def nan_on(topology, model, name):
    engine = built(topology, model, config_of(name))
    learn(engine, topology, 1)
    before = kept(engine), named(engine.trained)
    batch = whole_batch().select([topology.rank])
    with pytest.raises(FloatingPointError, match="update 2"):
        engine.update(batch, lambda *a: (likelihood(*a)[0] * float("inf"), {}), 1.0)
    return same(before[0], kept(engine)) and same(before[1], named(engine.trained))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_moves_where_the_loss_is_not_finite(runs, name):
    assert runs[2, "nan", name] == [True, True]


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):
    """{(world, case, ...): what each rank got}; 2 ranks write what 1 and 3 load."""
    folder = tmp_path_factory.mktemp("checkpoints")
    dense, moe = models / "dense", models / "moe"
    calls = {(2, "long"): (long_on, (dense,)), (2, "dispatched"): (dispatched_on, (dense,))}
    for name in NAMES:
        for world in WORLDS:
            calls[world, "history", name, "dense"] = (history_on, (dense, config_of(name)))
        replicas = config_of(name, fsdp=1)
        calls[2, "history", name, "dense replicas"] = (history_on, (dense, replicas))
        calls[2, "saved", name] = (saved_on, (dense, folder / name, name))
        calls[2, "nan", name] = (nan_on, (dense, name))
        for world in (1, 3):
            calls[world, "loaded", name] = (loaded_on, (dense, folder / name, name))
    for world in WORLDS:
        calls[world, "history", "muon", "moe"] = (history_on, (moe, config_of("muon")))
    calls[3, "saved", "moe"] = (saved_on, (moe, folder / "moe", "adamw8bit"))
    calls[1, "history", "muon", "value"] = (history_on, (dense, config_of("muon"), 3, "value"))
    calls[1, "refused"] = (refused_on, (dense, folder))
    calls[1, "late average"] = (late_average_on, (dense, folder))
    found = {}
    for world in (2, 1, 3):
        here = {key: call for key, call in calls.items() if key[0] == world}
        found |= zip(here, run_calls(world, here.values()), strict=True)
    return found


def test_adamw_takes_what_the_fused_kernel_wants(qwen3, topology, monkeypatch):
    """The kernel of GPUs wants weight, gradient and moments of one shape, stride and dtype, and the
    number of steps where the weight is. This test runs on a CPU, where the step is not fused."""
    from training_batches import CONFIG, engine_on, whole_batch

    from spmdrl.algo.objectives import policy_objective
    from spmdrl.config import AlgoConfig
    from spmdrl.engines.fsdp import optimizers

    calls = []

    def adamw(params, grads, *, exp_avgs, exp_avg_sqs, state_steps, fused, **settings):
        calls.append((params, grads, exp_avgs, exp_avg_sqs, state_steps, fused))

    monkeypatch.setattr(optimizers, "adamw", adamw)
    engine = engine_on(topology, "policy", str(qwen3), CONFIG, share=topology)
    engine.update(whole_batch(), policy_objective(AlgoConfig()), 1.0)
    assert sum(len(call[0]) for call in calls) == len(engine.params) > 10
    for *rows, steps, fused in calls:
        assert fused is False
        for weight, *others in zip(*rows, strict=True):
            for other in others:
                assert (other.shape, other.stride(), other.dtype) == (
                    weight.shape, weight.stride(), weight.dtype,
                )  # fmt: skip
        assert all(
            step.device == weight.device for step, weight in zip(steps, rows[0], strict=True)
        )
