"""JSON objects from files of a model folder, with a size limit and errors that name the file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from poise.errors import ModelFileError

MAX_JSON_BYTES = 64 << 20


def read_bytes(path: Path) -> bytes:
    """The content of a small file. Raises ModelFileError if it is missing or above MAX_JSON_BYTES."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFileError(f"{path}: has more than {MAX_JSON_BYTES} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelFileError(f"{path}: is missing") from None
    except OSError as error:
        raise ModelFileError(f"{path}: can't be read: {error.strerror or error}") from None


def read_text(path: Path) -> str:
    """The content as UTF-8. Raises ModelFileError."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: is not valid UTF-8 at byte {error.start}") from None


def read_json(path: Path) -> dict[str, object]:
    """The file's JSON object. Raises ModelFileError."""
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path}: is not a JSON object: {error}") from None
