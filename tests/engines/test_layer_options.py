"""Checkpointing, offloading, compiling and other layers change time and memory, not results."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_calls

from spmdrl.config import AlgoConfig, OptimConfig, TrainConfig
from spmdrl.data.packing import empty_batch

pytestmark = pytest.mark.ranks

CONFIG = TrainConfig(dtype="float32", micro_batch_tokens=60, optim=OptimConfig(clip_norm=1e9))
OPTIONS = {
    "full": {"activation_checkpointing": True},
    "selective": {"activation_checkpointing": "selective"},
    "offload": {"activation_offload": True},
    "torch": {"kernels": "torch"},
    "compile": {"compile": True},
}
PAIRS = [
    ("full", "offload"), ("selective", "offload"), ("full", "torch"), ("selective", "torch"),
    ("offload", "torch"), ("compile", "torch"), ("compile", "selective", "offload"),
]  # fmt: skip
CASES = [*((name,) for name in OPTIONS), *PAIRS]
KEPT: dict[str, Any] = {}  # of this rank: the engine of ("compile",), for `graphs_on`
LENS = [20, 33, 7, 12, 41, 3, 18, 25, 9, 2]


def config_of(case):
    return replace(CONFIG, **{k: v for name in case for k, v in OPTIONS[name].items()})


def engine_on(topology, kind, model, config, frozen=False):
    """An engine whose options run although this is a CPU. Of several ranks the first one compiles,
    since it takes its time: what its layers compute meets the other's in every collective.
    """
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.fsdp import layers
    from spmdrl.engines.fsdp.engine import FsdpEngine

    layers.check_here, layers.BACKEND = lambda *args: None, "aot_eager"
    config = replace(config, compile=config.compile and topology.rank == 0)
    ranks = Topology.build(topology.device, share=topology, **train_degrees(config))
    return FsdpEngine.build(kind, str(model), config, ranks, frozen)


def batch_on(topology):
    draw = torch.Generator().manual_seed(int(os.environ["MASTER_PORT"]))  # of its own in every run
    batch = empty_batch(torch.tensor(LENS))
    size = batch.num_tokens
    batch.token_ids = torch.randint(3, 60, (size,), generator=draw)
    batch.loss_mask = (torch.rand(size, generator=draw) > 0.2).float()
    batch.loss_mask[batch.cu_seqlens[:-1]] = 0
    for name in ("advantages", "values", "returns"):
        setattr(batch, name, torch.randn(size, generator=draw) * batch.loss_mask)
    batch.rollout_logprobs = -torch.rand(size, generator=draw) * batch.loss_mask
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch.select(list(range(topology.rank, len(LENS), topology.world)))


def gradients_of(engine, kind, batch):
    """Metrics and full gradients of one update."""
    from spmdrl.algo.objectives import policy_objective, value_objective

    found = {}

    def step():  # in place of Adam's
        named = engine.module.named_parameters()
        found.update({n: p.grad.full_tensor().clone() for n, p in named})

    engine.optimizer.step = step
    loss_fn = (policy_objective if kind == "policy" else value_objective)(
        AlgoConfig(entropy_coef=0.01)
    )
    return engine.update(batch, loss_fn, 0.8), found


def results_on(topology, model, kind, cases):
    """Of every case the pass without gradient, then an update's metrics and gradients."""
    batch, results = batch_on(topology), []
    for case in cases:
        engine = engine_on(topology, kind, model, config_of(case))
        if kind == "value":  # the head starts at 0, and lets no gradient through
            torch.manual_seed(1)
            torch.nn.init.normal_(engine.module.value_head.weight.to_local())
        looked = engine.logprobs(batch, 0.8)[:2] if kind == "policy" else [engine.values(batch)]
        results.append((torch.stack(list(looked)), *gradients_of(engine, kind, batch)))
        if case == ("compile",):
            KEPT["engine"] = engine
    return results


KINDS = {"policy": [(), *CASES], "value": [(), ("selective", "offload"), ("compile", "full")]}


def cases_of(kind, compiled):
    return [case for case in KINDS[kind] if not case or ("compile" in case) == compiled]


@pytest.fixture(scope="module")
def runs(qwen3):
    model, found = str(qwen3), {}
    for world in (1, 2):
        calls = {
            (world, kind): (results_on, (model, kind, cases_of(kind, compiled=False)))
            for kind in KINDS
        }
        calls[world, "offloaded"] = (offloaded_on, (model,))
        found |= zip(calls, run_calls(world, calls.values()), strict=True)
    return found


