"""The identity of a run: checkpoints keep it, and a resume compares it to tell whether it is the
same run.

What the config says by itself (a learning rate, a number of samples) is a choice: a change of it is
logged. What it only names (the content of data files, a tokenizer, a model's config and frozen
weights, what a reward function does) would change unseen: a difference is refused, unless
checkpoint.accept_changes names its kind.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from spmdrl.algo.advantages import Estimator, advantage_options
from spmdrl.algo.losses import PolicyLoss, loss_options
from spmdrl.algo.preference_losses import PreferenceLoss, needs_reference, preference_options
from spmdrl.cli.arguments import field_text
from spmdrl.cli.function_code import as_text, code_of, is_users
from spmdrl.config import MOVED, PpoConfig, PreferenceTrainingConfig, RunConfig, SupervisedConfig
from spmdrl.config.words import counted
from spmdrl.data.pictures import pictures_of
from spmdrl.data.table_files import BadRow, Files
from spmdrl.data.videos import videos_of
from spmdrl.data.visuals import Visual
from spmdrl.distributed.placement import is_frozen, training_roles
from spmdrl.hub.hf_folder import load_hf_config, load_tokenizer, sees_images
from spmdrl.hub.model_files import eos_token_ids

FORMAT = 1  # of what `identity` returns
BUDGET_BYTES = 128 << 20  # read at most of one set of files
BLOCK_BYTES = 1 << 20  # of files that are too large to be read whole
LEAST_BYTES = 4 << 10  # of a block where there are many files
MOST_IMAGES = 64  # of files that rows name, whose content is read
PROBE = "0123456789 3.14 -7 Ab\u00e9\u4e2d\u6587\t x_1\n\nif a<b: {}"  # what tokenizers differ in
# of a config.json: of the program that wrote it, or of how it is run
NO_MEANING = {"transformers_version", "dtype", "torch_dtype", "use_cache", "output_attentions",
              "output_hidden_states", "return_dict", "name_or_path"}  # fmt: skip
# fields of an Estimator by the names that older checkpoints' prints have
PRINTED_AS = {"needs_greedy": "greedy"}
NOT_LOGGED = (
    "resume", "checkpoint.accept_changes",
    # each option has a line of its own: options_in_use
    "algo.loss_args", "algo.advantage_args", "preference.loss_args",
)  # fmt: skip

Tree = dict[str, Any]  # JSON-able


def identity(config: RunConfig, tokenizer: Any, files: Iterable[Files] = ()) -> Tree:
    """files: of data sets whose rows may name image files, whose content counts as well."""
    data = {"train": config.data.train, "eval": config.data.eval}
    found: Tree = {
        "format": FORMAT,
        "versions": {"python": ".".join(platform.python_version_tuple()[:2]),
                     "transformers": transformers.__version__,
                     "tokenizers": tokenizers.__version__},
        "config": settings(config) | options_in_use(config),
        "data": {name: files_print(paths) for name, paths in data.items() if paths is not None},
        "images": images_print(files, getattr(config.data, "video_key", "videos")),
        "models": {"model": model_print(config.model, with_weights=has_reference(config))},
        "tokenizers": {"model": tokenizer_print(tokenizer)},
        "code": {},
    }  # fmt: skip
    if isinstance(config, PpoConfig | SupervisedConfig):
        for name, role in training_roles(config).items():
            if is_frozen(name) or role.model is not None:
                path = role.model or config.model
                # those of a base of adapters are compared one by one: engines/fsdp/lora_files.py
                is_base = config.actor.lora is not None and path == config.model
                weigh = is_frozen(name) and not is_base
                found["models"][name] = model_print(path, with_weights=weigh)
    if isinstance(config, PreferenceTrainingConfig):
        loss = config.preference.loss
        found["code"] = {"loss": {"preference.loss": function_print(loss)}}
    if isinstance(config, PpoConfig):
        found["code"] = code_prints(config)
        scorers = {"reward_model": config.reward_model, "judge": config.judge}
        for name, scorer in scorers.items():
            if scorer is not None:
                found["models"][name] = model_print(scorer.model, with_weights=True)
                found["tokenizers"][name] = tokenizer_print(load_tokenizer(scorer.model))
    return json.loads(json.dumps(found))  # as it is read again


def has_reference(config: RunConfig) -> bool:
    """Whether the weights that the model had at the start are those of a reference, too. Those of a
    base of adapters are compared one by one: engines/fsdp/lora_files.py.
    """
    return (
        isinstance(config, PreferenceTrainingConfig)
        and config.actor.lora is None
        and needs_reference(config.preference)
    )


# ---- the config, and the functions in it


def settings(config: Any, prefix: str = "") -> dict[str, str]:
    """{"actor.optim.lr": "1e-06", ...}; a group that is there has a line of its own too."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value) and not callable(value):
            found[name] = type(value).__name__
            found |= settings(value, f"{name}.")
        else:
            found[name] = field_text(value)
    return found


