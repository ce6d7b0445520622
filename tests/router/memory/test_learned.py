"""What loads really cost, kept for the next one."""

import json
import logging
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from router.config.presets import Preset
from router.memory.checkpoint_facts import Checkpoint
from router.memory.estimate import Estimate
from router.memory.learned import LearnedEstimates, key

GUESS = Estimate(weights=(100,), context=(50,), compute=(30,), runtime=(20,))
SPLIT = Estimate(weights=(60, 60), context=(20, 20), compute=(10, 10), runtime=(10, 10), host=500)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "estimates.json"


def test_nothing_is_learned_before_the_first_load(file: Path) -> None:
    calibration = LearnedEstimates(file)
    assert calibration.learned("a") is None
    assert calibration.exact("a") is None
    assert calibration.load_seconds("a") is None
    assert not file.exists()


def test_what_was_measured_is_learned_with_its_segments(file: Path) -> None:
    calibration = LearnedEstimates(file)
    calibration.record("a", GUESS, [190])
    assert calibration.learned("a") == Estimate((100,), (50,), (30,), (10,), source="learned")
    calibration.record("b", GUESS, [140])
    assert calibration.learned("b") == Estimate((100,), (40,), (0,), (0,), source="learned")
    assert LearnedEstimates(file).learned("a") == calibration.learned("a")


def test_a_learned_figure_rises_at_once_and_falls_slowly(file: Path) -> None:
    calibration = LearnedEstimates(file)
    assert calibration.record("a", GUESS, [200]).shards == (200,)
    assert calibration.record("a", GUESS, [240]).shards == (240,)
    assert calibration.record("a", GUESS, [200]).shards == (230,)
    for _ in range(30):
        calibration.record("a", GUESS, [200])
    learned = calibration.learned("a")
    assert learned is not None
    assert 200 <= learned.shards[0] <= 202


def test_what_nobody_has_shown_yet_is_added_to_what_was_measured_until_somebody_shows_it(file: Path) -> None:
    calibration = LearnedEstimates(file)

    def record(measured: int, share_to_come: float) -> int:
        [learned] = calibration.record("a", GUESS, [measured], share_to_come=share_to_come).shards
        assert LearnedEstimates(file).learned("a") == calibration.learned("a")
        return learned

    assert record(150, 1.0) == 180, "its compute is 30"
    assert record(160, 0.5) == 175
    assert record(165, 0.0) == 165, "at once: what was added was a guess"
    assert record(140, 1.0) == 165, "a short life says nothing of long prompts"
    assert record(170, 0.9) == 170, "but that it took more than was thought"
    assert record(150, 0.0) == 165, "measurements come down slowly"


def test_who_showed_less_leaves_what_is_still_to_come_as_it_is(file: Path) -> None:
    calibration = LearnedEstimates(file)
    assert calibration.record("a", GUESS, [150], share_to_come=0.5).shards == (165,)
    assert calibration.record("a", GUESS, [155], share_to_come=1.0).shards == (165,)
    assert calibration.record("a", GUESS, [155], share_to_come=0.5).shards == (170,)


def test_each_shard_and_the_host_learn_by_themselves(file: Path) -> None:
    calibration = LearnedEstimates(file)
    calibration.record("a", SPLIT, [110, 90], 600)
    learned = calibration.record("a", SPLIT, [100, 95], 400)
    assert learned.shards == (108, 95)
    assert learned.host == 550


def test_a_split_over_more_devices_does_not_mix_with_one_over_fewer(file: Path) -> None:
    calibration = LearnedEstimates(file)
    calibration.record("a", GUESS, [999])
    assert calibration.record("a", SPLIT, [100, 100], 500).shards == (100, 100)


def test_running_out_of_memory_raises_the_figure_and_keeps_it(file: Path) -> None:
    calibration = LearnedEstimates(file)
    assert calibration.record_out_of_memory("a", GUESS, "device").shards == (230,)
    again = calibration.record_out_of_memory("a", GUESS, "device")
    assert again.shards == (264,)
    assert LearnedEstimates(file).learned("a") == again


def test_only_the_memory_that_ran_out_is_raised(file: Path) -> None:
    calibration = LearnedEstimates(file)
    by_device = calibration.record_out_of_memory("a", SPLIT, "device")
    by_host = calibration.record_out_of_memory("b", SPLIT, "host")
    on_host = calibration.record_out_of_memory("c", GUESS, "host")
    assert (by_device.shards, by_device.host) == ((115, 115), 500)
    assert (by_host.shards, by_host.host) == ((100, 100), 575)
    assert on_host.shards == (230,)  # its shard is main memory


def test_what_the_preset_adds_stays_on_top_of_what_was_measured(file: Path) -> None:
    calibration = LearnedEstimates(file)
    asked = Estimate((100,), (50,), (30,), (20 + 1000,), reserved=1000)
    assert calibration.record("a", asked, [190]).shards == (1190,)
    assert calibration.record("a", asked, [150]).shards == (1180,)
    assert calibration.record_out_of_memory("b", asked, "device").shards == (1380,)


