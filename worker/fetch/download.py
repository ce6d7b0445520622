"""The `download` command: the files of one model in the hub cache, pinned to a commit, verified and complete.

Small files come first, then the weights, and the name of the revision last. So a snapshot that has all its weights has
all other files as well, and a killed download leaves a snapshot with missing weights.
"""

import contextlib
import errno
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
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
from worker.fetch.hub_cache import COMMIT, RemoteFile, RepoCache
from worker.fetch.transfer import LIBRARY, PROGRESS_INTERVAL, RequestError, Transfer
from worker.protocol.argv import Download
from worker.protocol.events import Downloaded, Event, Exit, Progress
from worker.protocol.pickled_weights import PICKLED, PICKLED_INDEX, PICKLED_SUFFIXES
from worker.protocol.snapshot_files import (
    ADAPTER_FILES,
    IN_OLD_LAYOUT,
    INDEX,
    NO_GGUF,
    OLD_LAYOUT,
    WEIGHTS,
    shard_names,
    single_weights,
)

log = logging.getLogger(__name__)

_SMALL = re.compile(
    r"[^/]+\.(json|jinja|model|spm|tiktoken|py)|(vocab|merges)\.txt|bpe\.codes"
    r"|additional_chat_templates/[^/]+\.jinja"
    r"|\d+_\w+/(config\.json|model\.safetensors|pytorch_model\.bin)"  # modules of sentence-transformers
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/+-]*")

Emit = Callable[[Event], None]


def download(command: Download, emit: Emit, *, token: str | None) -> Path:
    """Complete the snapshot of `command` on disk and return its folder. Emit Progress and Downloaded.

    A complete snapshot in the cache needs no network. Raises StartError: UNUSABLE (no such repository, no access, no
    files that can be served), NETWORK, DISK_FULL or DAMAGED (the damaged file is removed, so that another try fetches
    it again).
    """
    if bool(command.repo) == bool(command.demo):
        raise StartError("download needs either --repo ORG/NAME or --demo NAME", Exit.USAGE)
    snapshot = _make_demo(command, emit) if command.demo else _fetch_repo(command, emit, token)
    emit(Downloaded(snapshot=str(snapshot)))
    return snapshot


def _make_demo(command: Download, emit: Emit) -> Path:
    from worker.fetch import demo  # Imported late: no other download needs it.

    if not command.target:
        raise StartError(f"download --demo {command.demo} needs --target FOLDER", Exit.USAGE)
    reported = 0.0  # when the last Progress was emitted

    def report(done: int, total: int) -> None:
        nonlocal reported
        if done == total or time.monotonic() - reported >= PROGRESS_INTERVAL:
            reported = time.monotonic()
            emit(Progress(stage="download", done=done, total=total))

    try:
        with _writing(Path(command.target), "give another --state-dir"):
            return demo.make(command.demo, Path(command.target), report)
    except ValueError as error:
        raise StartError(str(error)) from error


def _fetch_repo(command: Download, emit: Emit, token: str | None) -> Path:
    if not _REVISION.fullmatch(command.revision):
        raise StartError(f"{command.revision!r} is no name of a revision; give a branch, a tag or a commit")
    root = Path(command.cache or constants.HF_HUB_CACHE).expanduser().resolve()
    with _writing(root, "set HF_HUB_CACHE to another folder"):
        try:
            cache = RepoCache(root, command.repo)
            snapshot = cache.complete_snapshot(command.revision, adapter=command.adapter)
            if snapshot is None:
                return _fetch(cache, command, emit, token)
            with contextlib.suppress(OSError):  # a read-only cache is sufficient here
                cache.name_revision(command.revision, snapshot.name)
            return snapshot
        except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RequestError) as error:
            raise _hub_cause(error, command) from error


def _fetch(cache: RepoCache, command: Download, emit: Emit, token: str | None) -> Path:
    try:
        commit, listed = _list_files(command, token)
    except (RequestError, HfHubHTTPError, OfflineModeIsEnabled):
        # Weights without a tokenizer can be served, so such a snapshot does not need the hub.
        present = cache.latest_snapshot(command.revision)
        if present is None or cache.faults(present, adapter=command.adapter):
            raise
        log.warning(
            "%s: the hub does not answer, so no further files are fetched; using the files in the cache", command.repo
        )
        return present
    if command.adapter:
        small, weights = _adapter_files(command.repo, listed)
    else:
        small, main = wanted(command.repo, listed)
        weights = [listed[main]]
        if main in (INDEX, PICKLED_INDEX):
            Transfer(cache, commit, [], emit, token=token).get(listed[main])
            weights = _shards_listed(command.repo, cache.snapshot(commit) / main, listed)
    files = [*small, *weights]
    transfer = Transfer(cache, commit, files, emit, token=token)
    try:
        with cache.reserved_space(files):
            transfer.get_all(small)
            transfer.get_all(weights)
    except OSError as error:
        if error.errno in _FULL:
            for file in files:
                cache.partial(file).unlink(missing_ok=True)
        raise
    snapshot = cache.snapshot(commit)
    faults = cache.faults(snapshot, adapter=command.adapter)
    if faults:
        cache.remove(snapshot, faults)
        raise StartError(
            f"{command.repo}: {'; '.join(faults.values())}; damaged files were removed, try again", Exit.DAMAGED
        )
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
    if not info.sha or not COMMIT.fullmatch(info.sha):
        raise StartError(f"{command.repo}: the hub gives no commit for revision {command.revision}", Exit.NETWORK)
    return info.sha, files


