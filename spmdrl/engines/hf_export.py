"""A checkpoint as a Hugging Face folder, whatever engine and layout wrote it; see export.py.

One tensor is in memory at a time. Several ranks may share the work: each writes files of its own.
The index and config.json come last, so that a folder without them is one that is not finished.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from spmdrl.checkpoint.disk_space import writing
from spmdrl.checkpoint.format import damage
from spmdrl.config import ConfigError
from spmdrl.engines.fsdp.classifier import is_classifier
from spmdrl.engines.fsdp.lora_files import (
    adapter_tensors,
    lora_of,
    merged_sources,
    read_base,
    with_magnitudes,
    write_adapter,
)
from spmdrl.engines.stored_dtype import DTYPES, name_dtype, stored_dtype
from spmdrl.engines.stored_tensors import StoredTensors, WeightSource
from spmdrl.hub.download import local_model
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.hub.mtp_layers import MtpTensors, copies_beside, is_mtp, num_mtp_layers
from spmdrl.hub.safetensors_files import SafetensorsFile, TensorSpec, files_of, write_index
from spmdrl.weights.checkpoint_names import (
    Parts,
    as_published,
    checkpoint_parts,
    published_shape,
)

logger = logging.getLogger(__name__)

CONFIG = "config.json"
TIED = "lm_head.weight"


class Writers(NamedTuple):
    """The processes that write a model together."""

    rank: int = 0
    world: int = 1
    wait: Callable[[], None] = lambda: None  # until all of them are here


def export(
    checkpoint: Path,
    out: Path,
    dtype: str = "",
    ema: bool = False,
    base: str = "",
    without_mtp: bool = False,
    writers: Writers = Writers(),  # noqa: B008  it is immutable
) -> None:
    """dtype: "" is that of the model that the run started from, which stands in hf/config.json.

    Collective over the writers. Raises ConfigError for a damaged checkpoint or one without the
    average that is wanted, an unknown dtype, a taken folder, or where the model is not there that
    adapters or multi-token prediction layers belong to.
    """
    if dtype and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: use one of {', '.join(DTYPES)}")
    check_folders(checkpoint, out, writers.rank == 0)
    adapted, hf = read_base(Path(checkpoint, "actor")) is not None, Path(checkpoint, "hf")
    config = load_hf_config(str(hf))
    chosen = DTYPES[dtype] if dtype else stored_dtype(config, str(hf))
    whole = [(source, chosen) for source in sources_of(checkpoint, "actor", ema, base)]
    sources = [pair for pair in whole if not (without_mtp and of_mtp(pair[0], config))]
    trained, mtp = any(of_mtp(source, config) for source, _ in whole), None
    if not without_mtp:
        names = [name for source, _ in sources for name in source.shapes]
        copies, mtp = beside(names, config, lambda: mtp_tensors(checkpoint, config, base))
        sources += mtp_sources(mtp, copies, sources, chosen)
    if base and not adapted and mtp is None:
        raise ConfigError(f"--base: {checkpoint} holds a whole model, which needs no base")
    if writers.rank == 0 and trained:
        logger.info("%s", LEFT_OUT_MTP if without_mtp else TRAINED_MTP)
    elif writers.rank == 0 and mtp is not None:
        logger.info("%s", told_of_mtp(mtp, base or trained_model(checkpoint), chosen))
    writers.wait()  # all have found `out` free
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    is_tied = bool(getattr(config, "tie_word_embeddings", False))
    write_sources(sources, config.model_type, is_tied, out, writers)
    writers.wait()
    if writers.rank != 0:
        return
    with writing(out):
        for file in hf.iterdir():
            if file.name != CONFIG:
                shutil.copy(file, out)
        write_config(Path(hf, CONFIG), chosen, out)


def check_folders(checkpoint: Path, out: Path, reads_all: bool = True) -> None:
    """reads_all: whether each file's checksum is compared."""
    wrong = damage(checkpoint) if reads_all else None
    if wrong:
        raise ConfigError(f"--checkpoint {checkpoint}: {wrong}")
    taken = [n for n in (CONFIG, "adapter_config.json") if Path(out, n).exists()]
    if taken:
        raise ConfigError(f"--out {out} already holds a model; name another folder")


