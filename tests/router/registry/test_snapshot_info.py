import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.config.presets import Preset
from router.memory.checkpoint_facts import Checkpoint, UnknownCheckpoint
from router.registry.snapshot_info import SnapshotInfo
from tests.router.fleet.worlds import FakeFiles

MINE = Preset(id="mine", path="/snapshots/mine")


class Unreadable(FakeFiles):
    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    async def read(self, snapshot: str, preset: Preset) -> Checkpoint:
        self.reads += 1
        raise UnknownCheckpoint("damaged")


async def test_unreadable_files_are_not_read_again_for_each_list_of_models() -> None:
    files = Unreadable()
    info = SnapshotInfo(files, cast(Any, SimpleNamespace(listed={})))
    for _ in range(3):
        assert await info.facts(MINE) is None
    assert files.reads == 1
    files.change("mine")
    assert await info.facts(MINE) is None
    assert files.reads == 2
    info.clear()
    assert await info.facts(MINE) is None
    assert files.reads == 3


class Slow(FakeFiles):
    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def read(self, snapshot: str, preset: Preset) -> Checkpoint:
        facts = self.checkpoint
        self.begun.set()
        await self.may_end.wait()
        return facts


class InFolder(FakeFiles):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def find(self, preset: Preset) -> str:
        return str(self.folder)


@pytest.mark.parametrize(
    ("stated", "shown"),
    [
        ("{{ a }}", "{{ a }}"),
        ([{"name": "tools", "template": "t"}, {"name": "default", "template": "{{ a }}"}], "{{ a }}"),
        (["default", {"name": "default", "template": "{{ a }}"}], "{{ a }}"),
        ({"default": "{{ a }}"}, ""),
        (7, ""),
    ],
)
async def test_a_template_of_any_form_is_shown_or_left_out(stated: object, shown: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stated}))
    info = SnapshotInfo(InFolder(tmp_path), cast(Any, SimpleNamespace(listed={})))
    await info.facts(MINE)
    assert (await info.texts(MINE)).chat_template == shown


async def test_files_that_were_being_read_before_a_reload_are_read_again_after_it() -> None:
    files = Slow()
    info = SnapshotInfo(files, cast(Any, SimpleNamespace(listed={})))
    reading = asyncio.create_task(info.facts(MINE))
    await files.begun.wait()
    info.clear()
    files.checkpoint = new = Checkpoint(model_type="new")
    files.may_end.set()
    assert await reading is not new
    assert await info.facts(MINE) is new
