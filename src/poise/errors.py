"""Typed errors that a user may see: one line, the offending value, a hint.

`assert` is for invariants of our own; everything a person or a file can get wrong is one of these.
"""

from __future__ import annotations


class PoiseError(Exception):
    """Base of all errors meant for users; `str(error)` is one line fit to print."""


class InvalidRequestError(PoiseError):
    """A request that can't be served as asked (HTTP 400). `param` names the field, `code` is OpenAI's machine-readable code."""

    status = 400

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFoundError(InvalidRequestError):
    """The named model is not served here (HTTP 404)."""

    status = 404


class ModelFileError(PoiseError):
    """A model file is damaged, truncated, hostile or unsupported; the message names file and field."""


class PullError(PoiseError):
    """A named model could not be fetched (network, disk, digest, licence)."""


class ConfigError(PoiseError):
    """A flag, environment variable or configuration file holds a wrong value."""


class EngineDeadError(PoiseError):
    """The engine loop has stopped after an internal failure; no request can be served (HTTP 503)."""


class QueueFullError(PoiseError):
    """Too much is waiting already (HTTP 429). `reason` is queued_requests or queued_tokens; after `retry_after_seconds`,
    by the predicted drain, there will be room.
    """

    def __init__(self, message: str, *, reason: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class DeadlineError(PoiseError):
    """The deadline has passed or, by prediction, can't be met. `reason` is deadline_passed, deadline_first_token or
    deadline_end; `retry_after_seconds` is 0 where waiting would not help.
    """

    def __init__(self, message: str, *, reason: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
