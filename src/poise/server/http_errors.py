"""Errors of the HTTP layer and OpenAI's error shape.

Invariant: whatever went wrong, a client reads {"error": {message, type, param, code}}, short and free of paths and prompts.
"""

from __future__ import annotations

import logging
import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from poise.errors import (
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    PoiseError,
    QueueFullError,
)

logger = logging.getLogger("poise.server")

MAX_MESSAGE_LENGTH = 600
RETRY_AFTER_SECONDS = 1


class HTTPStatusError(PoiseError):
    """A request refused by the HTTP layer itself: too large, wrong media type, no key, not ready."""

    def __init__(
        self, status: int, message: str, code: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


class ClientGoneError(Exception):
    """The client hung up; there is nobody to answer."""


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    error: ErrorBody


def unavailable(reason: str) -> HTTPStatusError:
    """503 with the reason, for a server that loads, drains or has lost its engine."""
    return HTTPStatusError(
        503,
        f"The server can't take requests now: {reason}.",
        "not_ready",
        {"Retry-After": str(RETRY_AFTER_SECONDS)},
    )


def whole_seconds(seconds: float) -> str:
    """What Retry-After says: rounded up, at least 1."""
    return str(max(1, math.ceil(seconds)))


def shortened(text: str, limit: int = MAX_MESSAGE_LENGTH) -> str:
    """`text`, its middle cut out where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … {text[-half:]}"


def shown(value: object) -> str:
    """A value for an error message, in JSON's words where they differ from Python's, cut to a readable length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return shortened(repr(value), 80)


def printable(name: str) -> str:
    """A client's word, made fit for a header or a log line."""
    kept = "".join(
        char if (char.isascii() and char.isalnum()) or char in "_-." else "?" for char in name
    )
    return kept[:64]


def describe(error: Exception) -> tuple[int, ErrorBody]:
    """Status and body for an error; anything that isn't meant for users becomes a plain 500."""
    message = shortened(str(error))
    if isinstance(error, InvalidRequestError):
        kind = "not_found_error" if error.status == 404 else "invalid_request_error"
        return error.status, ErrorBody(message, kind, error.param, error.code)
    if isinstance(error, HTTPStatusError):
        kinds = {
            401: "authentication_error",
            403: "permission_error",
            429: "rate_limit_error",
            503: "service_unavailable",
        }
        kind = kinds.get(error.status, "invalid_request_error")
        return error.status, ErrorBody(message, kind, None, error.code)
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        body = ErrorBody(shortened(error.detail), "invalid_request_error", None, code)
        return error.status_code, body
    if isinstance(error, QueueFullError):
        return 429, ErrorBody(message, "rate_limit_error", None, error.reason)
    if isinstance(error, DeadlineError):
        # 429 where it pays to come back, else 422: this request can't be had as it is
        later = error.retry_after_seconds > 0
        kind = "rate_limit_error" if later else "invalid_request_error"
        return 429 if later else 422, ErrorBody(message, kind, "deadline_ms", error.reason)
    if isinstance(error, EngineDeadError):
        return 503, ErrorBody(message, "service_unavailable", None, "engine_dead")
    return 500, ErrorBody(
        "Internal error; the server's log has the details.", "server_error", None, "internal_error"
    )


def encode_error(body: ErrorBody) -> bytes:
    return msgspec.json.encode(ErrorEnvelope(body))


async def error_response(request: Request, error: Exception) -> Response:
    """The answer to a request that failed before its answer began."""
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)
    status, body = describe(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, HTTPException) and status in (404, 405):
        body.message = f"{request.method} {shortened(request.url.path, 200)}: {error.detail}."
    if isinstance(error, EngineDeadError):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if isinstance(error, (QueueFullError, DeadlineError)) and status == 429:
        headers["Retry-After"] = whole_seconds(error.retry_after_seconds)
    return Response(encode_error(body), status, headers, "application/json")
