"""The planner's answers carried out under a virtual clock: a fleet without processes, and clients that never give up.

A hot model is in use from the moment it is ready until it is retired, and wanted again at once. A cold one is asked
for now and then. Nobody's request takes longer than `longest`, no load longer than `load`, and stopping `stop`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

from router.planner.ledger import Bytes, Device, DeviceId, Resident
from router.planner.planner import plan
from router.planner.types import Demand, Plan, Policy

PATIENCE, TURN, LONGEST, LOAD, STOP = 10.0, 10.0, 20.0, 6.0, 1.0


@dataclass(frozen=True)
class Model:
    name: str
    shards: tuple[int, ...]
    devices: frozenset[DeviceId]
    host: int = 0
    hot: bool = False
    exclusive: bool = False
    is_exact: bool = True
    fickle: bool = False
    """Its clients leave while it loads."""


@dataclass(frozen=True)
class Served:
    """Seconds that one demand waited from its arrival until it was ready, and the bound of this wait."""

    model: str
    seconds: float
    bound: float


@dataclass
class Simulation:
    """A fleet from `now` on; `totals` are bytes by device, all for our workers."""

    totals: Bytes
    models: Sequence[Model]
    random: Random
    now: float = 0.0
    waiting: dict[int, Demand] = field(default_factory=dict)
    residents: dict[int, Resident] = field(default_factory=dict)
    served: list[Served] = field(default_factory=list)
    evictions: int = 0
    _bounds: dict[int, tuple[float, float]] = field(default_factory=dict)
    _models: dict[int, Model] = field(default_factory=dict)
    _timers: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _ids: "count[int]" = field(default_factory=lambda: count(1))

    def run(self, until: float) -> None:
        """Returns once it is `until`; AssertionError if memory is exceeded or somebody waits for nothing."""
        for model in self.models:
            self.at(0.0 if model.hot else self.random.uniform(0, until / 2), partial(self.ask, model))
        while self._timers and self._timers[0][0] <= until:
            self.now, _, action = heappop(self._timers)
            action()
            if not self._timers or self._timers[0][0] > self.now:
                self.arrange()
        assert self._timers or not self.waiting, "somebody waits for ever"

    def at(self, moment: float, action: Callable[[], None]) -> None:
        heappush(self._timers, (moment, next(self._ids), action))

    def terms(self, id: int) -> tuple[float, float]:
        """When a demand joined the queue, and for how many seconds at most it may wait until it is ready."""
        return self._bounds[id]

    # What clients do

    def ask(self, model: Model) -> None:
        """A request: a lease on the open worker, or a new life behind those queued."""
        open_ = [id for id, one in self.residents.items() if one.model == model.name and not one.leaving]
        if open_:
            self.use(open_[0], model)
        elif not any(one.model == model.name for one in self.waiting.values()):
            id = next(self._ids)
            starting = sum(one.starting for one in self.residents.values())
            k = 1 + len(self.waiting) + starting
            bound = PATIENCE + k * (LONGEST + LOAD + STOP) + (k - 1) * TURN
            self._bounds[id] = self.now, bound
            self._models[id] = model
            self.waiting[id] = Demand(
                id=id, model=model.name, shards=model.shards, host=model.host, since=self.now, devices=model.devices,
                is_exact=model.is_exact, exclusive=model.exclusive, load_seconds=LOAD,
            )  # fmt: skip

    def use(self, id: int, model: Model) -> None:
        if not self.residents[id].busy:
            self.residents[id] = replace(self.residents[id], busy=True)
            if not model.hot and not self.residents[id].starting:
                self.at(self.now + self.random.uniform(0, LONGEST), partial(self.rest, id))

    def rest(self, id: int) -> None:
        one = self.residents.get(id)
        if one is not None and not one.leaving:
            self.residents[id] = replace(one, busy=False, last_used=self.now)
            self.at(self.now + self.random.choice([0.1, 1.0, 30.0]), partial(self.ask, self._models[id]))

    # What the fleet does

    def arrange(self) -> None:
        devices = [Device(id=id, total=total, used=self.used(id), foreign=0) for id, total in self.totals.items()]
        waiting, residents = list(self.waiting.values()), list(self.residents.values())
        answer = plan(waiting, residents, devices, self.now, Policy(patience=PATIENCE))
        self.carry_out(answer)
        assert all(self.used(id) <= total for id, total in self.totals.items()), "more than there is"
        if answer.look_again is not None:
            assert answer.look_again > self.now
            self.at(answer.look_again, lambda: None)

    def used(self, id: DeviceId) -> int:
        return sum(one.reserved.get(id, 0) for one in self.residents.values())

    def carry_out(self, answer: Plan) -> None:
        assert not answer.refuse
        assert not answer.drop
        for id in answer.refine:
            self.at(self.now, partial(self.refined, id))
        for id, eviction in answer.evict.items():
            self.evictions += 1
            self.residents[id] = replace(self.residents[id], leaving=True, leaving_since=self.now)
            drain = 0.0 if eviction.idle else self.random.uniform(0, LONGEST)
            self.at(self.now + drain + STOP, partial(self.stopped, id))
        for id, start in answer.start.items():
            one = self.waiting.pop(id)
            self.residents[id] = Resident(
                id=id, model=one.model, reserved=start.claim, busy=True, starting=True, exclusive=one.exclusive,
                last_used=self.now, load_seconds=LOAD,
            )  # fmt: skip
            load = self.random.uniform(0, LOAD)
            self.at(self.now + load, partial(self.ready, id))
            if self._models[id].fickle:
                self.at(self.now + load / 2, partial(self.abandoned, id))

    def refined(self, id: int) -> None:
        if id in self.waiting:
            self.waiting[id] = replace(self.waiting[id], is_exact=True)

    def abandoned(self, id: int) -> None:
        self.residents[id] = replace(self.residents[id], busy=False, last_used=self.now)

    def ready(self, id: int) -> None:
        if id not in self.residents or self.residents[id].leaving:
            return  # stopped while it was loading
        since, bound = self._bounds[id]
        model = self._models[id]
        self.served.append(Served(model.name, self.now - since, bound))
        residency_ends = self.now + TURN
        one = self.residents[id]
        self.residents[id] = replace(one, starting=False, busy=False, residency_ends=residency_ends, last_used=self.now)
        if one.busy:
            self.use(id, model)

    def stopped(self, id: int) -> None:
        del self.residents[id]
        if self._models[id].hot:
            self.ask(self._models[id])
        else:
            self.at(self.now + self.random.uniform(0, 60), partial(self.ask, self._models[id]))


def longest_wait(served: Sequence[Served]) -> float:
    """Of all, as a fraction of what it might have been."""
    return max((one.seconds / one.bound for one in served), default=inf)
