"""Tiny models behind the real executor, and the logits of any batch laid out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from poise.config import (
    Activations,
    CacheConfig,
    ComputeConfig,
    KVCacheDtype,
    SchedulerConfig,
)
from poise.executor.load import LoadedExecutor, load_executor
from poise.kernels.cpu.backend import CPUBackend
from poise.kernels.ops import KVShape, Step
from poise.kernels.reference import ReferenceBackend
from poise.models.cost import KV_FORMATS, kv_bytes_per_layer_token
from poise.models.families import family
from poise.models.weights import Source
from poise.weights.open_checkpoint import open_checkpoint
from tiny_models import TinyModel, write_gguf

DATA = Path(__file__).parents[2] / "data"
MAX_TOKENS = 512
MAX_SEQUENCES = 48
NUM_BLOCKS = 160  # of 16 tokens, or as many tokens in larger ones
NUMERICS = (  # settings that choose formulas
    {"activations": "int8", "kv_dtype": "bf16"},
    {"activations": "bf16", "kv_dtype": "bf16"},
    {"activations": "int8", "kv_dtype": "int8"},
    {"activations": "bf16", "kv_dtype": "int8"},
)


@dataclass(frozen=True)
class Part:
    """Rows of one sequence in a step: its tokens, the first position among them, its blocks."""

    token_ids: np.ndarray
    first: int
    blocks: np.ndarray


def tiny_gguf(folder: Path, architecture: str) -> Path:
    """A model of this architecture whose matrices mix containers; the qwen2 one is wide enough for K-quants."""
    if architecture == "llama":
        model = TinyModel("llama", num_heads=6, num_kv_heads=2, seed=1)
        types = {"q": "Q4_0", "k": "Q5_0", "v": "Q5_1", "o": "Q8_0", "gate": "Q4_1", "down": "F16"}
    elif architecture == "qwen2":
        model = TinyModel("qwen2", hidden_size=256, intermediate_size=256, num_kv_heads=1, seed=2)
        types = {"q": "Q4_K", "k": "Q5_K", "v": "Q6_K", "up": "Q4_K", "down": "Q5_K"}
    elif architecture == "gemma3":
        model = TinyModel(
            "gemma3",
            intermediate_size=256,
            num_layers=4,
            num_kv_heads=1,
            head_dim=64,
            tie_word_embeddings=True,
            window_period=3,
            seed=4,
        )
        types = {"embed": "Q8_0", "o": "Q6_K", "v": "Q8_0", "down": "Q4_K"}
        path = folder / "gemma3.gguf"
        return path if path.exists() else write_gguf(path, model, "Q5_0", types)
    else:
        model = TinyModel("qwen3", head_dim=32, num_heads=2, num_kv_heads=2, seed=3)
        types = {"q": "BF16", "k": "BF16", "v": "Q8_0", "gate": "F16", "embed": "BF16"}
    path = folder / f"{architecture}.gguf"
    return path if path.exists() else write_gguf(path, model, "Q4_1", types)


def load(
    path: Path,
    monkeypatch,
    isa: str,
    threads: int = 1,
    block_size: int = 16,
    activations: Activations = "int8",
    kv_dtype: KVCacheDtype = "bf16",
) -> LoadedExecutor:
    """The executor of a model file, with room for NUM_BLOCKS · 16 tokens, all pages poisoned."""
    monkeypatch.setenv("POISE_ISA", isa)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    token_bytes = kv_bytes_per_layer_token(config, KV_FORMATS[kv_dtype]) * config.num_layers
    memory = NUM_BLOCKS * 16 * int(token_bytes)
    loaded = load_executor(
        checkpoint,
        CacheConfig(block_size=block_size, memory_bytes=memory, dtype=kv_dtype),
        SchedulerConfig(max_num_seqs=MAX_SEQUENCES, max_num_batched_tokens=MAX_TOKENS),
        ComputeConfig(threads=threads, activations=activations),
    )
    poison(loaded)
    return loaded


def backend_of(loaded: LoadedExecutor) -> CPUBackend:
    backend = loaded.executor._backend  # type: ignore[attr-defined]
    assert isinstance(backend, CPUBackend)
    return backend


def poison(loaded: LoadedExecutor) -> None:
    """Fills all pages with NaN."""
    pages = backend_of(loaded).pages
    for block in range(pages.num_blocks):
        pages.fill(block, 0xFF)


def step_of(parts: list[Part], num_groups: int = 1, blocks_per_group: int = 0) -> Step:
    """A step that wants the logits of every row; each KV group has its own stretch of the pool."""
    width = max(len(part.blocks) for part in parts)
    rows = [len(part.token_ids) for part in parts]
    positions = [np.arange(part.first, part.first + len(part.token_ids)) for part in parts]
    padded = [np.pad(part.blocks, (0, width - len(part.blocks))) for part in parts]
    starts = np.arange(num_groups) * blocks_per_group
    tables = [np.add.outer(starts, blocks).reshape(-1) for blocks in padded]
    return Step(
        token_ids=np.concatenate([part.token_ids for part in parts]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_start=np.cumsum([0, *rows]).astype(np.int32),
        block_tables=np.array(tables, np.int32),
        logit_rows=np.arange(sum(rows), dtype=np.int32),
    )


def native_logits(
    loaded: LoadedExecutor, parts: list[Part], wanted: np.ndarray | None = None
) -> np.ndarray:
    """Float32 [rows, vocabulary]; of the rows `wanted`, in that order, where they are given."""
    groups = len(loaded.kv_groups)
    step = step_of(parts, groups, loaded.num_blocks // groups)
    if wanted is not None:
        step = replace(step, logit_rows=wanted.astype(np.int32))
    logits = np.empty((len(step.logit_rows), loaded.vocab_size), np.float32)
    backend_of(loaded).run(step, logits=logits)
    return logits


class Reference:
    """A model of `poise.models` on the numpy reference."""

    def __init__(
        self,
        path: Path,
        mode: str,
        num_blocks: int = 32,
        activations: Activations = "int8",
        kv_dtype: KVCacheDtype = "bf16",
    ) -> None:
        checkpoint = open_checkpoint(path)
        config = checkpoint.config
        heads, head_dim = config.num_kv_heads, config.head_dim
        shape = KVShape(config.num_layers, heads, head_dim, 16, num_blocks, dtype=kv_dtype)
        self.backend = ReferenceBackend(shape, mode, activations)  # type: ignore[arg-type]
        self._source = Source(self.backend, checkpoint)
        self._record, self._config = family(config.architecture), config

    def logits(self, parts: list[Part]) -> np.ndarray:
        return self.backend.run(
            step_of(parts), lambda ops: self._record(ops, self._config, self._source)
        )
