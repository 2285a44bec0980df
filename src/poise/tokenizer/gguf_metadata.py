"""Builds a `tokenizers.Tokenizer` from the `tokenizer.ggml.*` metadata of a GGUF file.

Owns the mapping from GGUF's names to normalizer, pre-tokenizer, model and decoder. Knows nothing of files.
Invariant: a result encodes and decodes as the Hugging Face tokenizer that the file was converted from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from poise.errors import ModelFileError

# Values of tokenizer.ggml.token_type.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
_ADDED = frozenset({UNKNOWN, CONTROL, USER_DEFINED})

MAX_PIECE = 256  # characters; a longer SentencePiece is never built by merges

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REMAINDER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = _CONTRACTIONS + r"\p{N}{1,3}" + _REMAINDER
QWEN2_PATTERN = _CONTRACTIONS + r"\p{N}" + _REMAINDER


def _split_by(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


@dataclass(frozen=True, slots=True)
class _ByteLevelKind:
    """What `tokenizer.ggml.pre` stands for. `ignore_merges`: a word that is a token is taken whole."""

    pre_tokenizer: Callable[[], Any]
    compose: bool = False  # Unicode NFC before anything else
    ignore_merges: bool = False


_GPT2 = _ByteLevelKind(_gpt2)
_SINGLE_DIGITS = _ByteLevelKind(_single_digits)
_LLAMA3 = _ByteLevelKind(lambda: _split_by(LLAMA3_PATTERN), ignore_merges=True)
_QWEN2 = _ByteLevelKind(lambda: _split_by(QWEN2_PATTERN), compose=True)

_BYTE_LEVEL_KINDS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
}


def build_from_gguf(metadata: Mapping[str, object], *, add_bos: bool) -> tokenizers.Tokenizer:
    """The tokenizer that a file's `tokenizer.*` metadata describes; ModelFileError names a bad or unknown value."""
    vocabulary = _read_vocabulary(metadata)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _build_byte_level(metadata, vocabulary)
    elif model == "llama":
        tokenizer = _build_sentencepiece(metadata, vocabulary)
    else:
        raise ModelFileError(
            f"tokenizer.ggml.model is {model!r}, which is not supported: expected gpt2 or llama"
        )
    _add_tokens(tokenizer, vocabulary)
    add_eos = _flag(metadata, "add_eos_token", False)
    set_template(
        tokenizer, vocabulary.bos if add_bos else None, vocabulary.eos if add_eos else None
    )
    return tokenizer


