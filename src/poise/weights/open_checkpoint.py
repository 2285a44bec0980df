"""Opens whatever lies at a path: a GGUF file or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from poise.errors import ModelFileError
from poise.weights.checkpoint import Checkpoint
from poise.weights.gguf_checkpoint import GGUFCheckpoint
from poise.weights.safetensors_folder import SafetensorsCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`; a folder with one .gguf file and no config.json is that file.

    Raises ModelFileError, one line naming file and field.
    """
    if not path.exists():
        raise ModelFileError(f"{path}: no such file or folder")
    if not path.is_dir():
        return GGUFCheckpoint(path)
    if (path / "config.json").exists():
        return SafetensorsCheckpoint(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GGUFCheckpoint(files[0])
    raise ModelFileError(f"{path}: has neither config.json nor exactly one .gguf file")
