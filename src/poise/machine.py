"""Facts about the host this process runs on: cores, memory, limits, versions.

Reads /proc, /sys and the cgroup files with the standard library alone and degrades to what the platform offers (macOS has
none of them). Invariant: nothing here raises because a file is missing or odd; an unknown fact is None or left out.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from poise import __version__
from poise.errors import ConfigError

ROOT = Path("/")
REPORTED_PACKAGES = (
    "numpy",
    "tokenizers",
    "safetensors",
    "jinja2",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "msgspec",
    "prometheus-client",
    "click",
    "rich",
)


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The tightest limits on the way from this process's cgroup to the root; None where there is none."""

    cpus: float | None = None
    memory_bytes: int | None = None
    memory_left_bytes: int | None = None


def allowed_cpus() -> frozenset[int]:
    """Logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(root: Path = ROOT, cpus: frozenset[int] | None = None) -> int:
    """Physical cores among `cpus` (default: the affinity mask); hyperthreads of one core count once."""
    if cpus is None:
        cpus = allowed_cpus()
    if sys.platform == "darwin":
        return _sysctl("hw.physicalcpu") or max(1, len(cpus))
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(topology / "thread_siblings_list") or _read(topology / "core_cpus_list")
        cores.add(siblings or str(cpu))
    return max(1, len(cores))


def default_threads(root: Path = ROOT, cpus: frozenset[int] | None = None) -> int:
    """Worker threads that help: physical cores we may use, no more than the cgroup quota pays for; at least 1."""
    cores = physical_cores(root, cpus)
    quota = cgroup_limits(root).cpus
    return cores if quota is None else max(1, min(cores, int(quota)))


def total_memory_bytes(root: Path = ROOT) -> int | None:
    """Memory of the machine, whatever of it this process may use."""
    if sys.platform == "darwin":
        return _sysctl("hw.memsize")
    return _meminfo(root).get("MemTotal")


def available_memory_bytes(root: Path = ROOT) -> int | None:
    """Bytes that can still be allocated without swapping or meeting a cgroup limit; None if the host does not say."""
    free = (
        total_memory_bytes(root) if sys.platform == "darwin" else _meminfo(root).get("MemAvailable")
    )
    left = cgroup_limits(root).memory_left_bytes
    known = [value for value in (free, left) if value is not None]
    return min(known) if known else None


def cpu_model(root: Path = ROOT) -> str:
    """The processor's name as the system tells it, on x86 with family and model: virtual machines keep the name short."""
    first: dict[str, str] = {}
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        first.setdefault(key.strip(), value.strip())
    name = first.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in first and "model" in first:
        return f"{name} (family {first['cpu family']}, model {first['model']})"
    return name


def cgroup_limits(root: Path = ROOT) -> CgroupLimits:
    """Walks up the cgroup hierarchy, v1 and v2 alike: a parent's limit binds its children too."""
    cpus: list[float] = []
    memory: list[int] = []
    left: list[int] = []
    for directory in _cgroup_directories(root, "cpu"):
        quota = _cpu_quota(directory)
        if quota is not None:
            cpus.append(quota)
    total = total_memory_bytes(root)
    for directory in _cgroup_directories(root, "memory"):
        limit = _number(directory / "memory.max") or _number(directory / "memory.limit_in_bytes")
        if limit is None or (total is not None and limit > total):
            continue  # "max", or v1's "no limit", a number near 2**63
        memory.append(limit)
        left.append(max(0, limit - _memory_in_use(directory)))
    return CgroupLimits(min(cpus, default=None), min(memory, default=None), min(left, default=None))


def poise_version() -> str:
    """The build that runs."""
    return __version__


def environment_report() -> dict[str, object]:
    """What a bug report, a record and a fingerprint say of this installation and host."""
    limits = cgroup_limits()
    return {
        "poise": poise_version(),
        "isa": _isa(),
        "threads": default_threads(),
        "cpu": cpu_model(),
        "logical_cpus": len(allowed_cpus()),
        "physical_cores": physical_cores(),
        "cgroup_cpus": limits.cpus,
        "cgroup_memory_bytes": limits.memory_bytes,
        "memory_bytes": total_memory_bytes(),
        "available_memory_bytes": available_memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": _package_versions(),
        "models": _model_digests(),
    }


def _cgroup_directories(root: Path, controller: str) -> Iterator[Path]:
    """Every existing directory from this process's cgroup up to its mount, for one controller."""
    base = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2
            mounts = [base, base / "unified"]
        elif controller in controllers.split(","):
            mounts = [base / controllers, base / controller]
        else:
            continue
        mount = next((candidate for candidate in mounts if candidate.is_dir()), None)
        if mount is None:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for length in range(len(parts), -1, -1):
            directory = mount.joinpath(*parts[:length])
            if directory.is_dir():
                yield directory


def _cpu_quota(directory: Path) -> float | None:
    """CPUs' worth of time that a cgroup may use, if it is limited."""
    fields = (_read(directory / "cpu.max") or "").split()
    if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit():
        quota, period = int(fields[0]), int(fields[1])
    else:
        quota = _number(directory / "cpu.cfs_quota_us") or 0
        period = _number(directory / "cpu.cfs_period_us") or 0
    return quota / period if quota > 0 and period > 0 else None


def _memory_in_use(directory: Path) -> int:
    """Usage less the file pages that the kernel would drop first (a mapped model counts as usage otherwise)."""
    usage = _number(directory / "memory.current") or _number(directory / "memory.usage_in_bytes")
    reclaimable = 0
    for line in (_read(directory / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file") and value.isdigit():
            reclaimable = int(value)  # v1 prints total_… (with children) after its own
    return max(0, (usage or 0) - reclaimable)


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    values = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            values[key] = int(fields[0]) * (1024 if fields[1:] == ["kB"] else 1)
    return values


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None


def _sysctl(name: str) -> int | None:
    """A number from macOS's sysctl."""
    try:
        text = subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return int(text) if text.isdigit() else None


def _package_versions() -> dict[str, str]:
    from importlib import metadata

    versions = {}
    for name in REPORTED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions


def _isa() -> str:
    """The kernel variant in use, or why there is none: a bug report must be possible without kernels."""
    try:
        from poise.kernels.cpu import isa

        return isa()
    except ConfigError as error:
        return f"none: {error}"


def _model_digests() -> dict[str, str]:
    """sha256 of each named model in the cache."""
    from poise.weights.pull import list_models

    return {model.name: model.sha256 for model in list_models() if model.cached}
