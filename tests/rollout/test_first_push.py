"""Engines that are built without weights: the first push fills them, and is seen to. And the order
in which a push takes and gives back memory."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_megatron_models import FAMILIES, make_config
from tiny_models import save_qwen3, save_qwen_vl

from spmdrl.config import LoraConfig, RolloutConfig, TrainConfig, WeightsConfig
from spmdrl.rollout.base import WeightMismatch
from spmdrl.rollout.weight_check import clear_weights, require_written

SETTINGS = RolloutConfig(kv_cache_mib=16, tensor_parallel=2, dtype="float32")
LORA = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "down_proj"))
CASES = {  # engine settings, adapter, strict
    "vllm": (SETTINGS, None, False),
    "adapter": (SETTINGS, LORA, False),
    "hf": (replace(SETTINGS, engine="hf", tensor_parallel=1), None, False),
    "strict": (replace(SETTINGS, tensor_parallel=1), None, True),
}  # fmt: skip


def scales_of(engine: Any) -> dict[str, float]:
    """Buffers that vLLM makes and no trainer has: those of the KV cache."""
    state = engine.model.state_dict()
    return {name: float(t) for name, t in state.items() if name.endswith("_scale")}


def kv_bytes(engine: Any) -> int:
    """Of the largest tensor of its cache; several may lie in one storage."""
    return max(cache.untyped_storage().nbytes() for cache in engine.runner.kv_caches)


def filled_on(topology, model, bare):
    """By case: elements that are not numbers before the first push and after it, what was proven,
    how far logprobs are from the trainer's, and what the engine holds at each moment of a push."""
    from rollout_checks import rollout_difference

    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.fsdp.engine import FsdpEngine
    from spmdrl.rollout.build import build_engine
    from spmdrl.training.push_weights import transfer
    from spmdrl.training.weight_sync import WeightSync

    found: dict[str, Any] = {}
    for case, (settings, lora, strict) in CASES.items():
        config = TrainConfig(dtype="float32", lora=lora)
        ranks = Topology.build(topology.device, **train_degrees(config))
        actor = FsdpEngine.build("policy", model, config, ranks, strict=strict)
        places = Topology.build(topology.device, dp=-1, tp=settings.tensor_parallel)
        rollout: Any = build_engine(
            bare, settings, 64, places, strict=strict, lora=lora, load_weights=False
        )
        mode = "adapter" if lora else "merge"
        weights: Any = WeightSync(
            actor, ranks, rollout, places, "float32", WeightsConfig(check=True, lora=mode)
        )

        def holes(rollout: Any = rollout) -> int:
            return sum(int(t.isnan().sum()) for t in rollout.model.parameters())

        moments: list[tuple[str, int]] = []
        seen = {"holes": -1}

        def note(what: str, rollout: Any = rollout, moments: Any = moments) -> None:
            moments.append((what, kv_bytes(rollout) if hasattr(rollout, "runner") else 0))

        def push(weights: Any = weights, note: Any = note, holes: Any = holes, seen: Any = seen):
            note("push")
            run = weights.rounds[0].transfer.run

            def first(*args: Any) -> int:
                seen["holes"] = max(seen["holes"], holes())
                return run(*args)

            weights.rounds[0].transfer.run = first
            stats = weights.push()
            weights.rounds[0].transfer.run = run
            return stats

        roles: Any = SimpleNamespace(
            actor=SimpleNamespace(here=True, model=SimpleNamespace(
                onload=lambda weights_only, note=note: note("trainer's weights there"),
                offload=lambda keep_weights=False, note=note: note(
                    "trainer's optimizer gone" if keep_weights else "trainer's weights gone"
                ),
            )),
            sampler=SimpleNamespace(here=True, engine=rollout),
            sleeps=True, weights=SimpleNamespace(push=push), policy_version=-1, weight_bytes=0,
        )  # fmt: skip
        rollout.sleep()
        for version in (0, 1):
            transfer(roles, version)
            if version == 0:
                note("sampling")
                after = holes()
                rollout.sleep()
        found[case] = {
            "before": seen["holes"], "after": after, "checked": weights.check(),
            "size": sum(t.numel() for t in rollout.model.parameters()),
            "scales": scales_of(rollout), "moments": moments,
            "away": rollout_difference(actor, ranks, rollout),
        }  # fmt: skip
        rollout.shutdown()
    found["refused"] = left_out(topology, model, bare)
    return found