@pytest.fixture(scope="module")
def compiled(qwen3):
    """On two ranks."""
    model = str(qwen3)
    calls = {kind: (results_on, (model, kind, cases_of(kind, compiled=True))) for kind in KINDS}
    calls |= {"frozen": (frozen_on, (model,)), "graphs": (graphs_on, ())}
    return dict(zip(calls, run_calls(2, calls.values()), strict=True))


def assert_same(ranks, cases):
    for results in ranks:
        looked, metrics, grads = results[0]
        assert metrics["grad_norm"] > 1e-3
        for case, (also, got, found) in zip(cases[1:], results[1:], strict=True):
            torch.testing.assert_close(also, looked, rtol=1e-5, atol=1e-5, msg=str(case))
            assert got == pytest.approx(metrics, rel=2e-6, abs=2e-6), case
            assert found.keys() == grads.keys()
            for name, want in grads.items():
                away = (found[name] - want).norm() / want.norm()
                assert away < 3e-6, (case, name, away)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_without(runs, world, kind):
    assert_same(runs[world, kind], cases_of(kind, compiled=False))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_results_are_those_without(compiled, kind):
    assert_same(compiled[kind], cases_of(kind, compiled=True))


def frozen_on(topology, model):
    """A reference model with everything on, which keeps nothing and needs none of it."""
    batch = batch_on(topology)
    config = config_of(("compile", "selective", "offload"))
    engines = [engine_on(topology, "policy", model, c, frozen=True) for c in (CONFIG, config)]
    return [engine.logprobs(batch, 1.0).logprobs for engine in engines]


def test_a_frozen_model_takes_them_too(compiled):
    for plain, other in compiled["frozen"]:
        torch.testing.assert_close(other, plain, rtol=1e-5, atol=2e-6)


def offloaded_on(topology, model):
    """How many numbers leave for the CPU, and which weights are among them, either way round."""
    from torch.autograd.graph import save_on_cpu

    from spmdrl.algo.objectives import policy_objective
    from spmdrl.engines.fsdp import activations

    found = []
    for case in (("offload",), ("selective", "offload"), ("full", "offload")):
        sent = []

        class Counted(save_on_cpu):
            def __init__(self, pin_memory, sent=sent):
                super().__init__(pin_memory=pin_memory)
                real, self.pack_hook = self.pack_hook, lambda t: sent.append(t.clone()) or real(t)

        activations.save_on_cpu = Counted
        engine = engine_on(topology, "policy", model, config_of(case))
        engine.optimizer.step = lambda: None
        for param in engine.module.parameters():  # norms are all ones, like other tensors
            torch.nn.init.normal_(param.to_local(), std=0.1)
        weights = [param.full_tensor() for param in engine.module.parameters()]
        loss_fn = policy_objective(AlgoConfig(entropy_coef=0.01))
        engine.update(batch_on(topology), loss_fn, 0.8)
        weights += [weight.t() for weight in weights if weight.dim() == 2]
        theirs = [s.shape for s in sent for weight in weights if torch.equal(s, weight)]
        found.append((sum(s.numel() for s in sent), theirs))
    activations.save_on_cpu = save_on_cpu
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_activations_leave_and_weights_stay(runs, world):
    for (everything, weights), (some, _), (inputs, also) in runs[world, "offloaded"]:
        assert 0 < inputs <= some < everything / 3
        assert weights == also == []


def graphs_on(topology):
    """How many this process has, after all cases before and after each batch of another size."""
    from torch._dynamo.utils import counters

    engine, counts, whole = KEPT["engine"], [], batch_on(topology)
    for number in range(2 * whole.num_seqs - 1):
        some = list(range(number, whole.num_seqs)) or [number - whole.num_seqs]
        gradients_of(engine, "policy", whole.select(some))
        engine.logprobs(whole.select(some), 1.0)
        counts.append(counters["stats"]["unique_graphs"])
    return counts


def test_other_sizes_need_no_other_code(compiled):
    for counts in compiled["graphs"][:1]:
        # before and after attention, with and without gradient; again where a layer's input has
        # none, where attention's output is another kind of view, for kernels="torch"
        assert 4 <= counts[-1] <= 40, counts
        assert counts[-1] == counts[2], counts
