"""Visible accelerators, main memory and the counter of OOM kills. The driver is tested in tests/processes."""

import os
from pathlib import Path

import pytest

from router.errors import ConfigError
from router.launch.devices import Devices, Found, OomKills, count_oom_kills, usable_cores, visible
from router.planner.ledger import LOCAL, MAIN_MEMORY, DeviceId, DeviceShare

GIB = 1 << 30
CARDS = [Found(0, "GPU-a1", "GPU-a1", "A"), Found(1, "GPU-b1", "GPU-b1", "B"), Found(2, "GPU-b2", "GPU-b2", "C")]
CUT = [Found(0, "MIG-x", "GPU-a1", "A/x"), Found(0, "MIG-y", "GPU-a1", "A/y"), Found(1, "GPU-b1", "GPU-b1", "B")]
MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: {GIB // 1024} kB\nMemAvailable: {12 * GIB // 1024} kB\n"


def uuids(setting: str | None, found: list[Found] = CARDS) -> str:
    return " ".join(device.uuid for device in visible(found, setting)[0])


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, "GPU-a1 GPU-b1 GPU-b2"),
        ("2, 0", "GPU-b2 GPU-a1"),
        ("GPU-b2,0", "GPU-b2 GPU-a1"),
        ("GPU-a", "GPU-a1"),
        ("", ""),
        ("-1", ""),
        ("0,-1,1", "GPU-a1"),
        ("1,,0", "GPU-b1"),
        ("NoDevFiles", ""),
    ],
)
def test_a_visible_device_setting_is_read_as_cuda_reads_it(setting: str | None, expected: str) -> None:
    assert uuids(setting) == expected
    assert visible(CARDS, setting)[1] == ""


@pytest.mark.parametrize(
    ("setting", "expected", "named"),
    [
        ("0,3,1", "GPU-a1", "'3'"),
        ("GPU-b,0", "", "'GPU-b'"),  # two cards begin so
        ("GPU-,0", "", "'GPU-'"),
        ("tpu,0", "", "'tpu'"),
        ("0,1,0", "", "twice"),
        ("0,GPU-a1", "", "twice"),
    ],
)
def test_an_invalid_entry_hides_what_follows_it_and_is_reported(setting: str, expected: str, named: str) -> None:
    assert uuids(setting) == expected
    assert named in visible(CARDS, setting)[1]


def test_an_instance_is_chosen_by_its_uuid_and_its_card_chooses_all_instances() -> None:
    assert uuids("MIG-y", CUT) == "MIG-y"
    assert uuids("1,0", CUT) == "GPU-b1 MIG-x MIG-y"
    assert uuids("GPU-a1", CUT) == "MIG-x MIG-y"
    assert uuids("MIG-x,0", CUT) == ""  # twice


class Machine:
    """Roots of a kernel's file systems in a folder."""

    def __init__(self, folder: Path):
        self.proc = folder / "proc"
        self.cgroup = folder / "cgroup"
        self.write("proc/meminfo", MEMINFO)

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def host(self) -> tuple[float, float]:
        """Total and used, in GiB."""
        devices = Devices({"CUDA_VISIBLE_DEVICES": ""}, proc=self.proc, cgroup=self.cgroup)
        reading = devices.host()
        assert reading.id == MAIN_MEMORY == DeviceId(LOCAL, -1)
        return reading.total / GIB, reading.used / GIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_page_cache_is_not_used_memory(machine: Machine) -> None:
    assert machine.host() == (16, 4)


