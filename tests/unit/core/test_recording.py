"""A recorded run replays to the identical schedule, whatever happened in it."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest
from core_harness import FULL_AND_SLIDING, VOCAB_SIZE, ScriptedDrafter, prefix_cache, sampling

from poise.core.executors import ScriptedExecutor
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.limits import Limits
from poise.core.policy import POLICIES
from poise.core.recording import Line, RecordingScheduler, ReplayError, SchedulerSetup, replay
from poise.core.request import Request, RequestOwner
from poise.core.speculation import Speculation
from poise.core.step_time import StepCost
from poise.core.tenant import Share, Tenant, TenantTable
from poise.errors import DeadlineError, QueueFullError

TABLE = TenantTable(
    {"a": Tenant("a", 2.0, reserved=Share(0.3, 0.2, 0.2)), "b": Tenant("b", kv_quota=0.6)},
    {"batch": Share(0.1)},
)


class JitteryClock:
    """Real clocks never read the same twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now = 100.0

    def now(self) -> float:
        self._now += self._rng.expovariate(50)
        return self._now


def record(policy: str, seed: int) -> list[Line]:
    """A busy run: floods, deadlines, aborts, failures, a target ITL, reloads; as JSON would keep it."""
    rng = random.Random(seed)
    setup = SchedulerSetup(
        Limits(6, 24, 1000, target_itl_seconds=0.03, max_num_queued_reqs=12, watermark=0.1),
        policy, TABLE, FULL_AND_SLIDING, 60, 4, True, StepCost(0.005, 0.001, 1e-6, 1e-4),
        {"decode": {0: 1.5}, "prefill": {3: 0.7}},
    )  # fmt: skip
    lines: list[Line] = []
    scheduler = RecordingScheduler(
        setup,
        KVCacheManager(setup.groups, 60, 4, prefix_cache(4, 2)),
        clock := JitteryClock(rng),
        lines.append,
        ScriptedDrafter(),
    )
    executor = ScriptedExecutor(setup.groups, 60, 4, VOCAB_SIZE)
    number = 0
    for step in range(120):
        for _ in range(rng.choice([0, 0, 1, 1, 4])):
            owner = RequestOwner(
                rng.choice("abc"), rng.choice(["interactive", "batch"]), rng.randint(-2, 2),
                rng.choice([None, None, clock.now() + rng.random()]), b"salt",
            )  # fmt: skip
            choices = [
                Request.create(
                    number + i, [rng.randrange(3)] * rng.randint(1, 20),
                    sampling(
                        stop_token_ids=[1, 2],
                        prompt_logprobs=rng.choice([None, 0]),
                        speculation=rng.choice(
                            [None, Speculation("ngram", 3), Speculation("draft_model", 2)]
                        ),
                    ),
                    8, clock.now(), owner,
                )
                for i in range(1)
            ]  # fmt: skip
            number += len(choices)
            with contextlib.suppress(QueueFullError, DeadlineError):
                scheduler.add(*choices)
        if step == 60:
            scheduler.set_tenants(TenantTable({"c": Tenant("c", 5.0)}))
        if rng.random() < 0.1:
            scheduler.abort([rng.randrange(number + 1)])
        scheduler.end_overdue()
        output = scheduler.schedule()
        if rng.random() < 0.1:
            executor.fail_next = True
        try:
            result = executor.execute(output)
        except Exception:
            scheduler.fail_step(output)
        else:
            updates = scheduler.update(output, result)
            for update in updates:
                if update.finish_reason is None and update.new_token_ids and rng.random() < 0.1:
                    kept = update.request.num_output_tokens - len(update.new_token_ids) + 1
                    scheduler.end_at(update.request.request_id, kept)
        executor.fail_next = False
    return json.loads(json.dumps(lines))  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recording_replays_to_the_identical_schedule(policy: str) -> None:
    for seed in range(5):
        lines = record(policy, seed)
        calls = [line.get("call") for line in lines]
        assert {"add", "schedule", "update", "fail_step", "set_tenants", "end_at"} <= set(calls)
        assert any(line.get("drafts") for line in lines)
        steps = [line for line in lines if line.get("call") == "schedule"]
        assert replay(lines) > 0.5 * len(steps)
        assert any("raised" in line for line in lines)


def test_the_first_step_that_differs_is_named() -> None:
    lines = record("fair", 1)
    index, line = [(i, e) for i, e in enumerate(lines) if e.get("call") == "schedule"][40]
    changed: dict[str, Any] = {**line, "outcome": "0" * 16}
    with pytest.raises(ReplayError, match=f"line {index + 1}: schedule"):
        replay([*lines[:index], changed, *lines[index + 1 :]])


def test_another_policy_does_not_replay() -> None:
    lines = record("fcfs", 2)
    lines[0]["setup"]["policy"] = "priority"
    with pytest.raises(ReplayError):
        replay(lines)


@pytest.mark.parametrize("line", [{}, {"setup": 3}, {"setup": {"limits": {}}}])
def test_what_is_no_recording_is_refused(line: Line) -> None:
    with pytest.raises(ReplayError, match="no recording"):
        replay([line])
