"""`/v1/completions` and `/v1/chat/completions`: shapes, logprobs, echo, seeds, and that a stream says what a whole answer says."""

from __future__ import annotations

from typing import Any

import pytest
from fake_server_engine import END, FakeEngine, call, events
from hypothesis import given, settings
from hypothesis import strategies as st

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def completion(engine: FakeEngine | None = None, **body: Any) -> Any:
    response = call(engine or FakeEngine(), "/v1/completions", {"prompt": "hello", **body})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(engine: FakeEngine, path: str, **body: Any) -> list[Any]:
    response = call(engine, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def test_completion_has_openai_shape() -> None:
    answer = completion(max_tokens=4, temperature=0, seed=5, model="fake-model")
    choice = answer["choices"][0]
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake-model"
    assert answer["system_fingerprint"] == "fp_fake"
    assert choice == {
        "index": 0,
        "text": choice["text"],
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert len(choice["text"]) == 4
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
        "poise_seed": 5,
    }


def test_chat_has_openai_shape() -> None:
    answer = call(FakeEngine(), "/v1/chat/completions", {**CHAT, "max_tokens": 3}).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": message["content"], "refusal": None}
    assert len(message["content"]) == 3
    assert answer["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")


def test_default_lengths() -> None:
    engine = FakeEngine()
    assert completion(engine)["usage"]["completion_tokens"] == 16
    call(engine, "/v1/chat/completions", CHAT)
    assert engine.requests[-1].params.max_tokens == 200 - len("user: hi\nassistant: ")


def test_a_default_length_gives_way_to_the_context() -> None:
    engine = FakeEngine(max_model_len=10)
    assert completion(engine, prompt="12345678")["usage"]["completion_tokens"] == 2
    engine = FakeEngine(kv_capacity_tokens=9)
    assert completion(engine, prompt="12345678")["usage"]["completion_tokens"] == 1


def test_drawn_seed_reproduces_the_answer() -> None:
    first = completion()
    seed = first["usage"]["poise_seed"]
    assert 0 <= seed < 2**53  # exact in a double
    again = completion(seed=seed)
    assert again["choices"] == first["choices"]
    assert again["usage"]["poise_seed"] == seed
    engine = FakeEngine()
    response = call(engine, "/v1/completions", {"prompt": "x", "seed": -1})
    assert response.headers["x-poise-seed"] == "-1"
    assert engine.requests[0].seed == 2**64 - 1


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("a<|end|>", [[97, END]]),
    ],
)
def test_prompt_forms(prompt: object, expected: list[list[int]]) -> None:
    engine = FakeEngine()
    completion(engine, prompt=prompt, max_tokens=1)
    assert [list(request.prompt_token_ids) for request in engine.requests] == expected
    assert len({request.request_id for request in engine.requests}) == len(expected)


