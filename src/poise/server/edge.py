"""The outermost layer around the app: request ids, the key, the last net for errors, for every path alike.

Invariant: without a right key nothing but the public paths answers, whatever the path looks like; every answer has
an X-Request-Id.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from poise.server.callers import ANYBODY, Caller
from poise.server.http_errors import HTTPStatusError, error_response

logger = logging.getLogger("poise.server")

PUBLIC_PATHS = frozenset({"/health", "/ready", "/metrics"})
OPERATOR_PATHS = frozenset({"/metrics", "/version", "/start_profile", "/stop_profile"})
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Edge:
    """ASGI middleware. Sets `scope["state"]["request_id"]` (ours), `["client_id"]` (theirs, or None) and `["caller"]`.

    `caller_of` tells whose a key is; None lets everybody in.
    """

    def __init__(self, app: ASGIApp, caller_of: Callable[[bytes], Caller | None] | None) -> None:
        self._app = app
        self._caller_of = caller_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        client_id = given if _REQUEST_ID.fullmatch(given) else None
        request_id = uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["client_id"] = None if client_id is None else client_id.decode("ascii")
        identified = _with_header(send, (b"x-request-id", client_id or request_id.encode()))
        state["caller"] = ANYBODY
        if self._caller_of is not None:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            caller = self._caller_of(key.strip()) if scheme.lower() == b"bearer" else None
            error = _refusal(caller, scope["path"])
            if error is not None:
                response = await error_response(Request(scope), error)
                await response(scope, receive, identified)
                return
            state["caller"] = caller or ANYBODY
        await self._guarded(scope, receive, identified)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The last net: an error of ours becomes a 500 in the usual shape, with the traceback in the log only."""
        started = False

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            logger.exception("request %s failed", scope["state"]["request_id"])
            if started:
                raise
            response = await error_response(Request(scope), error)
            await response(scope, receive, send)


def _refusal(caller: Caller | None, path: str) -> HTTPStatusError | None:
    """Why a path isn't for this caller (None: no right key); None if it is."""
    if caller is None and path not in PUBLIC_PATHS:
        return HTTPStatusError(
            401,
            "The API key is missing or wrong; send Authorization: Bearer KEY.",
            "invalid_api_key",
            {"WWW-Authenticate": "Bearer"},
        )
    for_operators = path in OPERATOR_PATHS
    if caller is not None and path not in PUBLIC_PATHS:
        if caller.is_operator and not for_operators:
            return HTTPStatusError(403, "An operator's key is for no requests.", "operator_key")
        if caller.tenant is not None and for_operators and path != "/version":
            return HTTPStatusError(403, "This takes an operator's key.", "not_an_operator")
    return None


def _with_header(
    send: Send, header: tuple[bytes, bytes]
) -> Callable[[MutableMapping[str, Any]], Awaitable[None]]:
    async def send_with_header(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), header]
        await send(message)

    return send_with_header
