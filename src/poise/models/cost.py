"""What a model costs: parameters, FLOPs, weight bytes, KV bytes. The one place that counts them.

Knows shapes, not machines or requests. A multiply-add is two FLOPs. Every figure is an algorithm's minimum: norms, rope,
softmax and sampling are left out, as is whatever a kernel moves twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poise.core.output import KVGroupSpec
from poise.core.step_time import visible_keys
from poise.models.config import ModelConfig

MAX_KV_GROUPS = 8  # each costs the scheduler a block table per request
LOGIT_TILE = 32  # rows of logits that exist at once


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of each MLP: `num_active` of `num_experts` work on a token."""

    num_experts: int = 1
    num_active: int = 1


DENSE = Experts()


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How K and V are kept: bytes of a value, and of the scale that the values of one token and head share."""

    value_bytes: float
    scale_bytes: int = 0

    def head_bytes(self, head_dim: int) -> float:
        """Of K or V of one token and head."""
        return head_dim * self.value_bytes + self.scale_bytes


# The engine's own are bf16 and int8; scales of the others are not known.
KV_FORMATS = {
    "f32": KVFormat(4.0),
    "bf16": KVFormat(2.0),
    "f16": KVFormat(2.0),
    "fp8": KVFormat(1.0),
    "int8": KVFormat(1.0, scale_bytes=4),
    "int4": KVFormat(0.5),
}
BF16_KV = KV_FORMATS["bf16"]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters by what they do. A tied output matrix is the embedding, counted once: `output` is then 0."""

    embedding: int
    attention: int
    experts: int  # every MLP of every layer, all experts
    router: int
    vectors: int  # norms and biases
    output: int

    @property
    def total(self) -> int:
        return (
            self.embedding
            + self.attention
            + self.experts
            + self.router
            + self.vectors
            + self.output
        )


def parameters(config: ModelConfig, experts: Experts = DENSE) -> Parameters:
    """Counted from the shape; equals the sum over the tensors of a checkpoint."""
    hidden, layers = config.hidden_size, config.num_layers
    query = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    vectors = (4 if config.post_norms else 2) * hidden * layers + hidden
    if config.qkv_bias:
        vectors += (query + 2 * kv) * layers
    if config.qk_norm:
        vectors += 2 * config.head_dim * layers
    return Parameters(
        embedding=config.vocab_size * hidden,
        attention=(2 * query + 2 * kv) * hidden * layers,
        experts=3 * hidden * config.intermediate_size * experts.num_experts * layers,
        router=hidden * experts.num_experts * layers if experts.num_experts > 1 else 0,
        vectors=vectors,
        output=0 if config.tie_word_embeddings else config.vocab_size * hidden,
    )


def active_parameters(config: ModelConfig, experts: Experts = DENSE) -> int:
    """Weights that one token meets in matrix products, the output matrix not among them."""
    counted = parameters(config, experts)
    chosen = counted.experts // experts.num_experts * experts.num_active
    return counted.attention + chosen + counted.router


def output_parameters(config: ModelConfig) -> int:
    """Weights that a row meets whose logits are wanted."""
    return config.vocab_size * config.hidden_size


def step_parameters(
    config: ModelConfig, experts: Experts = DENSE, num_tokens: int = 1, num_logit_rows: int = 1
) -> float:
    """Parameters read once by a step of `num_tokens`, expected where experts are chosen (see `distinct_experts`).

    Of the embedding only the tokens' rows are read, unless it is the output matrix too.
    """
    counted = parameters(config, experts)
    share = distinct_experts(experts, num_tokens) / experts.num_experts
    output = output_parameters(config) if num_logit_rows else 0
    rows = 0 if config.tie_word_embeddings else num_tokens * config.hidden_size
    body = counted.attention + counted.router + counted.vectors + share * counted.experts
    return body + output + rows


def distinct_experts(experts: Experts, num_tokens: int) -> float:
    """Expected experts that `num_tokens` use in a layer: E (1 − (1 − k/E)ⁿ), choices independent and uniform.

    Real routers are neither: favourites make it fewer.
    """
    missed = 1 - experts.num_active / experts.num_experts
    return float(experts.num_experts * (1 - missed**num_tokens))


def linear_flops(
    config: ModelConfig, num_tokens: int, num_logit_rows: int, experts: Experts = DENSE
) -> int:
    """Matrix products: 2 per parameter and token; the output matrix for the rows that need logits."""
    body = active_parameters(config, experts) * num_tokens
    return 2 * (body + output_parameters(config) * num_logit_rows)


