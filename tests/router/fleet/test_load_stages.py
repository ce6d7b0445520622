"""Promises of `router.fleet.load_stages`: where a load is, and how fast it goes, without guesses."""

from router.fleet.load_stages import Stages, whole


def test_stages_follow_one_another_and_their_times_add_up() -> None:
    stages = Stages()
    stages.begin("wait", 10.0)
    stages.begin("start", 12.0)
    stages.update("start", 0, 0, 13.0)
    stages.update("weights", 0, 100, 15.0)
    stages.update("weights", 100, 100, 19.0)
    stages.update("warmup", 16, 64, 20.0)
    assert stages.seconds == {"wait": 2.0, "start": 3.0, "weights": 5.0}, "what is not over has no time yet"
    stages.end(20.5)
    stages.end(99.0)
    assert stages.seconds == {"wait": 2.0, "start": 3.0, "weights": 5.0, "warmup": 0.5}
    assert sum(stages.seconds.values()) == 20.5 - 10.0


def test_a_stage_that_comes_twice_counts_its_time_twice() -> None:
    stages = Stages()
    for at, stage in enumerate(("weights", "warmup", "weights")):
        stages.begin(stage, float(at))
    stages.end(7.0)
    assert stages.seconds == {"weights": 1.0 + 5.0, "warmup": 1.0}


def test_the_rate_is_of_what_was_done_since_the_stage_began() -> None:
    stages = Stages()
    stages.update("download", 4000, 10000, 5.0)  # found on disk
    assert stages.as_dict() == {
        "stage": "download",
        "done": 4000,
        "total": 10000,
        "unit": "bytes",
        "rate": None,
        "eta": None,
    }
    stages.update("download", 5000, 10000, 7.0)
    assert stages.share == 0.5
    assert (stages.as_dict()["rate"], stages.as_dict()["eta"]) == (500.0, 10.0)
    stages.update("weights", 0, 10000, 8.0)
    assert (stages.as_dict()["rate"], stages.as_dict()["eta"], stages.share) == (None, None, 0.0)


def test_an_unknown_total_is_never_a_share_nor_an_eta() -> None:
    stages = Stages()
    stages.update("download", 0, 0, 1.0)
    stages.update("download", 700, 0, 2.0)
    assert stages.share == 0.0
    assert (stages.as_dict()["rate"], stages.as_dict()["eta"]) == (700.0, None)
    stages.update("start", 0, 0, 3.0)
    assert stages.as_dict()["unit"] is None


def test_a_load_as_a_whole_never_goes_back_from_stage_to_stage() -> None:
    """As its worker tells it: a start of unknown length, weights, and a warm-up that a CPU does without."""
    course = [("start", 0.0), *(("weights", share / 4) for share in range(5)), ("warmup", 0.0), ("warmup", 1.0)]
    as_dict = [whole(stage, share) for stage, share in course]
    assert as_dict == sorted(as_dict)
    assert (as_dict[0], as_dict[-1]) == (0.0, 1.0)
    assert whole("download", 0.25) == 0.25


def test_the_part_of_a_stage_that_lies_between_two_moments_is_told() -> None:
    stages = Stages()
    for stage, began in (("wait", 1.0), ("start", 4.0), ("weights", 5.0)):
        stages.begin(stage, began)
    stages.end(9.0)
    assert stages.between(2.0, 6.0) == {"wait": 2.0, "start": 1.0, "weights": 1.0}
    assert stages.between(9.5, 10.0) == {}
