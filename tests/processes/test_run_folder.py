"""The runtime folder: one router at a time, private, and usable for sockets."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.launch.process_table import RunFolder, RunFolderError


@contextmanager
def opened(path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(path)
    folder.open()
    try:
        yield folder
    finally:
        folder.close()


def test_sockets_of_an_earlier_router_are_removed(tmp_path: Path) -> None:
    for name in ("0123456789ab.sock", "notes.txt"):
        (tmp_path / name).touch()
    with opened(tmp_path):
        assert sorted(file.name for file in tmp_path.iterdir()) == ["lock", "notes.txt"]


def test_a_second_router_on_the_folder_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.socket("0123456789ab").touch()
        with pytest.raises(RunFolderError) as refused:
            RunFolder(tmp_path).open()
        assert folder.socket("0123456789ab").exists()
    assert str(refused.value) == (
        f"another router (process {os.getpid()}) uses the runtime folder {tmp_path};"
        " stop it, or give this one a --runtime-dir of its own"
    )
    with opened(tmp_path):
        pass


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
            os.kill(child, 0)  # it lives
    finally:
        os.kill(child, 9)


def test_the_folder_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = tmp_path / "new" / "run"
        for _ in range(2):
            with opened(path):
                assert stat.S_IMODE(path.stat().st_mode) == 0o700
                assert stat.S_IMODE((path / "lock").stat().st_mode) == 0o600
            path.chmod(0o755)
    finally:
        os.umask(before)


def test_a_path_too_long_for_sockets_is_refused_at_once(tmp_path: Path) -> None:
    short = tmp_path / ("x" * (107 - len(os.fsencode(tmp_path)) - len("//0123456789ab.sock")))
    with opened(short) as folder:
        assert len(os.fsencode(folder.socket(folder.tag("m", "m#1")))) == 107
    with pytest.raises(RunFolderError, match="1 bytes too long"):
        RunFolder(short.with_name(short.name + "x")).open()


def test_a_folder_that_cannot_be_created_is_an_error_for_people(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="give another --runtime-dir"):
        RunFolder(tmp_path / "file" / "run").open()


def test_a_deleted_folder_is_created_again_for_the_next_process(tmp_path: Path) -> None:
    """Services that clean /tmp delete what is old, and a router lives for months."""
    path = tmp_path / "run"
    with opened(path) as folder:
        shutil.rmtree(path)
        folder.restore()
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        with pytest.raises(RunFolderError, match="another router"):
            RunFolder(path).open()
