"""The `download` verb: one model's files in the hub cache, pinned to a commit, verified and complete.

The order makes a snapshot complete: small files first, then weights, the name of the revision last. So a snapshot with
all its weights has everything else as well, and a killed download leaves one without all its weights.
"""

import contextlib
import errno
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from worker.errors import StartError
from worker.fetch.hub_cache import RemoteFile, RepoCache
from worker.fetch.transfer import LIBRARY, PROGRESS_INTERVAL, RequestError, Transfer
from worker.protocol.argv import Download
from worker.protocol.events import Downloaded, Event, Exit, Progress
from worker.protocol.snapshot_files import ADAPTER_FILES, INDEX, WEIGHTS, shard_names

log = logging.getLogger(__name__)

_SMALL = re.compile(
    r"[^/]+\.(json|jinja|model|tiktoken|py)|(vocab|merges)\.txt"
    r"|additional_chat_templates/[^/]+\.jinja"
    r"|\d+_[A-Za-z]+/(config\.json|model\.safetensors)"  # modules of sentence-transformers
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/+-]*")

Say = Callable[[Event], None]


def download(command: Download, say: Say, *, token: str | None) -> Path:
    """Make sure that `command`'s snapshot is complete on disk; returns its folder and says Progress and Downloaded.

    A complete snapshot in the cache is taken as it is, without any network. Raises StartError: UNUSABLE (no such
    repository, no access, nothing in it that can be served), NETWORK, DISK_FULL or DAMAGED (the file at fault is
    removed, so that another try fetches it again).
    """
    if bool(command.repo) == bool(command.demo):
        raise StartError("download needs one of --repo ORG/NAME and --demo NAME", Exit.USAGE)
    snapshot = _make_demo(command, say) if command.demo else _fetch_repo(command, say, token)
    say(Downloaded(snapshot=str(snapshot)))
    return snapshot


def _make_demo(command: Download, say: Say) -> Path:
    from worker.fetch import demo  # late: it may need torch, which no other download does

    if not command.target:
        raise StartError(f"download --demo {command.demo} needs --target FOLDER", Exit.USAGE)
    told = 0.0

    def report(done: int, total: int) -> None:
        nonlocal told
        if done == total or time.monotonic() - told >= PROGRESS_INTERVAL:
            told = time.monotonic()
            say(Progress(stage="download", done=done, total=total))

    try:
        return demo.make(command.demo, Path(command.target), report)
    except ValueError as error:
        raise StartError(str(error)) from error
    except OSError as error:
        cause = _disk_cause(error, Path(command.target), "give another --state-dir")
        if cause is None:
            raise
        raise cause from error


def _fetch_repo(command: Download, say: Say, token: str | None) -> Path:
    if not _REVISION.fullmatch(command.revision):
        raise StartError(f"{command.revision!r} is no name of a revision: use a branch, a tag or a commit")
    root = Path(command.cache or constants.HF_HUB_CACHE).expanduser().resolve()
    try:
        cache = RepoCache(root, command.repo)
        snapshot = cache.complete_snapshot(command.revision, adapter=command.adapter)
        if snapshot is None:
            return _fetch(cache, command, say, token)
        with contextlib.suppress(OSError):  # a cache without the right to write serves as well
            cache.name_revision(command.revision, snapshot.name)
        return snapshot
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RequestError) as error:
        raise _hub_cause(error, command) from error
    except OSError as error:
        cause = _disk_cause(error, root, "set HF_HUB_CACHE to another folder")
        if cause is None:
            raise
        raise cause from error


def _fetch(cache: RepoCache, command: Download, say: Say, token: str | None) -> Path:
    try:
        commit, listed = _list_files(command, token)
    except (RequestError, HfHubHTTPError, OfflineModeIsEnabled):
        # A snapshot of weights without a tokenizer is usable, so it needs no hub.
        present = cache.latest_snapshot(command.revision)
        if present is None or cache.faults(present, adapter=command.adapter):
            raise
        log.warning("%s: the hub cannot be asked for further files; using what is in the cache", command.repo)
        return present
    if command.adapter:
        small, weights = _of_adapter(command.repo, listed)
    else:
        small, has_index = wanted(command.repo, listed)
        weights = [listed[WEIGHTS]] if not has_index else []
        if has_index:
            Transfer(cache, commit, [], say, token=token).get(listed[INDEX])
            weights = _shards_listed(command.repo, cache.snapshot(commit) / INDEX, listed)
    files = [*small, *weights]
    transfer = Transfer(cache, commit, files, say, token=token)
    try:
        with cache.room(files):
            transfer.get_all(small)
            transfer.get_all(weights)
    except OSError as error:
        if error.errno in _FULL:
            cache.remove_partials(files)
        raise
    snapshot = cache.snapshot(commit)
    faults = cache.faults(snapshot, adapter=command.adapter)
    if faults:
        cache.remove(snapshot, faults)
        raise StartError(f"{command.repo}: {'; '.join(faults.values())}; removed, try again", Exit.DAMAGED)
    cache.name_revision(command.revision, commit)
    return snapshot


