"""Random operations on the scheduler: every answer is the one that its request gets alone."""

from __future__ import annotations

from collections.abc import Sequence

from core_harness import FULL, FULL_AND_SLIDING, OLDEST_GIVES_WAY, Harness, answer_alone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from poise.core.output import KVGroupSpec
from poise.core.policy import FCFS, Policy
from poise.core.request import Request

PREFIXES = [[1] * 13, [1] * 8 + [2] * 16, [3] * 30, [4, 5] * 9]


class SchedulerMachine(RuleBasedStateMachine):
    """Adds with shared prefixes, aborts, failing steps, tiny pools, any chunk size."""

    @initialize(
        groups=st.sampled_from([FULL, FULL_AND_SLIDING]),
        pool_tokens=st.sampled_from([64, 64, 72, 120]),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_num_seqs=st.integers(1, 8),
        max_num_batched_tokens=st.integers(1, 40),
        caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from([FCFS, OLDEST_GIVES_WAY]),
        cap=st.sampled_from([1, 3, 8, 1000]),
    )
    def start(
        self,
        groups: Sequence[KVGroupSpec],
        pool_tokens: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        caching: bool,
        policy: Policy,
        cap: int,
    ) -> None:
        self.harness = Harness(
            groups=groups,
            num_blocks=pool_tokens // block_size * len(groups),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            caching=caching,
            policy=policy,
            cap=cap,
        )
        self.added: list[Request] = []

    @rule(
        prefix=st.sampled_from(PREFIXES),
        cut=st.integers(1, 30),
        suffix=st.lists(st.integers(0, 3), max_size=12),
        max_tokens=st.integers(1, 20),
        seed=st.integers(0, 2),
        stop=st.sampled_from([(), tuple(range(10))]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        copies=st.integers(1, 5),
    )
    def add(
        self,
        prefix: list[int],
        cut: int,
        suffix: list[int],
        max_tokens: int,
        seed: int,
        stop: tuple[int, ...],
        prompt_logprobs: int | None,
        copies: int,
    ) -> None:
        for choice in range(copies):
            request = self.harness.add(
                prefix[:cut] + suffix,
                max_tokens,
                seed=seed,
                choice=choice,
                stop_token_ids=stop,
                min_tokens=min(max_tokens, 2),
                prompt_logprobs=prompt_logprobs,
                logprobs=0,
            )
            self.added.append(request)

    def unfinished(self) -> list[Request]:
        return [r for r in self.added if r.finish_reason is None]

    @precondition(lambda self: self.unfinished())
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        unfinished = self.unfinished()
        self.harness.abort(unfinished[which % len(unfinished)])

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    @precondition(lambda self: self.unfinished())
    @rule(which=st.integers(0, 1000), fails=st.booleans())
    def abort_in_flight(self, which: int, fails: bool) -> None:
        output = self.harness.schedule()
        result = self.harness.executor.execute(output)
        self.abort(which)
        if fails:
            self.harness.scheduler.fail_step(output)
            self.harness.scheduler.check_invariants()
        else:
            self.harness.update(output, result)

    @precondition(lambda self: self.harness.scheduler.running)
    @rule()
    def failing_step(self) -> None:
        self.harness.executor.fail_next = True
        self.harness.step()
        self.harness.executor.fail_next = False

    @invariant()
    def answers_are_prefixes(self) -> None:
        for request in getattr(self, "added", ()):
            assert self.harness.outcomes[request.request_id].token_ids == request.output_token_ids

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.drain()
        for request in self.added:
            outcome = self.harness.outcomes[request.request_id]
            alone = answer_alone(request)
            if request.finish_reason == "abort":
                assert alone.token_ids[: len(outcome.token_ids)] == outcome.token_ids
                continue
            assert outcome.token_ids == alone.token_ids
            assert (outcome.finish_reason, outcome.stop_reason) == (
                alone.finish_reason,
                alone.stop_reason,
            )
            assert [entry.token_id for entry in outcome.logprobs] == outcome.token_ids
            if request.sampling.params.prompt_logprobs is not None:
                prompt = request.token_ids[: request.num_prompt_tokens]
                assert [entry.token_id for entry in outcome.prompt_logprobs] == prompt[1:]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
