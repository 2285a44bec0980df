"""resolve(): precedence, parsing, derived names, and errors that name the value."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise import config_values
from poise.config import (
    CONFIG_CLASSES,
    CacheConfig,
    ComputeConfig,
    ModelSource,
    SchedulerConfig,
    ServerConfig,
    SpeculationConfig,
    environment_name,
    flag_names,
    flag_of,
    resolve,
)
from poise.core.speculation import Speculation
from poise.errors import ConfigError


def test_defaults_come_from_the_dataclasses() -> None:
    settings = resolve({}, {})
    assert settings.source == ModelSource()
    assert settings.cache == CacheConfig()
    assert settings.scheduler == SchedulerConfig()
    assert settings.compute == ComputeConfig()
    assert settings.speculation == SpeculationConfig()
    assert settings.server == ServerConfig()
    assert settings.notes == ()
    assert {origin.source for origin in settings.origins.values()} == {"default"}


def test_every_field_has_one_flag_with_help_and_reason() -> None:
    names = flag_names()
    assert len(names) == len(set(names))
    for cls in CONFIG_CLASSES:
        for item in fields(cls):
            flag = flag_of(item)
            assert flag.help.endswith("."), flag.name
            assert flag.why, flag.name
            if item.default not in (None, ()):
                assert flag.parse(item.default) == item.default


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "poise.toml"
    file.write_text('port = 1\nthreads = 1\nblock_size = 32\nhost = "0.0.0.0"\n')
    environment = {"POISE_PORT": "2", "POISE_THREADS": "2"}
    settings = resolve({"port": "3", "threads": None}, environment, file)
    assert (settings.server.port, settings.origins["port"].source) == (3, "--port")
    assert (settings.compute.threads, settings.origins["threads"].source) == (2, "POISE_THREADS")
    assert settings.cache.block_size == 32
    assert settings.origins["block-size"].source == f"block_size in {file}"
    assert settings.server.host == "0.0.0.0"
    assert settings.origins["max-num-seqs"].source == "default"


@pytest.mark.parametrize("name", flag_names())
def test_each_flag_has_an_environment_twin_and_a_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_values, "available_memory_bytes", lambda: 2**30)
    text = {
        "block-size": "64",
        "log-format": "json",
        "activations": "bf16",
        "kv-cache-dtype": "int8",
        "gpu-memory-utilization": "0.5",
        "offline": "true",
        "load-format": "dummy:Q4_0",
        "lenient": "true",
        "enable-prefix-caching": "true",
        "enable-shared-prefix-attention": "false",
        "enable-profiling": "true",
        "scheduling-policy": "priority",
        "watermark": "0.77",
        "speculative-config": '{"method": "suffix"}',
        "spec-method": "ngram",
        "spec-tokens": "7",
    }.get(name, "77")
    place = environment_name(name)
    twin = resolve({}, {place: text})
    assert [origin for origin in twin.origins.values() if origin.source == place]
    file = tmp_path / "poise.toml"
    file.write_text(f"{name} = '{text}'\n")
    assert resolve({}, {}, file).values() == twin.values()


def test_speculation_by_flags_by_json_and_by_table(tmp_path: Path) -> None:
    assert resolve({}, {}).speculation.default is None
    wanted = Speculation("suffix", 6)
    by_flags = resolve({"spec-method": "suffix", "spec-tokens": "6"}, {})
    assert by_flags.speculation.default == wanted
    text = '{"num_speculative_tokens": 6, "method": "suffix"}'
    assert resolve({"speculative-config": text}, {}).speculation.default == wanted
    file = tmp_path / "poise.toml"
    file.write_text('[speculative-config]\nmethod = "suffix"\nnum_speculative_tokens = 6\n')
    assert resolve({}, {}, file).speculation.default == wanted
    assert resolve({"spec-tokens": "2"}, {}).speculation.default == Speculation("ngram", 2)
    assert resolve({"spec-method": "off"}, {}).speculation.default is None
    drafting = resolve({"spec-model": "small.gguf"}, {}).speculation
    assert (drafting.draft_model, drafting.default) == ("small.gguf", Speculation("draft_model"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"speculative-config": "{"}, "expected JSON"),
        ({"speculative-config": "3"}, "expected a JSON object"),
        ({"speculative-config": '{"metod": "ngram"}'}, "no field 'metod'"),
        ({"speculative-config": '{"method": "eagle"}'}, "'eagle'.*ngram"),
        ({"speculative-config": '{"num_speculative_tokens": 33}'}, "1 to 32"),
        ({"speculative-config": "{}", "spec-method": "ngram"}, "give one of them"),
        ({"spec-method": "draft_model"}, "needs a model"),
        ({"spec-method": "ngram", "spec-model": "small.gguf"}, "nothing drafts with it"),
        ({"speculative-config": '{"method": "draft_model", "model": 3}'}, "expected a text"),
    ],
)
def test_speculation_that_cannot_be_is_refused(given: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        resolve(given, {})


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("block-size", "17", "expected 16, 32 or 64"),
        ("block-size", True, "expected 16, 32 or 64"),
        ("activations", "int4", "expected int8 or bf16"),
        ("kv-cache-dtype", "fp8", "'fp8' is not valid: expected bf16, int8 or auto"),
        ("max-num-seqs", "0", "from 1 to"),
        ("max-num-seqs", "many", "expected a whole number"),
        ("max-num-seqs", 1.5, "expected a whole number"),
        ("max-num-batched-tokens", "-1", "from 1 to"),
        ("max-model-len", "1", "from 2 to"),
        ("threads", "0", "from 1 to"),
        ("port", "65536", "from 0 to 65,535"),
        ("kv-cache-memory-bytes", "2 lightyears", "256MiB"),
        ("kv-cache-memory-bytes", "0", "256MiB"),
        ("kv-cache-memory-bytes", "-5GiB", "256MiB"),
        ("kv-cache-memory-bytes", "nan", "256MiB"),
        ("gpu-memory-utilization", "1.5", "at most 1"),
        ("gpu-memory-utilization", "nan", "at most 1"),
        ("log-format", "xml", "text or json"),
        ("offline", "perhaps", "true or false"),
        ("shutdown-timeout", "inf", "seconds"),
        ("host", "", "not empty"),
        ("api-key", ("a", ""), "no empty string"),
    ],
)
def test_a_wrong_value_is_named(flag: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({flag: value}, {})
    message = str(caught.value)
    assert message.startswith(f"--{flag}: ")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("256MiB", 256 * 2**20),
        ("256 mib", 256 * 2**20),
        ("2GiB", 2 * 2**30),
        ("1GB", 10**9),
        ("1.5GiB", 3 * 2**29),
        ("1_000k", 10**6),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text: object, num_bytes: int) -> None:
    assert config_values.size(text) == num_bytes


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.binary()))
def test_a_parser_returns_or_raises_value_error(value: object) -> None:
    for cls in CONFIG_CLASSES:
        for item in fields(cls):
            with contextlib.suppress(ValueError):
                parsed = flag_of(item).parse(value)
                assert flag_of(item).parse(parsed) == parsed


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "poise.toml"
    file.write_text("max-num-seq = 4\n")
    with pytest.raises(ConfigError, match="'max-num-seq' is not a setting; did you mean max-num"):
        resolve({}, {}, file)


def test_a_key_spelled_both_ways_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "poise.toml"
    file.write_text("max-num-seqs = 4\nmax_num_seqs = 5\n")
    with pytest.raises(ConfigError, match="given twice"):
        resolve({}, {}, file)


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe"])
def test_a_broken_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "poise.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is not TOML"):
        resolve({}, {}, file)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        resolve({}, {}, tmp_path / "absent.toml")


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "poise.toml"
    file.write_text("port = 99\n")
    settings = resolve({}, {"POISE_CONFIG": str(file)})
    assert settings.server.port == 99
    assert settings.notes == ()


def test_unknown_variables_get_a_line_with_the_nearest_name() -> None:
    settings = resolve(
        {}, {"POISE_PROT": "1", "POISE_HOME": "/x", "POISE_ISA": "avx2", "PORT": "1"}
    )
    assert settings.notes == ("POISE_PROT is not read by poise; did you mean POISE_PORT?",)


def test_an_empty_variable_counts_as_absent() -> None:
    assert resolve({}, {"POISE_PORT": ""}).server.port == 8000


def test_gpu_memory_utilization_sets_the_kv_cache_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config_values, "available_memory_bytes", lambda: 1000)
    settings = resolve({"gpu-memory-utilization": "0.25"}, {})
    assert settings.cache.memory_bytes == 250
    assert "no GPU here" in settings.notes[0]
    with pytest.raises(ConfigError, match="say the same thing twice"):
        resolve({"gpu-memory-utilization": "0.25", "kv-cache-memory-bytes": "1MiB"}, {})


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({}, {"POISE_API_KEY": "hunter2,,"})
    assert "hunter2" not in str(caught.value)


def test_several_api_keys() -> None:
    assert resolve({"api-key": ("a", "b")}, {}).server.api_keys == ("a", "b")
    assert resolve({}, {"POISE_API_KEY": "a, b"}).server.api_keys == ("a", "b")


@pytest.mark.parametrize(
    "make",
    [
        lambda: CacheConfig(block_size=17),
        lambda: CacheConfig(memory_bytes=-1),
        lambda: CacheConfig(dtype="fp8"),  # type: ignore[arg-type]
        lambda: SchedulerConfig(max_num_seqs=0),
        lambda: SchedulerConfig(max_model_len=1),
        lambda: SchedulerConfig(max_num_seqs="4"),  # type: ignore[arg-type]
        lambda: ComputeConfig(threads=0),
        lambda: ServerConfig(log_format="xml"),
        lambda: ModelSource(model=""),
    ],
)
def test_the_dataclasses_refuse_what_their_flags_refuse(make: type) -> None:
    with pytest.raises(ConfigError, match="is not valid: expected"):
        make()


def test_the_kv_type_that_auto_stands_for() -> None:
    given = ({}, {"kv-cache-dtype": "auto"}, {"kv-cache-dtype": "int8"})
    assert [resolve(flags, {}).cache.kv_dtype for flags in given] == ["bf16", "bf16", "int8"]


def test_an_unknown_flag_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--prot is not a flag; did you mean --port"):
        resolve({"prot": 1}, {})
