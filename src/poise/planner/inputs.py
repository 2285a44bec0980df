"""Checks what people ask the planner: a text or a number becomes a number in range, or a ConfigError that names it.

Knows ranges, not meanings. NaN, infinities, zero where it makes no sense and absurd sizes never reach a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from poise.config_values import size
from poise.errors import ConfigError

LARGEST_COUNT = 10**12
LARGEST_NUMBER = 1e18

Number = TypeVar("Number", int, float)


def whole(name: str, value: object, low: int = 1, high: int = LARGEST_COUNT) -> int:
    """A whole number within [low, high]; 7e9 and 2_048 are whole numbers too."""
    number = _number(value)
    if number is None or number != int(number) or not low <= number <= high:
        raise ConfigError(
            f"{name} is {value!r}: expected a whole number from {low:,} to {_short(high)}"
        )
    return int(number)


def positive(name: str, value: object, high: float = LARGEST_NUMBER) -> float:
    """A finite number above 0."""
    number = _number(value)
    if number is None or not 0 < number <= high:
        raise ConfigError(f"{name} is {value!r}: expected a number above 0, at most {_short(high)}")
    return float(number)


def between(name: str, value: object, low: float, high: float) -> float:
    """A finite number within [low, high]."""
    number = _number(value)
    if number is None or not low <= number <= high:
        raise ConfigError(
            f"{name} is {value!r}: expected a number from {_short(low)} to {_short(high)}"
        )
    return float(number)


def num_bytes(name: str, text: str) -> int:
    """256MiB, 14GB, or a plain number of bytes."""
    try:
        return size(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}: {error}") from None


def several(name: str, value: object, check: Callable[[str, object], Number]) -> list[Number]:
    """A list, or a text with commas between; an empty text is an empty list."""
    if isinstance(value, str):
        items: list[object] = list(value.split(",")) if value.strip() else []
    elif isinstance(value, Iterable):
        items = list(value)
    else:
        items = [value]
    return [check(name, item.strip() if isinstance(item, str) else item) for item in items]


def distribution(name: str, value: object) -> list[float]:
    """Probabilities that sum to 1 within 1e-6."""
    items = several(name, value, lambda part, item: between(f"{part} entry", item, 0, 1))
    total = math.fsum(items)
    if abs(total - 1) > 1e-6:
        raise ConfigError(f"{name} sums to {total:g}: probabilities sum to 1")
    return items


def _number(value: object) -> int | float | None:
    """The number that was meant; None if there is none, or one that is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, int):
        return value
    try:
        if isinstance(value, str) and value.strip().replace("_", "").lstrip("+-").isdecimal():
            return int(value)
        number = float(value)
    except ValueError:  # no number, or a whole one of more digits than Python reads
        return None
    return number if math.isfinite(number) else None


def _short(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) and number < 10**7 else f"{number:g}"
