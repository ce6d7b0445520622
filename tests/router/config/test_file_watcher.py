"""The file watcher, with real files."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from router.config import file_watcher

DEADLINE = 60.0
NEVER = 3600.0


def watching(
    paths: list[Path], calls: "Calls", *, quiet: float = 0.02, interval: float = 0.1
) -> contextlib.AbstractAsyncContextManager[None]:
    return file_watcher.watching(paths, calls, quiet=quiet, interval=interval)


class Calls:
    """A callback that counts its calls."""

    def __init__(self) -> None:
        self.times = 0
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self.times += 1
        self._event.set()

    async def once_more(self) -> None:
        async with asyncio.timeout(DEADLINE):
            await self._event.wait()
        self._event.clear()


def put(path: Path, text: str) -> None:
    path.write_text(text)


def put_below(path: Path, text: str) -> None:
    """Write a file and create its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, text)


@pytest.fixture
async def calls() -> Calls:
    return Calls()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.ini"
    path.write_text("[a]\n")
    return path


async def test_a_write_to_a_file_is_reported_by_its_event(file: Path, calls: Calls) -> None:
    async with watching([file], calls, interval=NEVER), asyncio.timeout(DEADLINE):
        number = 1
        while not calls.times:  # the first writes may come before the folder is watched
            number += 1
            put(file, "[a]\n" * number)
            await asyncio.sleep(0.1)


async def test_a_file_replaced_by_rename_is_reported(file: Path, calls: Calls) -> None:
    """As editors save. Twice, because the second file is not the one that was registered at the start."""
    async with watching([file], calls):
        for text in ("[b]\n", "[c]\n"):
            (file.parent / "new").write_text(text)
            os.replace(file.parent / "new", file)
            await calls.once_more()


async def test_a_switched_link_on_the_way_is_reported_and_so_are_changes_of_its_new_target(
    tmp_path: Path, calls: Calls
) -> None:
    """As Kubernetes mounts configurations: a link to a link to a file, and only the link in the middle is switched."""
    for version in ("one", "two"):
        put_below(tmp_path / "releases" / version / "models.ini", f"[{version}]\n")
    (tmp_path / "releases" / "current").symlink_to("one")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "models.ini").symlink_to("../releases/current/models.ini")
    async with watching([tmp_path / "etc" / "models.ini"], calls):
        (tmp_path / "next").symlink_to("two")
        os.replace(tmp_path / "next", tmp_path / "releases" / "current")
        await calls.once_more()
        put(tmp_path / "releases" / "two" / "models.ini", "[three]\n")
        await calls.once_more()


async def test_a_link_to_a_missing_file_and_a_cycle_of_links_are_watched(file: Path, calls: Calls) -> None:
    os.makedirs(file.parent / "there" / "and")
    async with watching([file], calls):
        os.unlink(file)
        os.symlink("there/and/nowhere.ini", file)
        await calls.once_more()
        put(file.parent / "there" / "and" / "nowhere.ini", "[a]\n")
        await calls.once_more()
        (file.parent / "ring").symlink_to("models.ini")
        os.replace(file.parent / "ring", file)
        await calls.once_more()
        os.unlink(file)
        put(file, "[b]\n")
        await calls.once_more()


def test_a_link_that_cannot_be_followed_hides_no_other_entry(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / f"far-{name}").symlink_to("x" * 300)
    assert [name for name, *_ in file_watcher._entries(tmp_path)] == ["a", "b", "c", "far-a", "far-b", "far-c"]


async def test_a_file_that_becomes_readable_is_reported(file: Path, calls: Calls) -> None:
    os.chmod(file, 0)
    async with watching([file], calls):
        os.chmod(file, 0o644)
        await calls.once_more()


async def test_continuous_writes_to_another_file_delay_nothing(file: Path, calls: Calls) -> None:
    async def write() -> None:
        while True:
            put(file.parent / "log", "x")
            await asyncio.sleep(0)

    writing = asyncio.create_task(write())
    async with watching([file], calls, quiet=0.1):
        put(file, "[b]\n")
        await calls.once_more()
    writing.cancel()


@pytest.mark.parametrize("name", ["qwen", "org/qwen"])
async def test_a_model_that_is_copied_file_by_file_is_reported_when_complete(
    name: str, tmp_path: Path, calls: Calls
) -> None:
    """The first file of a copy is reported before the copy is complete."""
    model, size = tmp_path / name, 1 << 20
    async with watching([tmp_path], calls):
        put_below(model / "config.json", "{}")
        await calls.once_more()
        with (model / "model.safetensors").open("wb") as file:
            await calls.once_more()
            file.write(bytes(size))
        await calls.once_more()
        assert (model / "model.safetensors").stat().st_size == size


async def test_changes_in_quick_succession_are_reported_once(file: Path, calls: Calls) -> None:
    async with watching([file], calls, quiet=0.05):
        for number in range(20):
            (file.parent / f"log{number}").write_text("x")
            put(file, "[a]\n" * number)
        await calls.once_more()
        (file.parent / "beside").write_text("x")
        (file.parent / "log1").unlink()
        os.unlink(file)
        await calls.once_more()
        assert calls.times == 2


async def test_changes_of_another_file_are_not_reported(file: Path, calls: Calls) -> None:
    beside, later = file.parent / "beside", Calls()
    async with watching([file], calls), watching([beside], later, quiet=0.3):
        put(beside, "x")
        await later.once_more()  # the first watcher has compared by now
        assert calls.times == 0


async def test_a_folder_that_appears_later_is_reported_and_no_descriptor_stays_open(
    tmp_path: Path, calls: Calls
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    gone = tmp_path / "gone"
    async with watching([gone / "models.ini"], calls):  # it does not exist yet: no error, no call
        assert calls.times == 0
        put_below(gone / "models.ini", "[a]\n")
        await calls.once_more()
    async with asyncio.timeout(DEADLINE):
        # A thread of the library closes them, some time later and without an event.
        while len(os.listdir("/proc/self/fd")) > descriptors:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def looks(states: Sequence[tuple[int, float] | None]) -> int:
    """How often a file with these successive sizes and ages is read until it counts as written."""
    left = list(states)
    await file_watcher.until_written(Path("models.ini"), look=lambda path: left.pop(0), quiet=0.01)
    return len(states) - len(left)


async def test_a_file_counts_as_written_when_its_last_change_is_old(caplog: pytest.LogCaptureFixture) -> None:
    assert await looks([(20, 3600), (0, 0)]) == 1, "no wait for a file that was edited before the signal"
    assert await looks([(9, 0), (20, 0.001), (20, 0.01), (0, 0)]) == 3
    assert await looks([None, (20, 0)]) == 1, "the reload reports a file that is missing"
    assert await looks([(20, -60), (0, 0)]) == 1, "another clock set the time of the file"
    assert not caplog.records


async def test_an_emptied_file_is_waited_for_and_counts_only_if_it_stays_empty(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert await looks([(0, 0), (0, 1), (9, 0), (20, 1), (0, 0)]) == 4
    assert [record.message.split(";")[0] for record in caplog.records] == ["models.ini is empty"]
    assert await looks([(0, 0), (0, 4), (0, 5), (20, 0)]) == 3


async def test_the_age_of_a_file_is_read_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "models.ini"
    path.touch()
    os.utime(path, (0, 0))
    async with asyncio.timeout(DEADLINE):
        await file_watcher.until_written(path)
        path.write_text("[a]\n")
        await file_watcher.until_written(path, quiet=0.01)
        path.unlink()
        await file_watcher.until_written(path)