def test_a_control_group_of_version_2_limits_the_host_without_its_reclaimable_cache(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/box/inner\n")
    machine.write("cgroup/box/inner/memory.max", "max\n")
    machine.write("cgroup/box/memory.max", f"{8 * GIB}\n")
    machine.write("cgroup/box/memory.current", f"{6 * GIB}\n")
    machine.write("cgroup/box/memory.stat", f"anon {3 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n")
    assert machine.host() == (8, 3)


def test_the_tightest_of_nested_groups_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/box/inner\n")
    machine.write("cgroup/box/memory.max", f"{8 * GIB}\n")
    machine.write("cgroup/box/memory.current", f"{7 * GIB}\n")  # other groups use it
    machine.write("cgroup/box/inner/memory.max", f"{6 * GIB}\n")
    machine.write("cgroup/box/inner/memory.current", f"{1 * GIB}\n")
    assert machine.host() == (6, 5)  # one GiB is left


def test_a_control_group_of_version_1_limits_the_host(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/box\n4:memory:/box\n0::/\n")
    machine.write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write("cgroup/memory/box/memory.limit_in_bytes", f"{4 * GIB}\n")
    machine.write("cgroup/memory/box/memory.usage_in_bytes", f"{3 * GIB}\n")
    stat = f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"
    machine.write("cgroup/memory/box/memory.stat", stat)
    assert machine.host() == (4, 1)


def test_a_container_that_sees_only_its_own_group_finds_it_at_the_root(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/../elsewhere\n")
    machine.write("elsewhere/memory.max", f"{GIB}\n")
    machine.write("cgroup/memory.max", f"{2 * GIB}\n")
    machine.write("cgroup/memory.current", f"{GIB}\n")
    assert machine.host() == (2, 1)


@pytest.mark.parametrize(
    ("outer", "inner", "cores"), [("150000 100000", "max 100000", 2), ("max 100000", "1000 100000", 1)]
)
def test_the_quota_of_a_control_group_limits_the_cores(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, outer: str, inner: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    machine.write("proc/self/cgroup", "0::/box/inner\n")
    assert usable_cores(proc=machine.proc, cgroup=machine.cgroup) == 8
    usable_cores.cache_clear()
    (machine.cgroup / "box/inner").mkdir(parents=True)
    machine.write("cgroup/box/cpu.max", f"{outer}\n")
    machine.write("cgroup/box/inner/cpu.max", f"{inner}\n")
    assert usable_cores(proc=machine.proc, cgroup=machine.cgroup) == cores


def test_a_limit_above_the_machine_changes_nothing(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.write("cgroup/memory.max", f"{64 * GIB}\n")
    machine.write("cgroup/memory.current", f"{GIB}\n")
    assert machine.host() == (16, 4)


def test_a_share_is_that_of_the_memory_of_its_device(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    devices = Devices({"CUDA_VISIBLE_DEVICES": ""}, proc=machine.proc, cgroup=machine.cgroup)
    assert devices.by_device({"cpu": DeviceShare(0.75)}, "--device-limit") == {MAIN_MEMORY: 12 * GIB}
    assert devices.by_device({"cpu": 5, "": 7}, "--device-limit") == {MAIN_MEMORY: 5}
    with pytest.raises(ConfigError, match="--device-limit: 'cuda:0' is no device of this machine"):
        devices.by_device({"cuda:0": DeviceShare(0.5)}, "--device-limit")


@pytest.mark.parametrize(("file", "count"), [("kfd", 1), ("dri", 0)], ids=["AMD", "a display"])
def test_an_unsupported_accelerator_is_named_and_not_used(tmp_path: Path, file: str, count: int) -> None:
    (tmp_path / file).touch()
    devices = Devices({"CUDA_VISIBLE_DEVICES": ""}, dev=tmp_path)
    note = "the AMD accelerator (/dev/kfd) is not supported by this version: it is not used"
    assert devices.notes.count(note) == count
    assert [reading.id for reading in devices.read()] == [MAIN_MEMORY]


def test_a_rise_of_the_counter_explains_a_kill_for_some_seconds() -> None:
    count = 3
    kills = OomKills(lambda: count)
    kills.sample(0.0)
    assert not kills.explains(-9, 1.0)
    count = 4
    assert kills.explains(-9, 2.0)
    assert kills.explains(-9, 5.0)
    assert not kills.explains(-15, 5.0), "only SIGKILL comes from the OOM killer"
    for second in range(6, 12):
        kills.sample(float(second))
    assert not kills.explains(-9, 12.0), "an old kill explains nothing"


def test_the_counter_of_the_own_control_group_takes_precedence(machine: Machine) -> None:
    proc, cgroup = machine.proc, machine.cgroup
    assert count_oom_kills(proc=proc, cgroup=cgroup) == 0
    machine.write("proc/vmstat", "nr_free_pages 5\noom_kill 9\n")
    assert count_oom_kills(proc=proc, cgroup=cgroup) == 9
    machine.write("proc/self/cgroup", "4:memory:/box\n1:cpu:/\n")
    machine.write("cgroup/memory/box/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert count_oom_kills(proc=proc, cgroup=cgroup) == 2
    machine.write("proc/self/cgroup", "0::/pod/box\n")
    machine.write("cgroup/memory.events", "oom 1\noom_kill 5\noom_group_kill 0\n")
    assert count_oom_kills(proc=proc, cgroup=cgroup) == 5
    machine.write("cgroup/pod/box/memory.events", "oom 1\noom_kill 1\n")
    assert count_oom_kills(proc=proc, cgroup=cgroup) == 1


def test_the_counter_of_this_kernel_is_readable() -> None:
    assert count_oom_kills() >= 0
