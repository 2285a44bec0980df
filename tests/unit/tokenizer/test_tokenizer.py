"""Encoding and decoding: parity with what the library does, control tokens, damaged metadata."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from poise.errors import InvalidRequestError, ModelFileError
from poise.models.config import TokenizerData
from poise.tokenizer import Tokenizer
from tiny_tokenizers import (
    CONTROL_TOKENS,
    KINDS,
    build,
    byte_level_metadata,
    sentencepiece_metadata,
    tokenizer_of,
)

# SentencePiece can't tell U+2581 from a space.
CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="▁")
SPELLINGS = st.lists(
    st.sampled_from(
        [*CONTROL_TOKENS, "<unk>", "<think>", "<|im", "_start|>", "<", ">", " ", "hello"]
    )
    | st.text(CHARACTERS, max_size=4),
    max_size=8,
).map("".join)


def test_smollm_splits_digits_and_merges() -> None:
    tokenizer = tokenizer_of("byte level")
    texts = [
        tokenizer.token_text(i)
        for i in tokenizer.encode("hello  hello12", add_special_tokens=False)
    ]
    assert texts == ["hello", "Ġ", "Ġhello", "1", "2"]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "a 123b", ["a", "Ġ123", "b"]),
        ("default", "I'LL x", ["I", "'", "LL", "Ġx"]),
        ("smollm", "a 12b", ["a", "Ġ", "1", "2", "b"]),
        ("llama-bpe", "I'LL 12345\n\n x", ["I", "'LL", "Ġ", "123", "45", "ĊĊ", "Ġx"]),
        ("qwen2", "e\u0301 12", ["Ã©", "Ġ", "1", "2"]),
    ],
)
def test_pre_tokenizer_by_name(pre: str, text: str, words: list[str]) -> None:
    """Each word the pre-tokenizer cuts is a token of this vocabulary, so tokens show the cuts."""
    metadata = byte_level_metadata(pre)
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, list)
    types += [1] * (len(tokens) - len(types))
    tokenizer = build(metadata)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in ids] == words


def test_sentencepiece_prefix_scores_and_bytes() -> None:
    def texts(kind: str, text: str) -> list[str]:
        tokenizer = tokenizer_of(kind)
        return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    assert texts("sentencepiece", "hello world") == ["▁hello", "▁world"]
    assert texts("sentencepiece without prefix", "hello world") == ["hello", "▁world"]
    assert texts("sentencepiece without prefix", "日本語") == ["日本", "<0xE8>", "<0xAA>", "<0x9E>"]
    assert texts("sentencepiece without prefix", "   he  or") == ["▁▁▁", "he", "▁▁", "or"]


@pytest.mark.parametrize("kind", KINDS)
def test_bos_is_added_where_the_file_says_so(kind: str) -> None:
    metadata = byte_level_metadata() if kind == "byte level" else sentencepiece_metadata()
    tokenizer = build(metadata, add_bos=True)
    bos = tokenizer.bos_token_id
    assert bos is not None
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello", add_special_tokens=True) == [bos, *plain]
    assert tokenizer.encode("hello", add_special_tokens=True, parse_special=False) == [bos, *plain]
    assert tokenizer.encode("", add_special_tokens=True) == [bos]
    assert tokenizer_of(kind).encode("", add_special_tokens=True) == []


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_are_parsed_only_on_demand(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = "<|im_start|>hello</s>"
    parsed = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in parsed if tokenizer.is_special(i)] == [
        "<|im_start|>",
        "</s>",
    ]
    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert not tokenizer.special_ids.intersection(plain)
    assert tokenizer.decode(plain, skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=SPELLINGS)
def test_plain_encoding_never_yields_control_tokens(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert not tokenizer.special_ids.intersection(ids)
    # SentencePiece with a prefix space adds one after each token that is cut out first.
    if kind != "sentencepiece" or "<think>" not in text:
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    if not tokenizer.control_tokens.find(text):
        assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_join_to_the_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = "hello  日本語 é\n🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert joined.decode().removeprefix(" ") == text
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_text(10**6) == ""


def test_lone_surrogates_are_refused() -> None:
    for parse_special in (True, False):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            tokenizer_of("byte level").encode(
                "a\ud800", add_special_tokens=False, parse_special=parse_special
            )


def _json_tokenizer() -> tokenizers.Tokenizer:
    """As Mistral's: a space before the start of the text only, added tokens past the model's vocabulary."""
    inner = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate("▁hi<>sea")}, []))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    inner.add_special_tokens(["<s>", "<e>"])
    inner.enable_truncation(3)
    inner.enable_padding(length=64)
    return inner


def test_tokenizer_json_is_not_truncated_or_padded_and_keeps_one_prefix() -> None:
    data = TokenizerData(
        tokenizer_json=_json_tokenizer().to_str(),
        bos_token_id=8,
        eos_token_ids=(9,),
        add_bos_token=True,
        chat_template="<e>{{ messages[0]['content'] }}<e>",
    )
    tokenizer = Tokenizer(data)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("hi", add_special_tokens=True)] == [
        "<s>", "▁", "h", "i",
    ]  # fmt: skip
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi<s>"}])
    assert [tokenizer.token_text(i) for i in chat] == ["<e>", *"hi<s>", "<e>"]
    assert chat[1:3] == tokenizer.encode_chat([{"role": "user", "content": "hi"}])[1:3]


def test_unsupported_decoder_is_named() -> None:
    inner = _json_tokenizer()
    inner.decoder = decoders.WordPiece()
    with pytest.raises(ModelFileError, match="WordPiece"):
        Tokenizer(TokenizerData(tokenizer_json=inner.to_str()))


@pytest.mark.parametrize("text", ["", "{}", "[1", json.dumps({"model": {"type": "Nonsense"}})])
def test_damaged_tokenizer_json(text: str) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer(TokenizerData(tokenizer_json=text))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model", "bert", "bert"),
        ("model", None, "model"),
        ("pre", "tekken", "tekken"),
        ("tokens", None, "tokens"),
        ("tokens", [1, 2], "tokens"),
        ("token_type", [1], "token_type"),
        ("merges", None, "merges"),
        ("merges", ["ab"], r"merges\[0\]"),
        ("merges", ["zz qq"], "merges"),
        ("eos_token_id", 10**6, "eos_token_id"),
        ("bos_token_id", True, "bos_token_id"),
        ("add_eos_token", 3, "add_eos_token"),
    ],
)
def test_damaged_metadata_names_the_field(key: str, value: object, named: str) -> None:
    metadata = byte_level_metadata()
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(ModelFileError, match=named):
        Tokenizer(TokenizerData(gguf=metadata))


@pytest.mark.parametrize("scores", [None, [0.5], ["x"]])
def test_damaged_scores(scores: object) -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.scores"] = scores
    with pytest.raises(ModelFileError, match="scores"):
        Tokenizer(TokenizerData(gguf=metadata))
