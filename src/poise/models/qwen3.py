"""Qwen3 (dense): Llama's order of operations with a norm over each q and k head (`ModelConfig.qk_norm`)."""

from __future__ import annotations

from poise.models.llama import record

__all__ = ["record"]
