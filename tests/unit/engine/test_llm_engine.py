from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from engine_harness import (
    EOS,
    SPECIAL,
    VOCAB_SIZE,
    Answer,
    TypingDrafter,
    TypingExecutor,
    assert_idle,
    join,
    make_engine,
    request,
    run,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from poise.core.clock import ManualClock
from poise.core.output import SchedulerOutput
from poise.engine import llm_engine
from poise.engine.client import RequestDelta
from poise.engine.llm_engine import MAX_CONSECUTIVE_FAILURES, LLMEngine
from poise.errors import EngineDeadError, InvalidRequestError


def types(text: str | bytes) -> TypingExecutor:
    data = text.encode() if isinstance(text, str) else text
    return TypingExecutor(lambda prompt: data)


def answer_of(text: str | bytes, **params: object) -> Answer:
    [answers] = run(make_engine(types(text)), request(max_tokens=100, **params))
    return answers[0]


def drain(engine: LLMEngine) -> dict[int, list[RequestDelta]]:
    deltas: dict[int, list[RequestDelta]] = {}
    while engine.has_unfinished_requests():
        for key, delta in engine.step():
            deltas.setdefault(key, []).append(delta)
    return deltas


def test_answer_ends_at_eos_whose_text_is_not_shown() -> None:
    answer = answer_of("hi ✓", skip_special_tokens=False)
    assert answer.text == "hi ✓"
    assert answer.token_ids == (*"hi ✓".encode(), EOS)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_answer_ends_at_max_tokens_and_an_incomplete_character_is_flushed() -> None:
    [answers] = run(make_engine(types("ab✓")), request(max_tokens=4))
    assert answers[0].text == "ab\ufffd"
    assert answers[0].finish_reason == "length"
    assert len(answers[0].token_ids) == 4


def test_max_tokens_defaults_to_what_is_left_of_the_context() -> None:
    engine = make_engine(types("x" * 500), max_model_len=40)
    [answers] = run(engine, request("hello", max_tokens=None))
    assert len(answers[0].token_ids) == 35
    assert answers[0].finish_reason == "length"


def test_max_tokens_defaults_to_what_is_left_of_the_pool() -> None:
    engine = make_engine(types("x" * 500), num_blocks=5, max_model_len=100)
    [answers] = run(engine, request("hello", max_tokens=None))
    assert len(answers[0].token_ids) == 15


def test_ignore_eos_goes_on() -> None:
    answer = answer_of(b"ab", ignore_eos=True, skip_special_tokens=False)
    assert answer.finish_reason == "length"
    assert answer.text.startswith("ab<eos><eos>")


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_id(include: bool) -> None:
    answer = answer_of("abXc", stop_token_ids=[ord("X")], include_stop_str_in_output=include)
    assert answer.text == ("abX" if include else "ab")
    assert answer.token_ids == tuple(b"abX")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", ord("X"))


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    class Executor(TypingExecutor):
        def execute(self, output: SchedulerOutput):  # type: ignore[no-untyped-def]
            result = super().execute(output)
            for tokens in result.token_ids.values():
                tokens[:] = [SPECIAL if token == ord("#") else token for token in tokens]
            return result

    for skip, text in ((True, "ab"), (False, "a<special>b")):
        engine = make_engine(Executor(lambda prompt: b"a#b"))
        [answers] = run(engine, request(max_tokens=9, skip_special_tokens=skip))
        assert answers[0].text == text


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_token_edges(include: bool) -> None:
    answer = answer_of("one STOP two", stop=["STOP"], include_stop_str_in_output=include)
    assert answer.text == ("one STOP" if include else "one ")
    assert answer.token_ids == tuple(b"one STOP")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "STOP")


def test_held_back_text_is_flushed_at_the_end() -> None:
    answer = answer_of("one STO", stop=["STOP"])
    assert (answer.text, answer.finish_reason) == ("one STO", "stop")
    [answers] = run(make_engine(types("one STOP")), request(max_tokens=7, stop=["STOP"]))
    assert (answers[0].text, answers[0].finish_reason) == ("one STO", "length")


def test_text_held_back_is_never_sent_before_it_is_certain() -> None:
    engine = make_engine(types("a STaSTOP"))
    engine.add_request(0, request(max_tokens=50, stop=["STOP"]))
    texts = []
    while engine.has_unfinished_requests():
        texts += [delta.choices[0].text for _, delta in engine.step()]
    assert texts == ["a", " ", "", "", "STa", "", "", "", ""]


