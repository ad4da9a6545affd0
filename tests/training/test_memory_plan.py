"""The memory plan of large models, from their shapes alone: what fits, and what would help.

The shapes are those of public config.json files. Nothing is on any device but meta.
"""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from plan_configs import data_config, ppo_config

from spmdrl.cli.arguments import dry_flags, load_config
from spmdrl.config import (
    AlgoConfig,
    CheckpointConfig,
    ConfigError,
    DataConfig,
    LoraConfig,
    OptimConfig,
    PpoConfig,
    RolloutConfig,
    SftConfig,
    SftDataConfig,
    TrainConfig,
    checkpointing_of,
)
from spmdrl.distributed.elastic_job import ElasticJob
from spmdrl.distributed.placement import place
from spmdrl.engines.fsdp.activations import use_checkpointing
from spmdrl.training.build import weights_stay
from spmdrl.training.checks import memory_fit, rl
from spmdrl.training.checks.engine_memory import cached_tokens, engine_memory
from spmdrl.training.checks.memory import memory_of
from spmdrl.training.checks.memory_fit import Planner, check_memory, rl_planner
from spmdrl.training.checks.memory_plan import fullest, memory_plan, supervised_plan
from spmdrl.training.checks.model_shape import shape_of
from spmdrl.training.checks.pass_memory import fsdp_pass
from spmdrl.training.checks.rl import require_sound
from spmdrl.training.elastic import check_memory_of_sizes

BILLION_GIB = 1e9 / 2**30
SHAPES = {
    "Qwen3-8B": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "eos_token_id": 151645,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": True, "eos_token_id": 151645,
    },
    "Llama-3.3-70B": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "eos_token_id": 128009,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "eos_token_id": 151645,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
        "topk_group": 4, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
        "max_position_embeddings": 163840, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "rope_theta": 10000, "tie_word_embeddings": False, "hidden_act": "silu",
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
                         "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096}, "eos_token_id": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    for name, shape in SHAPES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(shape))
    return folder


def grpo(shapes, name: str, **changes) -> PpoConfig:
    """The library's defaults."""
    settings = {"data": DataConfig(train="t.jsonl"), "rollout": RolloutConfig()} | changes
    return ppo_config(shapes / name, **settings)


def planner(gpu_gib: float) -> Planner:
    return rl_planner(None, gpu_gib)


def refused(config, world: int, gpu_gib: float = 80.0) -> str:
    with pytest.raises(ConfigError) as caught:
        check_memory(config, world, planner(gpu_gib))
    return str(caught.value)


def proposed(story: str) -> list[tuple[str, float]]:
    found = re.findall(r"^(?:  |Together: )(.+): peak ([\d.]+) GiB", story, re.M)
    return [(field, float(peak)) for field, peak in found]


