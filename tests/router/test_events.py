import asyncio

from router.events import Event, EventLog


def test_ids_rise_and_the_ring_keeps_the_newest() -> None:
    log = EventLog(size=3)
    for number in range(5):
        assert log.append("state", "a", number=number).id == number + 1
    assert [event.id for event in log.since(2) or []] == [3, 4, 5]
    assert log.since(5) == []


def test_a_gap_differs_from_no_new_events() -> None:
    log = EventLog(size=3)
    for _ in range(5):
        log.append("state")
    assert log.since(1) is None
    assert log.since(99) is None
    assert EventLog().since(0) == []


def test_ids_of_an_earlier_run_are_a_gap() -> None:
    log = EventLog(first=100)
    assert (log.last_id, log.since(99), log.since(50)) == (99, [], None)
    assert log.append("state").id == 100
    assert [event.id for event in log.since(99) or []] == [100]
    assert log.since(50) is None


def test_a_subscriber_gets_all_events_or_like_the_ring_only_appended_ones() -> None:
    log, seen, recorded = EventLog(), list[Event](), list[Event]()
    log.subscribe(seen.append)
    log.subscribe(recorded.append, unrecorded=False)
    log.append("state", "a")
    log.notify("request", "a", tokens=3)
    assert [event.kind for event in seen] == ["state", "request"]
    assert recorded == log.since(0) == seen[:1]


async def test_followers_get_each_event_once_in_order() -> None:
    log = EventLog()
    log.append("state", "old")
    seen: list[int] = []

    async def follow() -> None:
        async for event in log.follow(0):
            seen.append(event.id)
            if event.id == 5:
                return

    followers = [asyncio.create_task(follow()) for _ in range(2)]
    for _ in range(4):
        await asyncio.sleep(0)
        log.append("state")
    await asyncio.gather(*followers)
    assert sorted(seen) == sorted([1, 2, 3, 4, 5] * 2)


def test_a_failing_subscriber_does_not_keep_events_from_others() -> None:
    events, seen = EventLog(), list[Event]()

    def fail(event: Event) -> None:
        raise ValueError("a bug")

    events.subscribe(fail)
    events.subscribe(seen.append)
    events.append("state", "a", state="ready")
    events.notify("request", "a")
    assert [event.kind for event in seen] == ["state", "request"]
    assert events.last_id == 1
