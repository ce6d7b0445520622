"""The transfer of files from the hub into its cache: parallel, resumed, verified.

The hub library supplies session, headers, proxies, tokens and error classes. Its own transfer (`hf_hub_download`, read
in version 2.4) is not used, because it does not have four properties that tests/processes require:

* A killed or failed download is resumed by the next process. The library writes to a file with a random name and
  deletes it on failure.
* Every file matches the hash that the hub lists. Over plain HTTP the library compares sizes only.
* An unfinished file has a known name, so that a second download counts its bytes, and waits for it with Progress
  events. The library waits for its lock without any callback, which the router takes for a stall.
* Progress appears as bytes arrive. The library reads in pieces of 10 MB and drops a piece that a broken connection cut.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from worker.errors import StartError
from worker.fetch.disk_reservation import bytes_present
from worker.fetch.hub_cache import RemoteFile, RepoCache
from worker.protocol.events import Event, Exit, Progress

try:
    import httpx2 as http  # the HTTP client of the hub library: a fork of httpx, or httpx itself in older versions
except ImportError:
    import httpx as http  # type: ignore[no-redef]

RequestError = http.RequestError
log = logging.getLogger(__name__)

LIBRARY = "fleet-router"  # name in the User-Agent
PARALLEL_FILES = 4
PROGRESS_INTERVAL = 0.25  # seconds between two Progress events
LOCK_INTERVAL = 0.25  # seconds between two tries to lock a file that another process is fetching
READ_BYTES = 1 << 20
FILES_NAMED = 64  # files listed one by one in Progress, the largest first


class Transfer:
    """A running download of files of one commit into the cache."""

    def __init__(
        self,
        cache: RepoCache,
        commit: str,
        files: Sequence[RemoteFile],
        emit: Callable[[Event], None],
        *,
        token: str | None,
    ):
        """`files`: all files that Progress events count; `emit` receives the events."""
        self._cache = cache
        self._commit = commit
        self._files = sorted(files, key=lambda file: -file.size)
        self._emit = emit
        self._headers = build_hf_headers(token=token, library_name=LIBRARY)
        self._headers["Accept-Encoding"] = "identity"  # otherwise a range would count compressed bytes
        self._failed = threading.Event()
        self._handled = 0  # bytes received or read; only a sign of life, so lost updates between threads do not matter
        self._reported: tuple[int, int] | None = None

    def get_all(self, files: Sequence[RemoteFile]) -> None:
        """Fetch `files` in parallel. Raise the first failure; the other threads then end by themselves."""
        pool = ThreadPoolExecutor(PARALLEL_FILES, thread_name_prefix="fetch")
        try:
            running = {pool.submit(self.get, file) for file in files}
            while running:
                self._report()
                done, running = wait(running, timeout=PROGRESS_INTERVAL, return_when=FIRST_EXCEPTION)
                for fetched in done:
                    fetched.result()
        except BaseException:
            self._failed.set()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self._report()

    def get(self, file: RemoteFile) -> None:
        """Fetch one file unless its content is in the cache, and link it into the snapshot."""
        if not self._cache.has(file):
            self._cache.blob(file).parent.mkdir(parents=True, exist_ok=True)
            with self._locked(self._cache.partial(file)) as partial:
                if not self._cache.has(file):  # otherwise another process completed it while this one waited
                    self._fetch(file, partial)
        self._cache.link(file, self._commit)

    def _report(self) -> None:
        """Emit a Progress event unless nothing has happened since the last one.

        The sizes are read from the disk, so the bytes that another process writes count too.
        """
        present = {file: bytes_present(self._cache.blob(file), file.size) for file in self._files}
        done = sum(present.values())
        if self._reported != (done, self._handled):
            self._reported = (done, self._handled)
            total = sum(file.size for file in self._files)
            files = {self._url(file): [present[file], file.size] for file in self._files[:FILES_NAMED]}
            self._emit(Progress(stage="download", done=done, total=total, files=files))

    def _url(self, file: RemoteFile) -> str:
        return hf_hub_url(self._cache.repo, file.path, revision=self._commit)

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[io.FileIO]:
        """Open the partial file with a lock on it; wait until no other process writes to it."""
        while True:
            partial = io.FileIO(path, "ab+")
            try:
                fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Meanwhile it may have been finished (renamed) or given up (removed): then there is a new one.
                if os.path.samestat(os.fstat(partial.fileno()), path.stat()):
                    break
                partial.close()
            except FileNotFoundError:
                partial.close()
            except BlockingIOError:
                partial.close()
                if self._failed.wait(LOCK_INTERVAL):
                    raise _Abandoned from None
        try:
            yield partial
        finally:
            if os.fstat(partial.fileno()).st_size == 0:
                path.unlink(missing_ok=True)
            partial.close()

    def _fetch(self, file: RemoteFile, partial: io.FileIO) -> None:
        """Complete the partial file, verify it and rename it to the blob."""
        content = Content(file, partial, self._count)
        while content.size < file.size:
            before = content.size
            try:
                self._receive(file, content)
            except http.RequestError as error:
                if content.size <= before:
                    raise
                log.warning("%s: %s at byte %d of %d; resuming", file.path, error, content.size, file.size)
            else:
                if content.size <= before:
                    break
        path = self._cache.partial(file)
        if fault := content.fault():
            path.unlink(missing_ok=True)
            raise StartError(
                f"{self._cache.repo}: {file.path} as sent by the hub {fault}; it was removed, try again", Exit.DAMAGED
            )
        os.fsync(partial.fileno())
        path.rename(self._cache.blob(file))

    def _receive(self, file: RemoteFile, content: "Content") -> None:
        """Append the body of one response, which may end too early."""
        headers = {**self._headers, **({"Range": f"bytes={content.size}-"} if content.size else {})}
        timeout = http.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT, connect=constants.HF_HUB_ETAG_TIMEOUT)
        with get_session().stream(
            "GET", self._url(file), headers=headers, timeout=timeout, follow_redirects=True
        ) as response:
            if response.status_code == 416:  # the range begins at or behind the end of the file
                return
            if response.status_code == 404:  # the hub lists the file, so the repository exists and may be read
                raise StartError(
                    f"{self._cache.repo}: {constants.ENDPOINT} lists {file.path}, but answers 404 for it;"
                    " try again later, or choose another revision"
                )
            hf_raise_for_status(response)
            if response.status_code == 200:  # a range, if there was one, was ignored
                content.restart()
            for chunk in response.iter_bytes():  # no chunk size: it would hold back the last bytes before a break
                if self._failed.is_set():
                    raise _Abandoned
                if content.size > file.size:
                    return
                content.append(chunk)
                self._count(len(chunk))

    def _count(self, count: int) -> None:
        self._handled += count


class Content:
    """The bytes of a partial file and their hash as it grows."""

    def __init__(self, file: RemoteFile, partial: io.FileIO, report: Callable[[int], None]):
        """Hash the bytes that are already in `partial`. Start again if there are more than the file has.

        `report` receives the size of each piece that is read: hashing a large file takes longer than the router waits
        for a sign of life.
        """
        self._file = file
        self._partial = partial
        self._begin()
        if os.fstat(partial.fileno()).st_size > file.size:
            self.restart()
        partial.seek(0)
        while chunk := partial.read(READ_BYTES):
            self._hash.update(chunk)
            self.size += len(chunk)
            report(len(chunk))

    def restart(self) -> None:
        self._partial.truncate(0)
        self._begin()

    def _begin(self) -> None:
        self.size = 0
        if len(self._file.hash) == 64:
            self._hash = hashlib.sha256()
        else:
            self._hash = hashlib.sha1(b"blob %d\0" % self._file.size, usedforsecurity=False)  # git blob id

    def append(self, chunk: bytes) -> None:
        if not os.fstat(self._partial.fileno()).st_nlink:  # deleted: the rest would be received in vain
            raise FileNotFoundError(errno.ENOENT, "deleted during the download", self._partial.name)
        rest = memoryview(chunk)
        while rest:
            rest = rest[self._partial.write(rest) :]  # may write less than it receives
        self._hash.update(chunk)
        self.size += len(chunk)

    def fault(self) -> str:
        """The difference from size and hash on the hub. Empty: both are right."""
        if self.size != self._file.size:
            return f"has {self.size} bytes instead of {self._file.size}"
        return "" if self._hash.hexdigest() == self._file.hash else f"does not match its hash {self._file.hash}"


class _Abandoned(Exception):
    """Another file of the same transfer has failed, so this one is not needed."""