def test_every_size_of_an_elastic_job_must_fit(shapes, monkeypatch):
    """The loss of a host leaves a larger share of the model to each GPU."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = grpo(shapes, "Qwen3-8B")
    four = SimpleNamespace(elastic=ElasticJob(4, 4))
    check_memory_of_sizes(config, 8, planner(80.0), four)
    with pytest.raises(ConfigError) as caught:
        check_memory_of_sizes(config, 8, planner(80.0), SimpleNamespace(elastic=ElasticJob(1, 4)))
    assert str(caught.value).startswith("with 1 host, 2 ranks in all, which --nnodes 1:4 allows: ")


def test_qwen3_8b_fits_eight_gpus_with_the_defaults(shapes):
    start = time.monotonic()
    config = grpo(shapes, "Qwen3-8B")
    plan = memory_plan(config, 8, gpu_gib=80.0)
    check_memory(config, 8, planner(80.0))
    assert plan.too_much == 0
    phases = {phase.name: phase.parts for phase in plan.fullest.phases}
    assert list(phases) == ["rollout", "update_actor", "sync"]
    # 8.19 billion weights in float32 over 8 ranks; moments twice as much
    one = 8.190735 * BILLION_GIB * 4 / 8
    assert phases["update_actor"]["weights"] == pytest.approx(one, rel=1e-4)
    assert phases["update_actor"]["optimizer"] == pytest.approx(2 * one, rel=1e-4)
    assert phases["rollout"]["engine"] == 40.0
    asleep = phases["update_actor"]["engine"]
    assert asleep < 2
    # the KV cache follows when the trainer's weights have left
    weights = 8.190735 * BILLION_GIB * 2
    assert phases["sync"]["engine"] == pytest.approx(asleep + weights, rel=1e-4)
    text = plan.all_lines()
    assert text[-1].startswith(f"  peak     {plan.fullest.peak.total:.2f} of 80.0 GiB in rollout")
    assert [line for line in text if line.split()[:1] == ["update_actor"]]
    assert time.monotonic() - start < 10
    # it is checkpointing that makes them fit, and the refusal says so
    whole = grpo(shapes, "Qwen3-8B", actor=TrainConfig(activation_checkpointing=False))
    story = refused(whole, 8)
    assert "in update_actor on ranks 0-7, but 80.0 GiB less 6.5" in story
    found = dict(proposed(story))
    assert found["actor.activation_checkpointing=True"] == pytest.approx(
        plan.fullest.peak.total, abs=0.06
    )
    assert set(found) == {
        "actor.micro_batch_tokens=8192", "actor.activation_checkpointing=True",
        "actor.activation_offload=True",
    }  # fmt: skip


def test_summands_add_up_to_the_peak(shapes):
    story = refused(grpo(shapes, "Qwen3-8B"), 1)
    summands, total = re.findall(r"GPU memory: (.+) = ([\d.]+) GiB in update_actor", story)[0]
    assert sum(map(float, re.findall(r"[\d.]+", summands))) == pytest.approx(float(total), abs=0.3)
    assert [field for field, _ in proposed(story)] == [
        "actor.offload_policy=True", "actor.lora=LoraConfig()", "4 ranks",
    ]  # fmt: skip


def test_each_proposal_is_planned_with_the_field_changed(shapes):
    """No field is enough; those that are named together are, when they are set."""
    config = grpo(
        shapes, "Qwen3-8B", algo=AlgoConfig(kl_coef=0.1),
        actor=TrainConfig(activation_checkpointing=False),
    )  # fmt: skip
    story = refused(config, 2)
    assert "No field alone is enough" in story
    *singly, (together, peak) = proposed(story)
    assert singly[0][0] == "actor.lora=LoraConfig()"
    still = [float(gib) for gib in re.findall(r"still ([\d.]+) too much", story)]
    assert still == sorted(still) and len(still) == len(singly)
    assert "lora" not in together  # another kind of training comes last
    changed = config
    for text in together.split(", "):
        matches = [new for _, said, new in memory_fit.changes(changed) if said == text]
        assert len(matches) == 1, text
        changed = matches[0]
    plan = memory_plan(changed, 2, gpu_gib=80.0)
    assert plan.too_much == 0
    assert plan.fullest.peak.total == pytest.approx(peak, abs=0.06)
    # what is refused is not proposed: a reference that shares the actor's base has no options
    assert not any(p.text.startswith("ref.") for p in memory_fit.proposals(
        replace(config, actor=TrainConfig(lora=LoraConfig())), 2,
        replace(planner(80.0), check=require_legal_reference),
    ))  # fmt: skip


def require_legal_reference(config, world):
    rl.check_reference(config, rl.place(config, world))


def test_qwen3_30b_a3b_gathers_no_experts_of_other_ranks(shapes):
    path = str(Path(__file__).parents[2] / "configs/qwen3_30b_a3b_gsm8k_grpo_16gpu.py")
    temporary = {}
    for degree in (1, 8, 16):
        changes = {"model": str(shapes / "Qwen3-30B-A3B"), "actor.expert_parallel": degree}
        config = load_config(path, PpoConfig, changes)
        rl.check_sharing("actor", config.actor, config.model)
        plan = memory_plan(config, 16, gpu_gib=80.0)
        check_memory(config, 16, planner(80.0))
        update = {phase.name: phase.parts for phase in plan.fullest.phases}["update_actor"]
        assert update["weights"] == pytest.approx(30.5321 * BILLION_GIB * 4 / 16, rel=1e-4)
        temporary[degree] = update["temporary"]
        assert plan.fullest.peak.total == pytest.approx(47.1, abs=0.1)
    on_eight = replace(config, actor=replace(config.actor, expert_parallel=8))
    check_memory(on_eight, 8, planner(80.0))
    assert memory_plan(on_eight, 8, gpu_gib=80.0).fullest.peak.total == pytest.approx(67.0, abs=0.1)
    # a layer has 128 experts of 3 x 2048 x 768; gathered with their gradients, 10 bytes of each
    layer = 128 * 3 * 2048 * 768 * 10 / 2**30
    assert temporary[1] - temporary[8] == pytest.approx(7 / 8 * layer, rel=1e-3)
    assert 0 < temporary[8] - temporary[16] < layer / 16


def test_llama_70b_on_64_gpus_needs_tensor_parallel_engines(shapes):
    story = refused(grpo(shapes, "Llama-3.3-70B"), 64)
    assert "the rollout engine needs 137.7 GiB (weights 131.4" in story
    assert proposed(story) == [("rollout.tensor_parallel=4", pytest.approx(52.3, abs=0.1))]
    config = grpo(shapes, "Llama-3.3-70B", rollout=RolloutConfig(tensor_parallel=4))
    plan = memory_plan(config, 64, gpu_gib=80.0)
    assert plan.too_much == 0
    assert "70,553.7M parameters" in plan.lines[1]
    update = {phase.name: phase for phase in plan.fullest.phases}["update_actor"]
    assert update.parts["optimizer"] == pytest.approx(70.5537 * BILLION_GIB * 8 / 64, rel=1e-3)
    assert 50 < update.total < 60
    # two updates' worth of micro-batches: gradients stand beside the activations
    more = replace(config, data=DataConfig(train="t.jsonl", prompts_per_step=512))
    gradients = {p.name: p for p in memory_plan(more, 64, gpu_gib=80.0).fullest.phases}
    assert gradients["update_actor"].total == pytest.approx(update.total + 4.107, abs=0.01)


@pytest.mark.parametrize(
    ("world", "expert_parallel", "tensor_parallel", "total", "fits"),
    [(256, 256, 8, 70.7, True), (256, 64, 8, 113.6, False), (512, 256, 4, 62.1, True),
     (512, 128, 8, 65.3, True)],
)  # fmt: skip
def test_deepseek_v3_by_megatron(shapes, world, expert_parallel, tensor_parallel, total, fits):
    """671 billion weights, of which 654 are experts': bfloat16 ones and float32 gradients on each
    rank that has them, 12 bytes over the data-parallel ranks of dense weights and of experts."""
    actor = TrainConfig(
        engine="megatron", tensor_parallel=tensor_parallel, sequence_parallel=True,
        expert_parallel=expert_parallel,
    )  # fmt: skip
    model = str(shapes / "DeepSeek-V3")
    config = SftConfig(model, SftDataConfig(train="t.jsonl"), out="out", actor=actor)
    plan = supervised_plan(config, world, "policy", np.array([2048]), 80.0)
    assert "671,026.4M parameters" in plan.lines[1]
    assert (plan.too_much == 0) == fits
    peak = plan.fullest.peak
    assert peak.total == pytest.approx(total, abs=0.1)
    experts = 58 * 256 * 3 * 7168 * 2048
    whole = 58 * 7168 * 256 + 61 * 7168 * (1536 + 576)  # router and projections down
    dense = (671026404352 - experts - whole) / tensor_parallel + whole
    held = dense + experts / expert_parallel
    assert peak.parts["weights"] == pytest.approx(2 * held / 2**30, rel=1e-3)
    assert peak.parts["gradients"] == pytest.approx(4 * held / 2**30, rel=1e-3)
    states = 12 * (dense * tensor_parallel + experts) / world / 2**30
    assert peak.parts["optimizer"] == pytest.approx(states, rel=1e-3)


def test_deepseek_v3_is_held_whole_by_an_engine_without_tensor_parallelism(shapes):
    actor = TrainConfig(
        engine="megatron", tensor_parallel=8, sequence_parallel=True, expert_parallel=256
    )
    config = grpo(shapes, "DeepSeek-V3", actor=actor)
    require_sound(config, 256)
    story = refused(replace(config, rollout=RolloutConfig(engine="hf")), 512)
    assert "engine 12" in story and "No combination of these fits" in story


def test_a_measured_step_of_grpo_on_an_h100(shapes):
    """docs/gpu.md: 68 GiB at the most, of which about 40 were the sleeping engine's, counted as if
    it were awake. Its vLLM had half of 79.2 GiB."""
    config = grpo(
        shapes, "Qwen3-0.6B",
        data=data_config(prompts_per_step=32, max_prompt_tokens=256),
        rollout=RolloutConfig(max_tokens=512, ignore_eos=True, max_num_seqs=512),
        actor=TrainConfig(activation_checkpointing=False, optim=OptimConfig(lr=1e-6)),
    )  # fmt: skip
    plan = memory_plan(config, 1, np.full(192, 256), gpu_gib=79.2)
    update = {phase.name: phase for phase in plan.fullest.phases}["update_actor"]
    trainer = update.total - update.parts["engine"]
    assert trainer + 0.5 * 79.2 == pytest.approx(68, rel=0.15)
    assert trainer == pytest.approx(68 - 0.5 * 79.2, rel=0.15)


def test_what_leaves_the_gpu_is_on_the_host(shapes):
    def phases(**changes):
        plan = memory_plan(grpo(shapes, "Qwen3-8B", **changes), 8, gpu_gib=80.0)
        return {phase.name: phase.parts for phase in plan.fullest.phases}, plan.fullest.on_host

    plain, kept = phases()
    offloaded, away = phases(actor=TrainConfig(offload_params=True, offload_optimizer=True))
    assert offloaded["rollout"]["weights"] == offloaded["rollout"]["optimizer"] == 0
    assert offloaded["update_actor"] == plain["update_actor"]
    assert away - kept == pytest.approx(plain["rollout"]["weights"] * 3)
    awake, _ = phases(rollout=RolloutConfig(sleep=False))
    assert awake["update_actor"]["engine"] == 40.0
    # with kv_cache_mib vLLM takes what its parts need, not a share
    small, _ = phases(rollout=RolloutConfig(kv_cache_mib=4096))
    assert 19.3 < small["rollout"]["engine"] < 25
    roles, _ = phases(
        critic=TrainConfig(), algo=AlgoConfig(advantage="gae", kl_coef=0.1, mini_batches=2)
    )
    names = ["rollout", "ref_logprobs", "values", "old_logprobs", "update_critic", "update_actor"]
    assert list(roles) == [*names, "sync"]
    assert roles["rollout"]["weights"] == pytest.approx(3 * plain["rollout"]["weights"], rel=0.06)


FOREIGN = {  # of families that engine megatron does not know
    "Mistral-7B": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32768, "tie_word_embeddings": False,
    },
    "Gemma3-1B": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
    },
    "Qwen2.5-VL-3B": {
        "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "tie_word_embeddings": True, "text_config": {
            "model_type": "qwen2_5_vl_text", "hidden_size": 2048, "intermediate_size": 11008,
            "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
            "vocab_size": 151936, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
        "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 2048},
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), [
    ("Mistral-7B", 7.25), ("Gemma3-1B", 1.0), ("Qwen2.5-VL-3B", 3.75),
])  # fmt: skip
def test_any_family_has_a_plan(tmp_path, name, billions):
    """On GPUs and on CPUs, for runs that would fit; a tied matrix counts once."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(FOREIGN[name]))
    config = grpo(tmp_path, name, rollout=RolloutConfig(max_tokens=32768))
    for gpu_gib in (80.0, None):
        check_memory(config, 8, planner(gpu_gib))
    phases = {p.name: p.parts for p in memory_plan(config, 8, gpu_gib=80.0).fullest.phases}
    weights = billions * BILLION_GIB * 4 / 8
    assert phases["update_actor"]["weights"] == pytest.approx(weights, rel=0.02)