def test_choices_are_numbered_across_prompts() -> None:
    engine = FakeEngine()
    answer = completion(engine, prompt=["a", "b"], n=2, max_tokens=2, seed=1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    assert {request.seed for request in engine.requests} == {1}
    alone = completion(prompt="b", n=2, max_tokens=2, seed=1)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[2:] == [choice["text"] for choice in alone["choices"]]


def test_legacy_logprobs() -> None:
    answer = completion(FakeEngine(script=[97, 98]), max_tokens=2, logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    own = -1.75 - 97 / 1024
    assert logprobs["tokens"] == ["a", "b"]
    assert logprobs["text_offset"] == [0, 1]
    assert logprobs["token_logprobs"][0] == own
    assert logprobs["top_logprobs"][0] == {"A": -0.5, "B": -1.5, "a": own}
    none = completion(FakeEngine(script=[97]), max_tokens=1, logprobs=0)
    assert none["choices"][0]["logprobs"]["top_logprobs"] == [{"a": own}]


def test_parts_of_characters_are_told_apart() -> None:
    engine = FakeEngine(script=list("é€".encode()))
    answer = completion(engine, max_tokens=5, logprobs=0)
    logprobs = answer["choices"][0]["logprobs"]
    assert answer["choices"][0]["text"] == "é€"
    assert logprobs["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1]
    chat = call(engine, "/v1/chat/completions", {**CHAT, "max_tokens": 2, "logprobs": True}).json()
    assert [entry["bytes"] for entry in chat["choices"][0]["logprobs"]["content"]] == [[195], [169]]


def test_chat_logprobs() -> None:
    engine = FakeEngine(script=[97])
    body = {**CHAT, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
    choice = call(engine, "/v1/chat/completions", body).json()["choices"][0]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "a",
                "logprob": -1.75 - 97 / 1024,
                "bytes": [97],
                "top_logprobs": [{"token": "A", "logprob": -0.5, "bytes": [65]}],
            }
        ],
        "refusal": None,
    }


def test_echo_with_logprobs_scores_the_prompt() -> None:
    """The request of evaluation harnesses: nothing generated, every prompt token scored but the first."""
    engine = FakeEngine()
    answer = completion(engine, prompt="abc", max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1] == -1.75 - 98 / 1024
    assert answer["usage"]["completion_tokens"] == 0
    assert engine.requests[0].params.max_tokens == 1


def test_echo_returns_the_prompt_before_the_answer() -> None:
    answer = completion(FakeEngine(script=[33]), prompt=[104, 105], max_tokens=1, echo=True)
    assert answer["choices"][0]["text"] == "hi!"
    answer = completion(FakeEngine(script=[33]), prompt="hi", max_tokens=1, echo=True, logprobs=0)
    assert answer["choices"][0]["logprobs"]["tokens"] == ["h", "i", "!"]


def test_prompt_logprobs_have_vllms_shape() -> None:
    answer = completion(prompt="ab", max_tokens=1, prompt_logprobs=1)
    own = {"logprob": -1.75 - 98 / 1024, "rank": 3, "decoded_token": "b"}
    best = {"logprob": -0.5, "rank": 1, "decoded_token": "A"}
    assert answer["choices"][0]["prompt_logprobs"] == [None, {"65": best, "98": own}]
    chat = call(
        FakeEngine(), "/v1/chat/completions", {**CHAT, "max_tokens": 1, "prompt_logprobs": 0}
    ).json()
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_token_ids_are_returned_on_request() -> None:
    answer = completion(FakeEngine(script=[97]), prompt="ab", max_tokens=2, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [97, 97]
    assert answer["choices"][0]["prompt_token_ids"] == [97, 98]
    body = {**CHAT, "max_tokens": 2, "return_token_ids": True}
    chat = call(FakeEngine(script=[97]), "/v1/chat/completions", body).json()
    assert chat["choices"][0]["token_ids"] == [97, 97]
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    chunks = streamed(FakeEngine(script=[97]), "/v1/chat/completions", **body)
    assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    named = completion(
        FakeEngine(script=[97]), max_tokens=1, logprobs=0, return_tokens_as_token_ids=True
    )
    assert named["choices"][0]["logprobs"]["tokens"] == ["token_id:97"]


def test_sampling_parameters_reach_the_engine() -> None:
    asked: dict[str, Any] = {
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 3,
        "stop": ["x"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
    }
    engine = FakeEngine()
    completion(engine, logit_bias={"7": 2, "0": -1.5}, stream=False, **asked)
    params = engine.requests[0].params
    for name, value in asked.items():
        got = getattr(params, name)
        assert got == (tuple(value) if isinstance(value, list) else value), name
    assert params.logit_bias == {7: 2.0, 0: -1.5}


def test_neutral_values_and_bookkeeping_are_accepted() -> None:
    neutral: dict[str, Any] = {
        "n": 1,
        "best_of": 1,
        "logit_bias": {},
        "presence_penalty": 0,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "response_format": {"type": "text"},
        "stop": None,
        "seed": None,
    }
    completion(echo=False, suffix=None, **neutral)
    body = {**CHAT, **neutral, "tools": [], "tool_choice": "none", "parallel_tool_calls": True}
    assert call(FakeEngine(), "/v1/chat/completions", body).status_code == 200


def test_stream_of_chat_begins_with_the_role_and_ends_with_done() -> None:
    chunks = streamed(
        FakeEngine(),
        "/v1/chat/completions",
        **CHAT,
        max_tokens=3,
        stream_options={"include_usage": True},
    )
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-2]]
    assert reasons == [None, None, None, "length"]
    assert {chunk["id"] for chunk in chunks[:-1]} == {chunks[0]["id"]}
    assert chunks[0]["system_fingerprint"] == "fp_fake"


def test_stream_without_usage_has_none() -> None:
    chunks = streamed(FakeEngine(), "/v1/completions", prompt="a", max_tokens=2)
    assert [sorted(chunk) for chunk in chunks[:-1]] == [
        ["choices", "created", "id", "model", "object", "system_fingerprint"]
    ] * 2


def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(
        FakeEngine(), "/v1/completions", prompt="a", max_tokens=3, stream_options=options
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == [1, 2, 3, 3]


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3),
    n=st.integers(1, 3),
    max_tokens=st.integers(0, 6),
    logprobs=st.none() | st.integers(0, 2),
    echo=st.booleans(),
    return_token_ids=st.booleans(),
    script=st.none() | st.lists(st.integers(0, 255), min_size=1, max_size=5),
)
def test_a_stream_says_what_the_whole_answer_says(
    prompts: list[str],
    n: int,
    max_tokens: int,
    logprobs: int | None,
    echo: bool,
    return_token_ids: bool,
    script: list[int] | None,
) -> None:
    if max_tokens == 0:
        echo = True
    body: dict[str, Any] = {
        "prompt": prompts,
        "n": n,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "echo": echo,
        "return_token_ids": return_token_ids,
        "seed": 11,
        "stream_options": {"include_usage": True},
    }
    chunks = streamed(FakeEngine(script=script), "/v1/completions", **body)
    del body["stream_options"]
    whole = completion(FakeEngine(script=script), **body)
    for expected in whole["choices"]:
        parts = [
            choice
            for chunk in chunks[:-1]
            for choice in chunk["choices"]
            if choice["index"] == expected["index"]
        ]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
        if logprobs is not None:
            for name, values in expected["logprobs"].items():
                assert [v for part in parts for v in part["logprobs"][name]] == values
        if return_token_ids:
            ids = [token for part in parts for token in part["token_ids"]]
            assert ids == expected["token_ids"]
            assert parts[0]["prompt_token_ids"] == expected["prompt_token_ids"]
    assert chunks[-2]["usage"] == whole["usage"]


def test_a_choice_that_breaks_down_ends_with_error() -> None:
    engine = FakeEngine(error_choice="numerical breakdown at token 3")
    answer = completion(engine, n=2, max_tokens=3)
    first, second = answer["choices"]
    assert (first["finish_reason"], first["stop_reason"]) == (
        "error",
        "numerical breakdown at token 3",
    )
    assert second["finish_reason"] == "length"
    chunks = streamed(engine, "/v1/completions", prompt="a", max_tokens=3)
    assert chunks[-2]["choices"][0]["finish_reason"] == "error"
    assert chunks[-1] == "[DONE]"
