"""Shared workers: presets that would start the same worker are served by one model of the fleet.

The fleet has only its own models. The id of a fleet model is the list of the presets that it serves (`a,b`), or the
preset's own id if it serves one. When presets change, a worker keeps running as long as some preset still needs the
same load; only its id changes.

As in the fleet, no method awaits between reading a state and writing what follows from it.
"""

import asyncio
import contextlib
import copy
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from router.config.effective import args, section
from router.config.presets import Preset, same_load
from router.errors import ApiError, LoadFailed, ModelNotFound, WorkerCrashed
from router.fleet.admission import Lease
from router.fleet.fleet import Fleet
from router.fleet.model import Model
from router.fleet.sleeping_weights import SleepingWeights
from router.fleet.worker import State, Worker
from router.launch.worker_client import WorkerClientError
from router.registry.worker_groups import (
    ID_SEPARATOR,
    PresetGroup,
    fleet_presets,
    group_id,
    group_presets,
    preset_ids,
    request_profile,
)
from router.store.snapshots import Snapshots
from worker.protocol.argv import Profile
from worker.protocol.routes import ADAPTERS_PATH, PROFILES_PATH, TOKEN_HEADER


@dataclass(frozen=True)
class ListedModel:
    """One entry of the list of models: a preset and the fleet model that serves it."""

    preset: Preset
    model: Model  # of the fleet
    names: PresetGroup  # ids of all presets that share the worker, this one included
    created: int  # seconds since 1970 at which it was first listed
    profile: Profile | None  # settings that the worker needs for requests by this name; None: no settings

    @property
    def id(self) -> str:
        return self.preset.id

    @property
    def others(self) -> PresetGroup:
        return tuple(name for name in self.names if name != self.preset.id)

    @cached_property  # the page reads those of all models once a second, which takes 0.2 ms for each
    def shown_settings(self) -> dict[str, Any]:
        """The members `args` and `preset` of its status for admins."""
        return {"args": args(self.preset), "preset": section(self.preset)}


