"""A file's pages are given back once its tensors are packed, and read the same afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from poise.kernels.ops import KVShape
from poise.kernels.reference import ReferenceBackend
from poise.models.weights import Source
from poise.weights.checkpoint import Checkpoint
from poise.weights.open_checkpoint import open_checkpoint
from tiny_models import TinyModel, write_gguf, write_safetensors_folder

MODEL = TinyModel(hidden_size=256, intermediate_size=1024)


def resident_kilobytes(path: Path) -> int:
    """Of the process's mappings of a file."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_packing_leaves_no_page_of_the_file_resident(tmp_path: Path, form: str) -> None:
    if form == "gguf":
        path = write_gguf(tmp_path / "m.gguf", MODEL, "F32")
        checkpoint: Checkpoint = open_checkpoint(path)
    else:
        checkpoint = open_checkpoint(write_safetensors_folder(tmp_path / "m", MODEL))
        path = tmp_path / "m" / "model.safetensors"
    before = checkpoint.tensor("layers.0.gate").data.copy()
    assert resident_kilobytes(path) >= before.nbytes // 1024
    source = Source(ReferenceBackend(KVShape(1, 1, 16, 16, 1)), checkpoint)
    source.layer(0).matrix("gate")
    assert resident_kilobytes(path) == 0
    assert (checkpoint.tensor("layers.0.gate").data == before).all()
    assert np.count_nonzero(before)
