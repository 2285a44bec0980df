"""Configuration: small frozen dataclasses, each constructor of the system takes its own.

`resolve()` (flag > environment > file > default, keeping where each value came from) belongs here too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Paged KV cache. `memory_bytes=None` sizes it from what the machine still allows."""

    block_size: int = 16  # tokens: 16, 32 or 64
    memory_bytes: int | None = None
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step. `max_model_len=None` takes the model's own."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """`threads=None`: physical cores within the affinity mask and the cgroup quota."""

    threads: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the model comes from: a registry name, a GGUF file, a Hugging Face folder, or hf:org/repo[@revision]."""

    model: str = "smollm2-135m"
    served_name: str | None = None
    offline: bool = False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP edge. `lenient` drops unknown parameters with a warning instead of refusing them."""

    host: str = "127.0.0.1"
    port: int = 8000
    lenient: bool = False
    log_format: str = "text"  # text or json
    max_body_bytes: int = 4 * 1024 * 1024
