"""The model that a plan is about: its shape, its experts, and what its weights weigh.

Made by whoever knows where models come from; knows no files. `SHAPES` holds well-known models that need none.
"""

from __future__ import annotations

from dataclasses import dataclass

from poise.models import cost
from poise.models.config import ModelConfig, RopeConfig
from poise.models.cost import DENSE, Experts

SHAPE_BITS = 16.0  # of a weight, where only the shape is known


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """`weight_bytes`: all weights as they are kept. `weights_from` says how that is known."""

    name: str
    config: ModelConfig
    weight_bytes: int
    weights_from: str
    experts: Experts = DENSE

    @classmethod
    def of_shape(
        cls, name: str, config: ModelConfig, experts: Experts = DENSE, bits: float = SHAPE_BITS
    ) -> PlannedModel:
        """A model whose weights are all kept in `bits` each, scales included."""
        total = cost.parameters(config, experts).total
        source = f"{total:,} parameters · {bits:g} bit / 8"
        return cls(name, config, round(total * bits / 8), source, experts)

    def with_bits(self, bits: float) -> PlannedModel:
        return self.of_shape(self.name, self.config, self.experts, bits)

    @property
    def num_parameters(self) -> int:
        return cost.parameters(self.config, self.experts).total

    @property
    def bytes_per_parameter(self) -> float:
        return self.weight_bytes / self.num_parameters


def _llama(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    context: int,
) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position_embeddings=context,
        rope=RopeConfig(10_000.0, 128),
        tie_word_embeddings=False,
    )


SHAPES: dict[str, tuple[ModelConfig, Experts]] = {
    # from each model's config.json on huggingface.co
    "llama-2-7b": (_llama(32_000, 4096, 11_008, 32, 32, 32, 4096), DENSE),
    "llama-2-70b": (_llama(32_000, 8192, 28_672, 80, 64, 8, 4096), DENSE),
    "llama-3.1-70b": (_llama(128_256, 8192, 28_672, 80, 64, 8, 131_072), DENSE),
    "mixtral-8x7b": (_llama(32_000, 4096, 14_336, 32, 32, 8, 32_768), Experts(8, 2)),
}
"""Models that are planned for more often than pulled; the rope of these shapes is not theirs, costs do not depend on it."""
