"""Faults of isolation to inject, each with the check of `verify/isolation.py` that must find it.

Nothing here runs unless asked for: a fault is a patch that lasts as long as its context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

from poise.core import block_hash
from poise.core.block_hash import PARENT, TOKENS, BlockHasher, Field
from poise.core.eviction import EvictionOrder
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.prefix_cache import PrefixCache
from poise.core.request import Request
from poise.engine.secret import LocalSecret
from poise.verify.faults import Fault


def _without_salt(parent: bytes, tokens: bytes, salt: bytes | None) -> tuple[Field, ...]:
    return ((PARENT, parent), (TOKENS, tokens))


def _salt_dropped_from_hash() -> AbstractContextManager[object]:
    """The name of a block does not say for whom it was computed."""
    return patch.object(block_hash, "block_fields", _without_salt)


@contextmanager
def _salt_ignored() -> Iterator[None]:
    """Neither the name nor the comparison knows of tenants."""
    with (
        patch.object(block_hash, "block_fields", _without_salt),
        patch.object(KVCacheManager, "_salt", lambda self, request, i: b""),
    ):
        yield


def _client_salt_for_the_tenants() -> AbstractContextManager[object]:
    """What a client sends as cache_salt stands in the place of what the server derived."""
    original = LocalSecret.cache_salt

    def cache_salt(self: LocalSecret, tenant: str | None, asked: str | None) -> bytes:
        return original(self, tenant if asked is None else None, asked)

    return patch.object(LocalSecret, "cache_salt", cache_salt)


@contextmanager
def _public_without_end() -> Iterator[None]:
    """Once a prompt begins with the public prefix, all of it counts as public."""
    original = BlockHasher.extend

    def extend(
        self: BlockHasher,
        hashes: list[bytes],
        token_ids: Sequence[int],
        salt: bytes,
        num_public_tokens: int,
    ) -> None:
        original(self, hashes, token_ids, salt, len(token_ids) if num_public_tokens else 0)

    def salt(self: KVCacheManager, request: Request, i: int) -> bytes | None:
        return None if request.owner.num_public_tokens else request.owner.cache_salt

    with patch.object(BlockHasher, "extend", extend), patch.object(KVCacheManager, "_salt", salt):
        yield


def _fields_without_length() -> AbstractContextManager[object]:
    """Fields are joined as they are, so that what ends one may begin the next."""

    def encode_fields(named: Iterable[Field]) -> bytes:
        return b"".join(data for _, data in named)

    return patch.object(block_hash, "encode_fields", encode_fields)


def _hash_trusted() -> AbstractContextManager[object]:
    """A hit goes by the hash alone."""

    def find(
        self: PrefixCache,
        group: int,
        block_hash: bytes,
        token_ids: Sequence[int],
        salt: bytes | None = None,
    ) -> int | None:
        return self._block_by_hash[group].get(block_hash)

    return patch.object(PrefixCache, "find", find)


def _one_order_for_all() -> AbstractContextManager[object]:
    """The least recently used page goes, whoever it belongs to."""

    def victim(self: EvictionOrder, name: str) -> int:
        return min(self._last_used, key=self._last_used.__getitem__)

    return patch.object(EvictionOrder, "victim", victim)


ISOLATION_FAULTS: tuple[Fault, ...] = (
    Fault("salt-ignored", "a block is anybody's who sends the same tokens",
          "others", False, _salt_ignored),
    Fault("client-salt-for-the-tenants", "cache_salt replaces the salt that the server derives",
          "salts", False, _client_salt_for_the_tenants),
    Fault("public-without-end", "what follows a public prefix is public too",
          "public", False, _public_without_end),
    Fault("salt-dropped-from-hash", "a block's name does not say for whom it is",
          "identity", False, _salt_dropped_from_hash),
    Fault("fields-without-length", "fields of a block's identity are joined without tag and length",
          "identity", False, _fields_without_length),
    Fault("hash-trusted", "a hit compares neither token ids nor salt",
          "collision", False, _hash_trusted),
    Fault("one-order-for-all", "the least recently used page goes, whosever it is",
          "flood", False, _one_order_for_all),
)  # fmt: skip
