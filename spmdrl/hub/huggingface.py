"""Downloads of the Hugging Face Hub through huggingface_hub, and its refusals in plain words."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    constants,
    errors,
    get_cached_repo_tree,
    get_token,
    snapshot_download,
)
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from tqdm import tqdm

from spmdrl.cli.hub_names import HubName
from spmdrl.config import ConfigError

# weights in a folder below the model's own are another library's copy of them
NEVER = ["*/*.safetensors", "*/*.bin", "consolidated*.safetensors", "training_args.bin"]
# of downloads by Xet. huggingface_hub 1.33, which SGLang's environment has, has no name for them
XET_ERROR: Any = getattr(errors, "XetDownloadError", RuntimeError)
Report = Callable[[int, int], None]  # bytes that are there, bytes in all; so far as is known


class PendingDownload(NamedTuple):
    """Says what a download would bring that is not in the cache."""

    files: int
    size: int  # bytes


def snapshot(name: HubName, patterns: Sequence[str], report: Report) -> Path:
    """Returns the folder of a repository in the cache, with all files that match the patterns, of
    which it downloads those that are not there. Raises ConfigError.
    """
    with explained(name):
        found = snapshot_download(
            name.repo, repo_type=name.kind, revision=name.revision or None,
            allow_patterns=list(patterns), ignore_patterns=NEVER, tqdm_class=counting_bar(report),
        )  # fmt: skip
    return Path(found)


def listing(name: HubName, folder: Path) -> list[str]:
    """Returns the paths of all files of a repository. folder: what `snapshot` returned; with it
    the list came along. A cache that was filled file by file has no list: then of those in it.
    """
    try:
        tree = get_cached_repo_tree(name.repo, repo_type=name.kind, revision=folder.name)
    except CachedRepoTreeNotFoundError:
        return files_in(folder)
    return sorted(file.path for file in tree)


def files_in(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files)


def pending(name: HubName, patterns: Sequence[str]) -> PendingDownload:
    """Says what `snapshot` would download. Raises ConfigError."""
    with explained(name):
        files = snapshot_download(
            name.repo, repo_type=name.kind, revision=name.revision or None,
            allow_patterns=list(patterns), ignore_patterns=NEVER, dry_run=True,
            tqdm_class=counting_bar(lambda done, total: None),
        )  # fmt: skip
    missing = [file for file in files if file.will_download]
    return PendingDownload(len(missing), sum(file.file_size or 0 for file in missing))


def open_repository(name: HubName, private: bool) -> None:
    """Creates the repository of a model where there is none, and asks whether the user may write
    to it. Raises ConfigError where it cannot be pushed to, or is public and `private` is wanted.
    """
    if get_token() is None:
        raise ConfigError(
            f"{name}: a push needs a token that may write: set HF_TOKEN to one of {endpoint()}"
            "/settings/tokens"
        )
    api = HfApi()
    with explained(name):
        api.create_repo(name.repo, private=private, exist_ok=True)
        is_public = not api.repo_info(name.repo).private
        # the first request of every push; it asks for the right and uploads nothing
        card = CommitOperationAdd("README.md", b"\n")
        api.preupload_lfs_files(name.repo, [card], free_memory=False)
    if private and is_public:
        raise ConfigError(
            f"{name} is public on {endpoint()}: --private False says that the model may be"
        )


def push(name: HubName, folder: Path, message: str) -> str:
    """Uploads the files of a folder in one commit. Returns its address. Raises ConfigError."""
    with explained(name), no_bars():
        return str(HfApi().upload_folder(
            repo_id=name.repo, folder_path=folder, commit_message=message
        ).commit_url)  # fmt: skip


@contextmanager
def no_bars() -> Iterator[None]:
    """The package draws no bars, which would mix with ours; as before afterwards."""
    was_off = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_off:
            enable_progress_bars()


def cache_folder() -> str:
    return constants.HF_HUB_CACHE


def endpoint() -> str:
    return constants.ENDPOINT


def counting_bar(report: Report) -> Any:
    """Returns a class for `tqdm_class` that draws nothing and reports the bytes of its bars."""
    bars: list[Any] = []

    class CountingBar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            self.done, self.counts_bytes = 0.0, settings.get("unit") == "B"
            super().__init__(*args, **{**settings, "disable": True})
            bars.append(self)

        def update(self, n: float | None = 1) -> None:
            self.done += n or 0
            counted = [bar for bar in bars if bar.counts_bytes]
            if counted:  # one bar has what came over the network, one what was written
                most = max(int(bar.total or 0) for bar in counted)
                report(min(most, max(int(bar.done) for bar in counted)), most)

    return CountingBar


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Raises ConfigError with the remedy for what the client raises."""
    try:
        yield
    except (HTTPError, OSError, XET_ERROR) as error:
        raise ConfigError(f"{name}: {reason(name, error)}") from error


def reason(name: HubName, error: Exception) -> str:
    kind, where = ("model" if name.kind == "model" else "data set"), endpoint()
    page = f"{where}/{'' if name.kind == 'model' else 'datasets/'}{name.repo}"
    if isinstance(error, GatedRepoError):
        return f"this {kind} is gated: ask for access at {page}, and set HF_TOKEN to your token"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{where} has no such {kind}, or it is private and HF_TOKEN is not the token of a user "
            "who may read it"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{page} has no revision {name.revision!r}: name a branch, a tag or a commit of it"
    if isinstance(error, LocalEntryNotFoundError | DryRunError):
        cause = error.__cause__
        return reason(name, cause) if isinstance(cause, HfHubHTTPError) else unreachable(error)
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return (
                f"{where} denies access ({status}): set HF_TOKEN to the token of a user who has it"
            )
        return f"{where} answers {status}: {first_line(error)}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no room is left in {cache_folder()}; HF_HOME names another folder for the cache"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{cache_folder()} cannot be written to: {error}"
    if isinstance(error, OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE forbids to ask {where}"
    return f"{where} cannot be reached, or broke off: {first_line(error)}"


def unreachable(error: Exception) -> str:
    """Says why a download is not there: the network is off, or the hub did not answer."""
    if constants.HF_HUB_OFFLINE or isinstance(error.__cause__, OfflineModeIsEnabled):
        return (
            f"not wholly in the cache {cache_folder()}, and HF_HUB_OFFLINE forbids to ask the hub"
        )
    cause = first_line(error.__cause__ or error)
    return (
        f"not wholly in the cache {cache_folder()}, and {endpoint()} cannot be reached ({cause}). "
        "HF_ENDPOINT names a mirror"
    )


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")[:200]