def test_an_exact_estimate_is_kept(file: Path) -> None:
    LearnedEstimates(file).store_exact("a", SPLIT)
    kept = LearnedEstimates(file).exact("a")
    assert kept is not None
    assert (kept.shards, kept.host, kept.source) == (SPLIT.shards, SPLIT.host, "exact")
    assert LearnedEstimates(file).learned("a") is None


def test_a_load_takes_as_long_as_the_last_ones_did(file: Path) -> None:
    calibration = LearnedEstimates(file)
    for seconds in (100.0, 1.0, 2.0, 9.0, 3.0, 4.0):
        calibration.record_load("a", seconds)
    assert calibration.load_seconds("a") == 3.0


@pytest.mark.parametrize("damage", ['{"version": 1, "learned"', "[]", "{}", '{"version": 99}', "\x00\x00", "[" * 9999])
def test_a_damaged_file_is_begun_anew_with_a_warning(file: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    file.parent.mkdir()
    file.write_text(damage)
    with caplog.at_level(logging.WARNING):
        calibration = LearnedEstimates(file)
    assert "learning begins anew" in caplog.text
    calibration.record("a", GUESS, [190])
    assert LearnedEstimates(file).learned("a") is not None


def test_a_record_that_is_none_is_passed_over(file: Path) -> None:
    LearnedEstimates(file).record("a", GUESS, [190])
    body = json.loads(file.read_text())
    good = body["learned"]["a"]
    broken = [None, 3, {}, *({**good, "weights": weights} for weights in (["x"], [-1], [1, 2], [1 << 70]))]
    for record in broken:
        file.write_text(json.dumps({**body, "learned": {"a": record}}))
        assert LearnedEstimates(file).learned("a") is None


def test_routers_of_one_folder_learn_from_each_other(file: Path) -> None:
    one, other = LearnedEstimates(file), LearnedEstimates(file)
    one.record("a", GUESS, [190])
    other.record("b", GUESS, [210])
    assert [calibration.learned(name) is not None for calibration in (one, other) for name in "ab"] == [True] * 4


WRITER = """
import sys
from pathlib import Path
from router.memory.learned import LearnedEstimates
from router.memory.estimate import Estimate

calibration = LearnedEstimates(Path(sys.argv[1]))
for number in range(20):
    calibration.record(f"{sys.argv[2]}{number}", Estimate((1,), (1,), (1,), (1,)), [4])
"""


def test_no_record_is_lost_when_routers_write_at_once(file: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(file), name], cwd=root) for name in "abc"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    assert len(json.loads(file.read_text())["learned"]) == 60
    assert [left.name for left in file.parent.iterdir() if left.suffix == ".draft"] == []


