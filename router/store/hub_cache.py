"""Deletion of revisions from the hub cache, in the layout of the hub library.

`refs/NAME` contains a commit, `snapshots/COMMIT` links to `blobs/HASH`, a download in progress is
`blobs/HASH.incomplete`. Nothing outside the cache is touched, and nothing that another name or a
running download needs.
"""

import fcntl
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from router.store.catalogue import folder_of, missing, reference_files


def remove(cache: str, repo: str, revision: str, *, keep: Collection[str] = (), alone: bool = True) -> None:
    """Delete `revision` (branch, tag or commit) of `repo`, and an incomplete snapshot of it.

    `keep`: commits that other models use; `alone`: no other model of this router uses the repository. Blocks on the
    disk. Raises ValueError if the folder is not inside the cache, OSError if it cannot be written.
    """
    folder = folder_of(cache, repo)
    if not folder.is_dir():
        return
    if folder.resolve().parent != Path(cache).resolve():
        raise ValueError(f"{folder} leads out of the cache")
    reference = folder / "refs" / revision
    if (folder / "refs").resolve() not in reference.resolve().parents:
        raise ValueError(f"{revision!r} is no name of a revision")
    commit = reference.read_text().strip() if reference.is_file() else revision
    reference.unlink(missing_ok=True)
    # A download of another process is like another model: it needs its incomplete snapshot.
    alone = alone and not any(map(_is_being_written, (folder / "blobs").glob("*")))
    named = {path.read_text().strip() for path in reference_files(folder)} | set(keep)
    if alone and not named:
        shutil.rmtree(folder)
        shutil.rmtree(Path(cache) / ".locks" / folder.name, ignore_errors=True)
        return
    for snapshot in (folder / "snapshots").iterdir() if (folder / "snapshots").is_dir() else ():
        if snapshot.name not in named and (snapshot.name == commit or (alone and missing(snapshot))):
            shutil.rmtree(snapshot)
    _sweep(folder)


def _sweep(folder: Path) -> None:
    """Delete blobs that no snapshot links to."""
    blobs = list((folder / "blobs").glob("*"))  # without links, there is no such folder
    # Read after the blobs: a download may complete one meanwhile, and links it then.
    linked = {os.path.basename(os.readlink(path)) for path in (folder / "snapshots").rglob("*") if path.is_symlink()}
    for blob in blobs:
        if blob.name not in linked and not _is_being_written(blob):
            blob.unlink(missing_ok=True)


def _is_being_written(blob: Path) -> bool:
    """Return whether a download holds the lock of the blob, or has completed it meanwhile. True if the file cannot be
    opened, as that of another user: its lock cannot be tried."""
    if blob.suffix != ".incomplete":
        return False
    try:
        with open(blob, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also BlockingIOError: another process holds the lock
        return True
    return False
