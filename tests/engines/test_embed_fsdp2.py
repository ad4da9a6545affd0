"""Another program's FSDP2 model: its updates are ours, and the program is left as it was."""

import logging
import os
import pickle
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from embedded_models import refusal, rl_config
from fsdp_hosts import Host, fsdp_host, sft_step, weights_of
from ranks import groups_that_end, run_calls, run_ranks
from tiny_models import save_qwen3, save_qwen3_moe
from training_batches import CONFIG, engine_on, whole_batch

from spmdrl.config import AlgoConfig, ConfigError, OptimConfig, TrainConfig, WeightsConfig
from spmdrl.distributed.progress import PROGRESS

pytestmark = [pytest.mark.ranks, pytest.mark.strict_nccl]

ONE = {"whole": Host(sharded=False), "sharded": Host()}
BF16 = torch.bfloat16
TWO = {
    "a unit's weights are kept, noise, checkpointing": Host(
        reshard_after_forward=False, dropout=0.3, checkpointing=True, attention="eager"
    ),
    "replicas": Host(mesh=(2, 1), divide_factor=1.0),
    "one copy on two axes": Host(mesh=(1, 2), offload=True),
    "a head of its own": Host(own_units=("lm_head", "model.embed_tokens")),
    "norm and head are a unit": Host(own_units=("model.norm", "lm_head"), together=True),
    "bfloat16": Host(param_dtype=BF16),
    "weights in bfloat16": Host(dtype=BF16),
}


def updates_on(topology, model, cases):
    """(this rank's sequences, log-probabilities, metrics of two updates, weights) of each host."""
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.distributed.topology import Topology
    from spmdrl.engines.fsdp.hosted_actor import FsdpActor

    found = []
    for host in cases:
        with groups_that_end():
            hosted, optimizer = fsdp_host(model, host)
            hosted.eval()  # as after an evaluation of the program's
            given = TrainConfig(micro_batch_tokens=64, optim=OptimConfig(clip_norm=0.5))
            actor = FsdpActor(hosted, optimizer, replace(rl_config(model), actor=given))
            everyone = Topology.build(topology.device, hosted=True, dp=-1)
            engine = actor.engine(actor.role(given), everyone)
            found.append(two_updates(engine, topology, policy_objective))
            assert not any(module.training for module in hosted.modules())
            assert hosted.config._attn_implementation == host.attention
            assert "forward" not in vars(hosted)
    return found


def ours_on(topology, model, dtype):
    from spmdrl.algo.objectives import policy_objective

    optim = OptimConfig(lr=1e-3, weight_decay=0.0, clip_norm=0.5)
    config = replace(CONFIG, kernels="torch", dtype=dtype, optim=optim)
    engine = engine_on(topology, "policy", model, config)
    return two_updates(engine, topology, policy_objective)


def two_updates(engine, topology, policy_objective):
    mine = list(range(topology.rank, 9, topology.world))
    batch = whole_batch().select(mine)
    looked = engine.logprobs(batch, 0.8, True)
    loss_fn = policy_objective(AlgoConfig(entropy_coef=0.01))
    metrics = [engine.update(batch, loss_fn, temperature=0.8) for _ in range(2)]
    weights = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
    return looked, metrics, weights


def compare(got, want, case, rtol=1e-4, atol=1e-5):
    for mine, theirs in zip(got[0][:3], want[0][:3], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol, msg=case)
    for mine, theirs in zip(got[1], want[1], strict=True):
        for name in theirs:
            assert mine[name] == pytest.approx(theirs[name], rel=rtol, abs=1e-6), (case, name)
    for name, theirs in want[2].items():
        torch.testing.assert_close(got[2][name], theirs, rtol=0, atol=10 * atol, msg=case + name)


def test_a_hosts_updates_are_those_of_our_engine(tmp_path):
    model = str(save_qwen3(tmp_path, tie_word_embeddings=False))
    experts = str(save_qwen3_moe(tmp_path / "experts"))
    (want,), (got,), (with_experts,), (sharded,) = run_calls(
        1, [(ours_on, (model, "float32")), (updates_on, (model, list(ONE.values()))),
            (ours_on, (experts, "float32")), (updates_on, (experts, [Host()]))],
    )  # fmt: skip
    for case, found in zip(ONE, got, strict=True):
        compare(found, want, case)
    compare(sharded[0], with_experts, "experts")
    both, half, hosts = run_calls(
        2, [(ours_on, (model, "float32")), (ours_on, (model, "bfloat16")),
            (updates_on, (model, list(TWO.values())))],
    )  # fmt: skip
    for rank, found in enumerate(hosts):
        for case, one in zip(TWO, found, strict=True):
            ours = both[rank]
            if case == "bfloat16":
                compare(one, half[rank], case, rtol=1e-3, atol=1e-3)
            elif case == "weights in bfloat16":
                torch.testing.assert_close(one[0].logprobs, ours[0].logprobs, rtol=0, atol=0.1)
                assert one[1][1]["grad_norm"] == pytest.approx(ours[1][1]["grad_norm"], rel=0.1)
            else:
                compare(one, ours, case)


