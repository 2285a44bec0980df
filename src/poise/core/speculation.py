"""What a request says about speculation: who drafts, how much, and what decides about a draft.

Plain data and its checks. Invariant: a `Speculation` that exists is one that the engine can follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, get_args

from poise.errors import InvalidRequestError

Method = Literal["ngram", "suffix", "draft_model", "self"]
Acceptance = Literal["coupled", "rejection"]
METHODS: Final[tuple[Method, ...]] = get_args(Method)
MAX_DRAFTS: Final = 32
"""Tokens that a request may draft in a step."""
OFF: Final = "off"


@dataclass(frozen=True, slots=True)
class Speculation:
    """Names are vLLM's where it has them.

    num_speculative_tokens: drafts in a step; with `adaptive` the most, and a controller chooses.
    acceptance: `coupled` gives the bytes of no speculation, `rejection` the same distribution.
    prompt_lookup_min, prompt_lookup_max: of ngram and suffix: the shortest match that drafts, and the longest
        that is looked for (0: any length).
    """

    method: Method = "ngram"
    num_speculative_tokens: int = 4
    acceptance: Acceptance = "coupled"
    adaptive: bool = True
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 0

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        _one_of("acceptance", self.acceptance, get_args(Acceptance))
        _integer("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)
        _integer("prompt_lookup_min", self.prompt_lookup_min, 1, 1024)
        _integer("prompt_lookup_max", self.prompt_lookup_max, 0, 1024)
        if not isinstance(self.adaptive, bool):
            _refuse("adaptive", self.adaptive, "true or false")
        if 0 < self.prompt_lookup_max < self.prompt_lookup_min:
            _refuse(
                "prompt_lookup_max",
                self.prompt_lookup_max,
                f"0 or at least prompt_lookup_min ({self.prompt_lookup_min})",
            )


@dataclass(frozen=True, slots=True)
class SpeculationOffer:
    """What an engine can do. `default` goes for requests that say nothing; None: they don't speculate."""

    default: Speculation | None = None
    methods: tuple[Method, ...] = ("ngram", "suffix")
    acceptances: tuple[Acceptance, ...] = ("coupled",)

    def resolve(self, given: Mapping[str, Any] | Literal[False] | None) -> Speculation | None:
        """As `resolve_speculation`, and refused where the engine can't."""
        speculation = resolve_speculation(given, self.default)
        if speculation is not None:
            for name, value, offered in (
                ("method", speculation.method, self.methods),
                ("acceptance", speculation.acceptance, self.acceptances),
            ):
                if value not in offered:
                    raise InvalidRequestError(
                        f"speculative.{name} is {value!r}, this engine "
                        f"offers {' and '.join(offered) or 'none'}",
                        "speculative",
                    )
        return speculation


FIELDS: Final = tuple(field.name for field in fields(Speculation))


def resolve_speculation(
    given: Mapping[str, Any] | Literal[False] | None, default: Speculation | None
) -> Speculation | None:
    """What a request gets: its own words over the server's; None is no speculation.

    `given` None takes the server's, False or the method "off" none. Raises InvalidRequestError naming `speculative`.
    """
    if given is None:
        return default
    if given is False:
        return None
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f"speculative is {given!r}, expected an object or false", "speculative"
        )
    for name in given:
        if name not in FIELDS:
            raise InvalidRequestError(
                f"speculative has no field {name!r}; it takes {', '.join(FIELDS)}", "speculative"
            )
    if given.get("method") == OFF:
        if len(given) > 1:
            raise InvalidRequestError(
                'speculative.method is "off", but other fields are given', "speculative"
            )
        return None
    if default is not None and given.get("method", default.method) == default.method:
        return replace(default, **given)
    if "method" not in given:
        raise InvalidRequestError(
            f"speculative names no method and the server has none; give one of {', '.join(METHODS)}",
            "speculative",
        )
    return Speculation(**given)


def _refuse(name: str, value: object, expected: str) -> None:
    raise InvalidRequestError(
        f"speculative.{name} is {value!r}, expected {expected}", "speculative"
    )


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        _refuse(name, value, f"one of {', '.join(choices)}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        _refuse(name, value, f"{low} to {high}")
