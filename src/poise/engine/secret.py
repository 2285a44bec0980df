"""The secret of this installation: what block hashes are keyed with and tenants' salts are derived from.

Knows no requests. Invariant: the secret is 32 random bytes that only this user can read; where no such file can be
kept, it is drawn afresh, which costs nothing but that names change with each start.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from poise.core.block_hash import encode_fields
from poise.weights.cache import poise_home

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
FILE_NAME = "secret"


@dataclass(frozen=True, slots=True)
class LocalSecret:
    """Keys and salts, each derived for one purpose, so that none tells anything of another."""

    value: bytes = field(repr=False)

    @property
    def block_key(self) -> bytes:
        """The key of block hashes."""
        return self._derive(b"poise blocks")

    def cache_salt(self, tenant: str | None, asked: str | None) -> bytes:
        """With whom a request shares cached prefixes. `tenant` is None where there are no tenants; what the client asks
        for (its `cache_salt`) can only narrow the sharing within the tenant.
        """
        if tenant is None and asked is None:
            return b""
        named = [(b"t", tenant), (b"c", asked)]
        return self._derive(
            b"poise salt",
            encode_fields((tag, text.encode()) for tag, text in named if text is not None),
        )

    def _derive(self, purpose: bytes, data: bytes = b"") -> bytes:
        return hashlib.blake2b(data, key=self.value, person=purpose, digest_size=32).digest()


def fresh_secret() -> LocalSecret:
    """One that nobody has seen and nobody keeps."""
    return LocalSecret(secrets.token_bytes(SECRET_BYTES))


def local_secret() -> LocalSecret:
    """The secret kept under POISE_HOME, made on first use; a fresh one where none can be kept."""
    path = poise_home() / FILE_NAME
    try:
        value = _read(path)
        if value is None:
            value = _create(path)
    except (OSError, ValueError) as error:
        logger.warning("%s is not used, a fresh secret is: %s", path, error)
        return fresh_secret()
    return LocalSecret(value)


def _read(path: Path) -> bytes | None:
    """The file's content, None if there is no file. Raises OSError, ValueError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ValueError(
                f"its mode is {mode:04o}, so others may know it; delete it or chmod 600"
            )
        value = file.read(SECRET_BYTES + 1)
    if len(value) != SECRET_BYTES:
        raise ValueError(f"it does not hold {SECRET_BYTES} bytes; delete it")
    return value


def _create(path: Path) -> bytes:
    """Writes a new secret, complete or not at all; of two processes that do so at once both get the same one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # fails where another process was first
    finally:
        os.unlink(temporary)
    value = _read(path)
    if value is None:
        raise ValueError("it vanished while it was made")
    return value