def set_template(tokenizer: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """Makes `add_special_tokens=True` put `bos` before and `eos` after a text."""
    ids = [token for token in (bos, eos) if token is not None]
    if not ids:
        return
    names = {token: tokenizer.id_to_token(token) for token in ids}
    before = [names[bos]] if bos is not None else []
    after = [names[eos]] if eos is not None else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(name, token) for token, name in names.items()],
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens and their types by id, and the ids with a role."""

    tokens: Sequence[str]
    types: Sequence[int]
    ids: dict[str, int]
    bos: int | None
    eos: int | None
    unknown: int | None


def _read_vocabulary(metadata: Mapping[str, object]) -> _Vocabulary:
    tokens = _array(metadata, "tokens", str)
    types: Sequence[int] = [1] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _array(metadata, "token_type", int)
    if len(types) != len(tokens):
        raise ModelFileError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    bos, eos, unknown = (
        _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "unknown")
    )
    ids = {token: id_ for id_, token in enumerate(tokens)}
    return _Vocabulary(tokens, types, ids, bos, eos, unknown)


def _build_byte_level(
    metadata: Mapping[str, object], vocabulary: _Vocabulary
) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    kind = _BYTE_LEVEL_KINDS.get(pre) if isinstance(pre, str) else None
    if kind is None:
        known = ", ".join(sorted(_BYTE_LEVEL_KINDS))
        raise ModelFileError(
            f"tokenizer.ggml.pre is {pre!r}, which is not supported: expected one of {known}"
        )
    lines = _array(metadata, "merges", str)
    if wrong := [i for i, line in enumerate(lines) if " " not in line]:
        raise ModelFileError(
            f"tokenizer.ggml.merges[{wrong[0]}] is {lines[wrong[0]]!r}, expected two pieces"
        )
    merges = [cast("tuple[str, str]", tuple(line.split(" ", 1))) for line in lines]
    options = {"ignore_merges": True} if kind.ignore_merges else {}
    tokenizer = tokenizers.Tokenizer(_bpe(vocabulary.ids, merges, options))
    if kind.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = kind.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(
    metadata: Mapping[str, object], vocabulary: _Vocabulary
) -> tokenizers.Tokenizer:
    """SentencePiece BPE as BPE with byte fallback: spaces are U+2581, scores give the order of merges."""
    options: dict[str, Any] = {"byte_fallback": True, "fuse_unk": True}
    if vocabulary.unknown is not None:
        options["unk_token"] = vocabulary.tokens[vocabulary.unknown]
    merges = _merges_from_scores(metadata, vocabulary)
    tokenizer = tokenizers.Tokenizer(_bpe(vocabulary.ids, merges, options))
    space_prefix = _flag(metadata, "add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if space_prefix else replace
    )
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        decoding.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_from_scores(
    metadata: Mapping[str, object], vocabulary: _Vocabulary
) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best score first; longer halves first among equals.

    Control tokens take no part: text alone must never merge into one.
    """
    scores = _array(metadata, "scores", float)
    tokens, ids = vocabulary.tokens, vocabulary.ids
    if len(scores) != len(tokens):
        raise ModelFileError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    barred = {token for token, kind in zip(tokens, vocabulary.types) if kind in (UNKNOWN, CONTROL)}
    usable = {token: id_ for token, id_ in ids.items() if token not in barred}
    known = usable.get
    ranked: list[tuple[float, int, int, int, int]] = []
    for token, score in zip(tokens, scores):
        if token in barred or len(token) > MAX_PIECE:
            continue
        for i in range(1, len(token)):
            left, right = known(token[:i]), known(token[i:])
            if left is not None and right is not None:
                ranked.append((score, i, len(token) - i, left, right))
    ranked.sort(reverse=True)
    return [(tokens[left], tokens[right]) for _, _, _, left, right in ranked]


def _add_tokens(tokenizer: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens become special, user-defined ones are matched before anything else but are text."""
    # A user-defined piece with U+2581 for a space exists in normalised text only. (Where the normaliser also adds a
    # space in front, the library would put that into the piece too: there such a piece is left to the merges.)
    in_normalized = isinstance(tokenizer.normalizer, normalizers.Replace)
    kinds = {id_: kind for id_, kind in enumerate(vocabulary.types) if kind in _ADDED}
    named = (vocabulary.bos, vocabulary.eos, vocabulary.unknown)
    kinds.update({id_: CONTROL for id_ in named if id_ is not None})
    added = []
    for id_ in sorted(kinds):  # so a copy that adds them in this order gets the same ids
        token, is_text = vocabulary.tokens[id_], kinds[id_] == USER_DEFINED
        if token:
            normalized = in_normalized and is_text and "▁" in token
            added.append(AddedToken(token, special=not is_text, normalized=normalized))
    tokenizer.add_tokens(added)


def _bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], options: dict[str, Any]
) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(f"tokenizer.ggml.merges do not fit the vocabulary: {error}") from None


def _array(metadata: Mapping[str, object], name: str, kind: type) -> Sequence[Any]:
    """`tokenizer.ggml.{name}`, a list of `kind`; anything array-like with `tolist` is taken too."""
    key = f"tokenizer.ggml.{name}"
    values = metadata.get(key)
    if values is not None and not isinstance(values, list) and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise ModelFileError(f"{key} is missing or not a list")
    if set(map(type, values)) - {kind}:
        raise ModelFileError(f"{key} holds something other than {kind.__name__} values")
    return values


def _flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise ModelFileError(f"{key} is {value!r}, expected true or false")
    return value


def _token_id(metadata: Mapping[str, object], name: str, vocab_size: int) -> int | None:
    """`tokenizer.ggml.{name}_token_id`, checked against the vocabulary; None where the file lacks it."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ModelFileError(f"{key} is {value!r}, the vocabulary has {vocab_size} tokens")
    return value
