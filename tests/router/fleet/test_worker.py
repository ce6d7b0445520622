"""A worker as the fleet sees it: its states, forwards only, and the progress of its load."""

from itertools import product

from router.config.presets import Preset
from router.events import EventLog
from router.fleet.model import Model
from router.fleet.worker import LoadProgress, State, Worker, enter, load_share

STATES = list(State)


async def test_a_later_state_is_entered_with_an_event_and_a_state_never_goes_back() -> None:
    model = Model(Preset(id="a", path="/snapshots/a"))
    for current, to in product(STATES, STATES):
        events = EventLog()
        worker = Worker(1, model, current, 0.0)
        enter(worker, to, events, 5.0)
        expected = (to, 5.0, 1) if to > current else (current, 0.0, 0)
        assert (worker.state, worker.since, len(events.since(0) or ())) == expected


def test_stages_follow_one_another_and_their_times_add_up() -> None:
    progress = LoadProgress()
    progress.begin("wait", 10.0)
    progress.begin("start", 12.0)
    progress.update("start", 0, 0, 13.0)
    progress.update("weights", 0, 100, 15.0)
    progress.update("weights", 100, 100, 19.0)
    progress.update("warmup", 16, 64, 20.0)
    assert progress.seconds == {"wait": 2.0, "start": 3.0, "weights": 5.0}, "the current stage has no time yet"
    progress.end(20.5)
    progress.end(99.0)
    assert progress.seconds == {"wait": 2.0, "start": 3.0, "weights": 5.0, "warmup": 0.5}
    assert sum(progress.seconds.values()) == 20.5 - 10.0


def test_a_stage_that_comes_twice_counts_its_time_twice() -> None:
    progress = LoadProgress()
    for at, stage in enumerate(("weights", "warmup", "weights")):
        progress.begin(stage, float(at))
    progress.end(7.0)
    assert progress.seconds == {"weights": 1.0 + 5.0, "warmup": 1.0}


def test_the_rate_is_of_what_was_done_since_the_stage_began() -> None:
    progress = LoadProgress()
    progress.update("download", 4000, 10000, 5.0)  # found on disk
    assert progress.as_dict() == {
        "stage": "download", "done": 4000, "total": 10000, "unit": "bytes", "rate": None, "eta": None,
    }  # fmt: skip
    progress.update("download", 5000, 10000, 7.0)
    assert progress.share == 0.5
    assert (progress.as_dict()["rate"], progress.as_dict()["eta"]) == (500.0, 10.0)
    progress.update("weights", 0, 10000, 8.0)
    assert (progress.as_dict()["rate"], progress.as_dict()["eta"], progress.share) == (None, None, 0.0)


def test_an_unknown_total_gives_no_share_and_no_eta() -> None:
    progress = LoadProgress()
    progress.update("download", 0, 0, 1.0)
    progress.update("download", 700, 0, 2.0)
    assert progress.share == 0.0
    assert (progress.as_dict()["rate"], progress.as_dict()["eta"]) == (700.0, None)
    progress.update("start", 0, 0, 3.0)
    assert progress.as_dict()["unit"] is None


def test_a_load_as_a_whole_never_goes_back_from_stage_to_stage() -> None:
    """The stages that a worker reports: a start of unknown length, weights, and a warm-up that a CPU skips."""
    course = [("start", 0.0), *(("weights", share / 4) for share in range(5)), ("warmup", 0.0), ("warmup", 1.0)]
    as_dict = [load_share(stage, share) for stage, share in course]
    assert as_dict == sorted(as_dict)
    assert (as_dict[0], as_dict[-1]) == (0.0, 1.0)
    assert load_share("download", 0.25) == 0.25


def test_the_part_of_a_stage_that_lies_between_two_moments_is_returned() -> None:
    progress = LoadProgress()
    for stage, began in (("wait", 1.0), ("start", 4.0), ("weights", 5.0)):
        progress.begin(stage, began)
    progress.end(9.0)
    assert progress.between(2.0, 6.0) == {"wait": 2.0, "start": 1.0, "weights": 1.0}
    assert progress.between(9.5, 10.0) == {}