def test_sglangs_share_is_of_weights_and_cache_alone(shapes):
    """Its passes and CUDA graphs come on top of rollout.gpu_memory_utilization."""
    awake = {
        engine: engine_memory(
            grpo(shapes, "Qwen3-8B", rollout=RolloutConfig(engine=engine)), 8, 80.0
        ).awake
        for engine in ("vllm", "sglang")
    }
    assert awake["vllm"] == 40.0 and 42.0 < awake["sglang"] < 48.0


def test_layers_with_a_window_keep_no_more_than_that():
    text = SimpleNamespace(layer_types=["sliding_attention"] * 5 + ["full_attention"],
                           sliding_window=1024)  # fmt: skip
    assert cached_tokens(text, 65536, 8192) == (5 * (1024 + 8192) + 65536) / 6
    assert cached_tokens(SimpleNamespace(), 65536, 8192) == 65536


def test_nccl_takes_more_where_ranks_send_to_all_others(shapes):
    for changes, more in (
        ({}, 0), ({"ulysses": 2}, 2.1), ({"optim": OptimConfig(name="muon")}, 2.1),
        ({"engine": "megatron", "optim": OptimConfig(name="muon")}, 0),
    ):  # fmt: skip
        config = grpo(shapes, "Qwen3-8B", actor=TrainConfig(**changes))
        plan = memory_plan(config, 8, gpu_gib=80.0)
        assert plan.reserve_gib == pytest.approx(6.5 + more), changes
    assert memory_plan(config, 1, gpu_gib=80.0).reserve_gib == pytest.approx(4.5)
    experts = TrainConfig(engine="megatron", expert_parallel=8)
    config = grpo(shapes, "Qwen3-30B-A3B", actor=experts)
    assert memory_plan(config, 8, gpu_gib=80.0).reserve_gib == pytest.approx(8.6)


