"""Reader of the GGUF container (versions 2 and 3, little-endian), memory-mapped and hardened.

Knows the container, not models. Invariant: every count, length, dimension and offset is checked
against the file with Python integers before anything is allocated or viewed, so a damaged or
hostile file costs one ModelFileError.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from poise.errors import ModelFileError
from poise.weights.dequantize import GGML_TYPES, GGMLType

MAX_METADATA_KEYS = 4096
MAX_TENSORS = 1 << 14
MAX_NAME_BYTES = 256
MAX_TEXT_BYTES = 16 << 20  # of all metadata strings together
MAX_ARRAY_ELEMENTS = (
    1_500_000  # of all metadata arrays together; decoded, both limits stay below 200 MB
)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, struct.Struct] = {
    code: struct.Struct("<" + letter)
    for code, letter in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIifBQqd")
}
_TYPES_BY_ID = {entry.id: entry for entry in GGML_TYPES.values()}
_OTHER_TYPE_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArrayField:
    """A metadata array as it lies in the file; `GGUFFile.array` decodes it."""

    key: str
    element_type: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the file. `dimensions` are GGUF's: the fastest running (the columns) first."""

    name: str
    type: GGMLType
    dimensions: tuple[int, ...]
    offset: int  # absolute
    num_bytes: int


Scalar = int | float | bool | str


