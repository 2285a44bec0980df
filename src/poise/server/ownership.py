"""Whose a request is and how urgent: body fields, headers and caller become a `RequestOwner`.

Invariant: what a client says can make its request share less, go later than its tenant may ask, or end earlier; it never
makes it share more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poise.core.request import RequestOwner
from poise.core.tenant import SERVICE_CLASSES, ServiceClass
from poise.engine.secret import LocalSecret
from poise.errors import InvalidRequestError
from poise.server.callers import LEAST_URGENT, MOST_URGENT, Caller
from poise.server.fields import Fields, check_integer, check_number
from poise.server.http_errors import shown
from poise.server.public_prefix import PublicPrefix

DEADLINE_HEADER = "x-request-deadline-ms"
PRIORITY_HEADER = "x-vllm-priority"
PRIORITY_POLICY = "priority"
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
MAX_SALT_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from: the caller, its headers (names in lower case), the instant on the engine's clock, and
    what decides with whom it shares.
    """

    caller: Caller
    headers: Mapping[str, str]
    arrival_time: float
    secret: LocalSecret
    public_prefix: PublicPrefix
    policy: str  # of the scheduler

    def owner(self, fields: Fields) -> RequestOwner:
        """The owner of a request's prompts, without their public tokens. Raises InvalidRequestError."""
        deadline_ms = self._deadline_ms(fields)
        return RequestOwner(
            tenant=self.caller.name,
            service_class=self._service_class(fields),
            priority=self._priority(fields),
            deadline=None if deadline_ms is None else self.arrival_time + deadline_ms / 1000,
            cache_salt=self.secret.cache_salt(self.caller.tenant, _cache_salt(fields)),
        )

    def _service_class(self, fields: Fields) -> ServiceClass:
        asked = fields.string("service_class")
        if asked is not None and asked not in SERVICE_CLASSES:
            raise InvalidRequestError(
                f"service_class is {shown(asked)}, expected {' or '.join(SERVICE_CLASSES)}.",
                "service_class",
            )
        return asked or self.caller.service_class

    def _priority(self, fields: Fields) -> int:
        asked = fields.integer("priority", MOST_URGENT, LEAST_URGENT)
        header = self.headers.get(PRIORITY_HEADER)
        if header is not None:
            in_header = check_integer(PRIORITY_HEADER, _number(header), MOST_URGENT, LEAST_URGENT)
            _refuse_two("priority", asked, PRIORITY_HEADER, in_header)
            asked = in_header
        lowest = self.caller.min_priority
        if asked is None:
            return max(0, lowest)
        if asked != 0 and self.policy != PRIORITY_POLICY:
            raise InvalidRequestError(
                f"priority is {asked}, which changes nothing under this server's policy, {self.policy}; "
                f"leave it out, or start the server with --scheduling-policy {PRIORITY_POLICY}.",
                "priority",
                "unsupported_parameter",
            )
        if asked < lowest:
            raise InvalidRequestError(
                f"priority is {asked}, this key may ask for {lowest} at best (lower goes first).",
                "priority",
            )
        return asked

    def _deadline_ms(self, fields: Fields) -> float | None:
        asked = None
        if "deadline_ms" in fields:
            asked = _checked_deadline("deadline_ms", fields.get("deadline_ms"))
        header = self.headers.get(DEADLINE_HEADER)
        if header is not None:
            in_header = _checked_deadline(DEADLINE_HEADER, _number(header))
            _refuse_two("deadline_ms", asked, DEADLINE_HEADER, in_header)
            asked = in_header
        return asked


def _cache_salt(fields: Fields) -> str | None:
    salt = fields.string("cache_salt")
    if salt is not None and not 0 < len(salt) <= MAX_SALT_LENGTH:
        raise InvalidRequestError(
            f"cache_salt has {len(salt)} characters, expected 1 to {MAX_SALT_LENGTH}.", "cache_salt"
        )
    return salt


def _checked_deadline(name: str, value: object) -> float:
    number = check_number(name, value)
    if not 0 < number <= MAX_DEADLINE_MS:
        raise InvalidRequestError(
            f"{name} is {shown(value)}, expected milliseconds above 0, up to {MAX_DEADLINE_MS}.",
            name,
        )
    return number


def _number(text: str) -> object:
    """A header's number; the text itself where it is none, which the checks refuse."""
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return text


def _refuse_two(name: str, asked: float | None, header: str, in_header: float) -> None:
    if asked is not None and asked != in_header:
        raise InvalidRequestError(
            f"{name} is {asked:g} and the header {header} says {in_header:g}; send one of them.",
            name,
        )
