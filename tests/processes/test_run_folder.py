"""Who was spawned is on disk: the next router on this folder finds and kills it, and nobody else."""

import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.launch.process_table import RunFolder, RunFolderError, start_time


@contextmanager
def survivor() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that heeds nothing, in a group of its own."""
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def opened(path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(path)
    folder.open()
    try:
        yield folder
    finally:
        folder.close()


def left_by_another_router(path: Path, pid: int) -> Path:
    """The folder after a router that put process `pid` on record and then ended without a word; the record's file."""
    with opened(path) as folder:
        folder.write("0123456789ab", pid, "m#1")
        folder.socket("0123456789ab").touch()
    return path / "0123456789ab.json"


def test_a_survivor_is_killed_and_its_traces_are_removed(tmp_path: Path) -> None:
    with survivor() as process:
        left_by_another_router(tmp_path, process.pid)
        folder = RunFolder(tmp_path)
        assert [(record.pid, record.worker) for record in folder.open()] == [(process.pid, "m#1")]
        assert process.wait() == -9
        assert [file.name for file in tmp_path.iterdir()] == ["lock"]
        folder.close()


@pytest.mark.parametrize("changed", [{"start_time": 1}, {"boot_id": "another boot"}])
def test_another_process_of_the_same_number_is_spared(tmp_path: Path, changed: dict[str, object]) -> None:
    with survivor() as process:
        record = left_by_another_router(tmp_path, process.pid)
        record.write_text(json.dumps(json.loads(record.read_text()) | changed))
        with opened(tmp_path):
            assert process.poll() is None
            assert not record.exists()


def test_a_damaged_record_harms_nothing(tmp_path: Path) -> None:
    with survivor() as process:
        left_by_another_router(tmp_path, process.pid).write_text('{"pid": ')
        with opened(tmp_path) as folder:
            assert process.poll() is None
            assert list(folder.path.glob("*.json")) == []


def test_a_second_router_on_the_folder_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(RunFolderError) as refused:
        RunFolder(tmp_path).open()
    assert str(refused.value) == (
        f"another router (process {os.getpid()}) uses the runtime folder {tmp_path};"
        " stop it, or give this one a --runtime-dir of its own"
    )
    with opened(tmp_path):
        pass


def test_a_rejected_router_kills_no_process(tmp_path: Path) -> None:
    with survivor() as process, opened(tmp_path) as folder:
        folder.write("0123456789ab", process.pid, "m#1")
        with pytest.raises(RunFolderError):
            RunFolder(tmp_path).open()
        assert process.poll() is None


def test_the_lock_ends_with_its_router_and_is_not_inherited(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys; from pathlib import Path; from router.launch.process_table import RunFolder\n"
        "RunFolder(Path(sys.argv[1])).open()\n"
        "child = subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL, close_fds=False)\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    env = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PATH": os.environ["PATH"]}
    died = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)], env=env, stdout=subprocess.PIPE, check=False
    )
    child = int(died.stdout)
    try:
        with opened(tmp_path):
            assert start_time(child) is not None
    finally:
        os.kill(child, 9)


def test_the_folder_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = tmp_path / "new" / "run"
        left_by_another_router(path, os.getpid())
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (path, *path.glob("*.json"), path / "lock")}
        assert modes == {"run": 0o700, "0123456789ab.json": 0o600, "lock": 0o600}
        path.chmod(0o755)
        (path / "0123456789ab.json").unlink()
        with opened(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_a_path_too_long_for_sockets_is_refused_at_once(tmp_path: Path) -> None:
    short = tmp_path / ("x" * (107 - len(os.fsencode(tmp_path)) - len("//0123456789ab.sock")))
    with opened(short) as folder:
        assert len(os.fsencode(folder.socket(folder.tag("m", "m#1")))) == 107
    with pytest.raises(RunFolderError, match="1 bytes too long"):
        RunFolder(short.with_name(short.name + "x")).open()


def test_a_folder_that_cannot_be_made_is_an_error_for_a_person(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="give another --runtime-dir"):
        RunFolder(tmp_path / "file" / "run").open()


def test_no_tag_is_given_twice_even_by_another_router(tmp_path: Path) -> None:
    tags = {folder.tag("m", "m#1") for folder in (RunFolder(tmp_path), RunFolder(tmp_path)) for _ in range(100)}
    assert len(tags) == 200


def test_a_record_that_the_disk_has_no_room_for_leaves_nothing(tmp_path: Path) -> None:
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path) as folder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, most))  # so much of a file can be written, and no more
        try:
            with pytest.raises(OSError, match="too large"):
                folder.write(folder.tag("m", "m#1"), os.getpid(), "m#1")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
        assert [file.name for file in tmp_path.iterdir()] == ["lock"]


def test_a_folder_that_was_deleted_is_made_anew_for_the_next_process(tmp_path: Path) -> None:
    """Services that clean /tmp delete what is old, and a router lives for months."""
    path = tmp_path / "run"
    with opened(path) as folder:
        shutil.rmtree(path)
        tag = folder.tag("m", "m#1")
        folder.write(tag, os.getpid(), "m#1")
        assert sorted(file.name for file in path.iterdir()) == [f"{tag}.json", "lock"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        with pytest.raises(RunFolderError, match="another router"):
            RunFolder(path).open()


def test_what_is_removed_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        tag = folder.tag("m", "m#1")
        folder.write(tag, os.getpid(), "m#1")
        folder.socket(tag).touch()
        folder.remove(tag)
        folder.remove(tag)
        assert [file.name for file in tmp_path.iterdir()] == ["lock"]
