"""Which file records which architecture."""

from __future__ import annotations

from collections.abc import Callable

from poise.errors import ModelFileError
from poise.kernels.ops import Ops
from poise.models import gemma3, llama, qwen2, qwen3
from poise.models.config import ModelConfig
from poise.models.weights import Source

Record = Callable[[Ops, ModelConfig, Source], None]

FAMILIES: dict[str, Record] = {
    "llama": llama.record,
    "qwen2": qwen2.record,
    "qwen3": qwen3.record,
    "gemma3": gemma3.record,
}


def family(architecture: str) -> Record:
    """The function that records a model of this architecture. Raises ModelFileError for an unknown one."""
    if architecture not in FAMILIES:
        raise ModelFileError(
            f"architecture {architecture!r} is not supported; known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]
