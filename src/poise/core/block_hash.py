"""Names for blocks of KV: a block's hash says what was computed, by which arithmetic, and for whom.

Knows no pages and no requests. Invariant: two blocks whose fields differ have different preimages
(every field carries its tag and its length), and without the key nobody can find two blocks of one hash.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

DIGEST_BYTES = 32

Field = tuple[bytes, bytes]
"""A tag of one byte and the field's bytes."""

ROOT, PARENT, TOKENS, SALT = b"I", b"P", b"T", b"S"


def encode_fields(named: Iterable[Field]) -> bytes:
    """One string of tag, length (8 bytes, little endian) and content per field: no two lists share it."""
    return b"".join(tag + len(data).to_bytes(8, "little") + data for tag, data in named)


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """All that decides a block's bytes beside its tokens, as text; `adapter` is its content's digest.

    The tags are the fields' places: a field may be added at the end, none may change its place.
    """

    model: str
    arithmetic: str  # of weights and activations, with the version of its formulas
    kv_dtype: str
    rope: str
    windows: str
    adapter: str = ""

    def encode(self) -> bytes:
        names = [field.name for field in fields(self)]
        return encode_fields(
            (bytes([number]), getattr(self, name).encode()) for number, name in enumerate(names)
        )


class BlockHasher:
    """Full blocks by identity.

        hash of block i = BLAKE2b(key; parent: hash of block i-1, token ids of block i [, salt])
        parent of block 0 = BLAKE2b(key; identity)

    Blocks wholly inside the first `num_public_tokens` tokens go without the salt: they are everybody's.
    The first block after them mixes the salt in, and with it every block that follows. `key` (at most
    64 bytes) is secret.
    """

    def __init__(self, *, key: bytes, identity: bytes, block_size: int) -> None:
        self.block_size = block_size
        self._key = key
        self._pack_tokens = struct.Struct(f"<{block_size}I").pack
        self._root = self.digest((ROOT, identity))

    def extend(
        self, hashes: list[bytes], token_ids: Sequence[int], salt: bytes, num_public_tokens: int
    ) -> None:
        """Appends to `hashes` those of the full blocks of `token_ids` that it lacks."""
        size = self.block_size
        num_public = num_public_tokens // size
        for i in range(len(hashes), len(token_ids) // size):
            parent = hashes[-1] if hashes else self._root
            tokens = self._pack_tokens(*token_ids[i * size : (i + 1) * size])
            hashes.append(
                self.digest(*block_fields(parent, tokens, salt if i == num_public else None))
            )

    def digest(self, *named: Field) -> bytes:
        return hashlib.blake2b(
            encode_fields(named), key=self._key, digest_size=DIGEST_BYTES
        ).digest()


def block_fields(parent: bytes, tokens: bytes, salt: bytes | None) -> tuple[Field, ...]:
    """The fields of a block; `salt` is that of the first private block and None for all others."""
    chained = ((PARENT, parent), (TOKENS, tokens))
    return chained if salt is None else (*chained, (SALT, salt))