def test_megatrons_first_data_parallel_rank_saves_the_optimizers_state_of_all(shapes):
    model = str(shapes / "Qwen3-8B")
    plain, averaged = (
        memory_of("actor", TrainConfig(engine="megatron", ema=ema), model, 8, "policy")
        for ema in (0.0, 0.9)
    )
    number = 8.190735 * BILLION_GIB
    assert plain.saved == pytest.approx((2 + 12) * number, rel=1e-3)
    assert averaged.saved == pytest.approx((2 + 16) * number, rel=1e-3)


def test_a_save_brings_megatrons_weights_back_beside_the_engine_that_is_awake(shapes):
    """FSDP's shards are copied from where they are; what is gathered on the host is there with
    checkpoint.blocking too."""
    away = {"offload_params": True, "offload_optimizer": True}
    number = 8.190735 * BILLION_GIB

    def plan_of(every_steps=1, blocking=False, **role):
        checkpoint = CheckpointConfig(every_steps=every_steps, blocking=blocking)
        config = grpo(shapes, "Qwen3-8B", actor=TrainConfig(**away, **role), checkpoint=checkpoint)
        plan = memory_plan(config, 8, gpu_gib=80.0)
        return plan, {phase.name: phase.parts for phase in plan.fullest.phases}

    megatron = {"engine": "megatron", "tensor_parallel": 2}
    plan, phases = plan_of(**megatron)
    assert phases["save actor"]["weights"] == pytest.approx(2 * number / 2, rel=1e-3)
    assert phases["save actor"]["engine"] == phases["rollout"]["engine"] == 40.0
    assert phases["rollout"]["weights"] == phases["save actor"]["optimizer"] == 0.0
    blocking, _ = plan_of(blocking=True, **megatron)
    copy = plan.fullest.on_host - blocking.fullest.on_host
    assert copy == pytest.approx(2 * number / 2, rel=1e-3)  # of the weights; not the optimizer's
    never, phases = plan_of(every_steps=0, **megatron)
    gathered = blocking.fullest.on_host - never.fullest.on_host
    assert gathered == pytest.approx(12 * number / 2, rel=1e-3)
    assert "save actor" not in phases and "save actor" not in plan_of()[1]
    _, phases = plan_of(ema=0.9, **megatron)
    assert phases["save actor"]["optimizer"] == pytest.approx(16 * number / 8, rel=1e-3)


