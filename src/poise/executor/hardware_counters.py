"""Hardware counters of this process through Linux's perf events, where the kernel permits.

Knows no model. Invariant: a counter that could not be opened for every thread is not reported at all.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from fcntl import ioctl
from pathlib import Path
from types import TracebackType

# Generalised hardware events (linux/perf_event.h, enum perf_hw_id).
EVENTS = {"cycles": 0, "instructions": 1, "cache references": 2, "cache misses": 3}
_SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}
_ENABLE = 0x2400
_EXCLUDE_KERNEL = 1 << 5
_DISABLED = 1
_ATTRIBUTE_BYTES = 112  # PERF_ATTR_SIZE_VER5


class HardwareCounters:
    """Counts events of all threads that exist when the context is entered.

    `refused` says why there are none; None while they count.
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        self._files: dict[str, list[int]] = {}

    def __enter__(self) -> HardwareCounters:
        number = _SYSTEM_CALLS.get(platform.machine())
        if sys.platform != "linux" or number is None:
            self.refused = "no perf events on this system"
            return self
        threads = [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
        for name, event in EVENTS.items():
            for thread in threads:
                file = _open(number, event, thread)
                if file < 0:
                    self._close()
                    self.refused = f"{name}: {os.strerror(ctypes.get_errno())}"
                    return self
                self._files.setdefault(name, []).append(file)
        for file in self._all():
            ioctl(file, _ENABLE, 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def read(self) -> dict[str, int]:
        """Counts so far, summed over threads; empty where refused."""
        return {
            name: sum(struct.unpack("q", os.read(file, 8))[0] for file in files)
            for name, files in self._files.items()
        }

    def _all(self) -> list[int]:
        return [file for files in self._files.values() for file in files]

    def _close(self) -> None:
        for file in self._all():
            os.close(file)
        self._files.clear()


def _open(system_call: int, event: int, thread: int) -> int:
    """A counter of one thread, not yet counting; negative with errno set where the kernel refuses."""
    attribute = struct.pack(
        "IIQQQQQ", 0, _ATTRIBUTE_BYTES, event, 0, 0, 0, _DISABLED | _EXCLUDE_KERNEL
    ).ljust(_ATTRIBUTE_BYTES, b"\0")
    library = ctypes.CDLL(None, use_errno=True)
    return int(library.syscall(system_call, attribute, thread, -1, -1, 0))