def export_adapter(checkpoint: Path, out: Path, base: str, ema: bool = False) -> None:
    """Several adapters are written to out/<name> each. Raises ConfigError as `export` does, and
    where the checkpoint has no adapters.
    """
    check_folders(checkpoint, out)
    saved = read_base(Path(checkpoint, "actor"))
    if saved is None:
        raise ConfigError(f"--adapter: {checkpoint} holds a whole model, no adapters")
    read = reader_of(Path(checkpoint, "actor"), ema)
    named, stacks = base or saved["model"], saved.get("stacks", [])
    for name in saved.get("adapters") or [""]:
        tensors = with_magnitudes(adapter_tensors(read, saved, name), saved, base)
        write_adapter(out / name, tensors, lora_of(saved), saved["layers"], named, stacks)


# ---- what is read


def load_full(checkpoint: Path, role: str, ema: bool = False, base: str = "") -> dict[str, Tensor]:
    """Full tensors of a role's model by Hugging Face name, from shards of any layout."""
    found = sources_of(checkpoint, role, ema, base)
    return {name: tensor.clone() for source in found for name, tensor in source.read()}


def sources_of(
    checkpoint: Path, role: str, ema: bool = False, base: str = ""
) -> list[WeightSource]:  # fmt: skip
    """The weights of a role's model.

    ema: of the moving average; weights that were not trained have none and are as they are.
    """
    folder, hf = Path(checkpoint, role), Path(checkpoint, "hf")
    saved = read_base(folder)
    if saved is None and Path(folder, "metadata.json").exists():
        if ema:
            require_average(folder, StoredTensors(folder))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of megatron-core, on what is not installed
            from spmdrl.engines.megatron.checkpoint import weight_sources

            return weight_sources(folder, hf, ema)
    stored, names = StoredTensors(folder), stored_names(folder, ema)
    parts = checkpoint_parts(load_hf_config(str(hf)))
    if saved is not None:
        read = reader_of(folder, ema)
        return [
            in_parts(parts, name, shape, whole)
            for name, shape, whole in merged_sources(adapter_tensors(read, saved), saved, base)
        ]
    return [stored_source(stored, names[key], key.removeprefix("hf."), parts) for key in names]


def stored_names(folder: Path, ema: bool = False) -> dict[str, str]:
    """Returns where FSDP's engine has saved each tensor, or either engine those of adapters, by the
    names of FSDP's module.
    """
    stored = StoredTensors(folder)
    names = {name: f"model.{name}" for name in stored.names("model.")}
    if not ema:
        return names
    require_average(folder, stored)
    average = {name: f"ema.{name}" for name in stored.names("ema.")}
    assert average.keys() <= names.keys(), sorted(average.keys() - names.keys())
    return names | average


def require_average(folder: Path, stored: StoredTensors) -> None:
    """Raises ConfigError where a checkpoint has no moving average."""
    if not stored.names("ema."):
        raise ConfigError(
            f"--ema: {folder} has no moving average of the weights; a run keeps one with "
            f"actor.ema=0.99 or so. Without --ema the weights themselves are exported"
        )


def reader_of(folder: Path, ema: bool = False) -> Callable[[str], Tensor]:
    """A function that reads a tensor by its name in the module of FSDP's engine."""
    stored, names = StoredTensors(folder), stored_names(folder, ema)
    return lambda name: stored.read(names[name])


def stored_source(stored: StoredTensors, key: str, name: str, parts: Parts) -> WeightSource:
    """A parameter of FSDP's, as the tensors that a checkpoint has of it: the experts of a layer are
    stored together, and read as they were cut over the ranks that saved them.
    """
    shape = stored.shape(key)
    if name not in parts:
        return WeightSource({name: shape}, lambda: iter([(name, stored.read(key))]))
    mine = parts[name]

    def read() -> Iterator[tuple[str, Tensor]]:
        for first, last in stored.rows_apart(key, [part.box for part in mine]):
            rows = stored.read(key, ((first, last), *((0, size) for size in shape[1:])))
            for part in mine:
                (begin, end), *others = part.box
                if first <= begin and end <= last:
                    own = part._replace(box=((begin - first, end - first), *others))
                    yield part.name, own.of(rows)

    return WeightSource({part.name: part.shape for part in mine}, read)