class SharedWorkers:
    """The listed models of one router, and the operations of the fleet by their names."""

    def __init__(self, fleet: Fleet, presets: Mapping[str, Preset]):
        """`fleet` must have been created with `fleet_presets` of the same presets."""
        self.fleet = fleet
        self.listed: dict[str, ListedModel] = {}  # by preset id, in the order of the presets
        self._sent_profiles: WeakKeyDictionary[Worker, dict[str, Profile]] = WeakKeyDictionary()
        self._list(presets, group_presets(presets))

    def find(self, name: str) -> ListedModel:
        """The model with this id, or with this alias: a reload may make an alias of the id that a request waits for.

        Raises ModelNotFound.
        """
        listed = self.listed.get(name)
        if listed is None:
            listed = next((other for other in self.listed.values() if name in other.preset.aliases), None)
        if listed is None:
            raise ModelNotFound(f"model '{name}' not found")
        return listed

    def names_of(self, id: str) -> PresetGroup:
        """The preset ids that an event of fleet model `id` is about.

        If the fleet model is gone, only ids that are no longer listed count: another model serves the others by now.
        """
        if id in self.fleet.models:
            return preset_ids(id)
        return tuple(name for name in preset_ids(id) if name not in self.listed)

    # Operations by preset id

    def lease(self, name: str, *, autoload: bool | None = None) -> Lease:
        """See `Fleet.lease`. Without `autoload` the preset decides."""
        listed = self.find(name)
        id = listed.model.preset.id
        try:
            return self.fleet.lease(id, autoload=listed.preset.autoload if autoload is None else autoload)
        except ApiError as error:
            raise with_name(error, id, name) from None

    async def prepare(self, worker: Worker, name: str) -> Profile | None:
        """Send the profile of `name` to a ready worker, if it does not have it, and return the profile.

        Raises LoadFailed if the worker cannot use it, WorkerCrashed, ModelNotFound.
        """
        profile = self.find(name).profile
        if profile is not None:
            await self._send_profile(worker, profile)
        return profile

    async def load(self, name: str) -> None:
        """Load a model and wait until it is ready. A load that has begun goes on if the caller is cancelled.

        Raises what a load raises.
        """
        listed = self.find(name)
        worker = listed.model.open
        if worker is None or worker.state is not State.READY:
            with errors_with_name(listed):
                await asyncio.shield(self.fleet.ensure_loaded(listed.model.preset.id))
            worker = listed.model.open
        if worker is not None and worker.state is State.READY:
            await self.prepare(worker, name)

    async def load_queued(self, name: str) -> None:
        """See `Fleet.load_queued`."""
        listed = self.find(name)
        with errors_with_name(listed):
            await self.fleet.load_queued(listed.model.preset.id)

    def unload(self, name: str, *, force: bool = False) -> list[Worker | SleepingWeights]:
        """See `Fleet.unload`. Other presets that share the worker are unloaded as well."""
        listed = self.find(name)
        with errors_with_name(listed):
            return self.fleet.unload(listed.model.preset.id, force=force)

    async def preview(self, name: str) -> dict[str, Any]:
        """See `FleetScheduler.preview`."""
        listed = self.find(name)
        id = listed.model.preset.id
        with errors_with_name(listed):
            found = await self.fleet.scheduler.preview(id)
        message = found.get("message", "")
        return {**found, "message": message.replace(id, name)} if message else found

    def turnover(self, name: str) -> float:
        """See `AdmissionQueue.turnover`."""
        return self.fleet.queue.turnover(self.find(name).model)

    # Changes of the list

    def apply(self, presets: Mapping[str, Preset], groups: Sequence[PresetGroup]) -> dict[str, list[str]]:
        """Replace all presets, and return the ids that were added, changed, restarted and removed.

        Each group shares a worker. Workers that no preset needs any more retire; all others keep running.
        """
        before, open_before = self.listed, {name: listed.model.open for name, listed in self.listed.items()}
        self.update(presets, groups)
        self.send_adapters_again(self.fleet.models.values())
        fleet = self.fleet
        both = [name for name in presets if name in before]
        retired = [name for name in both if (worker := open_before[name]) is not None and worker.retired]
        result = {
            "added": [name for name in presets if name not in before],
            "changed": [name for name in both if presets[name] != before[name].preset],
            "restarted": retired,
            "removed": [name for name in before if name not in presets],
        }
        for name in result["removed"]:
            # The fleet emits `removed` only when a whole group is removed.
            if any(other in presets for other in before[name].others):
                fleet.events.append("removed", name)
        for name in both:
            # A pinned model that had a worker is loaded again at once.
            if presets[name].pin and open_before[name] is not None and self.listed[name].model.open is None:
                with contextlib.suppress(ApiError):  # its next request loads it
                    fleet.ensure_loaded(self.listed[name].model.preset.id)
        fleet.events.append("config", "*", **result)
        return result

    def send_adapters_again(self, models: Iterable[Model]) -> None:
        """Before their next request, the workers read those files of their adapters that have changed."""
        for model in models:
            for worker in model.all_open:
                worker.adapters.sent = None

    def update(self, presets: Mapping[str, Preset], groups: Sequence[PresetGroup]) -> None:
        """Like `apply`, for one new preset or for changes that need no restart. Emits no `config` event."""
        wanted = fleet_presets(presets, groups)
        self._reassign_ids(presets, wanted)
        self.fleet.models.apply(wanted)
        self._list(presets, groups)

    def remove(
        self, name: str, reason: str, presets: Mapping[str, Preset], groups: Sequence[PresetGroup]
    ) -> list[Worker]:
        """Remove one model from the list, whose new content is `presets`.

        Returns its workers, which drain and stop; none if other presets share them.
        """
        listed = self.find(name)
        workers = [] if listed.others else self.fleet.models.remove(name, reason)
        self.update(presets, groups)
        if listed.others:
            self.fleet.events.append("removed", name)
        return workers

    def _list(self, presets: Mapping[str, Preset], groups: Sequence[PresetGroup]) -> None:
        now, before = int(time.time()), self.listed
        group_of = {name: group for group in groups for name in group}
        self.listed = {}
        for name, preset in presets.items():
            group = group_of[name]
            # In a group each name needs a profile, even an empty one: it undoes the settings of the other names.
            profile = request_profile(preset) or (Profile(name=name) if len(group) > 1 else None)
            created = before[name].created if name in before else now
            self.listed[name] = ListedModel(preset, self.fleet.models[group_id(group)], group, created, profile)

    def _reassign_ids(self, presets: Mapping[str, Preset], wanted: Mapping[str, Preset]) -> None:
        """Give each fleet model the group id under which its worker is still wanted.

        Models with workers choose first. Among several possible groups a model takes the one with the most unchanged
        presets. A model whose id goes to another one is removed.
        """
        models = self.fleet.models
        id_of = {name: id for id in wanted for name in preset_ids(id)}
        new_models: dict[str, Model] = {}
        for model in sorted(models.values(), key=lambda model: not model.workers):
            unchanged: dict[str, int] = {}  # by possible group id: presets of the model that stay as they are
            for name in preset_ids(model.preset.id):
                id = id_of.get(name)
                if (
                    id is not None
                    and id not in new_models
                    and same_load(replace(wanted[id], id=""), replace(model.preset, id=""))
                ):
                    unchanged[id] = unchanged.get(id, 0) + (presets[name] == self.listed[name].preset)
            if unchanged:
                new_models[max(unchanged, key=lambda id: unchanged[id])] = model
        moving = {id: model for id, model in new_models.items() if model.preset.id != id}
        # Remove all old ids before setting new ones: two models may exchange their ids.
        for model in moving.values():
            del models[model.preset.id]
        for id in [id for id in moving if id in models]:
            self.fleet.models.remove(id, "config_changed")
        for id, model in moving.items():
            _rename(model, id)
            models[id] = model

    async def _send_profile(self, worker: Worker, profile: Profile) -> None:
        if (sent := self._sent_profiles.setdefault(worker, {})).get(profile.name) == profile:
            return
        async with worker.adapters.lock:
            if sent.get(profile.name) == profile:  # another request sent it meanwhile
                return
            status, body = await _put(worker, PROFILES_PATH, asdict(profile))
            if status != 200:
                raise LoadFailed(f"{profile.name} cannot be used: {_error_message(body)}; change its preset")
            sent[profile.name] = profile


