"""Fetch, verify, mark complete: one model's files into the hub cache, pinned to a commit.

The hub library does the talking (endpoint, token, errors) and defines the cache's layout, so that every tool shares
the files. The transfer itself is ours: the library begins a broken file again from zero in each process, and over
plain HTTP compares sizes only. Here a partial file is continued, and every file must match the hash the hub states.

Order makes a snapshot complete: small files first, then weights, the name of the revision last. So a snapshot with
all its weights has everything else as well, and whoever was killed half-way left a partial one.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from worker.errors import StartError
from worker.protocol.argv import Download
from worker.protocol.events import Downloaded, Event, Progress
from worker.protocol.exits import Exit
from worker.protocol.snapshot_files import ADAPTER_FILES, INDEX, WEIGHTS, shard_names
from worker.room import PARTIAL, claimed

try:
    import httpx2 as http  # what the hub library speaks with: a fork of httpx, or httpx itself in older versions
except ImportError:
    import httpx as http  # type: ignore[no-redef]

log = logging.getLogger(__name__)

PARALLEL_FILES = 4
PROGRESS_INTERVAL = 0.25
"""Seconds between two Progress events."""
LOCK_INTERVAL = 0.25
"""Seconds between two looks at a file that another process is fetching."""
READ_BYTES = 1 << 20
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_SMALL = re.compile(
    r"[^/]+\.(json|jinja|model|tiktoken|py)|(vocab|merges)\.txt"
    r"|additional_chat_templates/[^/]+\.jinja"
    r"|\d+_[A-Za-z]+/(config\.json|model\.safetensors)"  # modules of sentence-transformers
)
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
FILES_NAMED = 64
"""Files of a download whose progress is told one by one."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/+-]*")

Say = Callable[[Event], None]


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository at a commit, as the hub lists it."""

    path: str
    size: int
    hash: str
    """SHA-256 of the content (64 digits) or, for files outside LFS, its git blob id (40). Also the blob's name."""


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
    from worker import demo  # late: it may need torch, which no other download does

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
    cache = RepoCache(Path(command.cache or constants.HF_HUB_CACHE).expanduser().resolve(), command.repo)
    try:
        if command.adapter:
            return _fetch_adapter(cache, command, say, token)
        snapshot = cache.complete_snapshot(command.revision)
        if snapshot is None:
            return _fetch(cache, command, say, token)
        with contextlib.suppress(OSError):  # a cache that only others may write to serves all the same
            cache.name_revision(command.revision, snapshot.name)
        return snapshot
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, http.RequestError) as error:
        raise _hub_cause(error, command) from error
    except OSError as error:
        cause = _disk_cause(error, cache.root, "set HF_HUB_CACHE to another folder")
        if cause is None:
            raise
        raise cause from error


def _fetch_adapter(cache: "RepoCache", command: Download, say: Say, token: str | None) -> Path:
    """The two files of an adapter."""
    snapshot = cache.snapshot(cache.commit(command.revision) or "none")
    if all((snapshot / name).exists() for name in ADAPTER_FILES):
        return snapshot
    commit, listed = _list_files(command, token)
    try:
        files = [listed[name] for name in ADAPTER_FILES]
    except KeyError as lacking:
        raise StartError(
            f"{command.repo} has no {lacking.args[0]}; it is no LoRA adapter as PEFT writes them"
        ) from None
    fetch = _Fetch(cache, command, commit, token)
    fetch.progress = _Progress(say, {fetch.url(file): file.size for file in files})
    with cache.room(files, command.repo):
        fetch.get_all(files)
    snapshot = cache.snapshot(commit)
    if fault := safetensors_fault(snapshot / ADAPTER_FILES[1]):
        cache.remove(snapshot, ADAPTER_FILES[1:])
        raise StartError(f"{command.repo}: {fault}; removed, try again", Exit.DAMAGED)
    cache.name_revision(command.revision, commit)
    return snapshot


