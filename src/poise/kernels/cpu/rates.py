"""The machine's own limits, measured by native probes: how fast memory is read, how fast products are done.

Knows no model. Invariant: a rate is the best of several short tries, so what disturbs the machine can only make it smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from poise.kernels.cpu import isa, native

TRIES = 5
AHEAD = (0, 3072)  # bytes of software prefetch; 0 leaves it to the hardware
ROUNDS = 1_000_000  # of some 800 operations: milliseconds
PRODUCTS = ("int8", "bf16", "f32")


@dataclass(frozen=True, slots=True)
class ReadRate:
    """Bytes per second of one way to read, and which way it was."""

    bytes_per_second: float
    threads: int
    huge_pages: bool
    prefetch_bytes: int


@dataclass(frozen=True, slots=True)
class MachineRates:
    """`products`: multiplications and additions per second on operands in registers, by kind, all threads together."""

    working_set_bytes: int
    reads: Sequence[ReadRate]
    products: dict[str, float]
    isa: str
    threads: int

    @property
    def read(self) -> ReadRate:
        """The fastest way."""
        return max(self.reads, key=lambda rate: rate.bytes_per_second)

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"read_bytes_per_second": self.read.bytes_per_second}


class RateProbe:
    """Buffers and pools kept between tries, so that probes can take turns with what they are compared to."""

    def __init__(self, working_set_bytes: int, threads: int) -> None:
        self._isa = isa()
        self._threads = threads
        self._pools = {count: native.Pool(count) for count in sorted({1, threads})}
        self._buffers = {
            huge: native.ProbeBuffer(working_set_bytes, huge) for huge in (False, True)
        }
        self._seconds: dict[tuple[int, bool, int], float] = {}
        self._products: dict[str, float] = {}

    def measure(self) -> None:
        """One try of everything; the best of all tries count."""
        for threads, pool in self._pools.items():
            for huge_pages, buffer in self._buffers.items():
                for ahead in AHEAD:
                    seconds = native.probe_read(pool, self._isa, buffer, ahead)
                    key = (threads, huge_pages, ahead)
                    self._seconds[key] = min(seconds, self._seconds.get(key, seconds))
        for kind in PRODUCTS:
            rate = native.probe_products(self._pools[self._threads], self._isa, kind, ROUNDS)
            self._products[kind] = max(rate, self._products.get(kind, 0.0))

    def rates(self) -> MachineRates:
        """The best of the tries so far; at least one must have been made."""
        size = self._buffers[True].nbytes
        reads = [
            ReadRate(size / seconds, threads, huge_pages, ahead)
            for (threads, huge_pages, ahead), seconds in self._seconds.items()
        ]
        return MachineRates(size, reads, dict(self._products), self._isa, self._threads)


def measure_rates(working_set_bytes: int, threads: int) -> MachineRates:
    """The rates of this machine over a working set of that many bytes."""
    probe = RateProbe(working_set_bytes, threads)
    for _ in range(TRIES):
        probe.measure()
    return probe.rates()
