"""API keys: how one looks, what is kept of it, and how a given one is told from the known.

Knows no tenants and no files. Invariant: of a key that we made only its digest is kept, and comparing takes the same
time whatever was given.

    poise_k3m9q0c2ax_V5f…     "poise", the key's name (10 characters, no secret), 256 random bits
    k3m9q0c2ax:9f86d0…        what a tenants file holds: the name, SHA-256 (hex) of name and secret

The secret has 256 bits of chance, so nothing slower than one SHA-256 is needed to make guessing hopeless; the name,
hashed with it, is the salt, and finds the one digest to compare with.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

PREFIX = "poise"
NAME_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
NAME_LENGTH = 10
SECRET_BYTES = 32
ENTRY = re.compile(r"([a-z0-9]{10}):([0-9a-f]{64})")
_KEY = re.compile(rb"poise_([a-z0-9]{10})_([A-Za-z0-9_-]{43})")
_NOBODY = bytes(32)

Owner = TypeVar("Owner")


def new_key() -> tuple[str, str]:
    """A key, and the entry to keep of it."""
    name = "".join(secrets.choice(NAME_ALPHABET) for _ in range(NAME_LENGTH))
    secret = secrets.token_urlsafe(SECRET_BYTES)
    digest = key_digest(name.encode(), secret.encode()).hex()
    return f"{PREFIX}_{name}_{secret}", f"{name}:{digest}"


def key_digest(name: bytes, secret: bytes) -> bytes:
    return hashlib.sha256(b"poise key 1\0" + name + b"\0" + secret).digest()


def parse_entry(entry: str) -> tuple[bytes, bytes]:
    """(name, digest) of what `poise key new` printed for the tenants file. Raises ValueError."""
    match = ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError("expected NAME:HASH as printed by poise key new")
    return match[1].encode(), bytes.fromhex(match[2])


class HashedKeys(Generic[Owner]):
    """Whose a key is, by the entries that were kept."""

    def __init__(self, entries: Mapping[bytes, tuple[bytes, Owner]]) -> None:
        """`entries`: the key's name -> (digest, owner)."""
        self._entries = dict(entries)

    def owner_of(self, key: bytes) -> Owner | None:
        match = _KEY.fullmatch(key)
        name, secret = (match[1], match[2]) if match else (b"", b"")
        digest, owner = self._entries.get(name, (_NOBODY, None))
        right = hmac.compare_digest(key_digest(name, secret), digest)
        return owner if right else None


def is_one_of(key: bytes, known: Sequence[bytes]) -> bool:
    """Whether the key is one of those given as they are (--api-key); all are compared, always."""
    return sum(hmac.compare_digest(key, other) for other in known) > 0
