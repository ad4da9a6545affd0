"""train.py with reinforcement learning by spmdrl: diff -u train.py train_rl.py shows all of it.

    torchrun --nproc-per-node 2 examples/embed_fsdp2/train_rl.py --finetune \\
        --load runs/embed_fsdp2/pretrained/iter_300 --save runs/embed_fsdp2/rl --lr 5e-4 \\
        --rl-config examples/embed_fsdp2/rl_config.py --rl-schedule '{"sft": 1, "rl": 1}'
"""

import argparse
import json
import os
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from spmdrl.cli.arguments import load_config
from spmdrl.config import PpoConfig
from spmdrl.embed import attach, interleave


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="runs/arithmetic/model")
    parser.add_argument("--data-path", default="runs/arithmetic/sft.parquet")
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks")
    parser.add_argument("--train-iters", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--lr-warmup-iters", type=int, default=20)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--save", default="runs/embed_fsdp2/pretrained")
    parser.add_argument("--load", default=None, help="a folder iter_N of --save, to go on from")
    parser.add_argument("--finetune", action="store_true", help="load the weights alone")
    parser.add_argument("--save-interval", type=int, default=300)
    parser.add_argument("--log-interval", type=int, default=20)
    parser.add_argument("--rl-config", required=True)
    parser.add_argument("--rl-schedule", type=json.loads, default={"rl": 1}, help="of iterations")
    return parser.parse_args()


def build(args, device):
    """The sharded model, its optimizer and learning rates."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.lr_warmup_iters, args.train_iters)
    return model, optimizer, schedule


def batches(args, device, done):
    """(tokens, labels) of this rank, for ever, but for the first `done` batches."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows, labels = [], []
    for row in pq.read_table(args.data_path).to_pylist():
        prompt = tokenizer(row["prompt"][0]["content"])["input_ids"]
        answer = [*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id]
        rows.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([-100] * len(prompt) + answer))
    pad = partial(pad_sequence, batch_first=True)
    tokens, labels = pad(rows).to(device), pad(labels, padding_value=-100).to(device)
    generator = torch.Generator().manual_seed(args.seed)
    for iteration in range(args.train_iters):
        drawn = torch.randint(len(tokens), (args.batch_size,), generator=generator)
        if iteration >= done:
            mine = drawn.chunk(dist.get_world_size())[dist.get_rank()]
            yield tokens[mine], labels[mine]


def train_step(args, batch, model, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
    optimizer.step()
    return {"loss": loss.item(), "grad_norm": grad_norm.full_tensor().item()}


def save_checkpoint(args, model, optimizer, schedule, iteration):
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "schedule": schedule.state_dict()}
    dcp.save(state, checkpoint_id=Path(args.save, f"iter_{iteration}"))


def load_checkpoint(args, model, optimizer, schedule):
    """Returns the iteration to go on from."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights}
    if not args.finetune:
        state |= {"optimizer": moments, "schedule": schedule.state_dict()}
    dcp.load(state, checkpoint_id=args.load)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if args.finetune:
        return 0
    schedule.load_state_dict(state["schedule"])
    return schedule.last_epoch


def print_first(*words):
    if dist.get_rank() == 0:
        print(*words, flush=True)


def train(args, device, at_end):
    model, optimizer, schedule = build(args, device)
    iteration = load_checkpoint(args, model, optimizer, schedule) if args.load else 0
    kinds = interleave(**args.rl_schedule)
    data = batches(args, device, kinds.count("sft", iteration))
    rl = attach(model, optimizer, load_config(args.rl_config, PpoConfig, {}))
    at_end.callback(rl.close)  # whatever happens
    if iteration > 0 and Path(args.load, "rl.json").exists():
        rl.load_state_dict(json.loads(Path(args.load, "rl.json").read_text()))
    while iteration < args.train_iters:
        started = time.perf_counter()
        iteration += 1
        if kinds.kind(iteration) == "rl":
            found = rl.step(kinds.count("rl", iteration))
            metrics = {name: found[name] for name in ("reward/mean", "actor/grad_norm", "actor/lr")}
        else:
            metrics = train_step(args, next(data), model, optimizer)
        schedule.step()
        if iteration % args.log_interval == 0:
            shown = " | ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            print_first(f"iteration {iteration} | {shown} | {time.perf_counter() - started:.2f} s")
        if iteration % args.save_interval == 0 or iteration == args.train_iters:
            save_checkpoint(args, model, optimizer, schedule, iteration)
            if dist.get_rank() == 0:  # where the prompts stand
                file = Path(args.save, f"iter_{iteration}", "rl.json")
                file.write_text(json.dumps(rl.state_dict()))
    print_first(rl.evaluate(iteration))


def main():
    args = parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    with ExitStack() as at_end:
        train(args, device, at_end)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
