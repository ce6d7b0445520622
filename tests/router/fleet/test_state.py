"""The states of a worker, forwards only."""

from itertools import product

from router.config.presets import Preset
from router.events import EventLog
from router.fleet.model import Model
from router.fleet.worker import State, Worker, enter

STATES = list(State)


async def test_a_later_state_is_entered_with_an_event_and_a_state_never_goes_back() -> None:
    model = Model(Preset(id="a", path="/snapshots/a"))
    for current, to in product(STATES, STATES):
        events = EventLog()
        worker = Worker(1, model, current, 0.0)
        enter(worker, to, events, 5.0)
        expected = (to, 5.0, 1) if to > current else (current, 0.0, 0)
        assert (worker.state, worker.since, len(events.since(0) or ())) == expected
