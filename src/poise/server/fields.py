"""Reads values out of a request by name, with type checks that name the field.

Knows nothing of endpoints. Invariant: a value it hands out has exactly the type asked for (true is no integer, an
integer is a number).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from poise.errors import InvalidRequestError
from poise.server.http_errors import shown

MAX_MAGNITUDE = 2**64


class Fields:
    """The fields in use of one request."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> object:
        return self._values.get(name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise wrong_type(name, value, "true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        if name not in self._values:
            return None
        return check_integer(name, self._values[name], low, high)

    def integer_or(self, name: str, default: int, low: int, high: int) -> int:
        value = self.integer(name, low, high)
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        """A number; its range is `SamplingParams`' affair, except that it must fit a float."""
        value = self._values.get(name, default)
        return check_number(name, value)

    def string(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong_type(name, value, "a string")
        return value

    def strings(self, name: str, *, or_one: bool = False) -> tuple[str, ...]:
        value = self._values.get(name, [])
        if or_one and isinstance(value, str):
            return (value,)
        expected = "a string or a list of strings" if or_one else "a list of strings"
        if not isinstance(value, list):
            raise wrong_type(name, value, expected)
        for entry in value:
            if not isinstance(entry, str):
                raise wrong_type(name, entry, expected, holds=True)
        return tuple(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise wrong_type(name, value, "a list of token ids")
        check_token_ids(name, value, vocab_size)
        return tuple(value)

    def object(self, name: str) -> dict[str, object] | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise wrong_type(name, value, "an object")
        return value


def wrong_type(
    name: str, value: object, expected: str, *, holds: bool = False
) -> InvalidRequestError:
    """The error for a value of the wrong type."""
    verb = "holds" if holds else "is"
    return InvalidRequestError(f"{name} {verb} {shown(value)}, expected {expected}.", name)


def check_integer(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int:
        raise wrong_type(name, value, "an integer")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {shown(value)}, expected {low} to {high}.", name)
    return value


def check_number(name: str, value: object) -> float:
    if type(value) is not int and type(value) is not float:
        raise wrong_type(name, value, "a number")
    if abs(value) > MAX_MAGNITUDE:
        raise InvalidRequestError(f"{name} is {shown(value)}, far out of range.", name)
    return float(value)


def check_token_ids(name: str, ids: list[object], vocab_size: int) -> None:
    """Raises InvalidRequestError unless every entry is an integer within the vocabulary."""
    if not all(type(token) is int for token in ids):
        wrong = next(token for token in ids if type(token) is not int)
        raise wrong_type(name, wrong, "token ids (integers)", holds=True)
    numbers = cast("list[int]", ids)
    if numbers and not (min(numbers) >= 0 and max(numbers) < vocab_size):
        wrong = next(token for token in numbers if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"{name} holds token id {shown(wrong)}, the vocabulary is 0 to {vocab_size - 1}.", name
        )
