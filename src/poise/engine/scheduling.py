"""From the scheduler's flags to its limits and its policy.

Knows both vocabularies. Invariant: a flag at 0 means "no bound", a flag not given means the default that depends on others.
"""

from __future__ import annotations

from typing import Final

from poise.config import SchedulerConfig
from poise.core.limits import Limits
from poise.core.policy import FAIR, FCFS, POLICIES, Policy
from poise.core.tenant import TenantTable

QUEUED_PER_SEQUENCE: Final = 4  # requests that may wait for each that may run
QUEUE_SECONDS: Final = 60.0  # prompt tokens that may wait: what drains in this time
PROMPT_TOKENS: Final = 1024  # but always a prompt of this length for each sequence that may run


def limits_of(config: SchedulerConfig, max_model_len: int) -> Limits:
    """`max_model_len` is the loaded model's."""
    most_requests, most_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    if most_requests is None:
        most_requests = QUEUED_PER_SEQUENCE * config.max_num_seqs
    return Limits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        max_model_len,
        target_itl_seconds=config.target_itl_ms / 1000 if config.target_itl_ms else None,
        max_num_partial_prefills=config.max_num_partial_prefills or None,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        watermark=config.watermark,
        max_num_queued_reqs=most_requests or None,
        max_num_queued_tokens=most_tokens or None,
        max_queue_seconds=QUEUE_SECONDS if most_tokens is None else None,
        min_num_queued_tokens=config.max_num_seqs * min(PROMPT_TOKENS, max_model_len),
    )


def policy_of(config: SchedulerConfig, tenants: TenantTable) -> Policy:
    """The one asked for; else fair where tenants are configured, else first come, first served."""
    if config.scheduling_policy is not None:
        return POLICIES[config.scheduling_policy]
    return FAIR if tenants.tenants else FCFS