def after_failure_on(topology, model, cases):
    """The weights of each host after a step of the program's own: behind an update that the user's
    loss ends in its second micro-batch, and by itself.
    """
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.distributed.topology import Topology
    from spmdrl.engines.fsdp.hosted_actor import FsdpActor

    found, loss_fn = [], policy_objective(AlgoConfig())
    batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
    for host in cases:
        with groups_that_end():
            hosted, optimizer = fsdp_host(model, host)
            given, calls = TrainConfig(micro_batch_tokens=32), []

            def ends_second(logprobs, entropy, mb, calls=calls):
                calls.append(mb)
                if len(calls) == 2:
                    raise RuntimeError("of the user's loss")
                return loss_fn(logprobs, entropy, mb)

            actor = FsdpActor(hosted, optimizer, replace(rl_config(model), actor=given))
            everyone = Topology.build(topology.device, hosted=True, dp=-1)
            engine = actor.engine(actor.role(given), everyone)
            with pytest.raises(RuntimeError, match="of the user's loss"), actor.driven_by_us():
                engine.update(batch, ends_second, temperature=0.8)
            assert all(p.grad is None for p in hosted.parameters())
            alone, its_optimizer = fsdp_host(model, host)
            for program in ((hosted, optimizer), (alone, its_optimizer)):
                sft_step(*program, 1)
            found.append((weights_of(hosted), weights_of(alone)))
    return found


def test_a_failed_update_leaves_the_programs_next_step_alone(tmp_path):
    """With replicas FSDP2 keeps sums of gradients, and whether to reduce them, beside p.grad."""
    model = str(save_qwen3(tmp_path, tie_word_embeddings=False))
    for found in run_ranks(2, after_failure_on, model, [TWO["replicas"], Host()]):
        for behind, alone in found:
            for name, tensor in alone.items():
                assert torch.equal(behind[name], tensor), name


# ---- whole steps


STEPS = 3
ALGO = AlgoConfig(advantage="grpo", mini_batches=2, kl_coef=0.02, entropy_coef=0.01)


def step_config(model, folder, run_dir, **changes):
    base = rl_config(model, folder, algo=ALGO, run_dir=f"{folder}/{run_dir}", **changes)
    clip = OptimConfig(clip_norm=0.5)
    return replace(base, actor=replace(base.actor, optim=clip), weights=WeightsConfig(check=True))


def program_on(topology, folder, model):
    """Metrics and weights of spmdrl.ppo's own steps."""
    from spmdrl.distributed.phases import Phases
    from spmdrl.training.build import build
    from spmdrl.training.rl import begin, end, run_step
    from spmdrl.training.runtime import Runtime

    config = step_config(model, folder, "ours")
    optim = OptimConfig(lr=1e-3, weight_decay=0.0, clip_norm=0.5)
    role = replace(config.actor, dtype="float32", kernels="torch", optim=optim)
    config = replace(config, actor=role, ref=TrainConfig(dtype="float32"))
    Path(config.run_dir).mkdir(exist_ok=True)
    run = build(config, Runtime(topology, Phases(topology), Path(config.run_dir)))
    begin(run, 0)
    metrics = [run_step(run, number) for number in range(1, STEPS + 1)]
    engine = run.roles.actor.model
    weights = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
    end(run)
    return metrics, weights


def hosted_on(topology, folder, model, bare):
    """The same steps inside a program; bare: the model's folder without its weights."""
    from spmdrl.embed import attach

    hosted, optimizer = fsdp_host(model, Host(dropout=0.2))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    hosted.model.layers[0].eval()  # whatever the program does
    hosted.model.norm.requires_grad_(True)
    started = state_of_program(hosted, optimizer)
    config = replace(step_config(bare, folder, "hosted"), ref=TrainConfig(dtype="float32"))
    rl = attach(hosted, optimizer, config)
    metrics, changed = [], set()
    for number in range(1, STEPS + 1):
        before = state_of_program(hosted, optimizer)
        metrics.append(rl.step(number))
        assert PROGRESS.heard == rl.run.roles.phases.still_going  # of each micro-batch
        schedule.step()
        changed |= differences(before, state_of_program(hosted, optimizer))
    held_out = rl.evaluate(STEPS)
    rl.close()
    changed |= differences(started, state_of_program(hosted, optimizer))
    assert all(p.grad is None for p in hosted.parameters())
    hosted.model.layers[0].mlp.register_forward_hook(lambda _, __, out: 0.9 * out)
    said = refusal(attach, hosted, optimizer, config)  # no field shows the hook
    assert "differ by" in said and "0.0003 is allowed" in said
    steps = {int(state["step"]) for state in optimizer.state.values()}
    return metrics, weights_of(hosted), changed, held_out, rl.logprob_gap, steps


