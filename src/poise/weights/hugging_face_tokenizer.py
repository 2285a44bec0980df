"""Tokenizer facts of a Hugging Face folder: ids that end a turn, BOS, special tokens, chat
template.

Knows the folder's JSON files, not how to tokenise. Invariant: every id it returns lies below the
vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from poise.errors import ModelFileError
from poise.models.config import TokenizerData
from poise.weights.json_file import read_json, read_text

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _PostProcessor(msgspec.Struct):
    type: str = ""
    single: list[dict[str, object]] = []
    processors: list[_PostProcessor] = []


class _TokenizerHead(msgspec.Struct):
    """The parts of tokenizer.json that matter here; the rest is skipped unread."""

    added_tokens: list[_AddedToken] = []
    post_processor: _PostProcessor | None = None


def read_tokenizer(folder: Path, vocab_size: int) -> TokenizerData:
    """Everything the folder says of its tokenizer. Raises ModelFileError, also if tokenizer.json is
    missing.
    """
    path = folder / "tokenizer.json"
    text = read_text(path)
    try:
        head = msgspec.json.decode(text, type=_TokenizerHead)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelFileError(f"{path}: is not a tokenizer: {error}") from None
    settings = _optional_json(folder / "tokenizer_config.json")
    special = {
        key: token for key in _SPECIAL if (token := _token_text(settings.get(key))) is not None
    }
    ids = {token.content: token.id for token in head.added_tokens}
    bos, ends = _ids_in_configs(folder, vocab_size)
    if special.get("eos_token") in ids:
        ends.append(ids[special["eos_token"]])
    if special.get("bos_token") in ids:
        bos = ids[special["bos_token"]]
    for token_id in (bos, *ends):
        if token_id is not None and not 0 <= token_id < vocab_size:
            raise ModelFileError(f"{folder}: special token id {token_id} is not below {vocab_size}")
    add_bos = settings.get("add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = special.get("bos_token") in list(_first_tokens(head.post_processor))
    return TokenizerData(
        tokenizer_json=text,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        add_bos_token=add_bos and bos is not None,
        chat_template=_chat_template(folder, settings),
        special_tokens=special,
    )


def _optional_json(path: Path) -> dict[str, object]:
    return read_json(path) if path.exists() else {}


def _ids_in_configs(folder: Path, vocab_size: int) -> tuple[int | None, list[int]]:
    """BOS, and all EOS ids: those of generation_config.json, then those of config.json."""
    bos: int | None = None
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        values = _optional_json(folder / name)
        if bos is None and isinstance(values.get("bos_token_id"), int):
            bos = values["bos_token_id"]  # type: ignore[assignment]
        eos = values.get("eos_token_id")
        for token_id in eos if isinstance(eos, list) else [eos]:
            if token_id is None:
                continue
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise ModelFileError(f"{folder / name}: 'eos_token_id' is {token_id!r}, not an id")
            ends.append(token_id)
    return bos, ends


def _token_text(value: object) -> str | None:
    """A special token is a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _first_tokens(processor: _PostProcessor | None) -> Iterator[str]:
    """The special tokens that post-processing may put before a single text."""
    if processor is None:
        return
    for inner in processor.processors:
        yield from _first_tokens(inner)
    for piece in processor.single[:1]:
        special = piece.get("SpecialToken")
        if isinstance(special, dict):
            yield str(special.get("id"))


def _chat_template(folder: Path, settings: dict[str, object]) -> str | None:
    """chat_template.jinja first, then tokenizer_config.json (a string, or a list with one named
    default).
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    return template if isinstance(template, str) else None