def test_offload_policy_keeps_states_and_gradients_on_the_host(shapes):
    """What is left of an update is what a pass takes: units that are gathered, and activations."""
    config = grpo(shapes, "Qwen3-8B", actor=TrainConfig(offload_policy=True))
    plan = memory_plan(config, 8, gpu_gib=80.0)
    phases = {phase.name: phase.parts for phase in plan.fullest.phases}
    for phase in phases.values():
        assert phase["weights"] == phase["optimizer"] == 0.0
    assert phases["update_actor"]["activations"] > 0
    one = 8.190735 * BILLION_GIB * 4 / 8
    assert phases["sync"]["push"] > one  # the shards are copied to be sent
    assert plan.fullest.on_host >= 3 * one
    on_cpus = memory_plan(config, 8, gpu_gib=None)
    plain = memory_plan(grpo(shapes, "Qwen3-8B"), 8, gpu_gib=None)
    assert on_cpus.fullest.peak.total == pytest.approx(plain.fullest.peak.total)


def test_one_shard_holds_all_weights_in_the_dtype_of_compute(shapes):
    """But not a frozen base, nor what is kept on the host; and several shards hold the head."""
    shape = shape_of(str(shapes / "Qwen3-8B"), "policy")

    def weights(sharers: int, trained: bool = True, **fields) -> float:
        found = fsdp_pass(TrainConfig(**fields), shape, 1024, trained, True, sharers)
        gradient = 2 * shape.matrix if trained and "lora" not in fields else 0
        return found.root - gradient

    assert weights(1) == weights(1, trained=False) == weights(1, ema=0.9) == 2 * shape.count
    assert weights(1, dtype="float32", trained=False) == 4 * shape.count
    for plain in ({"lora": LoraConfig()}, {"offload_policy": True}):
        assert weights(1, **plain) == 2 * shape.matrix
    assert weights(2) == 2 * shape.matrix