def layer_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer, None where a token sees all before it."""
    return config.windows or (None,) * config.num_layers


def attention_flops(config: ModelConfig, start: int, num_tokens: int) -> int:
    """Scores and weighted sum: 4 · query heads · head_dim for each pair of query and visible key."""
    keys = sum(visible_keys(start, num_tokens, window) for window in layer_windows(config))
    return 4 * config.num_heads * config.head_dim * keys


def kv_bytes_per_layer_token(config: ModelConfig, kv: KVFormat = BF16_KV) -> float:
    """2 (K and V) · KV heads · (head_dim · bytes of a value + bytes of a scale)."""
    return 2 * config.num_kv_heads * kv.head_bytes(config.head_dim)


def kv_read_bytes(
    config: ModelConfig, start: int, num_tokens: int, kv: KVFormat = BF16_KV
) -> float:
    """K and V that a step reads for one sequence, each visible position once, as a kernel that shares tiles can."""
    return kv_bytes_per_layer_token(config, kv) * sum(
        _visible_positions(start, num_tokens, window) for window in layer_windows(config)
    )


def kv_write_bytes(config: ModelConfig, num_tokens: int, kv: KVFormat = BF16_KV) -> float:
    return kv_bytes_per_layer_token(config, kv) * config.num_layers * num_tokens


def _visible_positions(start: int, num_tokens: int, window: int | None) -> int:
    end = start + num_tokens
    return end if window is None else min(end, num_tokens + window - 1)


@dataclass(frozen=True, slots=True)
class KVGroups:
    """Groups of up to `layers_per_page` layers; `places[layer]` is a layer's group and its place in the group's pages."""

    layers_per_page: int
    specs: tuple[KVGroupSpec, ...]
    places: tuple[tuple[int, int], ...]


def kv_groups(windows: Sequence[int | None]) -> KVGroups:
    """Layers by the window that they share, cut into groups of one size, since all pages are of one size.

    Of the sizes that give at most MAX_KV_GROUPS groups, the one that leaves the fewest places of a page empty, in full
    groups before others, then the fewest groups (docs/decisions/0005-kv-groups.md): 15 sliding and 3 full layers are five
    groups of 3 and one of 3.
    """
    kinds = kinds_of_layers(windows)
    sizes = range(1, max(kinds.values()) + 1)
    most = max(MAX_KV_GROUPS, len(kinds))
    fitting = [size for size in sizes if sum(-(-n // size) for n in kinds.values()) <= most]
    size = min(fitting, key=lambda size: _empty_places(kinds, size))
    specs: list[KVGroupSpec] = []
    places = [(0, 0)] * len(windows)
    for window in kinds:
        layers = [layer for layer, own in enumerate(windows) if own == window]
        for start in range(0, len(layers), size):
            members = layers[start : start + size]
            for place, layer in enumerate(members):
                places[layer] = (len(specs), place)
            name = "full" if window is None else f"sliding {window}"
            specs.append(KVGroupSpec(name, len(members), window))
    return KVGroups(size, tuple(specs), tuple(places))


def _empty_places(kinds: dict[int | None, int], size: int) -> tuple[int, int, int]:
    """Of groups of `size` layers: empty places in full groups, in others, and the number of groups."""
    empty = {window: -num_layers % size for window, num_layers in kinds.items()}
    full = empty.pop(None, 0)
    return full, sum(empty.values()), sum(-(-n // size) for n in kinds.values())


def kinds_of_layers(windows: Sequence[int | None]) -> dict[int | None, int]:
    """How many layers have each window, full attention (None) first, then wider before narrower."""
    wide = sorted({w for w in windows if w is not None}, reverse=True)
    order: list[int | None] = [*([None] if None in windows else []), *wide]
    return {window: windows.count(window) for window in order}


def workspace_bytes(config: ModelConfig, num_tokens: int) -> int:
    """float32 activations of a step of `num_tokens`, buffers shared by layers as the CPU plan shares them, and a tile of logits."""
    query = config.num_heads * config.head_dim
    qkv = query + 2 * config.num_kv_heads * config.head_dim
    widths = config.hidden_size + qkv + query // 2 + query + config.intermediate_size
    return 4 * (num_tokens * widths + LOGIT_TILE * config.vocab_size)
