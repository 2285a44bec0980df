from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from engine_harness import TypingExecutor, assert_idle, make_engine

import poise
from poise import LLM, EngineDeadError, InvalidRequestError, Logprob, SamplingParams
from poise.core.output import SchedulerOutput


def make_llm(text: str = "an answer", **options: int) -> LLM:
    return LLM.from_engine(make_engine(TypingExecutor(lambda prompt: text.encode()), **options))


def test_generate_takes_one_prompt_or_many_as_text_or_ids() -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=50)
    [one] = llm.generate("hello", params)
    assert (one.prompt, one.prompt_token_ids) == ("hello", list(b"hello"))
    assert one.finished
    assert one.outputs[0].text == "an answer"
    assert one.outputs[0].finish_reason == "stop"
    many = llm.generate(["hello", {"prompt_token_ids": list(b"other")}], params, use_tqdm=False)
    assert [output.prompt for output in many] == ["hello", None]
    assert many[1].prompt_token_ids == list(b"other")
    assert [output.outputs[0].text for output in many] == ["an answer"] * 2
    assert llm.generate({"prompt_token_ids": [1]}, params)[0].prompt_token_ids == [1]
    assert llm.generate([]) == []
    assert len({output.request_id for output in [one, *many]}) == 3


def test_params_go_with_prompts_pair_by_pair() -> None:
    llm = make_llm()
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=4)])
    assert [output.outputs[0].text for output in outputs] == ["an", "an a"]
    with pytest.raises(InvalidRequestError, match=r"1 sampling params .* 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_default_params_make_16_tokens() -> None:
    [output] = make_llm("x" * 100).generate("a")
    assert len(output.outputs[0].token_ids) == 16
    assert output.outputs[0].finish_reason == "length"


def test_n_logprobs_and_prompt_logprobs() -> None:
    llm = LLM.from_engine(make_engine())
    params = SamplingParams(
        n=2, max_tokens=3, logprobs=1, prompt_logprobs=0, seed=3, ignore_eos=True
    )
    [output] = llm.generate("hello", params)
    assert [choice.index for choice in output.outputs] == [0, 1]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(entry) for entry in output.prompt_logprobs[1:] if entry] == [[b] for b in b"ello"]
    for choice in output.outputs:
        assert choice.logprobs is not None
        assert [next(iter(entry)) for entry in choice.logprobs] == choice.token_ids
        total = sum(next(iter(entry.values())).logprob for entry in choice.logprobs)
        assert choice.cumulative_logprob == pytest.approx(total)
    assert output.metrics is not None
    assert output.metrics.num_output_tokens == 6


def test_logprob_dicts_hold_the_drawn_token_first() -> None:
    llm = make_llm("ab")
    [output] = llm.generate("p", SamplingParams(max_tokens=2, logprobs=1))
    assert output.outputs[0].logprobs == [
        {ord("a"): Logprob(-0.0, 1, "a")},
        {ord("b"): Logprob(-1.0, 1, "b")},
    ]


def test_chat_takes_one_conversation_or_many() -> None:
    llm = make_llm()
    messages = [{"role": "user", "content": "hi"}]
    [one] = llm.chat(messages, SamplingParams(max_tokens=50))
    assert one.prompt == "[user]hi"
    assert one.outputs[0].text == "an answer"
    assert len(llm.chat([messages, messages])) == 2


def test_the_seed_used_repeats_the_answer() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = LLM.from_engine(make_engine()).generate(["hello", "hello"], params)
    assert first.seed != second.seed
    again = LLM.from_engine(make_engine()).generate(
        "hello", SamplingParams(max_tokens=8, ignore_eos=True, seed=first.seed)
    )
    assert again[0].outputs == first.outputs


def test_an_llm_with_a_seed_draws_the_same_seeds_again() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    runs = [
        LLM.from_engine(make_engine(), seed=7).generate(["a", "b"], params, use_tqdm=False)
        for _ in range(2)
    ]
    assert [output.outputs for output in runs[0]] == [output.outputs for output in runs[1]]
    assert [output.seed for output in runs[0]] == [output.seed for output in runs[1]]


def test_a_reset_prefix_cache_makes_the_next_prompt_cold() -> None:
    llm = make_llm()
    prompt, params = "the same prompt again and again", SamplingParams(max_tokens=3)
    cached = [llm.generate(prompt, params)[0].num_cached_tokens for _ in range(2)]
    assert llm.reset_prefix_cache()
    again = llm.generate(prompt, params)[0]
    assert cached[0] == again.num_cached_tokens == 0 < cached[1]
    assert again.outputs[0].text == "an "
    assert_idle(llm._engine)


def test_one_bad_prompt_refuses_the_call_and_leaves_nothing_running() -> None:
    llm = make_llm()
    for bad in ("", "x" * 500, {"prompt_token_ids": [99999]}, 5, [1, 2]):
        with pytest.raises(InvalidRequestError):
            llm.generate(["fine", bad])  # type: ignore[list-item]
        assert_idle(llm._engine)
    assert llm.generate("fine", SamplingParams(max_tokens=50))[0].outputs[0].text == "an answer"


def test_a_failing_step_is_an_error_in_the_output_and_the_llm_lives_on() -> None:
    llm = make_llm()
    failures = iter([True])

    def fail(output: SchedulerOutput) -> None:
        if next(failures, False):
            raise RuntimeError("boom")

    llm._engine._executor.fail = fail  # type: ignore[attr-defined]
    [output] = llm.generate("hello")
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].stop_reason == "step failed: RuntimeError: boom"
    assert llm.generate("hello")[0].outputs[0].finish_reason == "stop"


def test_ctrl_c_ends_the_call_between_steps_and_frees_everything() -> None:
    llm = make_llm("x" * 150)
    steps = iter(range(100))

    def interrupt(output: SchedulerOutput) -> None:
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)

    llm._engine._executor.fail = interrupt  # type: ignore[attr-defined]
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a worker of tests ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two"], SamplingParams(max_tokens=100))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert next(steps) == 4
    assert_idle(llm._engine)
    assert llm._engine.metrics.finished["abort"] == 2
    assert llm.generate("three", SamplingParams(max_tokens=3))[0].outputs[0].text == "xxx"


def test_an_exception_in_the_middle_of_a_step_frees_everything() -> None:
    llm = make_llm()
    raised = iter([True])

    def interrupt(output: SchedulerOutput) -> None:
        if next(raised, False):
            raise KeyboardInterrupt

    llm._engine._executor.fail = interrupt  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"])
    assert_idle(llm._engine)
    assert llm.generate("three", SamplingParams(max_tokens=50))[0].outputs[0].text == "an answer"


def test_shutdown_and_context_manager() -> None:
    with make_llm() as llm:
        llm.generate("hello")
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("hello")
    llm.shutdown()


def test_get_metrics_and_tokenizer() -> None:
    llm = make_llm()
    llm.generate("hello", SamplingParams(max_tokens=2))
    [family] = [f for f in llm.get_metrics() if f.name == "vllm:generation_tokens"]
    assert family.samples[0].value == 2
    assert llm.get_tokenizer().encode("a", add_special_tokens=False) == [97]


def test_every_exported_name_exists_and_no_other() -> None:
    for name in poise.__all__:
        assert getattr(poise, name) is not None
    assert set(poise.__all__) <= set(dir(poise))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = poise.no_such_name


def test_importing_poise_loads_nothing_heavy() -> None:
    code = (
        "import sys, poise; heavy = {'numpy', 'tokenizers', 'rich', 'prometheus_client'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "poise.SamplingParams, poise.InvalidRequestError;"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
