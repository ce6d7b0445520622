"""Disk reservations: the missing bytes of running downloads are counted, and those of dead processes are not."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from worker.fetch.disk_reservation import PARTIAL, reserved

ALIVE = """
import sys
from pathlib import Path
from worker.fetch.disk_reservation import reserved
with reserved(Path(sys.argv[1]), {Path(sys.argv[2]): 100}, lambda need, awaited: None):
    print("reserved", flush=True)
    sys.stdin.read()
"""


def missing(folder: Path, coming: Mapping[Path, int]) -> tuple[int, int]:
    """Return the bytes that a download of `coming` needs, and the bytes that other downloads have reserved."""
    counts = []
    with reserved(folder, coming, lambda need, awaited: counts.append((need, awaited))):
        return counts[0]


def test_missing_bytes_of_another_download_are_counted(tmp_path: Path) -> None:
    room, mine, other = tmp_path / "room", tmp_path / "mine", tmp_path / "other"
    with reserved(room, {other: 100}, lambda need, awaited: None):
        assert missing(room, {mine: 30}) == (30, 100)
        other.with_name(other.name + PARTIAL).write_bytes(bytes(60))
        assert missing(room, {mine: 30}) == (30, 40)
        other.write_bytes(bytes(90))
        assert missing(room, {mine: 30}) == (30, 40), "a file of the wrong size is fetched again"
        other.with_name(other.name + PARTIAL).unlink()
        other.write_bytes(bytes(100))
        assert missing(room, {mine: 30}) == (30, 0)
    assert missing(room, {mine: 30}) == (30, 0)
    assert not list(room.rglob("claim-*")), "no reservation is left"


def test_present_bytes_of_a_file_are_not_counted(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.with_name(mine.name + PARTIAL).write_bytes(bytes(12))
    assert missing(tmp_path / "room", {mine: 30}) == (18, 0)


def test_a_file_of_two_downloads_is_counted_once(tmp_path: Path) -> None:
    room, both, one = tmp_path / "room", tmp_path / "both", tmp_path / "one"
    with reserved(room, {both: 100, one: 10}, lambda need, awaited: None):
        assert missing(room, {both: 100}) == (100, 10)


def test_a_rejected_download_reserves_nothing(tmp_path: Path) -> None:
    def refuse(need: int, awaited: int) -> None:
        raise ValueError(need)

    room = tmp_path / "room"
    with pytest.raises(ValueError, match="50"), reserved(room, {tmp_path / "large": 50}, refuse):
        raise AssertionError
    assert missing(room, {tmp_path / "mine": 30}) == (30, 0)


def test_a_killed_download_reserves_nothing(tmp_path: Path) -> None:
    room = tmp_path / "room"
    other = subprocess.Popen(
        [sys.executable, "-c", ALIVE, str(room), str(tmp_path / "other")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert other.stdin is not None
    assert other.stdout is not None
    with other.stdin, other.stdout:
        assert other.stdout.readline() == "reserved\n"
        assert missing(room, {tmp_path / "mine": 30}) == (30, 100)
        other.kill()
        other.wait(30)
    assert len(list(room.rglob("claim-*"))) == 1, "its reservation file still exists"
    assert missing(room, {tmp_path / "mine": 30}) == (30, 0)
    assert not list(room.rglob("claim-*")), "no reservation is left"


def test_a_cache_without_write_permission_needs_no_reservation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder belongs to another user of the shared cache."""

    def refuse(*given: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setattr(Path, "mkdir", lambda self, **options: None if self == room else refuse())
    assert missing(room, {tmp_path / "mine": 30}) == (30, 0)


def test_deleting_the_reservations_does_not_fail_a_download(tmp_path: Path) -> None:
    room = tmp_path / "room"
    with reserved(room, {tmp_path / "mine": 30}, lambda need, awaited: None):
        shutil.rmtree(room / ".locks")
    assert missing(room, {tmp_path / "mine": 30}) == (30, 0)


def test_a_stopped_process_with_the_lock_delays_others_only_briefly(tmp_path: Path) -> None:
    room, counts = tmp_path / "room", list[tuple[int, int]]()
    with reserved(room, {tmp_path / "other": 100}, lambda need, awaited: None):
        turn = os.open(room, os.O_RDONLY)
        try:
            fcntl.flock(turn, fcntl.LOCK_EX)
            coming = {tmp_path / "mine": 30}
            with reserved(room, coming, lambda *found: counts.append(found), lock_timeout=0.05):
                assert counts == [(30, 100)], "earlier reservations are counted"
                assert len(list(room.rglob("claim-*"))) == 2
        finally:
            os.close(turn)
    assert not list(room.rglob("claim-*")), "no reservation is left"
