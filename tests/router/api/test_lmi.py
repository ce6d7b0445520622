import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.api import lmi
from router.errors import LoadFailed


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
