"""The plan of a push of weights: seconds and memory of one rank, for up to thousands of ranks.

No process group is needed: the ranks' layouts are worked out as FSDP2's chunk rule and vLLM's
tensor parallelism have them, of a model without data.

    python examples/bench/scale_plan.py [--model llama70b] [--world 1024] [--layout fsdp]
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from spmdrl.distributed.env import before_torch

before_torch()
import torch  # noqa: E402
from scale_control import Point  # noqa: E402

from spmdrl.weights.boxes import Box, slab, whole  # noqa: E402
from spmdrl.weights.classes import Weight  # noqa: E402
from spmdrl.weights.plan import TransferPlan, make_transfer_plan  # noqa: E402

WORLDS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SLOT_BYTES, ITEMSIZE = 256 << 20, 2  # of the default weights.bucket_mib; bfloat16
COLUMNS = ("o_proj.weight", "down_proj.weight")  # cut by columns in vLLM; norms and routers whole
WHOLE = ("norm.weight", "layernorm.weight", "mlp.gate.weight", "a_proj.weight",
         "kv_a_proj_with_mqa.weight", "bias")  # fmt: skip

Shapes = dict[str, tuple[int, ...]]
# Parts of a parameter that are weights of their own: (parameter's shape, {name: (shape, box)}).
Stacks = dict[str, tuple[tuple[int, ...], dict[str, tuple[tuple[int, ...], Box]]]]


def plan(
    world: int = 0, layout: str = "", model: str = "llama70b", tp: int = 8, rank: int = -1,
    layers: int = 0,
) -> None:  # fmt: skip
    """Prints a line for ranks 0, the middle and the last; without `world` for 2 .. 1,024 ranks,
    with the exponent of a fit of the seconds.

    layout: fsdp over all ranks, or hsdp: 64 ranks share a copy; model: llama70b or deepseek_v3, of
    `layers` layers (0: all); rank: that one alone, in this process.
    """
    if rank >= 0:
        print(json.dumps(one_plan(world, layout or "fsdp", model, tp, rank, layers)), flush=True)
        return
    for chosen in [layout] if layout else ["fsdp", "hsdp"]:
        rows = []
        for size in [world] if world else WORLDS:
            for number in sorted({0, size // 2, size - 1}):
                row = in_fresh_process(size, chosen, model, min(tp, size), number, layers)
                print(json.dumps(row), flush=True)
                rows.append(row)
        if not world:
            print(json.dumps(fit(rows, chosen)), flush=True)


def plan_points(real: list[int], simulated: list[int]) -> list[Point]:
    """For scale.py: one core's seconds to plan Llama-70B's weights on the last rank, with engines
    of 8 ranks where there are as many."""
    found = []
    for world in (*real, *simulated):
        for layout in ("fsdp", "hsdp"):
            row = in_fresh_process(world, layout, "llama70b", min(8, world), world - 1, 0)
            found.append(Point(f"weight plan, {layout}", "s", "simulated", world, row["cpu_s"]))
    return found


def in_fresh_process(*arguments: Any) -> dict[str, Any]:
    """Peak memory is of a process: each plan has its own."""
    names = ("world", "layout", "model", "tp", "rank", "layers")
    given = [f"--{name}={value}" for name, value in zip(names, arguments, strict=True)]
    command = [sys.executable, __file__, *given]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def fit(rows: list[dict[str, Any]], layout: str) -> dict[str, Any]:
    """Returns the exponents of log(seconds) over log(ranks): of all worlds, and from 64 ranks on,
    where what does not grow is no longer most of it.
    """
    result: dict[str, Any] = {"fit": "cpu_s", "layout": layout}
    for name, least in (("exponent", 2), ("exponent_from_64", 64)):
        points = [
            (math.log(r["world"]), math.log(r["plan_s"])) for r in rows if r["world"] >= least
        ]
        mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
        above = sum((x - mean_x) * (y - mean_y) for x, y in points)
        result[name] = round(above / sum((x - mean_x) ** 2 for x, _ in points), 2)
    return result


def one_plan(
    world: int, layout: str, model: str, tp: int, rank: int, layers: int
) -> dict[str, Any]:  # fmt: skip
    torch.set_num_threads(1)
    shapes, stacks = shapes_of(model, layers)
    shared = world if layout == "fsdp" else min(64, world)
    weights = weights_of(shapes, stacks, world, shared)
    regions = regions_of({weight.name: weight.shape for weight in weights}, tp)
    table = [list(range(first, first + tp)) for first in range(0, world, tp)]
    before = peak_mib()
    start, cpu = time.perf_counter(), time.process_time()
    made = make_transfer_plan(rank, weights, regions, table, ITEMSIZE, SLOT_BYTES)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "world": world, "layout": f"fsdp {shared} x {world // shared}", "model": model, "tp": tp,
        "rank": rank, "weights": len(weights), "plan_s": round(seconds, 3), "cpu_s": round(cpu, 3),
        "plan_mib": round(peak_mib() - before, 1), "block": made.block,
        "buckets": len(made.buckets), "pieces": count_pieces(made),
        "busiest_gib": round(made.cost.busiest / 2**30, 2),
    }  # fmt: skip


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def count_pieces(made: TransferPlan) -> int:
    return sum(
        len(bucket.local) + sum(map(len, bucket.shares)) + sum(map(len, bucket.sends.values()))
        for bucket in made.buckets
    )


# ---- models, without data


def shapes_of(model: str, layers: int) -> tuple[Shapes, Stacks]:
    """Returns the parameters of a model, and those that are named by their parts."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from spmdrl.weights.checkpoint_names import checkpoint_parts

    config = CONFIGS[model](layers)
    with torch.device("meta"), no_init_weights():
        module = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    stacks: Stacks = {}
    for name, parts in checkpoint_parts(config).items():
        stacks[name] = (shapes.pop(name), {part.name: (part.shape, part.box) for part in parts})
    return shapes, stacks


