"""Speculative decoding in vLLM: tokens are proposed, and one forward pass looks at all of them.

On a GPU vLLM's rejection sampler decides (Leviathan et al. 2023, arXiv 2211.17192): what it returns
has the policy's distribution, and its log-probabilities are the policy's. On a CPU a token is drawn
at each proposed place with the noise of that place, and a proposal is accepted where it is the
token that was drawn: the answers are those without speculation.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import RolloutConfig, require
from spmdrl.hub.hf_folder import load_hf_config, sees_images
from spmdrl.rollout.rng import mix
from spmdrl.rollout.vllm import compat
from spmdrl.rollout.vllm.cpu import AddressedNoise
from spmdrl.rollout.vllm.model_types import runs_on_cpu, untried_layers

# of vLLM's SpeculativeConfig: tokens are proposed from the sequence itself, or by a smaller model
NGRAM = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
DRAFT_MODEL = ("method", "model", "num_speculative_tokens")


def check_speculative(hf: Any, config: RolloutConfig, strict: bool) -> None:
    """Raises ConfigError for options that vLLM would not take, and where speculation is not right.

    hf: the model's config.
    """
    if not config.speculative:
        return
    given = f"rollout.speculative={dict(config.speculative)}"
    draft = config.speculative.get("model")
    names = DRAFT_MODEL if draft else NGRAM
    require(
        config.speculative.get("method", "draft_model") == ("draft_model" if draft else "ngram"),
        f"{given}: expected method 'ngram', or a draft model under 'model'. Others draft with "
        "layers of the policy, which weight pushes do not reach",
    )
    unknown = [name for name in config.speculative if name not in names]
    require(not unknown, f"{given}: {unknown} are not known here; may be set: {', '.join(names)}")
    for name in names:
        number = config.speculative.get(name, 1)
        require(
            name in ("method", "model") or (type(number) is int and number > 0),
            f"{given}: {name} is {number!r}; expected a whole number above 0",
        )
    require(
        "num_speculative_tokens" in config.speculative,
        f"{given}: num_speculative_tokens is missing: how many tokens are proposed at a time",
    )
    require(not strict, f"{given}: strict=True computes one token at a time; leave it out")
    require(config.min_p == 0, f"{given}: vLLM leaves min_p out of the tokens that it verifies")
    require(
        not (draft and sees_images(hf)),
        f"{given}: a draft model does not see the images of prompts; use method 'ngram'",
    )
    untried = untried_layers(hf.get_text_config())
    require(untried is None, f"{given} was not tried with {untried}: leave it out")
    require(
        not (draft and config.sleep) or runs_on_cpu(),
        f"{given} with rollout.sleep=True: vLLM's sleep would drop the draft model's weights, "
        "which no push brings back; set rollout.sleep=False, or use method 'ngram'",
    )
    if draft:
        check_draft_model(hf, str(draft), given)


def check_draft_model(hf: Any, draft: str, given: str) -> None:
    """Raises ConfigError where the policy cannot take the tokens that a draft model proposes."""
    require(
        Path(draft, "config.json").is_file(),
        f"{given}: there is no model in {draft}; give the folder of one",
    )
    own = hf.get_text_config().vocab_size
    its = load_hf_config(draft).get_text_config().vocab_size
    require(
        own == its, f"{given}: the draft model has {its} tokens, and the policy {own}: they differ"
    )


def keep_off_openmp(config: RolloutConfig) -> None:
    """Has numba, in which vLLM looks for n-grams, run them in threads of its own.

    By default it takes OpenMP, of which torch has a pool already: two pools wait for work at the
    same time, and all that torch computes on the CPU afterwards took ten times as long on two
    cores. Whoever has set NUMBA_THREADING_LAYER has chosen. Only one thread of a process may call
    code that is parallel in numba then: an engine's own.
    """
    if config.speculative and "model" not in config.speculative:
        import numba

        if "NUMBA_THREADING_LAYER" not in os.environ:
            numba.config.THREADING_LAYER = "workqueue"


def speculative_config(config: RolloutConfig) -> dict[str, Any] | None:
    """Returns vLLM's speculative_config; None without speculation."""
    if not config.speculative:
        return None
    ranks = {"draft_tensor_parallel_size": config.tensor_parallel}
    return dict(config.speculative) | (ranks if "model" in config.speculative else {})


def accept_what_is_drawn(runner: Any, noise: AddressedNoise) -> None:
    """Has a runner on a CPU accept the proposed tokens that are equal to the drawn ones."""
    sampler = runner.rejection_sampler
    forward = sampler.forward

    def verify(metadata: Any, *args: Any, **kwargs: Any) -> Any:
        noise.num_drafted = torch.tensor(metadata.num_draft_tokens)
        try:
            with compat.rejection_sampling_by(partial(draw_and_compare, noise), expand):
                return forward(metadata, *args, **kwargs)
        finally:
            noise.num_drafted = 0

    sampler.forward = verify


def draw_and_compare(
    noise: AddressedNoise, drafted: Tensor, num_drafted: list[int], most: int, _ends: Tensor,
    _draft_probs: Tensor | None, logits: Tensor, last: Tensor, metadata: Any, **_: Any,
) -> Tensor:  # fmt: skip
    """Stands in for vLLM's rejection_sample.

    drafted: (num_drafts,) tokens that were proposed, of all requests one after the other.
    num_drafted: how many each request has. most: the largest of them. logits: (num_drafts, vocab),
    by temperature and masked. last: (num_seqs, 1) tokens that were drawn behind the proposed ones.
    Returns (num_seqs, most + 1) int32 token ids, -1 behind those that are accepted.
    """
    counts = torch.tensor(num_drafted)
    rows = torch.arange(len(num_drafted)).repeat_interleave(counts)
    places = torch.arange(len(drafted)) - (counts.cumsum(0) - counts)[rows]
    # which writes into the logits
    drawn = compat.gumbel_argmax(logits.clone(), mix(noise.addresses()[rows] + places))
    if metadata.all_greedy:
        drawn = logits.argmax(-1)
    elif not metadata.all_random:
        drawn = torch.where(metadata.temperature[rows] == 0, logits.argmax(-1), drawn)
    tokens = torch.full((len(num_drafted), most + 1), -1)
    tokens[rows, places] = drawn
    tokens[torch.arange(len(num_drafted)), counts] = last.flatten().long()
    refused = torch.zeros_like(tokens, dtype=torch.bool)
    refused[rows, places] = drawn != drafted
    after_refused = refused.cumsum(1) - refused.long() > 0
    return tokens.masked_fill(after_refused, -1).int()


def expand(
    values: Tensor, ends: Tensor, num_drafts: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """(num_seqs,) a value of each request -> (num_drafts,) of each proposed token. Stands in for
    vLLM's expand_batch_to_tokens, whose Triton kernel does nothing on a CPU.

    ends: (num_seqs,) where a request's proposed tokens end. One value is replaced by another.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    expanded = values.repeat_interleave(counts.long(), output_size=num_drafts)
    return torch.where(expanded == replace_from, replace_to, expanded)
