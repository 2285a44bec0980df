"""Every optimisation that is built in, as data: what it may change, what proves it, and how to switch it off.

Knows settings, not the code that implements them. Invariant: an `exact` entry changes no byte of any answer; only `exact`
ones are on by default (quantised activations of an integer-weight model are the one stated exception).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from poise.config import Settings
from poise.machine import default_threads

Kind = Literal["exact", "law", "lossy"]  # same bytes, same distribution, bounded loss of quality


@dataclass(frozen=True, slots=True)
class Optimisation:
    """One entry.

    `flag` switches or sizes it. `check` is the command that tests what `kind` claims, `experiment` says how to see its gain.
    `off` are the settings (by flag name) that take it away, for the check; `way_back` says the same to people.
    """

    name: str
    flag: str
    kind: Kind
    check: str
    experiment: str
    way_back: str
    state: Callable[[Settings], str]  # "on", "off", or what it depends on
    off: Mapping[str, str] = field(default_factory=dict)


def _on(active: bool) -> str:
    return "on" if active else "off"


def _speculates(settings: Settings, acceptance: str) -> bool:
    speculation = settings.speculation.default
    return speculation is not None and speculation.acceptance == acceptance


def _chunked_prefill(settings: Settings) -> str:
    chunk, longest = settings.scheduler.max_num_batched_tokens, settings.scheduler.max_model_len
    return f"on above {chunk:,} tokens" if longest is None else _on(chunk < longest)


OPTIMISATIONS: tuple[Optimisation, ...] = (
    Optimisation(
        name="continuous batching",
        flag="--max-num-seqs",
        kind="exact",
        check="poise verify --check company",
        experiment="32 clients at once, with and without; compare tokens per second",
        way_back="--max-num-seqs 1",
        state=lambda settings: _on(settings.scheduler.max_num_seqs > 1),
        off={"max-num-seqs": "1"},
    ),
    Optimisation(
        name="chunked prefill",
        flag="--max-num-batched-tokens",
        kind="exact",
        check="poise verify --check chunks",
        experiment="a long prompt arrives while another answer streams; compare the longest gap in the stream",
        way_back="--max-num-batched-tokens no smaller than --max-model-len",
        state=_chunked_prefill,
        off={"max-num-batched-tokens": "8192"},
    ),
    Optimisation(
        name="prefix cache",
        flag="--enable-prefix-caching",
        kind="exact",
        check="poise verify --check cache",
        experiment="the same long prompt twice; compare the second time to first token, with and without",
        way_back="--no-enable-prefix-caching",
        state=lambda settings: _on(settings.cache.enable_prefix_caching),
        off={"enable-prefix-caching": "false"},
    ),
    Optimisation(
        name="shared-prefix attention",
        flag="--enable-shared-prefix-attention",
        kind="exact",
        check="poise verify --check shared",
        experiment="many clients behind one long system prompt, with and without; compare `poise profile`'s attention",
        way_back="--no-enable-shared-prefix-attention",
        state=lambda settings: _on(
            settings.compute.shared_prefix_attention and settings.cache.enable_prefix_caching
        ),
        off={"enable-shared-prefix-attention": "false"},
    ),
    Optimisation(
        name="speculative decoding",
        flag="--spec-method",
        kind="exact",
        check="poise verify --check speculation",
        experiment="benchmarks/speculation.py: the same requests with and without, in turn; compare tokens per second",
        way_back='--spec-method off, or "speculative": false in a request',
        state=lambda settings: _on(_speculates(settings, "coupled")),
        off={"spec-method": "off"},
    ),
    Optimisation(
        name="rejection of drafts",
        flag="--speculative-config",
        kind="law",
        check="poise verify --check rejection",
        experiment="as for speculative decoding, with acceptance rejection and coupled; compare drafts accepted",
        way_back='"acceptance": "coupled" in --speculative-config or in a request',
        state=lambda settings: _on(_speculates(settings, "rejection")),
        off={"spec-method": "off"},
    ),
    Optimisation(
        name="worker threads",
        flag="--threads",
        kind="exact",
        check="poise verify --check threads",
        experiment="one client, with 1 and with all threads; compare tokens per second",
        way_back="--threads 1",
        state=lambda settings: _on((settings.compute.threads or default_threads()) > 1),
        off={"threads": "1"},
    ),
    Optimisation(
        name="vector kernels",
        flag="POISE_ISA",
        kind="exact",
        check="poise verify --check isa",
        experiment="one client, with each POISE_ISA; compare tokens per second",
        way_back="POISE_ISA=baseline",
        state=lambda settings: _on(os.environ.get("POISE_ISA") != "baseline"),
    ),
    Optimisation(
        name="quantised activations",
        flag="--activations",
        kind="lossy",
        check="poise verify quality",
        experiment="the same prompts with int8 and with bf16 activations; compare speed and logprobs",
        way_back="--activations bf16",
        state=lambda settings: (
            "on for integer weights" if settings.compute.activations == "int8" else "off"
        ),
    ),
    Optimisation(
        name="int8 KV cache",
        flag="--kv-cache-dtype",
        kind="lossy",
        check="poise verify quality --kv-cache-dtype int8",
        experiment="many long conversations at once, with int8 and with bf16; compare how many run together and tokens per second",
        way_back="--kv-cache-dtype bf16",
        state=lambda settings: _on(settings.cache.kv_dtype == "int8"),
        off={"kv-cache-dtype": "bf16"},
    ),
)
