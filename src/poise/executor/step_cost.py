"""The coefficients of core/step_time for a model on this machine, and the probes that correct them at the start.

Knows models/cost, measured rates and executors. Invariant: nothing here takes longer than two short steps.
"""

from __future__ import annotations

from time import monotonic
from typing import Final

from poise.core.output import (
    EngineSampling,
    Executor,
    KVGroupSpec,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
)
from poise.core.sampling_params import SamplingParams
from poise.core.step_time import Fit, StepCost, StepTimeModel
from poise.executor.stored_rates import StoredRates
from poise.models import cost
from poise.models.config import ModelConfig

GUESSED_READ_BYTES: Final = 5e9  # per second and thread: an old laptop's
GUESSED_OPERATIONS: Final = 30e9
ATTENTION_PART: Final = 1 / 8  # of the rate of int8 products that attention in bf16 reaches
PYTHON_PER_STEP: Final = 2e-4
PYTHON_PER_ROW: Final = 1e-5
PROBE_SECONDS: Final = 0.05  # no probe is begun that is predicted to take longer
PROBE_TOKENS: Final = 16
PROBE_ID: Final = -1


def step_cost(
    config: ModelConfig, weight_bytes: int, threads: int, rates: StoredRates | None
) -> StepCost:
    """From models/cost and the machine's rates; guessed rates where none were measured."""
    read = GUESSED_READ_BYTES * threads if rates is None else rates.read_bytes
    operations = GUESSED_OPERATIONS * threads if rates is None else rates.int8_operations
    return StepCost(
        per_step=weight_bytes / read + PYTHON_PER_STEP,
        per_token=2 * cost.active_parameters(config) / operations,
        per_key=4 * config.num_heads * config.head_dim / (operations * ATTENTION_PART),
        per_sampled=2 * cost.output_parameters(config) / operations + PYTHON_PER_ROW,
    )


def probe(
    executor: Executor,
    groups: list[KVGroupSpec],
    block_size: int,
    step_cost: StepCost,
    most_tokens: int,
) -> Fit:
    """Corrections from a step of 16 prompt tokens, or of `most_tokens` if that is less, and one of a single token.

    Their pages hold nothing that anybody could find afterwards. Slow models are not probed: their first
    real steps will do.
    """
    model = StepTimeModel(step_cost, groups)
    num_prompt = min(PROBE_TOKENS, most_tokens)
    num_pages = -(-(num_prompt + 1) // block_size)
    tables = tuple(tuple(range(g * num_pages, (g + 1) * num_pages)) for g in range(len(groups)))
    sampling = EngineSampling(SamplingParams(temperature=0.0), 0, 0, frozenset())
    new = NewRequest(PROBE_ID, [0] * num_prompt, num_prompt, sampling, tables)
    no_blocks: tuple[tuple[int, ...], ...] = ((),) * len(groups)
    start = 0
    for num_tokens in (num_prompt, 1):
        row = ScheduledRequest(PROBE_ID, start, num_tokens, no_blocks, True)
        shape = model.shape_of([row])
        if model.predict(shape) > PROBE_SECONDS:
            break
        begin = monotonic()
        executor.execute(SchedulerOutput(0, (), (new,) if start == 0 else (), (row,), num_tokens))
        model.observe(shape, monotonic() - begin)
        start += num_tokens
    executor.execute(SchedulerOutput(0, (PROBE_ID,), (), (), 0))
    return model.fit
