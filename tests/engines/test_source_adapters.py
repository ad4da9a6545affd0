"""Several adapters in one engine: each is trained as if it were alone, on ranks, and in vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_calls
from torch import Tensor
from training_batches import CONFIG, engine_on, on_data_ranks, whole_batch

from spmdrl.config import (
    AlgoConfig,
    ConfigError,
    LoraConfig,
    OptimConfig,
    RolloutConfig,
    TrainConfig,
    WeightsConfig,
)
from spmdrl.data.source_adapters import AdapterRoutes, check_adapter_sources
from spmdrl.rollout.base import Completion, Request, SamplingParams
from spmdrl.types import Batch

# clipped at every update; moments and weight decay move what has no gradient
OPTIM = OptimConfig(lr=3e-3, weight_decay=0.1, clip_norm=0.02)
ALONE = LoraConfig(rank=5, alpha=7, target_modules=("q_proj", "o_proj", "down_proj"))
LORA = replace(ALONE, by_source={"sums": "math", "mbpp": "code", "*": "rest"})
NAMES = ("code", "math", "rest")
TRAIN = replace(CONFIG, lora=LORA, optim=OPTIM)
LAYOUTS = {
    1: [TRAIN],
    2: [TRAIN, replace(TRAIN, fsdp=1, micro_batch_tokens=41),
        replace(TRAIN, ulysses=2, activation_checkpointing=True)],
}  # fmt: skip
# whose rows an update is given: after the first, "math" has no token for once
UPDATES = ((0, 1, 2), (0, 2), (0, 1, 2))


def batch_of(adapters: tuple[int, ...]) -> Batch:
    """Sequences 0, 3, 6 are of "code", 1, 4, 7 of "math", 2, 5, 8 of "rest". Their losses are
    divided by the tokens of all.
    """
    batch = whole_batch()
    batch.adapters = torch.arange(9) % 3
    batch.token_ids[batch.cu_seqlens[:-1]] = 4
    batch.token_ids[batch.cu_seqlens[:-1] + 1] = 5  # all begin alike, as chats do
    return batch.select([i for i in range(9) if i % 3 in adapters])


def update(engine: Any, batch: Batch) -> dict[str, float]:
    """On several ranks each sequence is on the rank of its number, so that some lack adapters."""
    from spmdrl.algo.objectives import policy_objective

    ranks = engine.topology
    places = [i for i in range(batch.num_seqs) if i % ranks.world == ranks.rank]
    mine = batch if engine.team else batch.select(places)
    loss = policy_objective(AlgoConfig(entropy_coef=0.01))
    return engine.update(on_data_ranks(ranks, mine), loss, 0.8)


def weights_of(engine: Any, adapter: str) -> dict[str, Tensor]:
    """Full A and B of an adapter, by the names that an only one has."""
    found = {}
    for name, p in engine.module.named_parameters():
        if f".{adapter}." in name and p.requires_grad:
            found[name.replace(f".{adapter}.", ".")] = p.full_tensor().detach().clone()
    return found


def together_on(topology: Any, model: str, config: TrainConfig, folder: str | None) -> Any:
    """Trains, saves before the last update. Returns metrics, weights, and what the base says."""
    engine = engine_on(topology, "policy", model, config)
    batch = batch_of((0, 1, 2))
    batch = batch if engine.topology.rank in engine.topology.data_ranks else batch.select([])
    start = engine.logprobs(batch, 1.0).logprobs
    metrics = []
    for i, adapters in enumerate(UPDATES):
        if folder is not None and i == 2:
            engine.save(Path(folder, "saved"))
        metrics.append(update(engine, batch_of(adapters)))
    away = {
        "off": (engine.base().logprobs(batch, 1.0).logprobs - start).abs().sum().item(),
        "on": (engine.logprobs(batch, 1.0).logprobs - start).abs().sum().item(),
    }
    if folder is not None:
        engine.save_adapter(Path(folder, "adapters"))
        away["logprobs"] = engine.logprobs(batch, 1.0).logprobs
    return metrics, {name: weights_of(engine, name) for name in NAMES}, away


OPTIMIZERS = ("muon", "adamw8bit")


def alone_on(topology: Any, model: str, adapter: int) -> Any:
    """Trains one plain adapter on its rows alone."""
    engine = engine_on(topology, "policy", model, replace(TRAIN, lora=ALONE))
    metrics = [update(engine, batch_of((adapter,))) for own in UPDATES if adapter in own]
    return metrics, weights_of(engine, "default")


def resumed_on(topology: Any, model: str, folder: str) -> Any:
    engine = engine_on(topology, "policy", model, TRAIN)
    engine.load(Path(folder, "saved"))
    metrics = update(engine, batch_of(UPDATES[-1]))
    return metrics, {name: weights_of(engine, name) for name in NAMES}


def other_optimizer_on(topology: Any, model: str, folder: str, name: str) -> Any:
    """Metrics of an update, and those of a run that resumed before it."""
    config = replace(TRAIN, optim=replace(TRAIN.optim, name=name))
    engine, place = engine_on(topology, "policy", model, config), Path(folder, name)
    update(engine, batch_of(UPDATES[0]))
    place.mkdir()
    engine.save(place)
    again = engine_on(topology, "policy", model, config)
    again.load(place)
    return [
        [update(each, batch_of(own)) for own in (UPDATES[-1], UPDATES[0])]
        for each in (engine, again)
    ]


def asked_again(rollout: Any) -> tuple[list[Request], list[Completion]]:
    """Asks one prompt, longer than a block of vLLM's prefix cache, of one adapter after another."""
    requests, answers = [], []
    for adapter in (0, 1, 2, 0):
        requests.append(Request([5 + i % 50 for i in range(40)], 7, adapter=adapter))
        (id,) = rollout.add(requests[-1:], SamplingParams(max_tokens=12, ignore_eos=True))
        ended: dict[int, Completion] = {}
        while not ended:
            ended = dict(rollout.step())
        answers.append(ended[id])
    return requests, answers


