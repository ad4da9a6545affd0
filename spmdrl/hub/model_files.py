"""Reads what the files of a model's folder say, before any weight is read.

All of it would come out where the model is built, or worse, would not: weights of another type are
cast in silence, and a model without an end-of-sequence token answers until it is cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto

from spmdrl.cli.hub_names import name_of
from spmdrl.config import ConfigError, RolloutConfig
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.hub.remote_code import UNREADABLE, has_foreign_code, reason_of

FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of the types that weights are read from
CLASSIFIER = "ForSequenceClassification"
INDEX = "model.safetensors.index.json"


def check_model_files(
    name: str,
    model: str,
    hf: PreTrainedConfig,
    is_policy: bool = True,
    has_weights: bool = True,
) -> None:
    """Raises ConfigError where the folder's files cannot make the model that its config.json says.

    name: of the field. is_policy: it is to sample, so it has to be a language model.
    """
    check_architectures(name, model, hf, is_policy)
    if has_weights and Path(model).is_dir():
        check_weight_files(name, Path(model), hf, is_download=name_of(model) is not None)


def check_architectures(name: str, model: str, hf: PreTrainedConfig, is_policy: bool) -> None:
    """vLLM goes by `architectures`, transformers by `model_type`: both must be of one family."""
    said = list(hf.architectures or ())
    families = families_of_classes()
    other = [arch for arch in said if hf.model_type not in families.get(arch, {hf.model_type})]
    if other and not has_foreign_code(hf):
        raise ConfigError(
            f"{name}: {model!r}: its config.json has model_type={hf.model_type!r} and "
            f"architectures={said}, which is of {' or '.join(sorted(families[other[0]]))}. vLLM "
            "would build the one and training the other: correct config.json"
        )
    if is_policy and said and all(arch.endswith(CLASSIFIER) for arch in said):
        raise ConfigError(
            f"{name}: {model!r}: its config.json has architectures={said}: a classifier, which "
            "writes no text. Name a language model"
        )


def families_of_classes() -> dict[str, set[str]]:
    """Class of transformers' -> the model types that it is a class for."""
    families: dict[str, set[str]] = {}
    for table, entries in vars(modeling_auto).items():
        if table.startswith("MODEL_") and table.endswith("_MAPPING_NAMES"):
            for kind, names in entries.items():
                for each in (names,) if isinstance(names, str) else names:
                    families.setdefault(each, set()).add(kind)
    return families


def check_weight_files(
    name: str, folder: Path, hf: PreTrainedConfig, is_download: bool = False
) -> None:  # fmt: skip
    """Raises ConfigError for a file that is missing, damaged or of numbers that are no weights.

    is_download: the folder is in a hub's cache. Then none is missed here: training/fetch.py has
    downloaded all, or, for a dry run, none.
    """
    files = sorted(folder.glob("*.safetensors"))
    pickled = list(folder.glob("*.bin"))
    if not files and not pickled and not is_download:
        raise ConfigError(
            f"{name}: {str(folder)!r} has no weights: no *.safetensors and no *.bin. Are all files "
            "of it there?"
        )
    missing = [] if is_download else missing_shards(name, folder)
    if missing:
        raise ConfigError(
            f"{name}: {str(folder)!r} lacks {', '.join(missing[:5])}, which {INDEX} names. Fetch "
            "or copy them"
        )
    quantized = getattr(hf, "quantization_config", None) is not None
    for file in files:
        for tensor, kind in matrices_of(file):
            if kind not in FLOATS and not quantized:
                raise ConfigError(
                    f"{name}: {file}: {tensor} is of {kind} and config.json has no "
                    "quantization_config that says what its numbers mean: name a model in "
                    "bfloat16, float16 or float32"
                )


def missing_shards(name: str, folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file() or Path(folder, "model.safetensors").is_file():  # which is read first
        return []
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name}: {index} cannot be read: {error}") from error
    return sorted(shard for shard in map(str, named) if not Path(folder, shard).is_file())


def matrices_of(file: Path) -> Iterator[tuple[str, str]]:
    """(name, type in safetensors' words) of each matrix; raises ConfigError for a damaged file."""
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                part = opened.get_slice(name)
                if name.endswith("weight") and len(part.get_shape()) > 1:
                    yield name, part.get_dtype()
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model: {file} is damaged: {error}. Fetch or copy it again") from error


def eos_token_ids(model: str) -> tuple[int, ...]:
    """Returns the token ids that end a sequence: of generation_config.json, else of config.json; ()
    where neither says.

    Raises ConfigError for what are no token ids.
    """
    config = load_hf_config(model)
    text = config.get_text_config()
    found, file = None, "generation_config.json"
    try:
        found = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the file is optional
        pass
    except UNREADABLE as error:
        raise ConfigError(f"model: {model!r}: {file}: {reason_of(error)}") from error
    if found is None:
        found, file = getattr(config, "eos_token_id", None), "config.json"
    if found is None:  # models of several parts have it in one of the two places
        found = getattr(text, "eos_token_id", None)
    ids = () if found is None else tuple(found) if isinstance(found, list | tuple) else (found,)
    most = text.vocab_size
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < most:
            raise ConfigError(
                f"model: {model!r}: {file} has eos_token_id={found!r}; expected ids of tokens, "
                f"numbers from 0 to {most - 1}, since the model has {most} tokens"
            )
    return ids


def check_eos(model: str, rollout: RolloutConfig) -> None:
    """Raises ConfigError where no answer could end before rollout.max_tokens."""
    ends = eos_token_ids(model) or rollout.stop or rollout.stop_token_ids
    if not ends and not rollout.ignore_eos:
        raise ConfigError(
            f"model: {model!r}: neither generation_config.json nor config.json has an "
            "eos_token_id, so no answer would end before rollout.max_tokens="
            f"{rollout.max_tokens}. Set it there, or rollout.stop_token_ids or rollout.stop; for "
            "answers of that length rollout.ignore_eos=True"
        )