def wanted(repo: str, listed: Mapping[str, RemoteFile]) -> tuple[list[RemoteFile], str]:
    """The small files to fetch, and the file of the weights or of their index.

    Pickled weights are fetched only if there are no others. Weights of other frameworks and second copies (`original/`,
    `consolidated.safetensors`, variants) are not fetched. Raises StartError if the repository has nothing that can be
    served.
    """
    if "config.json" not in listed:
        raise StartError(f"{repo} has no config.json{_other_format(listed)}")
    # The order of transformers: with an index and a single file, it loads the single one.
    names = (WEIGHTS, INDEX, single_weights(listed), PICKLED, PICKLED_INDEX)
    main = next((name for name in names if name in listed), "")
    if not main:
        pickles = sorted(path for path in listed if path.endswith(PICKLED_SUFFIXES))
        raise StartError(
            f"{repo} has no {WEIGHTS}"
            + (f" and no {PICKLED}, only {pickles[0]}" if pickles else "")
            + "; choose a repository or revision with safetensors weights"
        )
    foreign = {path for path in listed if path.endswith(".index.json") and path != main}
    # Pickled weights of a module beside its safetensors.
    foreign |= {path.replace(WEIGHTS, PICKLED) for path in listed if path.endswith(f"/{WEIGHTS}")}
    small = [file for path, file in sorted(listed.items()) if _SMALL.fullmatch(path) and path not in foreign]
    return small, main


def _other_format(listed: Collection[str]) -> str:
    """The end of the message for a repository without config.json; empty if its format is unknown."""
    if any(path.endswith(".gguf") for path in listed):
        return f"; it has GGUF files: {NO_GGUF}; choose the original repository of the model, with safetensors weights"
    if ADAPTER_FILES[0] in listed:
        return "; it is an adapter: serve the model that it was made for, with this one as its lora"
    if "params.json" in listed:
        return "; it has Mistral's own format; choose a repository with the weights for transformers"
    if f"{OLD_LAYOUT}/config.json" in listed:
        return f"; {IN_OLD_LAYOUT}"
    return ""


def _shards_listed(repo: str, index: Path, listed: Mapping[str, RemoteFile]) -> list[RemoteFile]:
    try:
        return [listed[name] for name in shard_names(index.read_bytes())]
    except ValueError as error:
        raise StartError(f"{repo}: {index.name} {error}") from error
    except KeyError as error:
        raise StartError(f"{repo}: {index.name} names {error}, which is not in the repository") from error


def _adapter_files(repo: str, listed: Mapping[str, RemoteFile]) -> tuple[list[RemoteFile], list[RemoteFile]]:
    """The configuration and the weights of a LoRA adapter. Raises StartError if one is missing."""
    try:
        config, weights = (listed[name] for name in ADAPTER_FILES)
    except KeyError as missing:
        raise StartError(f"{repo} has no {missing.args[0]}; it is not a LoRA adapter in the format of PEFT") from None
    return [config], [weights]


def _hub_cause(error: Exception, command: Download) -> StartError:
    """The StartError, with a remedy, for a failed request to the hub."""
    repo, hub = command.repo, constants.ENDPOINT
    if isinstance(error, HFValidationError):
        return StartError(f"{repo!r} is not a repository name of the form org/name: {error}")
    if isinstance(error, OfflineModeIsEnabled):
        return StartError(
            f"{repo} is not complete in the cache, and access to the hub is disabled; unset HF_HUB_OFFLINE"
        )
    if isinstance(error, GatedRepoError):
        return StartError(f"{repo} is gated: accept its terms at {hub}/{repo} and give a hub token (HF_TOKEN)")
    if isinstance(error, RevisionNotFoundError):
        return StartError(f"{repo} has no revision {command.revision!r}")
    if isinstance(error, RepositoryNotFoundError):
        return StartError(f"{repo} is not on {hub}, or this hub token has no access; check the name, or set HF_TOKEN")
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        message = f"{hub} answers {status} {error.response.reason_phrase} for {repo}"
        if isinstance(error, DisabledRepoError) or status in (401, 403, 404):
            return StartError(f"{message}; check the name and the permissions of the hub token (HF_TOKEN)")
        return StartError(message, Exit.NETWORK)
    reason = str(error) or type(error).__name__
    return StartError(f"{hub} cannot be reached for {repo}: {reason}", Exit.NETWORK)


@contextlib.contextmanager
def _writing(root: Path, remedy: str) -> Iterator[None]:
    """Raise StartError for a failure of the disk below `root`: files deleted meanwhile, or, with `remedy` in its
    message, no room or no permission."""
    try:
        yield
    except FileNotFoundError as error:
        raise StartError(f"files below {root} were deleted during the download; try again", Exit.DAMAGED) from error
    except OSError as error:
        if error.errno in _FULL:
            raise StartError(f"no room left below {root}; free some, or {remedy}", Exit.DISK_FULL) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StartError(
                f"{root} cannot be written ({error.strerror}): let this user write there, or {remedy}"
            ) from error
        raise
