"""Which model of the fleet serves each preset that is listed: those that would start the same worker have one.

The fleet knows no more of them than its own models, each a member: its id is made of the names that it serves
(`a,b`), and is a preset's own where it serves one. When presets change, members go on as long as somebody wants the
worker that they have, under the names that do. Law: as in the fleet, no method awaits between reading a state and
writing what follows from it, those aside that only wait.
"""

import asyncio
import contextlib
import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.config.presets import Preset, same_load
from router.errors import ApiError, ModelNotFound
from router.fleet.admission import Lease
from router.fleet.fleet import Fleet
from router.fleet.model import Model
from router.fleet.sleeping_weights import SleepingWeights
from router.fleet.worker import State, Worker
from router.registry import sharing
from router.registry.profiles import Profiles
from router.registry.sharing import Group
from worker.protocol.argv import Profile


@dataclass(frozen=True, slots=True)
class Listed:
    """A preset by its name, and what serves it."""

    preset: Preset
    model: Model
    """Of the fleet."""
    names: Group
    """All that share it, this one among them."""
    created: int
    """When it was first listed, in whole seconds of wall-clock time."""
    profile: Profile | None
    """What a worker must know before it answers by this name; None: nothing."""

    @property
    def id(self) -> str:
        return self.preset.id

    @property
    def others(self) -> Group:
        return tuple(name for name in self.names if name != self.preset.id)