def _rename(model: Model, id: str) -> None:
    """Change the id of a fleet model in all router objects. Its process keeps the name it was started with."""
    model.preset = replace(model.preset, id=id)
    for worker in model.workers:
        worker.preset = model.preset
    if model.sleeping is not None:
        model.sleeping.preset = model.preset


# Errors with the name that the client used


@contextlib.contextmanager
def errors_with_name(listed: ListedModel) -> Iterator[None]:
    """Errors of the fleet in this block contain the preset's own id in place of its group's id."""
    id = listed.model.preset.id
    try:
        yield
    except ApiError as error:
        raise with_name(error, id, listed.id) from None


def with_name(error: ApiError, id: str, name: str) -> ApiError:
    """A copy of the error with `name` in place of the group id `id`; the error itself if it does not contain the id."""
    if id == name or ID_SEPARATOR not in id or id not in error.message:
        return error
    renamed = copy.copy(error)  # requests by other names of the group may get the same error object
    renamed.message = error.message.replace(id, name)
    renamed.args = (renamed.message,)
    return renamed


# Settings that a running worker receives


async def send_adapters(worker: Worker, files: Snapshots) -> dict[str, str]:
    """Send the LoRA adapters of its preset to a ready worker, and return the problems by adapter name.

    Returns at once if the worker has them. A worker starts with the adapters of its model; the sender of a change and
    each later request call this function, so that a request never reaches a worker with an older list. Raises
    WorkerCrashed.
    """
    if worker.adapters.sent == (worker.preset.adapters, worker.preset.default_lora) or not worker.preset.adapter_slots:
        return {}
    async with worker.adapters.lock:
        preset = worker.preset
        wanted = preset.adapters, preset.default_lora
        if worker.adapters.sent == wanted:
            return {}
        body = {"adapters": [asdict(adapter) for adapter in files.adapters(preset)], "default": preset.default_lora}
        status, reply = await _put(worker, ADAPTERS_PATH, body)
        try:
            if status != 200:
                raise ValueError(reply)
            problems = {str(name): str(problem) for name, problem in reply["problems"].items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise _not_sent(worker, "adapters", error) from None
        worker.adapters.sent = wanted
        return problems


async def _put(worker: Worker, path: str, body: Any) -> tuple[int, Any]:
    """Send a PUT to a ready worker and return (status, JSON). Raises WorkerCrashed."""
    process = worker.process
    assert process is not None, "the worker is ready"
    headers = {TOKEN_HEADER: f"Bearer {process.token}", "Content-Type": "application/json"}
    exchange = process.worker_client.begin("PUT", path, headers, json.dumps(body).encode())
    try:
        reply = await exchange.whole()
        return exchange.status, json.loads(reply)
    except (WorkerClientError, ValueError) as error:
        raise _not_sent(worker, path.rpartition("/")[2], error) from None
    finally:
        exchange.close()


def _not_sent(worker: Worker, what: str, error: Exception) -> WorkerCrashed:
    return WorkerCrashed(f"{worker.preset.id}: its worker did not accept its {what} ({str(error)[:200]}); try again")


def _error_message(body: Any) -> str:
    try:
        return str(body["error"]["message"])
    except (KeyError, TypeError):
        return "its worker gave no reason"
