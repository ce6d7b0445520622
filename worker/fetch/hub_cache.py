"""One repository in the hub cache: its layout, the completeness of a snapshot, and the disk space of a download.

The layout is the hub library's, so that every tool shares the files: `refs/NAME` contains a commit, `blobs/HASH` the
content, and `snapshots/COMMIT/PATH` are links to blobs. An unfinished blob is `blobs/HASH.incomplete`.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.file_download import repo_folder_name

from worker.errors import StartError
from worker.fetch.disk_reservation import PARTIAL, reserved
from worker.fetch.pickles import pickle_fault
from worker.protocol.events import Exit
from worker.protocol.pickled_weights import PICKLED, PICKLED_INDEX
from worker.protocol.snapshot_files import (
    ADAPTER_FILES,
    INDEX,
    MAX_HEADER_BYTES,
    WEIGHTS,
    is_of_tokenizer,
    shard_names,
    single_weights_in,
)

log = logging.getLogger(__name__)

COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository at a commit, as the hub lists it."""

    path: str
    size: int
    hash: str  # SHA-256 of the content (64 digits) or, outside LFS, its git blob id (40). Also the name of the blob.


class RepoCache:
    """The folder of one repository in the hub cache."""

    def __init__(self, root: Path, repo: str):
        self.root = root
        self.repo = repo
        self.folder = root / repo_folder_name(repo_id=repo, repo_type="model")

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.hash

    def partial(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / f"{file.hash}{PARTIAL}"

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def has(self, file: RemoteFile) -> bool:
        blob = self.blob(file)
        return blob.exists() and blob.stat().st_size == file.size

    def latest_snapshot(self, revision: str) -> Path | None:
        """The folder of the commit that `revision` meant at the last download. None: there was no download."""
        if COMMIT.fullmatch(revision):
            return self.snapshot(revision)
        try:
            return self.snapshot((self.folder / "refs" / revision).read_text().strip() or "none")
        except OSError:
            return None

    def complete_snapshot(self, revision: str, *, adapter: bool = False) -> Path | None:
        """The folder of a snapshot that needs no download. Damaged files in it are removed."""
        snapshot = self.latest_snapshot(revision)
        if snapshot is None:
            return None
        faults = self.faults(snapshot, adapter=adapter)
        self.remove(snapshot, faults)
        if faults:
            return None
        # A tool that fetches only weights brings no tokenizer. Our own downloads bring it before the weights.
        has_tokenizer = adapter or any(is_of_tokenizer(path.name) for path in snapshot.iterdir())
        return snapshot if has_tokenizer else None

    def faults(self, snapshot: Path, *, adapter: bool = False) -> dict[str, str]:
        """The reasons, by file, why the snapshot is not complete: missing, or size and header disagree.

        Raises StartError for pickled weights that need more than tensors. They are not removed, since another download
        would bring the same.
        """
        single = single_weights_in(snapshot).name
        needed, weights = "config.json", [single]
        names = (WEIGHTS, INDEX, single, PICKLED, PICKLED_INDEX)
        present = next((name for name in names if (snapshot / name).exists()), "")
        if adapter:
            needed, weights = ADAPTER_FILES[0], list(ADAPTER_FILES[1:])
        elif present == PICKLED:
            weights = [PICKLED]
        elif present in (INDEX, PICKLED_INDEX):
            try:
                weights = shard_names((snapshot / present).read_bytes())
            except (OSError, ValueError) as error:
                return {present: f"{present} {error}"}
        check = safetensors_fault if adapter or present in (single, INDEX) else pickle_fault
        faults = {} if (snapshot / needed).exists() else {needed: f"{needed} is missing"}
        for name in weights:
            path = snapshot / name
            fault = check(path) if path.exists() else f"{name} is missing"
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

    def link(self, file: RemoteFile, commit: str) -> None:
        """Link the blob into the snapshot under its path."""
        name = self.snapshot(commit) / file.path
        name.parent.mkdir(parents=True, exist_ok=True)
        _replace(name, lambda new: new.symlink_to(os.path.relpath(self.blob(file), name.parent)))

    def name_revision(self, revision: str, commit: str) -> None:
        """Record that `revision` means `commit`.

        A requested commit is recorded under its own name too: the router lists named commits as models, and takes any
        other snapshot for an old state of a branch. The hub library does not record commits.
        """
        name = self.folder / "refs" / revision
        if name.is_file() and name.read_text().strip() == commit:
            return
        name.parent.mkdir(parents=True, exist_ok=True)
        _replace(name, lambda new: new.write_text(commit))

    @contextlib.contextmanager
    def reserved_space(self, files: Sequence[RemoteFile]) -> Iterator[None]:
        """Reserve disk space for those of `files` that are missing, beside the reservations of other downloads.

        Raises StartError (DISK_FULL) if the free space is not enough. The hub library only logs a warning, per file,
        and does not count the reservations of other downloads.
        """

        def check(missing: int, reserved_by_others: int) -> None:
            free = shutil.disk_usage(self.root).free
            if missing > free - reserved_by_others:
                size, unit = (1 << 20, "MiB") if missing >= 10 << 20 else (1 << 10, "KiB")  # two digits or more
                others = ""
                if reserved_by_others:
                    others = f", of which other downloads have reserved {reserved_by_others / size:.0f}"
                raise StartError(
                    f"{self.repo} needs {missing / size:.0f} {unit} more below {self.root},"
                    f" {free / size:.0f} {unit} are free{others}; free space there or set HF_HUB_CACHE to another disk",
                    Exit.DISK_FULL,
                )

        absent = {self.blob(file): file.size for file in files if not self.has(file)}
        with reserved(self.root, absent, check) if absent else contextlib.nullcontext():
            yield


def safetensors_fault(path: Path) -> str:
    """The defect of a safetensors file that its header shows. Empty: header and size agree.

    Format: 8 bytes little-endian length, that many bytes of JSON, then the data up to the greatest `data_offsets`.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            return f"{path.name} is not a safetensors file: its header would end at byte {8 + length} of {size}"
        try:
            tensors = json.loads(file.read(length))
            ends = [int(tensor["data_offsets"][1]) for name, tensor in tensors.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            return f"{path.name} is not a safetensors file: {error}"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"{path.name} has {size} bytes, but its header requires {expected}"


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path` and rename: readers see the old or the new content, never a part."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        write(new)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
