"""From prompts to Samples: which rank asks what, with which seed."""

from __future__ import annotations

import hashlib
from typing import Any

from spmdrl.config import RolloutConfig
from spmdrl.rollout.engine import Request, RolloutEngine, SamplingParams
from spmdrl.topology import Topology
from spmdrl.types import Prompt, Sample


def seed_of(
    run_seed: int, step: int, prompt_id: int, sample_index: int, purpose: str = "train"
) -> int:
    """The seed of one sample, from its address alone: 0 .. 2**63 - 1.

    `purpose` separates address spaces: evaluation after step 10 ("eval") must not draw the noise
    that training in step 10 drew.
    """
    address = f"{purpose}/{run_seed}/{step}/{prompt_id}/{sample_index}"
    digest = hashlib.blake2b(address.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def training_params(config: RolloutConfig) -> SamplingParams:
    """How the policy samples while it is trained."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_tokens=config.min_tokens,
        max_tokens=config.max_tokens,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
        ignore_eos=config.ignore_eos,
    )


def greedy_params(config: RolloutConfig) -> SamplingParams:
    """The same stops and lengths, the most likely token each time: for evaluation."""
    return SamplingParams(
        temperature=0.0,
        min_tokens=config.min_tokens,
        max_tokens=config.max_tokens,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
        ignore_eos=config.ignore_eos,
    )


def sample_prompts(
    engine: RolloutEngine,
    prompts: list[tuple[int, Prompt]],
    params: SamplingParams,
    n: int,
    *,
    run_seed: int,
    step: int,
    policy_version: int,
    topology: Topology,
    tokenizer: Any,
    purpose: str = "train",
) -> list[Sample]:
    """Asks each prompt `n` times; every sample exists on exactly one rank afterwards.

    prompts: (group, Prompt) of the whole step, the same list on every rank. Data rank r takes
    prompts r, r + dp, r + 2 dp, ...; the ranks of a tensor-parallel group make the same call, and
    the first of them returns the samples.
    """
    mine = prompts[topology.axis_rank("dp") :: topology.axis_size("dp")]
    asked = [(group, prompt, index) for group, prompt in mine for index in range(n)]
    requests = [
        Request(prompt.token_ids, seed_of(run_seed, step, prompt.id, index, purpose))
        for _, prompt, index in asked
    ]
    completions = engine.generate(requests, params)
    if topology.axis_rank("tp") != 0:
        return []
    texts = tokenizer.batch_decode(
        [completion.token_ids for completion in completions], skip_special_tokens=True
    )
    return [
        Sample(
            prompt=prompt,
            group=group,
            index=index,
            response_ids=completion.token_ids,
            rollout_logprobs=completion.logprobs,
            loss_mask=[1] * len(completion.token_ids),
            policy_version=[policy_version] * len(completion.token_ids),
            finish_reason=completion.finish_reason,
            response=text,
        )
        for (group, prompt, index), completion, text in zip(asked, completions, texts, strict=True)
    ]


def eos_token_ids(model: str) -> tuple[int, ...]:
    """What ends a sequence: of generation_config.json, else of config.json."""
    from transformers import AutoConfig, GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the file is optional
        found = None
    if found is None:
        found = AutoConfig.from_pretrained(model).get_text_config().eos_token_id
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def check_lengths(requests: list[Request], params: SamplingParams, max_model_len: int) -> None:
    """Raises ValueError where a prompt and its answer cannot fit the engine."""
    longest = max((len(request.prompt_ids) for request in requests), default=1)
    if any(not request.prompt_ids for request in requests):
        raise ValueError("a prompt has no tokens")
    if longest + params.max_tokens > max_model_len:
        raise ValueError(
            f"a prompt of {longest} tokens and max_tokens={params.max_tokens} make "
            f"{longest + params.max_tokens}, more than max_model_len={max_model_len}"
        )
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens} must be in 0..max_tokens={params.max_tokens}"
        )
