"""Qwen2 and Qwen2.5: Llama's order of operations with biases on q, k and v (`ModelConfig.qkv_bias`)."""

from __future__ import annotations

from poise.models.llama import record

__all__ = ["record"]
