import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from router.api import ollama
from router.api.call import FrameStream
from router.config.presets import Preset
from router.config.resolve import LoadedPresets
from router.errors import ModelNotFound
from router.fleet.worker import State
from router.registry.auth import NO_KEY
from router.registry.pulls import HubModels, presets_using_files
from router.store.catalogue import AddedModels
from tests.processes.upstreams import unasked, world
from worker.protocol.argv import AdapterSource

WORKER: Any = SimpleNamespace(id=1, state=State.DOWNLOADING, leases=())


class Hub(HubModels):
    """A hub that lists its files once `listed` is set."""

    listed: asyncio.Event

    async def _fetch(self, text: str, *, followed: bool = False) -> Any:
        self._followers[WORKER.id] = int(followed)
        await self.listed.wait()
        return WORKER


def hub_and_retired() -> tuple[Hub, list[Any]]:
    retired: list[Any] = []

    def unknown(*_: object) -> None:
        raise ModelNotFound("unknown")

    registry: Any = SimpleNamespace(
        model=unknown, fleet=SimpleNamespace(retire=lambda worker, reason, drain: retired.append(worker))
    )
    hub = Hub(registry)
    hub.listed = asyncio.Event()
    return hub, retired


async def test_a_preset_needs_its_draft_model_its_adapters_and_its_own_files(tmp_path: Path) -> None:
    cached = Preset(id="org/small", source="cache", repo="org/small")
    folder = f"{tmp_path}/models--org--small/snapshots/c0"
    presets = [
        Preset(id="same", repo="org/small"),
        Preset(id="folder", path=folder),
        Preset(id="tokenizer", path="/models/a", tokenizer=folder),
        Preset(id="draft", path="/models/a", model_draft="hub:org/small:v2"),
        Preset(id="draft folder", path="/models/a", model_draft=folder),
        Preset(id="adapter", path="/models/a", adapters=(AdapterSource(name="x", path="hub:org/small:main"),)),
        Preset(id="none", path="/models/a", model_draft="hub:org/smaller:main"),
    ]
    registry: Any = SimpleNamespace(
        settings=SimpleNamespace(hub_cache=str(tmp_path)),
        shared_workers=SimpleNamespace(listed={preset.id: SimpleNamespace(preset=preset) for preset in presets}),
        files=SimpleNamespace(find=lambda preset: preset.path or None),
    )
    found = await presets_using_files(registry, cached)
    assert found == ["same", "folder", "tokenizer", "draft", "draft folder", "adapter"]


async def test_a_pull_whose_client_disconnects_before_the_first_line_ends_its_download() -> None:
    hub, retired = hub_and_retired()
    hub.listed.set()

    async def body() -> dict[str, str]:
        return {"model": "org/name"}

    call: Any = SimpleNamespace(hub=hub, body=body, registry=hub.registry, key=NO_KEY)
    stream = await ollama.pull(call)
    assert isinstance(stream, FrameStream)
    await stream.frames.aclose()  # type: ignore[attr-defined]
    assert retired == [WORKER]


async def test_a_pull_that_is_cancelled_before_the_hub_has_listed_the_files_downloads_nothing() -> None:
    hub, retired = hub_and_retired()
    pull = asyncio.create_task(hub.pull(NO_KEY, "org/name"))
    await asyncio.sleep(0)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    hub.listed.set()
    await asyncio.gather(*hub._tasks)
    await asyncio.sleep(0)
    assert retired == [WORKER]


async def test_two_pulls_of_one_new_model_at_once_follow_one_download(tmp_path: Path) -> None:
    def load(added: AddedModels) -> LoadedPresets:
        found = {model.id: Preset(id=model.id, source="cache", repo=model.repo) for model in added.found}
        return LoadedPresets({**up.registry.file_presets, **found})

    async with world(tmp_path, unasked) as up:
        up.registry.load = load
        up.registry.files.missing.add("org/name")  # type: ignore[attr-defined]
        up.launcher.hold("download org/name")
        hub = HubModels(up.registry)
        first, second = await asyncio.gather(*(hub.pull(NO_KEY, "org/name") for _ in range(2)))
        assert first is not None
        assert first is second
        assert up.launcher.journal == ["download org/name"]


@pytest.mark.parametrize("leaves", ["the first", "the second"])
async def test_a_pull_that_waits_for_the_hub_ends_with_the_last_of_two_calls(tmp_path: Path, leaves: str) -> None:
    def load(added: AddedModels) -> LoadedPresets:
        found = {model.id: Preset(id=model.id, source="cache", repo=model.repo) for model in added.found}
        return LoadedPresets({**up.registry.file_presets, **found})

    async with world(tmp_path, unasked) as up:
        up.registry.load = load
        up.registry.files.missing.add("org/name")  # type: ignore[attr-defined]
        up.launcher.hold("list org/name")
        up.launcher.hold("download org/name")
        hub = HubModels(up.registry)
        first = asyncio.create_task(hub.pull(NO_KEY, "org/name"))
        async for event in up.registry.events.follow(0):
            if event.model == "org/name" and event.data.get("state") == "downloading":
                break
        worker = await hub.pull(NO_KEY, "org/name")
        assert worker is not None
        following = hub.following(worker)
        following.__enter__()
        if leaves == "the first":
            first.cancel()
            await asyncio.wait({first})
            up.launcher.release("list org/name")
            await asyncio.gather(*hub._tasks)
            await asyncio.sleep(0)
            assert not worker.retired
            following.__exit__(None, None, None)
        else:
            following.__exit__(None, None, None)
            assert not worker.retired
            up.launcher.release("list org/name")
            with hub.following(await first):
                assert not worker.retired
        assert worker.retired
