"""What the handlers of one server share, and whether it takes requests now.

Invariant: `num_answering` counts exactly the answers in the making; draining never turns back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from poise.config import ServerConfig
from poise.engine.client import EngineClient
from poise.engine.secret import LocalSecret
from poise.server.http_errors import unavailable
from poise.server.limits import Limiter
from poise.server.logprobs import TokenNames
from poise.server.ownership import Origin
from poise.server.prompts import PromptEncoder
from poise.server.public_prefix import PublicPrefix
from poise.server.request_book import RequestBook
from poise.server.request_log import RequestLog
from poise.server.tenants import Tenants
from poise.server.tokenizer_protocol import Tokenizer
from poise.server.usage import UsageLedger


class ServerState:
    """Everything a handler needs."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        config: ServerConfig,
        heartbeat_seconds: float,
        tenants: Tenants | None,
        public_prefix: PublicPrefix,
        secret: LocalSecret,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.config = config
        self.heartbeat_seconds = heartbeat_seconds
        self.token_names = TokenNames(tokenizer)
        self.prompts = PromptEncoder(tokenizer, client.info)
        self.request_log = RequestLog(config.log_format)
        self.tenants = tenants
        self.public_prefix = public_prefix
        self.secret = secret
        self.limiter = Limiter()
        self.requests = RequestBook()
        self.usage = UsageLedger()
        self.draining = False
        self.num_answering = 0

    def origin(self, request: Request) -> Origin:
        """Where an HTTP request that has just arrived comes from."""
        return Origin(
            caller=request.state.caller,
            headers=request.headers,
            arrival_time=time.monotonic(),
            secret=self.secret,
            public_prefix=self.public_prefix,
            policy=self.client.info.details["scheduling_policy"],
        )

    async def reload_tenants(self) -> None:
        """Reads the tenants file again; requests that run keep what they came in with."""
        if self.tenants is not None and await self.tenants.reload(self.client.set_tenants):
            self.limiter.forget(self.tenants.directory.callers)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Marks an answer in the making."""
        self.num_answering += 1
        try:
            yield
        finally:
            self.num_answering -= 1

    def not_ready_reason(self) -> str | None:
        """Why a request would be refused now; None if it would be served."""
        if self.draining:
            return "draining"
        status = self.client.status()
        if status.alive and status.ready:
            return None
        return status.reason or ("engine not ready" if status.alive else "engine failed")

    def check_ready(self) -> None:
        """Raises HTTPStatusError 503 with the reason unless a request would be served now."""
        reason = self.not_ready_reason()
        if reason is not None:
            raise unavailable(reason)
