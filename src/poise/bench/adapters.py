"""Other tools' results, read and held against the mock that they measured.

Knows the JSON that `vllm bench serve --save-result` writes. Invariant: a figure that the file does not have is reported as
missing, never taken from another figure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from poise.bench.conformance import (
    Comparison,
    compare_number,
    compare_statistic,
    span,
    whole,
)
from poise.bench.mock_server import Served
from poise.bench.record import RecordError

METRICS = ("ttft", "tpot", "itl", "e2el")
FIGURE = re.compile(rf"(mean|median|p[0-9.]+)_({'|'.join(METRICS)})_ms")


class VllmResult(msgspec.Struct, frozen=True):
    """What we read of vLLM's result. Fields of its file that are not named here are kept out."""

    duration: float
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    failed: int | None = None
    num_prompts: int | None = None
    figures_ms: dict[str, float] = {}
    """By its own names: mean_ttft_ms, p99_itl_ms …"""

    @property
    def num_requests(self) -> int:
        """Offered, as far as the file tells."""
        if self.num_prompts is not None:
            return self.num_prompts
        return self.completed + (self.failed or 0)


def read_vllm_result(path: Path) -> VllmResult:
    """The result in a file, the last one where `--append-result` left several. RecordError names file and field."""
    try:
        content = path.read_bytes().strip()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}") from None
    try:
        found = _last_object(content)
        figures = {
            name: value
            for name, value in found.items()
            if FIGURE.fullmatch(name) and isinstance(value, int | float)
        }
        return msgspec.convert(found | {"figures_ms": figures}, VllmResult)
    except msgspec.MsgspecError as error:
        raise RecordError(f"{path}: not a result of `vllm bench serve`: {error}") from None


def _last_object(content: bytes) -> dict[str, Any]:
    """A file of one JSON object in any layout, or of one on each line."""
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.DecodeError:
        return msgspec.json.decode(content.rpartition(b"\n")[2], type=dict[str, Any])


def score_vllm_result(result: VllmResult, served: Sequence[Served]) -> list[Comparison]:
    """Each figure of the result against what the mock did for the requests it measured.

    vLLM asks one request (more with --num-warmups) before it measures: the last `num_requests` of `served` count.
    """
    measured = list(served)[-result.num_requests :]
    if len(measured) < result.num_requests:
        raise RecordError(
            f"the mock remembers {len(measured)} requests, the result has {result.num_requests}"
        )
    complete = [one for one in measured if whole(one)]
    tokens = sum(one.completion_tokens for one in complete)
    seconds = span(measured)
    comparisons = [
        compare_number("completed requests", result.completed, len(complete), "", share=0),
        compare_number("output tokens", result.total_output_tokens, tokens, "", share=0),
        compare_number(
            "request throughput", result.request_throughput, len(complete) / seconds, "1/s"
        ),
        compare_number("output throughput", result.output_throughput, tokens / seconds, "1/s"),
    ]
    for name, value in result.figures_ms.items():
        match = FIGURE.fullmatch(name)
        assert match
        comparisons.append(compare_statistic(match[2], match[1], value / 1000, complete))
    present = {match[2] for name in result.figures_ms if (match := FIGURE.fullmatch(name))}
    comparisons += [
        Comparison(metric, None, None, "s", False, "not reported")
        for metric in METRICS
        if metric not in present
    ]
    return comparisons
