"""Configuration: small frozen dataclasses, each constructor of the system takes its own.

A field's metadata names its flag, how a text becomes its value, and why the default is what it is. Flags, environment
twins (POISE_…) and configuration keys are all derived from that one table; `resolve` keeps where each value came from.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from poise.config_flags import Alias, check, flag_of, setting
from poise.config_flags import Flag as Flag
from poise.config_speculation import SpeculationConfig as SpeculationConfig
from poise.config_values import (
    fraction,
    fraction_of_memory,
    integer,
    load_format,
    milliseconds,
    one_of,
    seconds,
    size,
    string,
    switch,
    words,
)
from poise.errors import ConfigError

Activations = Literal["int8", "bf16"]
KVCacheDtype = Literal["bf16", "int8"]

NOT_FLAGS = ("POISE_HOME", "POISE_ISA")  # read where they matter, before any flag is known


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the model comes from: a registry name, a GGUF file, a Hugging Face folder, or hf:org/repo[@revision]."""

    model: str = setting(
        "smollm2-135m", "model", string,
        "A named model (poise models), a GGUF file, a Hugging Face folder, or hf:org/repo[@revision].",
        "the smallest named model that chats",
    )  # fmt: skip
    served_name: str | None = setting(
        None, "served-model-name", string,
        "The model's name in the API.",
        "the model's own name",
    )  # fmt: skip
    offline: bool = setting(
        False, "offline", switch,
        "Never touch the network: a named model must be in the cache.",
        "a missing named model is pulled on first use",
    )  # fmt: skip
    load_format: str = setting(
        "auto", "load-format", load_format,
        "auto reads the file; dummy, or dummy:CONTAINER (BF16, Q8_0, Q4_K_M, ...), makes random weights for a folder's "
        "config.json or a shape such as llama-3.2-1b.",
        "answers that mean something",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Paged KV cache. `memory_bytes=None` sizes it from what the machine still allows."""

    block_size: int = setting(
        16, "block-size", one_of(16, 32, 64),
        "Tokens per KV block: 16, 32 or 64. Answers are the same bytes for each.",
        "the finest sharing of prefixes",
    )  # fmt: skip
    memory_bytes: int | None = setting(
        None, "kv-cache-memory-bytes", size,
        "Memory for the KV cache, in bytes or as 256MiB, 2GiB.",
        "40 % of the memory that is left, or what max-num-seqs x max-model-len can use if that is less",
        Alias(
            "gpu-memory-utilization", fraction_of_memory,
            "Accepted for vLLM's sake: the fraction of the host memory that is left to give to the KV cache.",
            "there is no GPU here: taken as that fraction of the host memory that is left, for the KV cache",
        ),
    )  # fmt: skip
    enable_prefix_caching: bool = setting(
        True, "enable-prefix-caching", switch,
        "Keep the KV of prompts and answers and use it again for requests that begin the same way.",
        "the answers are the same bytes, sooner",
    )  # fmt: skip
    dtype: Literal["bf16", "int8", "auto"] = setting(
        "bf16", "kv-cache-dtype", one_of("bf16", "int8", "auto"),
        "What K and V are kept in: bf16 (which is also auto), or int8 with a scale for each token and head.",
        "int8 holds nearly twice the tokens and costs a little quality",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)

    @property
    def kv_dtype(self) -> KVCacheDtype:
        """What auto stands for is settled here."""
        return "int8" if self.dtype == "int8" else "bf16"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the queue, and the order. `max_model_len=None` takes the model's own."""

    max_num_seqs: int = setting(
        64, "max-num-seqs", integer(1, 65_536),
        "Sequences that may run at the same time.",
        "more users than that share two cores badly",
    )  # fmt: skip
    max_num_batched_tokens: int = setting(
        512, "max-num-batched-tokens", integer(1, 1_048_576),
        "Tokens computed in one step: longer prompts are cut into chunks of this size.",
        "one chunk keeps the streams of others moving",
    )  # fmt: skip
    max_model_len: int | None = setting(
        None, "max-model-len", integer(2),
        "Longest prompt and answer together, in tokens.",
        "the model's own context",
    )  # fmt: skip
    scheduling_policy: Literal["fcfs", "priority", "fair", "static"] | None = setting(
        None, "scheduling-policy", one_of("fcfs", "priority", "fair", "static"),
        "Who goes first: fcfs, priority (lower first, with ageing), fair (the tenant served least) or static (fixed batches).",
        "fair where tenants are configured, else fcfs",
    )  # fmt: skip
    target_itl_ms: float = setting(
        0.0, "target-itl-ms", milliseconds,
        "While others stream, take only as many prompt tokens into a step as end within this by prediction; 0 for no target.",
        "prompts are computed as fast as they can be",
    )  # fmt: skip
    max_num_partial_prefills: int = setting(
        0, "max-num-partial-prefills", integer(0, 65_536),
        "Prompts that may be half computed at the same time; 0 for any number.",
        "as many as the tokens of a step allow",
    )  # fmt: skip
    long_prefill_token_threshold: int = setting(
        0, "long-prefill-token-threshold", integer(0, 1_048_576),
        "Most tokens of one prompt in a step while others wait, so that short ones pass; 0 for no cap.",
        "prompts are computed in the order of their arrival",
    )  # fmt: skip
    watermark: float = setting(
        0.0, "watermark", fraction,
        "Part of the KV blocks that stays free for running requests when another one is admitted.",
        "every block works; who runs out preempts the newest",
    )  # fmt: skip
    max_num_queued_reqs: int | None = setting(
        None, "max-num-queued-reqs", integer(0, 1_000_000),
        "Requests that may wait; more are refused with 429 and Retry-After. 0 for no bound.",
        "4 x max-num-seqs",
    )  # fmt: skip
    max_num_queued_tokens: int | None = setting(
        None, "max-num-queued-tokens", integer(0),
        "Prompt tokens that may wait; more are refused with 429 and Retry-After. 0 for no bound.",
        "what drains in 60 seconds, by prediction, and at least 1,024 for each of max-num-seqs",
    )  # fmt: skip

    record_schedule: str | None = setting(
        None, "record-schedule", string,
        "Write every scheduling decision and what it saw to this file (it holds token ids of prompts and answers); see poise replay.",
        "nothing is recorded",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)

    def without_queue_bounds(self) -> SchedulerConfig:
        """For callers in this process, who hand over all they have at once."""
        return replace(self, max_num_queued_reqs=0, max_num_queued_tokens=0)


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """`threads=None`: physical cores within the affinity mask and the cgroup quota."""

    threads: int | None = setting(
        None, "threads", integer(1, 1024),
        "Worker threads. Answers are the same bytes for any number.",
        "physical cores within the affinity mask and the cgroup quota",
    )  # fmt: skip
    activations: Literal["int8", "bf16"] = setting(
        "int8", "activations", one_of("int8", "bf16"),
        "What activations are rounded to before they meet integer weights: int8 (in groups of 32) or bf16.",
        "the fastest; bf16 is closer to the unrounded model",
    )  # fmt: skip
    shared_prefix_attention: bool = setting(
        True, "enable-shared-prefix-attention", switch,
        "Read the KV of a prefix once for all requests of a step that have its blocks in common.",
        "the answers are the same bytes, with less memory traffic",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP edge. `lenient` drops unknown parameters with a warning instead of refusing them."""

    host: str = setting(
        "127.0.0.1", "host", string,
        "Address to listen on; 0.0.0.0 for every interface.",
        "nobody outside this machine is let in unasked",
    )  # fmt: skip
    port: int = setting(
        8000, "port", integer(0, 65_535),
        "Port to listen on; 0 takes a free one.",
        "vLLM's port",
    )  # fmt: skip
    lenient: bool = setting(
        False, "lenient", switch,
        "Drop unknown request parameters with a Warning header instead of refusing the request.",
        "nothing that might change an answer is ignored silently",
    )  # fmt: skip
    log_format: str = setting(
        "text", "log-format", one_of("text", "json"),
        "Request log: text or json. Prompts are never logged.",
        "for reading in a terminal",
    )  # fmt: skip
    max_body_bytes: int = setting(
        4 * 1024 * 1024, "max-body-bytes", size,
        "Largest request body, in bytes or as 4MiB.",
        "ample for any prompt that fits a context",
    )  # fmt: skip
    api_keys: tuple[str, ...] = setting(
        (), "api-key", words,
        "Keys that clients must send as a bearer token; give the flag several times for several keys.",
        "anybody who reaches the port is served",
        secret=True,
    )  # fmt: skip
    tenants: str | None = setting(
        None, "tenants", string,
        "TOML file of tenants: their hashed keys, limits and shares (docs/TENANTS.md); read again on SIGHUP.",
        "everybody is one and the same tenant",
    )  # fmt: skip
    public_prefix: str | None = setting(
        None, "public-prefix", string,
        "Text file, such as the system prompt: where a prompt begins with it, its KV is shared by all tenants.",
        "nothing is shared between tenants",
    )  # fmt: skip
    shutdown_timeout: float = setting(
        5.0, "shutdown-timeout", seconds,
        "Seconds that running requests get to finish after SIGTERM or Ctrl-C; 0 aborts them at once.",
        "short answers finish, a supervisor does not lose patience",
    )  # fmt: skip

    profiling: bool = setting(
        False, "enable-profiling", switch,
        "Offer POST /start_profile and /stop_profile, which poise profile --url uses.",
        "clients have no say in what the server spends its time on",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        if self.tenants is not None and self.api_keys:
            raise ConfigError("--tenants and --api-key: give one; the tenants file has the keys")


CONFIG_CLASSES: tuple[type, ...] = (
    ModelSource,
    CacheConfig,
    SchedulerConfig,
    ComputeConfig,
    SpeculationConfig,
    ServerConfig,
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: "--port", "POISE_PORT", "port in poise.toml", or "default"; and why, for a default."""

    source: str
    why: str


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything resolved. `origins` is keyed by flag name; `notes` are lines worth showing once."""

    source: ModelSource
    cache: CacheConfig
    scheduler: SchedulerConfig
    compute: ComputeConfig
    speculation: SpeculationConfig
    server: ServerConfig
    origins: Mapping[str, Origin]
    notes: tuple[str, ...]

    def values(self) -> dict[str, object]:
        """Effective value of each flag, in the table's order."""
        result: dict[str, object] = {}
        for config in self._configs():
            for item in fields(config):
                result[flag_of(item).name] = getattr(config, item.name)
        return result

    def _configs(self) -> tuple[Any, ...]:
        return (
            self.source,
            self.cache,
            self.scheduler,
            self.compute,
            self.speculation,
            self.server,
        )


def flags(classes: Sequence[type] = CONFIG_CLASSES) -> list[Flag]:
    """Every flag of these classes, in order, without aliases."""
    return [flag_of(item) for cls in classes for item in fields(cls)]


def flag_names(classes: Sequence[type] = CONFIG_CLASSES) -> list[str]:
    """Every name a user may write, aliases included."""
    return [name for flag in flags(classes) for name in (flag.name, *_alias_names(flag))]


def environment_name(flag_name: str) -> str:
    """max-num-seqs -> POISE_MAX_NUM_SEQS"""
    return "POISE_" + flag_name.upper().replace("-", "_")


def resolve(
    given: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Settings:
    """Joins the flags given (by flag name, None where absent), the environment, a TOML file and the defaults.

    A flag beats the environment, the environment beats the file. Raises ConfigError naming the value and its place.
    """
    environment = os.environ if environment is None else environment
    if config_file is None and environment.get("POISE_CONFIG"):
        config_file = Path(environment["POISE_CONFIG"])
    known = flag_names()
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"--{unknown[0]} is not a flag{nearest(unknown[0], known, '--')}")
    layers = (
        {name: (f"--{name}", value) for name, value in given.items() if value is not None},
        _environment_layer(environment, known),
        _file_layer(config_file, known) if config_file else {},
    )
    origins: dict[str, Origin] = {}
    notes = unknown_variables(environment, known)
    configs = []
    for cls in CONFIG_CLASSES:
        values = {}
        for item in fields(cls):
            flag = flag_of(item)
            found = _first(flag, layers, notes)
            if found is None:
                values[item.name] = flag.default
                origins[flag.name] = Origin("default", flag.why)
            else:
                values[item.name], origins[flag.name] = found
        configs.append(cls(**values))
    source, cache, scheduler, compute, speculation, server = configs
    return Settings(source, cache, scheduler, compute, speculation, server, origins, tuple(notes))


Layer = Mapping[str, tuple[str, object]]  # flag name -> (place, raw value)


def _first(flag: Flag, layers: Sequence[Layer], notes: list[str]) -> tuple[Any, Origin] | None:
    """The value of the first layer that names the flag or one of its aliases."""
    for layer in layers:
        present = [name for name in (flag.name, *_alias_names(flag)) if name in layer]
        if not present:
            continue
        if len(present) > 1:
            places = " and ".join(layer[name][0] for name in present)
            raise ConfigError(f"{places} say the same thing twice: give one of them")
        place, raw = layer[present[0]]
        alias = next((alias for alias in flag.aliases if alias.name == present[0]), None)
        if alias is not None:
            notes.append(f"{place}: {alias.note}")
        try:
            value = (alias or flag).parse(raw)
        except ValueError as error:
            shown = "the value" if flag.secret else repr(raw)
            raise ConfigError(f"{place}: {shown} is not valid: {error}") from None
        return value, Origin(place, alias.note if alias else "as asked")
    return None


def _environment_layer(
    environment: Mapping[str, str], known: Sequence[str]
) -> dict[str, tuple[str, object]]:
    layer: dict[str, tuple[str, object]] = {}
    for name in known:
        variable = environment_name(name)
        if environment.get(variable):  # an empty variable counts as absent
            layer[name] = (variable, environment[variable])
    return layer


def _file_layer(path: Path, known: Sequence[str]) -> dict[str, tuple[str, object]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from None
    layer: dict[str, tuple[str, object]] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in known:
            raise ConfigError(f"{path}: {key!r} is not a setting{nearest(name, known, '')}")
        if name in layer:
            raise ConfigError(f"{path}: {key!r} is given twice")
        layer[name] = (f"{key} in {path}", value)
    return layer


def unknown_variables(environment: Mapping[str, str], known: Sequence[str]) -> list[str]:
    """One line for each POISE_ variable that nothing reads."""
    names = [environment_name(name) for name in known] + [*NOT_FLAGS, "POISE_CONFIG"]
    return [
        f"{variable} is not read by poise{nearest(variable, names, '')}"
        for variable in sorted(environment)
        if variable.startswith("POISE_") and variable not in names
    ]


def nearest(name: str, known: Sequence[str], prefix: str) -> str:
    """A hint to append to an error: the known name closest to the one given, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _alias_names(flag: Flag) -> list[str]:
    return [alias.name for alias in flag.aliases]
