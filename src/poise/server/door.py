"""The ASGI app that stands at the port while the real one is being made.

Knows nothing of engines. Invariant: `/health` and `/ready` are answered from the first moment; whatever else comes early
waits until the app is there, so that a request sent at once is the first to be served.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from poise.server.http_errors import error_response, unavailable

LOADING = "loading"


class Door:
    """Hands over to `app` once it is opened."""

    def __init__(self) -> None:
        self.app: Starlette | None = None
        self._opened = asyncio.Event()

    def open(self, app: Starlette) -> None:
        """From now on `app` answers, also those who have been waiting."""
        self.app = app
        self._opened.set()

    def give_up(self) -> None:
        """There will be no app: those who wait are told so."""
        self._opened.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is None and scope.get("path") == "/health":
            await Response(b'{"status":"alive"}', media_type="application/json")(
                scope, receive, send
            )
            return
        if self.app is None and scope.get("path") != "/ready":
            await self._opened.wait()
        app: Any = self.app
        if app is None:
            app = await error_response(Request(scope), unavailable(LOADING))
        await app(scope, receive, send)
