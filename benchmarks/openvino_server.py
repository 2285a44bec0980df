"""OpenAI's /v1/completions in front of OpenVINO GenAI's ContinuousBatchingPipeline, so that it can be measured like any server.

Thin on purpose: one thread steps the pipeline, the event loop writes what each step brought; a chunk is what one step gave one
request. Runs in OpenVINO's own environment (`poise bench servers openvino --plan`), and knows nothing of poise. Prompts are token
ids or text; temperature, top_p, top_k, max_tokens, ignore_eos, seed, stream and stream_options are understood, the rest is a 400.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import itertools
import json
import queue
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

NO_EFFECT = {"model", "user"}
UNDERSTOOD = {"prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos"}
UNDERSTOOD |= {"stream", "stream_options"} | NO_EFFECT
NEUTRAL = {"n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0, "logprobs": None}

Piece = tuple[list[int], str | None]
"""Token ids of one step and, with the last of them, the finish reason."""


class Engine:
    """Owns the pipeline; only its thread touches it, except to cancel."""

    def __init__(self, pipeline: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._pipeline = pipeline
        self._loop = loop
        self._arrived: queue.SimpleQueue[tuple[list[int], Any, asyncio.Queue[Piece | Exception]]]
        self._arrived = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._running: dict[int, tuple[Any, asyncio.Queue[Piece | Exception]]] = {}
        self._cancelled: set[asyncio.Queue[Piece | Exception]] = set()
        threading.Thread(target=self._run, daemon=True).start()

    async def generate(self, ids: list[int], config: Any) -> AsyncIterator[Piece]:
        """Pieces until the finish reason; leaving early cancels."""
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._arrived.put((ids, config, pieces))
        finished = False
        try:
            while not finished:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    finished = True
                    raise piece
                finished = piece[1] is not None
                yield piece
        finally:
            if not finished:
                self._cancelled.add(pieces)

    def _run(self) -> None:
        while True:
            self._admit(wait=not self._running)
            try:
                self._pipeline.step()
                brought = self._collect()
            except Exception as error:  # the pipeline's errors have no common type
                brought = [(pieces, error) for _, pieces in self._running.values()]
                self._running.clear()
            if brought:
                self._loop.call_soon_threadsafe(_hand_out, brought)

    def _admit(self, *, wait: bool) -> None:
        while wait or not self._arrived.empty():
            ids, config, pieces = self._arrived.get()
            tensor = openvino.Tensor(np.array([ids], dtype=np.int64))
            number = next(self._numbers)
            try:
                handle = self._pipeline.add_request(number, tensor, config)
            except Exception as error:
                self._loop.call_soon_threadsafe(_hand_out, [(pieces, error)])
                continue
            self._running[number] = (handle, pieces)
            wait = False

    def _collect(self) -> list[tuple[asyncio.Queue[Piece | Exception], Piece | Exception]]:
        brought: list[tuple[asyncio.Queue[Piece | Exception], Piece | Exception]] = []
        for number, (handle, pieces) in list(self._running.items()):
            if pieces in self._cancelled:
                self._cancelled.discard(pieces)
                handle.cancel()
                del self._running[number]
                continue
            ids: list[int] = []
            reason = None
            while handle.can_read():
                for output in handle.read().values():
                    ids += output.generated_ids
                    reason = _finish_reason(output.finish_reason) or reason
            if reason is None and handle.get_status() == genai.GenerationStatus.IGNORED:
                brought.append((pieces, RuntimeError("the KV cache can't hold this request")))
                del self._running[number]
                continue
            if reason:
                del self._running[number]
            if ids or reason:
                brought.append((pieces, (ids, reason)))
        return brought


def _hand_out(
    brought: list[tuple[asyncio.Queue[Piece | Exception], Piece | Exception]],
) -> None:
    for pieces, piece in brought:
        pieces.put_nowait(piece)


def _finish_reason(reason: Any) -> str | None:
    names = {
        genai.GenerationFinishReason.STOP: "stop",
        genai.GenerationFinishReason.LENGTH: "length",
    }
    return names.get(reason)


class Server:
    """The HTTP side: checks a body, turns pieces into JSON or server-sent events."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = arguments.cache_gb
        scheduler.max_num_batched_tokens = arguments.max_num_batched_tokens
        scheduler.max_num_seqs = arguments.max_num_seqs
        scheduler.enable_prefix_caching = arguments.prefix_caching
        properties = {"INFERENCE_NUM_THREADS": arguments.threads} if arguments.threads else {}
        self.pipeline = genai.ContinuousBatchingPipeline(
            arguments.model, scheduler, arguments.device, properties
        )
        self.name = arguments.served_model_name
        self.tokenizer = self.pipeline.get_tokenizer()
        self.eos = self.tokenizer.get_eos_token_id()
        self.bytes_of = {number: text for text, number in self.tokenizer.get_vocab().items()}
        self.engine: Engine | None = None
        self.numbers = itertools.count()

    def config(self, body: dict[str, Any]) -> Any:
        """GenerationConfig of a body; ValueError names what can't be done."""
        for key, value in body.items():
            if key not in UNDERSTOOD and not (key in NEUTRAL and value in (NEUTRAL[key], None)):
                raise ValueError(f"{key} {value!r} is not supported")
        config = genai.GenerationConfig()
        config.max_new_tokens = int(body.get("max_tokens", 16))
        config.ignore_eos = bool(body.get("ignore_eos", False))
        config.eos_token_id = self.eos
        temperature = float(body.get("temperature", 1.0))
        config.do_sample = temperature > 0
        if config.do_sample:
            config.temperature = temperature
            config.top_p = float(body.get("top_p", 1.0))
            config.top_k = int(body.get("top_k") or len(self.bytes_of))
            config.rng_seed = int(body.get("seed") or 0)
        return config

    def ids(self, prompt: object) -> list[int]:
        """Token ids of a prompt."""
        if isinstance(prompt, str):
            encoded = self.tokenizer.encode(prompt, add_special_tokens=False)
            return [int(number) for number in encoded.input_ids.data[0]]
        if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
            return prompt
        raise ValueError("prompt must be a text or a list of token ids")

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        self.engine = self.engine or Engine(self.pipeline, asyncio.get_running_loop())
        try:
            body = json.loads(await request.body())
            ids, config = self.ids(body.get("prompt")), self.config(body)
        except (ValueError, TypeError, AttributeError) as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        head = {"id": f"cmpl-{next(self.numbers)}", "object": "text_completion"}
        head |= {"created": int(time.time()), "model": self.name}
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            events = self.events(ids, config, head, usage)
            return StreamingResponse(events, media_type="text/event-stream")
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text, count, reason = "", 0, None
        try:
            async for new, reason in self.engine.generate(ids, config):
                text += decoder.decode(self.text_bytes(new), final=reason is not None)
                count += len(new)
        except Exception as error:
            return JSONResponse({"error": {"message": str(error)}}, 500)
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return JSONResponse({**head, "choices": [choice], "usage": _usage(len(ids), count)})

    async def events(
        self, ids: list[int], config: Any, head: dict[str, Any], usage: bool
    ) -> AsyncIterator[bytes]:
        """One event per piece, then usage if asked for, then [DONE]; an error is an event too."""
        assert self.engine
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        count = 0
        try:
            async for new, reason in self.engine.generate(ids, config):
                count += len(new)
                text = decoder.decode(self.text_bytes(new), final=reason is not None)
                choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
                yield _event({**head, "choices": [choice]})
        except Exception as error:
            yield _event({"error": {"message": str(error)}})
            return
        if usage:
            yield _event({**head, "choices": [], "usage": _usage(len(ids), count)})
        yield b"data: [DONE]\n\n"

    def text_bytes(self, ids: list[int]) -> bytes:
        """What these tokens add to the text; right for byte-level vocabularies."""
        return b"".join(self.bytes_of.get(number, b"") for number in ids if number != self.eos)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    async def health(self, request: Request) -> Response:
        """GET /health: the pipeline is loaded before the port is open."""
        return Response()


def _usage(prompt: int, completion: int) -> dict[str, int]:
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def main() -> None:
    """Loads the model, then serves until a signal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="GGUF file or OpenVINO folder")
    parser.add_argument("--served-model-name", default="model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--threads", type=int, default=0, help="0: OpenVINO's choice")
    parser.add_argument("--cache-gb", type=int, default=2)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    server = Server(arguments)
    app = Starlette(
        routes=[
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/health", server.health),
        ]
    )
    uvicorn.run(
        app, host=arguments.host, port=arguments.port, log_level="warning", access_log=False
    )


if __name__ == "__main__":
    main()
