"""Checkpoint -> Hugging Face folder: python -m spmdrl.export --checkpoint DIR --out DIR

On CPUs, whatever wrote the checkpoint. One tensor is in memory at a time. Several processes may
share the work, as in python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.export ...: each writes
files of its own, and the folder is a model when the last is done. A checkpoint of adapters gives
the whole model, base and adapter merged, or with --adapter what peft loads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import fire

from spmdrl.cli.help import asks_for_help, refuse_unknown
from spmdrl.cli.hub_names import HubName, hub_model
from spmdrl.cli.paths import check_model_path, check_writable, missing_checkpoint
from spmdrl.config import ConfigError
from spmdrl.distributed.env import before_torch, without_garbage_collection
from spmdrl.distributed.exit import FAILED, exit_config, leave, say
from spmdrl.distributed.output import keep_output
from spmdrl.distributed.progress import LIBRARIES, PROGRESS


def main(
    checkpoint: str = "", out: str = "", dtype: str = "", ema: bool = False, adapter: bool = False,
    base: str = "", without_mtp: bool = False, trust_remote_code: bool = False,
    push_to_hub: str = "", private: bool = True, commit_message: str = "", **others: Any,
) -> None:  # fmt: skip
    """Writes safetensors, config and tokenizer that AutoModelForCausalLM and vLLM load; of a reward
    model what AutoModelForSequenceClassification loads.

    Args:
        checkpoint: a folder checkpoints/step_N of a run
        out: the folder to write; it must not hold a model yet, and with --push_to_hub nothing
        dtype: bfloat16, float16, or float32, which is bit for bit what was trained; if it is not
            given, that of the model that the run started from
        ema: the moving average of the weights, which a run with actor.ema keeps
        adapter: of a run with lora, write the adapter alone, for peft.PeftModel.from_pretrained
        base: where the model lies that the run started from, if it has been moved, or its name on a
            hub: that which lora has adapted, or whose multi-token prediction layers are kept
        without_mtp: leave out the multi-token prediction layers
        trust_remote_code: run Python files of the model that the checkpoint is of
        push_to_hub: a repository owner/name on the Hugging Face Hub, which is made if there is
            none, to upload the folder to, with a model card; modelscope:owner/name: on ModelScope.
            The token is that of HF_TOKEN, or MODELSCOPE_API_TOKEN
        private: with --push_to_hub, only its owner sees the repository; False: everyone does
        commit_message: with --push_to_hub; if it is not given, it names the step
    """
    if asks_for_help(others, main):
        return
    keep_output()
    PROGRESS.start(f"reading {checkpoint}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the GPUs may be in use by the run
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        refuse_unknown(others, main)
        check_flags({"ema": ema, "adapter": adapter, "without_mtp": without_mtp,
                     "trust-remote-code": trust_remote_code, "private": private})  # fmt: skip
        if adapter and dtype:
            raise ConfigError(
                "--dtype has no effect with --adapter, which is written in float32, as trained"
            )
        check_given(str(checkpoint), str(out), str(base))
        target = target_of(push_to_hub, private, commit_message)
        if target is not None and rank == 0:
            check_empty(str(out))
            PROGRESS.now(f"asking for the repository {target}")
            from spmdrl.hub.upload import open_repository

            open_repository(target, private)
        write(str(checkpoint), str(out), dtype, ema, adapter, str(base), without_mtp,
              trust_remote_code, target, commit_message, rank, world)  # fmt: skip
    except ConfigError as error:
        exit_config(error)
    except OSError as error:  # its text names the file, and the room that there is
        say(f"\nspmdrl: {error}")
        leave(FAILED)
    PROGRESS.stop()


def write(
    checkpoint: str, out: str, dtype: str, ema: bool, adapter: bool, base: str, without_mtp: bool,
    trust_remote_code: bool, target: HubName | None, commit_message: str, rank: int, world: int,
) -> None:  # fmt: skip
    """Writes this process's part of the folder; the first one uploads it. Raises ConfigError."""
    PROGRESS.now(LIBRARIES)
    before_torch()
    with without_garbage_collection():
        from spmdrl.distributed.process import LineHandler
        from spmdrl.engines.hf_export import (  # torch comes in here, see spmdrl/ppo.py
            Writers,
            export,
            export_adapter,
        )
        from spmdrl.hub.hf_folder import keep_tower
        from spmdrl.hub.remote_code import allow_code
        from spmdrl.hub.upload import push_export

    folders = Path(checkpoint), Path(out)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[LineHandler()])
    logging.getLogger("spmdrl").setLevel(logging.INFO)
    PROGRESS.now(f"reading the weights of {checkpoint} and writing them to {out}")
    if trust_remote_code:
        allow_code(str(folders[0] / "hf"))
    keep_tower(str(folders[0] / "hf"))  # whose config has one where it was trained
    if adapter and rank == 0:  # it is small
        export_adapter(*folders, base, ema)
    elif not adapter:
        writers = Writers(rank, world, partial(wait_for_all, world))
        export(*folders, dtype, ema, base, without_mtp, writers)
    PROGRESS.now("")
    if rank == 0:
        PROGRESS.line(f"wrote {out}")
    if target is not None and rank == 0:
        PROGRESS.now(f"uploading {out} to {target}")
        address = push_export(target, *folders, commit_message)
        PROGRESS.now("")
        PROGRESS.line(f"pushed it to {address}")


def wait_for_all(world: int) -> None:
    """Returns when all processes of an export have called it as often as this one."""
    import torch.distributed as dist

    if world == 1:
        return
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(days=1))
    dist.barrier()


def check_flags(flags: Mapping[str, Any]) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError(f"--{name} {flag}: it takes no value")


def target_of(push_to_hub: str, private: bool, commit_message: str) -> HubName | None:
    """Returns the repository to push to; None: there is none. Raises ConfigError."""
    if not push_to_hub:
        if not private or commit_message:
            raise ConfigError("--private and --commit_message go with --push_to_hub owner/name")
        return None
    name = hub_model("--push_to_hub", str(push_to_hub))
    if name is None or name.revision:
        raise ConfigError(
            f"--push_to_hub {push_to_hub}: expected owner/name, or modelscope:owner/name"
        )
    return name


def check_given(checkpoint: str, out: str, base: str) -> None:
    """Raises ConfigError for folders that cannot be read, or written."""
    if not checkpoint:
        raise ConfigError("--checkpoint DIR is required: a folder checkpoints/step_N of a run")
    if not os.path.isfile(Path(checkpoint, "manifest.json")):
        raise ConfigError(f"--checkpoint {checkpoint}: {missing_checkpoint(Path(checkpoint))}")
    if not out:
        raise ConfigError("--out DIR is required: the folder to write")
    check_writable("--out", out)
    if base:
        check_model_path("--base", base)


def check_empty(out: str) -> None:
    """Raises ConfigError where a push would upload more than the export, or overwrite a file."""
    if os.path.isdir(out) and os.listdir(out):
        raise ConfigError(
            f"--out {out} is not empty, and --push_to_hub uploads all that lies in it: name a "
            "folder that is empty or not there"
        )


if __name__ == "__main__":
    fire.Fire(main)