def options_in_use(config: Any) -> dict[str, str]:
    """{"algo.loss_args.clip_low": "0.2", ...}: every option, also those that have their default."""
    groups: dict[str, dict[str, Any]] = {}
    if isinstance(config, PpoConfig):
        groups["algo.loss_args"] = loss_options(config.algo)
        groups["algo.advantage_args"] = advantage_options(config.algo)
    if isinstance(config, PreferenceTrainingConfig):
        groups["preference.loss_args"] = preference_options(config.preference)
    return {
        f"{group}.{name}": as_text(value)
        for group, options in groups.items()
        for name, value in options.items()
    }


def code_prints(config: PpoConfig) -> Tree:
    """{"reward": {data_source or "": print}, "tools": {name: print}, "algo": {field: print},
    "data": {field: print}}.
    """
    reward = dict(config.reward) if isinstance(config.reward, Mapping) else {"": config.reward}
    tools = {as_text(tool): function_print(tool) for tool in config.tools}
    for kind, given in (("environment", config.environment), ("agent", config.agent)):
        for source, each in (given if isinstance(given, Mapping) else {"": given}).items():
            if callable(each):  # a command line stands in the config
                tools[f"{kind} {source}" if source else kind] = function_print(each)
    algo = {
        field.name: function_print(getattr(config.algo, field.name))
        for field in dataclasses.fields(config.algo)
        if callable(getattr(config.algo, field.name))
    }
    words = {f"judge.{name}": getattr(config.judge, name, None) for name in ("template", "verdict")}
    judged = {name: rule for name, rule in words.items() if callable(rule)}
    sampler = config.data.sampler.function
    return {
        "reward": {name: function_print(rule) for name, rule in (reward | judged).items()},
        "tools": tools,
        "algo": algo,
        "data": {} if sampler is None else {"sampler.function": function_print(sampler)},
    }


def function_print(function: Any) -> str:
    """A name where the function is ours or installed, whose code is a matter of versions."""
    if isinstance(function, PolicyLoss | Estimator | PreferenceLoss):
        rest = {
            PRINTED_AS.get(f.name, f.name): getattr(function, f.name)
            for f in dataclasses.fields(function)[1:]
        }
        return digest_of(f"{function_print(function.function)} {rest}")
    inner = function
    while hasattr(inner, "func"):  # partial
        inner = inner.func
    module = getattr(inner, "__module__", None) or type(inner).__module__
    if isinstance(inner, str) or not is_users(module):
        return as_text(inner)
    return digest_of("\n".join(sorted(code_of(inner))))


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


# ---- files


