"""How much of the machine the steps use: modelled bytes and flops, and their shares of measured rates (MBU, MFU).

Knows no requests. Invariant: a share is given only against rates that were measured on this machine; else it is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from poise.core.output import WorkDone
from poise.executor.stored_rates import StoredRates


class Utilisation:
    """Turns the executor's work into metric families; shares are of the time in steps since the last scrape."""

    def __init__(self, work_done: Callable[[], WorkDone], rates: StoredRates | None) -> None:
        self._work_done = work_done
        self._rates = rates
        self._before = WorkDone(0, 0, 0.0)
        self._shares = (0.0, 0.0)

    def families(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        done = self._work_done()
        for name, documentation, value in (
            (
                "poise_modelled_read_bytes",
                "Bytes of weights and KV read, modelled.",
                done.read_bytes,
            ),
            ("poise_modelled_flops", "Multiplications and additions, modelled.", done.flops),
            ("poise_step_seconds", "Seconds spent in native steps.", done.seconds),
            (
                "poise_spared_keys",
                "Keys of shared prefixes that a request did not read for itself, by KV group and step.",
                done.spared_keys,
            ),
        ):
            counter = CounterMetricFamily(name, documentation, labels=list(labels))
            counter.add_metric(list(labels.values()), value)
            yield counter
        if self._rates is None:
            return
        seconds = done.seconds - self._before.seconds
        if seconds > 0:
            self._shares = (
                (done.read_bytes - self._before.read_bytes) / seconds / self._rates.read_bytes,
                (done.flops - self._before.flops) / seconds / self._rates.int8_operations,
            )
            self._before = done
        for name, documentation, share in zip(
            ("poise_mbu", "poise_mfu"),
            (
                "Share of the machine's measured read rate that steps used since the last scrape.",
                "Share of the machine's measured int8 rate that steps used since the last scrape.",
            ),
            self._shares,
        ):
            gauge = GaugeMetricFamily(name, documentation, labels=list(labels))
            gauge.add_metric(list(labels.values()), share)
            yield gauge
