"""From "which model, how much memory, what limits" to a running engine: the one place where the
rooms are put together.

Knows every constructor and no behaviour. Invariant: what it could not build leaves nothing loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from poise.config import (
    CacheConfig,
    ComputeConfig,
    ModelSource,
    SchedulerConfig,
    SpeculationConfig,
)
from poise.core.clock import MonotonicClock
from poise.core.drafting import Drafter
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.prefix_cache import PrefixCache
from poise.core.recording import RecordingScheduler, SchedulerSetup
from poise.core.speculation import Method, Speculation, SpeculationOffer
from poise.core.step_time import Fit
from poise.core.tenant import NO_TENANTS, TenantTable
from poise.engine.client import EngineInfo
from poise.engine.llm_engine import LLMEngine
from poise.engine.metrics import EngineMetrics
from poise.engine.schedule_file import ScheduleFile
from poise.engine.scheduling import limits_of, policy_of
from poise.engine.scheduling_metrics import SchedulingMetrics
from poise.engine.secret import LocalSecret, fresh_secret, local_secret
from poise.engine.step_times import fit_key, store_fit, stored_fit
from poise.engine.utilisation import Utilisation
from poise.executor.load import NUMERICS_VERSION, LoadedExecutor, load_executor
from poise.executor.load_draft import check_vocabulary
from poise.executor.step_cost import probe
from poise.spec_decode.controller import DraftLengthController
from poise.spec_decode.drafter import SpeculativeDrafter
from poise.tokenizer.tokenizer import Tokenizer
from poise.weights.checkpoint import Checkpoint
from poise.weights.dummy_checkpoint import DEFAULT_CONTAINER, dummy_checkpoint
from poise.weights.four_bit import FourBitCheckpoint
from poise.weights.open_checkpoint import open_checkpoint
from poise.weights.pull import resolve_model

if TYPE_CHECKING:
    from rich.console import Console


NO_SPECULATION = SpeculationConfig()


def build_engine(
    source: ModelSource,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    compute: ComputeConfig,
    *,
    tenants: TenantTable = NO_TENANTS,
    speculation: SpeculationConfig = NO_SPECULATION,
    console: Console | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> LLMEngine:
    """Finds (pulling it if need be), opens and loads the model, and puts an engine around it.

    `console` shows a download's progress; `on_stage` is told what comes next, in words fit for a
    log line. Raises PullError, ModelFileError or ConfigError.
    """
    tell = on_stage or (lambda stage: None)
    tell(f"finding {source.model}")
    checkpoint = open_source(source, console=console)
    tell(f"loading {checkpoint.name} ({checkpoint.format})")
    with ThreadPoolExecutor(1, "poise-tokenizer") as pool:
        tokenizer = pool.submit(lambda: Tokenizer(checkpoint.tokenizer))
        draft = open_draft(source, speculation, checkpoint, console)
        if draft is not None and draft.path != checkpoint.path:
            check_vocabulary(tokenizer.result(), draft, checkpoint.config.vocab_size)
        loaded = load_executor(checkpoint, cache, scheduler, compute, draft=draft)
        fit = stored_fit(_fit_key(loaded)) or probe(
            loaded.executor,
            loaded.kv_groups,
            loaded.block_size,
            loaded.step_cost,
            min(scheduler.max_num_batched_tokens, loaded.max_model_len - 1),
        )
        return assemble_engine(
            source,
            cache,
            scheduler,
            checkpoint,
            loaded,
            tokenizer.result(),
            tenants,
            fit,
            local_secret(),
            speculation.default,
        )


def open_draft(
    source: ModelSource,
    speculation: SpeculationConfig,
    target: Checkpoint,
    console: Console | None = None,
) -> Checkpoint | None:
    """What drafts, if a model does: the target in 4 bits, or another one. Raises as `open_source`."""
    default = speculation.default
    if default is None or default.method not in ("self", "draft_model"):
        return None
    if default.method == "self":
        return FourBitCheckpoint(target)
    assert speculation.draft_model is not None
    path = resolve_model(speculation.draft_model, offline=source.offline, console=console)
    return open_checkpoint(path)


def _model_method(loaded: LoadedExecutor, speculation: Speculation | None) -> tuple[Method, ...]:
    """The method of the model that drafts, if one was loaded: it was loaded for requests that say nothing."""
    if loaded.draft_seconds is None or speculation is None:
        return ()
    return (speculation.method,)


def _fit_key(loaded: LoadedExecutor) -> str:
    details = loaded.details
    return fit_key(loaded.fingerprint, details.get("isa", ""), details.get("threads", ""))


def open_source(source: ModelSource, *, console: Console | None = None) -> Checkpoint:
    """The model that is meant, opened: found (pulled if need be), or made of random weights.

    Raises PullError, ModelFileError or ConfigError.
    """
    if source.load_format != "auto":
        _, _, container = source.load_format.partition(":")
        return dummy_checkpoint(source.model, container or DEFAULT_CONTAINER)
    return open_checkpoint(resolve_model(source.model, offline=source.offline, console=console))


def assemble_engine(
    source: ModelSource,
    cache: CacheConfig,
    limits: SchedulerConfig,
    checkpoint: Checkpoint,
    loaded: LoadedExecutor,
    tokenizer: Tokenizer,
    tenants: TenantTable = NO_TENANTS,
    fit: Fit | None = None,
    secret: LocalSecret | None = None,
    speculation: Speculation | None = None,
    drafter: Drafter | None = None,
) -> LLMEngine:
    """An engine around an executor that is loaded; engines may share one, in turn.

    `fit` is where predictions of step times start from; `speculation` is for requests that say nothing, and
    `drafter` drafts in place of the usual one. Raises ConfigError for tenants that are promised
    more than there is, or a recording that can't be written. Block hashes are keyed with `secret`, by
    default one that is drawn here.
    """
    clock = MonotonicClock()
    secret = secret or fresh_secret()
    prefix_cache = None
    if cache.enable_prefix_caching:
        prefix_cache = PrefixCache(
            key=secret.block_key,
            identity=loaded.cache_identity,
            block_size=loaded.block_size,
            num_groups=len(loaded.kv_groups),
        )
    setup = SchedulerSetup(
        limits=limits_of(limits, loaded.max_model_len),
        policy=policy_of(limits, tenants).name,
        tenants=tenants,
        groups=loaded.kv_groups,
        num_blocks=loaded.num_blocks,
        block_size=loaded.block_size,
        caching=cache.enable_prefix_caching,
        step_cost=loaded.step_cost,
        fit=fit or {},
    )
    kv_cache = KVCacheManager(loaded.kv_groups, loaded.num_blocks, loaded.block_size, prefix_cache)
    drafter = drafter or SpeculativeDrafter(DraftLengthController(loaded.draft_seconds))
    recording = None
    if limits.record_schedule is None:
        scheduler = setup.scheduler(kv_cache, clock, drafter)
    else:
        recording = ScheduleFile(limits.record_schedule)
        scheduler = RecordingScheduler(setup, kv_cache, clock, recording.write, drafter)

    key = _fit_key(loaded)

    def on_close() -> None:  # holds on to nothing of the model
        store_fit(key, scheduler.step_time)
        if recording is not None:
            recording.close()

    def on_idle() -> bool:
        return loaded.pages_ahead.prepare(kv_cache.pool.num_touched)

    info = EngineInfo(
        model=source.served_name or checkpoint.name,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        kv_capacity_tokens=loaded.kv_cache.num_tokens,
        system_fingerprint=f"poise-v{NUMERICS_VERSION}-{loaded.fingerprint}",
        details={**loaded.details, "scheduling_policy": scheduler.policy.name},
    )
    metrics = EngineMetrics(
        info.model,
        max_model_len=loaded.max_model_len,
        num_blocks=loaded.num_blocks,
        cache_config={
            "block_size": str(loaded.block_size),
            "cache_dtype": cache.kv_dtype,
            "num_gpu_blocks": str(loaded.num_blocks),  # vLLM's word, also where there is no GPU
            "enable_prefix_caching": str(cache.enable_prefix_caching),
        },
        work=Utilisation(loaded.work_done, loaded.rates),
        scheduling=SchedulingMetrics(scheduler),
    )
    return LLMEngine(
        scheduler,
        loaded.executor,
        tokenizer,
        info=info,
        metrics=metrics,
        clock=clock,
        speculation=SpeculationOffer(
            speculation,
            ("ngram", "suffix", *_model_method(loaded, speculation)),
            ("coupled", "rejection"),
        ),
        on_close=on_close,
        on_idle=on_idle,
    )
