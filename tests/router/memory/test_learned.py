"""Learned estimates: measurements of loads, kept in a file."""

import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from router import DISTRIBUTION
from router.config.presets import Preset
from router.memory.checkpoint_facts import Checkpoint
from router.memory.estimate import MemoryEstimate
from router.memory.learned import MAX_EXTRA_BYTES, Learned, LearnedEstimates, key, with_learned

GUESS = MemoryEstimate(weights=(100,), context=(50,), compute=(30,), runtime=(20,))
SPLIT = MemoryEstimate(weights=(60, 60), context=(20, 20), compute=(10, 10), runtime=(10, 10), host=500)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "estimates.json"


@pytest.fixture
def known(file: Path) -> LearnedEstimates:
    return LearnedEstimates(file)


def test_a_learned_figure_contains_neither_weights_nor_cache(file: Path, known: LearnedEstimates) -> None:
    known.record("a", GUESS, [190])
    assert known.learned("a") == Learned(beside=(40,))
    known.record("b", GUESS, [140])
    assert known.learned("b") == Learned(beside=(0,)), "it was not mapped in full"
    known.record("c", SPLIT, [110, 90], 600, steps=True)
    assert known.learned("c") == Learned(beside=(30, 10), host=600, steps=True)
    assert all(LearnedEstimates(file).learned(name) == known.learned(name) for name in "abc")


def test_estimated_steps_are_added_unless_they_were_measured() -> None:
    assert with_learned(GUESS, Learned((40,))) == replace(GUESS, runtime=(40,), source="learned")
    assert with_learned(GUESS, Learned((40,), steps=True)) == replace(GUESS, runtime=(10,), source="learned")
    assert with_learned(GUESS, Learned((4,), steps=True)).compute == (4,)
    assert with_learned(SPLIT, Learned((0, 7), 300)).host == 300
    assert with_learned(SPLIT, Learned((0, 7))).host == SPLIT.host, "it was not measured"


def test_a_learned_figure_counts_up_to_a_bound_above_the_estimate_without_it() -> None:
    huge = with_learned(SPLIT, Learned((1 << 40, 7), 1 << 40))
    assert huge.shards == (150 + MAX_EXTRA_BYTES, 60 + 20 + 10 + 7)
    assert huge.host == 750 + MAX_EXTRA_BYTES
    assert (huge.weights, huge.context) == (SPLIT.weights, SPLIT.context)


def test_a_learned_figure_rises_at_once_and_falls_slowly(known: LearnedEstimates) -> None:
    assert known.record("a", GUESS, [200]).beside == (50,)
    assert known.record("a", GUESS, [240]).beside == (90,)
    assert known.record("a", GUESS, [200]).beside == (80,)
    for _ in range(30):
        known.record("a", GUESS, [200])
    learned = known.learned("a")
    assert learned is not None
    assert 50 <= learned.beside[0] <= 52


def test_a_worker_without_the_largest_steps_lowers_the_figure_by_what_it_cannot_lack(known: LearnedEstimates) -> None:
    known.record("a", GUESS, [200], steps=True)
    assert known.record("a", GUESS, [150]) == Learned((50,), steps=True), "the steps may be what is missing"
    assert known.record("a", GUESS, [210]) == Learned((60,), steps=True)
    far = 400 << 20
    known.record("a", GUESS, [150 + far], steps=True)
    fallen = known.record("a", GUESS, [150])
    assert far // 2 < fallen.beside[0] < far, "more than steps and workspaces explain, as after running out of memory"


def test_a_figure_with_steps_replaces_one_without(known: LearnedEstimates) -> None:
    known.record("a", GUESS, [240])
    assert known.record("a", GUESS, [200], steps=True) == Learned((50,), steps=True)


def test_shards_and_main_memory_are_learned_separately(known: LearnedEstimates) -> None:
    known.record("a", SPLIT, [110, 90], 600)
    assert known.record("a", SPLIT, [102, 95], 400) == Learned((28, 15), 550)


