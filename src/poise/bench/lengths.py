"""Laws from which prompt and output lengths are drawn, and the text form in which the command line names them.

Invariant: a draw is a positive whole number inside the law's bounds.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from poise.bench.record import RecordError
from poise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Constant:
    """Always `tokens`."""

    tokens: int

    def draw(self, random_source: random.Random) -> int:
        return self.tokens

    def describe(self) -> dict[str, Any]:
        return {"law": "constant", "tokens": self.tokens}


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, random_source: random.Random) -> int:
        return random_source.randint(self.low, self.high)

    def describe(self) -> dict[str, Any]:
        return {"law": "uniform", "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal around the geometric mean of its bounds, clipped to them; `sigma` is the deviation of the logarithm."""

    low: int
    high: int
    sigma: float = 0.7

    def draw(self, random_source: random.Random) -> int:
        median = math.log((self.low * self.high) ** 0.5)
        value = random_source.lognormvariate(median, self.sigma)
        return int(min(self.high, max(self.low, value)))

    def describe(self) -> dict[str, Any]:
        return {"law": "lognormal", "low": self.low, "high": self.high, "sigma": self.sigma}


@dataclass(frozen=True, slots=True)
class Empirical:
    """One of the lengths found in a file, each line equally likely."""

    lengths: tuple[int, ...]

    def draw(self, random_source: random.Random) -> int:
        return random_source.choice(self.lengths)

    def describe(self) -> dict[str, Any]:
        return {
            "law": "file",
            "num_lengths": len(self.lengths),
            "low": min(self.lengths),
            "high": max(self.lengths),
        }


Lengths = Constant | Uniform | LogNormal | Empirical


def parse_lengths(text: str, key: str) -> Lengths:
    """`256`, `uniform:32:512`, `lognormal:32:2048[:0.7]` or `file:PATH` (JSONL: numbers, or objects with `key`).

    Raises ConfigError naming the text; RecordError for a file that can't be read.
    """
    law, _, rest = text.partition(":")
    if law == "file":
        return Empirical(_read_lengths(Path(rest), key))
    numbers = rest.split(":") if rest else []
    try:
        if text.isdigit() and int(text) > 0:
            return Constant(int(text))
        if law == "constant" and len(numbers) == 1 and int(numbers[0]) > 0:
            return Constant(int(numbers[0]))
        if law in ("uniform", "lognormal") and len(numbers) in (2, 3):
            low, high = int(numbers[0]), int(numbers[1])
            if 0 < low <= high:
                if law == "uniform" and len(numbers) == 2:
                    return Uniform(low, high)
                if law == "lognormal":
                    sigma = float(numbers[2]) if len(numbers) == 3 else 0.7
                    if 0.0 <= sigma < 20.0:
                        return LogNormal(low, high, sigma)
    except ValueError:
        pass
    raise ConfigError(
        f"lengths {text!r}: use 256, uniform:LOW:HIGH, lognormal:LOW:HIGH[:SIGMA] or file:PATH"
    )


def ranged(tokens: int, range_ratio: float) -> Lengths:
    """vLLM's --random-range-ratio: uniform between tokens × (1 − ratio) and tokens × (1 + ratio)."""
    if not 0.0 <= range_ratio < 1.0:
        raise ConfigError(f"--random-range-ratio {range_ratio}: at least 0 and below 1")
    if tokens < 1:
        raise ConfigError(f"length {tokens}: at least 1 token")
    if range_ratio == 0.0:
        return Constant(tokens)
    low = max(1, math.floor(tokens * (1.0 - range_ratio)))
    return Uniform(low, math.ceil(tokens * (1.0 + range_ratio)))


def _read_lengths(path: Path, key: str) -> tuple[int, ...]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}") from None
    lengths = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
        except (msgspec.MsgspecError, ValueError) as error:
            raise RecordError(f"{path}:{number}: not JSON: {error}") from None
        length = value.get(key) if isinstance(value, dict) else value
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise RecordError(f"{path}:{number}: {key} {length!r} is not a positive whole number")
        lengths.append(length)
    if not lengths:
        raise RecordError(f"{path}: no lengths in it")
    return tuple(lengths)