class GGUFFile:
    """A parsed container: `metadata` by key, `tensors` by name, `data(entry)` as a view of `map`.

    Raises ModelFileError, one line that names the file and the field.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map = map_file(path)
        self._size = len(self.map)
        self._text_bytes = 0
        self._array_elements = 0
        self.metadata: dict[str, Scalar | ArrayField] = {}
        self.tensors: dict[str, TensorEntry] = {}
        position, num_keys, num_tensors = self._read_preamble()
        for index in range(num_keys):
            position = self._read_metadata_entry(index, position)
        self._read_tensor_table(position, num_tensors)

    def data(self, entry: TensorEntry) -> NDArray[np.uint8]:
        """The tensor's bytes, uint8 [num_bytes], a read-only view of the map."""
        return np.frombuffer(self.map, np.uint8, entry.num_bytes, entry.offset)

    def array(self, field: ArrayField) -> list[Scalar]:
        """The decoded elements of a metadata array."""
        if field.element_type != _STRING:
            dtype = np.dtype(_SCALARS[field.element_type].format).newbyteorder("<")
            values = np.frombuffer(self.map, dtype, field.count, field.offset)
            scalars: list[Scalar] = (
                values != 0 if field.element_type == _BOOL else values
            ).tolist()
            return scalars
        strings: list[Scalar] = []
        position, data, unpack = field.offset, self.map, _U64.unpack_from
        for index in range(field.count):
            start = position + 8
            position = start + unpack(data, position)[0]
            try:
                strings.append(data[start:position].decode())
            except UnicodeDecodeError:
                self._fail(f"{field.key!r}[{index}]", "is not valid UTF-8")
        return strings

    def _fail(self, field: str, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {field} {problem}")

    def _need(self, position: int, count: int, field: str) -> None:
        if position + count > self._size:
            self._fail(
                field,
                f"needs {count} bytes at offset {position}, but the file ends at {self._size}",
            )

    def _u32(self, position: int, field: str) -> int:
        self._need(position, 4, field)
        value: int = _U32.unpack_from(self.map, position)[0]
        return value

    def _u64(self, position: int, field: str) -> int:
        self._need(position, 8, field)
        value: int = _U64.unpack_from(self.map, position)[0]
        return value

    def _text(self, position: int, field: str, limit: int) -> tuple[str, int]:
        """The string at `position`, and the position behind it."""
        length = self._u64(position, f"length of {field}")
        if length > limit:
            self._fail(f"length of {field}", f"is {length} bytes, above the limit of {limit}")
        start = position + 8
        self._need(start, length, field)
        try:
            return self.map[start : start + length].decode(), start + length
        except UnicodeDecodeError:
            self._fail(field, "is not valid UTF-8")

    def _read_preamble(self) -> tuple[int, int, int]:
        self._need(0, 4, "magic")
        if self.map[:4] != b"GGUF":
            self._fail("magic", f"is {self.map[:4]!r}; this is not a GGUF file")
        version = self._u32(4, "version")
        if version & 0xFFFF == 0:
            self._fail("version", "is big-endian; only little-endian files are supported")
        if version not in (2, 3):
            self._fail("version", f"is {version}; only 2 and 3 are supported")
        num_tensors = self._u64(8, "tensor count")
        num_keys = self._u64(16, "metadata count")
        if num_tensors > MAX_TENSORS:
            self._fail("tensor count", f"is {num_tensors}, above the limit of {MAX_TENSORS}")
        if num_keys > MAX_METADATA_KEYS:
            self._fail("metadata count", f"is {num_keys}, above the limit of {MAX_METADATA_KEYS}")
        return 24, num_keys, num_tensors

    def _read_metadata_entry(self, index: int, position: int) -> int:
        key, position = self._text(position, f"metadata key {index}", MAX_NAME_BYTES)
        if key in self.metadata:
            self._fail(f"metadata key {key!r}", "occurs twice")
        code = self._u32(position, f"type of {key!r}")
        position += 4
        if code == _ARRAY:
            self.metadata[key], position = self._read_array(key, position)
        elif code == _STRING:
            value, end = self._text(position, repr(key), MAX_TEXT_BYTES - self._text_bytes)
            self._text_bytes += end - position - 8
            self.metadata[key], position = value, end
        elif code in _SCALARS:
            layout = _SCALARS[code]
            self._need(position, layout.size, repr(key))
            number = layout.unpack_from(self.map, position)[0]
            self.metadata[key] = bool(number) if code == _BOOL else number
            position += layout.size
        else:
            self._fail(f"type of {key!r}", f"is {code}, which is unknown")
        return position

    def _read_array(self, key: str, position: int) -> tuple[ArrayField, int]:
        code = self._u32(position, f"element type of {key!r}")
        count = self._u64(position + 4, f"element count of {key!r}")
        position += 12
        self._array_elements += count
        if self._array_elements > MAX_ARRAY_ELEMENTS:
            self._fail(
                f"element count of {key!r}",
                f"is {count}; all arrays together may have {MAX_ARRAY_ELEMENTS} elements",
            )
        field = ArrayField(key, code, count, position)
        if code == _STRING:
            return field, self._skip_strings(field)
        if code not in _SCALARS:
            problem = (
                "are arrays, which is not supported"
                if code == _ARRAY
                else f"have type {code}, which is unknown"
            )
            self._fail(f"elements of {key!r}", problem)
        num_bytes = count * _SCALARS[code].size
        self._need(position, num_bytes, repr(key))
        return field, position + num_bytes

    def _skip_strings(self, field: ArrayField) -> int:
        """Checks a string array and returns the position behind it; this loop is most of the
        opening time.
        """
        self._need(field.offset, 8 * field.count, repr(field.key))
        position, data, size, unpack = field.offset, self.map, self._size, _U64.unpack_from
        last = size - 8
        for index in range(field.count):
            if position > last:
                self._need(position, 8, f"length of {field.key!r}[{index}]")
            position += 8 + unpack(data, position)[0]
        if position > size:
            self._fail(repr(field.key), f"ends at {position}, behind the file's end at {size}")
        self._text_bytes += position - field.offset - 8 * field.count
        if self._text_bytes > MAX_TEXT_BYTES:
            self._fail(repr(field.key), f"brings the text to more than {MAX_TEXT_BYTES} bytes")
        return position

    def _read_tensor_table(self, position: int, num_tensors: int) -> None:
        relative: list[tuple[str, GGMLType, tuple[int, ...], int, int]] = []
        names: set[str] = set()
        for index in range(num_tensors):
            name, position = self._text(position, f"name of tensor {index}", MAX_NAME_BYTES)
            if name in names:
                self._fail(f"tensor {name!r}", "occurs twice")
            names.add(name)
            dimensions, position = self._read_dimensions(name, position)
            ggml_type = self._read_type(name, position)
            offset = self._u64(position + 4, f"offset of tensor {name!r}")
            position += 12
            num_bytes = self._tensor_bytes(name, ggml_type, dimensions)
            relative.append((name, ggml_type, dimensions, offset, num_bytes))
        alignment = self._alignment()
        start = -(-position // alignment) * alignment
        for name, ggml_type, dimensions, offset, num_bytes in relative:
            if offset % alignment:
                self._fail(f"offset of tensor {name!r}", f"is {offset}, no multiple of {alignment}")
            self._need(start + offset, num_bytes, f"data of tensor {name!r}")
            self.tensors[name] = TensorEntry(name, ggml_type, dimensions, start + offset, num_bytes)

    def _read_dimensions(self, name: str, position: int) -> tuple[tuple[int, ...], int]:
        count = self._u32(position, f"number of dimensions of tensor {name!r}")
        if not 1 <= count <= MAX_DIMENSIONS:
            self._fail(
                f"number of dimensions of tensor {name!r}",
                f"is {count}; 1 to {MAX_DIMENSIONS} are possible",
            )
        field = f"dimensions of tensor {name!r}"
        self._need(position + 4, 8 * count, field)
        dimensions: tuple[int, ...] = struct.unpack_from(f"<{count}Q", self.map, position + 4)
        if 0 in dimensions:
            self._fail(field, f"are {dimensions}; none may be zero")
        return dimensions, position + 4 + 8 * count

    def _read_type(self, name: str, position: int) -> GGMLType:
        code = self._u32(position, f"type of tensor {name!r}")
        if code not in _TYPES_BY_ID:
            label = _OTHER_TYPE_NAMES.get(code, f"number {code}")
            self._fail(
                f"type of tensor {name!r}",
                f"is {label}, which is not supported (supported: {', '.join(GGML_TYPES)})",
            )
        return _TYPES_BY_ID[code]

    def _tensor_bytes(self, name: str, ggml_type: GGMLType, dimensions: tuple[int, ...]) -> int:
        if dimensions[0] % ggml_type.block_size:
            self._fail(
                f"row length of tensor {name!r}",
                f"is {dimensions[0]}, no multiple of the {ggml_type.name} block of "
                f"{ggml_type.block_size}",
            )
        elements = 1
        for dimension in dimensions:
            elements *= dimension
        return elements // ggml_type.block_size * ggml_type.block_bytes

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value < 8 or value & (value - 1):
            self._fail("'general.alignment'", f"is {value!r}; a power of two from 8 is needed")
        return value


def map_file(path: Path) -> mmap.mmap:
    """The whole of a regular file, mapped read-only. Raises ModelFileError."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ModelFileError(f"{path}: is not a regular file")
            if status.st_size == 0:
                raise ModelFileError(f"{path}: is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"{path}: can't be opened: {error.strerror or error}") from None


def _open_without_waiting(path: str, flags: int) -> int:
    """A named pipe in the file's place must not hang the opening."""
    return os.open(path, flags | os.O_NONBLOCK)
