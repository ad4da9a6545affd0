"""train.py with reinforcement learning by spmdrl: diff -u train.py train_rl.py shows all of it.

    torchrun --nproc-per-node 2 examples/embed_megatron/train_rl.py --load runs/embed/pretrained \\
        --finetune --save runs/embed/rl --rl-config examples/embed_megatron/rl_config.py --lr 5e-4
"""

import argparse
import json
import os
import random
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F

from spmdrl.cli.arguments import load_config
from spmdrl.config import PpoConfig
from spmdrl.engines.megatron import (
    cpu_shim as mcore_cpu,  # what Megatron needs on a machine without CUDA; else nothing
)

mcore_cpu.install()

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

from spmdrl.embed import attach, interleave  # noqa: E402


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--tokenizer-model", default="runs/arithmetic/model")
    parser.add_argument("--data-path", default="runs/arithmetic/sft.parquet")
    parser.add_argument("--micro-batch-size", type=int, default=32)
    parser.add_argument("--global-batch-size", type=int, default=128)
    parser.add_argument("--train-iters", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--min-lr", type=float, default=1e-4)
    parser.add_argument("--lr-warmup-iters", type=int, default=20)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--save", default="runs/embed/pretrained")
    parser.add_argument("--load", default=None)
    parser.add_argument("--finetune", action="store_true", help="load the weights alone")
    parser.add_argument("--save-interval", type=int, default=300)
    parser.add_argument("--rl-config", default=None)
    parser.add_argument("--rl-schedule", type=json.loads, default={"rl": 1}, help="of iterations")
    parser.add_argument("--log-interval", type=int, default=20)
    return parser.parse_args()


def initialize(args):
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    )
    random.seed(args.seed)
    numpy.random.seed(args.seed)
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)


def model_provider(args):
    """The model of runs/arithmetic/model, built here and initialised at random."""
    shape = json.loads(Path(args.tokenizer_model, "config.json").read_text())
    config = TransformerConfig(
        num_layers=shape["num_hidden_layers"], hidden_size=shape["hidden_size"],
        ffn_hidden_size=shape["intermediate_size"], kv_channels=shape["head_dim"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_key_value_heads"], qk_layernorm=True,
        normalization="RMSNorm", layernorm_epsilon=shape["rms_norm_eps"], gated_linear_unit=True,
        activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.1, attention_dropout=0.1,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        pipeline_dtype=torch.float32, params_dtype=torch.float32,
        gradient_accumulation_fusion=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        deallocate_pipeline_outputs=False,
    )  # fmt: skip
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=shape["vocab_size"],
        max_sequence_length=shape["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=int(shape["rope_parameters"]["rope_theta"]),
    )
    if torch.cuda.is_available():
        model.cuda()
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    return [DistributedDataParallel(config, settings, model)]


def setup_optimizer(args, model):
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=args.lr, min_lr=args.min_lr, weight_decay=0.0,
            clip_grad=args.clip_grad, use_distributed_optimizer=True, params_dtype=torch.float32,
        ),
        model,
    )  # fmt: skip
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=args.lr, min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters, lr_decay_steps=args.train_iters,
        lr_decay_style="cosine", start_wd=0.0, end_wd=0.0, wd_incr_steps=0,
        wd_incr_style="constant",
    )  # fmt: skip
    config = unwrap_model(model[0]).config
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model[0].no_sync
    return optimizer, schedule


