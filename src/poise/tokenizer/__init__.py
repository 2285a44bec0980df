"""Text to token ids and back, and chat templates; built from what the model's files say, nothing else."""

from poise.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
