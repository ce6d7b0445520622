"""Changes of presets that share a worker: which preset keeps the running worker. In virtual time."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from router.config.presets import Preset
from router.errors import LoadBackoff, ModelNotFound, ModelNotLoaded
from router.registry import worker_groups
from router.registry.shared_workers import SharedWorkers, with_name
from tests.fakes import GIB, FakeModel
from tests.router.fleet.worlds import Schedule

BASE = Preset(id="", path="/snapshots/m", required_memory={"": GIB}, replica_idle=1.0)
NAMES = ("a", "b", "c", "a,b", "b,a", "a,b,c", "b,c")


def preset(name: str, **keys: Any) -> Preset:
    return replace(BASE, id=name, **keys)


class World:
    """A fleet of presets of one model, each under its name."""

    def __init__(self, **presets: Mapping[str, Any]):
        self.presets = {name: preset(name, **keys) for name, keys in presets.items()}
        fleet = worker_groups.fleet_presets(self.presets, worker_groups.group_presets(self.presets))
        self.schedule = Schedule({}, models={name: FakeModel(shards=(GIB,)) for name in NAMES})
        self.fleet = self.schedule.fleet
        for each in fleet.values():
            self.fleet.models.add(each)
        self.shared_workers = SharedWorkers(self.fleet, self.presets)

    def reload(self, **presets: Mapping[str, Any]) -> dict[str, list[str]]:
        now = {name: preset(name, **keys) for name, keys in presets.items()}
        return self.shared_workers.apply(now, worker_groups.group_presets(now))

    async def ask(self, name: str) -> int:
        """The number of the worker that answers."""
        with self.shared_workers.lease(name) as lease:
            await lease.ready()
            return lease.worker.id

    @property
    def shared(self) -> list[str]:
        """Ids of all members; events carry them."""
        assert {each.model.preset.id for each in self.shared_workers.listed.values()} == self.fleet.models.keys()
        assert all(
            name in worker_groups.preset_ids(each.model.preset.id) for name, each in self.shared_workers.listed.items()
        )
        assert all(model.preset.id == id for id, model in self.fleet.models.items())
        return list(self.fleet.models)

    def removed(self) -> list[str]:
        return [event.model for event in self.schedule.events_of("removed")]


async def test_the_settings_of_a_model_are_written_once_for_all_status_reports() -> None:
    """The page reads the status of all models once a second."""
    world = World(a={"ctx_size": 64}, b={})
    shown = world.shared_workers.find("a").shown_settings
    assert shown["args"][:4] == ["--model", "/snapshots/m", "--ctx-size", "64"]
    assert shown["preset"].startswith("[a]\nmodel = /snapshots/m\n")
    assert world.shared_workers.find("a").shown_settings is shown
    world.reload(a={"ctx_size": 65}, b={})
    assert world.shared_workers.find("a").shown_settings["args"][3] == "65"


WARM: dict[str, Any] = {"sampling": {"temp": 0.9}}


async def test_of_two_names_that_differ_by_a_new_ttl_the_unchanged_one_keeps_the_worker() -> None:
    world = World(a={}, b=WARM)
    first = await world.ask("a")
    assert world.reload(a={"ttl": 5.0}, b=WARM) == {"added": [], "changed": ["a"], "restarted": [], "removed": []}
    assert await world.ask("b") == first
    assert await world.ask("a") != first
    assert sorted(world.shared) == ["a", "b"]


async def test_presets_that_become_equal_share_the_running_worker() -> None:
    world = World(a={"ctx_size": 64}, b=WARM)
    one, two = await world.ask("a"), await world.ask("b")
    assert world.reload(a={}, b=WARM)["restarted"] == ["a"]
    assert one != two
    assert [await world.ask(name) for name in "ab"] == [two, two]
    assert world.shared == ["a,b"]
    assert world.removed() == [], "both names are still listed"
    await asyncio.sleep(5.0)
    assert [worker.id for worker in world.fleet.workers()] == [two]
    assert world.shared_workers.names_of("a") == (), "events of the old worker concern none of them"


async def test_names_with_the_same_change_restart_once() -> None:
    world = World(a={}, b=WARM)
    first = await world.ask("a")
    result = world.reload(a={"ctx_size": 64}, b={"ctx_size": 64, **WARM})
    assert (result["changed"], result["restarted"]) == (["a", "b"], ["a", "b"])
    again = await world.ask("b")
    assert again != first
    assert await world.ask("a") == again


async def test_a_pinned_name_that_loses_its_worker_is_loaded_at_once() -> None:
    world = World(a={"pin": True}, b={"pin": True})
    first = await world.ask("b")
    world.reload(a={"pin": True, "ctx_size": 64}, b={"pin": True})
    await asyncio.sleep(5.0)
    assert sorted(worker.preset.id for worker in world.fleet.workers()) == ["a", "b"]
    assert await world.ask("b") == first


async def test_removing_one_name_keeps_the_worker_and_removing_both_ends_it() -> None:
    world = World(a={}, b=WARM)
    first = await world.ask("a")
    assert world.reload(b=WARM)["removed"] == ["a"]
    assert (world.removed(), await world.ask("b")) == (["a"], first)
    with pytest.raises(ModelNotFound):
        world.shared_workers.lease("a")
    assert world.reload()["removed"] == ["b"]
    await asyncio.sleep(5.0)
    assert (world.removed(), world.fleet.workers()) == (["a", "b"], [])


async def test_names_in_another_order_are_the_same_worker() -> None:
    world = World(a={}, b=WARM)
    first = await world.ask("a")
    assert world.reload(b=WARM, a={}) == {"added": [], "changed": [], "restarted": [], "removed": []}
    assert world.shared == ["b,a"]
    assert await world.ask("a") == first


async def test_errors_of_shared_workers_contain_the_requested_name() -> None:
    world = World(a={"autoload": False}, b={"autoload": False})
    for name in "ab":
        with pytest.raises(ModelNotLoaded, match=f"^model '{name}' is not loaded"):
            world.shared_workers.lease(name)
    error = LoadBackoff("a,b failed: a,b: it ended", retry_after=7)
    other = with_name(error, "a,b", "b")
    assert (other.message, other.retry_after, other.reason) == ("b failed: b: it ended", 7, "load_backoff")
    assert error.message == "a,b failed: a,b: it ended", "all get the same error"
    assert with_name(LoadBackoff("a failed"), "a", "a").message == "a failed"


async def test_a_renamed_preset_keeps_running_requests_of_the_old_name() -> None:
    world = World(a={})
    first = await world.ask("a")
    with world.shared_workers.lease("a") as running:
        await running.ready()
        assert world.reload(b={}) == {"added": ["b"], "changed": [], "restarted": [], "removed": ["a"]}
        with pytest.raises(ModelNotFound):
            world.shared_workers.lease("a")
        assert await world.ask("b") != first
        await asyncio.sleep(5)
        assert running.aborted is None
        assert world.removed() == []
    await asyncio.sleep(5)
    assert world.removed() == ["a"]
    assert world.shared == ["b"]