def _fetch(cache: "RepoCache", command: Download, say: Say, token: str | None) -> Path:
    try:
        commit, listed = _list_files(command, token)
    except (http.RequestError, HfHubHTTPError, OfflineModeIsEnabled):
        # Weights without a tokenizer may be all that somebody wants; they are no reason to need the hub.
        snapshot = cache.snapshot(cache.commit(command.revision) or "none")
        if cache.weight_faults(snapshot):
            raise
        log.warning("%s: the hub cannot be asked for further files; using what is in the cache", command.repo)
        return snapshot
    small, has_index = wanted(command.repo, listed)
    fetch = _Fetch(cache, command, commit, token)
    if has_index:
        fetch.get(listed[INDEX])
        shards = _shards_listed(command.repo, cache.snapshot(commit) / INDEX, listed)
    else:
        shards = [listed[WEIGHTS]]
    files = [*small, *shards]
    fetch.progress = _Progress(say, {fetch.url(file): file.size for file in files})
    try:
        with cache.room(files, command.repo):
            fetch.get_all(small)
            fetch.get_all(shards)
    except OSError as error:
        if error.errno in _FULL:
            cache.remove_partials(files)
        raise
    snapshot = cache.snapshot(commit)
    faults = cache.weight_faults(snapshot)
    if faults:
        cache.remove(snapshot, faults)
        raise StartError(f"{command.repo}: {'; '.join(faults.values())}; removed, try again", Exit.DAMAGED)
    cache.name_revision(command.revision, commit)
    return snapshot


