"""Joined deltas equal the decoding of all ids, for any ids and any split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.engine.detokenizer import create_detokenizer
from tiny_tokenizers import KINDS, tokenizer_of


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_join_to_decode(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    any_id = st.integers(0, tokenizer.vocab_size + 3)
    texts = st.text(max_size=6).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    parts = data.draw(st.lists(st.lists(any_id, max_size=4) | texts, max_size=8))
    detokenizer = create_detokenizer(tokenizer, skip_special_tokens=skip)
    deltas = [detokenizer.append(part) for part in parts]
    deltas.append(detokenizer.flush())
    ids = [token for part in parts for token in part]
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(data=st.binary(max_size=24))
def test_broken_utf8_gives_the_same_replacements(data: bytes) -> None:
    tokenizer = tokenizer_of("byte level")
    byte_ids = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [byte_ids[bytes([byte])] for byte in data]
    detokenizer = create_detokenizer(tokenizer, skip_special_tokens=True)
    deltas = [detokenizer.append([token]) for token in ids]
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(deltas) + detokenizer.flush() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_characters_are_never_cut(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = " žluťoučký 語🙂 한"
    detokenizer = create_detokenizer(tokenizer, skip_special_tokens=True)
    deltas = [
        detokenizer.append([token]) for token in tokenizer.encode(text, add_special_tokens=False)
    ]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) + detokenizer.flush() == text


def test_special_tokens_are_hidden_or_shown() -> None:
    tokenizer = tokenizer_of("byte level")
    ids = tokenizer.encode("hello<|im_end|>", add_special_tokens=False)
    shown = create_detokenizer(tokenizer, skip_special_tokens=False)
    assert shown.append(ids) == "hello<|im_end|>"
    hidden = create_detokenizer(tokenizer, skip_special_tokens=True)
    assert hidden.append(ids) == "hello"