def test_logprobs_and_tokens_are_cut_where_a_stop_string_ends() -> None:
    """All that was drafted and drawn behind it never was: not in the answer, its usage or the cache."""
    text = b"a!b and more text than one block holds"
    engine = make_engine(types(text.decode()), drafter=TypingDrafter(text))
    speculative = {"method": "ngram", "num_speculative_tokens": 20}
    asked = {"max_tokens": 60, "stop": ["!b"], "logprobs": 0}
    [answers] = run(engine, request("12345", speculative=speculative, **asked))
    assert answers[0].token_ids == tuple(b"a!b")
    assert len(answers[0].logprobs) == 3
    assert answers[0].text == "a"
    assert engine.metrics.generation_tokens == 3
    counters = engine._scheduler.stats().counters
    assert (counters.num_steps, counters.num_output_tokens) == (1, 3)
    run(engine, request(b"12345" + text, max_tokens=1))
    counters = engine._scheduler.stats().counters
    assert counters.num_prefix_hit_tokens == 4  # 7 of the first request's 8 tokens were computed


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab✓", max_size=30),
    stops=st.lists(st.text(alphabet="ab✓", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_stop_strings_equal_a_naive_scan(
    text: str, stops: list[str], include: bool, min_tokens: int
) -> None:
    """After each token beyond min_tokens: does the text so far hold a stop string that this token
    completed?
    """
    data = text.encode()
    assume(
        min_tokens <= len(data)
    )  # the real sampler bans EOS before min_tokens, this executor can't
    if min_tokens > 0:
        assume(not any(a != b and a in b for a in stops for b in stops))
    expected = (text, len(data) + 1, None)
    for length in range(min_tokens + 1, len(data) + 1):
        before = data[: length - 1].decode(errors="ignore")
        now = data[:length].decode(errors="ignore")
        if len(now) == len(before):
            continue
        matches = [(now.rfind(stop), stop) for stop in stops if now.endswith(stop)]
        if matches:
            start, stop = min(matches)
            expected = (now if include else now[:start], length, stop)
            break
    [answers] = run(
        make_engine(types(data)),
        request(
            max_tokens=150, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
        ),
    )
    answer = answers[0]
    assert (answer.text, len(answer.token_ids), answer.stop_reason) == expected


def test_detokenize_false_gives_tokens_only() -> None:
    answer = answer_of("abc", detokenize=False)
    assert answer.text == ""
    assert answer.token_ids == (*b"abc", EOS)


def test_streamed_answers_do_not_depend_on_company() -> None:
    requests = [
        request(f"prompt number {i}", max_tokens=5 + i, seed=i, logprobs=0, ignore_eos=True)
        for i in range(10)
    ]
    alone = [run(make_engine(caching=False), item)[0][0] for item in requests]
    together = run(make_engine(num_blocks=24, max_num_batched_tokens=16), *requests)
    assert [answers[0] for answers in together] == alone


def test_n_choices_share_the_prompt_and_differ() -> None:
    engine = make_engine()
    prompt = "a prompt that fills some blocks"
    deltas: list[RequestDelta] = []
    engine.add_request(0, request(prompt, n=3, max_tokens=6, seed=7, ignore_eos=True))
    deltas = drain(engine)[0]
    answers = join(deltas)
    assert sorted(answers) == [0, 1, 2]
    assert len({answer.token_ids for answer in answers.values()}) == 3
    assert engine.metrics.request_params_n.total == 9
    # 31 prompt tokens: 7 full blocks are computed once and found twice
    assert engine.metrics.prompt_tokens_cached == 2 * 28
    assert deltas[-1].stats is not None
    assert deltas[-1].stats.num_output_tokens == 18
    assert deltas[-1].stats.num_prompt_tokens == 31
    assert deltas[-1].stats.num_cached_tokens == 0
    [first] = run(make_engine(), request(prompt, n=1, max_tokens=6, seed=7, ignore_eos=True))
    assert first[0] == answers[0]


def test_one_choice_stops_by_a_string_and_the_others_go_on() -> None:
    executor = TypingExecutor(lambda prompt: b"")
    texts = {0: b"aaSTOPaa", 1: b"bbbbbbbbbbbb"}
    executor.answer_choice = lambda prompt, choice: texts[choice]
    [answers] = run(make_engine(executor), request(n=2, max_tokens=50, stop=["STOP"]))
    assert (answers[0].text, answers[0].stop_reason) == ("aa", "STOP")
    assert (answers[1].text, answers[1].stop_reason) == ("b" * 12, None)


def test_prompt_logprobs_come_once_with_the_first_delta() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    prompt = "a prompt cut into several chunks"
    item = request(prompt, n=2, max_tokens=4, prompt_logprobs=0, seed=1, ignore_eos=True)
    engine.add_request(0, item)
    deltas = drain(engine)[0]
    first, *others = deltas
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    token_ids = [entry.token_id for entry in first.prompt_logprobs[1:] if entry is not None]
    assert token_ids == list(prompt.encode())[1:]
    assert all(delta.prompt_logprobs is None for delta in others)
    plain = run(make_engine(), request(prompt, n=2, max_tokens=4, seed=1, ignore_eos=True))[0]
    assert {i: a.token_ids for i, a in join(deltas).items()} == {
        i: a.token_ids for i, a in plain.items()
    }


def test_a_broken_first_choice_does_not_hold_the_others_back() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(
        0, request("a prompt cut in chunks", n=2, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    )
    engine.step()
    engine._end(engine._choices[0], "error", "made up")
    deltas = drain(engine)[0]
    assert deltas[0].prompt_logprobs is None
    assert len(deltas) > 2
    answers = join(deltas)
    assert [answers[i].finish_reason for i in (0, 1)] == ["error", "length"]


def test_prompt_logprobs_wait_for_the_first_token() -> None:
    """They are complete a step before it where the prompt's last token is a chunk of its own."""
    engine = make_engine(max_num_batched_tokens=1)
    engine.add_request(0, request("abc", max_tokens=1, prompt_logprobs=0, ignore_eos=True))
    [delta] = drain(engine)[0]
    assert delta.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in delta.prompt_logprobs] == [None, *b"bc"]


def test_prompt_logprobs_of_a_prompt_of_one_token() -> None:
    engine = make_engine()
    engine.add_request(0, request("x", max_tokens=2, prompt_logprobs=0, ignore_eos=True))
    assert drain(engine)[0][0].prompt_logprobs == [None]


def test_logprobs_follow_tokens_only_where_asked() -> None:
    with_logprobs = answer_of("abc", logprobs=0)
    assert [entry.token_id for entry in with_logprobs.logprobs] == [*b"abc", EOS]
    assert answer_of("abc").logprobs == ()


@pytest.mark.parametrize(
    ("prompt", "params", "word"),
    [
        ((), {}, "empty"),
        ((VOCAB_SIZE,), {}, str(VOCAB_SIZE)),
        ((-1,), {}, "-1"),
        ((True,), {}, "True"),
        ((1.5,), {}, "1.5"),
        ((1,) * 200, {"max_tokens": None}, "200"),
        ((1,) * 300, {"max_tokens": None}, "300"),
        ((1,) * 100, {"max_tokens": 101}, "201"),
        ((1,) * 60, {"max_tokens": 70}, "130"),  # fits the context, not the pool
        ((1,), {"logit_bias": {VOCAB_SIZE: 1.0}}, str(VOCAB_SIZE)),
        ((1,), {"stop_token_ids": [VOCAB_SIZE]}, str(VOCAB_SIZE)),
        ((1,), {"allowed_token_ids": [VOCAB_SIZE]}, str(VOCAB_SIZE)),
        ((1,), {"bad_words": ["  "]}, "  "),
        ((1,), {"max_tokens": None, "min_tokens": 500}, "500"),
    ],
)
def test_refusals_name_the_value_and_leave_nothing_behind(
    prompt: Sequence[object], params: dict[str, object], word: str
) -> None:
    engine = make_engine(types("ok"), num_blocks=30)
    item = request("", n=3, **params)  # type: ignore[arg-type]
    item = type(item)(item.request_id, prompt, item.params, 0)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request(0, item)
    assert word in str(caught.value)
    assert caught.value.param is not None
    assert_idle(engine)
    assert run(engine, request("next"))[0][0].text == "ok"


def test_bad_words_are_banned_with_and_without_a_leading_space() -> None:
    engine = make_engine()
    engine.add_request(0, request(bad_words=["no", " no"], max_tokens=1))
    choice = next(iter(engine._choices.values()))
    assert choice.request.sampling.bad_word_ids == (tuple(b"no"), tuple(b" no"))


@pytest.mark.parametrize("num_steps", range(12))
def test_abort_at_every_state_frees_everything(num_steps: int) -> None:
    """Queued, in the middle of the prompt, decoding, preempted, finished: 12 steps of a pool that
    is too small.
    """
    engine = make_engine(num_blocks=14, max_num_batched_tokens=8, max_num_seqs=3)
    for key in range(5):
        engine.add_request(
            key, request(f"{key} prompt of 20 bytes", n=1 + key % 2, max_tokens=12, ignore_eos=True)
        )
    for _ in range(num_steps):
        engine.step()
    engine.abort(num_steps % 5)
    engine._scheduler.check_invariants()
    engine.abort(num_steps % 5)
    engine.abort(99)
    finals = [delta for key, delta in engine.take_outputs() if key == num_steps % 5]
    for delta in finals:
        assert delta.stats is not None
        assert delta.choices[-1].finish_reason == "abort"
    engine.abort_all()
    engine.take_outputs()
    assert_idle(engine)
    assert run(engine, request(max_tokens=3, ignore_eos=True))[0][0].finish_reason == "length"


def test_a_failing_step_ends_only_the_requests_in_it() -> None:
    clean = make_engine(types("an answer"))
    [expected] = run(clean, request("late", max_tokens=20))
    executor = types("an answer")
    engine = make_engine(executor, max_num_seqs=2)
    failing = iter([False, True])
    executor.fail = lambda output: _raise_if(next(failing, False))
    for key, prompt in enumerate(("one", "two", "late")):
        engine.add_request(key, request(prompt, max_tokens=20))
    answers = {key: join(deltas)[0] for key, deltas in drain(engine).items()}
    for key in (0, 1):
        assert answers[key].finish_reason == "error"
        assert answers[key].stop_reason == "step failed: RuntimeError: boom"
        assert answers[key].text == "a"
    assert answers[2] == expected[0]
    assert engine.failure is None
    assert_idle(engine)


class ProfiledExecutor(TypingExecutor):
    def start_profile(self) -> None: ...

    def stop_profile(self) -> Any:
        return "what operations took"


@pytest.mark.parametrize(
    ("pause", "between"),
    [("nothing", 3 + 10**9), ("abort", 2), ("failed step", 2), ("end", 2 + 2)],
)
def test_a_profile_counts_no_pause_as_time_between_steps(
    monkeypatch: pytest.MonkeyPatch, pause: str, between: int
) -> None:
    """Every look at the clock takes 1 ns, the pause 10⁹; 3 steps have 2 gaps."""
    ticks, now = itertools.count(1), 0
    monkeypatch.setattr(llm_engine, "monotonic_ns", lambda: now + next(ticks))
    executor = ProfiledExecutor(lambda prompt: b"an answer")
    engine = make_engine(executor)
    engine.start_profile()
    engine.add_request(0, request(max_tokens=3))
    engine.step()
    if pause == "abort":
        engine.abort(0)
    elif pause == "failed step":
        failing = iter([True])
        executor.fail = lambda output: _raise_if(next(failing, False))
        engine.step()
    elif pause == "end":
        drain(engine)
    now = 10**9
    engine.add_request(1, request(max_tokens=3))
    drain(engine)
    profile, _ = engine.stop_profile()
    assert profile.between_nanoseconds == between


def _raise_if(fails: bool) -> None:
    if fails:
        raise RuntimeError("boom")


def test_three_failing_steps_in_a_row_kill_the_engine_and_tell_everyone() -> None:
    executor = types("answer")
    executor.fail = lambda output: _raise_if(True)
    engine = make_engine(executor, max_num_seqs=1)
    for key in range(5):
        engine.add_request(key, request(f"{key}"))
    answers = {key: join(deltas)[0] for key, deltas in drain(engine).items()}
    assert len(answers) == 5
    assert all(answer.finish_reason == "error" for answer in answers.values())
    assert engine.metrics.num_steps == MAX_CONSECUTIVE_FAILURES
    assert engine.failure is not None
    assert "RuntimeError: boom" in engine.failure
    with pytest.raises(EngineDeadError, match="boom"):
        engine.add_request(9, request())


def test_failures_that_are_not_in_a_row_do_not_kill() -> None:
    executor = types("abc")
    turns = iter(range(100))
    executor.fail = lambda output: _raise_if(next(turns) % 3 != 2)
    engine = make_engine(executor, max_num_seqs=1)
    for key in range(20):
        engine.add_request(key, request(f"{key}", max_tokens=1))
    drain(engine)
    assert engine.failure is None


def test_keyboard_interrupt_in_a_step_passes_through_and_leaves_the_engine_whole() -> None:
    executor = types("answer")

    def interrupt(output: SchedulerOutput) -> None:
        raise KeyboardInterrupt

    executor.fail = interrupt
    engine = make_engine(executor)
    engine.add_request(0, request())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    [(_, delta)] = engine.take_outputs()
    assert delta.choices[0].finish_reason == "error"
    assert_idle(engine)
    executor.fail = lambda output: None
    assert run(engine, request())[0][0].text == "answer"


def test_broken_logits_end_their_request_alone() -> None:
    engine = make_engine()
    engine.add_request(0, request("one", max_tokens=6, ignore_eos=True))
    engine.add_request(1, request("two", max_tokens=6, ignore_eos=True))
    engine.step()
    engine._executor.broken.add(0)  # type: ignore[attr-defined]
    deltas = drain(engine)
    last = deltas[0][-1].choices[0]
    assert (last.finish_reason, last.stop_reason) == ("error", "numerical breakdown at token 1")
    assert deltas[1][-1].choices[0].finish_reason == "length"
    assert engine.metrics.corrupted_requests == 1
    assert_idle(engine)


def test_a_fault_in_one_requests_text_leaves_the_others() -> None:
    engine = make_engine(types("answer"))
    engine.add_request(0, request("one"))
    engine.add_request(1, request("two"))

    class FaultyDetokenizer:
        def append(self, ids: Sequence[int]) -> str:
            raise ValueError("no such text")

        def flush(self) -> str:
            return ""

    engine._choices[0].output._detokenizer = FaultyDetokenizer()
    answers = {key: join(deltas)[0] for key, deltas in drain(engine).items()}
    assert answers[0].finish_reason == "error"
    assert answers[0].stop_reason == "output processing failed: ValueError: no such text"
    assert answers[1].text == "answer"
    assert_idle(engine)


def test_stats_come_from_the_clock() -> None:
    clock = ManualClock(100.0)
    engine = make_engine(types("abcd"), clock=clock, max_num_seqs=1)
    engine.add_request(0, request("one", max_tokens=2))
    engine.add_request(1, request("two", max_tokens=3), arrival_time=99.0)
    deltas = []
    executor = engine._executor
    executor.fail = lambda output: clock.advance(1.0)  # type: ignore[attr-defined]
    while engine.has_unfinished_requests():
        deltas += engine.step()
    stats = {key: delta.stats for key, delta in deltas if delta.stats is not None}
    assert stats[0] is not None
    assert (stats[0].queue_seconds, stats[0].total_seconds) == (0.0, 2.0)
    assert stats[0].time_to_first_token_seconds == 1.0
    assert stats[1] is not None
    assert (stats[1].queue_seconds, stats[1].total_seconds) == (3.0, 6.0)
    assert stats[1].time_to_first_token_seconds == 4.0


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 10), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("fail"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_any_history_gives_whole_answers_or_a_reason(
    operations: list[tuple[str, int, int]],
) -> None:
    """Adds, aborts and failing steps in any order: answers that end by themselves are those of a
    run alone.
    """
    engine = make_engine(num_blocks=20, max_num_seqs=4, max_num_batched_tokens=10)
    added = []
    deltas: dict[int, list[RequestDelta]] = {}

    def step() -> None:
        for key, delta in engine.step():
            deltas.setdefault(key, []).append(delta)
        engine._scheduler.check_invariants()

    for name, size, n in operations:
        if name == "add":
            prompt = f"prompt of size {size} and then {'some more' * 3}"[:size]
            item = request(prompt, n=n, max_tokens=1 + size % 9, seed=size, ignore_eos=True)
            engine.add_request(len(added), item)
            added.append(item)
        elif name == "abort":
            engine.abort(size)
        elif name == "step":
            for _ in range(size):
                step()
        else:
            engine._executor.fail_next = True  # type: ignore[attr-defined]
            step()
            engine._executor.fail_next = False  # type: ignore[attr-defined]
            engine._num_consecutive_failures = 0
    while engine.has_unfinished_requests():
        step()
    step()
    assert_idle(engine)
    assert sorted(deltas) == list(range(len(added)))
    for key, item in enumerate(added):
        [alone] = run(make_engine(), item)
        for index, answer in join(deltas[key]).items():
            if answer.finish_reason == "length":
                assert answer == alone[index]
            else:
                assert answer.finish_reason in ("abort", "error")
                assert answer.token_ids == alone[index].token_ids[: len(answer.token_ids)]
