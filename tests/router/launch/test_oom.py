"""Whether the kernel killed for want of memory, from its counters."""

from pathlib import Path

from router.launch.devices import OomKills, count_oom_kills


def test_a_rise_explains_a_death_for_a_while() -> None:
    count = 3
    kills = OomKills(lambda: count)
    kills.sample(0.0)
    assert not kills.happened(1.0)
    count = 4
    assert kills.happened(2.0)
    assert kills.happened(5.0)
    for second in range(6, 12):
        kills.sample(float(second))
    assert not kills.happened(12.0), "an old kill explains nothing"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_its_own_groups_counter_goes_before_the_machines(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    assert count_oom_kills(proc=proc, cgroup=cgroup) == 0
    write(proc / "vmstat", "nr_free_pages 5\noom_kill 9\n")
    assert count_oom_kills(proc=proc, cgroup=cgroup) == 9
    write(proc / "self/cgroup", "4:memory:/box\n1:cpu:/\n")
    write(cgroup / "memory/box/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert count_oom_kills(proc=proc, cgroup=cgroup) == 2
    write(proc / "self/cgroup", "0::/pod/box\n")
    write(cgroup / "memory.events", "oom 1\noom_kill 5\noom_group_kill 0\n")
    assert count_oom_kills(proc=proc, cgroup=cgroup) == 5
    write(cgroup / "pod/box/memory.events", "oom 1\noom_kill 1\n")
    assert count_oom_kills(proc=proc, cgroup=cgroup) == 1


def test_this_kernel_can_be_asked() -> None:
    assert count_oom_kills() >= 0