def train_data_iterator(args):
    """(tokens, labels, loss mask) of micro-batches, for ever; every data-parallel rank its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_model)
    rows, masks = [], []
    for row in pq.read_table(args.data_path).to_pylist():
        prompt = tokenizer(row["prompt"][0]["content"])["input_ids"]
        answer = [*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id]
        rows.append(torch.tensor(prompt + answer))
        masks.append(torch.tensor([0.0] * len(prompt) + [1.0] * len(answer)))
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    table, mask = pad(rows).to(device()), pad(masks).to(device())
    generator = torch.Generator().manual_seed(args.seed)
    rank = parallel_state.get_data_parallel_rank()
    while True:
        drawn = torch.randint(len(table), (args.global_batch_size,), generator=generator)
        mine = drawn.chunk(parallel_state.get_data_parallel_world_size())[rank]
        for part in mine.split(args.micro_batch_size):
            tokens, labels = table[part, :-1].contiguous(), table[part, 1:].contiguous()
            yield tokens, labels, mask[part, 1:]


def device():
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def forward_step(data_iterator, model):
    tokens, labels, loss_mask = next(data_iterator)
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens, positions, mask, labels=labels), partial(loss_func, loss_mask)


def loss_func(loss_mask, output):
    loss = (output.float() * loss_mask).sum() / loss_mask.sum()
    return loss, {"loss": loss.detach().clone()}


def train_step(args, data_iterator, model, optimizer):
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    ranks = parallel_state.get_data_parallel_world_size()
    num_microbatches = args.global_batch_size // args.micro_batch_size // ranks
    found = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=data_iterator, model=model,
        num_microbatches=num_microbatches, seq_length=8, micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )  # fmt: skip
    _, grad_norm, _ = optimizer.step()
    loss = sum(float(part["loss"]) for part in found) / max(len(found), 1)
    return {"loss": loss, "grad_norm": grad_norm}


def sharded_state(model, optimizer, schedule, iteration, is_loading=False):
    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = unwrap_model(model[0]).sharded_state_dict(metadata=metadata)
    moments = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": moments, "schedule": schedule.state_dict(),
            "iteration": iteration}  # fmt: skip


def save_checkpoint(args, model, optimizer, schedule, iteration):
    folder = Path(args.save, f"iter_{iteration:07d}")
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(sharded_state(model, optimizer, schedule, iteration), str(folder))
    if torch.distributed.get_rank() == 0:
        Path(args.save, "latest_checkpointed_iteration.txt").write_text(str(iteration))


def load_checkpoint(args, model, optimizer, schedule):
    """Returns the iteration to go on from."""
    iteration = int(Path(args.load, "latest_checkpointed_iteration.txt").read_text())
    folder = str(Path(args.load, f"iter_{iteration:07d}"))
    if args.finetune:
        wanted = {"model": unwrap_model(model[0]).sharded_state_dict()}
        unwrap_model(model[0]).load_state_dict(dist_checkpointing.load(wanted, folder)["model"])
        optimizer.reload_model_params()
        return 0
    state = dist_checkpointing.load(
        sharded_state(model, optimizer, schedule, 0, is_loading=True), folder
    )
    unwrap_model(model[0]).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return state["iteration"]


def print_last(*words):
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(*words, flush=True)


def train(args, at_end):
    model = model_provider(args)
    optimizer, schedule = setup_optimizer(args, model)
    iteration = load_checkpoint(args, model, optimizer, schedule) if args.load else 0
    data_iterator = train_data_iterator(args)
    kinds = interleave(**args.rl_schedule)
    if args.rl_config:
        rl = attach(model, optimizer, load_config(args.rl_config, PpoConfig, {}))
        at_end.callback(rl.close)  # whatever happens
    while iteration < args.train_iters:
        started = time.perf_counter()
        if args.rl_config and kinds.kind(iteration + 1) == "rl":
            found = rl.step(kinds.count("rl", iteration + 1))
            metrics = {name: found[name] for name in ("reward/mean", "actor/grad_norm", "actor/lr")}
        else:
            metrics = train_step(args, data_iterator, model, optimizer)
        schedule.step(increment=1)
        iteration += 1
        if iteration % args.log_interval == 0:
            shown = " | ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            print_last(f"iteration {iteration} | {shown} | {time.perf_counter() - started:.2f} s")
        if iteration % args.save_interval == 0 or iteration == args.train_iters:
            save_checkpoint(args, model, optimizer, schedule, iteration)
    if args.rl_config:
        print_last(rl.evaluate(iteration))


def main():
    args = parse_args()
    with mcore_cpu.scope():
        initialize(args)
        with ExitStack() as at_end:
            train(args, at_end)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
