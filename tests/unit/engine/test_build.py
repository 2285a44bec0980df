from __future__ import annotations

import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from engine_harness import BLOCK_SIZE, GROUPS, VOCAB_SIZE, ByteTokenizer, request, run

from poise.config import CacheConfig, ComputeConfig, ModelSource, SchedulerConfig
from poise.core.executors import ScriptedExecutor
from poise.core.output import WorkDone
from poise.core.step_time import GUESSED_COST
from poise.errors import ModelFileError


class Loaded(SimpleNamespace):
    """What load_executor returns, with a scripted executor in it."""

    def __init__(self) -> None:
        super().__init__(
            executor=ScriptedExecutor(GROUPS, 32, BLOCK_SIZE, VOCAB_SIZE),
            kv_groups=list(GROUPS),
            num_blocks=32,
            block_size=BLOCK_SIZE,
            kv_cache=SimpleNamespace(num_tokens=32 * BLOCK_SIZE),
            max_model_len=100,
            vocab_size=VOCAB_SIZE,
            cache_identity=b"identity",
            fingerprint="0123456789ab",
            details={"format": "GGUF Q4_1"},
            work_done=lambda: WorkDone(0, 0, 0.0),
            rates=None,
            draft_seconds=None,
            step_cost=GUESSED_COST,
        )


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    """poise.engine.build over a model that is not there."""
    load = ModuleType("poise.executor.load")
    load.NUMERICS_VERSION = 1  # type: ignore[attr-defined]
    load.LoadedExecutor = Loaded  # type: ignore[attr-defined]
    load.load_executor = lambda *configs, **options: module.loaded  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "poise.executor.load", load)
    monkeypatch.delitem(sys.modules, "poise.engine.build", raising=False)
    import poise.engine.build as module

    checkpoint = SimpleNamespace(name="tiny", format="GGUF Q4_1", tokenizer=None)
    module.loaded = Loaded()  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "resolve_model", lambda model, **options: Path(model))
    monkeypatch.setattr(module, "open_checkpoint", lambda path: checkpoint)
    monkeypatch.setattr(module, "Tokenizer", lambda data: ByteTokenizer())
    yield module
    sys.modules.pop("poise.engine.build", None)


def build_tiny(build: Any, cache: CacheConfig | None = None, **options: Any) -> Any:
    return build.build_engine(
        ModelSource("some-model", "served"),
        cache or CacheConfig(),
        SchedulerConfig(),
        ComputeConfig(),
        **options,
    )


def test_facts_come_from_what_was_loaded(build: Any) -> None:
    stages: list[str] = []
    engine = build_tiny(build, on_stage=stages.append)
    info = engine.info
    assert (info.model, info.max_model_len, info.vocab_size) == ("served", 100, VOCAB_SIZE)
    assert info.kv_capacity_tokens == 32 * BLOCK_SIZE
    assert info.system_fingerprint == "poise-v1-0123456789ab"
    assert info.details == {"format": "GGUF Q4_1", "scheduling_policy": "fcfs"}
    assert stages == ["finding some-model", "loading tiny (GGUF Q4_1)"]
    assert b'cache_dtype="bf16"' in engine.metrics.render()
    assert b'num_gpu_blocks="32"' in engine.metrics.render()
    assert len(run(engine, request(max_tokens=3, ignore_eos=True))[0][0].token_ids) == 3
    executor = weakref.ref(build.loaded.executor)
    del build.loaded
    assert executor() is not None
    engine.close()
    assert executor() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_prefix_caching_follows_the_configuration(build: Any, enabled: bool) -> None:
    engine = build_tiny(build, CacheConfig(enable_prefix_caching=enabled))
    for _ in range(2):
        run(engine, request("a prompt of some blocks", max_tokens=1))
    assert (engine.metrics.prompt_tokens_cached > 0) == enabled


def test_a_bad_tokenizer_is_the_error(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(data: object) -> None:
        raise ModelFileError("tokenizer.ggml.tokens is missing")

    monkeypatch.setattr(build, "Tokenizer", refuse)
    with pytest.raises(ModelFileError, match="tokens is missing"):
        build_tiny(build)
