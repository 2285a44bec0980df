"""What is asked: prompts and output lengths, drawn from a seed into a schedule.

Knows laws of lengths, prefix trees, files of prompts and the six reference workloads; knows no server and no tokenizer.
Invariant: with one seed and one description the schedule is the same on every machine; warm-ups are drawn after the measured
prompts and share nothing with them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol

from poise.bench.arrivals import Arrivals, ClosedLoop, OpenArrivals
from poise.bench.lengths import Constant, Lengths, LogNormal
from poise.bench.schedule import PlannedRequest, Prompt, Schedule
from poise.errors import ConfigError

Kind = Literal["completions", "chat"]
TOKEN_RANGE = (1000, 40000)  # ids that are words, not control tokens, in every vocabulary we meet
WARMUP_PROMPT_TOKENS = 64
WARMUP_OUTPUT_TOKENS = 8
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


class Workload(Protocol):
    """A source of requests without arrival times."""

    def requests(self, random_source: random.Random, kind: Kind) -> Iterator[PlannedRequest]:
        """Requests in order, as many as the workload has; endless where they are drawn."""

    def describe(self) -> dict[str, Any]:
        """The parameters, for the record."""


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Prompts of random token ids (chat: random words), each behind one shared prefix."""

    input_lengths: Lengths
    output_lengths: Lengths
    prefix_tokens: int = 0
    ignore_eos: bool = True
    token_range: tuple[int, int] = TOKEN_RANGE

    def requests(self, random_source: random.Random, kind: Kind) -> Iterator[PlannedRequest]:
        prefix = random_tokens(random_source, self.prefix_tokens, self.token_range)
        while True:
            length = self.input_lengths.draw(random_source)
            prompt = prefix + random_tokens(random_source, length, self.token_range)
            output = self.output_lengths.draw(random_source)
            yield planned(prompt, output, self.ignore_eos, kind)

    def describe(self) -> dict[str, Any]:
        return {
            "name": "random",
            "input_lengths": self.input_lengths.describe(),
            "output_lengths": self.output_lengths.describe(),
            "prefix_tokens": self.prefix_tokens,
            "ignore_eos": self.ignore_eos,
            "token_range": list(self.token_range),
        }


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """One level of a prefix tree: `tokens` of prefix in each of `fan_out` children, taken with the given shares."""

    tokens: int
    fan_out: int
    shares: tuple[float, ...] = ()

    def describe(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "fan_out": self.fan_out, "shares": list(self.shares)}


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Prompts that walk a tree of shared prefixes from its root and end in tokens of their own."""

    levels: tuple[TreeLevel, ...]
    input_lengths: Lengths
    output_lengths: Lengths
    ignore_eos: bool = True
    token_range: tuple[int, int] = TOKEN_RANGE

    def requests(self, random_source: random.Random, kind: Kind) -> Iterator[PlannedRequest]:
        nodes: dict[tuple[int, ...], list[int]] = {}
        while True:
            path: tuple[int, ...] = ()
            prompt: list[int] = []
            for level in self.levels:
                weights = level.shares or (1.0,) * level.fan_out
                path += tuple(random_source.choices(range(level.fan_out), weights))
                if path not in nodes:
                    nodes[path] = random_tokens(random_source, level.tokens, self.token_range)
                prompt += nodes[path]
            own = self.input_lengths.draw(random_source)
            prompt += random_tokens(random_source, own, self.token_range)
            output = self.output_lengths.draw(random_source)
            yield planned(prompt, output, self.ignore_eos, kind)

    def describe(self) -> dict[str, Any]:
        return {
            "name": "prefix_tree",
            "levels": [level.describe() for level in self.levels],
            "input_lengths": self.input_lengths.describe(),
            "output_lengths": self.output_lengths.describe(),
            "ignore_eos": self.ignore_eos,
            "token_range": list(self.token_range),
        }


def parse_prefix_tree(text: str) -> tuple[TreeLevel, ...]:
    """`512x1/256x4:0.7,0.1,0.1,0.1`: levels from the root, each TOKENSxFANOUT[:SHARES]; ConfigError names the level."""
    levels = []
    for part in text.split("/"):
        size, _, shares_text = part.partition(":")
        tokens, _, fan_out = size.partition("x")
        try:
            level = TreeLevel(
                int(tokens),
                int(fan_out),
                tuple(float(share) for share in shares_text.split(",")) if shares_text else (),
            )
        except ValueError:
            raise ConfigError(f"prefix tree level {part!r}: use TOKENSxFANOUT[:SHARES]") from None
        if level.tokens < 1 or level.fan_out < 1:
            raise ConfigError(
                f"prefix tree level {part!r}: tokens and fan-out must be positive, one child is x1"
            )
        if level.shares and (
            len(level.shares) != level.fan_out or min(level.shares) < 0 or sum(level.shares) <= 0
        ):
            raise ConfigError(
                f"prefix tree level {part!r}: {level.fan_out} children need as many shares"
            )
        levels.append(level)
    return tuple(levels)


@dataclass(frozen=True, slots=True)
class Preset:
    """A closed reference workload: requests, concurrency, prompt tokens, of which shared prefix, output tokens."""

    name: str
    num_requests: int
    concurrency: int
    prompt_tokens: int
    prefix_tokens: int
    output_tokens: int
    shows: str


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("W1", 3, 1, 128, 0, 128, "single-stream decode"),
        Preset("W2", 3, 1, 2048, 0, 1, "prefill"),
        Preset("W3", 32, 32, 256, 0, 128, "mixed batch"),
        Preset("W4", 32, 16, 1088, 1024, 64, "shared prefix, cold and simultaneous"),
        Preset("W5", 32, 32, 16, 0, 256, "batch decode"),
    )
}
OPEN_PRESET = "W6"
OPEN_PRESET_RATE = 1.0
OPEN_PRESET_SECONDS = 30.0
OPEN_PRESET_SLOS = {"ttft": 1.0, "chunk_gap_p95": 0.1}
PRESET_NAMES = (*PRESETS, OPEN_PRESET)


def preset_schedule(
    name: str,
    seed: int,
    kind: Kind = "completions",
    *,
    rate: float = OPEN_PRESET_RATE,
    seconds: float = OPEN_PRESET_SECONDS,
    token_range: tuple[int, int] = TOKEN_RANGE,
) -> Schedule:
    """One of the six reference workloads; `rate` and `seconds` are for W6, whose arrivals are open and Poisson."""
    random_source = random.Random(f"{seed}/{name}")
    if name == OPEN_PRESET:
        return _open_preset(seed, random_source, kind, rate, seconds, token_range)
    if name not in PRESETS:
        raise ConfigError(f"workload {name!r}: one of {', '.join(PRESET_NAMES)}")
    preset = PRESETS[name]
    workload = RandomTokens(
        Constant(preset.prompt_tokens - preset.prefix_tokens),
        Constant(preset.output_tokens),
        preset.prefix_tokens,
        token_range=token_range,
    )
    requests = list(islice(workload.requests(random_source, kind), preset.num_requests))
    return Schedule(
        kind,
        seed,
        {**workload.describe(), "name": name},
        ClosedLoop(preset.concurrency).describe(),
        requests,
        [warmup(random_source, kind, token_range)],
    )


def _open_preset(
    seed: int,
    random_source: random.Random,
    kind: Kind,
    rate: float,
    seconds: float,
    token_range: tuple[int, int],
) -> Schedule:
    """W6 draws the gap, the prompt and the output length of each request in turn, past the end of the window by one."""
    arrivals = OpenArrivals(rate)
    if seconds <= 0:
        raise ConfigError(f"--duration {seconds}: a positive number of seconds")
    workload = RandomTokens(LogNormal(32, 2048), LogNormal(16, 256), token_range=token_range)
    source = workload.requests(random_source, kind)
    requests: list[PlannedRequest] = []
    now = 0.0
    while now < seconds:
        now += arrivals.gap(random_source)
        requests.append(at(next(source), now))
    return Schedule(
        kind,
        seed,
        {**workload.describe(), "name": OPEN_PRESET, "seconds": seconds},
        arrivals.describe(),
        requests,
        [warmup(random_source, kind, token_range)],
    )


def draw_schedule(
    workload: Workload,
    arrivals: Arrivals,
    seed: int,
    kind: Kind = "completions",
    *,
    num_requests: int | None = None,
    seconds: float | None = None,
    num_warmups: int = 1,
    token_range: tuple[int, int] = TOKEN_RANGE,
) -> Schedule:
    """A schedule of `num_requests`, or of the arrivals before `seconds`; a file of prompts is begun again when it ends.

    Prompts and instants come from two generators, so that the same seed gives the same prompts under every arrival process.
    """
    prompts = workload.requests(random.Random(f"{seed}/prompts"), kind)
    requests: list[PlannedRequest] = []
    if isinstance(arrivals, ClosedLoop):
        if num_requests is None:
            raise ConfigError("a closed loop needs --num-prompts")
        requests = list(islice(prompts, num_requests))
    else:
        instants = arrivals.instants(random.Random(f"{seed}/arrivals"))
        for instant in instants:
            done = num_requests is not None and len(requests) >= num_requests
            if done or (seconds is not None and instant >= seconds):
                break
            if num_requests is None and seconds is None:
                raise ConfigError("an open schedule needs --num-prompts or --duration")
            requests.append(at(next(prompts), instant))
    if not requests:
        raise ConfigError("the schedule has no requests: raise --num-prompts, --duration or rate")
    warmup_source = random.Random(f"{seed}/warm-up")
    warmups = [warmup(warmup_source, kind, token_range) for _ in range(num_warmups)]
    return Schedule(kind, seed, workload.describe(), arrivals.describe(), requests, tuple(warmups))


def warmup(
    random_source: random.Random, kind: Kind, token_range: tuple[int, int] = TOKEN_RANGE
) -> PlannedRequest:
    """A short request of tokens of its own."""
    prompt = random_tokens(random_source, WARMUP_PROMPT_TOKENS, token_range)
    return planned(prompt, WARMUP_OUTPUT_TOKENS, True, kind)


def random_tokens(
    random_source: random.Random, count: int, token_range: tuple[int, int]
) -> list[int]:
    """Token ids, each from token_range[0] up to but not including token_range[1]."""
    low, high = token_range
    return [random_source.randrange(low, high) for _ in range(count)]


def planned(tokens: list[int], max_tokens: int, ignore_eos: bool, kind: Kind) -> PlannedRequest:
    """A request for token ids, which a chat endpoint gets as one made-up word for each of them."""
    if kind == "completions":
        return PlannedRequest(tokens, max_tokens, None, len(tokens), ignore_eos)
    message: Prompt = [{"role": "user", "content": " ".join(word(token) for token in tokens)}]
    return PlannedRequest(message, max_tokens, None, None, ignore_eos)


def word(number: int) -> str:
    """A pronounceable word for a number; different numbers have different words."""
    syllables: list[str] = []
    while number or not syllables:
        number, digit = divmod(number, len(SYLLABLES))
        syllables.append(SYLLABLES[digit])
    return "".join(syllables)


def at(request: PlannedRequest, instant: float) -> PlannedRequest:
    """The same request at an instant."""
    return PlannedRequest(
        request.prompt, request.max_tokens, instant, request.input_length, request.ignore_eos
    )
