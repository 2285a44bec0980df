"""Users' own prompts: a JSONL file of text, token ids or chat messages.

Invariant: a file is read whole and checked before a run starts; each complaint names file and line.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from poise.bench.lengths import Lengths
from poise.bench.record import RecordError
from poise.bench.schedule import PlannedRequest, Prompt
from poise.bench.workloads import Kind

PROMPT_KEYS = ("prompt", "text", "messages", "prompt_token_ids")
OUTPUT_KEYS = ("output_tokens", "max_tokens", "output_length")


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One line; `max_tokens` is None where the line does not say."""

    prompt: Prompt
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class PromptFile:
    """Prompts in the order of the file, or shuffled by the seed; begun again at its end."""

    path: Path
    digest: str
    prompts: tuple[FilePrompt, ...]
    output_lengths: Lengths
    ignore_eos: bool = False
    shuffle: bool = False

    def requests(self, random_source: random.Random, kind: Kind) -> Iterator[PlannedRequest]:
        order = list(self.prompts)
        if self.shuffle:
            random_source.shuffle(order)
        while True:
            for item in order:
                length = item.max_tokens or self.output_lengths.draw(random_source)
                yield self._request(item.prompt, length, kind)

    def _request(self, prompt: Prompt, length: int, kind: Kind) -> PlannedRequest:
        if isinstance(prompt, str):
            fitted: Prompt = [{"role": "user", "content": prompt}] if kind == "chat" else prompt
            return PlannedRequest(fitted, length, None, None, self.ignore_eos)
        is_messages = isinstance(prompt[0], dict)
        if is_messages != (kind == "chat"):
            needed = "chat" if is_messages else "completions"
            raise RecordError(f"{self.path}: its prompts are for the {needed} endpoint")
        known = None if is_messages else len(prompt)
        return PlannedRequest(prompt, length, None, known, self.ignore_eos)

    def describe(self) -> dict[str, Any]:
        return {
            "name": "custom",
            "file": self.path.name,
            "file_sha256": self.digest,
            "num_prompts": len(self.prompts),
            "output_lengths": self.output_lengths.describe(),
            "ignore_eos": self.ignore_eos,
            "shuffle": self.shuffle,
        }


def read_prompts(
    path: Path, output_lengths: Lengths, *, ignore_eos: bool = False, shuffle: bool = False
) -> PromptFile:
    """Reads a file whose lines are strings, or objects with prompt, text, prompt_token_ids or messages.

    Raises RecordError naming file and line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}") from None
    prompts = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(msgspec.json.decode(line)))
        except (msgspec.MsgspecError, ValueError) as error:
            raise RecordError(f"{path}:{number}: {error}") from None
    if not prompts:
        raise RecordError(f"{path}: no prompts in it")
    digest = sha256(content).hexdigest()
    return PromptFile(path, digest, tuple(prompts), output_lengths, ignore_eos, shuffle)


def _prompt(line: Any) -> FilePrompt:
    if isinstance(line, str) and line:
        return FilePrompt(line, None)
    if not isinstance(line, dict):
        raise ValueError("a line must be a string or an object")
    found = [key for key in PROMPT_KEYS if key in line]
    if len(found) != 1:
        raise ValueError(f"a line needs one of {', '.join(PROMPT_KEYS)}; it has {found or 'none'}")
    value = line[found[0]]
    if not _is_prompt(value):
        raise ValueError(f"{found[0]} is neither text, token ids nor chat messages, or is empty")
    lengths = [line[key] for key in OUTPUT_KEYS if line.get(key) is not None]
    if lengths and (not isinstance(lengths[0], int) or lengths[0] < 1):
        raise ValueError(f"output length {lengths[0]!r} is not a positive whole number")
    return FilePrompt(value, lengths[0] if lengths else None)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    if not isinstance(value, list) or not value:
        return False
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return True
    return all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value)
