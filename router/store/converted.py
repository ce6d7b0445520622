"""Converted snapshots: files that every load would convert, converted once, in a folder of the router.

The name of a folder is a hash of its sources (real paths, sizes, times) and of the library versions that read them. A
conversion of changed files is therefore never found. The source snapshot is not changed. A conversion may be
deleted at any time; the cost is a new conversion.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from router.config.presets import Preset
from router.memory.checkpoint_facts import Checkpoint
from worker.protocol.argv import Convert
from worker.protocol.snapshot_files import MANIFEST, PART, ConversionManifest, decode_manifest

log = logging.getLogger("router.store.converted")

_LAYOUT = 1  # part of the hash; raised when the result of a conversion changes


def can_be_converted(preset: Preset) -> bool:
    """Return whether the libraries of the router convert the files as those of the worker would."""
    return not (preset.python or preset.demo or preset.trust_remote_code or preset.load_format == "dummy")


class ConvertedSnapshots:
    """The conversions of one state folder. All methods may be called from any thread. They read a few names; only
    `sweep` blocks on the disk."""

    def __init__(self, folder: Path, *, versions: Sequence[str] = ()):
        """`versions`: versions of the libraries that convert and load."""
        self._folder = folder
        self._versions = tuple(versions)
        self._given_up: set[Path] = set()
        self.sizes: dict[str, int] = {}  # bytes of disk by source, as of the last sweep or load
        self._sweeping = threading.Lock()

    def target(self, snapshot: str) -> Path | None:
        """Return the folder of the conversion of `snapshot` in its current state, whether it exists or not; None if the
        files cannot be read."""
        facts = []
        try:
            with os.scandir(snapshot) as entries:
                for entry in entries:
                    found = entry.stat()
                    at = os.path.realpath(entry.path)
                    facts.append((entry.name, at, found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:
            return None
        words = json.dumps([_LAYOUT, self._versions, sorted(facts)])
        return self._folder / hashlib.sha256(words.encode()).hexdigest()[:32]

    def find(self, snapshot: str) -> str | None:
        """Return the folder of the converted snapshot, if it is complete and there was something to convert."""
        target = self.target(snapshot)
        manifest = self._manifest(target) if target is not None and target not in self._given_up else None
        if manifest is None or not manifest.files:
            return None
        self.sizes = {**self.sizes, manifest.source: _size(manifest)}  # listed without waiting for a sweep
        return str(target)

    def command(self, snapshot: str, facts: Checkpoint) -> Convert | None:
        """Return the command that converts `snapshot`; None if there is nothing to do: it is converted, needs no
        conversion, or failed in its current state. Blocks on the disk.

        The router decides this, because the imports of a worker take seconds. Incomplete targets are deleted first,
        because the worker keeps an existing target.
        """
        has_parts = facts.stacked > 0 and not facts.quantization
        if not facts.pickled and not has_parts:
            return None
        target = self.target(snapshot)
        if target is None or target in self._given_up or self._manifest(target) is not None:
            return None
        self.sweep()
        return Convert(snapshot=snapshot, target=str(target))

    def is_one(self, folder: str) -> bool:
        """Return whether `folder` is a converted snapshot."""
        return Path(folder).parent == self._folder

    def give_up(self, target: Path) -> None:
        """Stop using a conversion, and do not repeat it while this router runs and the source stays the same."""
        self._given_up.add(target)
        try:
            (target / MANIFEST).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be deleted: %s", target, error.strerror or error)

    def sweep(self) -> int:
        """Delete conversions whose source is gone or has changed, and abandoned parts. Returns how many."""
        swept, sizes = 0, {}
        with self._sweeping, self._unless_converting() as are_abandoned:
            for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
                if path.name.endswith(PART):
                    if are_abandoned:
                        shutil.rmtree(path, ignore_errors=True)
                        swept += 1
                    continue
                manifest = self._manifest(path)
                if manifest is None or self.target(manifest.source) != path:
                    shutil.rmtree(path, ignore_errors=True)
                    swept += 1
                elif manifest.files:
                    sizes[manifest.source] = _size(manifest)
            self.sizes = sizes
        return swept

    @contextlib.contextmanager
    def _unless_converting(self) -> Iterator[bool]:
        """Keep conversions from beginning during the block. Yield False if one runs, or without the folder.

        A lock on each part would not be enough: a process makes its folder before it can lock it.
        """
        try:
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            yield False
            return
        try:
            is_free = True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_free = False
            yield is_free
        finally:
            os.close(descriptor)

    def _manifest(self, target: Path) -> ConversionManifest | None:
        """Return the manifest of a conversion that is complete and unchanged since; None otherwise."""
        try:
            manifest = decode_manifest((target / MANIFEST).read_bytes())
            for name, (size, changed) in manifest.files.items():
                found = (target / name).lstat()
                if (found.st_size, found.st_mtime_ns) != (size, changed):
                    log.warning("%s is not as it was made: %s has changed; it is not used", target, name)
                    return None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.warning("%s is not used: %s", target, error)
            return None
        return manifest


def _size(manifest: ConversionManifest) -> int:
    return sum(size for size, _ in manifest.files.values())
