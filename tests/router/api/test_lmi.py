"""Calls of LMI's management that meet others at the same time."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.api import lmi, lmi_adapters
from router.config.presets import Preset
from router.errors import LoadFailed
from router.registry.overrides import RegisteredAdapter
from worker.protocol.argv import AdapterSource


async def test_a_registration_that_fails_leaves_a_later_one_of_the_same_name() -> None:
    sections: dict[str, str] = {}
    loading, failed = asyncio.Event(), asyncio.Event()

    async def add(name: str, *, section: str) -> None:
        sections[name] = section

    async def load(_: str) -> None:
        loading.set()
        await failed.wait()
        raise LoadFailed("m was unloaded")

    model = SimpleNamespace(no_replica_before=0.0)
    registry: Any = SimpleNamespace(
        add=add,
        remove=lambda name, _: sections.pop(name),
        overrides=SimpleNamespace(sections=sections),
        shared_workers=SimpleNamespace(find=lambda _: SimpleNamespace(model=model), load=load),
    )
    call = SimpleNamespace(registry=registry, query={"url": "org/m"})
    first = asyncio.create_task(cast(Any, lmi.register)(call))
    await loading.wait()
    registry.remove("m", "requested")
    sections["m"] = "of another call"
    failed.set()
    with pytest.raises(LoadFailed):
        await first
    assert sections == {"m": "of another call"}


async def test_an_adapter_that_is_pinned_while_an_update_downloads_stays_pinned(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    before = AdapterSource(name="x", path=str(tmp_path))
    adapters = {"x": RegisteredAdapter("org/old", before)}
    begun, downloaded = asyncio.Event(), asyncio.Event()

    async def download(*_: object) -> None:
        begun.set()
        await downloaded.wait()

    registry: Any = SimpleNamespace(
        shared_workers=SimpleNamespace(
            find=lambda _: SimpleNamespace(preset=Preset(id="m", adapters=(before,), enable_lora="on"))
        ),
        overrides=SimpleNamespace(adapters={"m": adapters}),
        check_adapter=lambda *_: None,
        set_adapter=lambda _, name, registered: adapters.update({name: registered}),
        files=SimpleNamespace(missing_adapters=lambda _: ["one"], adapters=lambda _: [before]),
        launcher=SimpleNamespace(download=download),
    )

    def update(**query: str) -> asyncio.Task[Any]:
        call = SimpleNamespace(registry=registry, query=query, path={"adapter": "x"}, model_id=lambda: "m")
        return asyncio.create_task(cast(Any, lmi_adapters.update)(call))

    moving = update(src="org/new", preload="false")
    await begun.wait()
    adapters["x"] = RegisteredAdapter("org/old", AdapterSource(name="x", path=str(tmp_path), pinned=True))
    downloaded.set()
    await moving
    assert (adapters["x"].src, adapters["x"].source.pinned) == ("org/new", True)
