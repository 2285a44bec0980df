"""What people see of a run: a live line while it goes on, a table with units at its end, CSV for other tools.

Formats records, computes nothing. Invariant: a value that is not known prints as a dash, one whose sample is too small says so.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBar

from poise.bench.record import Distribution, Figure, Percentile, RunRecord, write_bytes
from poise.bench.runner import Progress

DASH = "–"
FIGURE_LABELS = {
    "duration": "duration",
    "request_throughput": "requests completed",
    "output_throughput": "output throughput",
    "prompt_throughput": "prompt throughput",
    "mean_in_flight": "mean in flight",
    "success_share": "answered share",
    "blocked_share": "held back by the limit",
    "cached_share": "cached prompt share",
    "goodput_share": "goodput share",
    "goodput": "goodput",
    "server_prefix_hits": "server: prefix hits",
    "server_preemptions": "server: preemptions",
    "server_running_mean": "server: running, mean",
    "server_waiting_peak": "server: waiting, peak",
    "server_kv_usage_peak": "server: KV used, peak",
}
DEFAULT_METRICS = (
    "ttft",
    "ttft_from_send",
    "tpot",
    "itl",
    "chunk_gap",
    "e2el",
    "e2el_from_send",
    "dispatch_lag",
)


class LiveSummary:
    """A progress bar on stderr while a run goes on; silent where stderr is no terminal."""

    def __init__(self, title: str, total: int) -> None:
        self._bar = ProgressBar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[summary]}"),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
        )
        self._bar.disable = not self._bar.console.is_terminal
        self._task: TaskID = self._bar.add_task(title, total=total, summary="warming up")

    def __enter__(self) -> LiveSummary:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, progress: Progress) -> None:
        if self._bar.disable:
            return
        rate = progress.output_tokens / progress.elapsed_s if progress.elapsed_s > 0 else 0.0
        parts = [
            f"{progress.elapsed_s:.0f} s",
            f"{progress.in_flight} in flight",
            f"{rate:.0f} tok/s",
        ]
        if progress.last_ttft_s is not None:
            parts.append(f"ttft {progress.last_ttft_s * 1e3:.0f} ms")
        if progress.failed:
            parts.append(f"{progress.failed} failed")
        self._bar.update(self._task, completed=progress.done, summary=", ".join(parts))
        self._bar.refresh()


def table(record: RunRecord, metrics: Sequence[str] = DEFAULT_METRICS) -> str:
    """The final report of a run, as lines of plain text."""
    return "\n".join(
        [*_head(record), "", *_figures(record), *_latencies(record, metrics), *_gates(record)]
    )


def _head(record: RunRecord) -> Iterator[str]:
    server, schedule = record.server, record.schedule
    named = "" if server.name == server.base_url else f" ({server.base_url})"
    yield f"{schedule.workload.get('name')} against {server.name}{named}, {server.model}, {server.endpoint}"
    yield (
        f"schedule {schedule.sha256[:12]}, seed {schedule.seed}, {schedule.num_requests} requests, "
        f"{arrivals_in_words(record)}, cache {record.client.cache}"
    )
    steady = record.summary.get("steady")
    span = f"{steady.begin:.2f} to {steady.end:.2f} s: " if steady else ""
    yield f"steady window: {span}{record.steady_note.removeprefix('no steady window: ') if not steady else record.steady_note}"


def arrivals_in_words(record: RunRecord) -> str:
    """`closed loop of 32`, `poisson at 4 req/s`; says so where the limit closed an open loop."""
    arrivals = record.schedule.arrivals
    if arrivals.get("process") == "closed":
        return f"closed loop of {arrivals['concurrency']}"
    words = f"{arrivals['process']} at {arrivals['rate']:g} req/s"
    if arrivals.get("process") == "gamma":
        words += f" (burstiness {arrivals['burstiness']:g})"
    if arrivals.get("max_concurrency"):
        words += f", at most {arrivals['max_concurrency']} in flight"
        blocked = record.figure("blocked_share")
        if blocked:
            words += f" (a closed loop for {blocked:.0%} of sends)"
    return words


def _figures(record: RunRecord) -> Iterator[str]:
    names = [name for name in FIGURE_LABELS if name in record.summary["full"].figures]
    windows = list(record.summary)
    yield f"{'':<24}" + "".join(f"{window:>28}" for window in windows)
    for name in names:
        cells = [figure_cell(record.summary[window].figures.get(name)) for window in windows]
        yield f"{FIGURE_LABELS[name]:<24}" + "".join(f"{cell:>28}" for cell in cells)
    statuses = record.summary["full"].statuses
    words = ", ".join(f"{number} {status}" for status, number in sorted(statuses.items()))
    yield f"{'requests':<24}{words:>28}"


def figure_cell(figure: Figure | None) -> str:
    """Value, unit and interval."""
    if figure is None or figure.value is None:
        return DASH
    text = f"{number(figure.value)} {figure.unit}".rstrip()
    if figure.low is not None and figure.high is not None:
        text += f" [{figure.low:.3f}, {figure.high:.3f}]"
    return text


def _latencies(record: RunRecord, metrics: Sequence[str]) -> Iterator[str]:
    for window, summary in record.summary.items():
        shown = {
            name: summary.distributions[name] for name in metrics if name in summary.distributions
        }
        known = [item for item in shown.values() if item.percentiles]
        if not known:
            continue
        percents = [item.percent for item in known[0].percentiles]
        kind = known[0].percentiles[0].hyndman_fan_type
        yield ""
        yield f"milliseconds, {window} window; percentiles of type {kind} with 95 % intervals"
        yield f"{'':<17}{'n':>7}{'mean':>10}" + "".join(f"{f'p{p:g}':>28}" for p in percents)
        for name, item in shown.items():
            cells = "".join(f"{percentile_cell(one, item):>28}" for one in item.percentiles)
            yield f"{name:<17}{item.n:>7}{milliseconds(item.mean):>10}{cells}{dependence(item)}"


def dependence(item: Distribution) -> str:
    """Says so where neighbours resemble each other so much that the intervals are too narrow."""
    if item.effective_n is None or item.effective_n > item.n / 2:
        return ""
    return f"  (correlated, worth n≈{item.effective_n:.0f})"


def percentile_cell(percentile: Percentile, whole: Distribution) -> str:
    """`12.3 [11.9, 13.0]`, or the value and `n<368` where the sample is too small for the interval."""
    if whole.n == 0:
        return DASH
    if percentile.value is None:
        return "failed"
    value = milliseconds(percentile.value)
    if percentile.low is None or percentile.high is None:
        needed = (percentile.note or "").rpartition(" of ")[2]
        return f"{value} n<{needed}" if needed else f"{value} (failures)"
    return f"{value} [{milliseconds(percentile.low)}, {milliseconds(percentile.high)}]"


def _gates(record: RunRecord) -> Iterator[str]:
    yield ""
    for gate in record.gates:
        yield f"{gate.verdict:<10}{gate.name:<22}{gate.reason}"
    yield "" if record.valid else "\nINVALID: " + verdict(record)


def verdict(record: RunRecord) -> str:
    """Why a run is invalid, in one line."""
    return "; ".join(f"{gate.name}: {gate.reason}" for gate in record.failed_gates)


def number(value: float) -> str:
    """Three or four figures."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}" if value else "0"


