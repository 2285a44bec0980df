"""Damaged and hostile GGUF files: each parses or is refused with one line, in bounded memory."""

from __future__ import annotations

import random
import resource
import struct
from pathlib import Path

import pytest

from poise.errors import ModelFileError
from poise.weights.gguf import GGUFFile
from poise.weights.gguf_checkpoint import GGUFCheckpoint
from tiny_models import TinyModel, write_gguf

NUM_MUTATIONS = 10_000
MAX_GROWTH_KIB = 200 * 1024
TINY = TinyModel(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
)
INTEGERS = [0, 1, 2, 7, 8, 9, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63]
INTEGERS += [2**64 - 8, 2**64 - 1]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = write_gguf(tmp_path_factory.mktemp("valid") / "m.gguf", TINY, "Q8_0")
    GGUFCheckpoint(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def header_bytes(valid: bytes, tmp_path_factory: pytest.TempPathFactory) -> int:
    path = tmp_path_factory.mktemp("header") / "m.gguf"
    path.write_bytes(valid)
    return min(entry.offset for entry in GGUFFile(path).tensors.values())


def outcome(path: Path, content: bytes | bytearray) -> str:
    """ "opened", or the one-line refusal; anything else fails the test."""
    path.unlink(missing_ok=True)  # a new file costs less than truncating one
    path.write_bytes(content)
    try:
        checkpoint = GGUFCheckpoint(path)
        tokenizer = checkpoint.tokenizer
        assert isinstance(tokenizer.gguf, dict)
        for name in ("embed", "layers.0.q", "layers.0.down"):
            tensor = checkpoint.tensor(name)
            assert int(tensor.data.sum()) >= 0  # reads every byte of the view
    except ModelFileError as error:
        message = str(error)
        assert "\n" not in message
        assert str(path) in message
        return message
    return "opened"


def mutate(generator: random.Random, valid: bytes, header_bytes: int) -> bytes:
    content = bytearray(valid)
    for _ in range(generator.choice((1, 1, 1, 2, 5))):
        position = generator.randrange(header_bytes)
        kind = generator.randrange(6)
        if kind == 0:
            content[position] ^= 1 << generator.randrange(8)
        elif kind == 1:
            content[position] = generator.randrange(256)
        elif kind == 2:
            value = generator.choice(INTEGERS)
            content[position : position + 8] = struct.pack("<Q", value)
        elif kind == 3:
            value = generator.choice(INTEGERS) & 0xFFFFFFFF
            content[position : position + 4] = struct.pack("<I", value)
        elif kind == 4:
            del content[position : position + generator.randrange(1, 16)]
        else:
            start = generator.randrange(header_bytes)
            content[position:position] = content[start : start + generator.randrange(1, 64)]
    if generator.randrange(10) == 0:
        del content[generator.randrange(len(content)) :]
    return bytes(content)


def test_mutated_headers(valid: bytes, header_bytes: int, tmp_path: Path) -> None:
    generator = random.Random(20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opened = 0
    for _ in range(NUM_MUTATIONS):
        opened += outcome(tmp_path / "m.gguf", mutate(generator, valid, header_bytes)) == "opened"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB
    assert 0 < opened < NUM_MUTATIONS // 2  # both outcomes are exercised


def test_every_truncation_of_the_header(valid: bytes, header_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for length in range(header_bytes + 1):
        assert outcome(path, valid[:length]) != "opened"
    assert outcome(path, valid[:-1]) != "opened"
    assert outcome(path, valid) == "opened"


def test_length_fields_set_to_extremes(valid: bytes, header_bytes: int, tmp_path: Path) -> None:
    """Every offset gets a huge 64-bit value: counts, lengths, dimensions and offsets among them."""
    path = tmp_path / "m.gguf"
    for position in range(header_bytes - 8):
        for value in (2**64 - 1, 2**40):
            content = bytearray(valid)
            content[position : position + 8] = struct.pack("<Q", value)
            outcome(path, content)


@pytest.mark.parametrize("element_type", [8, 12])
def test_large_sparse_file_costs_little_memory(tmp_path: Path, element_type: int) -> None:
    """A gigabyte of zeros, where arrays of the largest allowed and of larger counts would fit."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for count in (1_500_000, 1_500_001, 2**26):
        path = tmp_path / f"{count}.gguf"
        key = struct.pack("<Q", 16) + b"tokenizer.tokens"
        array = struct.pack("<IIQ", 9, element_type, count)
        with path.open("wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array)
            file.truncate(1 << 30)
        if count > 1_500_000:
            with pytest.raises(ModelFileError, match="element count"):
                GGUFFile(path)
        else:
            parsed = GGUFFile(path)
            assert len(parsed.array(parsed.metadata["tokenizer.tokens"])) == count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB
