"""From an opened checkpoint to an executor that can run steps: pages sized, weights packed, plan recorded.

Knows every room below it once, here, and is called once per model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poise.config import (
    Activations,
    CacheConfig,
    ComputeConfig,
    KVCacheDtype,
    SchedulerConfig,
)
from poise.core.block_hash import CacheIdentity
from poise.core.output import Executor, KVGroupSpec, WorkDone
from poise.core.step_time import StepCost
from poise.errors import ConfigError
from poise.executor.input_batch import InputBatch
from poise.executor.kv_cache import KVCachePlan, PagesAhead, plan_kv_cache
from poise.executor.load_draft import load_drafter
from poise.executor.model_runner import ModelRunner
from poise.executor.step_cost import step_cost
from poise.executor.stored_rates import StoredRates, stored_rates
from poise.kernels.cpu.backend import CPUBackend
from poise.machine import available_memory_bytes, default_threads
from poise.models.config import ModelConfig
from poise.models.families import family
from poise.models.weights import Source
from poise.weights.checkpoint import Checkpoint
from poise.weights.four_bit import FourBitCheckpoint

NUMERICS_VERSION = 1
# Formulas of docs/NUMERICS.md that a setting chooses between: each has a version of its own.
ACTIVATIONS_VERSIONS: dict[Activations, int] = {"int8": 1, "bf16": 1}
KV_FORMULAS: dict[KVCacheDtype, str] = {"bf16": "bf16", "int8": "int8.1"}


@dataclass(frozen=True, slots=True)
class LoadedExecutor:
    """An executor and the facts that scheduler, front ends and fingerprints need of it."""

    executor: Executor
    kv_groups: list[KVGroupSpec]
    kv_cache: KVCachePlan
    max_model_len: int
    vocab_size: int
    fingerprint: str  # 12 hex digits: equal fingerprint, equal bytes
    cache_identity: bytes
    details: dict[str, str]
    work_done: Callable[[], WorkDone]
    rates: StoredRates | None  # of this machine, where they were measured
    step_cost: StepCost
    pages_ahead: PagesAhead
    draft_seconds: Callable[[Sequence[int]], float] | None = (
        None  # of drafts of such lengths, where it makes any
    )

    @property
    def num_blocks(self) -> int:
        return self.kv_cache.num_blocks

    @property
    def block_size(self) -> int:
        return self.kv_cache.block_size


def identity_of(model_digest: str, compute: ComputeConfig, kv_dtype: KVCacheDtype) -> bytes:
    """Everything that an answer's bytes depend on: the file and the arithmetic."""
    return "|".join(
        [
            model_digest,
            f"activations={compute.activations}.{ACTIVATIONS_VERSIONS[compute.activations]}",
            f"kv={KV_FORMULAS[kv_dtype]}",
            f"numerics={NUMERICS_VERSION}",
        ]
    ).encode()


def cache_identity_of(
    model_digest: str, config: ModelConfig, compute: ComputeConfig, kv_dtype: KVCacheDtype
) -> CacheIdentity:
    """What decides the bytes of a KV block beside its tokens."""
    version = ACTIVATIONS_VERSIONS[compute.activations]
    return CacheIdentity(
        model=model_digest,
        arithmetic=f"activations={compute.activations}.{version} numerics={NUMERICS_VERSION}",
        kv_dtype=KV_FORMULAS[kv_dtype],
        rope=repr((config.rope, config.local_rope)),
        windows=repr(config.windows),
    )


def fingerprint_of(identity: bytes) -> str:
    """12 hex digits: equal fingerprint, equal bytes."""
    return hashlib.sha256(identity).hexdigest()[:12]


def load_executor(
    checkpoint: Checkpoint,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    compute: ComputeConfig,
    *,
    draft: Checkpoint | None = None,
) -> LoadedExecutor:
    """Builds the CPU executor of a checkpoint. `draft` makes drafts: a coarser copy of the same weights over the same KV
    (a FourBitCheckpoint), or another model of the same vocabulary, with KV of its own.

    Raises ConfigError for limits that can't be met, ModelFileError for a file that can't be run.
    """
    config = checkpoint.config
    max_model_len = scheduler.max_model_len or config.max_position_embeddings
    if max_model_len > config.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, the model was made for {config.max_position_embeddings}"
        )
    record = family(config.architecture)
    kv_cache = plan_kv_cache(
        config,
        cache,
        scheduler.max_num_seqs,
        max_model_len,
        scheduler.max_num_batched_tokens,
        available_memory_bytes(),
        None if draft is None or isinstance(draft, FourBitCheckpoint) else draft.config,
    )
    shape = kv_cache.shape(config, kv_cache.groups)
    threads = compute.threads or default_threads()
    backend = CPUBackend(
        shape,
        max_rows=scheduler.max_num_batched_tokens,
        threads=threads,
        activations=compute.activations,
        share_prefixes=compute.shared_prefix_attention,
    )
    record(backend, config, Source(backend, checkpoint))
    batch = InputBatch(
        vocab_size=config.vocab_size,
        max_rows=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=max_model_len,
        block_size=cache.block_size,
        num_groups=len(kv_cache.specs),
        num_draft_groups=len(kv_cache.specs) - shape.num_groups,
    )
    identity = identity_of(checkpoint.digest(), compute, cache.kv_dtype)
    rates = stored_rates(backend.variant, threads)
    drafter = None
    if draft is not None:
        drafter = load_drafter(draft, backend, kv_cache, scheduler, compute, batch, rates)
    runner = ModelRunner(backend, batch, drafter)
    return LoadedExecutor(
        executor=runner,
        kv_groups=list(kv_cache.specs),
        kv_cache=kv_cache,
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        fingerprint=fingerprint_of(identity),
        cache_identity=cache_identity_of(
            checkpoint.digest(), config, compute, cache.kv_dtype
        ).encode(),
        details={
            "isa": backend.variant,
            "threads": str(threads),
            "activations": compute.activations,
            "shared_prefix_attention": "on" if backend.share_prefixes else "off",
            "format": checkpoint.format,
            "weight_bytes": str(checkpoint.weight_bytes()),
            "packed_bytes": str(backend.arena.used_bytes),
            "kv_dtype": cache.kv_dtype,
            "kv_bytes": str(kv_cache.num_bytes),
            "kv_tokens": str(kv_cache.num_tokens),
            "kv_reason": kv_cache.reason,
            **({} if drafter is None else {"draft_bytes": str(drafter.num_bytes)}),
        },
        work_done=runner.work_done,
        rates=rates,
        step_cost=step_cost(config, backend.arena.used_bytes, threads, rates),
        pages_ahead=PagesAhead(backend.pages.populate, kv_cache.num_blocks, kv_cache.page_bytes),
        draft_seconds=None if drafter is None else drafter.seconds,
    )