def milliseconds(seconds: float | None) -> str:
    return (
        DASH
        if seconds is None
        else f"{seconds * 1e3:.2f}"
        if seconds < 0.1
        else f"{seconds * 1e3:.1f}"
    )


def csv_text(record: RunRecord) -> str:
    """One line for each figure, mean and percentile of each window; seconds where the unit is s."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["window", "name", "statistic", "value", "low", "high", "unit", "n", "note"])
    for window, summary in record.summary.items():
        for name, figure in summary.figures.items():
            writer.writerow(
                [
                    window,
                    name,
                    "value",
                    figure.value,
                    figure.low,
                    figure.high,
                    figure.unit,
                    figure.n,
                    "",
                ]
            )
        for name, item in summary.distributions.items():
            writer.writerow([window, name, "mean", item.mean, None, None, item.unit, item.n, ""])
            for one in item.percentiles:
                row = [window, name, f"p{one.percent:g}", one.value, one.low, one.high]
                writer.writerow([*row, item.unit, item.n, one.note or ""])
    for gate in record.gates:
        writer.writerow(
            ["run", gate.name, "gate", gate.value, None, gate.limit, gate.unit, None, gate.verdict]
        )
    return out.getvalue()


def write_csv(record: RunRecord, path: Path) -> None:
    """Writes the CSV; RecordError where the disk refuses it."""
    write_bytes(path, csv_text(record).encode())
