"""Engines under test: one model, loaded as often as its settings ask, with as many engines around it as wanted.

Knows how to build and to watch an engine; does not know what is proved. Invariant: every engine here is the
one that serves (`engine/build.py::assemble_engine`), with nothing changed but settings, pool size and a watch
on its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from poise.config import CacheConfig, ComputeConfig, SchedulerConfig, Settings
from poise.core.drafting import Drafter
from poise.core.output import Executor, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from poise.core.request import NO_OWNER, RequestOwner
from poise.core.speculation import Speculation
from poise.engine.build import assemble_engine
from poise.engine.client import EngineInfo, EngineRequest, RequestDelta
from poise.engine.llm_engine import LLMEngine
from poise.errors import PoiseError
from poise.executor.load import LoadedExecutor, load_executor
from poise.executor.model_runner import ModelRunner
from poise.tokenizer.tokenizer import Tokenizer
from poise.verify.answers import Answer, ChoiceAnswer, Probe, tokens
from poise.weights.checkpoint import Checkpoint

MAX_SEQUENCES = 64
MAX_CONTEXT = 1024  # ample for any probe; a whole context would make the pool needlessly large
MAX_IDLE_STEPS = 100


class TrialBrokenError(PoiseError):
    """The engine failed instead of answering: not a difference, a crash."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a trial changes; None leaves it as the settings say. `chunk` is the most tokens of a step, `drafts` the most
    that a request drafts in one.
    """

    chunk: int | None = None
    block_size: int | None = None
    threads: int | None = None
    prefix_caching: bool = False
    num_blocks: int | None = None
    drafts: int | None = None

    def __str__(self) -> str:
        parts = [
            f"{name} {value}"
            for name, value in (
                ("chunks of", self.chunk),
                ("blocks of", self.block_size),
                ("threads", self.threads),
                ("pool of", self.num_blocks),
                ("drafts of", self.drafts),
            )
            if value is not None
        ]
        return ", ".join([*parts, f"prefix cache {'on' if self.prefix_caching else 'off'}"])


@dataclass(slots=True)
class Watch:
    """An executor that passes steps on and remembers what they were made of."""

    inner: Executor
    steps: list[Sequence[ScheduledRequest]] = field(default_factory=list)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if output.scheduled:
            self.steps.append(output.scheduled)
        return self.inner.execute(output)


@dataclass(frozen=True, slots=True)
class Run:
    """What a trial gave: answers in the order of its requests (None: aborted), and what fired."""

    answers: list[Answer | None]
    steps: Sequence[Sequence[ScheduledRequest]]
    num_preemptions: int
    cached_tokens: Sequence[int]  # by request, of its prompt
    num_aborted: int

    @property
    def num_cached_tokens(self) -> int:
        return sum(self.cached_tokens)

    @property
    def num_computed_tokens(self) -> int:
        return sum(item.num_tokens for step in self.steps for item in step)

    @property
    def most_requests(self) -> int:
        """Requests of the fullest step."""
        return max(map(len, self.steps), default=0)

    @property
    def num_cut(self) -> int:
        """Pieces of prompts that did not reach the prompt's end."""
        return sum(not item.samples for step in self.steps for item in step)

    @property
    def num_mixed_steps(self) -> int:
        """Steps in which one request decoded while another one's prompt was computed."""
        return sum(
            any(item.num_tokens > 1 or item.start == 0 for item in step)
            and any(item.num_tokens == 1 and item.start > 0 for item in step)
            for step in self.steps
        )


