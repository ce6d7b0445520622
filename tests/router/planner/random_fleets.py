"""Random questions to the planner: a small machine that is nearly full, workers in any state, and a queue."""

from dataclasses import replace
from random import Random
from typing import Any

from router.planner.ledger import HOST, LOCAL, WORKER_SLOTS, DeviceId, Resident
from router.planner.types import Demand
from tests.router.planner.fleets import CPU, GPU, NOW, PATIENCE, demand, machine, resident
from tests.router.planner.questions import Fleet

FAR = [DeviceId("far", 0), DeviceId("far", 1)]


def rarely(random: Random) -> bool:
    return random.random() < 0.15


def devices_of(random: Random) -> tuple[list[DeviceId], list[DeviceId]]:
    """Two to four accelerators; those of the second list have no memory of their own."""
    ids = GPU[: random.randint(2, 4)]
    if rarely(random):
        return [*ids[:2], *FAR[: random.randint(1, 2)]], []
    return ids, [id for id in ids if rarely(random)]


def random_resident(random: Random, id: int, on: tuple[DeviceId, ...], *, hosts: bool, plain: bool) -> Resident:
    """A worker or sleeping weights, on these devices and perhaps in main memory; in any state, or `plain` and ready."""
    one_of = random.choice
    reserved = {at: 5 * random.randint(1, 4 if plain else 8) for at in on}
    if hosts and random.random() < 0.7 and all(at.node == LOCAL for at in on):
        reserved[CPU] = reserved.get(CPU, 0) + one_of([1, 5, 10])
    starting = rarely(random)
    measured = {at: one_of([size, size, size - 1, size + 2, size // 2]) for at, size in reserved.items()}
    if rarely(random):
        measured.pop(next(iter(reserved)))
    facts: dict[str, Any] = {
        "model": one_of("abc"),
        "measured": {} if starting else measured,
        "last_used": NOW - one_of([50.0, 40.0, 30.0, 20.0, PATIENCE, 2.0, 1.0, 0.5, 0.2, 0.1, 0.0]),
        "residency_ends": NOW + one_of([-9.0, -8.0, -7.0, -1.0, 0.0, 0.0, 0.3, 5.0, PATIENCE]),
        "starting": starting,
        "busy": random.random() < 0.25,
        "leaving": rarely(random),
        "leaving_since": NOW - one_of([1.0, 2.0, 3.0]),
        "pinned": random.random() < 0.08,
        "exclusive": rarely(random),
        "best_effort": random.random() < 0.25,
        "priority": one_of([0, 0, 1]),
        "idle_grace": one_of([None, None, 0.0, 0.5, 3.0]),
        "request_interval": one_of([None, None, 0.2, 0.5, 5.0]),
        "load_seconds": one_of([0.0, 1.0, 2.0]),
        "expires": one_of([None, None, None, None, NOW, NOW - 1, NOW + 3]),
    }
    if plain:
        facts |= {"starting": False, "leaving": False, "expires": None, "measured": reserved}
    one = resident(id, reserved, **facts)
    return replace(one, reserved={**reserved, DeviceId(on[0].node, WORKER_SLOTS): 1})


def random_demand(random: Random, id: int, ids: list[DeviceId], *, host: bool, plain: bool) -> Demand:
    """A demand of one shard, of equal or of unequal shards, on some of the devices; or `plain`: required and exact."""
    one_of = random.choice
    facts: dict[str, Any] = {
        "model": one_of("abc"),
        "since": NOW - one_of([50.0, 20.0, PATIENCE, 9.0, 1.0, 0.1, 0.0]),
        "priority": one_of([0, 0, 1]),
        "best_effort": rarely(random),
        "is_exact": not rarely(random),
        "exclusive": rarely(random),
        "load_seconds": one_of([0.0, 1.0, 2.0, 9.0]),
    }
    if plain:
        facts |= {"best_effort": False, "is_exact": True, "exclusive": False}
    if host and rarely(random):
        return demand(id, 5 * random.randint(1, 10), on=[CPU], **facts)
    able = ids if random.random() < 0.7 else random.sample(ids, random.randint(1, len(ids)))
    count = random.randint(1, min(3, len(able)))
    size = 5 * random.randint(1, 11)
    shards = [size] * count if random.random() < 0.5 else [5 * random.randint(1, 11) for _ in range(count)]
    place = tuple(random.sample(able, count)) if random.random() < 0.08 else ()
    if len({at.node for at in place}) > 1:
        place = ()
    return demand(id, *shards, on=able, host=one_of([0, 0, 1, 5, 10]) if host else 0, place=place, **facts)


def random_fleet(seed: int, demands: int) -> Fleet:
    """A small machine that is nearly full, and so many demands. Sizes are multiples of five, so that much fits just."""
    random = Random(seed)
    one_of = random.choice
    ids, unified = devices_of(random)
    host = bool(unified) or random.random() < 0.7
    own = [id for id in ids if id not in unified]
    totals = {id: one_of([40, 50, 60]) for id in own}
    if host:
        totals[CPU] = one_of([30, 60, 90, 200])
    nodes = {id.node for id in ids}
    if random.random() < 0.25:
        totals |= {DeviceId(node, WORKER_SLOTS): random.randint(1, 4) for node in nodes}
    foreign = {id: one_of([0, 0, 0, 0, 5]) for id in totals if id.index != WORKER_SLOTS}
    margin = one_of([0, 0, 5])
    left = {id: total - margin - foreign.get(id, 0) for id, total in totals.items() if id.index != WORKER_SLOTS}
    residents: list[Resident] = []
    plain = random.random() < 0.6
    for id in range(1, 1 + random.randint(*((4, 10) if plain else (1, 7)))):
        pair = tuple(random.sample(own, 2)) if len(own) > 1 else ()
        on = one_of([*((at,) for at in own), *([(CPU,)] if host else []), *([pair] if pair else [])])
        if len({at.node for at in on}) > 1:
            continue
        one = random_resident(random, id, on, hosts=host, plain=plain)
        taken = {at: size for at, size in one.reserved.items() if at in left}
        if any(left[at] < size for at, size in taken.items()):
            continue
        left = {at: free - taken.get(at, 0) for at, free in left.items()}
        residents.append(one)
    limit = {id: one_of([20, 40, 45]) for id in left if random.random() < 0.1}
    rows = machine(residents, totals, foreign=foreign, margin=margin, limit=limit)
    rows = [replace(row, margin=0) if row.id.index == WORKER_SLOTS else row for row in rows]
    pool = next((row for row in rows if row.id.index == HOST), None)
    rows += [replace(pool, id=id, pool=CPU) for id in unified if pool]
    waiting = [random_demand(random, 20 + number, ids, host=host, plain=plain) for number in range(demands)]
    memory = random.random() > 0.04
    return Fleet([with_range(random, one) for one in waiting], residents, rows, memory=memory)


def with_range(random: Random, one: Demand) -> Demand:
    """The same demand, mostly with a range of KV cache; sometimes with a limit, which may be below the least."""
    if random.random() < 0.3:
        return one
    growth = tuple(random.choice([0, 1, 2, 5]) for _ in one.shards)
    most = {id: random.randint(5, 60) for id in one.devices if rarely(random)}
    return replace(one, growth=growth, steps=random.choice([1, 2, 8, 30]), shard_limits=most)
