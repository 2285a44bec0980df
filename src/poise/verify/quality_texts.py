"""The texts that quality is measured on, and their windows of tokens.

Prose and code come with every Python, the dialogue with poise; nothing is downloaded. Invariant: a text is known by the
sha256 of its bytes, since another Python ships other texts.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

from poise.tokenizer.tokenizer import Tokenizer
from poise.verify.quality_record import JUDGED

WINDOW = 512  # tokens
FIRST_SCORED = WINDOW // 2  # the first half is context only

Windows = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Text:
    """A named text; `judged` ones must meet the targets, the others are reported."""

    name: str
    content: str
    judged: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def _prose() -> str:
    """The language reference as `help()` shows it."""
    return "\n".join(topics.values())


def _code() -> str:
    return "\n".join(inspect.getsource(module) for module in (argparse, heapq))


def _dialogue() -> str:
    return Path(__file__).with_name("quality_dialogue.txt").read_text("utf-8")


_TEXTS: dict[str, Callable[[], str]] = {"prose": _prose, "code": _code, "dialogue": _dialogue}
TEXT_NAMES = tuple(_TEXTS)


def read_text(name: str) -> Text:
    """The text of that name, one of TEXT_NAMES."""
    return Text(name, _TEXTS[name](), name in JUDGED)


def windows_of(text: Text, tokenizer: Tokenizer, num_windows: int) -> Windows:
    """int32 [at most num_windows, WINDOW]: the text's first tokens, in windows that do not overlap.

    Each window begins with BOS where the model wants one; what is left over at the end is dropped.
    """
    ids = tokenizer.encode(text.content, add_special_tokens=False, parse_special=False)
    start = tokenizer.encode("", add_special_tokens=True)[:1]
    size = WINDOW - len(start)
    count = min(num_windows, len(ids) // size)
    body = np.array(ids[: count * size], np.int32).reshape(count, size)
    return np.concatenate([np.tile(np.array(start, np.int32), (count, 1)), body], axis=1)
