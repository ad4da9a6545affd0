"""A command: writes what the functions and classes of SGLang that compat.py uses take.

    pip download sglang==0.5.23 --no-deps -d wheels
    python tests/rollout/sglang_signatures.py wheels/sglang-0.5.23-*.whl

The wheel's source is parsed and nothing of it is imported, so that no GPU and none of its
requirements are needed. test_sglang_signatures.py reads what is written.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("sglang_signatures.json")
# what compat.py calls, by module; a method after its class
CALLED = {
    "srt.managers.scheduler": (
        "Scheduler.__init__", "Scheduler.init_ipc_channels", "Scheduler.handle_generate_request",
        "Scheduler.abort_request", "Scheduler.is_fully_idle", "Scheduler.get_next_batch_to_run",
        "Scheduler.run_batch", "Scheduler.process_batch_result", "Scheduler.pause_generation",
        "Scheduler.continue_generation", "Scheduler.flush_cache",
        "Scheduler.release_host_resources",
    ),
    "srt.managers.scheduler_components.ipc_channels": ("SchedulerIpcChannels.create",),
    "srt.managers.scheduler_components.weight_updater": (
        "SchedulerWeightUpdaterManager.release_memory_occupation",
        "SchedulerWeightUpdaterManager.resume_memory_occupation",
    ),
    "srt.managers.io_struct": (
        "TokenizedGenerateReqInput", "AbortReq", "PauseGenerationReqInput",
        "ContinueGenerationReqInput", "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
    ),
    "srt.managers.schedule_batch": ("FINISH_LENGTH.__init__",),
    "srt.sampling.sampling_params": ("SamplingParams", "SamplingParams.normalize"),
    "srt.runtime_context": ("SpawnRanks", "publish", "reset_context"),
    "srt.server_args": (
        "ServerArgs.resolve_once", "ServerArgs.check_server_args", "PortArgs",
    ),
    "srt.distributed.parallel_state": ("destroy_model_parallel", "GroupCoordinator.destroy"),
    "srt.layers.sampler": ("Sampler.forward",),
}  # fmt: skip
# attributes that compat.py reads or writes, by the class in whose methods they are assigned
ATTRIBUTES = {
    ("srt.managers.scheduler", "Scheduler"): (
        "ipc_channels", "load_snapshot_writer", "recv_from_tokenizer", "tp_worker",
        "waiting_queue", "max_total_num_tokens", "running_batch", "last_batch", "weight_updater",
    ),
    ("srt.managers.schedule_batch", "Req"): (
        "rid", "sampling_params", "to_finish", "output_ids", "inflight_middle_chunks",
    ),
    ("srt.model_executor.model_runner", "ModelRunner"): ("sampler", "model", "token_to_kv_pool"),
    ("srt.mem_cache.memory_pool", "MHATokenToKVPool"): ("k_buffer", "v_buffer"),
}  # fmt: skip
FIELDS = "sglang/srt/arg_groups/fields/"  # of ServerArgs


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sources = {n: archive.read(n).decode() for n in archive.namelist() if n.endswith(".py")}
    TABLE.write_text(json.dumps(table(sources, Path(wheel).name.split("-")[1]), indent=1) + "\n")


def table(sources: dict[str, str], version: str) -> dict[str, Any]:
    """sources: text by path, as "sglang/srt/server_args.py". Raises LookupError for what is not
    there."""
    return {
        "version": version,
        "called": {name: ", ".join(of) for name, of in called(sources)},
        "attributes": {name: ", ".join(of) for name, of in attributes(sources)},
        "server_args": ", ".join(server_args(sources)),
    }


def given_server_args() -> list[str]:
    """The names that engine.engine_args gives, which are written there."""
    tree = ast.parse((ROOT / "spmdrl/rollout/sglang/engine.py").read_text())
    [given] = [n for n in ast.walk(find(tree, "engine_args")) if isinstance(n, ast.Dict)]
    return [ast.literal_eval(key) for key in given.keys if key is not None]


def parsed(sources: dict[str, str], module: str) -> ast.Module:
    return ast.parse(sources[f"sglang/{module.replace('.', '/')}.py"])


def called(sources: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """(module and name, the parameters as `parameters` or `fields` write them)."""
    for module, names in CALLED.items():
        tree = parsed(sources, module)
        for name in names:
            found = find(tree, name)
            of = parameters(found) if isinstance(found, ast.FunctionDef) else fields(tree, found)
            yield f"{module}:{name}", of


def find(tree: ast.AST, name: str) -> ast.FunctionDef | ast.ClassDef:
    first, _, rest = name.partition(".")
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == first:
            return find(node, rest) if rest else node
    raise LookupError(f"{name} is not where it was")


def parameters(node: ast.FunctionDef) -> list[str]:
    """ "*" before those that have to be named, "=" behind those with a default."""
    args, decorators = node.args, [ast.unparse(d) for d in node.decorator_list]
    plain = [a.arg for a in args.posonlyargs + args.args]
    first = len(plain) - len(args.defaults)
    written = [f"{name}=" if i >= first else name for i, name in enumerate(plain)]
    if written and written[0] in ("self", "cls") and "staticmethod" not in decorators:
        written = written[1:]
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        written.append(f"*{arg.arg}" + ("=" if default is not None else ""))
    return written + (["**"] if args.kwarg else [])


def fields(tree: ast.Module, node: ast.ClassDef) -> list[str]:
    """Of a dataclass or a msgspec.Struct, those of its base in the same file first."""
    bases = [b.id for b in node.bases if isinstance(b, ast.Name) and b.id.startswith("Base")]
    inherited = [line for base in bases for line in fields(tree, as_class(find(tree, base)))]
    named = any(k.arg == "kw_only" for k in node.keywords)
    own = [
        ("*" if named else "") + part.target.id + ("=" if part.value is not None else "")
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]
    return inherited + own


def as_class(node: ast.FunctionDef | ast.ClassDef) -> ast.ClassDef:
    assert isinstance(node, ast.ClassDef)
    return node


def attributes(sources: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    for (module, name), wanted in ATTRIBUTES.items():
        assigned = {
            node.attr
            for node in ast.walk(find(parsed(sources, module), name))
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        }
        missing = set(wanted) - assigned
        if missing:
            raise LookupError(f"{module}.{name} has no {sorted(missing)}")
        yield f"{module}:{name}", list(wanted)


def server_args(sources: dict[str, str]) -> list[str]:
    known = {
        node.target.id
        for path, source in sources.items()
        if path.startswith(FIELDS)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    missing = set(given_server_args()) - known
    if missing:
        raise LookupError(f"ServerArgs has no {sorted(missing)}")
    return given_server_args()


if __name__ == "__main__":
    main(sys.argv[1])