def left_out(topology, model, bare):
    """What a first push says that has nothing for one of the engine's tensors."""
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.fsdp.engine import FsdpEngine
    from spmdrl.rollout.build import build_engine
    from spmdrl.training.weight_sync import WeightSync

    config = TrainConfig(dtype="float32")
    ranks = Topology.build(topology.device, **train_degrees(config))
    actor = FsdpEngine.build("policy", model, config, ranks)
    places = Topology.build(topology.device, dp=-1, tp=2)
    rollout: Any = build_engine(bare, SETTINGS, 64, places, load_weights=False)
    weights = WeightSync(actor, ranks, rollout, places, "float32", WeightsConfig())
    scale = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    rollout.model.model.layers[1].register_parameter("scale", scale)
    try:
        weights.push()
        return ""
    except WeightMismatch as error:
        return str(error)
    finally:
        rollout.shutdown()


@pytest.mark.ranks
@pytest.mark.vllm
def test_the_first_push_fills_an_engine_without_weights(tmp_path):
    model = save_qwen3(tmp_path / "model")
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    (bare / "model.safetensors").unlink()
    for found in run_ranks(2, filled_on, str(model), str(bare)):
        for case, (settings, _, strict) in CASES.items():
            told = found[case]
            assert told["before"] >= 0.9 * told["size"], (case, told)  # but for padding
            assert told["after"] == 0 and told["checked"] > 20, (case, told)
            assert told["away"] <= (0 if strict else 2e-5), (case, told)
            if settings.engine == "hf":
                continue
            assert len(told["scales"]) >= 6 and set(told["scales"].values()) == {1.0}
            order = ["trainer's optimizer gone", "trainer's weights there", "push",
                     "trainer's weights gone"]  # fmt: skip
            assert [what for what, _ in told["moments"]] == [*order, "sampling", *order]
            empty = [size for what, size in told["moments"] if what != "sampling"]
            assert empty == [0] * 8, told["moments"]
            assert dict(told["moments"])["sampling"] >= 4 << 20
        assert "has not filled 1 of its tensors" in found["refused"]
        assert "layers.1.scale (3 of 3 elements)" in found["refused"]


def test_which_models_a_push_fills(tmp_path):
    """Others are read from disk: where an engine cannot be built without, or is quantised."""
    from spmdrl.rollout.build import is_filled_by_push

    plain = str(save_qwen3(tmp_path / "plain"))
    hf = replace(SETTINGS, engine="hf")
    assert is_filled_by_push(plain, SETTINGS) and is_filled_by_push(plain, hf)
    assert is_filled_by_push(str(save_qwen_vl(tmp_path / "vl")), SETTINGS)
    assert not is_filled_by_push(plain, replace(SETTINGS, quantization="fp8"))
    # whose own loader of no weights writes buffers too
    assert not is_filled_by_push(plain, replace(SETTINGS, engine="sglang"))
    made = {}
    for family in ("qwen3_moe", "mixtral", "deepseek_v3"):
        make_config(family).save_pretrained(tmp_path / family)
        made[family] = is_filled_by_push(str(tmp_path / family), SETTINGS)
    # deepseek's routers have a correction, a buffer that is in the files: it is sent too
    assert made == {"qwen3_moe": True, "mixtral": True, "deepseek_v3": True}
    assert FAMILIES.keys() >= made.keys()
    quantized = tmp_path / "quantized"
    shutil.copytree(plain, quantized)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (quantized / "config.json").write_text(json.dumps(config))
    assert not is_filled_by_push(str(quantized), SETTINGS)


class PaddedHead(torch.nn.Module):
    """10 tokens on two ranks of 8 rows each, as vLLM pads a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.org_vocab_size, self.num_embeddings_per_partition, self.embedding_dim = 10, 8, 4
        self.weight = torch.nn.Parameter(torch.ones(8, 4), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.ones(8), requires_grad=False)


def test_rows_of_no_token_need_no_weights():
    """Of the matrix and of its bias; one row more is named."""
    model = torch.nn.Module()
    model.lm_head = PaddedHead()
    clear_weights(model)
    with torch.no_grad():
        model.lm_head.weight[:2], model.lm_head.bias[:2] = 1, 1
    require_written(model, tp_rank=1)
    assert model.lm_head.bias.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    clear_weights(model)
    with torch.no_grad():
        model.lm_head.weight[:2], model.lm_head.bias[:1] = 1, 1
    with pytest.raises(WeightMismatch, match=r"lm_head.bias \(7 of 8 elements\)"):
        require_written(model, tp_rank=1)