def pushed_on(topology: Any, model: str, tp: int) -> Any:
    """Pushes twice into vLLM: how far its log-probabilities are from the trainer's of the row's
    own adapter, and of another one; the bytes; whether one changed element is noticed.
    """
    from rollout_checks import answer_gaps, rollout_gaps

    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.base import WeightMismatch
    from spmdrl.rollout.vllm.engine import VllmEngine
    from spmdrl.training.weight_sync import WeightSync

    actor = engine_on(topology, "policy", model, TRAIN)
    settings = RolloutConfig(kv_cache_mib=16, tensor_parallel=tp, dtype="float32")
    ranks = Topology.build(topology.device, dp=-1, tp=tp)
    rollout = VllmEngine(model, settings, 64, ranks, lora=LORA)
    config = WeightsConfig(check=True, lora="adapter")
    weights = WeightSync(actor, actor.topology, rollout, ranks, "float32", config)
    near, stats = [], []
    for _ in range(2):
        update(actor, batch_of((0, 1, 2)))
        stats.append(weights.push().planned_bytes)
        near.append(rollout_gaps(actor, actor.topology, rollout, num_adapters=3).max().item())
    again = asked_again(rollout)
    near.append(answer_gaps(actor, actor.topology, *again, routed=True).max().item())
    assert again[1][0] == again[1][-1] != again[1][1]
    with torch.no_grad():
        for name, p in actor.module.named_parameters():
            if ".lora_B.math." in name:
                p.mul_(-3)
    far = rollout_gaps(actor, actor.topology, rollout, num_adapters=3)
    layer = next(iter(rollout.slots.manager.modules.values()))
    layer.lora_b_stacked[0][1, 0, 0, 0] += 0.5
    try:
        weights.check()
        noticed = ""
    except WeightMismatch as error:
        noticed = str(error)
    rollout.shutdown()
    return near, far.max().item(), (far > 1e-3).float().mean().item(), stats, noticed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("source_adapters")


@pytest.fixture(scope="module")
def runs(qwen3: Path, folder: Path) -> dict[Any, Any]:
    """{(ranks, ...): what each rank got}; each world starts once."""
    model, where, calls = str(qwen3), str(folder), {}
    for world, configs in LAYOUTS.items():
        for i, config in enumerate(configs):
            saved = where if (world, i) == (2, 0) else None
            calls[world, "together", i] = (together_on, (model, config, saved))
    calls |= {(1, "alone", i): (alone_on, (model, i)) for i in range(3)}
    calls |= {(world, "resumed"): (resumed_on, (model, where)) for world in (1, 2)}
    calls |= {(1, name): (other_optimizer_on, (model, where, name)) for name in OPTIMIZERS}
    calls[2, "pushed"] = (pushed_on, (model, 2))
    found: dict[Any, Any] = {}
    for world in (2, 1):
        mine = {key: call for key, call in calls.items() if key[0] == world}
        found |= dict(zip(mine, run_calls(world, mine.values(), timeout_s=120), strict=True))
    return found