def state_of_program(model, optimizer):
    """What the program owns, in a form that can be compared."""
    import numpy as np
    import torch.distributed.distributed_c10d as c10d

    root = logging.getLogger()
    return {
        "groups": sorted(map(id, c10d._world.pg_map)),
        "torch": torch.get_rng_state().tolist(),
        "numpy": pickle.dumps(np.random.get_state()),
        "python": random.getstate(),
        "environment": dict(os.environ),
        "logger": (root.level, [*map(id, root.handlers)]),
        "modes": [module.training for module in model.modules()],
        "attributes": [sorted(set(vars(m)) - {"_is_full_backward_hook"}) for m in model.modules()],
        "noise": [getattr(m, "attention_dropout", None) for m in model.modules()],
        "attention": model.config._attn_implementation,
        "gradients": [p.requires_grad for p in model.parameters()],
        "parameters": [*map(id, model.parameters())],
        "hooks": [
            [len(h) for h in (m._forward_pre_hooks, m._forward_hooks, m._backward_hooks)]
            for m in model.modules()
        ],
        "rates": [group["lr"] for group in optimizer.param_groups],
    }  # fmt: skip


def differences(before, after):
    return {name for name in after if after[name] != before[name]}


def test_whole_steps_are_those_of_our_program(qwen3, tmp_path):
    from programs import write_task

    write_task(tmp_path)
    bare = shutil.copytree(qwen3, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safe*"))
    ours, hosts = run_calls(
        2, [(program_on, (str(tmp_path), str(qwen3))),
            (hosted_on, (str(tmp_path), str(qwen3), str(bare)))],
    )  # fmt: skip
    assert hosts[0][0][2]["reward/mean"] == hosts[1][0][2]["reward/mean"]
    measured = ("time", "throughput/", "idle/", "moved/", "memory/")
    for (want, want_weights), found in zip(ours, hosts, strict=True):
        metrics, weights, changed, held_out, gap, steps = found
        assert not changed
        assert 0 <= gap < 1e-5 and "eval/reward" in held_out and steps == {2 * STEPS}
        for got, one in zip(metrics, want, strict=True):
            assert got.keys() >= {name for name in one if not name.startswith(measured)}
            for name in one:
                if not name.startswith(measured):
                    assert got[name] == pytest.approx(one[name], rel=2e-3, abs=1e-5), name
        for name, tensor in want_weights.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-4, msg=name)


# ---- steps of two kinds


def mixed_on(topology, folder, model):
    """Two iterations of the program's own and one of RL, twice: by a schedule, and piece by piece,
    where RL is attached for each of its steps. The second has dropped what gradients are left.
    """
    from spmdrl.embed import attach, interleave

    found = []
    schedule = interleave(sft=2, rl=1)
    model_a, optimizer = fsdp_host(model)
    rl = attach(model_a, optimizer, step_config(model, folder, "mixed"))
    for iteration in range(1, 7):
        if schedule.kind(iteration) == "rl":
            assert model_a.lm_head.weight.grad is not None  # of the program's last step
            rl.step(schedule.count("rl", iteration))
            assert all(p.grad is None for p in model_a.parameters())
        else:
            sft_step(model_a, optimizer, iteration)
    rl.close()
    found.append(weights_of(model_a))
    told = None
    model_b, optimizer = fsdp_host(model)
    reference = {"ref": TrainConfig(model=model)}  # the first attachment's, at its begin
    for number in (1, 2):
        for iteration in (3 * number - 2, 3 * number - 1):
            sft_step(model_b, optimizer, iteration)
        optimizer.zero_grad()
        with groups_that_end():
            rl = attach(model_b, optimizer, step_config(model, folder, "pieces", **reference))
            if told is not None:
                rl.load_state_dict(told)
            rl.step(number)
            told = rl.state_dict()
            rl.close()
    found.append(weights_of(model_b))
    return found


def test_a_schedule_of_two_kinds_is_its_pieces_one_by_one(qwen3, tmp_path):
    from programs import write_task

    write_task(tmp_path)
    for mixed, pieces in run_ranks(2, mixed_on, str(tmp_path), str(qwen3)):
        for name, tensor in mixed.items():
            assert torch.equal(tensor, pieces[name]), name


