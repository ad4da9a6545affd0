"""Adapters with engine megatron: trained as FSDP2 trains them, in every layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_megatron_models
import torch
from ranks import groups_that_end, run_calls, run_ranks
from safetensors.torch import load_file
from test_megatron_engine import (
    engine_of,
    loss_of,
    of_single_experts,
    save_models,
    share_of,
    weights_of,
)
from training_batches import CONFIG, LENS, whole_batch

from spmdrl.config import ConfigError, LoraConfig, OptimConfig
from spmdrl.engines.fsdp.lora_files import adapter_tensors, read_base
from spmdrl.engines.hf_export import load_full, reader_of

pytestmark = [pytest.mark.ranks, pytest.mark.megatron, pytest.mark.strict_nccl]

LORA = LoraConfig(rank=5, alpha=7, use_rslora=True)  # an odd rank, no power of 2 as scale
SOME = replace(LORA, target_modules=("k_proj", "up_proj", "down_proj", "layers.1.self_attn.o_proj"))
FIRST = replace(LORA, target_modules=("layers.0.mlp.up_proj",))
LAST = replace(LORA, target_modules=("layers.3.self_attn.o_proj",))
ONLY_K = replace(LORA, target_modules=("k_proj",))
TRAIN = replace(CONFIG, lora=LORA, ema=0.6, optim=OptimConfig(lr=3e-3, weight_decay=0.1))


def case(model, kind, ranks, lora=LORA, **layout):
    return model, kind, ranks, replace(TRAIN, engine="megatron", lora=lora, **layout)


# two layers have all kinds of layers that these have
KINDS = {
    "qwen3_5_text": ("linear_attention", "full_attention"), "glm4": (), "phi3": (),
    "gpt_oss": ("sliding_attention", "full_attention"), "glm4_moe": (),
}  # fmt: skip
FAMILIES = {
    family: {"num_hidden_layers": 2} | ({"layer_types": [*kinds]} if kinds else {})
    for family, kinds in KINDS.items()
}
FAMILIES["phi3"]["hidden_size"] = 128  # heads of 32, which vLLM's kernels for CPUs take
TOKENS = {"vocab_size": 98, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}

LAYOUTS = [
    case("qwen3", "policy", 4, tensor_parallel=2, pipeline_parallel=2),
    case("qwen3", "value", 2, tensor_parallel=2, sequence_parallel=True,
         activation_checkpointing=True),
    case("qwen3", "policy", 4),
    case("qwen3", "policy", 2, lora=SOME, pipeline_parallel=2, virtual_pipeline=2,
         activation_checkpointing=True),
    # a chunk and at last a stage without an adapter
    case("qwen3", "policy", 2, lora=FIRST, pipeline_parallel=2, virtual_pipeline=2),
    case("qwen2", "policy", 4, lora=SOME, tensor_parallel=2, sequence_parallel=True,
         context_parallel=2),
    # a key-value head on two ranks: one of them holds keys alone, the other values alone
    case("odd", "policy", 2, tensor_parallel=2, micro_batch_tokens=30),
    case("odd", "policy", 2, lora=ONLY_K, tensor_parallel=2, sequence_parallel=True),
    case("moe", "policy", 4, tensor_parallel=2, sequence_parallel=True, expert_parallel=2),
    case("latent", "policy", 2, tensor_parallel=2, sequence_parallel=True),
    # several projections in one matrix, one projection that is two matrices, biases, shared experts
    *(case(family, "policy", 2, tensor_parallel=2, sequence_parallel=True) for family in FAMILIES),
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_megatron_models.save_model("deepseek_v3", folder / "latent", num_hidden_layers=2, **TOKENS)
    for family, fields in FAMILIES.items():
        tiny_megatron_models.save_model(family, folder / family, **TOKENS, **fields)
    names = ("latent", *FAMILIES)
    return save_models(folder) | {name: str(folder / name) for name in names}


def average_of(engine):
    return {n: t.clone() for n, t in engine.named_average(torch.float32, 1 << 20)}


def results_on(topology, models, cases):
    """Of each case its sequences, the logprobs with adapters and without after two updates, their
    metrics, and all weights before them, then, and as a moving average."""
    found = []
    for case in cases:
        with groups_that_end():
            found.append(result_on(topology, models, case))
    return found


def result_on(topology, models, case):
    engine = engine_of(topology, models, case)
    if engine is None:
        return None
    batch = whole_batch().select(share_of(engine))
    start = weights_of(engine)
    metrics = [engine.update(batch, loss_of(case[1]), temperature=0.8) for _ in range(2)]
    looked = []
    if case[1] == "policy":
        looked = [e.logprobs(batch, 0.8).logprobs for e in (engine, engine.base())]
    return share_of(engine), looked, metrics, start, weights_of(engine), average_of(engine)


# ---- saved, resumed, exported

SAVED = [  # what is saved, and what goes on from it
    (case("qwen3", "policy", 4, tensor_parallel=2, pipeline_parallel=2, offload_params=True,
          offload_optimizer=True),
     case("qwen3", "policy", 2, pipeline_parallel=2, virtual_pipeline=2)),
    *(
        (case("qwen3", "policy", 2, lora=lora, pipeline_parallel=2),
         case("qwen3", "policy", 1, lora=lora))
        for lora in (FIRST, LAST)
    ),
    (case("odd", "value", 4, tensor_parallel=2, sequence_parallel=True),
     case("odd", "value", 1)),
]  # fmt: skip


def resumed_on(topology, models, folder, cases):
    """Of each case what resumed_case says; ranks outside come along to where all meet."""
    found = []
    for number, (first, other) in enumerate(cases):
        with groups_that_end():
            found.append(resumed_case(topology, models, Path(folder, str(number)), first, other))
    return [result for result in found if result is not None]


def resumed_case(topology, models, folder, first, other):
    """Trains, saves, trains on; loads into an engine of the same layout and into one of another;
    what all of these say of the next update, and their weights then."""
    import torch.distributed as dist

    path = folder / "actor"
    path.mkdir(exist_ok=True, parents=True)
    engine, same = engine_of(topology, models, first), engine_of(topology, models, first)
    others = engine_of(topology, models, other)
    if engine is None:
        dist.barrier()
        refusals_on(topology, models, first, path)
        return None
    batch = whole_batch().select(share_of(engine))
    engine.update(batch, loss_of(first[1]), 0.8)
    saved = weights_of(engine)
    engine.offload()
    engine.stage().write(path, engine.topology.control)
    if first[1] == "policy":
        engine.save_adapter(path.parent / "adapter")
    engine.onload()
    dist.barrier()
    for loaded in (same, *([others] if others is not None else [])):
        loaded.load(path)
    results = []
    for loaded in (engine, same, others):
        if loaded is None:
            continue
        own = whole_batch().select(share_of(loaded))
        metrics = loaded.update(own, loss_of(first[1]), 0.8)
        results.append((metrics, weights_of(loaded) | averaged(loaded)))
    return results, refusals_on(topology, models, first, path), saved


def averaged(engine):
    return {f"average of {name}": t for name, t in average_of(engine).items()}


def refusals_on(topology, models, case, path):
    """What is said where the checkpoint's adapters are not this run's."""
    model, kind, ranks, config = case
    changes = {"lora": None}, {"lora": replace(config.lora, rank=4)}
    said = []
    for change in changes:
        engine = engine_of(topology, models, (model, kind, ranks, replace(config, **change)))
        if engine is None:
            continue
        with pytest.raises(ConfigError) as error:
            engine.load(path)
        said.append(str(error.value))
    return said


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    calls = [
        (results_on, (models, REFERENCES + LAYOUTS)),
        (resumed_on, (models, str(folder), SAVED)),
    ]
    same, resumed = run_calls(4, calls, timeout_s=480)
    return {"same": same, "resumed": resumed, "folder": folder}


def test_adapters_resume_bit_for_bit_and_in_another_layout(runs):
    for rank in runs["resumed"]:
        for results, (no_lora, other_rank), _ in rank:
            (want, weights), (metrics, resumed), *others = results
            assert metrics == want
            assert all(torch.equal(resumed[name], tensor) for name, tensor in weights.items())
            for got, elsewhere in others:
                assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
                for name, tensor in weights.items():
                    torch.testing.assert_close(elsewhere[name], tensor, rtol=0, atol=2e-5, msg=name)
            assert "this run has no lora" in no_lora
            assert "lora.rank=5, this run has 4" in other_rank


def test_what_is_saved_is_an_adapter_for_peft(runs, models):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = runs["folder"] / "0"
    Path(folder, "hf").symlink_to(models["qwen3"])
    whole, trained = load_full(folder, "actor"), runs["resumed"][0][0][2]
    exported = adapter_tensors(reader_of(folder / "actor"), read_base(folder / "actor"))
    written = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert {f"base_model.model.{name}" for name in exported} == written.keys()
    for name, tensor in exported.items():
        assert torch.equal(written[f"base_model.model.{name}"], tensor), name
    base = AutoModelForCausalLM.from_pretrained(models["qwen3"], dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
    for name, p in merged.named_parameters():
        torch.testing.assert_close(p.detach(), trained[name], rtol=0, atol=1e-6, msg=name)
        torch.testing.assert_close(whole[name], trained[name], rtol=0, atol=1e-6, msg=name)
    start = load_file(Path(models["qwen3"], "model.safetensors"))
    assert max((whole[name] - tensor).abs().max() for name, tensor in start.items()) > 1e-4


# ---- the same updates

REFERENCES_OF = {
    (*layout[:2], layout[3].lora): replace(TRAIN, lora=layout[3].lora) for layout in LAYOUTS
}
REFERENCES = [(*key[:2], 1, config) for key, config in REFERENCES_OF.items()]


def test_adapters_learn_as_fsdps_in_every_layout(runs):
    ranks = runs["same"]
    base = dict(zip(REFERENCES_OF, ranks[0][: len(REFERENCES)], strict=True))
    for number, layout in enumerate(LAYOUTS, len(base)):
        results = [rank[number] for rank in ranks if rank[number] is not None]
        assert sorted(seq for mine, *_ in results for seq in mine) == list(range(len(LENS))), layout
        for result in results:
            assert_same(result, base[*layout[:2], layout[3].lora], layout)


def assert_same(result, reference, layout):
    cu_seqlens = whole_batch().cu_seqlens.tolist()
    mine, looked, metrics, start, weights, average = result
    _, want_looked, want_metrics, want_start, want_weights, want_average = reference
    rows = [row for seq in mine for row in range(cu_seqlens[seq], cu_seqlens[seq + 1])]
    for got, want in zip(metrics, want_metrics, strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6), layout
    for got, want in zip(looked, want_looked, strict=True):
        torch.testing.assert_close(got, want[rows], rtol=0, atol=1e-5, msg=str(layout))
    moved = 0
    if layout[0] != "gpt_oss":  # whose files have all experts of a layer in one tensor
        want_start, want_weights, want_average = (
            of_single_experts(found) for found in (want_start, want_weights, want_average)
        )
    assert weights.keys() == want_weights.keys()
    for name, want in want_weights.items():
        message = f"{layout} {name}"
        torch.testing.assert_close(start[name], want_start[name], rtol=0, atol=0, msg=message)
        away = float((weights[name] - want).abs().max())
        assert away <= 2e-5, (away, message)  # Adam divides by roots of tiny second moments
        assert float((average[name] - want_average[name]).abs().max()) <= 2e-5, message
        moved += not torch.equal(weights[name], start[name])
    assert moved
    assert any(not torch.equal(average[name], weight) for name, weight in weights.items())


# ---- into vLLM

PUSHES = [  # model, weights.lora, vLLM's tensor_parallel, layout
    ("qwen3", "merge", 1, {"tensor_parallel": 2}),
    ("qwen3", "adapter", 2, {"pipeline_parallel": 2}),
    ("phi3", "adapter", 2, {"pipeline_parallel": 2}),  # one adapter of several projections
]


def push_on(topology, models, pushes):
    """Of each case: what was sent after two updates and after two more, and what was proven."""
    from rollout_checks import rollout_difference

    from spmdrl.config import RolloutConfig, WeightsConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.vllm.engine import VllmEngine
    from spmdrl.training.weight_sync import WeightSync

    found = []
    for name, mode, tp, layout in pushes:
        model = models[name]
        actor = engine_of(topology, models, case(name, "policy", 2, **layout))
        settings = RolloutConfig(kv_cache_mib=16, tensor_parallel=tp, dtype="float32")
        ranks = Topology.build(topology.device, dp=-1, tp=tp)
        beside = LORA if mode == "adapter" else None
        rollout = VllmEngine(model, settings, 64, ranks, lora=beside)
        config = WeightsConfig(check=True, lora=mode)
        weights = WeightSync(actor, actor.topology, rollout, ranks, "float32", config)
        batch, seen = whole_batch().select(share_of(actor)), []
        for _ in range(2):
            for _ in range(2):
                actor.update(batch, loss_of("policy"), temperature=0.8)
            stats = weights.push()
            away = rollout_difference(actor, actor.topology, rollout)
            seen.append((stats.planned_bytes, stats.moved_bytes, away, weights.check()))
        rollout.shutdown()
        found.append(seen)
    return found


@pytest.mark.vllm
def test_vllm_is_given_the_adapter(models):
    runs = run_ranks(2, push_on, models, PUSHES, timeout_s=240)
    for rank in runs:
        for (model, mode, *_), pushes in zip(PUSHES, rank, strict=True):
            for planned, moved, away, checked in pushes:
                assert planned == moved and away < 1e-5 and checked, (model, mode, away)
            (first, *_), (second, *_) = pushes
            assert mode == "merge" or second < first / 3
