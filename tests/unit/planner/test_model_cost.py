"""What a model costs, against counts made another way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.models import cost
from poise.models.config import ModelConfig, RopeConfig
from poise.models.cost import Experts
from poise.planner.model import SHAPES
from tiny_models import TinyModel


def config_of(tiny: TinyModel) -> ModelConfig:
    return ModelConfig(
        architecture=tiny.architecture,
        vocab_size=tiny.vocab_size,
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        num_layers=tiny.num_layers,
        num_heads=tiny.num_heads,
        num_kv_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        rms_norm_eps=tiny.rms_norm_eps,
        max_position_embeddings=tiny.max_position_embeddings,
        rope=RopeConfig(tiny.rope_theta, tiny.head_dim),
        tie_word_embeddings=tiny.tie_word_embeddings,
        qkv_bias=tiny.architecture == "qwen2",
        qk_norm=tiny.architecture in ("qwen3", "gemma3"),
        post_norms=tiny.architecture == "gemma3",
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_tensors(architecture: str, tied: bool) -> None:
    tiny = TinyModel(architecture=architecture, tie_word_embeddings=tied, num_layers=3)
    in_tensors = sum(math.prod(shape) for shape in tiny.shapes().values())
    assert cost.parameters(config_of(tiny)).total == in_tensors


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama-2-7b", 6_738_415_616),  # as huggingface.co counts the tensors
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.1-70b", 70_553_706_496),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_known_shapes_have_their_published_sizes(name: str, total: int) -> None:
    config, experts = SHAPES[name]
    assert cost.parameters(config, experts).total == total


def test_mixtral_uses_two_of_eight_experts() -> None:
    config, experts = SHAPES["mixtral-8x7b"]
    used = cost.active_parameters(config, experts) + cost.output_parameters(config)
    assert used == pytest.approx(12.75e9, rel=0.005)  # "12.9B active" with the embedding


def test_linear_flops_are_two_per_parameter_and_token() -> None:
    config = config_of(TinyModel())
    body = cost.active_parameters(config)
    output = config.vocab_size * config.hidden_size
    assert cost.linear_flops(config, 5, 2) == 2 * (5 * body + 2 * output)


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 60), st.one_of(st.none(), st.integers(1, 80)))
def test_visible_keys_by_counting_pairs(start: int, num_tokens: int, window: int | None) -> None:
    pairs = [
        (query, key)
        for query in range(start, start + num_tokens)
        for key in range(query + 1)
        if window is None or key > query - window
    ]
    assert cost.visible_keys(start, num_tokens, window) == len(pairs)
    keys = len({key for _, key in pairs})
    assert cost._visible_positions(start, num_tokens, window) == keys


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(0, 300), st.data())
def test_distinct_experts_lie_between_one_tokens_and_all(
    num_experts: int, num_tokens: int, data: st.DataObject
) -> None:
    experts = Experts(num_experts, data.draw(st.integers(1, num_experts)))
    found = cost.distinct_experts(experts, num_tokens)
    assert 0 <= found <= num_experts
    if num_tokens:
        assert found >= experts.num_active * (1 - 1e-12)
    if num_tokens == 1:
        assert found == pytest.approx(experts.num_active)


def test_distinct_experts_of_two_tokens_by_hand() -> None:
    """2 of 4 experts: each is missed by one token with 1/2, by two with 1/4."""
    assert cost.distinct_experts(Experts(4, 2), 2) == 3


def test_an_untied_embedding_is_read_by_rows() -> None:
    config = config_of(TinyModel(tie_word_embeddings=False))
    counted = cost.parameters(config)
    read = cost.step_parameters(config, num_tokens=3, num_logit_rows=1)
    assert read == counted.total - counted.embedding + 3 * config.hidden_size
    tied = replace(config, tie_word_embeddings=True)
    assert cost.step_parameters(tied, num_tokens=3) == cost.parameters(tied).total
