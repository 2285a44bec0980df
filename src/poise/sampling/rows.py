"""Rows handed to the native sampler and results read back.

Owns what a request asks of the sampler in the native layout, prepared once; a step rewrites only what moved.
Does not know steps or batches. Invariant: whatever a row points at is kept alive by its SamplingState.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from poise.core.output import EngineSampling, TokenLogprobs
from poise.kernels.cpu import _native as native

Int32s = NDArray[np.int32]
Records = NDArray[np.void]

OK, NOT_FINITE, NO_CANDIDATE = 0, 1, 2  # SamplingStatus
NO_LOGPROBS = -1
NO_TARGET = -1
NO_DRAFT = -1


def _record_type(fields: Sequence[tuple[str, int, str]], itemsize: int) -> np.dtype[np.void]:
    names, offsets, formats = zip(*fields)
    return np.dtype(
        {
            "names": list(names),
            "offsets": list(offsets),
            "formats": list(formats),
            "itemsize": itemsize,
        }
    )


ROW_TYPE = _record_type(native.sampling_row_fields(), native.SAMPLING_ROW_BYTES)
RESULT_TYPE = _record_type(native.sampling_result_fields(), native.SAMPLING_RESULT_BYTES)
_ROW_BYTES = ROW_TYPE.itemsize
_OFFSETS = {name: offset for name, offset, _ in native.sampling_row_fields()}
_POSITION = _OFFSETS["position"]
_PROMPT_TOKENS = _OFFSETS["prompt_tokens"]
_OUTPUT_TOKENS = _OFFSETS["output_tokens"]
_NUM_OUTPUT_TOKENS = _OFFSETS["num_output_tokens"]
_BANNED_IDS = _OFFSETS["banned_ids"]
_NUM_BANNED = _OFFSETS["num_banned"]
_TARGET = _OFFSETS["target"]
_DRAFT = _OFFSETS["draft"]
_NUM_LOGPROBS = _OFFSETS["num_logprobs"]
_OUTCOME = struct.Struct(f"=ii{RESULT_TYPE.itemsize - 8}x")  # a result begins with these two
assert native.sampling_result_fields()[:2] == [("status", 0, "i4"), ("token_id", 4, "i4")]
_pack_u64 = struct.Struct("=Q").pack_into
_pack_u32 = struct.Struct("=I").pack_into
_pack_i32 = struct.Struct("=i").pack_into


class SamplingRows:
    """Room for the rows of one step. `records` is what the native side takes; rows are written whole."""

    def __init__(self, capacity: int) -> None:
        self.records: Records = np.zeros(capacity, ROW_TYPE)
        self._bytes = self.records.view(np.uint8).data

    def write(self, index: int, record: bytearray) -> None:
        """Makes `record` row `index`."""
        begin = index * _ROW_BYTES
        self._bytes[begin : begin + _ROW_BYTES] = record


class SamplingState:
    """What one choice of one request asks of the sampler.

    `num_prompt` is the length of the prompt; `vocab_size` the width of a row of logits. Where what is banned depends
    on the tokens before, each of a step's rows has a list of its own.
    """

    def __init__(self, sampling: EngineSampling, vocab_size: int, num_prompt: int) -> None:
        params = sampling.params
        self._num_prompt = num_prompt
        speculation = sampling.speculation
        self._rejects = speculation is not None and speculation.acceptance == "rejection"
        self._history: Int32s | None = None
        self._stop_ids = sorted(sampling.stop_token_ids)
        self._min_tokens = params.min_tokens if self._stop_ids else 0
        self._always_banned = [word[0] for word in sampling.bad_word_ids if len(word) == 1]
        self._phrases = [word for word in sampling.bad_word_ids if len(word) > 1]
        self._max_banned = len(self._stop_ids) + len(sampling.bad_word_ids)
        self._banned: list[Int32s] = [np.zeros(self._max_banned, dtype=np.int32)]
        self._has_penalties = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        bias = params.logit_bias or {}
        self._bias_ids: Int32s = np.fromiter(bias.keys(), np.int32, len(bias))
        self._bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self._allowed_mask = _bit_mask(params.allowed_token_ids, vocab_size)
        self._record = _record(
            seed=sampling.seed,
            choice=sampling.choice,
            temperature=0 if params.greedy else params.temperature,
            top_p=params.top_p,
            top_k=min(max(params.top_k, 0), vocab_size),
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            num_logprobs=NO_LOGPROBS if params.logprobs is None else params.logprobs,
            target=NO_TARGET,
            draft=NO_DRAFT,
            bias_ids=_address(self._bias_ids),
            bias_values=_address(self._bias_values),
            num_bias=len(bias),
            allowed_mask=0 if self._allowed_mask is None else _address(self._allowed_mask),
            banned_ids=_address(self._banned[0]),
            num_prompt_tokens=num_prompt,
        )
        self._ban(self._always_banned, 0)

    def fill(
        self,
        rows: SamplingRows,
        index: int,
        history: Int32s,
        num_known: int,
        place: int = 0,
        draft: int = NO_DRAFT,
    ) -> None:
        """Makes row `index` draw the token at absolute position `num_known`.

        history: the request's tokens, prompt first, at least `num_known` of them, drafts taken for known. The row
        points into it: it must stay where it is until the rows have been sampled. place: 0, 1 … for the
        request's rows of one step. draft: what stands at that position, of which only `rejection` wants to know.
        """
        record = self._record
        _pack_u32(record, _POSITION, num_known)
        if self._rejects:
            _pack_i32(record, _DRAFT, draft)
        if self._has_penalties:
            if history is not self._history:
                self._point_at(history)
            _pack_u32(record, _NUM_OUTPUT_TOKENS, num_known - self._num_prompt)
        if self._min_tokens or self._phrases:
            self._ban(self._banned_now(history, num_known), place)
        rows.write(index, record)

    def _point_at(self, history: Int32s) -> None:
        if history.dtype != np.int32 or not history.flags.c_contiguous:
            raise TypeError(f"history is {history.dtype}, expected contiguous int32")
        address = _address(history)
        _pack_u64(self._record, _PROMPT_TOKENS, address)
        _pack_u64(self._record, _OUTPUT_TOKENS, address + history.itemsize * self._num_prompt)
        self._history = history

    def _banned_now(self, history: Int32s, num_known: int) -> list[int]:
        banned = list(self._always_banned)
        if num_known - self._num_prompt < self._min_tokens:
            banned += self._stop_ids
        for phrase in self._phrases:
            begin = num_known - len(phrase) + 1
            if begin >= 0 and history[begin:num_known].tolist() == list(phrase[:-1]):
                banned.append(phrase[-1])
        return banned

    def _ban(self, ids: Sequence[int], place: int) -> None:
        while place >= len(self._banned):
            self._banned.append(np.zeros(self._max_banned, dtype=np.int32))
        self._banned[place][: len(ids)] = ids
        _pack_u64(self._record, _BANNED_IDS, _address(self._banned[place]))
        _pack_u32(self._record, _NUM_BANNED, len(ids))


def fill_target(rows: SamplingRows, index: int, token_id: int, num_logprobs: int) -> None:
    """Makes row `index` report `token_id` (log-probability, rank, the best `num_logprobs`) instead of drawing."""
    record = bytearray(_ROW_BYTES)
    _pack_u32(record, _TARGET, token_id)
    _pack_u32(record, _NUM_LOGPROBS, num_logprobs)
    rows.write(index, record)


def outcomes(result_view: memoryview) -> Iterable[tuple[int, int]]:
    """The status and the token of each of some records; −1 is the token of a broken row."""
    return _OUTCOME.iter_unpack(result_view)


def token_logprobs(results: Records, index: int) -> TokenLogprobs:
    """The log-probabilities of result `index`, whose row asked for them and is not broken."""
    _, token_id, logprob, rank, num_top, ids, values = results[index].item()
    top = tuple(zip(ids[:num_top].tolist(), values[:num_top].tolist()))
    return TokenLogprobs(token_id, logprob, rank, top)


def _record(**values: float) -> bytearray:
    """One row with these fields; the others are 0."""
    row = np.zeros(1, ROW_TYPE)
    row[0] = tuple(values.pop(name, 0) for name in _OFFSETS)
    assert not values, values
    return bytearray(row.tobytes())


def _bit_mask(ids: Sequence[int] | None, vocab_size: int) -> NDArray[np.uint32] | None:
    """Bit v % 32 of word v // 32 is set for each id v; None where `ids` is."""
    if ids is None:
        return None
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def _address(array: NDArray[np.generic]) -> int:
    return array.ctypes.data