def _list_files(command: Download, token: str | None) -> tuple[str, Mapping[str, RemoteFile]]:
    """The commit that the revision means now, and all files of it by path."""
    info = HfApi(library_name="fleet-router").model_info(
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


def safetensors_fault(path: Path) -> str:
    """What is wrong with the file, seen from its header alone; empty: header and size agree.

    Format: 8 bytes little-endian length, that many bytes of JSON, then the data up to the greatest `data_offsets`.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            return f"{path.name} is no safetensors file: its header would end at byte {8 + length} of {size}"
        try:
            tensors = json.loads(file.read(length))
            ends = [int(tensor["data_offsets"][1]) for name, tensor in tensors.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            return f"{path.name} is no safetensors file: {error}"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"{path.name} has {size} bytes where its header says {expected}"


class RepoCache:
    """One repository's folder in the hub cache: `refs/NAME` holds a commit, `blobs/HASH` content, and
    `snapshots/COMMIT/PATH` are links into the blobs."""

    def __init__(self, root: Path, repo: str):
        self.root = root
        self.folder = root / "--".join(("models", *repo.split("/")))

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.hash

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def commit(self, revision: str) -> str:
        """What `revision` meant when it was last fetched; empty if it never was."""
        if _COMMIT.fullmatch(revision):
            return revision
        try:
            return (self.folder / "refs" / revision).read_text().strip()
        except OSError:
            return ""

    def complete_snapshot(self, revision: str) -> Path | None:
        """The folder of a snapshot that needs nothing more; files found damaged in it are removed."""
        commit = self.commit(revision)
        if not commit:
            return None
        snapshot = self.snapshot(commit)
        faults = self.weight_faults(snapshot)
        self.remove(snapshot, faults)
        # Tools that fetch weights only leave no tokenizer; ours is there before the weights are.
        has_tokenizer = any((snapshot / name).exists() for name in _TOKENIZERS)
        return snapshot if not faults and has_tokenizer else None

    def weight_faults(self, snapshot: Path) -> dict[str, str]:
        """What keeps the snapshot from being complete, by file: missing, or size and header disagree."""
        names = [WEIGHTS]
        if not (snapshot / WEIGHTS).exists():
            if not (snapshot / INDEX).exists():
                return {WEIGHTS: f"{WEIGHTS} is missing"}
            try:
                names = shard_names((snapshot / INDEX).read_bytes())
            except (OSError, ValueError) as error:
                return {INDEX: f"{INDEX} {error}"}
        faults = {"config.json": "config.json is missing"} if not (snapshot / "config.json").exists() else {}
        for name in names:
            path = snapshot / name
            fault = safetensors_fault(path) if path.exists() else f"{name} is missing"
            if fault:
                faults[name] = fault
        return faults

    def remove(self, snapshot: Path, names: Iterable[str]) -> None:
        """Remove these files of the snapshot and their content."""
        for name in names:
            link = snapshot / name
            if link.exists():
                log.warning("removing %s, which is damaged", link)
                blob = self.folder / "blobs" / os.path.basename(os.readlink(link)) if link.is_symlink() else link
                blob.unlink(missing_ok=True)
                link.unlink(missing_ok=True)

    def remove_partials(self, files: Iterable[RemoteFile]) -> None:
        """Give back the room that unfinished files take."""
        for file in files:
            self.partial(file).unlink(missing_ok=True)

    def has(self, file: RemoteFile) -> bool:
        blob = self.blob(file)
        return blob.exists() and blob.stat().st_size == file.size

    def link(self, file: RemoteFile, commit: str) -> None:
        """Give the blob its name in the snapshot."""
        name = self.snapshot(commit) / file.path
        name.parent.mkdir(parents=True, exist_ok=True)
        _replace(name, lambda new: new.symlink_to(os.path.relpath(self.blob(file), name.parent)))

    def name_revision(self, revision: str, commit: str) -> None:
        """Let `revision` mean `commit`.

        A commit that somebody asks for is a name, too: any other one is an old state of a branch, and no model.
        """
        name = self.folder / "refs" / revision
        if name.is_file() and name.read_text().strip() == commit:
            return
        name.parent.mkdir(parents=True, exist_ok=True)
        _replace(name, lambda new: new.write_text(commit))

    @contextlib.contextmanager
    def room(self, files: Sequence[RemoteFile], repo: str) -> Iterator[None]:
        """Claims it for those of `files` that are not there, beside what other downloads into this cache still await.
        Raises StartError (DISK_FULL) if that is more than is free."""

        def check(need: int, awaited: int) -> None:
            free = shutil.disk_usage(self.root).free
            if need > free - awaited:
                others = f", of which other downloads await {awaited / 2**20:.0f}" if awaited else ""
                raise StartError(
                    f"{repo} needs {need / 2**20:.0f} MiB more below {self.root}, {free / 2**20:.0f} MiB are free"
                    f"{others}; make room there, or set HF_HUB_CACHE to another disk",
                    Exit.DISK_FULL,
                )

        coming = {self.blob(file): file.size for file in files if not self.has(file)}
        with claimed(self.root, coming, check) if coming else contextlib.nullcontext():
            yield

    def partial(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / f"{file.hash}{PARTIAL}"


class _Abandoned(Exception):
    """Another file of the same fetch has failed; nobody waits for this one."""


class _Fetch:
    """The files of one commit on their way into the cache."""

    def __init__(self, cache: RepoCache, command: Download, commit: str, token: str | None):
        self._cache = cache
        self._repo = command.repo
        self._commit = commit
        self._headers = build_hf_headers(token=token, library_name="fleet-router")
        self._headers["Accept-Encoding"] = "identity"  # or a range would count compressed bytes
        self._failed = threading.Event()
        self.progress = _Progress(lambda event: None, {})

    def url(self, file: RemoteFile) -> str:
        return hf_hub_url(self._repo, file.path, revision=self._commit)

    def get_all(self, files: Sequence[RemoteFile]) -> None:
        """Returns once all are in place; the first failure is raised, and the others end soon after, by themselves."""
        pool = ThreadPoolExecutor(PARALLEL_FILES, thread_name_prefix="fetch")
        try:
            coming = {pool.submit(self.get, file) for file in files}
            while coming:
                self.progress.tell()
                come, coming = wait(coming, timeout=PROGRESS_INTERVAL, return_when=FIRST_EXCEPTION)
                for fetched in come:
                    fetched.result()
        except BaseException:
            self._failed.set()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self.progress.tell()

    def get(self, file: RemoteFile) -> None:
        """Fetch one file unless its content is there, and link it into the snapshot."""
        if self._cache.has(file):
            self.progress.add(self.url(file), file.size)
        else:
            self._cache.blob(file).parent.mkdir(parents=True, exist_ok=True)
            with self._alone(self._cache.partial(file), self.url(file)) as descriptor:
                if self._cache.has(file):  # another process brought it while this one waited
                    self.progress.add(self.url(file), file.size)
                else:
                    self._transfer(file, descriptor)
        self._cache.link(file, self._commit)

    @contextlib.contextmanager
    def _alone(self, partial: Path, url: str) -> Iterator[int]:
        """Yields a descriptor of the partial file that no other process writes to; waits for one that does."""
        seen = 0
        while True:
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # The other's bytes count as ours, or a router would take the wait for a stall.
                size = os.fstat(descriptor).st_size
                self.progress.add(url, size - seen)
                seen = size
                os.close(descriptor)
                if self._failed.wait(LOCK_INTERVAL):
                    raise _Abandoned from None
                continue
            # While we waited, it may have been finished (renamed) or given up (removed): then there is a new one.
            if _is_named(descriptor, partial):
                break
            os.close(descriptor)
        self.progress.add(url, -seen)
        try:
            yield descriptor
        finally:
            if os.fstat(descriptor).st_size == 0:
                partial.unlink(missing_ok=True)
            os.close(descriptor)

    def _transfer(self, file: RemoteFile, descriptor: int) -> None:
        url = self.url(file)
        partial = self._cache.partial(file)
        content = _Content(file, descriptor, lambda count: self.progress.add(url, count))
        while content.size < file.size:
            begun = content.size
            try:
                self._receive(url, file, content)
            except http.RequestError as error:
                if content.size <= begun:
                    raise
                log.warning("%s: %s at byte %d of %d; going on", file.path, error, content.size, file.size)
            else:
                if content.size <= begun:
                    break
        if content.size != file.size or content.digest() != file.hash:
            partial.unlink(missing_ok=True)
            what = (
                f"has {content.size} bytes, {file.size} are stated"
                if content.size != file.size
                else f"does not match its hash {file.hash}"
            )
            raise StartError(
                f"{self._repo}: what the hub sends as {file.path} {what}; removed, try again", Exit.DAMAGED
            )
        os.fsync(descriptor)
        partial.rename(self._cache.blob(file))

    def _receive(self, url: str, file: RemoteFile, content: "_Content") -> None:
        """One answer of the hub: returns at its end, which may be too early."""
        headers = {**self._headers, **({"Range": f"bytes={content.size}-"} if content.size else {})}
        timeout = http.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT, connect=constants.HF_HUB_ETAG_TIMEOUT)
        with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            if response.status_code == 416:
                return
            hf_raise_for_status(response)
            if response.status_code == 200 and content.size:  # the range was ignored
                self.progress.add(url, -content.size)
                content.restart()
            for chunk in response.iter_bytes():  # as they come: a chunk size would hold back what a broken line brought
                if self._failed.is_set():
                    raise _Abandoned
                if content.size > file.size:
                    return
                content.append(chunk)
                self.progress.add(url, len(chunk))


class _Content:
    """The bytes of a partial file and their hash as it grows."""

    def __init__(self, file: RemoteFile, descriptor: int, report: Callable[[int], None]):
        """What `descriptor` holds already is taken over, unless it is more than the file may have. `report` is told of
        bytes as they are read, which of a large file takes longer than a router waits for a sign of life."""
        self._file = file
        self._descriptor = descriptor
        if os.fstat(descriptor).st_size > file.size:
            os.ftruncate(descriptor, 0)
        self._begin()
        while chunk := os.pread(descriptor, READ_BYTES, self.size):
            self._hash.update(chunk)
            self.size += len(chunk)
            report(len(chunk))

    def restart(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self._begin()

    def _begin(self) -> None:
        self.size = 0
        if len(self._file.hash) == 64:
            self._hash = hashlib.sha256()
        else:
            self._hash = hashlib.sha1(b"blob %d\0" % self._file.size, usedforsecurity=False)  # git's blob id

    def append(self, chunk: bytes) -> None:
        rest = memoryview(chunk)
        while rest:
            rest = rest[os.pwrite(self._descriptor, rest, self.size + len(chunk) - len(rest)) :]
        self._hash.update(chunk)
        self.size += len(chunk)

    def digest(self) -> str:
        return self._hash.hexdigest()


class _Progress:
    """Bytes done, by file; any thread may add, one tells. `sizes`: of all files, by URL."""

    def __init__(self, say: Say, sizes: Mapping[str, int]):
        self._say = say
        self._sizes = sizes
        self._total = sum(sizes.values())
        self._done = dict.fromkeys(sizes, 0)
        self._named = sorted(sizes, key=lambda url: -sizes[url])[:FILES_NAMED]
        self._told: int | None = None
        self._lock = threading.Lock()

    def add(self, url: str, count: int) -> None:
        with self._lock:
            self._done[url] = self._done.get(url, 0) + count

    def tell(self) -> None:
        """Say how far things are, unless that was said last."""
        with self._lock:
            files = {url: [self._done[url], self._sizes[url]] for url in self._named}
            done = sum(self._done.values())
        if self._told != done:
            self._told = done
            self._say(Progress(stage="download", done=done, total=self._total, files=files))


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


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path` and rename: readers see the old or the new, never half."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        write(new)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _disk_cause(error: OSError, root: Path, way: str) -> StartError | None:
    """What it means that nothing can be written below `root`; `way`: the way out. None: it means something else."""
    if error.errno in _FULL:
        return StartError(f"no room left below {root}; make some, or {way}", Exit.DISK_FULL)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StartError(f"{root} cannot be written ({error.strerror}): let this user write there, or {way}")
    return None


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether `path` is (still) the file that `descriptor` has open."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
