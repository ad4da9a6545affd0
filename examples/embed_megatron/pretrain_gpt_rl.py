"""Megatron-LM's own pretrain() with reinforcement learning by spmdrl in place of its train_step.

    git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM
    export MEGATRON_LM=$PWD/Megatron-LM PYTHONPATH=$PWD/Megatron-LM
    torchrun --nproc-per-node 8 examples/embed_megatron/pretrain_gpt_rl.py \\
        --rl-config rl_config.py --hf-model Qwen/Qwen3-0.6B ... and what pretrain_gpt.py takes

Megatron-LM is not changed. Its arguments, model, optimizer, learning rates, checkpoints and log are
used as they are. --global-batch-size only moves the learning rate's schedule, which counts samples:
what is sampled and learnt from stands in the RL config.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from gpt_builders import gpt_builder
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, pretrain, print_rank_0, training
from model_provider import model_provider

from spmdrl.cli.arguments import load_config
from spmdrl.config import PpoConfig
from spmdrl.embed import attach, load_hf_weights, save_hf_weights

SHOWN = ("reward/mean", "response/length_mean", "actor/loss", "actor/logprob_diff_max")
megatron_save_checkpoint = training.save_checkpoint
rl = None  # attached in the first train_step, when model, optimizer and checkpoint are there


def add_rl_args(parser):
    group = parser.add_argument_group(title="reinforcement learning")
    group.add_argument("--rl-config", required=True, help="a Python file that defines config")
    group.add_argument("--hf-model", help="start from these weights where --load finds nothing")
    return parser


def attach_rl(model, optimizer):
    """Once. The KL reference is written beside the first checkpoint, so that a run that goes on
    from --load has the same one."""
    args = get_args()
    config = load_config(args.rl_config, PpoConfig, {})
    if args.hf_model and args.iteration == 0:
        load_hf_weights(model, args.hf_model, optimizer)
    if config.algo.kl_coef > 0 and config.ref.model is None and args.save:
        folder = Path(args.save, "reference")
        if args.iteration == 0:
            save_hf_weights(model, folder, like=config.model)
        config = replace(config, ref=replace(config.ref, model=str(folder)))
    attached = attach(model, optimizer, config)
    if args.iteration > 0:
        folder = rl_folder(args.load, args.iteration)
        attached.load_state_dict(json.loads(Path(folder, "state.json").read_text()))
        for name, engine in attached.engines.items():
            engine.load(Path(folder, name))
    return attached


def train_step(
    forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config,
    forward_backward_func, iteration=None,
):  # fmt: skip
    """As training.train_step, whose eight results these are."""
    global rl
    args = get_args()
    rl = rl or attach_rl(model, optimizer)
    metrics = rl.step(args.curr_iteration + 1)
    samples = get_num_microbatches() * args.micro_batch_size * mpu.get_data_parallel_world_size()
    opt_param_scheduler.step(increment=samples)
    device = next(model[0].parameters()).device
    shown = {
        name: torch.tensor([metrics[name]], device=device) for name in SHOWN if name in metrics
    }
    grad_norm = metrics.get("actor/grad_norm")
    # losses, skipped, should_checkpoint, should_exit, exit_code, grad_norm, zeros, attention logit
    return shown, 0, False, False, 0, grad_norm, None, 0


def save_checkpoint(iteration, *args, **kwargs):
    """Megatron's checkpoint, then where the data stands and the models that are ours."""
    megatron_save_checkpoint(iteration, *args, **kwargs)
    folder = rl_folder(get_args().save, iteration)
    for name, engine in rl.engines.items():
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        engine.save(Path(folder, name))
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        Path(folder, "state.json").write_text(json.dumps(rl.state_dict()))


def rl_folder(root, iteration):
    return Path(root, "rl", f"iter_{iteration:07d}")


def evaluate_and_print_results(
    prefix, forward_step_func, data_iterator, model, iteration, *_, **__
):
    """Answers the held-out prompts of the RL config, every --eval-interval iterations."""
    if rl is not None and rl.run.held_out:
        scores = rl.evaluate(iteration)
        print_rank_0(" | ".join(f"{name} {value:.6g}" for name, value in scores.items()))


class Counted(torch.utils.data.Dataset):
    """As many rows as Megatron wants to count: prompts come from the RL config."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"text": torch.zeros(1, dtype=torch.int64)}


def datasets_provider(num_samples, vp_stage=None):
    return [Counted(max(int(count or 0), 1)) for count in num_samples]


datasets_provider.is_distributed = True


def main():
    training.train_step = train_step
    training.save_checkpoint = save_checkpoint
    training.evaluate_and_print_results = evaluate_and_print_results
    try:
        pretrain(
            datasets_provider, partial(model_provider, gpt_builder), ModelType.encoder_or_decoder,
            None, extra_args_provider=add_rl_args,
        )  # fmt: skip
    finally:
        if rl is not None:
            rl.close()


if __name__ == "__main__":
    main()