def _list_files(command: Download, token: str | None) -> tuple[str, Mapping[str, RemoteFile]]:
    """The commit that the revision means now, and all its files by path."""
    info = HfApi(library_name=LIBRARY).model_info(
        command.repo,
        revision=command.revision,
        files_metadata=True,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        token=token,
    )
    files = {}
    for sibling in info.siblings or []:
        digest = (sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or ""
        if sibling.size is not None and _HASH.fullmatch(digest):
            files[sibling.rfilename] = RemoteFile(sibling.rfilename, sibling.size, digest)
    if not info.sha or not _COMMIT.fullmatch(info.sha):
        raise StartError(f"{command.repo}: the hub names no commit for revision {command.revision}", Exit.NETWORK)
    return info.sha, files


def wanted(repo: str, listed: Mapping[str, RemoteFile]) -> tuple[list[RemoteFile], bool]:
    """The small files to fetch, and whether an index says which weights; otherwise they are one `model.safetensors`.

    Pickles, other frameworks' weights and second copies (`original/`, `consolidated.safetensors`, variants) are left
    where they are. Raises StartError if the repository is nothing that can be served.
    """
    if "config.json" not in listed:
        gguf = any(path.endswith(".gguf") for path in listed)
        raise StartError(
            f"{repo} has no config.json"
            + ("; it is a GGUF repository: choose the model's original one, with safetensors weights" if gguf else "")
        )
    if WEIGHTS not in listed and INDEX not in listed:
        pickles = sorted(path for path in listed if path.endswith((".bin", ".pt", ".pth")))
        raise StartError(
            f"{repo} has no {WEIGHTS}"
            + (f", only {pickles[0]}, and pickled weights are never loaded" if pickles else "")
            + "; choose a repository or revision with safetensors weights, or convert it"
        )
    has_index = WEIGHTS not in listed  # with both, transformers takes the single file
    foreign = {path for path in listed if path.endswith(".index.json") and (path != INDEX or not has_index)}
    small = [file for path, file in sorted(listed.items()) if _SMALL.fullmatch(path) and path not in foreign]
    return small, has_index


def _shards_listed(repo: str, index: Path, listed: Mapping[str, RemoteFile]) -> list[RemoteFile]:
    try:
        return [listed[name] for name in shard_names(index.read_bytes())]
    except ValueError as error:
        raise StartError(f"{repo}: {INDEX} {error}") from error
    except KeyError as error:
        raise StartError(f"{repo}: {INDEX} names {error}, which the repository does not have") from error


def _of_adapter(repo: str, listed: Mapping[str, RemoteFile]) -> tuple[list[RemoteFile], list[RemoteFile]]:
    """The configuration and the weights of a LoRA adapter. Raises StartError if one is missing."""
    try:
        config, weights = (listed[name] for name in ADAPTER_FILES)
    except KeyError as missing:
        raise StartError(f"{repo} has no {missing.args[0]}; it is no LoRA adapter in the format of PEFT") from None
    return [config], [weights]


def _hub_cause(error: Exception, command: Download) -> StartError:
    """What a failed conversation with the hub means for whoever asked for the model."""
    repo, hub = command.repo, constants.ENDPOINT
    if isinstance(error, HFValidationError):
        return StartError(f"{repo!r} is no repository name of the form org/name: {error}")
    if isinstance(error, OfflineModeIsEnabled):
        return StartError(f"{repo} is not complete in the cache, and the hub is switched off; unset HF_HUB_OFFLINE")
    if isinstance(error, GatedRepoError):
        return StartError(f"{repo} is gated: accept its terms at {hub}/{repo} and give a hub token (HF_TOKEN)")
    if isinstance(error, RevisionNotFoundError):
        return StartError(f"{repo} has no revision {command.revision!r}")
    if isinstance(error, RepositoryNotFoundError):
        return StartError(f"{repo} is not on {hub}, or not for this hub token; check the name, or set HF_TOKEN")
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        what = f"{hub} answers {status} {error.response.reason_phrase} for {repo}"
        if isinstance(error, DisabledRepoError) or status in (401, 403, 404):
            return StartError(f"{what}; check the name and the rights of the hub token (HF_TOKEN)")
        return StartError(what, Exit.NETWORK)
    reason = str(error) or type(error).__name__
    return StartError(f"{hub} cannot be reached for {repo}: {reason}", Exit.NETWORK)


def _disk_cause(error: OSError, root: Path, way: str) -> StartError | None:
    """What it means that nothing can be written below `root`; `way`: the way out. None: it means something else."""
    if error.errno in _FULL:
        return StartError(f"no room left below {root}; make some, or {way}", Exit.DISK_FULL)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StartError(f"{root} cannot be written ({error.strerror}): let this user write there, or {way}")
    return None
