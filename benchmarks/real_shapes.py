"""Models of real sizes, as files of random weights that poise and llama.cpp both read: decode, prefill and memory side by side.

    python benchmarks/real_shapes.py llama-3.2-1b:Q4_K_M qwen3-4b:Q4_K_M --folder shapes

For each shape both servers are started, and the same requests (one at a time) go to each in turn, the order turned round from one
repetition to the next. Decode is 1 / TPOT, prefill the prompt's tokens / TTFT. The bound on decode is the bytes of the source file
that a token needs ÷ the rate at which this machine reads memory, probed between the runs; a share above one is a fault of the probe.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop
from msgspec.structs import replace

from make_gguf import FILE_TYPES, write
from poise.bench.arrivals import ClosedLoop
from poise.bench.client import Target
from poise.bench.contestants import Contestant, contestant
from poise.bench.lengths import Constant
from poise.bench.paired_runs import values
from poise.bench.record import write_bytes
from poise.bench.runner import RunSettings, provenance, run_schedule
from poise.bench.workloads import RandomTokens, draw_schedule
from poise.errors import ConfigError, PoiseError
from poise.kernels.cpu.rates import RateProbe
from poise.machine import default_threads
from poise.weights.checkpoint import Checkpoint
from poise.weights.dummy_checkpoint import dummy_checkpoint
from poise.weights.open_checkpoint import open_checkpoint
from poise.weights.pull import resolve_model
from records import RECORDS

SCHEMA = "poise.benchmarks.real-shapes/1"
SERVERS = ("poise", "llama.cpp")
KV_BYTES = 256 << 20
# One sequence of at most 2,048 tokens on both sides, so that neither spends memory on users who are not there.
LIMITS = {
    "poise": ("--max-model-len", "2048", "--kv-cache-memory-bytes", str(KV_BYTES)),
    "llama.cpp": ("-np", "1", "-c", "2048"),
}
PROBE_BYTES = 512 << 20  # a working set far above the caches; larger ones are read no faster


def gguf_file(shape: str, folder: Path) -> Path:
    """The file of "llama-3.2-1b:Q4_K_M", written first if it is not there."""
    name, _, container = shape.partition(":")
    path = folder / f"{name}-{container.lower()}.gguf"
    if container not in FILE_TYPES:
        raise ConfigError(f"{shape!r}: the container must be one of {', '.join(FILE_TYPES)}")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = open_checkpoint(resolve_model("smollm2-135m")).tokenizer.gguf
        partial = path.with_suffix(".partial")
        write(dummy_checkpoint(name, container), FILE_TYPES[container], tokenizer, partial)
        partial.rename(path)
    return path


def server(name: str, path: Path, threads: int) -> Contestant:
    """A server for one user of the file."""
    found = contestant(name, model=str(path), threads=threads, model_path=str)
    assert found.spec is not None
    found.spec = replace(
        found.spec, command=(*found.spec.command, *LIMITS[name]), ready_seconds=600.0
    )
    return found


def bytes_per_token(checkpoint: Checkpoint) -> int:
    """Bytes of the source file that one decoded token needs: all weights, of an untied embedding only a row."""
    total = checkpoint.weight_bytes()
    if checkpoint.config.tie_word_embeddings:
        return total
    return total - checkpoint.tensor("embed").data.nbytes


def memory_of_listener(url: str) -> dict[str, int]:
    """Resident bytes, now and at their peak, of the process that listens on this port."""
    port = urlsplit(url).port
    assert port is not None
    sockets = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[3] == "0A":
            sockets.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not any(str(link.readlink()) in sockets for link in (process / "fd").iterdir()):
                continue
            status = (process / "status").read_text()
        except OSError:
            continue
        found = dict(line.split(":", 1) for line in status.splitlines())
        return {
            "resident_bytes": int(found["VmRSS"].split()[0]) * 1024,
            "peak_resident_bytes": int(found["VmHWM"].split()[0]) * 1024,
        }
    raise PoiseError(f"no process listens on {url}")


def run(target: Target, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One request of random tokens, and what it says of decode and prefill (tokens/s)."""
    workload = RandomTokens(Constant(arguments.prompt), Constant(arguments.output_tokens))
    schedule = draw_schedule(workload, ClosedLoop(1), seed, num_requests=1)
    record, _ = uvloop.run(run_schedule(schedule, target, RunSettings(goodput_slos={})))
    figures = values(record)
    ttft, tpot = figures["ttft_mean"], figures["tpot_mean"]
    return {
        "server": target.name,
        "seed": seed,
        "prefill": None if not ttft else arguments.prompt / ttft,
        "decode": None if not tpot else 1 / tpot,
        "reasons": [gate.reason for gate in record.failed_gates],
    }