@pytest.mark.ranks
@pytest.mark.vllm
def test_an_adapter_learns_as_if_it_were_alone_on_its_rows(runs: Any) -> None:
    metrics, weights, _ = runs[1, "together", 0][0]
    for i, name in enumerate(NAMES):
        alone, want = runs[1, "alone", i][0]
        own = [each for each, adapters in zip(metrics, UPDATES, strict=True) if i in adapters]
        assert len(own) == len(alone) and len(want) == 12
        for got, by_itself in zip(own, alone, strict=True):
            assert got[f"grad_norm/{name}"] == pytest.approx(by_itself["grad_norm"], rel=1e-5)
        for key, value in want.items():
            torch.testing.assert_close(weights[name][key.replace(".default.", ".")], value,
                                       rtol=0, atol=2e-5, msg=f"{name} {key}")  # fmt: skip
    assert metrics[1]["grad_norm/math"] == metrics[1]["loss_tokens/math"] == 0
    norms = [metrics[0][f"grad_norm/{name}"] for name in NAMES]
    assert min(norms) > OPTIM.clip_norm
    assert metrics[0]["grad_norm"] == pytest.approx(sum(n**2 for n in norms) ** 0.5)


@pytest.mark.ranks
@pytest.mark.vllm
def test_training_does_not_depend_on_ranks_and_leaves_the_base(runs: Any) -> None:
    metrics, weights, _ = runs[1, "together", 0][0]
    for world, configs in LAYOUTS.items():
        for i in range(len(configs)):
            for other, other_weights, away in runs[world, "together", i]:
                assert away["off"] < 1e-3
                assert away["on"] > 0.1 or configs[i].ulysses > 1  # its rank without sequences
                for got, want in zip(other, metrics, strict=True):
                    assert got.keys() == want.keys()
                    for key in want:
                        assert got[key] == pytest.approx(want[key], rel=1e-4, abs=1e-6), (i, key)
                for name in NAMES:
                    for key, value in weights[name].items():
                        torch.testing.assert_close(
                            other_weights[name][key], value, rtol=0, atol=5e-5, msg=f"{i} {key}"
                        )


@pytest.mark.ranks
@pytest.mark.vllm
def test_adapters_resume_bit_for_bit_and_on_other_ranks(runs: Any) -> None:
    metrics, weights, _ = runs[2, "together", 0][0]
    for got, resumed in runs[2, "resumed"]:
        assert got == metrics[-1]
        for name in NAMES:
            assert all(torch.equal(resumed[name][key], t) for key, t in weights[name].items())
    for name in OPTIMIZERS:
        [(went_on, resumed)] = runs[1, name]
        assert went_on == resumed
    got, resumed = runs[1, "resumed"][0]
    assert got["loss"] == pytest.approx(metrics[-1]["loss"], rel=1e-5)
    for name in NAMES:
        for key, value in weights[name].items():
            torch.testing.assert_close(resumed[name][key], value, rtol=0, atol=5e-5)


@pytest.mark.ranks
@pytest.mark.vllm
def test_vllm_samples_each_row_with_its_own_adapter(runs: Any) -> None:
    for near, far, share, (first, second), noticed in runs[2, "pushed"]:
        assert max(near) < 1e-5
        assert far > 1e-2 and 0.1 < share < 0.4  # another "math" is seen in its own rows alone
        assert second < first / 2
        assert noticed


@pytest.mark.ranks
@pytest.mark.vllm
def test_peft_loads_each_adapter(runs: Any, qwen3: Path, folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    batch = batch_of((0, 1, 2))
    found = runs[2, "together", 0][0][2]["logprobs"]
    for i, name in enumerate(NAMES):
        base = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, folder / "adapters" / name).eval()
        for seq in range(i, 9, 3):
            own = slice(int(batch.cu_seqlens[seq]), int(batch.cu_seqlens[seq + 1]))
            ids = batch.token_ids[own]
            with torch.no_grad():
                logprobs = model(ids[None]).logits[0].log_softmax(-1)
            want = torch.zeros(len(ids))
            want[1:] = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
            want *= batch.loss_mask[own]
            torch.testing.assert_close(found[own], want, rtol=0, atol=1e-4)


