"""From drawn tokens to what one choice shows: text, stop strings, and the tokens and logprobs
behind them.

Knows nothing of the scheduler or of other choices. Invariant: joined deltas are the answer; the
token that completes a stop string is the last one that counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from poise.core.output import TokenLogprobs
from poise.core.sampling_params import SamplingParams
from poise.engine.client import ChoiceDelta
from poise.engine.detokenizer import Detokenizer, create_detokenizer
from poise.engine.stop_strings import StopChecker, StopMatch
from poise.tokenizer.tokenizer import Tokenizer


class ChoiceOutput:
    """Output state of one choice. After a delta with a finish reason it takes nothing more."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.finished = False
        self._params = params
        self._detokenizer: Detokenizer | None = None
        if params.detokenize:
            self._detokenizer = create_detokenizer(
                tokenizer, skip_special_tokens=params.skip_special_tokens
            )
        self._stop_checker = self._fresh_stop_checker() if params.stop else None
        self._held = ""  # the text that the stop checker holds back

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> ChoiceDelta:
        """The delta for newly drawn tokens. It may finish the choice where the caller did not: a
        stop string was found.
        """
        assert not self.finished, f"choice {self.index} has finished"
        text, num_taken, matched = self._advance(token_ids, finish_reason)
        self.num_tokens += num_taken
        if matched is not None:
            finish_reason, stop_reason = "stop", matched
        self.finished = finish_reason is not None
        return ChoiceDelta(
            index=self.index,
            text=text,
            token_ids=tuple(token_ids[:num_taken]),
            logprobs=None if logprobs is None else tuple(logprobs[:num_taken]),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def end(self, finish_reason: str, stop_reason: str | None) -> ChoiceDelta:
        """The last delta of a choice that is ended from outside: what was held back, and why."""
        return self.append((), None, finish_reason, stop_reason)

    def _advance(
        self, token_ids: Sequence[int], finish_reason: str | None
    ) -> tuple[str, int, str | None]:
        """(text that may be shown, tokens it took, stop string found)"""
        if self._detokenizer is None:
            return "", len(token_ids), None
        shown_ids = token_ids
        if finish_reason == "stop" and not self._params.include_stop_str_in_output:
            shown_ids = token_ids[
                :-1
            ]  # the token that ended the answer is reported, its text is not
        texts: list[str] = []
        if self._stop_checker is not None:
            for place, token_id in enumerate(shown_ids, start=1):
                text = self._detokenizer.append((token_id,))
                matched = self._show(text, self.num_tokens + place, texts)
                if matched is not None:
                    return "".join(texts), place, matched
        elif shown_ids:
            texts.append(self._detokenizer.append(shown_ids))
        if finish_reason is not None:
            texts += (self._held, self._detokenizer.flush())
        return "".join(texts), len(token_ids), None

    def _show(self, text: str, num_tokens: int, texts: list[str]) -> str | None:
        """Adds to `texts` what of `text` may be shown; returns the stop string that ends the answer
        here.
        """
        assert self._stop_checker is not None, "no stop strings were given"
        pending = self._held + text
        checked = self._stop_checker.feed(text)
        while isinstance(checked, StopMatch):
            if num_tokens > self._params.min_tokens:
                texts.append(checked.text)
                self._held = ""
                return checked.stop
            # Too early to stop: show the match's first character, look again from the next one.
            start = len(checked.text)
            if self._params.include_stop_str_in_output:
                start -= len(checked.stop)
            texts.append(pending[: start + 1])
            pending = pending[start + 1 :]
            self._stop_checker = self._fresh_stop_checker()
            checked = self._stop_checker.feed(pending)
        texts.append(checked)
        self._held = pending[len(checked) :]
        return None

    def _fresh_stop_checker(self) -> StopChecker:
        return StopChecker(self._params.stop, self._params.include_stop_str_in_output)
