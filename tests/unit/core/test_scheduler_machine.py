"""Random operations on the scheduler: every answer is the one that its request gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core_harness import FULL, FULL_AND_SLIDING, OLDEST_GIVES_WAY, Harness, answer_alone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from poise.core.output import KVGroupSpec
from poise.core.policy import POLICIES, Policy
from poise.core.request import Request, RequestOwner
from poise.core.speculation import Speculation
from poise.core.tenant import NO_TENANTS, SERVICE_CLASSES, Share, Tenant, TenantTable
from poise.errors import DeadlineError, InvalidRequestError

TABLES = [
    NO_TENANTS,
    TenantTable({"a": Tenant("a", 3.0, reserved=Share(0.3, 0.3, 0.3)), "b": Tenant("b", 0.5)}),
    TenantTable(
        {"a": Tenant("a", reserved=Share(0.5)), "b": Tenant("b", reserved=Share(0.2, 0.5, 0.5))},
        {"batch": Share(0.1, 0.1, 0.2)},
    ),
]
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
        policy=st.sampled_from([*POLICIES.values(), OLDEST_GIVES_WAY]),
        cap=st.sampled_from([1, 3, 8, 1000]),
        tenants=st.sampled_from(TABLES),
        quota=st.sampled_from([None, 0.99]),
        limits=st.fixed_dictionaries(
            {
                "target_itl_seconds": st.sampled_from([None, 0.001, 2.0]),
                "max_num_partial_prefills": st.sampled_from([None, 1, 2]),
                "long_prefill_token_threshold": st.sampled_from([0, 2, 16]),
                "watermark": st.sampled_from([0.0, 0.2]),
                "num_preemptions_to_protect": st.integers(0, 3),
            }
        ),
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
        tenants: TenantTable,
        quota: float | None,
        limits: dict[str, Any],
    ) -> None:
        if quota is not None:  # of a tenant whose requests would still fit
            named = {**tenants.tenants, "c": Tenant("c", kv_quota=quota)}
            tenants = TenantTable(named, tenants.reserved_by_class)
        self.harness = Harness(
            groups=groups,
            num_blocks=pool_tokens // block_size * len(groups),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            caching=caching,
            policy=policy,
            cap=cap,
            tenants=tenants,
            **limits,
        )
        self.added: list[Request] = []
        self.ended: set[int] = set()

    @rule(
        prefix=st.sampled_from(PREFIXES),
        cut=st.integers(1, 30),
        suffix=st.lists(st.integers(0, 3), max_size=12),
        max_tokens=st.integers(1, 20),
        seed=st.integers(0, 2),
        stop=st.sampled_from([(), tuple(range(10))]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        copies=st.integers(1, 5),
        owner=st.builds(
            RequestOwner,
            tenant=st.sampled_from(["a", "b", "c", "unknown"]),
            service_class=st.sampled_from(SERVICE_CLASSES),
            priority=st.integers(-2, 2),
        ),
        patience=st.sampled_from([None, None, None, 0, 3, 20]),
        speculation=st.one_of(
            st.none(),
            st.builds(
                Speculation,
                method=st.sampled_from(["ngram", "draft_model"]),
                num_speculative_tokens=st.integers(1, 6),
            ),
        ),
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
        owner: RequestOwner,
        patience: int | None,
        speculation: Speculation | None,
    ) -> None:
        if patience is not None:
            owner = replace(owner, deadline=self.harness.clock.now() + patience)
        for choice in range(copies):
            try:
                request = self.harness.add(
                    prefix[:cut] + suffix,
                    max_tokens,
                    seed=seed,
                    choice=choice,
                    stop_token_ids=stop,
                    min_tokens=min(max_tokens, 2),
                    prompt_logprobs=prompt_logprobs,
                    logprobs=0,
                    owner=owner,
                    speculation=speculation,
                )
            except (InvalidRequestError, DeadlineError):
                assert owner.tenant == "c" or patience is not None
                return
            self.added.append(request)

    def unfinished(self) -> list[Request]:
        return [r for r in self.added if r.finish_reason is None]

    @precondition(lambda self: self.unfinished())
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        unfinished = self.unfinished()
        if unfinished:  # a step in flight may have ended the last ones, whose deadline had passed
            self.harness.abort(unfinished[which % len(unfinished)])

    @precondition(lambda self: any(r.num_output_tokens > 1 for r in self.unfinished()))
    @rule(which=st.integers(0, 1000), after=st.integers(1, 20))
    def stop_string(self, which: int, after: int) -> None:
        """The reader stops an answer at one of the tokens that its last step gave."""
        requests = [r for r in self.unfinished() if r.num_output_tokens > 1]
        request = requests[which % len(requests)]
        output = self.harness.schedule()
        result = self.harness.executor.execute(output)
        self.harness.update(output, result)
        given = len(result.token_ids.get(request.request_id, ()))
        if request.finish_reason is not None or given == 0:
            return
        num_output = request.num_output_tokens - max(0, given - after)
        self.harness.scheduler.end_at(request.request_id, num_output)
        self.harness.scheduler.check_invariants()
        outcome = self.harness.outcomes[request.request_id]
        del outcome.token_ids[num_output:], outcome.logprobs[num_output:]
        self.ended.add(request.request_id)

    @rule(table=st.sampled_from(TABLES))
    def reload_tenants(self, table: TenantTable) -> None:
        self.harness.scheduler.set_tenants(table)

    @rule()
    def reset_prefix_cache(self) -> None:
        is_idle = not self.harness.scheduler.running
        assert self.harness.scheduler.reset_prefix_cache() == is_idle

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
    @rule(which=st.integers(0, 1000))
    def spoilt_by_drafts(self, which: int) -> None:
        """One step in which a request's drafts break its rows, if it has any."""
        running = self.harness.scheduler.running
        request = running[which % len(running)]
        output = self.harness.schedule()
        if any(i.request_id == request.request_id and i.num_drafts for i in output.scheduled):
            self.harness.executor.broken.add(request.request_id)
        result = self.harness.executor.execute(output)
        self.harness.executor.broken.clear()
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
            if request.finish_reason in ("abort", "deadline") or request.request_id in self.ended:
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
