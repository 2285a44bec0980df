"""Reads a request body: byte limit while reading, then strict JSON.

Knows nothing of fields. Invariant: what it returns is a JSON object without NaN, infinities, duplicate names or lone
surrogates, so that every string in it can be encoded and every number compared.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import NoReturn

from starlette.requests import Request

from poise.errors import InvalidRequestError
from poise.server.http_errors import ClientGoneError, HTTPStatusError, shown

BODY_TIMEOUT_SECONDS = 60.0
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json_object(request: Request, max_bytes: int) -> dict[str, object]:
    """The request's JSON object. Raises HTTPStatusError 408, 413 or 415, InvalidRequestError, ClientGoneError."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Also a defence: a foreign web page can't send this type without asking first (CORS), and nobody answers that.
    if media_type != "application/json":
        raise HTTPStatusError(
            415,
            f"Content-Type is {shown(media_type)}, expected application/json.",
            "unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HTTPStatusError(
            415,
            f"Content-Encoding {shown(encoding)} isn't taken; send the body as it is.",
            "unsupported_encoding",
        )
    return parse_json_object(await _read_body(request, max_bytes))


async def _read_body(request: Request, max_bytes: int) -> bytes:
    too_large = HTTPStatusError(
        413,
        f"The body is larger than {max_bytes} bytes.",
        "body_too_large",
        {"Connection": "close"},
    )
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or len(declared) > 18 or int(declared) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > max_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise HTTPStatusError(
            408,
            f"The body didn't arrive within {BODY_TIMEOUT_SECONDS:g} s.",
            "body_timeout",
            {"Connection": "close"},
        ) from None


def parse_json_object(body: bytes) -> dict[str, object]:
    """Strict JSON; raises InvalidRequestError saying what and where."""
    if not body.strip():
        raise _invalid("The body is empty, expected a JSON object.")
    if body.startswith(b"\xef\xbb\xbf"):
        raise _invalid("The body starts with a byte order mark; send plain UTF-8.")
    try:
        value = _DECODER.decode(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _invalid(f"The body isn't valid UTF-8 at byte {error.start}.") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"The body isn't valid JSON: {error.msg} (character {error.pos}).") from None
    except RecursionError:
        raise _invalid("The body is nested too deeply.") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise _invalid("The body holds an integer of more than 4,300 digits.") from None
    if not isinstance(value, dict):
        raise _invalid(f"The body is {shown(value)}, expected a JSON object.")
    if _SURROGATE_ESCAPE.search(body):
        _refuse_lone_surrogates(value)
    return value


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="invalid_json")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidRequestError(
                    f"{shown(name)} stands twice in one JSON object.", code="invalid_json"
                )
            seen.add(name)
    return result


def _constant(name: str) -> NoReturn:
    raise _invalid(f"The body holds {name}, which isn't JSON; expected a finite number.")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _invalid(f"The body holds {shown(digits)}, a number too large to represent.")
    return value


def _refuse_lone_surrogates(body: dict[str, object]) -> None:
    for field, content in body.items():
        stack: list[object] = [field, content]
        while stack:
            value = stack.pop()
            if isinstance(value, str):
                try:
                    value.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise InvalidRequestError(
                        f"{field!a} holds a lone surrogate, {value[error.start]!a}, which is no text.",
                        ascii(field)[1:-1],
                        "invalid_json",
                    ) from None
            elif isinstance(value, list):
                stack.extend(value)
            elif isinstance(value, dict):
                stack.extend(value)
                stack.extend(value.values())


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite
)