class WatchedEngine:
    """An engine and the watch on its executor."""

    def __init__(self, engine: LLMEngine, watch: Watch) -> None:
        self.engine = engine
        self._watch = watch
        self._num_requests = 0

    def run(
        self,
        probes: Sequence[Probe],
        arrivals: Sequence[int] | None = None,
        aborts: dict[int, int] | None = None,
        owner: RequestOwner = NO_OWNER,
    ) -> Run:
        """Answers all probes, which are `owner`'s. `arrivals[i]` is the step before which request i comes (default: all at
        once), `aborts[i]` the number of steps after its arrival at which it is aborted.

        Raises TrialBrokenError where the engine fails.
        """
        engine, aborts = self.engine, aborts or {}
        self._watch.steps = []
        preempted = engine.metrics.num_preemptions
        first = self._num_requests
        self._num_requests += len(probes)
        collected = [_Collected(probe) for probe in probes]
        arrives = list(arrivals or [0] * len(probes))
        step = idle = 0
        while step <= max(arrives, default=0) or engine.has_unfinished_requests():
            for index, probe in enumerate(probes):
                if arrives[index] == step:
                    request = EngineRequest(
                        probe.name, probe.token_ids, probe.params, probe.seed, owner
                    )
                    engine.add_request(first + index, request)
                if index in aborts and arrives[index] + aborts[index] == step:
                    engine.abort(first + index)
            num_steps = len(self._watch.steps)
            for key, delta in engine.step():
                collected[key - first].append(delta)
            idle = idle + 1 if len(self._watch.steps) == num_steps else 0
            if idle > MAX_IDLE_STEPS:
                engine.abort_all()
                raise TrialBrokenError("the engine stands still with requests unanswered")
            if engine.failure is not None:
                raise TrialBrokenError(engine.failure)
            step += 1
        return Run(
            [None if index in aborts else item.answer() for index, item in enumerate(collected)],
            self._watch.steps,
            engine.metrics.num_preemptions - preempted,
            [item.num_cached_tokens for item in collected],
            sum(item.aborted for item in collected),
        )


class _Collected:
    """The deltas of one request, added up."""

    def __init__(self, probe: Probe) -> None:
        self.num_cached_tokens = 0
        self._probe = probe
        self._deltas: list[RequestDelta] = []

    def append(self, delta: RequestDelta) -> None:
        self.num_cached_tokens = delta.num_cached_tokens
        self._deltas.append(delta)

    @property
    def aborted(self) -> bool:
        return any(part.finish_reason == "abort" for d in self._deltas for part in d.choices)

    def answer(self) -> Answer:
        prompt = [entry for delta in self._deltas for entry in delta.prompt_logprobs or () if entry]
        return Answer(
            tuple(self._choice(index) for index in range(self._probe.params.n)),
            tokens([entry.token_id for entry in prompt], prompt),
        )

    def _choice(self, index: int) -> ChoiceAnswer:
        parts = [part for delta in self._deltas for part in delta.choices if part.index == index]
        reason = parts[-1].finish_reason if parts else None
        if reason == "error" and str(parts[-1].stop_reason).startswith(
            ("step", "engine", "output")
        ):
            raise TrialBrokenError(str(parts[-1].stop_reason))
        ids = [token_id for part in parts for token_id in part.token_ids]
        asked = self._probe.params.logprobs is not None
        logprobs = [entry for part in parts for entry in part.logprobs or ()] if asked else None
        return ChoiceAnswer(tokens(ids, logprobs), reason, "".join(part.text for part in parts))