def test_rounding_to_fp8_has_copies(shapes):
    """The largest factor is gate_proj, or what goes into down_proj: rows of 12,288."""
    shape = shape_of(str(shapes / "Qwen3-8B"), "policy")
    plain = fsdp_pass(TrainConfig(), shape, 1024, True, True, 8)
    for tokens, largest in ((1024, 4096 * 12288), (16384, 16384 * 12288)):
        for fields, num_bytes in (({}, 15), ({"compile": True}, 4)):
            config = TrainConfig(fp8="rowwise", **fields)
            found = fsdp_pass(config, shape, tokens, True, True, 8)
            assert found.units == plain.units + num_bytes * largest


def test_roles_on_ranks_of_their_own_have_tables_of_their_own(shapes):
    config = grpo(shapes, "Qwen3-8B", placement={"actor": "0-5", "rollout": "6-7"})
    plan = memory_plan(config, 8, gpu_gib=80.0)
    trains, samples = plan.timelines
    assert (trains.ranks, samples.ranks) == ((0, 1, 2, 3, 4, 5), (6, 7))
    assert [phase.name for phase in trains.phases] == ["update_actor", "sync"]
    assert [phase.name for phase in samples.phases] == ["rollout", "sync"]
    assert all(phase.parts["engine"] == 0 for phase in trains.phases)
    assert all(phase.parts["weights"] == 0 for phase in samples.phases)
    text = "\n".join(plan.all_lines())
    assert "ranks 0-5 (actor)" in text and "ranks 6-7 (rollout, reward)" in text


