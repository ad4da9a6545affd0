"""Hugging Face folders in and out of another program's Megatron model, in any layout it has.

load_hf_weights(model, "Qwen/Qwen3-8B", optimizer)              # each rank reads its own parts
save_hf_weights(model, "out/step_100", like="Qwen/Qwen3-8B")    # transformers and vLLM load it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from spmdrl.config import require
from spmdrl.distributed.once_per_host import once_per_host
from spmdrl.distributed.phases import Phases
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import process_groups
from spmdrl.engines.megatron.external_model import check_host_model
from spmdrl.engines.megatron.hf_mapping import load_pretrained
from spmdrl.engines.megatron.inputs import SequenceSplit
from spmdrl.engines.megatron.parallel_state import RoleState
from spmdrl.engines.megatron.parts import Groups, Parts, generation_config
from spmdrl.engines.stored_dtype import as_stored
from spmdrl.hub.download import local_model
from spmdrl.hub.hf_folder import load_hf_config, load_tokenizer
from spmdrl.weights.transfer import gathered

FILE_BYTES = 5_000_000_000  # of one safetensors file
BUCKET_BYTES = 256 << 20  # gathered at a time


def load_hf_weights(model: Any, folder: str, optimizer: Any = None) -> None:
    """Fills a program's GPTModel chunks with the weights of a Hugging Face model.

    model: the chunks of this rank, or the only one, wrapped in DistributedDataParallel or not;
    folder: a folder or hub id with safetensors; optimizer: the MegatronOptimizer, if there is one
    already, whose float32 weights are set too. Every rank reads its own parts of the files alone.
    Collective over all ranks. Raises ConfigError on all of them where the model is not what the
    folder's config.json describes, or a file is damaged.
    """
    with everyone() as topology:
        phases = Phases(topology)
        with phases("load weights"):
            folder = once_per_host(partial(local_model, "folder", folder), topology)[0]
            hf_config = load_hf_config(folder)
            parts = parts_of(chunks_of(model), optimizer, hf_config)
            check_host_model(parts, hf_config)
        with phases("load weights"):
            load_pretrained(parts.raw, Path(folder), hf_config)
            if optimizer is not None:
                optimizer.reload_model_params()


def save_hf_weights(
    model: Any, folder: str | Path, like: str, dtype: torch.dtype | None = None
) -> None:  # fmt: skip
    """Writes a program's GPTModel as a Hugging Face folder: safetensors, config and tokenizer.

    model: as for load_hf_weights; folder: where no model lies yet; like: the Hugging Face folder or
    hub id of the same architecture, whose config and tokenizer are copied; dtype: None is that of
    the model. Rank 0 writes files of at most 5 GB and holds no more than one of them at a time.
    Collective over all ranks. Raises ConfigError on all of them.
    """
    out = Path(folder)
    with everyone() as topology:
        phases = Phases(topology)
        with phases("save weights"):
            require(
                not Path(out, "config.json").exists(),
                f"save_hf_weights: {out} already holds a model; name another folder",
            )
            like = once_per_host(partial(local_model, "like", like, False), topology)[0]
            hf_config = load_hf_config(like)
            parts = parts_of(chunks_of(model), None, hf_config)
            check_host_model(parts, hf_config)
        with phases("save weights"):
            named = gathered(
                parts.named_shards(), dtype or parts.config.params_dtype, BUCKET_BYTES, topology,
                to_first=True,
            )  # fmt: skip
            if topology.rank == 0:
                write_files(named, out)
                saved = as_stored(hf_config, dtype or parts.config.params_dtype)
                for part in (*generation_config(like), load_tokenizer(like), saved):
                    part.save_pretrained(out)  # config.json last: with it the folder is whole
            else:
                for _ in named:
                    pass


def write_files(named: Iterable[tuple[str, Tensor]], out: Path) -> None:
    """model-00001.safetensors and so on, and their index."""
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    size = total = number = 0

    def write() -> None:
        nonlocal held, size, number
        number += 1
        name = f"model-{number:05}.safetensors"
        save_file(held, out / name, {"format": "pt"})
        found.update(dict.fromkeys(held, name))
        held, size = {}, 0

    for name, tensor in named:
        count = tensor.numel() * tensor.element_size()
        if held and size + count > FILE_BYTES:
            write()
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size, total = size + count, total + count
    write()
    index = {"metadata": {"total_size": total}, "weight_map": found}
    Path(out, "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def chunks_of(model: Any) -> list[Any]:
    return list(model) if isinstance(model, Sequence | nn.ModuleList) else [model]


def parts_of(chunks: list[Any], optimizer: Any, hf_config: PreTrainedConfig) -> Parts:
    """A program's model as the engine sees it. Collective over each model-parallel group."""
    from megatron.core import parallel_state as ps

    require(
        ps.model_parallel_is_initialized(),
        "megatron.core.parallel_state.initialize_model_parallel() has to be called first",
    )
    return Parts(
        "policy", chunks, optimizer, RoleState.of_host(), Groups.of_parallel_state(),
        SequenceSplit("packed", 1, 0, 1), hf_config, [hf_config],
        ps.get_data_parallel_world_size(with_context_parallel=True), owned=False,
    )  # fmt: skip


@contextmanager
def everyone() -> Iterator[Topology]:
    """All ranks of the program, with process groups that are gone afterwards."""
    before = process_groups()
    try:
        yield Topology.build(device_here(), hosted=True, dp=-1)
    finally:
        destroy_groups(before)


def destroy_groups(standing: list[dist.ProcessGroup]) -> None:
    """Destroys the groups that are not in the list."""
    for group in [g for g in process_groups() if g not in standing]:
        dist.destroy_process_group(group)


def device_here() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
