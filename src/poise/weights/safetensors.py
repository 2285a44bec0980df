"""Reader of one safetensors file: a JSON header checked against the file, tensors as views of the
map.

Knows the container, not models. Invariant: no view is made before its range, element type and shape
have been checked with Python integers.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from poise.errors import ModelFileError
from poise.weights.checkpoint import RawTensor
from poise.weights.gguf import map_file

MAX_HEADER_BYTES = 16 << 20
MAX_DIMENSIONS = 8
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_safetensors(path: Path) -> tuple[mmap.mmap, dict[str, RawTensor]]:
    """The file's map, and its tensors by their own names. Raises ModelFileError naming file and tensor."""
    mapped = map_file(path)
    if len(mapped) < 8:
        raise ModelFileError(f"{path}: header length needs 8 bytes, but the file has {len(mapped)}")
    header_bytes = int.from_bytes(mapped[:8], "little")
    if header_bytes > min(MAX_HEADER_BYTES, len(mapped) - 8):
        raise ModelFileError(
            f"{path}: header length is {header_bytes}, above the limit "
            f"{MAX_HEADER_BYTES} or the file's {len(mapped)} bytes"
        )
    start = 8 + header_bytes
    try:
        header = msgspec.json.decode(mapped[8:start], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path}: header is damaged: {error}") from None
    data = np.frombuffer(mapped, np.uint8, len(mapped) - start, start)
    tensors = {name: _raw_tensor(path, name, entry, data) for name, entry in entries.items()}
    return mapped, tensors


def _raw_tensor(path: Path, name: str, entry: _Entry, data: NDArray[np.uint8]) -> RawTensor:
    if entry.dtype not in _ELEMENT_BYTES:
        raise ModelFileError(
            f"{path}: dtype of tensor {name!r} is {entry.dtype!r}, which is not supported "
            f"(supported: {', '.join(_ELEMENT_BYTES)})"
        )
    if not 1 <= len(entry.shape) <= MAX_DIMENSIONS or min(entry.shape) < 1:
        raise ModelFileError(f"{path}: shape of tensor {name!r} is {entry.shape}")
    begin, end = entry.data_offsets
    if not 0 <= begin <= end <= len(data):
        raise ModelFileError(
            f"{path}: data of tensor {name!r} lies at {begin}…{end}, outside the {len(data)} "
            "bytes of data"
        )
    num_bytes = math.prod(entry.shape) * _ELEMENT_BYTES[entry.dtype]
    if end - begin != num_bytes:
        raise ModelFileError(
            f"{path}: data of tensor {name!r} has {end - begin} bytes, but shape "
            f"{entry.shape} needs {num_bytes}"
        )
    rows = math.prod(entry.shape[:-1])
    return RawTensor(name, entry.dtype, tuple(entry.shape), data[begin:end].reshape(rows, -1))
