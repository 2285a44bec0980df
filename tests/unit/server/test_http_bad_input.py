"""Every wrong request is a 4xx in OpenAI's error shape that names the culprit, and the next request works."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_server_engine import ByteTokenizer, FakeEngine, call, fake_app, http_client
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.core.sampling_params import SamplingParams
from poise.errors import EngineDeadError, InvalidRequestError
from poise.server.parameters import CHAT_PARAMETERS, COMPLETION_PARAMETERS

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def refusal(response: Any, status: int = 400) -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    return body["error"]


def refused(body: Any, path: str = "/v1/completions", status: int = 400) -> Any:
    engine = FakeEngine()
    error = refusal(call(engine, path, body), status)
    assert not engine.requests
    return error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "valid JSON"),
        (b'{"prompt": "a"} x', "valid JSON"),
        (b"[1]", "expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b'"a"', "expected a JSON object"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "byte order mark"),
        (b'{"prompt": "\xff"}', "UTF-8 at byte 12"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (b'{"prompt": ["a", "\\udc00x"]}', "lone surrogate"),
        (b'{"\\ud800": 1, "prompt": "a"}', "lone surrogate"),
        (b'{"prompt": "a", "prompt": "b"}', "stands twice"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity"),
        (b'{"prompt": "a", "temperature": 1e400}', "1e400"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "4,300 digits"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": ' + b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_body_that_is_no_strict_json(body: bytes, words: str) -> None:
    error = refused(body)
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_surrogate_pairs_are_text() -> None:
    engine = FakeEngine()
    assert call(engine, "/v1/completions", b'{"prompt": "\\ud83d\\ude42"}').status_code == 200
    assert bytes(engine.requests[0].prompt_token_ids).decode() == "🙂"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["", "hi"]}, "prompt[0]"),
        ({"prompt": ["hi", ""]}, "prompt[1]"),
        ({"prompt": ["hi", [1]]}, "prompt[1]"),
        ({"prompt": ["hi", 1]}, "prompt[1]"),
        ({"prompt": [[1], "hi"]}, "prompt[1]"),
        ({"prompt": [1, "hi"]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [None]}, "prompt"),
        ({"prompt": [{}]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [[1], [2, -1]]}, "prompt[1]"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 128}, "n"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**12}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": 2**63}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": []}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": "no"}, "bad_words"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"191222": -100}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": 1}, "echo"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"add_special_tokens": 0}, "add_special_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"store": True}, "store"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"priority": True}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"cache_salt": ["x"]}, "cache_salt"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": -1}, "deadline_ms"),
        ({"deadline_ms": "1"}, "deadline_ms"),
        ({"deadline_ms": 1e300}, "deadline_ms"),
        ({"service_class": "turbo"}, "service_class"),
        ({"service_class": 1}, "service_class"),
        ({"model": 5}, "model"),
    ],
)
def test_bad_completion_names_the_parameter(changes: dict[str, Any], param: str) -> None:
    error = refused({"prompt": "hello", **changes})
    assert error["param"] == param
    assert len(error["message"]) < 700


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"min_tokens": 190}, "min_tokens"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_bad_chat_names_the_parameter(changes: dict[str, Any], param: str) -> None:
    assert refused({**CHAT, **changes}, "/v1/chat/completions")["param"] == param


def test_unknown_name_gets_the_nearest_known_one() -> None:
    error = refused({"prompt": "a", "max_token": 5})
    assert error["param"] == "max_token"
    assert error["code"] == "unknown_parameter"
    assert "did you mean max_tokens?" in error["message"]
    assert "top_logprobs" in refused({**CHAT, "toplogprobs": 1}, "/v1/chat/completions")["message"]


def test_lenient_drops_unknown_names_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "a", "max_token": 5, 'x"\r\ny': 1}
    response = call(FakeEngine(), "/v1/completions", body, lenient=True)
    assert response.status_code == 200
    warnings = response.headers.get_list("warning")
    assert len(warnings) == 2
    assert "max_token was dropped" in warnings[0]
    assert "x????y" in warnings[1] or "x???y" in warnings[1]
    assert [record for record in caplog.records if "max_token dropped" in record.getMessage()]
    answer = call(FakeEngine(), "/v1/completions", {"prompt": "a", "suffix": "x"}, lenient=True)
    assert refusal(answer)["param"] == "suffix"


def test_unknown_model() -> None:
    error = refused({"prompt": "a", "model": "other"}, status=404)
    assert error["code"] == "model_not_found"
    assert "'other'" in error["message"]


@pytest.mark.parametrize(
    ("engine", "body", "words"),
    [
        (FakeEngine(max_model_len=8), {"prompt": "a" * 8}, "8 tokens"),
        (FakeEngine(max_model_len=8), {"prompt": "a" * 6, "max_tokens": 3}, "max_tokens is 3"),
        (FakeEngine(kv_capacity_tokens=8), {"prompt": "a" * 8}, "--kv-cache-memory-bytes"),
        (FakeEngine(kv_capacity_tokens=8), {"prompt": "aa", "max_tokens": 7}, "at most 8"),
        (FakeEngine(max_model_len=8), {"prompt": ["a", "a" * 8]}, "prompt[1]"),
    ],
)
def test_what_can_not_fit_is_refused(engine: FakeEngine, body: Any, words: str) -> None:
    error = refusal(call(engine, "/v1/completions", body))
    assert error["code"] == "context_length_exceeded"
    assert words in error["message"]
    assert not engine.requests


def test_logprobs_that_would_fill_the_memory_are_refused() -> None:
    engine = FakeEngine(max_model_len=9000)
    body = {"prompt": ["a" * 8000] * 100, "max_tokens": 0, "echo": True, "logprobs": 20}
    assert refusal(call(engine, "/v1/completions", body))["param"] == "logprobs"
    body = {**CHAT, "n": 128, "logprobs": True, "top_logprobs": 20}
    error = refusal(call(engine, "/v1/chat/completions", body))
    assert "fewer prompts, choices" in error["message"]
    assert not engine.requests


def test_a_text_that_can_never_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_, **__: pytest.fail("tokenised"))
    error = refused({"prompt": "a" * 100_000})
    assert error["code"] == "context_length_exceeded"
    assert "100000 characters" in error["message"]


def test_wrong_paths_methods_and_media_types() -> None:
    engine = FakeEngine()
    assert refusal(call(engine, "/v1/nothing", {}), 404)["code"] == "not_found"
    assert refusal(call(engine, "/v1/models/", method="GET"), 404)
    response = call(engine, "/v1/completions", method="GET")
    assert refusal(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert refusal(call(engine, "/health", {}), 405)
    for headers in ({"content-type": "text/plain"}, {"content-encoding": "gzip"}):
        assert refusal(call(engine, "/v1/completions", {"prompt": "a"}, headers=headers), 415)
    form = {"content-type": "application/json; charset=utf-8"}
    assert call(engine, "/v1/completions", {"prompt": "a"}, headers=form).status_code == 200


def test_body_limit() -> None:
    body = {"prompt": "a" * 60}
    size = len(json.dumps(body))
    assert call(FakeEngine(), "/v1/completions", body, max_body_bytes=size).status_code == 200
    error = refusal(call(FakeEngine(), "/v1/completions", body, max_body_bytes=size - 1), 413)
    assert error["code"] == "body_too_large"


def test_body_limit_holds_without_a_declared_length() -> None:
    num_sent = 0

    async def endless() -> Any:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b" " * 1024

    async def run() -> Any:
        async with http_client(fake_app(FakeEngine(), max_body_bytes=4096)) as http:
            headers = {"content-type": "application/json"}
            return await http.post("/v1/completions", content=endless(), headers=headers)

    refusal(asyncio.run(run()), 413)
    assert num_sent <= 6


def test_engine_errors_have_their_own_status() -> None:
    for stream in (False, True):
        body = {"prompt": "a", "stream": stream}
        dead = FakeEngine(failure=EngineDeadError("engine failed: step 7"))
        response = call(dead, "/v1/completions", body)
        assert refusal(response, 503)["code"] == "engine_dead"
        assert response.headers["retry-after"] == "1"
        full = FakeEngine(failure=InvalidRequestError("too big for the pool", "prompt"))
        assert refusal(call(full, "/v1/completions", body))["param"] == "prompt"
        bug = FakeEngine(failure=ZeroDivisionError("/secret/path"))
        error = refusal(call(bug, "/v1/completions", body), 500)
        assert "secret" not in json.dumps(error)


def test_an_engine_error_in_a_stream_is_an_event_without_done() -> None:
    engine = FakeEngine(failure=ZeroDivisionError("secret"), fail_after=2)
    response = call(engine, "/v1/completions", {"prompt": "a", "stream": True})
    assert response.status_code == 200
    assert '"error":{"message":"Internal error' in response.text
    assert "[DONE]" not in response.text
    assert "secret" not in response.text


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, -0.0, 1e-320, "", "fake-model"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from(sorted({*CHAT_PARAMETERS, *COMPLETION_PARAMETERS})), VALUES, max_size=3
    ),
    chat=st.booleans(),
)
def test_any_value_of_any_field_is_an_answer_or_a_4xx(changes: dict[str, Any], chat: bool) -> None:
    base = CHAT if chat else {"prompt": "hello"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    engine = FakeEngine(max_model_len=40)
    response = call(engine, path, {**base, **changes})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert refusal(response, response.status_code)["message"]
    assert engine.num_running == 0
    assert call(engine, path, base).status_code == 200


def test_every_sampling_parameter_is_a_field() -> None:
    internal = {"detokenize"}
    names = set(SamplingParams.__dataclass_fields__) - internal
    assert names <= set(COMPLETION_PARAMETERS)
    assert names <= set(CHAT_PARAMETERS)
