"""poise: LLM serving, an engine and a laboratory. The offline API; importing it loads nothing heavy
until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poise.core.sampling_params import SamplingParams
    from poise.engine.request_output import CompletionOutput, Logprob, RequestOutput
    from poise.errors import (
        ConfigError,
        EngineDeadError,
        InvalidRequestError,
        ModelFileError,
        ModelNotFoundError,
        PoiseError,
        PullError,
    )
    from poise.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "SamplingParams",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "PoiseError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "ModelFileError",
    "PullError",
    "ConfigError",
    "EngineDeadError",
    "__version__",
]

_MODULES = {
    "LLM": "poise.llm",
    "SamplingParams": "poise.core.sampling_params",
    "RequestOutput": "poise.engine.request_output",
    "CompletionOutput": "poise.engine.request_output",
    "Logprob": "poise.engine.request_output",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in __all__:
        return getattr(import_module("poise.errors"), name)
    raise AttributeError(f"module 'poise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
