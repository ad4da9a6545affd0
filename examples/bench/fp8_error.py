"""What FP8 products change: python examples/bench/fp8_error.py --model DIR

The policy of engine fsdp on one rank, for each recipe of TrainConfig.fp8 and without, in bfloat16
and in float32. Sequences are runs of `--length` tokens of a text, `--sequences` of them, each with
an advantage of 1 or -1 and its last three quarters in the loss. A JSON line each:

logprob_rms, logprob_max: of the differences of the tokens' log-probabilities from those in float32
gradient_error, gradient_cosine: |g - g32| / |g32| and the cosine of the angle, over all weights
between_logprob_max, between_gradient: the largest difference of a log-probability, and the relative
one of gradients, between all sequences in one micro-batch and one in each

The last row has `own scales`: torchao's recipe as it is, whose tensorwise scales are no powers of
two. `--cases` takes names with semicolons between them; the first is always computed. A CPU adds up
products of rounded factors in float32, a GPU with fewer bits (docs/fp8.md).
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from spmdrl.distributed.env import before_torch

before_torch()
import fire  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from spmdrl.algo.objectives import policy_objective  # noqa: E402
from spmdrl.config import AlgoConfig, OptimConfig, TrainConfig  # noqa: E402
from spmdrl.data.packing import empty_batch  # noqa: E402
from spmdrl.distributed.process import prepare_environment, start_process_group  # noqa: E402
from spmdrl.distributed.topology import Topology  # noqa: E402
from spmdrl.engines.fsdp import float8  # noqa: E402
from spmdrl.engines.fsdp.engine import FsdpEngine  # noqa: E402
from spmdrl.hub.hf_folder import load_tokenizer  # noqa: E402
from spmdrl.types import Batch  # noqa: E402

CASES: list[tuple[str, dict[str, Any], bool]] = [  # name, fields, scales are powers of two
    ("float32", {"dtype": "float32"}, True),
    ("bfloat16", {}, True),
    ("tensorwise", {"fp8": "tensorwise"}, True),
    ("rowwise", {"fp8": "rowwise"}, True),
    ("rowwise_with_gw_hp", {"fp8": "rowwise_with_gw_hp"}, True),
    ("tensorwise, own scales", {"fp8": "tensorwise"}, False),
]


def batch_of(model: str, text: str, sequences: int, length: int) -> Batch:
    ids = load_tokenizer(model)(Path(text).read_text()).input_ids
    assert len(ids) >= sequences * length, f"{text} has {len(ids)} tokens, too few"
    batch = empty_batch(torch.full((sequences,), length))
    batch.token_ids = torch.tensor(ids[: sequences * length])
    mask = torch.ones(sequences, length)
    mask[:, : length // 4] = 0
    signs = torch.ones(sequences, 1)
    signs[::2] = -1
    batch.loss_mask, batch.advantages = mask.flatten(), (mask * signs).flatten()
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def numbers(model: str, config: TrainConfig, topology: Topology, batch: Batch) -> list[Tensor]:
    """Log-probabilities of the tokens in the loss, and the gradient of all weights, (n,) each."""
    engine: Any = FsdpEngine.build("policy", model, config, topology)
    logprobs = engine.logprobs(batch, 1.0).logprobs[batch.loss_mask > 0]
    grads: list[Tensor] = []
    engine.optimizer.step = lambda: grads.extend(
        p.grad.full_tensor().flatten().cpu() for p in engine.params
    )
    engine.update(batch, policy_objective(AlgoConfig()), 1.0)
    del engine.optimizer.step  # which refers to the engine: its memory is to be free for the next
    return [logprobs, torch.cat(grads)]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def rows(model: str, topology: Topology, batch: Batch, length: int, chosen: str | None) -> Any:
    """Yields a row of each case; the first is what the others are compared with."""
    exact: list[Tensor] = []
    optim = OptimConfig(clip_norm=1e9)
    names = {name for name, *_ in CASES} if chosen is None else {CASES[0][0], *chosen.split(";")}
    for name, fields, are_powers in (case for case in CASES if case[0] in names):
        float8.POWERS_OF_TWO = are_powers
        config = TrainConfig(micro_batch_tokens=batch.num_tokens, optim=optim, **fields)
        logprobs, grad = numbers(model, config, topology, batch)
        each = numbers(model, replace(config, micro_batch_tokens=length), topology, batch)
        exact = exact or [logprobs, grad]
        apart = logprobs - exact[0]
        yield {
            "case": name, "tokens": len(logprobs),
            "logprob_rms": float(apart.square().mean().sqrt()),
            "logprob_max": float(apart.abs().max()),
            "gradient_error": distance(grad, exact[1]),
            "gradient_cosine": float(torch.cosine_similarity(grad.double(), exact[1].double(), 0)),
            "between_logprob_max": float((logprobs - each[0]).abs().max()),
            "between_gradient": distance(each[1], grad),
        }  # fmt: skip


def main(
    model: str, text: str = "README.md", sequences: int = 8, length: int = 64,
    cases: str | None = None,
) -> None:  # fmt: skip
    """model: a Hugging Face folder. text: a file whose first tokens are the sequences."""
    prepare_environment()
    topology = Topology.build(start_process_group(timedelta(minutes=5)), dp=1, fsdp=1)
    for row in rows(model, topology, batch_of(model, text, sequences, length), length, cases):
        print(json.dumps({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()}),
              flush=True)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    fire.Fire(main)