def test_a_plan_that_does_not_fit_may_be_a_warning(shapes, caplog):
    config = replace(grpo(shapes, "Qwen3-8B"), memory_check="warn")
    check_memory(config, 1, planner(80.0))
    assert "too much" in caplog.text and "actor.lora=LoraConfig()" in caplog.text
    caplog.clear()
    check_memory(config, 1, replace(planner(80.0), plan=lambda c, w: memory_plan(c, w)))
    assert not caplog.text  # on CPUs no GPU is too small


def test_the_size_of_a_gpu_is_for_dry_runs():
    assert dry_flags(True, 64, False, 80).gpu_gib == 80.0
    assert dry_flags(True, 0, False).gpu_gib == 0
    with pytest.raises(ConfigError, match="is for --dry-run"):
        dry_flags(False, 0, False, 80)
    for given, words in ((-1, "such as 80"), (float("nan"), "such as 80"), ("x", "gpu_gib")):
        with pytest.raises(ConfigError, match=words):
            dry_flags(True, 0, False, given)


def test_checkpointing_is_on_by_itself_on_gpus_alone():
    assert checkpointing_of(TrainConfig(), on_gpu=True) is True
    assert checkpointing_of(TrainConfig(), on_gpu=False) is False
    assert checkpointing_of(TrainConfig(activation_offload=True), on_gpu=True) is False
    asked = TrainConfig(activation_checkpointing="selective")
    assert checkpointing_of(asked, True) == checkpointing_of(asked, False) == "selective"


def test_micro_batches_are_as_full_as_the_data_lets_them():
    role = TrainConfig(micro_batch_tokens=1000)
    assert fullest(role, 4, np.array([100])) == (400, 0)
    assert fullest(role, 14, np.array([100])) == (1000, 400)
    assert fullest(role, 40, np.array([100])) == (1000, 1000)
    assert fullest(role, 1, np.array([10, 1500])) == (1500, 0)  # a micro-batch of its own
    shared = TrainConfig(micro_batch_tokens=1000, ulysses=2)
    assert fullest(shared, 4, np.array([100])) == (200, 0)


def test_a_model_that_cannot_be_planned_is_not_refused(shapes, caplog):
    """A config whose names nobody foresaw: the plan is an estimate, and no reason to end a run."""

    def fails(config, world):
        raise AttributeError("no such field")

    check_memory(grpo(shapes, "Qwen3-8B"), 8, Planner(fails, require_sound))
    assert "there is no memory plan for this model: AttributeError" in caplog.text


def test_weights_stay_where_no_engine_sleeps_and_nothing_leaves(shapes):
    config = grpo(shapes, "Qwen3-8B")
    assert config.rollout.sleep and not weights_stay(config, place(config, 8))
    awake = replace(config, rollout=RolloutConfig(sleep=False))
    assert weights_stay(awake, place(awake, 8))
    apart = replace(config, placement={"actor": "0-3", "rollout": "4-7"})
    assert weights_stay(apart, place(apart, 8))
    for field in ("offload_params", "offload_policy"):
        leaves = replace(apart, actor=TrainConfig(**{field: True}))
        assert not weights_stay(leaves, place(leaves, 8))


def test_a_model_without_checkpointing_is_refused_with_what_to_do():
    hf = SimpleNamespace(supports_gradient_checkpointing=False)
    use_checkpointing(hf, False)
    with pytest.raises(ConfigError, match="set activation_checkpointing=False"):
        use_checkpointing(hf, True)
