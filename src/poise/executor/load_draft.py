"""From a checkpoint that drafts to its plan, beside a target that is loaded: same workers, same pages.

Knows what of the target a draft may share. Invariant: a draft with KV of its own writes to its own groups' pages only.
"""

from __future__ import annotations

from poise.config import ComputeConfig, SchedulerConfig
from poise.core.step_time import StepTimeModel
from poise.errors import ConfigError
from poise.executor.input_batch import InputBatch
from poise.executor.kv_cache import KVCachePlan
from poise.executor.model_draft import ModelDrafter
from poise.executor.step_cost import step_cost
from poise.executor.stored_rates import StoredRates
from poise.kernels.cpu.backend import CPUBackend
from poise.models.families import family
from poise.models.weights import Source
from poise.tokenizer.tokenizer import Tokenizer
from poise.weights.checkpoint import Checkpoint


def load_drafter(
    draft: Checkpoint,
    target: CPUBackend,
    kv_cache: KVCachePlan,
    scheduler: SchedulerConfig,
    compute: ComputeConfig,
    batch: InputBatch,
    rates: StoredRates | None,
) -> ModelDrafter:
    """Records the plan of `draft`, over KV groups of its own where the cache has some. Raises ModelFileError."""
    config, threads = draft.config, target.pool.threads
    shape, pages = target.kv, target.pages
    if kv_cache.draft is not None:
        shape = kv_cache.shape(config, kv_cache.draft)
        pages = pages.shared_with(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    backend = CPUBackend(
        shape,
        max_rows=scheduler.max_num_batched_tokens,
        threads=threads,
        activations=compute.activations,
        share_prefixes=compute.shared_prefix_attention,
        pool=target.pool,
        pages=pages,
    )
    family(config.architecture)(backend, config, Source(backend, draft))
    times = StepTimeModel(step_cost(config, backend.arena.used_bytes, threads, rates))
    drafter = ModelDrafter(backend, batch, times, has_own_kv=kv_cache.draft is not None)
    drafter.probe()
    return drafter


def check_vocabulary(target: Tokenizer, draft: Checkpoint, vocab_size: int) -> None:
    """A draft's token must mean the same to the target. Raises ConfigError."""
    if draft.config.vocab_size != vocab_size:
        raise ConfigError(
            f"--spec-model {draft.name} has {draft.config.vocab_size} tokens, the model {vocab_size}"
        )
    other = Tokenizer(draft.tokenizer)
    for token in range(vocab_size):
        ours, theirs = target.token_text(token), other.token_text(token)
        if ours != theirs:
            raise ConfigError(
                f"--spec-model {draft.name} has another vocabulary: token {token} is {theirs!r}, of the model {ours!r}"
            )
