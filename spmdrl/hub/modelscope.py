"""Downloads of ModelScope through its own package, and its refusals in plain words.

The package is optional (spmdrl[modelscope]) and imported only where a name asks for it. Its cache
has a folder for each revision, and no commits: a branch that moved is downloaded over the old one.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock
from typing import Any

from huggingface_hub import constants

from spmdrl.cli.hub_names import HubName
from spmdrl.config import ConfigError
from spmdrl.hub.huggingface import NEVER, PendingDownload, Report, files_in, first_line

BRANCH = "master"  # where no revision is named


def snapshot(name: HubName, patterns: Sequence[str], report: Report) -> Path:
    """Returns the folder of a repository in the cache, with all files that match the patterns, of
    which it downloads those that are not there or have changed. HF_HUB_OFFLINE holds here too.
    Raises ConfigError.
    """
    with explained(name):
        from modelscope import snapshot_download

        return Path(snapshot_download(
            name.repo, name.revision or None, repo_type=name.kind, allow_patterns=list(patterns),
            ignore_patterns=NEVER, local_files_only=constants.HF_HUB_OFFLINE,
            progress_callbacks=[counting_callback(report)],
        ))  # fmt: skip


def listing(name: HubName, folder: Path) -> list[str]:
    """Returns the paths of all files of a repository; offline of those in the cache's folder."""
    return files_in(folder) if constants.HF_HUB_OFFLINE else sorted(sizes(name))


def pending(name: HubName, patterns: Sequence[str]) -> PendingDownload:
    """Says what `snapshot` would download. Raises ConfigError."""
    folder = Path(cache_folder(), f"{name.kind}s", name.repo.replace("/", "--"), "snapshots")
    wanted = {
        path: size
        for path, size in sizes(name).items()
        if any(fnmatch(path, p) for p in patterns) and not any(fnmatch(path, p) for p in NEVER)
    }
    there = {
        path: file.stat().st_size
        for path in wanted
        if (file := folder / (name.revision or BRANCH) / path).is_file()
    }
    missing = [size for path, size in wanted.items() if there.get(path) != size]
    return PendingDownload(len(missing), sum(missing))


def sizes(name: HubName) -> dict[str, int]:
    """Returns the bytes of each file of a repository, by its path. Raises ConfigError."""
    with explained(name):
        from modelscope_hub import HubApi

        files = HubApi().list_repo_files(name.repo, name.kind, revision=name.revision or BRANCH)
    return {file.path: file.size for file in files if not file.is_dir}


def open_repository(name: HubName, private: bool) -> None:
    """Creates the repository of a model where there is none. Raises ConfigError where the user has
    no token, may not create it, or it is public and `private` is wanted.
    """
    with explained(name):
        from modelscope_hub import HubApi, Visibility, get_default_config

        if not get_default_config().token:
            raise ConfigError(
                f"{name}: a push needs a token: set MODELSCOPE_API_TOKEN to one of {endpoint()}"
                "/my/myaccesstoken"
            )
        api = HubApi()
        if not api.repo_exists(name.repo, "model"):
            api.create_repo(name.repo, "model", visibility="private" if private else "public")
        elif private and api.get_repo(name.repo, "model").visibility != Visibility.PRIVATE:
            raise ConfigError(
                f"{name} is public on {endpoint()}: --private False says that the model may be"
            )


def push(name: HubName, folder: Path, message: str) -> str:
    """Uploads the files of a folder. Returns the model's address. Raises ConfigError."""
    with explained(name):
        from modelscope_hub import HubApi

        HubApi().upload_folder(
            name.repo, "model", folder, commit_message=message, disable_tqdm=True, use_cache=False
        )
    return f"{endpoint()}/models/{name.repo}"


def cache_folder() -> str:
    from modelscope_hub import get_default_config

    return str(get_default_config().cache_dir)


def endpoint() -> str:
    from modelscope_hub import get_default_config

    return str(get_default_config().endpoint)


def counting_callback(report: Report) -> Any:
    """Returns a class for `progress_callbacks` that reports the bytes of all files together."""
    from modelscope_hub import ProgressCallback

    lock, counted = Lock(), {"done": 0, "total": 0}

    class CountingCallback(ProgressCallback):
        def __init__(self, filename: str, file_size: int) -> None:
            super().__init__(filename, file_size)
            with lock:
                counted["total"] += file_size or 0

        def update(self, size: int) -> None:
            with lock:
                counted["done"] += size
                report(min(counted["done"], counted["total"]), counted["total"])

    return CountingCallback


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Raises ConfigError with the remedy for what the package raises, which logs nothing of it."""
    from modelscope_hub import HubError
    from requests import RequestException

    if "MODELSCOPE_LOG_LEVEL" not in os.environ:
        logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)
    try:
        yield
    except (HubError, RequestException, OSError) as error:
        raise ConfigError(f"{name}: {reason(name, error)}") from error


def reason(name: HubName, error: BaseException) -> str:
    from modelscope_hub import CacheNotFound, FileDownloadError, NetworkError
    from requests import ConnectionError as NoConnection

    if isinstance(error, FileDownloadError) and error.failed_files:
        return reason(name, next(iter(error.failed_files.values())))
    kind, where = ("model" if name.kind == "model" else "data set"), endpoint()
    answer = getattr(error, "response", None)  # of requests' errors; the package's have a status
    status = getattr(error if answer is None else answer, "status_code", None)
    if status == 404:
        revision = f" with a revision {name.revision!r}" if name.revision else ""
        return (
            f"{where} has no such {kind}{revision}, or it is private and MODELSCOPE_API_TOKEN is "
            "not the token of a user who may read it"
        )
    if status in (401, 403):
        return (
            f"{where} denies access ({status}): ask for it at {where}/{kind.replace(' ', '')}s/"
            f"{name.repo}, and set MODELSCOPE_API_TOKEN to your token"
        )
    if isinstance(error, CacheNotFound):
        return f"not in the cache {cache_folder()}, and HF_HUB_OFFLINE forbids to ask the hub"
    if isinstance(error, NetworkError | NoConnection):
        return f"{where} cannot be reached ({first_line(error)}). MODELSCOPE_ENDPOINT names it"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no room is left in {cache_folder()}; MODELSCOPE_CACHE names another folder"
    return f"{where} cannot be reached, or broke off: {first_line(error)}"
