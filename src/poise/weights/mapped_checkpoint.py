"""What every opened checkpoint shares: tensors by canonical name, and the check that they fit the
configuration.

Knows canonical names and shapes, no file format. Invariant: once `check_tensors` has passed, every
tensor that the model needs is there in the expected shape, and no other tensor is.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from poise.errors import ModelFileError
from poise.models.config import ModelConfig, TokenizerData
from poise.weights.cache import named_model_of
from poise.weights.checkpoint import RawTensor

MAX_CONTEXT = 1 << 24


class MappedCheckpoint:
    """A checkpoint whose tensors are views of mapped files; readers add tokenizer and digest."""

    def __init__(
        self,
        path: Path,
        container: str,
        config: ModelConfig,
        tensors: dict[str, RawTensor],
        maps: Sequence[mmap.mmap],
    ) -> None:
        self.path = path
        self.name = named_model_of(path) or path.absolute().name.removesuffix(".gguf")
        self.config = config
        self._tensors = tensors
        self._maps = maps
        self.format = f"{container} {_main_type(tensors)}"

    def tensor(self, name: str) -> RawTensor:
        """The tensor of that canonical name; ModelFileError if the file lacks it."""
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelFileError(f"{self.path}: has no tensor {name!r}") from None

    def has(self, name: str) -> bool:
        return name in self._tensors

    def release(self) -> None:
        """Unmaps the pages read so far; they stay in the system's file cache while it has room."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.data.nbytes for tensor in self._tensors.values())

    @cached_property
    def tokenizer(self) -> TokenizerData:
        raise NotImplementedError

    def digest(self) -> str:
        raise NotImplementedError


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that the configured model needs, with its shape, (n,) or (rows, columns)."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_heads * head, config.num_kv_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (query, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, query),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.qkv_bias:
        layer |= {"q_bias": (query,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.qk_norm:
        layer |= {"q_norm": (head,), "k_norm": (head,)}
    if config.post_norms:
        layer |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    yield "embed", (config.vocab_size, hidden)
    yield "norm", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        for name, shape in layer.items():
            yield f"layers.{index}.{name}", shape


def check_tensors(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, RawTensor],
    rename: Mapping[str, str],
) -> None:
    """Compares what the file holds with what the model needs; `rename` gives file names for
    messages.
    """
    needed: set[str] = set()
    for name, shape in expected_shapes(config):
        needed.add(name)
        tensor = tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{path}: tensor {rename.get(name, name)!r} is missing")
        if tensor.shape != shape:
            raise ModelFileError(
                f"{path}: tensor {tensor.name!r} has shape {tensor.shape}, but the "
                f"configuration needs {shape}"
            )
    for name, tensor in tensors.items():
        if name not in needed:
            raise ModelFileError(
                f"{path}: tensor {tensor.name!r} has no place in architecture "
                f"{config.architecture!r}"
            )


def check_config(path: Path, config: ModelConfig) -> None:
    """Relations between sizes that hold for every architecture here."""
    problem = None
    if config.num_heads % config.num_kv_heads:
        problem = f"{config.num_heads} attention heads can't share {config.num_kv_heads} KV heads"
    elif config.head_dim % 2:
        problem = f"head size {config.head_dim} is odd"
    elif config.rope.dim != config.head_dim:
        problem = (
            f"rope dimension {config.rope.dim} is not the head size {config.head_dim} "
            "(partial rotary is not supported)"
        )
    elif config.max_position_embeddings > MAX_CONTEXT:
        problem = f"context length {config.max_position_embeddings} is above {MAX_CONTEXT}"
    if problem:
        raise ModelFileError(f"{path}: {problem}")


def _main_type(tensors: Mapping[str, RawTensor]) -> str:
    """The type of most matrix bytes."""
    size: Counter[str] = Counter()
    for tensor in tensors.values():
        if len(tensor.shape) == 2:
            size[tensor.type] += tensor.data.nbytes
    return size.most_common(1)[0][0]
