"""Cores and memory read from made-up /proc, /sys and cgroup trees."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from poise import machine

GIB = 2**30

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="reads Linux's /proc and /sys")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def siblings(groups: list[str]) -> dict[str, str]:
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": group + "\n"
        for cpu, group in enumerate(groups)
    }


def test_hyperthreads_count_once(tmp_path: Path) -> None:
    write(tmp_path, siblings(["0,2", "1,3", "0,2", "1,3"]))
    assert machine.physical_cores(tmp_path, frozenset({0, 1, 2, 3})) == 2
    assert machine.physical_cores(tmp_path, frozenset({0, 2})) == 1
    assert machine.physical_cores(tmp_path, frozenset({0, 1})) == 2


def test_without_topology_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert machine.physical_cores(tmp_path, frozenset({0, 5})) == 2
    assert machine.default_threads(tmp_path, frozenset()) == 1


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1), ("", 8), ("nonsense", 8)],
)
def test_quota_of_cgroup_version_2(tmp_path: Path, quota: str, threads: int) -> None:
    write(
        tmp_path,
        {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": quota},
    )
    assert machine.default_threads(tmp_path, frozenset(range(8))) == threads


def test_a_parent_cgroup_limits_its_children(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
            "sys/fs/cgroup/a/cpu.max": "200000 100000",
        },
    )
    assert machine.cgroup_limits(tmp_path).cpus == 2.0


def test_quota_of_cgroup_version_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/box\n1:memory:/box\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
        },
    )
    assert machine.default_threads(tmp_path, frozenset(range(8))) == 2


def test_no_quota_in_cgroup_version_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert machine.cgroup_limits(tmp_path).cpus is None


MEMINFO = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"  # 16 and 8 GiB


def test_memory_without_cgroups(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert machine.total_memory_bytes(tmp_path) == 16 * GIB
    assert machine.available_memory_bytes(tmp_path) == 8 * GIB


def test_memory_limit_of_cgroup_version_2_leaves_out_reclaimable_file_pages(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/memory.max": str(4 * GIB),
            "sys/fs/cgroup/a/memory.current": str(3 * GIB),
            "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
        },
    )
    assert machine.available_memory_bytes(tmp_path) == 3 * GIB
    assert machine.cgroup_limits(tmp_path).memory_bytes == 4 * GIB


def test_memory_limit_of_cgroup_version_1_and_a_tighter_parent(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/a/b\n",
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": str(2**63 - 4096),
            "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "1",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": str(GIB),
        },
    )
    assert machine.available_memory_bytes(tmp_path) == GIB


def test_usage_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": str(GIB),
            "sys/fs/cgroup/memory.current": str(2 * GIB),
        },
    )
    assert machine.available_memory_bytes(tmp_path) == 0


def test_a_host_that_says_nothing(tmp_path: Path) -> None:
    assert machine.available_memory_bytes(tmp_path) is None
    assert machine.total_memory_bytes(tmp_path) is None
    assert machine.cgroup_limits(tmp_path) == machine.CgroupLimits()
    assert machine.cpu_model(tmp_path)


def test_this_host() -> None:
    assert 1 <= machine.default_threads() <= len(machine.allowed_cpus())
    available = machine.available_memory_bytes()
    assert available is None or available > 0


def test_the_processor_is_named_with_family_and_model(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    cpuinfo = tmp_path / "proc" / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\nmodel\t: 1\n"
    )
    assert machine.cpu_model(tmp_path) == "AMD EPYC (family 25, model 17)"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Cortex\n")
    assert machine.cpu_model(tmp_path) == "Cortex"
