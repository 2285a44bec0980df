"""The machine's rates as last measured here, so that a server can say what share of them it uses without probing at start.

Kept in POISE_HOME. Invariant: rates of another processor, variant, number of threads or probe are not used.
"""

from __future__ import annotations

import msgspec

from poise.kernels.cpu.rates import MachineRates, measure_rates
from poise.machine import cpu_model
from poise.weights.cache import poise_home, write_atomically

__all__ = [
    "MachineRates",
    "StoredRates",
    "measure_and_store",
    "measure_rates",
    "store_rates",
    "stored_rates",
]

FILE = "machine-rates.json"
PROBE = 2  # another number where probes measure something else: what older ones found is forgotten


class StoredRates(msgspec.Struct, frozen=True):
    """Per second, on that machine with that many threads."""

    cpu: str | None
    isa: str
    threads: int
    read_bytes: float
    int8_operations: float
    probe: int = 0


def measure_and_store(working_set_bytes: int, threads: int) -> MachineRates:
    """Probes the machine and keeps what was found. Raises OSError where POISE_HOME can't be written."""
    rates = measure_rates(working_set_bytes, threads)
    store_rates(rates)
    return rates


def store_rates(rates: MachineRates) -> None:
    """Keeps the rates for later servers; a rate that was once higher stays: what disturbs a machine makes it smaller.

    Raises OSError where POISE_HOME can't be written.
    """
    before = stored_rates(rates.isa, rates.threads)
    stored = StoredRates(
        cpu_model(),
        rates.isa,
        rates.threads,
        max(rates.read.bytes_per_second, before.read_bytes if before else 0.0),
        max(rates.products["int8"], before.int8_operations if before else 0.0),
        PROBE,
    )
    poise_home().mkdir(parents=True, exist_ok=True)
    write_atomically(poise_home() / FILE, msgspec.json.encode(stored))


def stored_rates(isa: str, threads: int) -> StoredRates | None:
    """What was kept for this processor, variant, number of threads and probe; None if nothing fits."""
    try:
        stored = msgspec.json.decode((poise_home() / FILE).read_bytes(), type=StoredRates)
    except (OSError, msgspec.DecodeError):
        return None
    if (stored.cpu, stored.isa, stored.threads, stored.probe) != (cpu_model(), isa, threads, PROBE):
        return None
    return stored
