"""Writes docs/BENCHMARKS.md from the records in docs/records/: `python benchmarks/benchmarks_page.py`.

Knows the records of benchmarks/peers.py (peers-*.json) and of `poise bench compare` (compare-*.json); `kernel_sections` knows
those of the kernels. Invariant: the page says nothing
that isn't in a record, and the same records give the same bytes; `--check` fails when the page is out of date.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import kernel_sections
from poise.bench.paired_runs import Comparison, read_comparison
from poise.bench.workloads import OPEN_PRESET, PRESETS
from records import RECORDS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "BENCHMARKS.md"

INTRODUCTION = """\
# Benchmarks

<!-- Written by benchmarks/benchmarks_page.py from docs/records/; change those. -->

Every figure here comes from a record in [records](records/), measured with `poise bench`; [MEASURING.md](MEASURING.md) says what each
name means and which mistakes are guarded against. Machines are noisy: compare figures within one table, never across tables.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a run, how it is called and shown."""

    name: str
    title: str
    scale: float = 1.0
    higher_is_better: bool = True


FIGURES = {
    "W1": Column("output_throughput", "W1 single-stream decode, output tok/s"),
    "W2": Column("prompt_throughput", "W2 prefill, prompt tok/s"),
    "W3": Column("output_throughput", "W3 mixed batch, output tok/s"),
    "W4": Column("output_throughput", "W4 shared prefix, output tok/s"),
    "W5": Column("output_throughput", "W5 batch decode, output tok/s"),
    OPEN_PRESET: Column("goodput_share", "W6 arrivals, share within the limits"),
}
LATENCIES = (
    Column("ttft_p50", "TTFT p50, ms", 1e3, higher_is_better=False),
    Column("tpot_p50", "TPOT p50, ms", 1e3, higher_is_better=False),
    Column("chunk_gap_p99", "chunk gap p99, ms", 1e3, higher_is_better=False),
)


def page(records: Path = RECORDS) -> str:
    """The whole page."""
    sections = [INTRODUCTION]
    peers = sorted(records.glob("peers-*.json"), reverse=True)
    comparisons = sorted(records.glob("compare-*.json"), reverse=True)
    if not peers and not comparisons:
        sections.append("There is no record yet.\n")
    sections += [peers_section(path) for path in peers]
    sections += kernel_sections.sections(records)
    sections += [comparison_section(path, read_comparison(path)) for path in comparisons]
    return "\n".join(sections)


def peers_section(path: Path) -> str:
    """poise and its peers on the six workloads."""
    record = msgspec.json.decode(path.read_bytes())
    names = list(dict.fromkeys(run["server"] for run in record["runs"]))
    facts = record["provenance"]
    lines = [
        f"## {record['model']}, {record['created'][:10]}",
        "",
        f"{facts['cpu']}, {facts['physical_cores']} cores, poise {facts['poise']}; record "
        f"[{path.name}](records/{path.name}). Cells: median (lowest–highest) of the runs.",
        "",
        *throughput_table(record["runs"], names),
        "",
        *latency_table(record["runs"], names),
        "",
        *workload_notes(record),
        "",
        "How each server was started:",
        "",
        *servers_list(record["servers"]),
    ]
    left_out = [
        f"- {run['workload']} on {run['server']}, repetition {run['repetition'] + 1}: "
        + "; ".join(run["reasons"])
        for run in record["runs"]
        if not run["valid"]
    ]
    if left_out:
        lines += ["", "Left out, because a gate failed:", "", *left_out]
    if record["stopped"]:
        lines += ["", f"The session ended early: {record['stopped']}"]
    return "\n".join(lines) + "\n"


def throughput_table(runs: Sequence[dict[str, Any]], names: Sequence[str]) -> Iterator[str]:
    """One row for each workload, and poise's ratio to the best of the others."""
    yield row(["", *names, "poise ÷ best peer"])
    yield row(["---"] * (len(names) + 2))
    for workload, column in FIGURES.items():
        found = {name: observed(runs, workload, name, column) for name in names}
        if not any(found.values()):
            continue
        cells = [cell(found[name], column) for name in names]
        yield row([column.title, *cells, ratio(found)])