def test_splits_over_different_numbers_of_devices_do_not_mix(known: LearnedEstimates) -> None:
    known.record("a", GUESS, [999])
    assert known.record("a", SPLIT, [100, 100], 500).beside == (20, 20)


@pytest.mark.parametrize("steps", [False, True])
def test_running_out_of_memory_raises_the_figure_and_keeps_it(file: Path, known: LearnedEstimates, steps: bool) -> None:
    if steps:
        known.record("a", GUESS, [200], steps=True)
    assert known.record_out_of_memory("a", GUESS, "device").shards == (230,)
    again = known.record_out_of_memory("a", GUESS, "device")
    assert again.shards == (264,)
    kept = LearnedEstimates(file).learned("a")
    assert kept is not None
    assert with_learned(GUESS, kept) == again


def test_only_the_memory_that_ran_out_is_raised(known: LearnedEstimates) -> None:
    by_device = known.record_out_of_memory("a", SPLIT, "device")
    by_host = known.record_out_of_memory("b", SPLIT, "host")
    on_host = known.record_out_of_memory("c", GUESS, "host")
    assert (by_device.shards, by_device.host) == ((115, 115), 500)
    assert (by_host.shards, by_host.host) == ((100, 100), 575)
    assert on_host.shards == (230,)  # its shard is main memory


def test_reserved_memory_is_added_to_what_was_learned(known: LearnedEstimates) -> None:
    asked = MemoryEstimate((100,), (50,), (30,), (20 + 1000,), reserved=1000)
    assert with_learned(asked, known.record("a", asked, [190], steps=True)).shards == (1190,)
    assert known.record_out_of_memory("b", asked, "device").shards == (1230,)


def test_the_figures_of_one_snapshot_are_dropped(file: Path, known: LearnedEstimates) -> None:
    facts, other, preset = Checkpoint(identity="x"), Checkpoint(identity="y"), Preset(id="a")
    keys = [key(facts, preset, ["cpu"]), key(facts, replace(preset, parallel=9), ["cpu"]), key(other, preset, ["cpu"])]
    for name in keys:
        known.record(name, GUESS, [190])
        known.store_exact(name, GUESS)
    assert LearnedEstimates(file).forget(facts) == 2
    assert [known.learned(name) is not None for name in keys] == [False, False, True], "another router reads it at once"
    assert all(known.exact(name) for name in keys)
    assert known.forget(facts) == 0


def test_an_exact_estimate_is_kept(file: Path) -> None:
    LearnedEstimates(file).store_exact("a", SPLIT)
    kept = LearnedEstimates(file).exact("a")
    assert kept is not None
    assert (kept.shards, kept.host, kept.source) == (SPLIT.shards, SPLIT.host, "exact")
    assert LearnedEstimates(file).learned("a") is None


def test_load_seconds_are_the_median_of_the_last_loads(known: LearnedEstimates) -> None:
    for seconds in (100.0, 1.0, 2.0, 9.0, 3.0, 4.0):
        known.record_load("a", seconds)
    assert known.load_seconds("a") == 3.0


VERSION_1 = {
    "version": 1,
    "learned": {"a": {"weights": [1], "measured": [9]}},
    "exact": {},
    "seconds": {},
    "overhead": {},
}


