"""Makes what a checkpoint has beside its weights."""

from __future__ import annotations

from typing import Any

from spmdrl.data.processor_files import ProcessorFiles
from spmdrl.engines.stored_dtype import as_stored, stored_dtype
from spmdrl.hub.hf_folder import load_hf_config, sees_images
from spmdrl.hub.remote_code import code_files


def files_beside_weights(hf: Any, kind: str, model: str) -> list[Any]:
    """Returns what a checkpoint has beside its weights, each with save_pretrained: configs, code of
    the model's own, and the processor of its images.
    """
    config = as_stored(hf.config, stored_dtype(load_hf_config(model), model))
    generation = [hf.generation_config] if kind != "reward" else []
    processor = [ProcessorFiles(model)] if sees_images(hf.config) else []
    return [config, *generation, *code_files(hf.config), *processor]