def files_print(paths: str | tuple[str, ...]) -> list[Tree]:
    paths = (paths,) if isinstance(paths, str) else paths
    return [
        {"name": Path(path).name, "bytes": Path(path).stat().st_size,
         "sha256": content_print(Path(path), BUDGET_BYTES // len(paths))}
        for path in paths
    ]  # fmt: skip


def content_print(path: Path, most_bytes: int) -> str:
    """sha256 of a file of at most `most_bytes`. Of a larger one, of its size and about as many
    bytes in blocks from all over it, its first and last among them, and of a Parquet file's footer,
    which has the size and the statistics of every column in every row group."""
    size, block = path.stat().st_size, max(min(BLOCK_BYTES, most_bytes // 4), LEAST_BYTES)
    with path.open("rb") as file:
        if size <= max(most_bytes, 4 * block):
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        count = max(most_bytes // block, 4)
        for i in range(count):
            file.seek(i * (size - block) // (count - 1))
            digest.update(file.read(block))
        if path.suffix == ".parquet":
            file.seek(size - 8)  # its length and "PAR1" end the file
            file.seek(max(size - 8 - int.from_bytes(file.read(4), "little"), 0))
            digest.update(file.read())
    return digest.hexdigest()


def images_print(several: Iterable[Files], video_key: str = "videos") -> str | None:
    """Returns a digest of the image and video files that some rows of each data set name, evenly
    spread; None if there are none. video_key: the column of videos.

    Images within rows are part of the data file.
    """
    digest, seen = hashlib.sha256(), 0
    for files in several:
        count = min(len(files), MOST_IMAGES)
        for row in (i * len(files) // count for i in range(count)):
            try:
                folder = files.locate(row)[0].path.parent
                content = files.row(row)
                shown: tuple[Visual, ...] = (
                    *pictures_of(content.get("images"), folder),
                    *videos_of(content.get(video_key), folder),
                )
                found = [each.digest for each in shown if not isinstance(each.source, bytes)]
            except (BadRow, OSError):  # a row that is left out, or refused by who reads it
                continue
            digest.update("".join(found).encode())
            seen += len(found)
    return digest.hexdigest() if seen else None


# ---- models


def model_print(model: str, with_weights: bool) -> Tree:
    """Config, ids that end an answer, image processor; and weights, where they are never trained:
    a checkpoint has all others."""
    config = load_hf_config(model)
    found: Tree = {"config": flat(config.to_dict()), "eos_token_ids": list(eos_token_ids(model))}
    files = sorted(Path(model).glob("*.py"))  # which trust_remote_code would run
    found["code"] = digest_of("\n".join(path.read_text(errors="replace") for path in files))
    processor = Path(model, "preprocessor_config.json")
    if sees_images(config) and processor.is_file():
        found["image_processor"] = flat(json.loads(processor.read_text()))
    if with_weights:
        found["weights"] = weights_print(Path(model))
    return found


def flat(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """{"rope_parameters.rope_theta": 10000.0, ...} of what has a meaning."""
    found: Tree = {}
    for name, value in tree.items():
        if str(name).startswith("_") or name in NO_MEANING:
            continue
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def weights_print(folder: Path) -> str:
    names = ("*.safetensors", "*.bin")
    paths = sorted(path for name in names for path in folder.glob(name))
    return digest_of(" ".join(content_print(p, BUDGET_BYTES // len(paths)) for p in paths))


def tokenizer_print(tokenizer: Any) -> Tree:
    """The vocabulary; what it makes of PROBE; all else that it does, as its library writes it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    template = tokenizer.chat_template
    ids = sorted((id, token) for token, id in tokenizer.get_vocab().items())
    try:
        probe = tokenizer(PROBE)["input_ids"]  # it forgets how an earlier call cut and padded
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers library raises nothing more specific
            raise
        probe = str(error)  # a vocabulary that lacks a letter, and has no token for that
    return {
        "vocabulary": digest_of("\n".join(f"{id} {token}" for id, token in ids)),
        "probe": digest_of(str(probe)),
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()
                           if isinstance(token, str)},
        "pipeline": None if backend is None else digest_of(backend.to_str()),
        "chat_template": None if template is None else digest_of(json.dumps(template)),
    }  # fmt: skip


# ---- what differs


@dataclass(frozen=True)
class Difference:
    """text: what differs, with its old and new value where they are short. kind: a value of
    checkpoint.accept_changes that allows it; None: a choice, which is logged."""

    kind: str | None
    text: str


def differences(before: Tree, now: Tree) -> list[Difference]:
    """Between two results of `identity`, of this version or of an earlier one."""
    other = {name for name, v in now["versions"].items() if before["versions"].get(name) != v}
    earlier = with_moved_options(before["config"])
    found = [Difference(None, text) for text in of_settings(earlier, now["config"])]
    found += [Difference(None, f"{name} {before['versions'][name]} -> {now['versions'][name]}")
              for name in sorted(other & before["versions"].keys())]  # fmt: skip
    found += of_data(before, now)
    for name, model in common(before["models"], now["models"]):
        found += of_model(name, *model, "transformers" in other)
    for name, each in common(before["tokenizers"], now["tokenizers"]):
        found += of_tokenizer(name, *each, bool({"tokenizers", "transformers"} & set(other)))
    found += of_code(before["code"], now["code"], "python" in other)
    return found


def with_moved_options(settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of an earlier version with options by the names that they have now.

    The betas of three algorithms have one name now and are left out.
    """
    moved = {
        f"algo.{new}": settings[f"algo.{old}"]
        for old, new in MOVED.items()
        if f"algo.{old}" in settings and not new.endswith(".beta")
    }
    return moved | dict(settings)


def of_evaluation(before: Tree, config: PpoConfig) -> list[Difference]:
    """Returns what an evaluation does otherwise than the run whose checkpoint it is of."""
    now: Tree = {"data": {}, "images": None, "code": code_prints(config)}
    if config.data.eval is not None:
        now["data"]["eval"] = files_print(config.data.eval)
    python = ".".join(platform.python_version_tuple()[:2])
    other_python = before["versions"]["python"] != python
    return [*of_data(before, now), *of_code(before["code"], now["code"], other_python)]


def common(before: Tree, now: Tree) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yields what both have: what one of them lacks is in the config's lines."""
    for name in (name for name in now if name in before):
        yield name, (before[name], now[name])


def of_settings(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name, (old, new) in common(dict(before), dict(now)):
        if old != new and name not in NOT_LOGGED:
            yield f"{name} {short(old)} -> {short(new)}"


def of_data(before: Tree, now: Tree) -> Iterator[Difference]:
    for name, (old, new) in common(before["data"], now["data"]):
        if [f["sha256"] for f in old] == [f["sha256"] for f in new]:
            continue
        kind = "data" if name == "train" else None  # held-out rows change no weight
        if len(old) != len(new):
            yield Difference(
                kind, f"data.{name}: {counted(len(old), 'file')} -> {counted(len(new), 'file')}"
            )
            continue
        for was, is_ in zip(old, new, strict=True):
            if was["sha256"] != is_["sha256"]:
                yield Difference(kind, f"data.{name}: content {of_file(was)} -> {of_file(is_)}")
    if before["images"] != now["images"] and None not in (before["images"], now["images"]):
        yield Difference("data", "images: the content of image files that rows name")


def of_file(found: Tree) -> str:
    return f"{found['name']} ({found['bytes']:,} bytes, sha256 {found['sha256'][:8]})"


def of_model(name: str, before: Tree, now: Tree, other_version: bool) -> Iterator[Difference]:
    """other_version: of transformers, which may know fields that the other does not."""
    parts = {"config": "config.json", "image_processor": "preprocessor_config.json"}
    for part, file in parts.items():
        old, new = before.get(part) or {}, now.get(part) or {}
        keys = old.keys() & new.keys() if other_version else old.keys() | new.keys()
        for key in sorted(key for key in keys if old.get(key) != new.get(key)):
            change = f"{short(old.get(key))} -> {short(new.get(key))}"
            yield Difference("model", f"{name}: {key} of {file} {change}")
    if before["eos_token_ids"] != now["eos_token_ids"]:
        change = f"{before['eos_token_ids']} -> {now['eos_token_ids']}"
        yield Difference("model", f"{name}: eos_token_id of generation_config.json {change}")
    if before.get("code") != now.get("code"):
        yield Difference("model", f"{name}: the Python files in its folder")
    if before.get("weights") != now.get("weights") and before.get("weights") is not None:
        yield Difference("model", f"{name}: the weights, which this run does not train")


def of_tokenizer(name: str, before: Tree, now: Tree, other_version: bool) -> Iterator[Difference]:
    """other_version: of tokenizers, which may write the same in another way."""
    kinds = ["vocabulary", "probe", "special_tokens", *([] if other_version else ["pipeline"])]
    changed = [kind for kind in kinds if before[kind] != now[kind]]
    told = {
        "vocabulary": "the ids of its tokens", "probe": "how it splits text",
        "special_tokens": f"{before['special_tokens']} -> {now['special_tokens']}",
        "pipeline": "how it normalises, splits or joins text",
    }  # fmt: skip
    if changed:
        text = ", ".join(told[kind] for kind in changed)
        yield Difference("tokenizer", f"tokenizer of {name}: {text}")
    if before["chat_template"] != now["chat_template"]:
        change = f"{before['chat_template']} -> {now['chat_template']}"
        yield Difference("chat_template", f"chat template of {name} (sha256) {change}")


# functions of a config by their kind, as they are told of; those of an algorithm are a choice
CODE = {
    "reward": "reward function", "algo": "function algo.{}", "tools": "{}", "loss": "function {}",
    "data": "function data.{}",
}  # fmt: skip
CHOICES = ("algo", "loss", "data")


def of_code(before: Tree, now: Tree, other_python: bool) -> Iterator[Difference]:
    """other_python: compiles the same source to other code, so that nothing can be told."""
    for kind, (old, new) in common(before, now):
        names = sorted(old.keys() | new.keys())
        changed = [name for name in names if old.get(name) != new.get(name)]
        if not changed or (other_python and old.keys() == new.keys()):
            continue
        for name in changed:
            change = f"{old.get(name, 'none')} -> {new.get(name, 'none')}"
            what = CODE[kind]
            where = f" of {name!r}" if kind == "reward" and name else ""
            text = f"{what.format(name)}{where}: its code, or that of its helpers, {change}"
            yield Difference(None if kind in CHOICES else kind, text)


def short(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:50]}... (sha256 {digest_of(text)[:8]})"
