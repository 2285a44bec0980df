"""The figures of docs/SCHEDULING.md from a record of scheduling.py, as SVG.

python benchmarks/scheduling_figures.py docs/records/scheduling-….json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import msgspec

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "poise"  # the same record gives the same bytes
from matplotlib import pyplot  # noqa: E402

Figures = Mapping[str, Any]
SIZE = (7.0, 2.8)


def draw(figures: Mapping[str, Figures], folder: Path) -> Iterator[Path]:
    """One SVG for each part of the record."""
    for part, figure in (
        ("long-prompt", _long_prompt),
        ("tenants", _tenants),
        ("pressure", _pressure),
        ("flood", _flood),
    ):
        if part in figures:
            canvas, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
            figure(axes, figures[part])
            path = folder / f"scheduling-{part}.svg"
            canvas.savefig(path, metadata={"Date": None})
            pyplot.close(canvas)
            yield path


def _long_prompt(axes: Any, found: Figures) -> None:
    for name, label in (
        ("without", "no target"),
        ("with", f"--target-itl-ms {1e3 * found['target']:.0f}"),
    ):
        series = found[name]["series"]
        axes.plot([t for t, _ in series], [1000 * s for _, s in series], ".", label=label, ms=3)
    axes.axhline(1e3 * found["target"], color="grey", lw=0.8)
    axes.set(
        xlabel="seconds since the long prompt came", ylabel="gap of all streams, ms", yscale="log"
    )
    axes.set_title(
        f"{found['streams']} streams while {found['prompt_tokens']:,} prompt tokens are computed"
    )
    axes.legend()


def _tenants(axes: Any, found: Figures) -> None:
    for name in ("fcfs", "fair", "reserved", "solo"):
        series = found[name]["series"]
        axes.plot([t for t, _ in series], [w for _, w in series], ".-", label=name, ms=4, lw=0.8)
    axes.axhline(found["bound_p95"], color="grey", lw=0.8)
    axes.set(xlabel="arrival, s", ylabel="first token after, s", yscale="log")
    axes.set_title("a light tenant beside one that holds every slot")
    axes.legend()


def _pressure(axes: Any, found: Figures) -> None:
    names = ("ample", "half", "twentieth")
    axes.bar(
        [f"{found[n]['blocks']} blocks\n{found[n]['preemptions']} preemptions" for n in names],
        [found[n]["seconds"] for n in names],
        color="C0",
    )
    axes.set(ylabel="seconds for all")
    axes.set_title(f"{found['requests']} requests that need {found['need_blocks']} blocks")


def _flood(axes: Any, found: Figures) -> None:
    series = found["series"]
    axes.plot([t for t, _ in series], [r for _, r in series], ".", ms=2)
    axes.set(xlabel="seconds since the flood began", ylabel="Retry-After, s")
    axes.set_title(
        f"{found['refused']:,} of {found['requests']:,} refused; "
        f"{found['retries_succeeded']} of {found['retries']} retries let in"
    )


def main(command_line: Sequence[str] | None = None) -> int:
    """Draws what a record holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument(
        "--images", type=Path, default=Path(__file__).parents[1] / "docs" / "images"
    )
    arguments = parser.parse_args(command_line)
    record = msgspec.json.decode(arguments.record.read_bytes())
    for path in draw(record["figures"], arguments.images):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
