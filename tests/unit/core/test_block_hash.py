"""What a block's name names: every field, alone, apart from every other, and for whom it is shared."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.core.block_hash import (
    PARENT,
    ROOT,
    SALT,
    TOKENS,
    BlockHasher,
    CacheIdentity,
    Field,
    block_fields,
    encode_fields,
)

IDENTITY = CacheIdentity("digest", "int8.1", "bf16", "theta", "512")
MANY_FIELDS = st.lists(
    st.tuples(st.sampled_from([ROOT, PARENT, TOKENS, SALT, b"\0"]), st.binary(max_size=20)),
    max_size=5,
)


def decode_fields(data: bytes) -> list[Field]:
    """The slow twin's other half: reads back what `encode_fields` wrote."""
    result = []
    while data:
        tag, length = data[:1], int.from_bytes(data[1:9], "little")
        result.append((tag, data[9 : 9 + length]))
        data = data[9 + length :]
    return result


@given(named=MANY_FIELDS)
def test_fields_can_be_read_back_so_no_two_lists_share_a_preimage(named: list[Field]) -> None:
    assert decode_fields(encode_fields(named)) == named


@given(one=MANY_FIELDS, other=MANY_FIELDS)
def test_two_different_lists_of_fields_differ_in_their_preimage(
    one: list[Field], other: list[Field]
) -> None:
    assert (encode_fields(one) == encode_fields(other)) == (one == other)


TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
IDENTITIES = st.builds(CacheIdentity, TEXT, TEXT, TEXT, TEXT, TEXT, TEXT)


@given(one=IDENTITIES, other=IDENTITIES)
def test_two_identities_differ_in_their_preimage(one: CacheIdentity, other: CacheIdentity) -> None:
    assert (one.encode() == other.encode()) == (one == other)


SALTS = st.none() | st.binary(max_size=8)


@given(
    st.binary(max_size=8), st.binary(max_size=8), SALTS, st.binary(max_size=8), st.binary(), SALTS
)
def test_two_blocks_differ_in_their_preimage(
    parent: bytes,
    tokens: bytes,
    salt: bytes | None,
    parent2: bytes,
    tokens2: bytes,
    salt2: bytes | None,
) -> None:
    one, other = (parent, tokens, salt), (parent2, tokens2, salt2)
    assert (encode_fields(block_fields(*one)) == encode_fields(block_fields(*other))) == (
        one == other
    )


def hashes(
    tokens: list[int],
    salt: bytes = b"",
    num_public_tokens: int = 0,
    identity: CacheIdentity = IDENTITY,
    key: bytes = b"key",
) -> list[bytes]:
    result: list[bytes] = []
    hasher = BlockHasher(key=key, identity=identity.encode(), block_size=4)
    hasher.extend(result, tokens, salt, num_public_tokens)
    return result


@pytest.mark.parametrize("name", [field.name for field in fields(CacheIdentity)])
def test_changing_one_field_of_the_identity_changes_every_hash(name: str) -> None:
    tokens = list(range(12))
    base = hashes(tokens)
    changed = hashes(tokens, identity=replace(IDENTITY, **{name: getattr(IDENTITY, name) + "x"}))
    assert len(base) == len(changed) == 3
    assert not set(base) & set(changed)


def test_a_word_means_another_thing_in_another_field() -> None:
    """An adapter named like a tenant's salt, a window like a rope: each shift gives another name."""
    tokens = list(range(4))
    shifted = [
        hashes(tokens, salt=b"x"),
        hashes(tokens, identity=replace(IDENTITY, adapter="x")),
        hashes(tokens, identity=replace(IDENTITY, model="digestint8.1", arithmetic="")),
        hashes(tokens, identity=replace(IDENTITY, rope="", windows="theta512")),
        hashes(tokens, identity=replace(IDENTITY, rope="thet", windows="a512")),
        hashes(tokens, key=b"x"),
        hashes(tokens),
    ]
    assert len({name for one in shifted for name in one}) == len(shifted)


@pytest.mark.parametrize("num_public_tokens", range(13))
def test_blocks_wholly_inside_the_public_prefix_are_everybodys(num_public_tokens: int) -> None:
    tokens = list(range(12))
    one = hashes(tokens, b"tenant a", num_public_tokens)
    other = hashes(tokens, b"tenant b", num_public_tokens)
    shared = num_public_tokens // 4
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])
    assert one[:shared] == hashes(tokens, b"", 12)[:shared]


@given(
    st.binary(max_size=3), st.integers(0, 5), st.binary(max_size=3), st.integers(0, 5),
)  # fmt: skip
def test_private_blocks_are_equal_only_for_one_salt_and_one_border(
    salt: bytes, num_public: int, salt2: bytes, num_public2: int
) -> None:
    """A private block never has the name of a public one, nor that of another salt's."""
    tokens = list(range(20))
    one = hashes(tokens, salt, 4 * num_public)
    other = hashes(tokens, salt2, 4 * num_public2)
    for i in range(5):
        both_public = i < num_public and i < num_public2
        both_private = num_public == num_public2 <= i and salt == salt2
        assert (one[i] == other[i]) == (both_public or both_private)