def in_parts(
    parts: Parts, name: str, shape: tuple[int, ...], whole: Callable[[], Tensor]
) -> WeightSource:
    """A parameter that is read as a whole."""
    if name not in parts:
        return WeightSource({name: shape}, lambda: iter([(name, whole())]))

    def read() -> Iterator[tuple[str, Tensor]]:
        tensor = whole()
        yield from ((part.name, part.of(tensor)) for part in parts[name])

    return WeightSource({part.name: part.shape for part in parts[name]}, read)


# ---- multi-token prediction layers

TRAINED_MTP = "the multi-token prediction layers are those that the run has trained"
LEFT_OUT_MTP = "--without_mtp leaves out the multi-token prediction layers that the run has trained"


def of_mtp(source: WeightSource, config: PreTrainedConfig) -> bool:
    return any(is_mtp(name, config) for name in source.shapes)


def beside(
    names: Collection[str], config: PreTrainedConfig, stored: Callable[[], MtpTensors | None]
) -> tuple[Mapping[str, str], MtpTensors | None]:
    """Returns what is written of these layers beside the tensors `names`: the copies of these, with
    what each is a copy of; and files that hold the layers, None where the run has trained them or
    there are none. stored: opens the files.

    Layers that were trained take nothing of files, which may name it in another way: of Qwen3.5's
    mixtures all experts in one tensor.
    """
    if any(is_mtp(name, config) for name in names):
        copies, mtp = copies_beside(names, config), None
    else:
        mtp = stored()
        copies = {} if mtp is None else mtp.copies
    return {copy: own for copy, own in copies.items() if own in names}, mtp


def mtp_tensors(checkpoint: Path, config: PreTrainedConfig, base: str) -> MtpTensors | None:
    """Opens the files of layers that were not trained; None where the model has none."""
    if not num_mtp_layers(config) or is_classifier(config):
        return None
    model = base or trained_model(checkpoint)
    try:
        if not model:
            raise OSError("the checkpoint does not name it")
        folder = local_model("--base" if base else "model", model)
        return MtpTensors(folder, load_hf_config(folder))
    except (OSError, ConfigError) as error:
        raise ConfigError(
            f"the multi-token prediction layers of {checkpoint} stand in the model that the run "
            f"started from, {model or 'which is not known'}: {error}. Name its folder with --base, "
            "or leave them out with --without_mtp"
        ) from error


def trained_model(checkpoint: Path) -> str:
    """Returns the folder or a hub's name of the model that the run started from; "" where that is
    not known.
    """
    return json.loads(Path(checkpoint, "run.json").read_text()).get("model", "")


def mtp_sources(
    mtp: MtpTensors | None, copies: Mapping[str, str],
    sources: list[tuple[WeightSource, torch.dtype]], dtype: torch.dtype,
) -> list[tuple[WeightSource, torch.dtype]]:  # fmt: skip
    """Returns what is written beside `sources`: the layers as they stand in the files, and the
    copies of the embedding and the head anew. mtp and copies: see `beside`.
    """
    of = {name: source for source, _ in sources for name in source.shapes}
    found = [] if mtp is None else kept_sources(mtp, dtype, copies)
    for name, own in copies.items():

        def read(name: str = name, own: str = own) -> Iterator[tuple[str, Tensor]]:
            yield from ((name, tensor) for key, tensor in of[own].read() if key == own)

        found.append((WeightSource({name: of[own].shapes[own]}, read), dtype))
    return found