@pytest.mark.parametrize(
    "damage", ['{"version": 2, "learned"', "[]", "{}", '{"version": 99}', json.dumps(VERSION_1), "\x00", "[" * 9999]
)
def test_a_damaged_file_is_begun_anew_with_a_warning(file: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    file.parent.mkdir()
    file.write_text(damage)
    with caplog.at_level(logging.WARNING):
        known = LearnedEstimates(file)
        assert known.learned("a") is None
        known.record("a", GUESS, [190])
    assert caplog.text.count("learning begins anew") == 1
    assert LearnedEstimates(file).learned("a") is not None


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_what_is_no_file_of_estimates_is_not_read(file: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    file.parent.mkdir()
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")
        case _:
            file.touch()
            os.truncate(file, 1 << 30)
    with caplog.at_level(logging.WARNING):
        LearnedEstimates(file).record("a", GUESS, [190])
    assert "no regular file of at most 16 MiB" in caplog.text
    assert LearnedEstimates(file).learned("a") is not None


STRANGE: dict[str, list[Any]] = {
    "learned": [None, 3, {}, {"beside": [1 << 70], "host": 0, "steps": True}, {"beside": [], "host": 0, "steps": True},
                {"beside": [-1], "host": 0, "steps": True}, {"beside": [1], "host": "0", "steps": True},
                {"beside": [1], "host": 0, "steps": 1}, {"beside": [True], "host": 0, "steps": True}],
    "exact": [None, {}, {**asdict(GUESS), "weights": [1, 2]}, {**asdict(GUESS), "host": -1}],
    "seconds": [None, 3, ["x"], [-1.0], [math.inf], [math.nan]],
    "overhead": [None, [3], {"host": -1}, {"device": "x"}],
}  # fmt: skip


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_entry_is_ignored_with_one_warning(
    file: Path, known: LearnedEstimates, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    known.record("a", GUESS, [190])
    known.store_exact("a", GUESS)
    known.record_load("a", 3.0)
    body = json.loads(file.read_text())
    body[kind] |= {str(number): entry for number, entry in enumerate(STRANGE[kind])}
    file.write_text(json.dumps(body))
    with caplog.at_level(logging.WARNING):
        again = LearnedEstimates(file)
        for name in body[kind]:
            again.learned(name), again.exact(name), again.load_seconds(name)
            again.overhead("cpu", forked=False)
    assert caplog.text.count("entries are ignored") == 1
    assert f"{len(STRANGE[kind])} invalid" in caplog.text
    assert (again.learned("a"), again.load_seconds("a")) == (known.learned("a"), 3.0)
    assert again.exact("a") is not None
    again.record_load("b", 1.0)
    assert len(json.loads(file.read_text())[kind]) <= 2, "the next write drops them"


def test_routers_of_one_folder_share_estimates(file: Path) -> None:
    one, other = LearnedEstimates(file), LearnedEstimates(file)
    one.record("a", GUESS, [190])
    other.record("b", GUESS, [210])
    assert [known.learned(name) is not None for known in (one, other) for name in "ab"] == [True] * 4


WRITER = """
import sys
from pathlib import Path
from router.memory.learned import LearnedEstimates
from router.memory.estimate import MemoryEstimate

known = LearnedEstimates(Path(sys.argv[1]))
for number in range(20):
    known.record(f"{sys.argv[2]}{number}", MemoryEstimate((1,), (1,), (1,), (1,)), [4])
"""


def test_no_record_is_lost_when_routers_write_at_once(file: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(file), name], cwd=root) for name in "abc"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    assert len(json.loads(file.read_text())["learned"]) == 60
    assert [left.name for left in file.parent.iterdir() if left.suffix == ".draft"] == []


def test_estimates_stay_in_memory_while_the_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    known = LearnedEstimates(tmp_path / "file" / "estimates.json")
    with caplog.at_level(logging.WARNING):
        known.record_out_of_memory("a", GUESS, "device")
        known.record_load("a", 1.0)
    assert caplog.text.count("cannot be kept") == 1, "once, and not with each load"
    learned = known.learned("a")
    assert learned is not None
    assert with_learned(GUESS, learned).shards == (230,)
    caplog.clear()
    (tmp_path / "file").unlink()
    known.record_load("a", 2.0)
    again = LearnedEstimates(tmp_path / "file" / "estimates.json")
    assert (again.learned("a"), again.load_seconds("a")) == (learned, 1.5), "the next write has all of them"
    (tmp_path / "file" / "estimates.json").unlink()
    (tmp_path / "file" / "estimates.json").mkdir()
    with caplog.at_level(logging.WARNING):
        known.record_load("a", 3.0)
    assert caplog.text.count("cannot be kept") == 1, "and again if it went well meanwhile"


KILLED_AS_IT_WRITES = """
import resource, signal, sys
from pathlib import Path
from router.memory.learned import LearnedEstimates

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
LearnedEstimates(Path(sys.argv[1])).record_load("a", 1.0)
"""


def test_the_draft_of_a_killed_router_is_overwritten(file: Path) -> None:
    LearnedEstimates(file).record("a", GUESS, [190])
    before, root = file.read_bytes(), Path(__file__).resolve().parents[3]
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", KILLED_AS_IT_WRITES, str(file)], cwd=root, check=False)
        assert killed.returncode == -signal.SIGXFSZ
    assert file.read_bytes() == before
    assert len([left for left in file.parent.iterdir() if left.suffix == ".draft"]) == 1
    LearnedEstimates(file).record("b", GUESS, [190])
    assert [left for left in file.parent.iterdir() if left.suffix == ".draft"] == []


def test_the_oldest_record_is_dropped(file: Path) -> None:
    file.parent.mkdir()
    seconds = {str(number): [1.0] for number in range(1000)}
    file.write_text(json.dumps({"version": 2, "learned": {}, "exact": {}, "seconds": seconds, "overhead": {}}))
    known = LearnedEstimates(file)
    known.record_load("new", 1.0)
    assert known.load_seconds("0") is None
    assert known.load_seconds("1") == 1.0
    assert known.load_seconds("new") == 1.0


def test_a_record_counts_before_it_is_on_disk(file: Path) -> None:
    writes: list[Callable[[], None]] = []
    known = LearnedEstimates(file, submit=writes.append)
    known.record("a", GUESS, [240])
    known.record("a", GUESS, [200])
    known.record_load("a", 3.0)
    learned = known.learned("a")
    assert learned is not None
    assert learned.beside == (80,)
    assert not file.exists()
    other = LearnedEstimates(file)
    other.record("b", GUESS, [190])
    other.record("a", GUESS, [100])
    assert known.learned("b") is not None
    for write in writes:
        write()
    both = known.learned("a"), LearnedEstimates(file).learned("a")
    assert both[0] == both[1]
    assert LearnedEstimates(file).learned("b") == known.learned("b")
    assert LearnedEstimates(file).load_seconds("a") == 3.0


def test_each_record_reaches_the_disk_once(file: Path) -> None:
    writes: list[Callable[[], None]] = []
    known = LearnedEstimates(file, submit=writes.append)
    for seconds in (1.0, 2.0):
        known.record_load("a", seconds)
    for write in writes:
        write()
    known.record_load("a", 9.0)
    for write in writes:
        write()
    assert json.loads(file.read_text())["seconds"] == {"a": [1.0, 2.0, 9.0]}
    assert known.load_seconds("a") == 2.0


def test_the_key_differs_exactly_if_the_memory_may() -> None:
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


def test_measurements_with_other_library_versions_are_not_used(known: LearnedEstimates) -> None:
    facts, quantized, preset = (
        Checkpoint(max_positions=4096),
        Checkpoint(max_positions=4096, quantization="gptq"),
        Preset(id="a"),
    )

    def with_new(name: str) -> Callable[[str], str]:
        return lambda asked: "2.0" if asked == name else "1.0"

    now = key(facts, preset, ["cpu"], installed=with_new(""))
    known.record(now, GUESS, [190])
    for name in ("torch", "transformers", DISTRIBUTION):
        assert known.learned(key(facts, preset, ["cpu"], installed=with_new(name))) is None
    assert key(facts, preset, ["cpu"], installed=with_new("gptqmodel")) == now, "nothing of it is quantized"
    one, other = (key(quantized, preset, ["cpu"], installed=with_new(name)) for name in ("", "gptqmodel"))
    assert one != other


def test_a_full_disk_leaves_the_file_whole(
    file: Path, known: LearnedEstimates, caplog: pytest.LogCaptureFixture
) -> None:
    known.record("a", GUESS, [190])
    before, (soft, hard) = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), hard))
    try:
        with caplog.at_level(logging.WARNING):
            learned = known.record("b", GUESS, [300])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be kept" in caplog.text
    assert (file.read_bytes(), known.learned("b")) == (before, learned)
    assert [left.name for left in file.parent.iterdir() if left.suffix == ".draft"] == []