def ratio(found: dict[str, list[float]]) -> str:
    """poise's median over the best other median."""
    others = [statistics.median(v) for name, v in found.items() if name != "poise" and v]
    if not found.get("poise") or not others or not max(others):
        return "–"
    return f"{statistics.median(found['poise']) / max(others):.2f}"


def latency_table(runs: Sequence[dict[str, Any]], names: Sequence[str]) -> Iterator[str]:
    """Latencies of each workload and server."""
    yield row(["", "server", *(column.title for column in LATENCIES)])
    yield row(["---"] * (len(LATENCIES) + 2))
    for workload in FIGURES:
        for name in names:
            found = [observed(runs, workload, name, column) for column in LATENCIES]
            if any(found):
                cells = (
                    cell(values, column) for values, column in zip(found, LATENCIES, strict=True)
                )
                yield row([workload, name, *cells])


def observed(
    runs: Iterable[dict[str, Any]], workload: str, server: str, column: Column
) -> list[float]:
    """The figure in every valid run that has it."""
    return [
        run["values"][column.name]
        for run in runs
        if run["valid"]
        and (run["workload"], run["server"]) == (workload, server)
        and run["values"].get(column.name) is not None
    ]


def cell(values: Sequence[float], column: Column) -> str:
    """Median (lowest–highest)."""
    if not values:
        return "–"
    median, low, high = (
        number(value * column.scale)
        for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({low}–{high})"


def number(value: float) -> str:
    """Three significant digits, no exponent."""
    if value == 0:
        return "0"
    for limit, decimals in ((100, 0), (10, 1), (1, 2)):
        if abs(value) >= limit:
            return f"{value:,.{decimals}f}"
    return f"{value:.3f}"


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def workload_notes(record: dict[str, Any]) -> Iterator[str]:
    """What the workloads are."""
    for preset in PRESETS.values():
        shared = f", of which {preset.prefix_tokens} shared" if preset.prefix_tokens else ""
        yield (
            f"- {preset.name}: {preset.num_requests} requests, {preset.concurrency} at a time, "
            f"{preset.prompt_tokens} prompt tokens{shared}, {preset.output_tokens} output tokens."
        )
    yield (
        f"- {OPEN_PRESET}: Poisson arrivals, {record['rate']:g} a second for {record['seconds']:g} s, "
        "32–2,048 prompt tokens, 16–256 output tokens; within the limits: TTFT ≤ 1 s from the planned "
        "instant and the request's chunk gap p95 ≤ 0.1 s."
    )


def servers_list(servers: dict[str, dict[str, Any]]) -> Iterator[str]:
    """How each was started."""
    for name, facts in servers.items():
        if "command" not in facts:
            yield f"- {name}: ran already."
            continue
        command = shlex.join(facts["command"])
        yield f"- {name}, ready after {facts['seconds_to_ready']:.1f} s: `{command}`"


def comparison_section(path: Path, comparison: Comparison) -> str:
    """Two servers, what was found."""
    facts = comparison.provenance
    state = "" if comparison.valid else " **Invalid:** " + "; ".join(comparison.reasons)
    lines = [
        f"## {comparison.b.name} (B) against {comparison.a.name} (A), {comparison.created[:10]}",
        "",
        f"Workload {comparison.workload['name']}, {len(comparison.pairs)} pairs after "
        f"{len(comparison.null_pairs)} of A against itself, on {facts.get('cpu', 'an unknown machine')}; "
        f"record [{path.name}](records/{path.name}).{state}",
        "",
        *(f"- {result.words}" for result in comparison.results),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes the page, or checks it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="only say whether the page is up to date"
    )
    arguments = parser.parse_args()
    written = page()
    if not arguments.check:
        PAGE.write_text(written, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") != written:
        print("docs/BENCHMARKS.md is out of date: run python benchmarks/benchmarks_page.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
