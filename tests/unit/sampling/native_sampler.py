"""Runs rows of the reference's shape through the native sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poise.kernels.cpu import _native as native
from poise.kernels.cpu import available_isas
from poise.sampling import reference, rows

ISAS = available_isas()


class Rows:
    """Native records of requests, with the arrays that they point at."""

    def __init__(self, requests: Sequence[reference.Row], vocab: int) -> None:
        self.records = np.zeros(len(requests), rows.ROW_TYPE)
        self._alive: list[NDArray[Any]] = []
        for record, row in zip(self.records, requests):
            self._fill(record, row, vocab)

    def _fill(self, record: Any, row: reference.Row, vocab: int) -> None:
        for name in (
            *("seed", "position", "choice", "temperature", "top_p", "top_k", "min_p"),
            *("repetition_penalty", "frequency_penalty", "presence_penalty"),
            *("num_logprobs", "target", "draft"),
        ):
            record[name] = getattr(row, name)
        for pointer, count, values in (
            ("prompt_tokens", "num_prompt_tokens", row.prompt),
            ("output_tokens", "num_output_tokens", row.output),
            ("bias_ids", "num_bias", list(row.bias)),
            ("banned_ids", "num_banned", row.banned),
        ):
            record[pointer] = self._address(values, np.int32)
            record[count] = len(values)
        record["bias_values"] = self._address(list(row.bias.values()), np.float32)
        if row.draft_probabilities is not None:
            record["draft_probabilities"] = self._address(row.draft_probabilities, np.float32)
        if row.allowed is not None:
            flags = np.zeros(-(-vocab // 32) * 32, bool)
            flags[list(row.allowed)] = True
            words = np.packbits(flags, bitorder="little").view("<u4")
            record["allowed_mask"] = self._address(words, np.uint32)

    def _address(self, values: Any, dtype: type) -> int:
        array = np.asarray(values, dtype)
        self._alive.append(array)
        return array.ctypes.data if array.size else 0

    def run(self, logits: NDArray[np.float32], isa: str) -> NDArray[np.void]:
        data = native.sample_rows(logits, self.records.view(np.uint8), isa)
        return np.frombuffer(data, rows.RESULT_TYPE)


def run_rows(
    logits: NDArray[np.float32], requests: Sequence[reference.Row], isa: str
) -> list[reference.Result]:
    """logits: [n, vocab], one request per row."""
    return [decode(result) for result in Rows(requests, logits.shape[1]).run(logits, isa)]


def decode(result: Any) -> reference.Result:
    n = int(result["num_top"])
    top = zip(result["top_ids"][:n].tolist(), result["top_logprobs"][:n])
    return reference.Result(
        int(result["status"]),
        int(result["token_id"]),
        result["logprob"],
        int(result["rank"]),
        tuple(top),
    )


def bits(result: reference.Result) -> tuple[Any, ...]:
    """A result in a form that compares every bit."""
    floats = np.array([result.logprob, *(value for _, value in result.top)], np.float32)
    ids = tuple(token for token, _ in result.top)
    return result.status, result.token_id, result.rank, ids, floats.tobytes()


def assert_same(
    logits: NDArray[np.float32], requests: Sequence[reference.Row], isas: Sequence[str] = ISAS
) -> list[reference.Result]:
    """Every variant must equal the reference in every bit; returns the reference's results."""
    expected = [reference.sample_row(z, row) for z, row in zip(logits, requests)]
    for isa in isas:
        actual = run_rows(logits, requests, isa)
        for i, (a, b) in enumerate(zip(actual, expected)):
            assert bits(a) == bits(b), f"{isa}: row {i} of {requests[i]}: {a}, expected {b}"
    return expected
