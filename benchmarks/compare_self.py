"""Proves `poise bench compare` on this machine: poise against itself must agree, and a planted slow-down must be found.

    python benchmarks/compare_self.py --workload W5

Two comparisons: poise and poise, then poise and poise that is stopped for a tenth of the time (slowed.py). Both records go to
docs/records/. Exit status 0 where the first claims nothing and the second calls the throughput worse.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from poise.bench.paired_runs import read_comparison
from poise.bench.presets import find_spec
from poise.cli.main import run
from records import RECORDS

HERE = Path(__file__).parent


def slowed_server(folder: Path, share: float) -> str:
    """Describes poise behind slowed.py; returns the TOML's path."""
    spec = find_spec("poise")
    words = ["{python}", str(HERE / "slowed.py"), str(share), "--", *spec.command]
    path = folder / "poise-slowed.toml"
    path.write_text(
        f"command = {json.dumps(words)}\nmodel = {json.dumps(spec.model)}\n"
        f"ready_seconds = {spec.ready_seconds}\n"
    )
    return str(path)


def main() -> int:
    """Runs both comparisons and says what they found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workload", default="W5")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.1, help="of the time that B stands still")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records", type=Path, default=RECORDS)
    arguments = parser.parse_args()
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M")
    with tempfile.TemporaryDirectory() as folder:
        others = {"self": "poise", "slowed": slowed_server(Path(folder), arguments.share)}
        verdicts = {}
        for name, other in others.items():
            path = arguments.records / f"compare-{stamp}-{name}.json"
            number = str(arguments.pairs)
            options = ["--workload", arguments.workload, "--pairs", number, "--null-pairs", number]
            options += ["--seed", str(arguments.seed), "--output", str(path)]
            status = run(["bench", "compare", "poise", other, *options])
            if status:
                return status
            results = {result.metric: result for result in read_comparison(path).results}
            verdicts[name] = {metric: result.verdict for metric, result in results.items()}
    claims = [m for m, verdict in verdicts["self"].items() if verdict in ("better", "worse")]
    is_found = verdicts["slowed"]["output_throughput"] == "worse"
    print(f"poise against itself claims: {', '.join(claims) or 'nothing, as it should'}")
    print(f"the planted slow-down was {'found' if is_found else 'missed'}")
    return 1 if claims or not is_found else 0


if __name__ == "__main__":
    sys.exit(main())
