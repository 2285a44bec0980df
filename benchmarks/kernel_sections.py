"""Sections of docs/BENCHMARKS.md for the records of kernels.py, roofline.py, foreign_load.py and real_shapes.py.

Knows those records' fields. Invariant: nothing is said that isn't in a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

ROWS = Callable[[dict[str, Any]], Iterator[str]]


def sections(records: Path) -> Iterator[str]:
    """All of them: of each kind and processor the latest record, of models every record with one that later ones lack."""
    for pattern, title, rows in KINDS:
        seen: set[tuple[str, str]] = set()
        for path in sorted(records.glob(pattern), reverse=True):
            record = msgspec.json.decode(path.read_bytes())
            cpu = record["provenance"]["cpu"]
            shows = {(cpu, shape) for shape in record.get("shapes", ("all",))}
            if not shows <= seen:
                yield section(path, title, rows)
            seen |= shows


def section(path: Path, title: str, rows: ROWS) -> str:
    record = msgspec.json.decode(path.read_bytes())
    facts = record["provenance"]
    faults = [*record.get("faults", ()), *record.get("broken", ())]
    if record.get("stopped"):
        faults.append(record["stopped"])
    return "\n".join(
        [
            f"## {title}, {record['created'][:10]}",
            "",
            f"{facts['cpu']}, {facts['physical_cores']} cores, {facts['isa']}; record [{path.name}](records/{path.name}).",
            "",
            *rows(record),
            *(["", "**Falls short:**", "", *(f"- {fault}" for fault in faults)] if faults else []),
            "",
        ]
    )


def line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def head(*titles: str) -> Iterator[str]:
    yield line(titles)
    yield line(["---"] * len(titles))


def machine(rates: dict[str, Any]) -> str:
    products = ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in rates["products"].items())
    return (
        f"{rates['read_bytes_per_second'] / 1e9:.1f} GB/s read ({rates['working_set_bytes'] / 2**20:.0f} MiB), "
        f"products {products} GOPS"
    )


def roofline_rows(record: dict[str, Any]) -> Iterator[str]:
    yield from head("how memory is read", "GB/s")
    for read in sorted(record["machine"]["reads"], key=lambda one: -one["bytes_per_second"]):
        pages = "huge pages" if read["huge_pages"] else "pages of 4 KiB"
        ahead = (
            f"prefetch {read['prefetch_bytes']} B ahead"
            if read["prefetch_bytes"]
            else "no prefetch"
        )
        workers = f"{read['threads']} worker{'s' if read['threads'] > 1 else ''}"
        yield line([f"{workers}, {pages}, {ahead}", f"{read['bytes_per_second'] / 1e9:.1f}"])
    decode = record["decode"]
    yield ""
    yield (
        f"This machine: {machine(record['machine'])}. A decode step of one sequence of {record['model']}, in turn with the probe: "
        f"{decode['seconds'] * 1e3:.2f} ms for {decode['read_bytes'] / 1e6:.0f} MB, {decode['share_of_reading']:.0%} of that reading."
    )


def kernels_rows(record: dict[str, Any]) -> Iterator[str]:
    yield (
        "Sum of parts: what the steps of a workload take on the kernels alone, without scheduler, HTTP or client. Share: what came over "
        "HTTP ÷ that, in the same minutes."
    )
    yield ""
    yield from head(
        "workload", "sum of parts, tok/s", "over HTTP, tok/s", "share", "the machine meanwhile"
    )
    for name, workload in record["workloads"].items():
        alone, served = (
            workload["sum_of_parts_tokens_per_second"],
            workload["over_http_tokens_per_second"],
        )
        yield line(
            [
                name,
                f"{alone:.1f}",
                "–" if served is None else f"{served:.1f}",
                "–" if served is None else f"{served / alone:.0%}",
                machine(workload["machine"]),
            ]
        )
    yield ""
    yield from head(
        "workload", "step", "ms", "operation", "ms", "GB/s read (share)", "GOPS (share of int8)"
    )
    for name, workload in record["workloads"].items():
        for part in workload["parts"]:
            for operation, sums in part["operations"].items():
                if sums["seconds"] < 0.02 * part["seconds"]:
                    continue
                share = part["shares"][operation]
                yield line(
                    [
                        name,
                        part["part"],
                        f"{part['seconds'] * 1e3:.2f}",
                        operation,
                        f"{sums['seconds'] * 1e3:.2f}",
                        f"{sums['read_bytes'] / sums['seconds'] / 1e9:.1f} ({share['read']:.0%})",
                        f"{sums['flops'] / sums['seconds'] / 1e9:.0f} ({share['int8']:.0%})",
                    ]
                )


def foreign_rows(record: dict[str, Any]) -> Iterator[str]:
    workers = list(record["rows"][0]["median_seconds"])
    yield "Median milliseconds of a decode step while another process takes a share of one core."
    yield ""
    yield from head("step", "share taken", *(f"{count} workers" for count in workers))
    for each in record["rows"]:
        milliseconds = (f"{each['median_seconds'][count] * 1e3:.2f}" for count in workers)
        yield line([each["part"], f"{each['foreign_share']:.0%}", *milliseconds])


def shapes_rows(record: dict[str, Any]) -> Iterator[str]:
    yield (
        "Random weights in the shape of known models, one file for both servers, one request at a time. The share is of the bound that the "
        "bytes of the source file set on decode at this machine's rate of reading; resident memory holds the KV cache."
    )
    yield ""
    yield from head(
        "shape", "file, GiB", "server", "decode, tok/s", "share of the bound", "prefill, tok/s",
        "resident, GiB", "peak, GiB",
    )  # fmt: skip
    for shape, result in record["shapes"].items():
        for name, each in result["servers"].items():
            if each["decode"] is None:
                yield line([shape, f"{result['file_bytes'] / 2**30:.2f}", name, *["–"] * 5])
                continue
            yield line(
                [
                    shape,
                    f"{result['file_bytes'] / 2**30:.2f}",
                    name,
                    f"{each['decode']:.2f}",
                    f"{each['roofline_share']:.0%}",
                    f"{each['prefill']:.1f}",
                    f"{each['resident_bytes'] / 2**30:.2f}",
                    f"{each['peak_resident_bytes'] / 2**30:.2f}",
                ]
            )


KINDS: tuple[tuple[str, str, ROWS], ...] = (
    ("roofline-*.json", "The machine's roofline", roofline_rows),
    ("kernels-*.json", "Kernels, and workloads beside the sum of their parts", kernels_rows),
    ("real-shapes-*.json", "Models of real sizes", shapes_rows),
    ("foreign-load-*.json", "Beside a foreign process", foreign_rows),
)
