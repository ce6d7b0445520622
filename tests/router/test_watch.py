"""Told of changes by the kernel: real files, no waiting but for the word."""

import asyncio
import os
from pathlib import Path

import pytest

from router.watch import Watch

DEADLINE = 10.0


class Told:
    """How often something was told."""

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
    """With the folders that it stands in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, text)


@pytest.fixture
async def told() -> Told:
    return Told()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.ini"
    path.write_text("[a]\n")
    return path


async def test_a_file_that_is_written_is_told(file: Path, told: Told) -> None:
    with Watch([file], told, quiet=0.02):
        put(file, "[a]\nmodel = demo:a\n")
        await told.once_more()
        put(file, "[b]\n")
        await told.once_more()


async def test_a_file_that_another_one_takes_the_place_of_is_told(file: Path, told: Told) -> None:
    """As editors save, and twice: the second one is another file than the one that was there at first."""
    with Watch([file], told, quiet=0.02):
        for text in ("[b]\n", "[c]\n"):
            (file.parent / "new").write_text(text)
            os.replace(file.parent / "new", file)
            await told.once_more()


async def test_a_link_that_is_turned_to_another_file_is_told(tmp_path: Path, told: Told) -> None:
    """As configurations are mounted: the file is a link through a folder that is a link itself."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "models.ini").write_text(f"[{version}]\n")
    (tmp_path / "current").symlink_to("one")
    (tmp_path / "models.ini").symlink_to("current/models.ini")
    with Watch([tmp_path / "models.ini"], told, quiet=0.02):
        (tmp_path / "next").symlink_to("two")
        os.replace(tmp_path / "next", tmp_path / "current")
        await told.once_more()


async def test_whatever_link_on_the_way_is_turned_is_told_and_so_is_what_becomes_of_its_new_end(
    tmp_path: Path, told: Told
) -> None:
    """As releases are deployed: of a link, a link, and a file only the one in the middle is turned."""
    for version in ("one", "two"):
        put_below(tmp_path / "releases" / version / "models.ini", f"[{version}]\n")
    (tmp_path / "releases" / "current").symlink_to("one")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "models.ini").symlink_to("../releases/current/models.ini")
    with Watch([tmp_path / "etc" / "models.ini"], told, quiet=0.02):
        (tmp_path / "next").symlink_to("two")
        os.replace(tmp_path / "next", tmp_path / "releases" / "current")
        await told.once_more()
        put(tmp_path / "releases" / "two" / "models.ini", "[three]\n")
        await told.once_more()


async def test_what_a_link_leads_to_is_told_when_it_comes_and_a_ring_of_links_harms_nobody(
    file: Path, told: Told
) -> None:
    os.makedirs(file.parent / "there" / "and")
    with Watch([file], told, quiet=0.02):
        os.unlink(file)
        os.symlink("there/and/nowhere.ini", file)
        await told.once_more()
        put(file.parent / "there" / "and" / "nowhere.ini", "[a]\n")
        await told.once_more()
        (file.parent / "ring").symlink_to("models.ini")
        os.replace(file.parent / "ring", file)
        await told.once_more()
        os.unlink(file)
        put(file, "[b]\n")
        await told.once_more()


async def test_a_folder_that_another_one_takes_the_place_of_is_told_and_watched(tmp_path: Path, told: Told) -> None:
    file = tmp_path / "config" / "models.ini"
    put_below(file, "[a]\n")
    with Watch([file], told, quiet=0.02):
        os.rename(file.parent, tmp_path / "old")
        await told.once_more()
        put_below(tmp_path / "new" / "models.ini", "[b]\n")
        os.rename(tmp_path / "new", file.parent)
        await told.once_more()
        put(file, "[c]\n")
        await told.once_more()


async def test_a_file_that_may_be_read_at_last_is_told(file: Path, told: Told) -> None:
    os.chmod(file, 0)
    with Watch([file], told, quiet=0.02):
        os.chmod(file, 0o644)
        await told.once_more()


async def test_who_writes_beside_it_without_a_pause_holds_up_nobody(file: Path, told: Told) -> None:
    async def write() -> None:
        while True:
            put(file.parent / "log", "x")
            await asyncio.sleep(0)

    writing = asyncio.create_task(write())
    with Watch([file], told, quiet=0.1):
        put(file, "[b]\n")
        await told.once_more()
    writing.cancel()


async def test_a_folder_with_another_model_in_it_is_told(tmp_path: Path, told: Told) -> None:
    with Watch([tmp_path], told, quiet=0.02):
        (tmp_path / "qwen").mkdir()
        await told.once_more()


@pytest.mark.parametrize("name", ["qwen", "org/qwen"])
async def test_a_model_that_comes_file_by_file_is_told_when_its_last_one_is_there(
    name: str, tmp_path: Path, told: Told
) -> None:
    """A copy takes its time: what it began with has been told long before, and was no model yet."""
    model, size = tmp_path / name, 1 << 20
    with Watch([tmp_path], told, quiet=0.02):
        put_below(model / "config.json", "{}")
        await told.once_more()
        with (model / "model.safetensors").open("wb") as file:
            await told.once_more()
            file.write(bytes(size))
        await told.once_more()
        assert (model / "model.safetensors").stat().st_size == size


async def test_what_changes_beside_it_and_comes_together_is_told_once(file: Path, told: Told) -> None:
    with Watch([file], told, quiet=0.05):
        for number in range(20):
            (file.parent / f"log{number}").write_text("x")
            put(file, "[a]\n" * number)
        await told.once_more()
        (file.parent / "beside").write_text("x")
        (file.parent / "log1").unlink()
        os.unlink(file)
        await told.once_more()
        assert told.times == 2


async def test_what_changes_beside_it_is_no_news(file: Path, told: Told) -> None:
    beside, later = file.parent / "beside", Told()
    with Watch([file], told, quiet=0.02), Watch([beside], later, quiet=0.3):
        put(beside, "x")
        await later.once_more()  # by now the other one has looked, too
        assert told.times == 0


async def test_a_folder_that_is_not_there_is_no_news_until_it_comes_and_leaves_nothing_open(
    tmp_path: Path, told: Told
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    gone = tmp_path / "gone"
    gone.mkdir()
    watch = Watch([gone / "models.ini"], told, quiet=0.02)
    gone.rmdir()
    with watch:  # nothing there yet: no error, no news
        assert told.times == 0
        put_below(gone / "models.ini", "[a]\n")
        await told.once_more()
    assert len(os.listdir("/proc/self/fd")) == descriptors
