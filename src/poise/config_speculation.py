"""Speculative decoding as an engine is started with it: under vLLM's names, as one JSON object or as flags.

Knows `core.speculation`, which says what the fields mean. Invariant: a config that exists can be followed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from poise.config_flags import check, setting
from poise.config_values import integer, json_object, one_of, string
from poise.core.speculation import MAX_DRAFTS, METHODS, OFF, Speculation, resolve_speculation
from poise.errors import ConfigError, InvalidRequestError

_FLAGS = {
    "method": "--spec-method",
    "model": "--spec-model",
    "num_speculative_tokens": "--spec-tokens",
}


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """What requests get that say nothing, and the model that drafts, if one does."""

    config: str | None = setting(
        None, "speculative-config", json_object,
        'Speculative decoding as JSON, such as {"method": "ngram", "num_speculative_tokens": 4}; docs/SPECULATION.md lists the fields.',
        "off: answers are the same bytes, and the gain depends on the text",
    )  # fmt: skip
    method: str | None = setting(
        None, "spec-method", one_of(OFF, *METHODS),
        "Who drafts: ngram, suffix (both look into the request's own text), draft_model, self, or off.",
        "what speculative-config says; ngram where only spec-tokens is given",
    )  # fmt: skip
    model: str | None = setting(
        None, "spec-model", string,
        "The model that drafts, for draft_model: it must have the same vocabulary.",
        "what speculative-config says",
    )  # fmt: skip
    num_tokens: int | None = setting(
        None, "spec-tokens", integer(1, MAX_DRAFTS),
        "Most tokens that a request drafts in a step.",
        "what speculative-config says, or 4",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        if self.config is not None:
            given = {
                "method": self.method,
                "model": self.model,
                "num_speculative_tokens": self.num_tokens,
            }
            for name, value in given.items():
                if value is not None:
                    raise ConfigError(
                        f"{_FLAGS[name]} and --speculative-config: give one of them; "
                        f"the object has a field {name!r}"
                    )
        self._check_model()

    def _check_model(self) -> None:
        speculation = self.default
        method = None if speculation is None else speculation.method
        if method == "draft_model" and self.draft_model is None:
            raise ConfigError("speculation by draft_model needs a model: give --spec-model")
        if method != "draft_model" and self.draft_model is not None:
            raise ConfigError(
                f"--spec-model is {self.draft_model!r}, but nothing drafts with it: "
                "give --spec-method draft_model"
            )

    def _fields(self) -> dict[str, Any]:
        if self.config is not None:
            return dict(json.loads(self.config))
        given = {
            "method": self.method,
            "model": self.model,
            "num_speculative_tokens": self.num_tokens,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def draft_model(self) -> str | None:
        model = self._fields().get("model")
        if model is not None and not isinstance(model, str):
            raise ConfigError(f"speculative-config: model is {model!r}, expected a text")
        return model

    @property
    def default(self) -> Speculation | None:
        """For requests that say nothing; None: they don't speculate. Raises ConfigError."""
        given = self._fields()
        given.pop("model", None)
        if not given and self.draft_model is None:
            return None
        given.setdefault("method", "ngram" if self.draft_model is None else "draft_model")
        try:
            return resolve_speculation(given, None)
        except InvalidRequestError as error:
            message = str(error).replace("speculative", "speculative-config", 1)
            raise ConfigError(message) from None
