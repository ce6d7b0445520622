"""Devices through the real NVML bindings, on a fake driver library that is compiled here."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import fake_nvml
from tests.fake_nvml import Card, Driver

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds within which a probe must answer

A = Card(uuid="GPU-aaaa1111", total=80 * GIB, used=2 * GIB, reserved=GIB, name="NVIDIA Fake A")
B = Card(uuid="GPU-bbbb2222", total=24 * GIB, used=3 * GIB, name="NVIDIA Fake B")
C = Card(uuid="GPU-bbcc3333", total=16 * GIB, used=1 * GIB, name="NVIDIA Fake C")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(library: Path, tmp_path: Path) -> Driver:
    return Driver(library, tmp_path / "cards", [A, B, C])


class Probe:
    """A process with `Devices` open; see tests/fake_nvml/probe.py."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process

    async def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line.encode() + b"\n")
        async with asyncio.timeout(PATIENCE):
            return json.loads(await self.process.stdout.readline())

    async def read(self) -> Any:
        return await self.ask("read")


@contextlib.asynccontextmanager
async def probing(driver: Driver, env: Mapping[str, str] | None = None) -> AsyncIterator[Probe]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("CUDA")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fake_nvml.probe",
        cwd=ROOT, env={**own, **driver.environment(), **(env or {})},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Probe(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_every_card_is_read_with_its_name_and_main_memory_comes_last(driver: Driver) -> None:
    async with probing(driver) as probe:
        state = await probe.read()
    assert list(state["readings"]) == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    assert state["readings"]["cuda:1"] == {"total": 24 * GIB, "used": 3 * GIB, "uuid": B.uuid}
    own_share = "the driver's own share counts neither as used nor as total"
    assert state["readings"]["cuda:0"] == {"total": 79 * GIB, "used": 2 * GIB, "uuid": A.uuid}, own_share
    assert state["names"] == ["NVIDIA Fake A", "NVIDIA Fake B", "NVIDIA Fake C", "main memory"]
    assert state["problems"] == {}
    assert (state["notes"], state["driver"]) == ([], "999.1")


async def test_an_old_driver_without_version_2_counts_its_own_share_as_used(driver: Driver) -> None:
    driver.show([A], has_v2=False)
    async with probing(driver) as probe:
        assert (await probe.read())["readings"]["cuda:0"] == {"total": 80 * GIB, "used": 3 * GIB, "uuid": A.uuid}


async def test_a_device_is_found_by_the_names_that_people_use(driver: Driver) -> None:
    async with probing(driver, {"CUDA_VISIBLE_DEVICES": "2,0"}) as probe:
        assert [await probe.ask(f"name {word}") for word in ("cuda:0", "1", "gpu0", A.uuid, "GPU-bbcc", "cpu")] == [
            "cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0", "cpu",
        ]  # fmt: skip
        refusal = await probe.ask("name cuda:2")
    assert "'cuda:2' is no device of this machine" in refusal
    assert C.uuid in refusal


async def test_a_card_in_mig_mode_is_its_instances(driver: Driver) -> None:
    halves = [Card(uuid=f"MIG-{n}", total=10 * GIB, used=n * GIB, name="NVIDIA Fake MIG 3g.10gb") for n in (1, 2)]
    driver.show([Card(uuid="GPU-cut", total=20 * GIB, instances=halves), B])
    async with probing(driver) as probe:
        state = await probe.read()
    assert [state["readings"][name]["uuid"] for name in ("cuda:0", "cuda:1", "cuda:2")] == ["MIG-1", "MIG-2", B.uuid]
    assert state["readings"]["cuda:1"]["used"] == 2 * GIB


async def test_without_a_driver_there_is_main_memory_and_a_note(driver: Driver) -> None:
    driver.show([], init=fake_nvml.DRIVER_NOT_LOADED)
    async with probing(driver) as probe:
        state = await probe.read()
    assert list(state["readings"]) == ["cpu"]
    assert "Driver Not Loaded" in state["notes"][0]


async def test_a_failing_card_keeps_its_reading_and_is_a_problem_until_it_is_back(driver: Driver) -> None:
    async with probing(driver) as probe:
        healthy = await probe.read()
        driver.show([A, Card(uuid=B.uuid, total=24 * GIB, error=fake_nvml.GPU_IS_LOST), C])
        broken = [await probe.read(), await probe.read()]
        driver.show([A, Card(uuid=B.uuid, total=24 * GIB, used=5 * GIB), C])
        again = await probe.read()
    for state in broken:
        assert state["readings"]["cuda:1"] == healthy["readings"]["cuda:1"]
        assert list(state["problems"]) == ["cuda:1"]
        assert "GPU is lost" in state["problems"]["cuda:1"]
        assert state["readings"]["cuda:2"]["used"] == GIB
    assert again["problems"] == {}
    assert again["readings"]["cuda:1"]["used"] == 5 * GIB


async def test_other_cards_keep_their_names_when_one_vanishes(driver: Driver) -> None:
    async with probing(driver) as probe:
        await probe.read()
        driver.show(
            [A, Card(uuid=B.uuid, total=24 * GIB, lookup=fake_nvml.GPU_IS_LOST, error=fake_nvml.GPU_IS_LOST), C]
        )
        await probe.read()
        state = await probe.read()
    assert list(state["problems"]) == ["cuda:1"]
    assert state["readings"]["cuda:2"] == {"total": 16 * GIB, "used": GIB, "uuid": C.uuid}


async def test_a_reloaded_driver_is_opened_again(driver: Driver) -> None:
    async with probing(driver) as probe:
        healthy = await probe.read()
        driver.show([A, B, C], boot=1, init=fake_nvml.DRIVER_NOT_LOADED)
        gone = [await probe.read(), await probe.read()]
        driver.show([C, A, B], boot=2)  # and found its cards in another order
        again = await probe.read()
    for state in gone:
        assert list(state["problems"]) == ["cuda:0", "cuda:1", "cuda:2"]
        assert state["readings"]["cuda:0"] == healthy["readings"]["cuda:0"]
    assert again["problems"] == {}
    assert again["readings"]["cuda:2"] == {"total": 16 * GIB, "used": GIB, "uuid": C.uuid}


async def test_a_card_that_is_lost_at_the_start_is_left_out_with_a_note(driver: Driver) -> None:
    driver.show([A, Card(uuid=B.uuid, total=24 * GIB, lookup=fake_nvml.GPU_IS_LOST), C])
    async with probing(driver) as probe:
        state = await probe.read()
    assert [each["uuid"] for name, each in state["readings"].items() if name != "cpu"] == [A.uuid, C.uuid]
    [note] = state["notes"]
    assert "card 1 is left out: GPU is lost" in note


async def test_a_card_with_unified_memory_has_the_reading_of_main_memory(driver: Driver) -> None:
    driver.show([Card(uuid="GPU-unified", total=0, error=fake_nvml.NOT_SUPPORTED, name="NVIDIA Fake GB10")])
    async with probing(driver) as probe:
        state = await probe.read()
    shared, host = state["readings"]["cuda:0"], state["readings"]["cpu"]
    assert (shared["total"], shared["used"]) == (host["total"], host["used"])
    assert state["pools"] == {"cuda:0": "cpu", "cpu": "cpu"}
    assert state["problems"] == {}


async def test_a_card_that_had_its_own_memory_never_counts_as_unified(driver: Driver) -> None:
    async with probing(driver) as probe:
        healthy = await probe.read()
        driver.show([A, Card(uuid=B.uuid, total=0, error=fake_nvml.NOT_SUPPORTED), C])
        state = await probe.read()
        driver.show([A, B, C])
        again = await probe.read()
    assert state["readings"]["cuda:1"] == healthy["readings"]["cuda:1"] == again["readings"]["cuda:1"]
    assert list(state["problems"]) == ["cuda:1"]
    assert state["pools"]["cuda:1"] == "cuda:1"
    assert again["problems"] == {}


async def test_a_worker_reads_its_own_memory_whatever_name_the_card_has_for_it(
    driver: Driver,
) -> None:
    async with probing(driver, {"CUDA_VISIBLE_DEVICES": f"{C.uuid},0"}) as worker:
        before = [await worker.ask("worker cuda:0"), await worker.ask("worker cuda:1")]
        await worker.ask(f"occupy {C.uuid} {3 * GIB}")
        holding = await worker.ask("worker cuda:0")
        driver.show([A, B, C], lists=False)
        in_a_container = await worker.ask("worker cuda:0")
        nowhere = await worker.ask("worker cuda:2")
    assert before == [{"used": GIB, "own": None}, {"used": 3 * GIB, "own": None}], "its own share counts as used"
    assert holding == {"used": 4 * GIB, "own": 3 * GIB}
    assert in_a_container == {"used": 4 * GIB, "own": None}
    assert nowhere == {"used": None, "own": None}


async def test_a_worker_opens_nvml_once(driver: Driver) -> None:
    async with probing(driver) as worker:
        assert (await worker.ask("worker cuda:0"))["used"] == 3 * GIB
        driver.show([A], init=fake_nvml.DRIVER_NOT_LOADED)  # opening it again would fail
        assert (await worker.ask("worker cuda:0"))["used"] == 3 * GIB


async def test_a_worker_without_a_driver_gets_no_device(driver: Driver) -> None:
    async with probing(driver) as worker:
        driver.show([A], init=fake_nvml.DRIVER_NOT_LOADED)
        assert await worker.ask("worker cuda:0") == {"used": None, "own": None}