class Rig:
    """Builds engines for one checkpoint. The executor of the settings themselves is kept, others are not."""

    def __init__(
        self,
        settings: Settings,
        checkpoint: Checkpoint,
        fault: str | None = None,
        tiny: bool = False,
    ) -> None:
        self.fault = fault  # told to processes that answer for this rig
        self.tiny = tiny
        self.settings = settings
        self.checkpoint = checkpoint
        self.tokenizer = Tokenizer(checkpoint.tokenizer)
        self._base: LoadedExecutor | None = None
        context = settings.scheduler.max_model_len or checkpoint.config.max_position_embeddings
        self._limits = replace(
            settings.scheduler.without_queue_bounds(),
            max_num_seqs=max(MAX_SEQUENCES, settings.scheduler.max_num_seqs),
            max_num_batched_tokens=max(512, settings.scheduler.max_num_batched_tokens),
            max_model_len=min(context, MAX_CONTEXT),
        )

    @property
    def base(self) -> LoadedExecutor:
        """The executor of the settings as they are."""
        if self._base is None:
            self._base = self._load(self.settings.cache, self.settings.compute)
        return self._base

    @property
    def longest_chunk(self) -> int:
        """The most tokens that a step can have here."""
        return self._limits.max_num_batched_tokens

    @property
    def windows(self) -> list[int]:
        """The sliding windows that the model's KV groups have, in tokens, each once."""
        windows = {group.sliding_window for group in self.base.kv_groups}
        return sorted(window for window in windows if window is not None)

    @property
    def info(self) -> EngineInfo:
        return self.engine(Setup()).engine.info

    def load(self, setup: Setup) -> LoadedExecutor:
        """The executor that a setup needs: the kept one, or a fresh one."""
        cache = replace(
            self.settings.cache, block_size=setup.block_size or self.settings.cache.block_size
        )
        compute = replace(
            self.settings.compute, threads=setup.threads or self.settings.compute.threads
        )
        if cache == self.settings.cache and compute == self.settings.compute:
            return self.base
        return self._load(cache, compute)

    def engine(
        self,
        setup: Setup,
        loaded: LoadedExecutor | None = None,
        drafter: Drafter | None = None,
    ) -> WatchedEngine:
        """An engine with empty caches around `loaded`, or around what the setup needs."""
        loaded = self.load(setup) if loaded is None else loaded
        chunk = self.settings.scheduler.max_num_batched_tokens
        limits: SchedulerConfig = replace(self._limits, max_num_batched_tokens=setup.chunk or chunk)
        cache: CacheConfig = replace(
            self.settings.cache,
            block_size=loaded.block_size,
            enable_prefix_caching=setup.prefix_caching,
        )
        watch = Watch(loaded.executor)
        num_blocks = min(setup.num_blocks or loaded.num_blocks, loaded.num_blocks)
        watched = replace(
            loaded, executor=watch, kv_cache=replace(loaded.kv_cache, num_blocks=num_blocks)
        )
        engine = assemble_engine(
            self.settings.source,
            cache,
            limits,
            self.checkpoint,
            watched,
            self.tokenizer,
            speculation=speculation_of(setup.drafts),
            drafter=drafter,
        )
        return WatchedEngine(engine, watch)

    def fitting(self, probes: Sequence[Probe]) -> list[Probe]:
        """Those that the model's context and the pool have room for."""
        room = min(self.info.max_model_len, self.info.kv_capacity_tokens)
        return [p for p in probes if len(p.token_ids) + (p.params.max_tokens or 0) <= room]

    def blocks_for(self, probes: Sequence[Probe], loaded: LoadedExecutor) -> int:
        """Pages that these requests fill when all of them run at once."""
        groups, size = len(loaded.kv_groups), loaded.block_size
        return groups * sum(
            probe.params.n * -(-(len(probe.token_ids) + (probe.params.max_tokens or 0)) // size)
            for probe in probes
        )

    def _load(self, cache: CacheConfig, compute: ComputeConfig) -> LoadedExecutor:
        return load_executor(self.checkpoint, cache, self._limits, compute)


def speculation_of(num_drafts: int | None) -> Speculation | None:
    """For all requests: drafts of a fixed length, whoever makes them."""
    if num_drafts is None:
        return None
    return Speculation("ngram", num_drafts, adaptive=False, prompt_lookup_min=1)


def fill_pages(loaded: LoadedExecutor, num_blocks: int, byte: int) -> int:
    """Overwrites the first pages of the pool, as if requests long gone had left that there."""
    assert isinstance(loaded.executor, ModelRunner), "only a loaded executor has pages"
    pages = loaded.executor._backend.pages
    count = min(num_blocks, loaded.num_blocks)
    for block in range(count):
        pages.fill(block, byte)
    return count