class Members:
    """The presets of one router, and what they share."""

    def __init__(self, fleet: Fleet, presets: Mapping[str, Preset]):
        """`fleet` was made with the `sharing.members` of these."""
        self.fleet = fleet
        self.listed: dict[str, Listed] = {}
        """By id, in their order."""
        self._profiles = Profiles()
        self._list(presets, sharing.share(presets))

    def find(self, name: str) -> Listed:
        """Raises ModelNotFound."""
        try:
            return self.listed[name]
        except KeyError:
            raise ModelNotFound(f"model '{name}' not found") from None

    def names_of(self, id: str) -> Group:
        """The names that an event is about whose `model` is `id`: of what is no member any more, those that are not
        listed either, as all others are served by somebody else."""
        if id in self.fleet.models:
            return sharing.names_in(id)
        return tuple(name for name in sharing.names_in(id) if name not in self.listed)

    # What is asked for by a name

    def lease(self, name: str, *, autoload: bool | None = None) -> Lease:
        """See `Fleet.lease`; `autoload` as the name's preset says, unless told."""
        listed = self.find(name)
        id = listed.model.preset.id
        try:
            return self.fleet.lease(id, autoload=listed.preset.autoload if autoload is None else autoload)
        except ApiError as error:
            raise by_name(error, id, name) from None

    async def prepare(self, worker: Worker, name: str) -> Profile | None:
        """Returns once a worker that is ready may answer by this name: under which profile. Raises LoadFailed,
        WorkerCrashed, ModelNotFound."""
        profile = self.find(name).profile
        if profile is not None:
            await self._profiles.tell(worker, profile)
        return profile

    async def wanted(self, name: str) -> None:
        """Returns once it is loaded; what was begun goes on if the caller leaves. Raises what a load raises."""
        listed = self.find(name)
        worker = listed.model.open
        if worker is None or worker.state is not State.READY:
            with speaking_of(listed):
                await asyncio.shield(self.fleet.wanted(listed.model.preset.id))
            worker = listed.model.open
        if worker is not None and worker.state is State.READY:
            await self.prepare(worker, name)

    async def load_queued(self, name: str) -> None:
        """See `Fleet.load_queued`."""
        listed = self.find(name)
        with speaking_of(listed):
            await self.fleet.load_queued(listed.model.preset.id)

    def unload(self, name: str, *, force: bool = False) -> list[Worker | SleepingWeights]:
        """See `Fleet.unload`: what is unloaded is the worker, and whoever else uses it has to load it again."""
        listed = self.find(name)
        with speaking_of(listed):
            return self.fleet.unload(listed.model.preset.id, force=force)

    async def preview(self, name: str) -> dict[str, Any]:
        """See `Fleet.preview`."""
        listed = self.find(name)
        id = listed.model.preset.id
        with speaking_of(listed):
            found = await self.fleet.preview(id)
        said = found.get("message", "")
        return {**found, "message": said.replace(id, name)} if said else found

    def turnover(self, name: str) -> float:
        """See `Fleet.turnover`."""
        return self.fleet.turnover(self.find(name).model.preset.id)

    # What is listed

    def apply(self, presets: Mapping[str, Preset], groups: Sequence[Group]) -> dict[str, list[str]]:
        """Take over new presets, of which each group shares a worker. Workers that nobody wants any more retire, all
        others go on. Returns ids by what became of them."""
        before, open_before = self.listed, {name: each.model.open for name, each in self.listed.items()}
        wanted = sharing.members(presets, groups)
        self._hand_on(presets, wanted)
        fleet = self.fleet
        for id in [id for id in fleet.models if id not in wanted]:
            fleet.remove(id, "config_changed")
        self._take_over(wanted)
        self._list(presets, groups)
        both = [name for name in presets if name in before]
        retired = [name for name in both if (worker := open_before[name]) is not None and worker.retired.is_set()]
        result = {
            "added": [name for name in presets if name not in before],
            "changed": [name for name in both if presets[name] != before[name].preset],
            "restarted": retired,
            "removed": [name for name in before if name not in presets],
        }
        for name in result["removed"]:
            if any(other in presets for other in before[name].others):  # else its own end says so
                fleet.events.append("removed", name)
        for name in both:
            if presets[name].pin and open_before[name] is not None and self.listed[name].model.open is None:
                with contextlib.suppress(ApiError):  # it is loaded by its next request
                    fleet.wanted(self.listed[name].model.preset.id)
        fleet.events.append("config", "*", **result)
        fleet.changed()
        return result

    def settle(self, presets: Mapping[str, Preset], groups: Sequence[Group]) -> None:
        """As `apply`, where one is new or says something else that no worker has to be loaded for."""
        wanted = sharing.members(presets, groups)
        self._hand_on(presets, wanted)
        self._take_over(wanted)
        self._list(presets, groups)

    def remove(self, name: str, reason: str, presets: Mapping[str, Preset], groups: Sequence[Group]) -> list[Worker]:
        """List one no longer, and these; its workers, which drain and stop if nobody shares them."""
        listed = self.find(name)
        workers = [] if listed.others else self.fleet.remove(name, reason)
        self.settle(presets, groups)
        if listed.others:
            self.fleet.events.append("removed", name)
        return workers

    def _take_over(self, wanted: Mapping[str, Preset]) -> None:
        for id, preset in wanted.items():
            if id in self.fleet.models:
                self.fleet.change(preset)
            else:
                self.fleet.add(preset)

    def _list(self, presets: Mapping[str, Preset], groups: Sequence[Group]) -> None:
        now, before = int(time.time()), self.listed
        of = {name: group for group in groups for name in group}
        self.listed = {}
        for name, preset in presets.items():
            group = of[name]
            own = sharing.profile(preset) or (Profile(name=name) if len(group) > 1 else None)
            created = before[name].created if name in before else now
            self.listed[name] = Listed(preset, self.fleet.models[sharing.id_of(group)], group, created, own)

    def _hand_on(self, presets: Mapping[str, Preset], wanted: Mapping[str, Preset]) -> None:
        """Give members the ids under which the worker that they have is wanted: those that run choose first, and stay
        with the names of which the fewest have changed. One whose id another takes is struck off."""
        models = self.fleet.models
        free = {name: id for id in wanted for name in sharing.names_in(id)}
        heirs: dict[str, Model] = {}
        for model in sorted(models.values(), key=lambda model: not model.workers):
            mine: dict[str, int] = {}
            for name in sharing.names_in(model.preset.id):
                id = free.get(name)
                if id is not None and id not in heirs and same_load(replace(wanted[id], id=""), _bare(model)):
                    mine[id] = mine.get(id, 0) + (presets[name] == self.listed[name].preset)
            if mine:
                heirs[max(mine, key=lambda id: mine[id])] = model
        moving = {id: model for id, model in heirs.items() if model.preset.id != id}
        for model in moving.values():
            del models[model.preset.id]
        for id in [id for id in moving if id in models]:
            self.fleet.remove(id, "config_changed")
        for id, model in moving.items():
            _rename(model, id)
            models[id] = model


def _bare(model: Model) -> Preset:
    return replace(model.preset, id="")


def _rename(model: Model, id: str) -> None:
    """What it has is called so from now on; its process is not told."""
    model.preset = replace(model.preset, id=id)
    for worker in model.workers:
        worker.preset = model.preset
    if model.sleeping is not None:
        model.sleeping.preset = model.preset


@contextlib.contextmanager
def speaking_of(listed: Listed) -> Iterator[None]:
    """Errors in the block say the name that was asked for, and no other that shares its worker."""
    id = listed.model.preset.id
    try:
        yield
    except ApiError as error:
        raise by_name(error, id, listed.id) from None


def by_name(error: ApiError, id: str, name: str) -> ApiError:
    """The error, which speaks of member `id`, in the words of somebody who knows it by `name`."""
    if id == name or sharing.BETWEEN not in id or id not in error.message:
        return error
    other = copy.copy(error)  # others, who know it by another name, may be told the same one
    other.message = error.message.replace(id, name)
    other.args = (other.message,)
    return other


__all__ = ["Listed", "Members", "by_name", "speaking_of"]
