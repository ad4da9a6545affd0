"""Trains layers for multi-token prediction beside a policy (DeepSeek-V3, arXiv 2412.19437, 2.2).

Layer k sees, at each token, the state that the layer before it has there and the embedding of the
token k further on, and predicts the one behind that. The layers learn to follow the policy: its
states, its embedding and its head are given to them without gradient, so that the gradient of the
policy is what it is without them. megatron-core's own wiring of these layers is not used, because
it computes its loss inside the model, of labels, and lets it move the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from spmdrl.config import TrainConfig, require
from spmdrl.config.words import counted, verb
from spmdrl.engines.fsdp.classifier import is_classifier
from spmdrl.engines.megatron import compat
from spmdrl.engines.megatron.families import FAMILIES
from spmdrl.engines.megatron.inputs import Inputs
from spmdrl.engines.megatron.layout import layer_types, padded_vocab
from spmdrl.engines.megatron.towers import has_trained_tower, language_part
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.hub.mtp_layers import has_mtp_tensors, num_mtp_layers


def check_mtp(name: str, role: TrainConfig, model: str) -> None:
    """Raises ConfigError where layers for multi-token prediction cannot be trained."""
    if role.mtp_loss_scaling_factor == 0:
        return
    hf = load_hf_config(model)
    said = f"{name}.mtp_loss_scaling_factor={role.mtp_loss_scaling_factor:g}"
    family, num = FAMILIES[language_part(hf).model_type].mtp, num_mtp_layers(hf)
    require(role.mtp_loss_scaling_factor > 0, f"{said} is to be 0 or above")
    require(
        name == "actor",
        f"{said}: the layers for multi-token prediction are the actor's; leave it 0",
    )
    require(
        num > 0 and not is_classifier(hf),
        f"{said}: {model!r} has no layers for multi-token prediction (num_nextn_predict_layers or "
        "mtp_num_hidden_layers in its config.json); leave it 0",
    )
    require(
        not has_trained_tower(hf),
        f"{said}: the layers for multi-token prediction are not trained beside a tower for images, "
        "whose tokens have several positions; leave it 0, or vision_tower=False",
    )
    require(
        not Path(model).is_dir() or has_mtp_tensors(Path(model), hf),
        f"{said}: config.json of {model!r} names layers for multi-token prediction, but its files "
        "have none (exported with --without_mtp?): leave it 0",
    )
    require(
        family is not None and (family.most is None or num <= family.most),
        f"{said}: {counted(num, 'layer')} for multi-token prediction of model type "
        f"{hf.model_type!r} {verb(num, 'are')} not "
        "mapped; leave it 0",
    )
    require(
        role.lora is None,
        f"{said} with {name}.lora, which trains adapters alone: leave one of them out",
    )
    require(
        role.router_replay is None,
        f"{said} with {name}.router_replay: the rollout engine does not run these layers, and says "
        "of none of their tokens which experts they went to; leave one of them out",
    )


def add_mtp_layers(chunk: Any, hf_config: PreTrainedConfig, num: int, spec_of: Any) -> None:
    """Gives the last chunk of a model `num` layers, chunk.mtp. spec_of: layer_spec of a number."""
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        get_mtp_layer_spec,
    )

    from spmdrl.engines.megatron.attention import RmsNorm

    attends = [n for n, kind in enumerate(layer_types(hf_config)) if kind != "linear_attention"]
    spec = get_mtp_layer_spec(spec_of(attends[-1]), use_transformer_engine=False)
    spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = RmsNorm
    chunk.mtp = MultiTokenPredictionBlock(
        chunk.config, MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * num),
        vp_stage=chunk.vp_stage, pg_collection=chunk.pg_collection,
    )  # fmt: skip
    for layer in chunk.mtp.layers:
        compat.checkpoint_mtp_layer(layer)


class TokenEmbeddings:
    """The policy's embedding, on the last pipeline stage; of several stages a copy of it."""

    def __init__(self, chunks: list[Any], hf_config: PreTrainedConfig) -> None:
        from megatron.core import parallel_state as ps
        from megatron.core.models.common.embeddings.language_model_embedding import (
            LanguageModelEmbedding,
        )

        first, last = chunks[0], chunks[-1]
        self.own = first.embedding if first.pre_process else None
        self.copy, self.group = None, None
        if ps.get_pipeline_model_parallel_world_size() > 1:
            self.group = ps.get_embedding_group(check_initialized=False)
        if self.own is None and last.post_process:
            rows = padded_vocab(hf_config, last.pg_collection.tp.size())
            self.copy = LanguageModelEmbedding(
                config=last.config, vocab_size=rows,
                max_sequence_length=hf_config.max_position_embeddings,
                position_embedding_type="rope", tp_group=last.pg_collection.tp,
            ).requires_grad_(False)  # fmt: skip

    def refresh(self) -> None:
        """Has the last stage hold what the first has now. Collective over the first and the last
        pipeline stage.
        """
        held = self.own or self.copy
        if self.group is not None and held is not None:
            weight = held.word_embeddings.weight.data
            dist.broadcast(weight, dist.get_global_rank(self.group, 0), group=self.group)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """(1, tokens) -> (tokens of this tensor rank, 1, hidden_size)."""
        held = self.own or self.copy
        assert held is not None
        return held(input_ids=input_ids, position_ids=position_ids)


def mtp_logprobs(
    model: Any, embeddings: TokenEmbeddings, inputs: Inputs, hidden: Tensor,
    predict: Callable[[Inputs, Tensor], Tensor],
) -> list[Tensor]:  # fmt: skip
    """Returns for each layer the log-probabilities that it gives the unmasked tokens of the batch,
    (num_tokens,); 0 for others, and for those with no token far enough before them.

    hidden: (1, local tokens, hidden_size), of the policy. predict: log-probabilities of the tokens
    that inputs choose, of states at inputs.states.
    """
    states = hidden.detach().transpose(0, 1).contiguous().requires_grad_()
    ids, positions, found = inputs.token_ids, inputs.positions, []
    for number, layer in enumerate(model.mtp.layers, 1):
        states, ids, positions = layer(
            ids, positions, states, None, rotary_pos_emb=rotary_angles(model, inputs.packed),
            packed_seq_params=inputs.packed, embedding=embeddings,
        )  # fmt: skip
        found.append(predict(further_back(inputs, number), states.transpose(0, 1)))
    return found


def rotary_angles(model: Any, packed: Any) -> Tensor | None:
    """Returns what GPTModel gives its layers; latent attention has its own."""
    if model.config.multi_latent_attention:
        return None
    return model.rotary_pos_emb(packed.max_seqlen_q, packed_seq=True, cp_group=packed.cp_group)


def further_back(inputs: Inputs, steps: int) -> Inputs:
    """Returns the same for states that stand `steps` tokens further before the tokens that they
    predict. Tokens with fewer before them in their sequence are left out.
    """
    lens, device = inputs.batch.seq_lens, inputs.chosen.device
    begins = torch.repeat_interleave(lens.cumsum(0) - lens, lens)
    chosen = inputs.chosen.cpu()
    chosen = chosen[chosen - begins[chosen] > steps]
    states = inputs.places[chosen - 1 - steps]
    local = (states >= 0).nonzero().flatten()
    return replace(
        inputs, chosen=chosen.to(device), local=local.to(device), states=states[local].to(device)
    )


def layers_of(chunk: Any) -> list[Any]:
    """Returns the transformer layers of a chunk, those for multi-token prediction too."""
    block = getattr(chunk, "mtp", None)
    mtp = [] if block is None else [layer.transformer_layer for layer in block.layers]
    return [*chunk.decoder.layers, *mtp]