def with_copies(
    named: Iterable[tuple[str, Tensor]], copies: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors, and behind each its copies. copies: what each is a copy of, by name."""
    for name, tensor in named:
        yield name, tensor
        yield from ((copy, tensor) for copy, own in copies.items() if own == name)


def kept_sources(
    mtp: MtpTensors, dtype: torch.dtype, copies: Container[str]
) -> list[tuple[WeightSource, torch.dtype]]:
    """They are written as they are; those that are quantised in `dtype`. copies: names of tensors
    that come from elsewhere.
    """
    found = []
    for name, shape in mtp.shapes.items():
        if name in copies:
            continue
        source = WeightSource({name: shape}, lambda name=name: iter([(name, mtp.read(name))]))  # type: ignore[misc]
        found.append((source, dtype if name in mtp.quantized else mtp.dtype(name)))
    return found


def told_of_mtp(mtp: MtpTensors, model: str, dtype: torch.dtype) -> str:
    if not mtp.shapes:
        return f"config.json names multi-token prediction layers, and {model} has none of them"
    kept = f"in {str(dtype).removeprefix('torch.')}" if mtp.quantized else "as they are there"
    return (
        f"{len(mtp.shapes)} tensors of multi-token prediction layers, which were not trained, are "
        f"taken from {model}, {kept}"
    )


# ---- what is written


def write_sources(
    sources: list[tuple[WeightSource, torch.dtype]], kind: str, tied: bool, out: Path,
    writers: Writers,
) -> None:  # fmt: skip
    """Writes this rank's files, and on the first rank the index when all have written theirs.

    kind: the type of the model, in whose published form its tensors are written. tied: the head is
    the embedding, and is left out. Collective over the writers.
    """
    groups = [
        {
            name: TensorSpec(published_shape(kind, name, shape), dtype)
            for name, shape in source.shapes.items()
            if not (tied and name == TIED)
        }
        for source, dtype in sources
    ]
    files = files_of(groups)
    for number, (name, numbers) in enumerate(files.items()):
        if number % writers.world != writers.rank:
            continue
        specs = {n: spec for group in numbers for n, spec in groups[group].items()}
        path = Path(out, name)
        with writing(path):
            file = SafetensorsFile(path, specs)
        for group in numbers:
            for key, tensor in as_published(kind, sources[group][0].read()):
                if key in specs:
                    with writing(path):
                        file.write(key, tensor)
        with writing(path):
            file.close()
    writers.wait()
    if writers.rank == 0:
        with writing(out):
            write_index_of(files, groups, out)


def write_weights(
    named: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype, out: Path, copies: Mapping[str, str], mtp: MtpTensors | None,
) -> None:  # fmt: skip
    """Writes tensors in the order in which they come, of which one is in memory at a time, beside
    the config.json that is in `out`, in the published form of its type. shapes: of all of them, as
    they come. copies and mtp: of layers for multi-token prediction, see `beside`; what is of files
    is written behind the others as it is, and what is quantised in `dtype`.
    """
    config = json.loads(Path(out, CONFIG).read_text())
    kind, tied = config["model_type"], config.get("tie_word_embeddings", False)
    kept = [] if mtp is None else kept_sources(mtp, dtype, copies)
    dtypes = {name: own for source, own in kept for name in source.shapes}
    every = dict(shapes) | {name: shapes[own] for name, own in copies.items()}
    every |= {n: shape for source, _ in kept for n, shape in source.shapes.items()}
    named = itertools.chain(
        with_copies(named, copies), *(source.read() for source, _ in kept)
    )  # fmt: skip
    groups = [
        {name: TensorSpec(published_shape(kind, name, shape), dtypes.get(name, dtype))}
        for name, shape in every.items()
        if not (tied and name == TIED)
    ]
    files = files_of(groups)
    file_of: dict[str, SafetensorsFile] = {}
    for name, numbers in files.items():
        specs = {n: spec for number in numbers for n, spec in groups[number].items()}
        file_of |= dict.fromkeys(specs, SafetensorsFile(Path(out, name), specs))
    for name, tensor in as_published(kind, named):
        if name in file_of:
            file_of[name].write(name, tensor)
    for opened in set(file_of.values()):
        opened.close()
    write_index_of(files, groups, out)
    write_config(Path(out, CONFIG), dtype, out)


def write_index_of(
    files: Mapping[str, list[int]], groups: list[dict[str, TensorSpec]], out: Path
) -> None:
    """files: as files_of gives them for these groups of tensors."""
    names = {file: [n for i in numbers for n in groups[i]] for file, numbers in files.items()}
    write_index(out, names, sum(s.nbytes for group in groups for s in group.values()))


def write_config(file: Path, dtype: torch.dtype, out: Path) -> None:
    """Writes config.json with the dtype of the weights, and without a quantization_config."""
    config: dict[str, Any] = json.loads(file.read_text())
    name_dtype(config, dtype)
    config.pop("quantization_config", None)  # of a model that was loaded and written as floats
    Path(out, CONFIG).write_text(json.dumps(config, indent=2))
