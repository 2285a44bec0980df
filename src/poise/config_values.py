"""How a flag's text, an environment variable or a TOML value becomes a checked value.

Knows types and ranges, not which setting they belong to. Each parser raises ValueError("expected …"); the caller names the place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from poise.machine import available_memory_bytes

SIZE_UNITS = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "kib": 1024,
    "m": 1000**2, "mb": 1000**2, "mib": 1024**2,
    "g": 1000**3, "gb": 1000**3, "gib": 1024**3,
    "t": 1000**4, "tb": 1000**4, "tib": 1024**4,
}  # fmt: skip
TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")

Parser = Callable[[object], Any]  # raises ValueError("expected …")


def integer(low: int, high: int = 2**31 - 1) -> Parser:
    """A whole number within [low, high]."""

    def parse(value: object) -> int:
        expected = f"expected a whole number from {low:,} to {high:,}"
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(expected)
        try:
            number = int(value)
        except ValueError:
            raise ValueError(expected) from None
        if not low <= number <= high:
            raise ValueError(expected)
        return number

    return parse


def one_of(*choices: Any) -> Parser:
    """One of the choices, numbers or words."""

    def parse(value: object) -> Any:
        for choice in choices:
            if not isinstance(value, bool) and str(value).strip() == str(choice):
                return choice
        raise ValueError("expected " + ", ".join(map(str, choices[:-1])) + f" or {choices[-1]}")

    return parse


def seconds(value: object) -> float:
    """A duration in seconds, up to a day."""
    return _number(value, 86_400, "expected seconds from 0 to 86,400")


def milliseconds(value: object) -> float:
    """A duration in milliseconds, up to a minute."""
    return _number(value, 60_000, "expected milliseconds from 0 to 60,000")


def fraction(value: object) -> float:
    """A part of a whole, below all of it."""
    return _number(value, 0.99, "expected a fraction from 0 to 0.99")


def _number(value: object, most: float, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(expected)
    try:
        number = float(value)
    except ValueError:
        raise ValueError(expected) from None
    if not 0 <= number <= most:
        raise ValueError(expected)
    return number


def size(value: object) -> int:
    """Bytes: a plain number, or one with a unit (MiB and GiB are binary, MB and GB decimal)."""
    expected = "expected bytes, or a size such as 256MiB or 2GiB"
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(expected)
    text = str(value).strip().replace("_", "")
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(digits) :].strip().lower()
    try:
        number = float(digits) if "." in digits else int(digits)
    except ValueError:
        raise ValueError(expected) from None
    if unit not in SIZE_UNITS or not 0 < number < 2**62:
        raise ValueError(expected)
    num_bytes = int(number * SIZE_UNITS[unit])
    if not 0 < num_bytes < 2**62:
        raise ValueError(expected)
    return num_bytes


def fraction_of_memory(value: object) -> int:
    """Bytes: that fraction of the memory which the machine and the cgroup still allow."""
    expected = "expected a fraction above 0 and at most 1"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(expected)
    try:
        fraction = float(value)
    except ValueError:
        raise ValueError(expected) from None
    if not 0 < fraction <= 1:
        raise ValueError(expected)
    available = available_memory_bytes()
    if available is None:
        raise ValueError("this system does not say how much memory is free")
    return int(available * fraction)


def load_format(value: object) -> str:
    """auto, or dummy with or without a container behind a colon, which whoever makes the weights checks."""
    text = value.strip() if isinstance(value, str) else ""
    if text not in ("auto", "dummy") and not text.startswith("dummy:"):
        raise ValueError("expected auto, dummy, or dummy:CONTAINER such as dummy:Q4_K_M")
    return text


def switch(value: object) -> bool:
    """On or off."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError("expected true or false")


def json_object(value: object) -> str:
    """An object, as JSON or as a TOML table; it becomes JSON with its keys in order."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"expected JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return json.dumps(value, sort_keys=True)


def words(value: object) -> tuple[str, ...]:
    """One or several strings: a list, or a text with commas between."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise ValueError("expected a string or a list of strings")
    cleaned = tuple(item.strip() for item in items)
    if not all(cleaned):
        raise ValueError("expected no empty string")
    return cleaned


def string(value: object) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("expected a text that is not empty")
    return value
