"""What is refused before anything is built, with the arithmetic."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
from plan_configs import data_config, ppo_config, rollout_config

from spmdrl.config import (
    AlgoConfig,
    CheckpointConfig,
    ConfigError,
    LoraConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    SftDataConfig,
    TrainConfig,
)
from spmdrl.distributed.topology import resolve_degrees
from spmdrl.rewards.builtin import gsm8k
from spmdrl.training.checks.describe import describe
from spmdrl.training.checks.hosts import warnings_of_hosts
from spmdrl.training.checks.memory import memory_of
from spmdrl.training.checks.rl import check, check_held_out, check_keys
from spmdrl.training.checks.supervised import check_sft

CASES = [
    (
        {"algo": AlgoConfig(mini_batches=5)},
        2,
        ["12", "algo.mini_batches=5", "do: 1, 2, 3, 4, 6, 12"],
    ),
    (
        {"rollout": rollout_config(tensor_parallel=3)},
        4,
        ["rollout.tensor_parallel", "does not divide 4"],
    ),
    (
        {"rollout": rollout_config(tensor_parallel=8)},
        8,
        ["4 attention heads", "use one of 1, 2, 4"],
    ),
    (
        {"rollout": rollout_config(engine="hf", tensor_parallel=2)},
        2,
        ["'hf' has no tensor parallelism"],
    ),
    (
        {"data": data_config(prompts_per_step=1), "rollout": rollout_config(n=2)},
        4,
        ["= 2 samples are fewer", "4 rollout engines"],
    ),
    ({"data": data_config(max_prompt_tokens=500)}, 1, ["500", "50 = 550", "512"]),
    (
        {
            "reward": {"a": "judge", "b": "judge"},
            "algo": AlgoConfig(advantage="gdpo", advantage_args={"reward_keys": {"f": 1.0}}),
        },
        1,
        ["the reward 'judge' is one number", "asks for ['f']", "judge_score"],
    ),
    ({"actor": TrainConfig(fsdp=3)}, 4, ["actor.fsdp", "does not divide 4"]),
    ({"actor": TrainConfig(ulysses=3)}, 3, ["actor.ulysses=3", "4 % 3 = 1", "1, 2, 4"]),
    ({"actor": TrainConfig(ulysses=2)}, 3, ["actor.fsdp with ulysses", "does not divide 3"]),
    ({"actor": TrainConfig(ulysses=2, fsdp=1)}, 2, ["ulysses=2 with fsdp=1", "multiple"]),
    ({"actor": TrainConfig(ulysses=0)}, 2, ["ulysses=0", "at least 1"]),
    (
        {"ref": TrainConfig(ulysses=8), "algo": AlgoConfig(kl_coef=0.1)},
        8,
        ["ref.ulysses=8", "4 % 8 = 4"],
    ),
    (
        {"actor": TrainConfig(engine="megatron", ulysses=2)},
        2,
        ["actor.ulysses=2", "actor.context_parallel"],
    ),
    ({"actor": TrainConfig(optim=OptimConfig(schedule="cosine"))}, 1, ["decay_steps", "100"]),
    ({"algo": AlgoConfig(advantage="gae")}, 1, ["needs critic="]),
    ({"rewards": RewardConfig(per_turn=True)}, 1, ["rewards.per_turn=True", "'gsm8k'", "a whole"]),
    (
        {
            "rewards": RewardConfig(per_turn=True),
            "reward": {"a": lambda response: 1.0, "b": "math"},
        },
        1,
        ["rewards.per_turn=True", "'math'"],
    ),
    (
        {"rewards": RewardConfig(per_turn=True), "reward": partial(gsm8k, method="flexible")},
        1,
        ["rewards.per_turn=True", "'gsm8k'"],
    ),
    ({"critic": TrainConfig()}, 1, ["no use for one"]),
    ({"rollout": rollout_config(n=1)}, 1, ["rollout.n=1", "advantage 0"]),
    ({"rollout": rollout_config(temperature=0.0)}, 1, ["temperature"]),
    ({"rollout": rollout_config(temperature=0.001)}, 1, ["temperature=0.001", "0.01"]),
    ({"rollout": rollout_config(min_tokens=60)}, 1, ["min_tokens=60", "max_tokens=50"]),
    ({"rollout": rollout_config(top_p=1.5)}, 1, ["top_p=1.5"]),
    ({"checkpoint": CheckpointConfig(keep_best=1)}, 1, ["nothing is evaluated", "'eval/reward'"]),
    (
        {"checkpoint": CheckpointConfig(keep_best=1, best_metric="reward/mean", every_steps=0)},
        1,
        ["keep_best=1 has no effect"],
    ),
    ({"eval_samples": 4}, 1, ["eval_samples=4", "eval_temperature=0", "set eval_temperature"]),
    ({"eval_samples": 0}, 1, ["eval_samples=0", "at least 1"]),
    ({"eval_temperature": -0.5}, 1, ["eval_temperature=-0.5", "not negative"]),
    ({"eval_temperature": 0.005}, 1, ["eval_temperature=0.005", "vLLM", "0.01"]),
    ({"eval_top_p": 0.9}, 1, ["eval_top_p=0.9", "greedy"]),
    ({"eval_temperature": 1.0, "eval_top_p": 0.0}, 1, ["eval_top_p=0.0", "above 0"]),
    ({"eval_temperature": 1.0, "eval_samples": 4}, 1, ["eval_samples=4", "without data.eval"]),
    ({"eval_top_k": 5}, 1, ["eval_top_k=5", "greedy"]),
    ({"eval_min_p": 0.1}, 1, ["eval_min_p=0.1", "greedy"]),
    ({"eval_repetition_penalty": 1.2}, 1, ["eval_repetition_penalty=1.2", "data.eval"]),
    ({"rollout": rollout_config(min_p=1.5)}, 1, ["min_p=1.5"]),
    ({"rollout": rollout_config(repetition_penalty=0.0)}, 1, ["repetition_penalty=0.0"]),
    ({"eval_temperature": 1.0, "eval_top_k": -1}, 1, ["eval_top_k=-1", "not negative"]),
    ({"checkpoint": CheckpointConfig(keep_best=-1)}, 1, ["keep_best=-1"]),
    ({"rollout": rollout_config(quantization="fp8")}, 1, ["rollout.quantization='fp8'"]),
    (
        {"rollout": rollout_config(quantization="fp8", engine="hf")},
        1,
        ["set rollout.engine='vllm'"],
    ),
    (
        {"rollout": rollout_config(engine_args={"block_size": 16}, engine="hf")},
        1,
        ["are vLLM's: set rollout.engine='vllm' or leave them out"],
    ),
    ({"steps": 0}, 1, ["steps=0"]),
    ({"async_steps": -1}, 2, ["async_steps=-1", "not negative"]),
    ({"rollout": rollout_config(oversample=0.5)}, 1, ["rollout.oversample=0.5", "at least 1"]),
    (
        {"actor": TrainConfig(lora=LoraConfig(target_modules=()))},
        1,
        ["target_modules=()", "no layer"],
    ),
    ({"actor": TrainConfig(optim=OptimConfig(lr=1e10))}, 1, ["actor.optim.lr=", "at most 1000"]),
    ({"actor": TrainConfig(optim=OptimConfig(eps=1e-300))}, 1, ["actor.optim.eps", "1e-30"]),
    (
        {"actor": TrainConfig(optim=OptimConfig(lr=1e-3, weight_decay=1e4))},
        1,
        ["actor.optim.weight_decay=10000 x lr=0.001 is 10"],
    ),
    ({"lost_timeout_s": 0.001}, 1, ["lost_timeout_s=0.001", "at least 2"]),
    ({"stall_timeout_s": 0.1}, 1, ["stall_timeout_s=0.1", "at least 5"]),
    ({"start_timeout_s": 0.1}, 1, ["start_timeout_s=0.1", "at least 5"]),
    ({"rewards": RewardConfig(timeout_s=1e-4)}, 1, ["rewards.timeout_s=0.0001", "at least 0.01"]),
    ({"data": data_config(prompt_key=" ")}, 1, ["data.prompt_key=' ' is no name"]),
    ({"data": data_config(ground_truth_key="")}, 1, ["data.ground_truth_key='' is no name"]),
    ({"algo": AlgoConfig(loss_args={"dual_clip": 0.5})}, 1, ["'dual_clip']=0.5"]),
    ({"algo": AlgoConfig(kl_coef=-0.1)}, 1, ["kl_coef=-0.1"]),
    ({"algo": AlgoConfig(kl_coef=0.1, kl_estimator="k1")}, 1, ["gradient of 0", "k3"]),
    ({"algo": AlgoConfig(critic_warmup_steps=3)}, 1, ["critic_warmup_steps=3"]),
    ({"checkpoint": CheckpointConfig(keep=0)}, 1, ["checkpoint.keep=0"]),
    ({"algo": AlgoConfig(entropy_coef=float("nan"))}, 1, ["algo.entropy_coef=nan", "finite"]),
    (
        {"rollout": rollout_config(temperature=float("inf"))},
        1,
        ["rollout.temperature=inf", "finite"],
    ),
    ({"seed": -1}, 1, ["seed=-1"]),
    ({"rollout": rollout_config(min_tokens=-5)}, 1, ["min_tokens=-5"]),
    ({"data": data_config(max_eval_prompts=-3)}, 1, ["max_eval_prompts=-3"]),
    (
        {"data": data_config(max_eval_prompts=3)},
        1,
        ["max_eval_prompts=3 has no effect without data.eval"],
    ),
    (
        {"ref": TrainConfig(optim=OptimConfig(lr=1e-4)), "algo": AlgoConfig(kl_coef=0.1)},
        1,
        ["ref.optim=", "lr=0.0001", "not trained"],
    ),
    (
        {"ref": TrainConfig(activation_checkpointing=True), "algo": AlgoConfig(kl_coef=0.1)},
        1,
        ["ref.activation_checkpointing=True", "not trained"],
    ),
    ({"ref": TrainConfig(model="m")}, 1, ["ref.model='m' has no effect", "kl_coef=0"]),
    (
        {"checkpoint": CheckpointConfig(best_is="smallest")},
        1,
        ["best_is='smallest'", "keep_best=0"],
    ),
    ({"rollout": rollout_config(min_tokens=5)}, 1, ["min_tokens=5", "algo.correction"]),
    ({"actor": TrainConfig(optim=OptimConfig(betas=(2.0, 2.0)))}, 1, ["betas", "range"]),
    ({"actor": TrainConfig(optim=OptimConfig(warmup_steps=-5))}, 1, ["warmup_steps=-5"]),
    ({"actor": TrainConfig(optim=OptimConfig(clip_norm=0.0))}, 1, ["clip_norm=0.0", "1e9"]),
    ({"actor": TrainConfig(model="m")}, 1, ["actor.model"]),
    ({"actor": TrainConfig(engine="megatron", compile=True)}, 1, ["actor.compile=True", "'fsdp'"]),
    ({"actor": TrainConfig(engine="megatron", kernels="torch")}, 1, ["actor.kernels=torch"]),
    (
        {"actor": TrainConfig(engine="megatron", activation_offload=True)},
        1,
        ["actor.activation_offload=True", "'fsdp'"],
    ),
    (
        {"actor": TrainConfig(engine="megatron", attention="flash_attn")},
        1,
        ["actor.attention=flash_attn", "'fsdp'"],
    ),
    (
        {"actor": TrainConfig(engine="megatron", shared_prefix=True)},
        1,
        ["actor.shared_prefix=True", "'fsdp'"],
    ),
    (
        {"actor": TrainConfig(engine="megatron", reshard_after_forward=False)},
        1,
        ["actor.reshard_after_forward=False", "'fsdp'"],
    ),
    (
        {"ref": TrainConfig(reshard_after_forward=False), "algo": AlgoConfig(kl_coef=0.1)},
        1,
        ["ref.reshard_after_forward=False", "not trained"],
    ),
    (
        {"rollout": rollout_config(engine="hf", enforce_eager=False)},
        1,
        ["enforce_eager=False has no effect", "'hf'"],
    ),
    ({"model": "/no/such/model"}, 1, ["no such folder", "/no/such/model"]),
    ({"model": "some/where"}, 1, ["no folder here"]),
    ({"data": data_config(eval="a\0b")}, 1, ["data file", "a\\x00b", "NUL"]),
]


@pytest.mark.parametrize(("changes", "world", "words"), CASES, ids=lambda x: str(x)[:40])
def test_nonsense_is_refused_with_the_remedy(qwen3, changes, world, words):
    with pytest.raises(ConfigError) as error:
        check(ppo_config(qwen3, **changes), world)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_judge_of_held_out_prompts_may_give_one_number_alone(qwen3):
    algo = AlgoConfig(advantage="gdpo", advantage_args={"reward_keys": {"f": 1.0}})
    check_keys(ppo_config(qwen3, algo=algo, reward={"a": "gsm8k", "b": "judge"}))


def test_a_reward_per_turn_is_of_a_function_of_ones_own(qwen3):
    def reward(num_turns: int) -> dict:
        return {"turns": [0.0] * num_turns}

    config = ppo_config(qwen3, rewards=RewardConfig(per_turn=True), reward=reward)
    check(config, 1)
    check_held_out(config, 1, 1)
    assert "of which it sees the sum" in describe(config, 1, 100)
    tokens = ppo_config(
        qwen3, rewards=RewardConfig(per_turn=True), reward=reward, algo=AlgoConfig("reinforce")
    )
    assert "a reward for each turn, on its last token" in describe(tokens, 1, 100)
    algo = AlgoConfig(
        "reinforce_plus_plus_baseline", whiten_over="samples", kl_coef=0.1, kl_cut=10.0,
        aggregation="seq_mean_token_mean", seq_mean_over="all",
    )  # fmt: skip
    shown = describe(ppo_config(qwen3, algo=algo), 1, 100)
    for words in ("whitened over all valid samples", "k3 is cut at 10.0", "one over all, those"):
        assert words in shown
    with pytest.raises(ConfigError, match="'gsm8k' scores a sample as a whole"):
        check_held_out(ppo_config(qwen3, rewards=RewardConfig(per_turn=True)), 1, 1)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        check(ppo_config(tmp_path), 1)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_what_fits_passes_and_is_described(qwen3, world):
    config = ppo_config(
        qwen3, algo=AlgoConfig(mini_batches=3), data=data_config(prompts_per_step=15)
    )
    check(config, world)
    text = describe(config, world, num_prompts=60)
    assert "15 prompts x 4 samples = 60 samples a step, at most 3,000 response tokens" in text
    assert f"about {20 / world:g} on each of {world} ranks" in text
    assert "4 steps an epoch" in text
    where = f"0-{world - 1}" if world > 1 else "0"
    assert f"ranks {where}: dp 1 x fsdp {world}" in text
    assert "0.1M parameters" in text


def test_planned_activations_follow_checkpointing_and_offloading(qwen3):
    options = [
        {}, {"activation_checkpointing": "selective"}, {"activation_checkpointing": True},
        {"activation_offload": True},
    ]  # fmt: skip
    found = [
        memory_of("actor", TrainConfig(**given), str(qwen3), 1).activations for given in options
    ]
    everything, selective, inputs, offloaded = found
    assert everything > selective > 0 and everything > inputs > 0
    assert offloaded == pytest.approx(everything / 2)  # of two layers one is at hand
    role = TrainConfig(activation_offload=True)
    # one that is not trained keeps nothing, so it has those of the layer at work
    assert memory_of("ref", role, str(qwen3), 1).activations == offloaded


def test_ranks_that_share_sequences_are_described(qwen3):
    config = ppo_config(qwen3, actor=TrainConfig(ulysses=2, micro_batch_tokens=1000))
    check(config, 4)
    text = describe(config, 4, num_prompts=60)
    assert "about 24 on each of 2 groups of 2 ranks" in text
    assert "micro-batches of 2000 tokens" in text
    assert "ranks 0-3: dp 1 x fsdp 2 x sp 2" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"model_type": "bloom", "n_head": 4', "bloom.*by themselves"),
        ('"model_type": "qwen3", "num_attention_heads": 4, "rope_parameters": {"rope_theta": 1e4, '
         '"rope_type": "dynamic", "factor": 2.0}', "'dynamic' depend on the longest"),
        ('"model_type": "gpt2", "n_head": 6', "6 attention heads"),
    ],
)  # fmt: skip
def test_models_that_cannot_share_attention_are_refused(tmp_path, text, words):
    (tmp_path / "config.json").write_text(f"{{{text}}}")
    shared = TrainConfig(ulysses=4 if "gpt2" in text else 2)
    with pytest.raises(ConfigError, match=rf"actor\.ulysses=\d.*{words}"):
        check(ppo_config(tmp_path, actor=shared), 4)


def test_ranks_cannot_share_the_tokens_of_layers_that_carry_state(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_text"}')
    sampled = RolloutConfig(dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"actor\.ulysses=2: Qwen3_5GatedDeltaNet .* ulysses=1"):
        check(ppo_config(tmp_path, actor=TrainConfig(ulysses=2), rollout=sampled), 2)
    shared = TrainConfig(shared_prefix=True)
    with pytest.raises(ConfigError, match=r"shared_prefix=True cannot be: Qwen3_5GatedDeltaNet"):
        check(ppo_config(tmp_path, actor=shared, rollout=sampled), 1)


def test_sft_is_checked_too(qwen3):
    def sft(**changes):
        data = SftDataConfig("t", max_tokens=512)  # all that the model has positions for
        return SftConfig(**{"model": str(qwen3), "data": data, "out": "o"} | changes)

    def best(**changes):
        return CheckpointConfig(keep_best=1, **changes)

    evaluated = SftDataConfig("t", eval="e", max_tokens=512)
    by_eval = best(best_metric="eval/loss", best_is="smallest")
    check_sft(sft(), 2)
    check_sft(sft(data=evaluated, checkpoint=by_eval), 2)
    check_sft(sft(checkpoint=best(best_metric="sft/loss", best_is="smallest")), 2)
    cosine = TrainConfig(optim=OptimConfig(schedule="cosine"))
    warm = TrainConfig(optim=OptimConfig(schedule="cosine", warmup_steps=3))
    for changes, words in [
        ({"actor": cosine}, r"decay_steps above warmup_steps=0, e\.g\. 100"),
        ({"actor": warm, "steps": 2}, "has only 2 .*: shorten the warm-up"),
        ({"actor": TrainConfig(fsdp=3)}, "actor.fsdp"),
        ({"actor": TrainConfig(ulysses=2, fsdp=1)}, "ulysses=2 with fsdp=1"),
        ({"actor": TrainConfig(model="m")}, "actor.model"),
        ({"steps": 0}, "steps=0"),
        ({"eval_every": -1}, "eval_every=-1"),
        ({"data": SftDataConfig("t", max_tokens=513)}, r"max_tokens=513.*_embeddings is 512"),
        ({"actor": TrainConfig(offload_params=True)}, "offload_params has no.*in every step"),
        ({"actor": TrainConfig(offload_optimizer=True)}, "offload_optimizer has no effect"),
        ({"checkpoint": CheckpointConfig(best_is="smallest")}, "best_is='smallest' has no effect"),
        ({"checkpoint": best()}, "'eval/reward', which fine-tuning has not"),
        ({"checkpoint": by_eval}, "nothing is evaluated while the run goes on"),
        ({"data": evaluated, "checkpoint": by_eval, "eval_every": 0}, "nothing is evaluated"),
        ({"data": evaluated, "checkpoint": best(best_metric="eval/loss")}, "keep the worst"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_sft(sft(**changes), 2)


def optimizer(**changes):
    return {"actor": TrainConfig(optim=OptimConfig(**changes))}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (optimizer(lr=0.0), "actor.optim.lr=0: nothing is learnt"),
        (optimizer(lr=0.5), "actor.optim.lr=0.5 is far above"),
        (optimizer(warmup_steps=400, lr=1e-3), "has 100 optimizer steps: it ends at lr=0.00025"),
        ({"checkpoint": CheckpointConfig(every_steps=0)}, "nothing of what is learnt is kept"),
        ({"data": data_config(eval="./t")}, "is in data.train and in data.eval"),
        (
            {
                "algo": AlgoConfig(advantage="gae", critic_warmup_steps=100),
                "critic": TrainConfig(),
            },
            "the actor is not trained",
        ),
        ({}, None),
        (optimizer(warmup_steps=100), None),
    ],
)
def test_what_may_be_meant_is_a_warning(qwen3, caplog, changes, words):
    check(ppo_config(qwen3, **changes), 1)
    assert (words in caplog.text) if words else not caplog.text


@pytest.mark.parametrize(
    ("changes", "world", "here", "fields"),
    [  # here: ranks of a host, as the launcher says; None: a plan for other machines
        ({"rollout": rollout_config(tensor_parallel=2), "actor": TrainConfig(ulysses=2)}, 4, 2, []),
        ({"rollout": rollout_config(tensor_parallel=2), "actor": TrainConfig(ulysses=2)}, 4, 1,
         ["actor.ulysses=2", "rollout.tensor_parallel=2"]),
        ({"actor": TrainConfig(ulysses=2), "placement": {"actor": "1-2", "rollout": "0-3"}}, 4, 2,
         ["actor.ulysses=2"]),  # as many ranks as a host has, but not of one
        ({"actor": TrainConfig(engine="megatron", tensor_parallel=2)}, 2, 1,
         ["actor.tensor_parallel=2"]),
        ({"rollout": rollout_config(tensor_parallel=2)}, 16, None, []),
        ({"rollout": rollout_config(tensor_parallel=2),
          "placement": {"actor": "0-6,9-15", "rollout": "7-8"}}, 16, None,
         ["rollout.tensor_parallel=2"]),
    ],
)  # fmt: skip
def test_groups_that_reach_over_hosts_are_a_warning(
    qwen3, caplog, monkeypatch, changes, world, here, fields
):
    if here is not None:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    check(ppo_config(qwen3, **changes), world)
    assert [record.message.split(": ")[0] for record in caplog.records] == (
        [", ".join(fields)] if fields else []
    )


def test_experts_of_fine_tuning_that_reach_over_hosts_are_a_warning():
    """Megatron's ranks that share an expert's matrices are neighbours within its group."""
    sparse = TrainConfig(engine="megatron", expert_parallel=4, expert_tensor_parallel=4)
    for role, found in ((sparse, 1), (replace(sparse, expert_parallel=2), 0)):
        config = SftConfig("m", SftDataConfig("t"), "o", actor=role)
        warnings = warnings_of_hosts(config, 16)
        assert len(warnings) == found
        assert all("actor.expert_parallel=4: " in text for text in warnings)


def test_fine_tuning_is_warned_too(qwen3, caplog):
    optim = OptimConfig(lr=0.0, warmup_steps=11)
    check_sft(
        SftConfig(
            str(qwen3), SftDataConfig("t", eval="t", max_tokens=64), "o", steps=10,
            actor=TrainConfig(optim=optim),
        ),
        1,
    )  # fmt: skip
    for words in ("lr=0: nothing", "the run has 10 optimizer steps", "in data.train and in"):
        assert words in caplog.text


def test_degrees():
    assert resolve_degrees({"dp": -1, "tp": 2}, 8) == {"dp": 4, "tp": 2}
    with pytest.raises(ConfigError, match="only one"):
        resolve_degrees({"dp": -1, "tp": -1}, 8)
    with pytest.raises(ConfigError, match=r"dp=2 x tp=2 does not fit 8"):
        resolve_degrees({"dp": 2, "tp": 2}, 8)
    with pytest.raises(ConfigError, match="positive"):
        resolve_degrees({"dp": 0}, 8)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    from tiny_megatron_models import save_model
    from tiny_models import CHARS, save_tokenizer

    path = tmp_path_factory.mktemp("experts")
    save_model("qwen3_moe normalised", path, vocab_size=len(CHARS), eos_token_id=2)
    save_tokenizer(path)
    return path


R3 = TrainConfig(router_replay="R3")
REPLAYS = [
    ({}, None),
    ({"ref": R3, "algo": AlgoConfig(kl_coef=0.1)}, None),
    ({"actor": replace(R3, engine="megatron", expert_parallel=1)}, None),
    ({"actor": replace(R3, compile=True)}, "does not go with actor.compile=True"),
    ({"rollout": rollout_config(engine="sglang")}, r"'sglang'.*use one of \['vllm', 'hf'\]"),
    ({"rollout": rollout_config(engine_args={"enable_prefix_caching": False})}, "prefix cache"),
    ({"rollout": rollout_config(enforce_eager=False)}, "on CPUs vLLM's compiled layers"),
    (
        {"critic": R3, "algo": AlgoConfig(advantage="gae")},
        "critic.router_replay='R3' has no effect: only the actor",
    ),
    (
        {"actor": TrainConfig(), "ref": R3, "algo": AlgoConfig(kl_coef=0.1)},
        "ref.router_replay='R3' has no effect",
    ),
]


@pytest.mark.parametrize(("changes", "said"), REPLAYS)
def test_replayed_experts_are_refused_where_nobody_knows_or_takes_them(
    experts, monkeypatch, changes, said
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # SGLang is there
    config = ppo_config(experts, **{"actor": R3} | changes)
    if said is None:
        check(config, 1)
        return
    with pytest.raises(ConfigError, match=said):
        check(config, 1)


def test_replayed_experts_are_of_models_with_experts_and_of_no_supervised_run(qwen3, experts):
    with pytest.raises(ConfigError, match=r"router_replay: .* 'qwen3' .* have no experts"):
        check(ppo_config(qwen3, actor=R3), 1)
    with pytest.raises(ConfigError, match="needs an actor that the run builds itself"):
        check(ppo_config(experts, actor=R3), 1, hosted=True)
    data = SftDataConfig(train="t.jsonl", batch_size=4, max_tokens=64)
    with pytest.raises(ConfigError, match=r"actor\.router_replay='R3' has no effect on"):
        check_sft(SftConfig(model=str(experts), data=data, out="o", steps=1, actor=R3), 1)


AUX = TrainConfig(router_aux_loss_coef=0.01)
BALANCED = [
    ({"critic": AUX, "algo": AlgoConfig(advantage="gae")}, None),
    ({"actor": replace(AUX, compile=True)}, "does not go with actor.compile=True"),
    ({"actor": replace(AUX, engine="megatron")}, "takes the packed sequences of a micro-batch"),
    ({"actor": replace(AUX, router_aux_loss_coef=-0.1)}, "must be not negative"),
    (
        {"actor": TrainConfig(), "ref": AUX, "algo": AlgoConfig(kl_coef=0.1)},
        "ref.router_aux_loss_coef=0.01 has no effect: the reference is not trained",
    ),
]


@pytest.mark.parametrize(("changes", "said"), BALANCED)
def test_a_load_balancing_loss_is_refused_where_it_cannot_be(experts, changes, said):
    config = ppo_config(experts, **{"actor": AUX} | changes)
    if said is None:
        check(config, 1)
        return
    with pytest.raises(ConfigError, match=said):
        check(config, 1)


def test_a_load_balancing_loss_is_of_models_with_experts_and_of_every_program(qwen3, experts):
    said = r"actor\.router_aux_loss_coef does not go with model type 'qwen3': .* have no experts"
    with pytest.raises(ConfigError, match=said):
        check(ppo_config(qwen3, actor=AUX), 1)
    data = SftDataConfig(train="t.jsonl", batch_size=4, max_tokens=64)
    for model in (experts, qwen3):
        config = SftConfig(model=str(model), data=data, out="o", steps=1, actor=AUX)
        with pytest.raises(ConfigError, match=said) if model == qwen3 else nullcontext():
            check_sft(config, 1)