def test_schedules_are_functions_of_the_iteration():
    from spmdrl.embed import Schedule, interleave

    schedule = interleave(sft=3, rl=1, pretrain=0)
    kinds = [schedule.kind(iteration) for iteration in range(1, 10)]
    assert kinds == ["sft", "sft", "sft", "rl"] * 2 + ["sft"]
    assert [schedule.count("rl", n) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]
    assert schedule.count("sft", 9) == 7 and schedule.count("pretrain", 9) == 0
    late = Schedule(lambda n: "rl" if n > 2 else "sft")
    assert [late.kind(n) for n in (1, 2, 3)] == ["sft", "sft", "rl"]
    for wrong in ({}, {"sft": 0}, {"sft": 2, "rl": -1}):
        with pytest.raises(ConfigError, match="how many iterations"):
            interleave(**wrong)


# ---- what is refused


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


class ByClosure(torch.optim.SGD):
    def step(self, closure):
        return closure()


def add_adapter(model):
    layer = model.model.layers[0].mlp.up_proj
    layer.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(64, 4)})


def shard_layers(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)


def shard_alone(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("others", "alone"))
    fully_shard(model, mesh=both["alone"])


def odd_factor(model):
    model.set_gradient_divide_factor(2.0)


def add_bias(model):
    model.model.norm.bias = torch.nn.Parameter(torch.zeros(64))


PLAIN = Host(sharded=False)
HOSTS = [  # how the program builds it, what it does then, what attach says; on one rank
    (Host(), Wrapped, "give the AutoModelForCausalLM itself"),
    (PLAIN, add_adapter, "lora_A"),
    (Host(), lambda model: model.model.layers[0].compile(), "leave torch.compile out"),
    (Host(), lambda model: model.model, "AutoModelForCausalLM"),
    (PLAIN, shard_layers, "not on the model itself"),
    (PLAIN, add_bias, "weights: model.norm.bias ((64,) here, None there)"),
    (Host(settings={"rms_norm_eps": 1e-3}), None, "rms_norm_eps: 0.001 here"),
    (Host(divide_factor=1.0), odd_factor, "different factors, [1.0, 2.0]"),
    (Host(dtype=torch.float16), None, "use bfloat16 or float32"),
    (Host(param_dtype=torch.float16), None, "use bfloat16 or float32"),
]  # fmt: skip
OPTIMIZERS = [
    (lambda model: torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]), "after fully_shard"),
    (lambda model: torch.optim.AdamW(model.model.parameters(), lr=1e-3), "(lm_head.weight)"),
    (lambda model: ByClosure(model.parameters()), "by a closure"),
    (lambda model: object(), "not a torch.optim.Optimizer"),
]  # fmt: skip
CONFIGS = [  # of the actor, of the rest, what attach says
    ({"tensor_parallel": 2}, {}, "actor.tensor_parallel=2 has no effect"),
    ({"ulysses": 2}, {}, "actor.ulysses=2 has no effect"),
    ({"compile": True}, {}, "actor.compile=True has no effect"),
    ({"ema": 0.9}, {}, "actor.ema has no effect"),
    ({"fsdp": 2}, {}, "actor.fsdp=2, but the host's model has 1"),
    ({"engine": "megatron"}, {}, "actor.engine='megatron'"),
    ({"optim": OptimConfig(lr=1.0)}, {}, "no effect but clip_norm"),
    ({}, {"async_steps": 1}, "async_steps"),
    ({}, {"resume": "auto"}, "resume has no effect"),
    ({}, {"strict": True}, "strict"),
]  # fmt: skip


def refused_on(topology, model):
    from spmdrl.embed import attach

    base, said = rl_config(model, "nowhere"), []
    for host, change, _ in HOSTS:
        hosted, optimizer = fsdp_host(model, host)
        hosted = (change(hosted) if change else None) or hosted
        said.append(refusal(attach, hosted, optimizer, base))
    hosted, optimizer = fsdp_host(model)
    for make, _ in OPTIMIZERS:
        said.append(refusal(attach, hosted, make(hosted), base))
    for actor, rest, _ in CONFIGS:
        config = replace(base, actor=replace(base.actor, **actor), **rest)
        said.append(refusal(attach, hosted, optimizer, config))
    return said


def unsharded_on(topology, model):
    from spmdrl.embed import attach

    said = []
    for change in (lambda model: None, shard_alone):
        hosted, optimizer = fsdp_host(model, PLAIN)
        change(hosted)
        said.append(refusal(attach, hosted, optimizer, rl_config(model, "nowhere")))
    return said


def test_what_does_not_fit_is_said_in_a_sentence(tmp_path):
    model = str(save_qwen3(tmp_path, tie_word_embeddings=False))
    (said,) = run_ranks(1, refused_on, model)
    wanted = [case[-1] for case in (*HOSTS, *OPTIMIZERS, *CONFIGS)]
    for text, message in zip(wanted, said, strict=True):
        assert text in message
    for whole, apart in run_ranks(2, unsharded_on, model):
        assert "the program has 2 ranks: call fully_shard on each layer" in whole
        assert "]: fully_shard must be given one mesh of all 2 ranks" in apart  # of either rank
