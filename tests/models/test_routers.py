"""The routers of every family of models: their choice is read and replaced, with its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import BY_KIND, config_of
from torch import Tensor

from spmdrl.config import ConfigError
from spmdrl.engines.fsdp.router_aux_loss import routers_of
from spmdrl.engines.fsdp.router_replay import Routers, routing_of
from spmdrl.engines.fsdp.trial import tiny_copy
from spmdrl.hub.hf_folder import meta_model
from spmdrl.hub.tiny_config import tiny_config

# every family of docs/models.md with experts that engine fsdp trains
ROUTED = [
    "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "llama4_text", "mixtral",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_linear", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "gpt_oss", "minimax", "minimax_m2", "granitemoe", "granitemoehybrid", "olmoe",
    "hunyuan_v1_moe", "ernie4_5_moe", "exaone_moe", "jamba", "lfm2_moe", "dots1",
]  # fmt: skip


# whose scores are sigmoids; those of the others are softmax(logits)
SIGMOIDS = {
    "deepseek_v3", "deepseek_v32", "kimi_linear", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "minimax_m2", "exaone_moe", "lfm2_moe", "dots1",
}  # fmt: skip


def logits_and_gradients(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits.float()
    logits.square().mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


@pytest.mark.parametrize("kind", ROUTED)
def test_a_family_computes_with_the_experts_that_are_replayed(kind):
    """Its own choice replayed gives the same bits, gradients too; another choice another output,
    with weights of that choice's scores, so that the router learns.
    """
    model: Any = tiny_copy(config_of(BY_KIND[kind]))
    model.eval()
    ids = torch.arange(22).view(2, 11) * 7 % 251
    plain, plain_grads = logits_and_gradients(model, ids)
    routers = Routers(model)
    with routers.recording():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)
        own = routers.routed()
    with routers.replaying(own):
        again, grads = logits_and_gradients(model, ids)
    assert torch.equal(again, plain) and grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, plain_grads[name], rtol=1e-5, atol=1e-8, msg=name)
    assert routing_of(model.config) == (*own.shape[1:], routers.num_experts)
    other = (own.long() + 1) % routers.num_experts
    with routers.replaying(other), routers.recording():
        changed, grads = logits_and_gradients(model, ids)
        assert torch.equal(routers.routed().long(), other)
    assert (changed - plain).abs().max() > 1e-4
    names = {name for name, module in model.named_modules() if module in routers.routers}
    learning = [g for n, g in grads.items() if any(n.startswith(f"{name}.") for name in names)]
    assert learning and any(float(grad.abs().max()) > 0 for grad in learning)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)


@pytest.mark.parametrize("kind", [*ROUTED, "phimoe", "deepseek_v4"])
def test_the_scores_of_a_familys_routers_are_known_without_their_weights(kind):
    """Those whose routers return no experts, or weights of other scores, are refused."""
    large = config_of(BY_KIND[kind])
    if kind == "hunyuan_v1_moe":  # its default is one expert, whose weight is 1 with any scores
        large.update({"moe_topk": 8})
    model = meta_model(tiny_config(large, meta_model(large)))
    if kind in ("llama4_text", "jamba", "phimoe", "deepseek_v4"):
        with pytest.raises(ConfigError, match=f"'{kind}': its .* does not return logits, weights"):
            routers_of(model)
        return
    scores = {output.scores for _, output in routers_of(model)}
    assert scores == {"sigmoid" if kind in SIGMOIDS else "softmax"}


def test_the_scores_of_a_router_may_be_what_it_returns():
    large = config_of(BY_KIND["gemma4_text"])
    experts = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    large.update({"enable_moe_block": True, **experts})
    assert {output.scores for _, output in routers_of(meta_model(large))} == {"none"}


def test_the_routing_of_a_large_model_is_known_without_its_weights():
    assert routing_of(config_of(BY_KIND["qwen3_moe"])) == (24, 8, 128)
    assert routing_of(config_of(BY_KIND["qwen3_next"])) == (48, 10, 512)


def test_models_whose_experts_are_not_chosen_by_topk_are_refused():
    for kind, said in (("phimoe", "2 of 2 layers"), ("deepseek_v4", "3 of 5 layers"),
                       ("qwen3", "no experts")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"'{kind}' cannot be replayed.*{said}"):
            routing_of(config_of(BY_KIND[kind]))


def test_routers_that_leave_other_groups_without_weight_are_refused():
    """DeepSeek-V2's sets the scores of groups that it has not chosen to 0 and takes weights of
    them; DeepSeek-V3's takes weights of the scores as they were.
    """
    grouped = {"n_group": 4, "topk_group": 2}
    config = config_of(BY_KIND["deepseek_v2"])
    config.update({**grouped, "topk_method": "group_limited_greedy"})
    with pytest.raises(ConfigError, match="an expert of another group has no weight"):
        routing_of(config)
    config.update({"topk_method": "greedy"})
    assert routing_of(config).top_k == config.num_experts_per_tok
