"""A machine whose accelerator has no memory of its own: 120 GiB for everything, an embedder, a middle and a large
model, of which the last two exclude each other."""

import asyncio

import pytest

from router.errors import DoesNotFit
from router.planner.ledger import HOST
from tests.fakes import CPU, GIB, GPU0, FakeLauncher, FakeModel
from tests.router.fleet.worlds import Schedule, virtual

SIZES = {"embedder": 6 * GIB, "middle": 37 * GIB, "large": 81 * GIB}
SECONDS = {"embedder": 1.0, "middle": 6.0, "large": 14.0}


class Machine(Schedule):
    """One pool of 120 GiB under two names, 1 GiB margin. Each worker's process takes `beside` bytes of it as well."""

    def __init__(self, *, sizes: dict[str, int] | None = None, beside: int = GIB) -> None:
        sizes = sizes or SIZES
        models = {
            name: FakeModel(shards=(size,), host=beside, load_seconds=SECONDS.get(name, 1.0))
            for name, size in sizes.items()
        }
        launcher = FakeLauncher({CPU: 120 * GIB, GPU0: 120 * GIB}, models, pools={GPU0: CPU})
        keys = {name: {"required_memory": {"": size, "cpu": beside}} for name, size in sizes.items()}
        super().__init__(sizes, margin=GIB, keys=keys, launcher=launcher)

    @property
    def loads(self) -> list[str]:
        return [entry.removeprefix("start ") for entry in self.journal if entry.startswith("start")]

    async def stop(self) -> None:
        await super().stop()
        assert self.launcher.used(CPU) == 0


@virtual
async def test_shards_and_processes_are_charged_to_the_one_memory() -> None:
    world = Machine()
    await world.ask("middle")
    [worker] = world.fleet.workers()
    assert worker.place == (GPU0,)
    assert {id: size for id, size in worker.reserved.items() if id.index >= HOST} == {CPU: 38 * GIB}
    world.fleet.scheduler.plan_now()
    assert [(device.used, device.foreign) for device in world.fleet.scheduler.devices] == [(38 * GIB, 0)] * 2


@virtual
async def test_agents_that_go_back_and_forth_do_not_thrash() -> None:
    """Ten clients, each in a loop over all three models. A minimum residency serves many requests between two swaps."""
    world = Machine()

    async def agent(number: int) -> None:
        await asyncio.sleep(number * 0.3)
        for _ in range(20):
            for model in ("embedder", "middle", "large"):
                await world.ask(model, 0.5)

    await asyncio.gather(*(agent(number) for number in range(10)))
    requests, swaps = 600, world.journal.count("stop middle") + world.journal.count("stop large")
    assert swaps <= requests / 10
    assert world.loads.count("embedder") == 1


@virtual
async def test_a_model_that_fits_only_without_its_process_is_refused() -> None:
    """119 GiB of weights and 1 GiB of margin leave nothing for the process."""
    world = Machine(sizes={"giant": 119 * GIB})
    with pytest.raises(DoesNotFit, match="121"):
        await world.ask("giant")
    assert world.journal == []
