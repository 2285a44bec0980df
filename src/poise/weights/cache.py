"""The folder that poise keeps for itself (`POISE_HOME`): where models lie, and digests that need
not be computed twice.

Knows nothing of model formats. Invariant: a digest is believed only for the same real path, size
and mtime; files are replaced atomically and under a lock, so concurrent processes never see half of
one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from poise.errors import ModelFileError


class _Digest(msgspec.Struct, frozen=True):
    size: int
    mtime_ns: int
    sha256: str


def poise_home() -> Path:
    """$POISE_HOME, else poise under the user's cache folder. Not created here."""
    if home := os.environ.get("POISE_HOME"):
        return Path(home).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "poise"


def models_folder() -> Path:
    return poise_home() / "models"


def named_model_of(path: Path) -> str | None:
    """The name of a pulled model whose file lies at `path`: the folder's name under models/."""
    folder = path.absolute().parent
    return folder.name if folder.parent == models_folder() else None


def file_digest(path: Path) -> str:
    """sha256 (hex) of a file, from the cache where it is known, else computed and remembered."""
    known = known_digest(path)
    if known is not None:
        return known
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelFileError(f"{path}: can't be read: {error.strerror or error}") from None
    with contextlib.suppress(OSError):  # a read-only home only costs the next start the same time
        remember_digest(path, sha256)
    return sha256


def known_digest(path: Path) -> str | None:
    """The remembered sha256 of a file that has not changed since, or None."""
    try:
        status = path.stat()
    except OSError:
        return None
    entry = _read_digests().get(os.path.realpath(path))
    if entry and entry.size == status.st_size and entry.mtime_ns == status.st_mtime_ns:
        return entry.sha256
    return None


def remember_digest(path: Path, sha256: str) -> None:
    """Stores a digest; entries whose files are gone are dropped. Raises OSError."""
    status = path.stat()
    home = poise_home()
    home.mkdir(parents=True, exist_ok=True)
    with file_lock(home / ".digests.lock"):
        digests = {name: entry for name, entry in _read_digests().items() if os.path.exists(name)}
        digests[os.path.realpath(path)] = _Digest(status.st_size, status.st_mtime_ns, sha256)
        write_atomically(home / "digests.json", msgspec.json.format(msgspec.json.encode(digests)))


def _read_digests() -> dict[str, _Digest]:
    """What is remembered; an unreadable or damaged file counts as empty."""
    try:
        data = (poise_home() / "digests.json").read_bytes()
        return msgspec.json.decode(data, type=dict[str, _Digest])
    except (OSError, msgspec.DecodeError):
        return {}


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a small file: readers see the old or the new content. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Waits for an exclusive lock among processes; the lock file is gone afterwards. Raises
    OSError.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_still_at(descriptor, path):
                break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the holder before us removed this file: lock the new one
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _is_still_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
