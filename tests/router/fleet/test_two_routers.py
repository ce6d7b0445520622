"""Routers that share a host: each has an accelerator of its own, and main memory belongs to all."""

import asyncio
import random

import pytest

from router.config.settings import Settings
from tests.fakes import CPU, GIB, GPU0, FakeLauncher, FakeModel
from tests.router.fleet.worlds import Schedule


class Half(FakeLauncher):
    """The machine as one of two routers sees it: what the other's workers have of main memory is foreign here."""

    other: "Half | None" = None

    def _memory_changed(self) -> None:
        super()._memory_changed()
        ours = self.used(CPU) - self.foreign[CPU]
        if self.other is not None and self.other.foreign[CPU] != ours:
            self.other.set_foreign(CPU, ours)


def routers(host: int, *models: dict[str, int]) -> list[Schedule]:
    """Two of them with these models, of 6 GiB on their accelerator and so many of `host` bytes of main memory; a model
    leaves after five seconds without a request."""
    halves = [
        Half({GPU0: 8 * GIB, CPU: host}, {name: FakeModel(shards=(6 * GIB,), host=size) for name, size in own.items()})
        for own in models
    ]
    for half, other in zip(halves, reversed(halves), strict=True):
        half.other = other
    return [
        Schedule(
            dict.fromkeys(own, 6 * GIB), margin=GIB, launcher=half, settings=Settings(swap_patience=1.0),
            keys={name: {"required_memory": {"": 6 * GIB, "cpu": size}, "ttl": 5.0} for name, size in own.items()},
        )
        for half, own in zip(halves, models, strict=True)
    ]  # fmt: skip


async def test_memory_of_another_router_is_waited_for_without_an_eviction() -> None:
    ours, theirs = routers(20 * GIB, {"small": GIB, "large": 12 * GIB}, {"theirs": 12 * GIB})
    await theirs.ask("theirs")
    left = theirs.now + 5.0
    using = asyncio.create_task(ours.ask("small"))
    await asyncio.sleep(2.5)
    asking = asyncio.create_task(ours.ask("large"))
    await using
    await asyncio.sleep(1.9)
    assert ours.journal == ["start small"], "its eviction would free too little: the other router has the main memory"
    await asking
    assert theirs.journal == ["start theirs", "stop theirs"]
    assert ours.journal[-1] == "start large"
    assert ours.now - 1.0 == pytest.approx(left + 0.5 + 0.5 + 2.0, abs=0.2), "once both are gone"


async def test_two_routers_never_take_the_memory_of_each_other() -> None:
    """Main memory has room for one worker of each; with what leaves still there, for no more."""
    pair = routers(12 * GIB, {"a": 5 * GIB, "b": 5 * GIB}, {"a": 5 * GIB, "b": 5 * GIB})
    dice = random.Random(6)

    async def client(world: Schedule) -> None:
        for _ in range(12):
            await world.ask(dice.choice("ab"), dice.uniform(0.1, 2.0))
            await asyncio.sleep(dice.uniform(0.0, 7.0))

    await asyncio.gather(*(client(world) for world in pair for _ in range(3)))
    for world in pair:
        assert world.journal.count("start a") > 3
        assert world.fleet.scheduler.breaches[CPU] == 0, "the margin was kept by both together"
        await world.stop()


async def test_foreign_memory_is_not_mistaken_for_mapped_files() -> None:
    """Workers measure mapped files, which the driver counts as available. They are not subtracted from its figure."""
    sizes = {"a": 32 * GIB, "b": 30 * GIB}
    models = {name: FakeModel(shards=(size,), mapped=size - GIB) for name, size in sizes.items()}
    world = Schedule(sizes, totals={CPU: 64 * GIB}, margin=GIB, models=models)
    world.launcher.set_foreign(CPU, 20 * GIB)
    await world.ask("a")
    await asyncio.sleep(60)
    world.fleet.scheduler.plan_now()
    assert [(device.used, device.foreign) for device in world.fleet.scheduler.devices] == [(21 * GIB, 20 * GIB)]
    await world.ask("b")
    assert world.journal == ["start a", "stop a", "start b"], "there is no room for both beside the others"


async def test_memory_freed_by_another_router_prevents_an_eviction() -> None:
    world = Schedule(dict.fromkeys("ab", 6 * GIB), totals={CPU: 16 * GIB}, settings=Settings(swap_patience=0.0))
    await world.ask("a")
    world.launcher.set_foreign(CPU, 6 * GIB)
    await asyncio.sleep(60)
    world.launcher.reading_lag = 1000.0
    world.launcher.set_foreign(CPU, 0)
    await world.ask("b")
    assert world.journal == ["start a", "start b"]