def test_without_a_disk_learning_lasts_as_long_as_the_router(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    calibration = LearnedEstimates(tmp_path / "file" / "estimates.json")
    with caplog.at_level(logging.WARNING):
        calibration.record_out_of_memory("a", GUESS, "device")
        calibration.record_load("a", 1.0)
    assert caplog.text.count("cannot be kept") == 1, "once, and not with each load"
    learned = calibration.learned("a")
    assert learned is not None
    assert learned.shards == (230,)
    caplog.clear()
    (tmp_path / "file").unlink()
    calibration.record_load("a", 2.0)
    (tmp_path / "file" / "estimates.json").unlink()
    (tmp_path / "file" / "estimates.json").mkdir()
    with caplog.at_level(logging.WARNING):
        calibration.record_load("a", 3.0)
    assert caplog.text.count("cannot be kept") == 1, "and again if it went well meanwhile"


def test_a_write_that_fails_leaves_nothing_behind(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.mkdir(parents=True)  # nothing can be renamed to it
    with caplog.at_level(logging.WARNING):
        learned = LearnedEstimates(file).record("a", GUESS, [190])
    assert learned.shards == (190,)
    assert "cannot be kept" in caplog.text
    assert [left.name for left in file.parent.iterdir() if left.suffix == ".draft"] == []


KILLED_AS_IT_WRITES = """
import resource, signal, sys
from pathlib import Path
from router.memory.learned import LearnedEstimates

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
LearnedEstimates(Path(sys.argv[1])).record_load("a", 1.0)
"""


def test_the_draft_of_a_router_that_was_killed_is_written_over(file: Path) -> None:
    LearnedEstimates(file).record("a", GUESS, [190])
    before, root = file.read_bytes(), Path(__file__).resolve().parents[3]
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", KILLED_AS_IT_WRITES, str(file)], cwd=root, check=False)
        assert killed.returncode == -signal.SIGXFSZ
    assert file.read_bytes() == before
    assert len([left for left in file.parent.iterdir() if left.suffix == ".draft"]) == 1
    LearnedEstimates(file).record("b", GUESS, [190])
    assert [left for left in file.parent.iterdir() if left.suffix == ".draft"] == []


def test_what_was_not_used_for_longest_is_forgotten(file: Path) -> None:
    file.parent.mkdir()
    seconds = {str(number): [1.0] for number in range(1000)}
    file.write_text(json.dumps({"version": 1, "learned": {}, "exact": {}, "seconds": seconds, "overhead": {}}))
    calibration = LearnedEstimates(file)
    calibration.record_load("new", 1.0)
    assert calibration.load_seconds("0") is None
    assert calibration.load_seconds("1") == 1.0
    assert calibration.load_seconds("new") == 1.0


def test_what_is_recorded_counts_before_it_is_on_the_disk(file: Path) -> None:
    writes: list[Callable[[], None]] = []
    calibration = LearnedEstimates(file, later=writes.append)
    calibration.record("a", GUESS, [240])
    calibration.record("a", GUESS, [200])
    calibration.record_load("a", 3.0)
    learned = calibration.learned("a")
    assert learned is not None
    assert learned.shards == (230,)
    assert not file.exists()
    other = LearnedEstimates(file)
    other.record("b", GUESS, [190])
    other.record("a", GUESS, [100])
    assert calibration.learned("b") is not None
    for write in writes:
        write()
    both = calibration.learned("a"), LearnedEstimates(file).learned("a")
    assert both[0] == both[1]
    assert LearnedEstimates(file).learned("b") == calibration.learned("b")
    assert LearnedEstimates(file).load_seconds("a") == 3.0


def test_each_record_reaches_the_disk_once(file: Path) -> None:
    writes: list[Callable[[], None]] = []
    calibration = LearnedEstimates(file, later=writes.append)
    for seconds in (1.0, 2.0):
        calibration.record_load("a", seconds)
    for write in writes:
        write()
    calibration.record_load("a", 9.0)
    for write in writes:
        write()
    assert json.loads(file.read_text())["seconds"] == {"a": [1.0, 2.0, 9.0]}
    assert calibration.load_seconds("a") == 2.0


def test_a_thread_of_its_own_may_write(file: Path) -> None:
    with ThreadPoolExecutor(1) as aside:
        calibration = LearnedEstimates(file, later=aside.submit)
        for number in range(200):
            calibration.record_load(str(number % 7), float(number))
            assert calibration.load_seconds(str(number % 7)) is not None
    body = json.loads(file.read_text())["seconds"]
    assert body == {str(name): [float(n) for n in range(200) if n % 7 == name][-5:] for name in range(7)}


def test_a_key_tells_apart_what_costs_differently_and_nothing_else() -> None:
    facts = Checkpoint(identity="x", max_positions=4096)
    preset = Preset(id="a", path="/somewhere")
    same = Preset(id="b", path="/elsewhere", ctx_size=4096, priority=3, ttl=9.0, sampling={"temp": 1.0})
    assert key(facts, preset, ["cpu"]) == key(facts, same, ["cpu"])
    others = [
        key(Checkpoint(identity="y", max_positions=4096), preset, ["cpu"]),
        key(facts, Preset(id="a", ctx_size=2048), ["cpu"]),
        key(facts, Preset(id="a", parallel=8), ["cpu"]),
        key(facts, Preset(id="a", kv_tokens=9000), ["cpu"]),
        key(facts, Preset(id="a", kv_cache_dtype="int8"), ["cpu"]),
        key(facts, Preset(id="a", dtype="float32"), ["cpu"]),
        key(facts, preset, ["NVIDIA H200"]),
        key(facts, preset, ["NVIDIA H200", "NVIDIA H200"]),
    ]
    assert len({key(facts, preset, ["cpu"]), *others}) == 9


def test_what_was_measured_with_other_software_is_not_used(file: Path) -> None:
    facts, packed, preset = (
        Checkpoint(max_positions=4096),
        Checkpoint(max_positions=4096, quantization="gptq"),
        Preset(id="a"),
    )

    def with_new(name: str) -> Callable[[str], str]:
        return lambda asked: "2.0" if asked == name else "1.0"

    calibration = LearnedEstimates(file)
    now = key(facts, preset, ["cpu"], installed=with_new(""))
    calibration.record(now, GUESS, [190])
    for name in ("torch", "transformers", "fleet-router"):
        assert calibration.learned(key(facts, preset, ["cpu"], installed=with_new(name))) is None
    assert key(facts, preset, ["cpu"], installed=with_new("gptqmodel")) == now, "nothing of it is packed"
    one, other = (key(packed, preset, ["cpu"], installed=with_new(name)) for name in ("", "gptqmodel"))
    assert one != other


def test_a_full_disk_leaves_the_old_file_whole(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    calibration = LearnedEstimates(file)
    calibration.record("a", GUESS, [190])
    before, (soft, hard) = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), hard))
    try:
        with caplog.at_level(logging.WARNING):
            learned = calibration.record("b", GUESS, [300])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be kept" in caplog.text
    assert (file.read_bytes(), calibration.learned("b")) == (before, learned)
    assert [left.name for left in file.parent.iterdir() if left.suffix == ".draft"] == []
