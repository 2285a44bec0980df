"""`poise serve`: loads a model and answers OpenAI's API with it.

Owns the start: address first, then the model, then the lines that say what is served. Invariant: a port that is taken is
reported before anything is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from poise import __version__
from poise.cli.local_engine import load_engine
from poise.cli.options import model_argument, settings_options
from poise.cli.sizes import binary_size
from poise.config import (
    CacheConfig,
    ComputeConfig,
    ModelSource,
    SchedulerConfig,
    ServerConfig,
    Settings,
    SpeculationConfig,
)
from poise.core.tenant import NO_TENANTS

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from poise.engine.client import EngineInfo

CHAT_TOKENS = 2048  # what one chat is taken to hold, where the context allows it
TEXT_FORMATTER = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")


@click.command(
    "serve",
    epilog="Each flag has an environment twin (POISE_MAX_NUM_SEQS) and may stand in a TOML file (--config).",
)
@model_argument
@settings_options(
    ModelSource, CacheConfig, SchedulerConfig, ComputeConfig, SpeculationConfig, ServerConfig
)
@click.option("--explain", is_flag=True, help="Show each setting, its origin and reason, and stop.")
def command(settings: Settings, explain: bool) -> None:
    """Serve MODEL behind the OpenAI API."""
    if explain:
        from poise.cli.explain import explain as print_explanation

        print_explanation(settings)
        return
    serve(settings)


def serve(settings: Settings) -> None:
    """Serves until SIGTERM or Ctrl-C, which also end it cleanly while it is still starting."""
    signal.signal(signal.SIGTERM, _interrupt)  # until the server takes the signals
    with contextlib.suppress(KeyboardInterrupt):
        _serve(settings)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _serve(settings: Settings) -> None:
    from poise.engine.async_client import InProcessClient
    from poise.engine.secret import local_secret
    from poise.server.app import create_app
    from poise.server.public_prefix import (
        NOTHING_PUBLIC,
        encode_public_prefix,
        read_public_text,
    )
    from poise.server.run import bind_socket, run_server
    from poise.server.tenants import Tenants

    options = settings.server
    tenants = Tenants(Path(options.tenants)) if options.tenants else None
    public_text = read_public_text(Path(options.public_prefix)) if options.public_prefix else None
    bound = bind_socket(settings.server.host, settings.server.port)
    set_up_logging(settings.server.log_format)
    lines: list[str] = []

    async def make_app() -> Starlette:
        table = NO_TENANTS if tenants is None else tenants.directory.table
        engine = await asyncio.to_thread(load_engine, settings, table)
        public_prefix = NOTHING_PUBLIC
        if public_text is not None:
            public_prefix = encode_public_prefix(public_text, engine.tokenizer)
        lines.extend(start_lines(engine.info, settings, url_of(bound)))
        if tenants is not None:
            shared = public_prefix.num_tokens
            lines.insert(
                -2, f"{'tenants':<12} {len(tenants.directory.callers):,}, {shared:,} public tokens"
            )
        return create_app(
            InProcessClient.from_engine(engine),
            engine.tokenizer,
            settings.server,
            engine.metrics.registry,
            version=__version__,
            tenants=tenants,
            public_prefix=public_prefix,
            secret=local_secret(),
        )

    run_server(
        make_app,
        bound,
        shutdown_timeout=settings.server.shutdown_timeout,
        on_started=lambda: click.echo("\n".join(lines)),
        reloads=tenants is not None,
    )


def set_up_logging(log_format: str) -> None:
    """poise's loggers and warnings of others to stderr, one line each; JSON lines where asked for."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if log_format == "json" else TEXT_FORMATTER)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("poise").setLevel(logging.INFO)


class JSONFormatter(logging.Formatter):
    """Request lines are JSON already; other messages become an object with level and message."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name == "poise.requests":
            return message
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return json.dumps({"level": record.levelname.lower(), "message": message})


def url_of(bound: socket.socket) -> str:
    """An address that works on this machine, also where the server listens on every interface."""
    host, port = bound.getsockname()[:2]
    if host == "0.0.0.0":
        host = "127.0.0.1"
    elif ":" in host:
        host = "[::1]" if host == "::" else f"[{host}]"
    return f"http://{host}:{port}"


def start_lines(info: EngineInfo, settings: Settings, url: str) -> list[str]:
    """What a start prints: at most 12 lines, the last of which works when pasted."""
    details = info.details
    chat = min(CHAT_TOKENS, info.max_model_len)
    num_chats = info.kv_capacity_tokens // chat
    threads = int(details["threads"])
    rounding = ", bf16 activations" if settings.compute.activations == "bf16" else ""
    kept = ", int8" if settings.cache.kv_dtype == "int8" else ""
    lines = {
        "model": f"{info.model}, {details['format']}, {binary_size(int(details['weight_bytes']))}",
        "context": f"{info.max_model_len:,} tokens",
        "KV cache": f"{binary_size(int(details['kv_bytes']))} ({details['kv_reason']}){kept}",
        "": f"{info.kv_capacity_tokens:,} tokens: {num_chats:,} chats of {chat:,}",
        "compute": f"{threads} thread{'s' if threads != 1 else ''}, {details['isa']}{rounding}",
        "serving": f"{url}/v1",
    }
    return [f"{key:<12} {value}" for key, value in lines.items()] + [curl_line(info, settings, url)]


def curl_line(info: EngineInfo, settings: Settings, url: str) -> str:
    """A chat request in one line of shell."""
    body = json.dumps(
        {
            "model": info.model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 64,
        }
    ).replace("'", "'\\''")
    needs_key = settings.server.api_keys or settings.server.tenants
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