BY_SOURCE: dict[str, Any] = {"by_source": {"sums": "math", "*": "code"}}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"weights": WeightsConfig(lora="merge")}, "set weights.lora='adapter'"),
    (
        {},
        {"rollout": RolloutConfig(engine="hf", max_tokens=64)},
        "rollout.engine='hf' has no memory for adapters",
    ),
    ({"use_dora": True}, {}, "lengths of one adapter's rows"),
    ({"target_parameters": ("experts.down_proj",)}, {}, "experts, which have one adapter"),
    ({"quantization": "nf4"}, {}, "not tried with several adapters"),
    ({"by_source": {"*": "a/b"}}, {}, "'a/b' cannot be an adapter's name"),
    ({"by_source": {"*": "keys"}}, {}, "'keys' cannot be an adapter's name"),
    ({}, {"compile": True}, "actor.compile would compile each layer anew"),
    ({}, {"engine": "megatron"}, "engine megatron trains one adapter"),
    ({}, {"critic": True}, "critic.lora.by_source: critic reads the rows of all sources"),
]


@pytest.mark.parametrize(("lora", "others", "said"), REFUSED)
def test_what_has_one_adapter_is_refused(
    qwen3: Path, lora: dict[str, Any], others: dict[str, Any], said: str
) -> None:
    from plan_configs import ppo_config

    from spmdrl.training.checks.rl import check

    several = LoraConfig(**(BY_SOURCE | lora))
    others = {
        "weights": WeightsConfig(lora="adapter"),
        "rollout": RolloutConfig(max_tokens=64),
    } | others
    of_role = {name: others.pop(name) for name in ("compile", "engine") if name in others}
    actor = TrainConfig(lora=several, dtype="float32", **of_role)
    if others.pop("critic", False):
        others |= {"critic": actor, "algo": AlgoConfig(advantage="gae")}
    with pytest.raises(ConfigError) as error:
        check(ppo_config(str(qwen3), actor=actor, **others), 1)
    assert said in str(error.value), str(error.value)


def test_layers_that_are_given_other_tokens_are_refused() -> None:
    from transformers import DeepseekV32Config, Qwen2_5_VLConfig

    from spmdrl.engines.fsdp.source_adapters import check_by_source
    from spmdrl.hub.hf_folder import meta_model

    sees = meta_model(Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config={"num_hidden_layers": 1}, vision_config={"depth": 1},
    ))  # fmt: skip
    role = TrainConfig(lora=LoraConfig(**BY_SOURCE))
    check_by_source("actor", replace(role, freeze_vision=True), sees)
    sparse = meta_model(
        DeepseekV32Config(architectures=["DeepseekV32ForCausalLM"], num_hidden_layers=1)
    )
    for model, said in ((sees, "set freeze_vision"), (sparse, "sparse attention")):
        with pytest.raises(ConfigError, match=said):
            check_by_source("actor", role, model)


def test_each_adapter_starts_from_its_own_folder_or_all_from_one(tmp_path: Path) -> None:
    from spmdrl.engines.fsdp.source_adapters import folder_of

    lora = LoraConfig(**BY_SOURCE, adapter=str(tmp_path))
    assert folder_of(lora, "math") == folder_of(lora, "code") == str(tmp_path)
    (tmp_path / "math").mkdir()  # "code" is then missing there, which the check of it tells
    assert folder_of(lora, "code") == f"{tmp_path}/code"


def test_a_plan_counts_all_adapters(qwen3: Path) -> None:
    from plan_configs import ppo_config

    from spmdrl.training.checks.memory import memory_of
    from spmdrl.training.checks.rl import check

    role = TrainConfig(lora=replace(ALONE, by_source=LORA.by_source))
    check(ppo_config(str(qwen3), actor=role, weights=WeightsConfig(lora="adapter")), 1)
    one = memory_of("actor", replace(role, lora=ALONE), str(qwen3), 2).trainable
    assert memory_of("actor", role, str(qwen3), 2).trainable == 3 * one > 0


def test_a_source_has_the_adapter_that_is_named_for_it() -> None:
    routes = AdapterRoutes(LORA, ["mbpp", "sums", "else", "sums"].__getitem__)
    assert routes.of(torch.tensor([3, 2, 0, 1])).tolist() == [1, 2, 0, 1]
    assert len(routes.of(torch.zeros(0, dtype=torch.int64))) == 0
    check_adapter_sources(LORA, ["mbpp", "else", "sums"], trained=True)
    check_adapter_sources(ALONE, ["anything"], trained=True)
    named = replace(LORA, by_source={"sums": "math", "mbpp": "code"})
    check_adapter_sources(named, ["sums"])  # of rows that are only evaluated
    for lora, sources, said in (
        (named, ["sums", "new"], "no adapter for data_source 'new'"),
        (named, ["sums"], "by_source['mbpp']: no row has this data_source"),
        (LORA, ["sums", "mbpp"], "by_source['*'] has no effect"),
    ):
        with pytest.raises(ConfigError) as error:
            check_adapter_sources(lora, sources, trained=True)
        assert said in str(error.value), str(error.value)