def measure(shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both servers on one shape."""
    path = gguf_file(shape, arguments.folder)
    checkpoint = open_checkpoint(path)
    needed = bytes_per_token(checkpoint)
    contestants = [server(name, path, arguments.threads) for name in arguments.servers]
    probe = RateProbe(min(needed, PROBE_BYTES), arguments.threads)
    runs: list[dict[str, Any]] = []
    memory = {}
    with ExitStack() as stack:
        targets = []
        for each in contestants:
            targets.append(stack.enter_context(each.running()))
        for repetition in range(arguments.repeat):
            for target in targets if repetition % 2 == 0 else reversed(targets):
                probe.measure()
                runs.append(run(target, arguments, arguments.seed + repetition))
        for each, target in zip(contestants, targets, strict=True):
            memory[each.name] = memory_of_listener(target.base_url)
    rates = probe.rates()
    rows = {
        name: summary(name, runs, memory, needed, rates.read.bytes_per_second)
        for name in arguments.servers
    }
    result = {
        "file_bytes": path.stat().st_size,
        "bytes_per_token": needed,
        "kv_cache_bytes": KV_BYTES,
        "prompt_tokens": arguments.prompt,
        "output_tokens": arguments.output_tokens,
        "servers": rows,
        "commands": {each.name: each.facts for each in contestants},
        "runs": runs,
        "machine": rates.as_dict(),
    }
    show(shape, result)
    return result


def summary(
    name: str, runs: Sequence[dict[str, Any]], memory: dict[str, Any], needed: int, rate: float
) -> dict[str, Any]:
    """Medians of a server's runs."""
    own = [each for each in runs if each["server"] == name and not each["reasons"]]
    middle = {
        key: sorted(each[key] for each in own)[len(own) // 2] if own else None
        for key in ("decode", "prefill")
    }
    share = middle["decode"] and middle["decode"] * needed / rate
    return {**middle, "roofline_share": share, **memory[name]}


def show(shape: str, result: dict[str, Any]) -> None:
    print(f"{shape}: file {result['file_bytes'] / 2**30:.2f} GiB")
    for name, row in result["servers"].items():
        if row["decode"] is None:
            print(f"    {name}: no run can be believed")
            continue
        print(
            f"    {name}: decode {row['decode']:.2f} tok/s ({row['roofline_share']:.0%} of the file-byte bound), "
            f"prefill {row['prefill']:.1f} tok/s, resident {row['resident_bytes'] / 2**30:.2f} GiB, "
            f"peak {row['peak_resident_bytes'] / 2**30:.2f} GiB",
            flush=True,
        )


def faults(record: dict[str, Any]) -> list[str]:
    """What makes the record invalid."""
    found = []
    for shape, result in record["shapes"].items():
        for name, row in result["servers"].items():
            if row["decode"] is None:
                found.append(f"{shape}, {name}: no run can be believed")
            elif row["roofline_share"] > 1:
                found.append(f"{shape}, {name}: decode beats the probe")
    return found


def main(command_line: Sequence[str] | None = None) -> int:
    """Measures, and writes the record whatever happens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", nargs="+", help="SHAPE:CONTAINER, such as llama-3.2-1b:Q4_K_M")
    parser.add_argument("--folder", type=Path, required=True, help="where the files are kept")
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=SERVERS)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--output", type=Path, help="default: docs/records/real-shapes-TIME.json")
    arguments = parser.parse_args(command_line)
    now = datetime.now(UTC)
    output = arguments.output or RECORDS / now.strftime("real-shapes-%Y%m%d-%H%M.json")
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "created": now.isoformat(timespec="seconds"),
        "threads": arguments.threads,
        "provenance": provenance(),
        "shapes": {},
    }
    try:
        for shape in arguments.shape:
            record["shapes"][shape] = measure(shape, arguments)
    except PoiseError as error:
        record["stopped"] = str(error)
        print(getattr(error, "log_tail", ""), file=sys.stderr)
    record["faults"] = faults(record)
    write_bytes(output, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    print(f"record: {output}")
    for fault in [*record["faults"], *([record["stopped"]] if "stopped" in record else [])]:
        print(f"real shapes: {fault}", file=sys.stderr)
    return 1 if record["faults"] or "stopped" in record else 0


if __name__ == "__main__":
    sys.exit(main())
