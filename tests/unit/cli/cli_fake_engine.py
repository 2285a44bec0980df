"""A small engine for the verbs: it answers every prompt with the same words, one per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from poise.engine.client import ChoiceDelta, EngineInfo, EngineRequest, RequestDelta, RequestStats
from poise.errors import InvalidRequestError

CONTEXT = 64


class FakeTokenizer:
    """One token per character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode(
            "".join(f"<{entry['role'][0]}>{entry['content']}" for entry in messages),
            add_special_tokens=False,
        )


class FakeEngine:
    """Says `words`; `on_step` may act (as a Ctrl-C does) before each of them."""

    def __init__(self) -> None:
        self.words = [" Paris", ",", " France"]
        self.finish_reason = "stop"
        self.on_step: Callable[[], None] = lambda: None
        self.info = EngineInfo("fake-model", CONTEXT, 256, 1000, "fp_test")
        self.tokenizer = FakeTokenizer()
        self.requests: list[EngineRequest] = []
        self.aborted: list[int] = []
        self.closed = False
        self._key = -1
        self._index = 0

    @property
    def prompts(self) -> list[str]:
        return ["".join(map(chr, request.prompt_token_ids)) for request in self.requests]

    def add_request(self, key: int, request: EngineRequest) -> None:
        if len(request.prompt_token_ids) >= CONTEXT:
            raise InvalidRequestError("the prompt is too long", "prompt")
        self.requests.append(request)
        self._key = key
        self._index = 0

    def step(self) -> list[tuple[int, RequestDelta]]:
        self.on_step()
        last = self._index == len(self.words) - 1
        choice = ChoiceDelta(
            index=0,
            text=self.words[self._index],
            token_ids=(self._index,),
            finish_reason=self.finish_reason if last else None,
        )
        self._index += 1
        stats = RequestStats(1, 0, self._index, 0.0, 0.0, 0.0) if last else None
        return [(self._key, RequestDelta("cli", (choice,), stats=stats))]

    def abort(self, key: int) -> None:
        self.aborted.append(key)

    def take_outputs(self) -> list[tuple[int, RequestDelta]]:
        return []

    def close(self) -> None:
        self.closed = True
