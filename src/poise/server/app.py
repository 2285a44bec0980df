"""The routes. Each handler parses, asks, answers; what is shared lives in `ServerState`.

Invariant: every answer that isn't 2xx has OpenAI's error shape, whatever the path or method.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from poise.config import ServerConfig
from poise.engine.client import EngineClient
from poise.engine.secret import LocalSecret, fresh_secret
from poise.errors import InvalidRequestError, ModelNotFoundError, PoiseError
from poise.server.api_keys import is_one_of
from poise.server.callers import ANYBODY, Caller
from poise.server.edge import Edge
from poise.server.explanation import explain
from poise.server.fields import Fields
from poise.server.generation import Generation, Headers, warning_headers
from poise.server.http_errors import (
    ClientGoneError,
    describe,
    error_response,
    printable,
    shown,
)
from poise.server.json_body import read_json_object
from poise.server.parameters import DETOKENIZE_PARAMETERS, TOKENIZE_PARAMETERS, Parameter, sift
from poise.server.protocol import (
    Cancellation,
    DetokenizeAnswer,
    ModelCard,
    ModelList,
    PromptTimes,
    RequestAnswer,
    TokenizeAnswer,
    UsageAnswer,
)
from poise.server.public_prefix import NOTHING_PUBLIC, PublicPrefix
from poise.server.state import ServerState
from poise.server.tenants import Tenants
from poise.server.tokenizer_protocol import Tokenizer
from poise.server.valid_request import (
    ValidRequest,
    check_model,
    encode_chat,
    parse_chat,
    parse_completion,
)

logger = logging.getLogger("poise.server")


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    registry: CollectorRegistry,
    *,
    version: str,
    heartbeat_seconds: float = 5.0,
    tenants: Tenants | None = None,
    public_prefix: PublicPrefix = NOTHING_PUBLIC,
    secret: LocalSecret | None = None,
) -> Starlette:
    """The ASGI application over an engine. `registry` is what /metrics shows; `app.state.server` is the ServerState.

    Without `tenants` everybody whom `config.api_keys` lets in is one and the same. Salts are derived from `secret`, by
    default one that is drawn here.
    """
    state = ServerState(
        client,
        tokenizer,
        config,
        heartbeat_seconds,
        tenants,
        public_prefix,
        secret or fresh_secret(),
    )
    handlers = _Handlers(state, registry, version)
    app = Starlette(
        routes=[
            Route("/v1/completions", handlers.completions, methods=["POST"]),
            Route("/v1/chat/completions", handlers.chat_completions, methods=["POST"]),
            Route("/v1/models", handlers.models, methods=["GET"]),
            Route("/v1/models/{model:path}", handlers.model, methods=["GET"]),
            Route("/v1/requests/{request_id:path}/cancel", handlers.cancel, methods=["POST"]),
            Route("/v1/requests/{request_id:path}", handlers.request, methods=["GET"]),
            Route("/v1/usage", handlers.usage, methods=["GET"]),
            Route("/tokenize", handlers.tokenize, methods=["POST"]),
            Route("/detokenize", handlers.detokenize, methods=["POST"]),
            Route("/health", handlers.health, methods=["GET"]),
            Route("/ready", handlers.ready, methods=["GET"]),
            Route("/metrics", handlers.metrics, methods=["GET"]),
            Route("/version", handlers.version, methods=["GET"]),
            *(handlers.profiling_routes() if config.profiling else ()),
        ],
        middleware=[Middleware(Edge, caller_of=_caller_of(tenants, config.api_keys))],
        exception_handlers={
            PoiseError: error_response,
            ClientGoneError: error_response,
            HTTPException: error_response,
        },
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


def _caller_of(
    tenants: Tenants | None, api_keys: Sequence[str]
) -> Callable[[bytes], Caller | None] | None:
    """What tells whose a key is; None where no keys are asked for."""
    if tenants is not None:
        return tenants.caller_of
    known = [key.encode() for key in api_keys]
    return (lambda key: ANYBODY if is_one_of(key, known) else None) if known else None


class _Handlers:
    """One method per route."""

    def __init__(self, state: ServerState, registry: CollectorRegistry, version: str) -> None:
        self._state = state
        self._registry = registry
        self._version = version
        self._created = int(time.time())

    async def completions(self, request: Request) -> Generation:
        return await self._generation(request, chat=False)

    async def chat_completions(self, request: Request) -> Generation:
        return await self._generation(request, chat=True)

    async def _generation(self, request: Request, *, chat: bool) -> Generation:
        request_id = f"{'chatcmpl' if chat else 'cmpl'}-{request.state.request_id}"
        client_id: str | None = request.state.client_id
        state, origin = self._state, self._state.origin(request)
        parse = parse_chat if chat else parse_completion
        try:
            state.check_ready()
            with ExitStack() as until_answered:
                ticket = until_answered.enter_context(state.limiter.enter(origin.caller))
                valid: ValidRequest = await parse(
                    await self._body(request),
                    state.prompts,
                    state.client.info,
                    request_id,
                    origin,
                    lenient=state.config.lenient,
                )
                ticket.charge_prompt(valid.num_input_tokens)
                state.check_ready()
                until_answered.pop_all()  # the answer closes the ticket
        except PoiseError as error:
            status, described = describe(error)
            about = described.param or described.code
            about = None if about is None else printable(about)
            state.usage.refused(origin.caller.name)
            state.request_log.refused(request_id, client_id, status, about)
            raise
        _log_dropped(request_id, valid.dropped)
        return Generation(state, valid, ticket, chat=chat, client_id=client_id)

    async def cancel(self, request: Request) -> Response:
        """Ends the caller's requests of that id, in whatever state they are; those that have ended stay as they are."""
        name = request.path_params["request_id"]
        running = [
            booked
            for booked in self._state.requests.find(request.state.caller.name, name)
            if booked.running
        ]
        for booked in running:
            for engine_id in booked.engine_ids:
                self._state.client.cancel(engine_id)
        return _json(Cancellation(name, [booked.request_id for booked in running]))

    async def request(self, request: Request) -> Response:
        """What happened to the caller's request of that id (the latest one), and where its time went."""
        name = request.path_params["request_id"]
        booked = self._state.requests.find(request.state.caller.name, name)[-1]
        prompts = []
        for engine_id in booked.engine_ids:
            events = await self._state.client.timeline(engine_id)
            prompts.append(PromptTimes([asdict(times) for times in explain(events)], events))
        status = "running" if booked.running else "finished"
        return _json(RequestAnswer(booked.request_id, status, prompts))

    def profiling_routes(self) -> list[Route]:
        return [
            Route("/start_profile", self.start_profile, methods=["POST"]),
            Route("/stop_profile", self.stop_profile, methods=["POST"]),
        ]

    async def start_profile(self, request: Request) -> Response:
        await self._state.client.start_profile()
        return Response(status_code=200)

    async def stop_profile(self, request: Request) -> Response:
        return _json(await self._state.client.stop_profile())

    async def tokenize(self, request: Request) -> Response:
        with self._state.limiter.enter(request.state.caller):
            return await self._tokenize(request)

    async def _tokenize(self, request: Request) -> Response:
        fields, headers = await self._fields(request, TOKENIZE_PARAMETERS)
        info = self._state.client.info
        if "messages" in fields:
            prompt = await encode_chat(fields, self._state.prompts, check_length=False)
            ids = list(prompt.token_ids)
        else:
            text = fields.string("prompt")
            if text is None:
                raise InvalidRequestError("prompt is missing, expected a string.", "prompt")
            special = fields.boolean("add_special_tokens", True)
            ids = await self._state.prompts.text("prompt", text, add_special_tokens=special)
        names = None
        if fields.boolean("return_token_strs", False):
            names = [self._state.token_names.name(token, False) for token in ids]
        return _json(TokenizeAnswer(len(ids), info.max_model_len, ids, names), headers)

    async def detokenize(self, request: Request) -> Response:
        with self._state.limiter.enter(request.state.caller):
            return await self._detokenize(request)

    async def _detokenize(self, request: Request) -> Response:
        fields, headers = await self._fields(request, DETOKENIZE_PARAMETERS)
        ids = fields.token_ids("tokens", self._state.client.info.vocab_size)
        if ids is None:
            raise InvalidRequestError("tokens is missing, expected a list of token ids.", "tokens")
        text = self._state.tokenizer.decode(ids, skip_special_tokens=False)
        return _json(DetokenizeAnswer(text), headers)

    async def models(self, request: Request) -> Response:
        return _json(ModelList([self._card()]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._state.client.info.model:
            raise ModelNotFoundError(
                f"The model {shown(name)} doesn't exist here.", "model", "model_not_found"
            )
        return _json(self._card())

    async def health(self, request: Request) -> Response:
        return _json({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        self._state.check_ready()
        return _json({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        text = generate_latest(self._registry)
        if request.state.caller.is_operator:
            text += generate_latest(self._state.usage)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def usage(self, request: Request) -> Response:
        """What the caller has used since the server started."""
        name = request.state.caller.name
        return _json(UsageAnswer(name, **asdict(self._state.usage[name])))

    async def version(self, request: Request) -> Response:
        return _json({"version": self._version})

    async def _fields(
        self, request: Request, table: Mapping[str, Parameter]
    ) -> tuple[Fields, Headers]:
        """The sifted body of a request that needs no engine, and the headers its answer must carry."""
        body = await self._body(request)
        values, dropped = sift(body, table, lenient=self._state.config.lenient)
        _log_dropped(request.state.request_id, dropped)
        fields = Fields(values)
        check_model(fields, self._state.client.info)
        return fields, warning_headers(dropped)

    async def _body(self, request: Request) -> dict[str, object]:
        return await read_json_object(request, self._state.config.max_body_bytes)

    def _card(self) -> ModelCard:
        info = self._state.client.info
        return ModelCard(info.model, self._created, info.max_model_len)


def _log_dropped(request_id: str, dropped: Sequence[str]) -> None:
    for name in dropped:
        logger.warning("%s: unknown parameter %s dropped", request_id, printable(name))


def _json(value: Any, headers: Headers | None = None) -> Response:
    response = Response(msgspec.json.encode(value), media_type="application/json")
    response.raw_headers.extend(headers or ())
    return response
