"""The offline API: a model loaded in this process, answering lists of prompts.

Owns nothing but an LLMEngine and a seed source. Invariant: when a call returns or raises, no
request of it is left running.
"""

from __future__ import annotations

import itertools
import random
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from rich.console import Console
from rich.progress import Progress

from poise.config import (
    Activations,
    CacheConfig,
    ComputeConfig,
    ModelSource,
    SchedulerConfig,
    SpeculationConfig,
)
from poise.config_values import json_object
from poise.core.sampling_params import SamplingParams
from poise.engine.client import EngineInfo, EngineRequest
from poise.engine.input_processor import resolve_seed
from poise.engine.llm_engine import LLMEngine
from poise.engine.request_output import RequestOutput, RequestOutputBuilder
from poise.errors import EngineDeadError, InvalidRequestError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from poise.tokenizer.tokenizer import Tokenizer


_CACHE = CacheConfig()
_SCHEDULER = SchedulerConfig()


class TokensPrompt(TypedDict):
    """A prompt that is already token ids."""

    prompt_token_ids: Sequence[int]


Prompt = str | TokensPrompt
Message = Mapping[str, Any]


class LLM:
    """A model and its engine.

    `seed` makes the seeds drawn for requests without one repeatable in call order; without it they
    are fresh, and `RequestOutput.seed` says which was used. The other arguments are those of `poise
    serve`.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        seed: int | None = None,
        served_model_name: str | None = None,
        offline: bool = False,
        load_format: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = _SCHEDULER.max_num_seqs,
        max_num_batched_tokens: int = _SCHEDULER.max_num_batched_tokens,
        block_size: int = _CACHE.block_size,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        kv_cache_dtype: Literal["bf16", "int8", "auto"] = "bf16",
        threads: int | None = None,
        activations: Activations = "int8",
        enable_shared_prefix_attention: bool = True,
        speculative_config: Mapping[str, Any] | None = None,
    ) -> None:
        from poise.engine.build import build_engine  # needs the native kernels; the rest doesn't

        console = Console(stderr=True) if sys.stderr.isatty() else None
        engine = build_engine(
            ModelSource(model, served_model_name, offline, load_format),
            CacheConfig(block_size, kv_cache_memory_bytes, enable_prefix_caching, kv_cache_dtype),
            SchedulerConfig(
                max_num_seqs, max_num_batched_tokens, max_model_len
            ).without_queue_bounds(),
            ComputeConfig(threads, activations, enable_shared_prefix_attention),
            speculation=SpeculationConfig(
                None if speculative_config is None else json_object(dict(speculative_config))
            ),
            console=console,
        )
        self._start(engine, seed)

    @classmethod
    def from_engine(cls, engine: LLMEngine, *, seed: int | None = None) -> LLM:
        """An LLM over an engine that was built elsewhere; it is closed by `shutdown`."""
        llm = cls.__new__(cls)
        llm._start(engine, seed)
        return llm

    def _start(self, engine: LLMEngine, seed: int | None) -> None:
        self._engine = engine
        self._random = random.Random(secrets.randbits(64) if seed is None else seed)
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._open = True

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers each prompt, in order. One SamplingParams serves all prompts, a list goes with
        them pair by pair.

        `use_tqdm` (vLLM's name) shows a progress bar on a terminal. Raises InvalidRequestError
        before anything runs if a prompt can't be served.
        """
        if isinstance(prompts, str) or _is_tokens_prompt(prompts):
            prompts = [prompts]  # type: ignore[list-item]
        texts_and_ids = [self._parse_prompt(prompt) for prompt in prompts]
        return self._run(texts_and_ids, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list of conversations, through the model's chat
        template.
        """
        conversations: Sequence[Any] = messages
        if not conversations or isinstance(conversations[0], Mapping):
            conversations = [messages]
        tokenizer = self._engine.tokenizer
        texts_and_ids: list[tuple[str | None, Sequence[int]]] = []
        for conversation in conversations:
            token_ids = tokenizer.encode_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
            )
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
            texts_and_ids.append((text, token_ids))
        return self._run(texts_and_ids, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics, as prometheus_client families."""
        return list(self._engine.metrics.collect())

    def reset_prefix_cache(self) -> bool:
        """Makes the next prompts cold: nothing computed so far will be a hit. Waits for a call that runs; False if the
        engine is serving others.
        """
        with self._lock:
            return self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Frees the model; the LLM can't be used afterwards."""
        with self._lock:
            if self._open:
                self._open = False
                self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _parse_prompt(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, self._engine.tokenizer.encode(prompt, add_special_tokens=True)
        if _is_tokens_prompt(prompt):
            return None, prompt["prompt_token_ids"]
        raise InvalidRequestError(
            f"a prompt is {type(prompt).__name__}, expected a string or "
            "{'prompt_token_ids': [...]}",
            "prompt",
        )

    def _token_text(self, token_id: int) -> str:
        return self._engine.tokenizer.token_bytes(token_id).decode(errors="replace")

    def _run(
        self,
        prompts: Sequence[tuple[str | None, Sequence[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise InvalidRequestError(
                f"{len(sampling_params)} sampling params came with {len(prompts)} prompts",
                "sampling_params",
            )
        with self._lock:
            if not self._open:
                raise EngineDeadError("the LLM was shut down")
            if self._engine.failure is not None:
                raise EngineDeadError(f"engine failed: {self._engine.failure}")
            with _interrupt_between_steps() as check_interrupt:
                return self._answer(prompts, sampling_params, use_tqdm, check_interrupt)

    def _answer(
        self,
        prompts: Sequence[tuple[str | None, Sequence[int]]],
        sampling_params: Sequence[SamplingParams],
        use_tqdm: bool,
        check_interrupt: Callable[[], None],
    ) -> list[RequestOutput]:
        builders: dict[int, RequestOutputBuilder] = {}
        try:
            for (text, token_ids), params in zip(prompts, sampling_params, strict=True):
                self._add(builders, text, token_ids, params)
            self._step_until_finished(builders, use_tqdm, check_interrupt)
        finally:
            for key, builder in builders.items():
                if not builder.output.finished:
                    self._engine.abort(key)
            self._engine.take_outputs()
        return [builder.output for builder in builders.values()]

    def _add(
        self,
        builders: dict[int, RequestOutputBuilder],
        text: str | None,
        token_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        key = next(self._keys)
        seed = resolve_seed(params.seed, self._random)
        request = EngineRequest(str(key), tuple(token_ids), params, seed)
        self._engine.add_request(key, request)
        builders[key] = RequestOutputBuilder(
            str(key), text, token_ids, params.n, seed, self._token_text
        )

    def _step_until_finished(
        self,
        builders: dict[int, RequestOutputBuilder],
        use_tqdm: bool,
        check_interrupt: Callable[[], None],
    ) -> None:
        show = use_tqdm and sys.stderr.isatty()
        progress = Progress(console=Console(stderr=True)) if show else None
        with progress or nullcontext():
            bar = progress.add_task("prompts", total=len(builders)) if progress else None
            while self._engine.has_unfinished_requests():
                for key, delta in self._engine.step():
                    builders[key].append(delta)
                    if delta.stats is not None and progress and bar is not None:
                        progress.advance(bar)
                check_interrupt()


def _is_tokens_prompt(prompt: object) -> bool:
    return isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}


@contextmanager
def _interrupt_between_steps() -> Iterator[Callable[[], None]]:
    """Holds the first Ctrl-C back until the step is over, so that it can't cut through the engine's
    state.
    """
    previous = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or previous is not signal.default_int_handler:
        yield lambda: None
        return
    interrupted = False

    def remember(signal_number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, previous)
