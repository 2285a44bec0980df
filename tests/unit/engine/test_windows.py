"""A model with sliding windows behind the whole engine: the same answers alone, in a crowd, preempted and from the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poise import LLM, RequestOutput, SamplingParams
from tiny_models import TinyModel, write_safetensors_folder

WINDOW = 40
PAGES = {  # bytes: one layer of 16 tokens, K and V of one KV head of 16
    "bf16": 2 * 16 * 2 * 16,
    "int8": 2 * 16 * (16 + 4),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, the third of which sees everything: four KV groups of one layer."""
    model = TinyModel("gemma3", num_layers=4, num_kv_heads=1, window_period=3, seed=5)
    return write_safetensors_folder(tmp_path_factory.mktemp("windows") / "gemma3", model, "BF16")


@pytest.fixture(scope="module", params=PAGES)
def dtype(request: pytest.FixtureRequest) -> str:
    """What K and V are kept in."""
    return str(request.param)


def engine(path: Path, dtype: str, num_pages: int = 2000, **settings: Any) -> LLM:
    return LLM(
        str(path),
        kv_cache_memory_bytes=num_pages * PAGES[dtype],
        kv_cache_dtype=dtype,  # type: ignore[arg-type]
        max_num_seqs=16,
        threads=2,
        offline=True,
        **settings,
    )


def prompts() -> list[dict[str, Any]]:
    """Twelve, up to five windows long, of which half begin with the same 90 tokens."""
    random = np.random.default_rng(8)
    shared = random.integers(3, 288, 90).tolist()
    lengths = (1, 15, 16, 39, 40, 41, 100, 150, 200, 60, 130, 90)
    ids = [random.integers(3, 288, length).tolist() for length in lengths]
    return [{"prompt_token_ids": (shared if i % 2 else []) + own} for i, own in enumerate(ids)]


PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=60, logprobs=2, ignore_eos=True)


def answer(output: RequestOutput) -> Any:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


@pytest.fixture(scope="module")
def alone(path: Path, dtype: str) -> list[Any]:
    """Each prompt by itself, nothing cached, one thread of work per step."""
    llm = engine(path, dtype, enable_prefix_caching=False)
    assert llm.info.details["kv_dtype"] == dtype
    answers = [answer(llm.generate(prompt, PARAMS)[0]) for prompt in prompts()]
    llm.shutdown()
    return answers


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("chunk", [16, 33, 512])
def test_a_crowd_with_hits(
    path: Path, dtype: str, alone: list[Any], chunk: int, block_size: int
) -> None:
    llm = engine(path, dtype, max_num_batched_tokens=chunk, block_size=block_size)
    cold = llm.generate(prompts(), PARAMS)
    warm = llm.generate(prompts(), PARAMS)
    for outputs in (cold, warm):
        assert [answer(output) for output in outputs] == alone
    assert sum(output.num_cached_tokens or 0 for output in warm) > 500
    llm.shutdown()


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_requests(path: Path, dtype: str, alone: list[Any], caching: bool) -> None:
    """Pages for little more than the longest request: the rest is sent back again and again."""
    limits = {"num_pages": 75, "max_num_batched_tokens": 64}
    llm = engine(path, dtype, **limits, enable_prefix_caching=caching)
    outputs = llm.generate(prompts(), PARAMS)
    assert [answer(output) for output in outputs] == alone
    assert llm._engine._scheduler.stats().counters.num_preemptions > 0
    llm.shutdown()


def test_pages_behind_windows_are_freed(path: Path) -> None:
    """350 tokens need 22 pages of the one group that sees everything, and few of the three others."""
    llm = engine(path, "bf16", num_pages=22 + 3 * 5, max_num_batched_tokens=16)
    prompt = {"prompt_token_ids": list(range(3, 253))}
    [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 100
    llm.shutdown()


def test_int8_answers_otherwise_and_says_so(path: Path) -> None:
    """Other bytes under another fingerprint; the same memory holds 1.6 times the pages."""
    memory = 1000 * PAGES["bf16"]
    engines = [engine(path, dtype, memory // size) for dtype, size in PAGES.items()]
    assert [llm._engine.metrics.num_blocks for llm in engines] == [1000, 1600]
    answers = [answer(llm.generate(prompts()[8], PARAMS)[0]) for llm in engines]
    assert answers[0] != answers[1]
    fingerprints = {llm.info.system_fingerprint for llm in engines}
    assert len(fingerprints) == 2
    for llm in engines:
        llm.shutdown()
