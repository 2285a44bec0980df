"""The figure of docs/SPECULATION.md from a record of speculation.py, as SVG.

python benchmarks/speculation_figures.py docs/records/speculation-….json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "poise"  # the same record gives the same bytes
from matplotlib import pyplot  # noqa: E402

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LABELS = {"fixed": "4 drafts, fixed", "controller": "up to 7, by the controller"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--images", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    cases = json.loads(arguments.record.read_text())["parts"]["batches"]
    canvas, axes = pyplot.subplots(figsize=(7.0, 2.8), layout="constrained")
    for kind, label in LABELS.items():
        found = sorted(
            (int(name.split()[1]), case) for name, case in cases.items() if name.startswith(kind)
        )
        batches = [batch for batch, _ in found]
        middle = [case["speedup"] for _, case in found]
        below = [case["speedup"] - case["interval"][0] for _, case in found]
        above = [case["interval"][1] - case["speedup"] for _, case in found]
        axes.errorbar(batches, middle, (below, above), label=label, marker="o", ms=3, capsize=2)
    axes.axhline(1.0, color="grey", lw=0.8, label="off")
    axes.set(xlabel="requests at once", ylabel="speed-up over off", xscale="log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_title("Decoding repeats of a passage, ngram, smollm2-135m")
    axes.legend()
    path = arguments.images / "speculation-batches.svg"
    canvas.savefig(path, metadata={"Date": None})
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