def llama70b(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers or 80,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip


def deepseek_v3(layers: int) -> Any:
    """The defaults of transformers' config are DeepSeek-V3's: 61 layers, 58 of 256 experts."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**({"num_hidden_layers": layers} if layers else {}))


CONFIGS = {"llama70b": llama70b, "deepseek_v3": deepseek_v3}


# ---- layouts


def weights_of(shapes: Shapes, stacks: Stacks, world: int, shared: int) -> list[Weight]:
    """Rows over `shared` neighbouring ranks, as FSDP2 cuts them; the other ranks are replicas."""
    holders = {shape: rows_of(whole(shape), world, shared) for shape in set(shapes.values())}
    found = [Weight(name, shape, holders[shape]) for name, shape in shapes.items()]
    known: dict[Any, Any] = {}
    for shape, parts in stacks.values():
        rows = rows_of(whole(shape), world, shared)
        for name, (size, box) in parts.items():
            key = (shape, box[0], size)
            if key not in known:
                known[key] = experts_holders(rows, box, size)
            found.append(Weight(name, size, known[key]))
    return found


def rows_of(box: Box, world: int, shared: int) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    step = -(-box[0][1] // shared)
    firsts = range(0, box[0][1], step)
    return tuple(
        (((first, min(first + step, box[0][1])), *box[1:]), tuple(range(part, world, shared)))
        for part, first in enumerate(firsts)
    )


def experts_holders(rows: Any, box: Box, size: tuple[int, ...]) -> Any:
    """An expert's matrix is whole on the ranks whose rows of the stack have the expert."""
    expert = box[0][0]
    return tuple((whole(size), ranks) for held, ranks in rows if held[0][0] <= expert < held[0][1])


def regions_of(shapes: Mapping[str, tuple[int, ...]], tp: int) -> list[list[tuple[int, Box]]]:
    return [list(regions_of_rank(shapes, tp, rank)) for rank in range(tp)]


def regions_of_rank(
    shapes: Mapping[str, tuple[int, ...]], tp: int, rank: int
) -> Iterator[tuple[int, Box]]:  # fmt: skip
    for number, (name, shape) in enumerate(shapes.items()):
        box = whole(shape)
        if name.endswith(COLUMNS):
            columns = slab((box[1],), tp, rank)
            assert columns is not None
            yield number, (box[0], *columns)
        elif name.endswith(WHOLE):
            yield number, box
        else:
            part = slab(box, tp, rank)
            assert part is not None
            yield number, part


if __name__ == "__main__":
    import fire

    fire.Fire(plan)
