"""Probes, metrics, request ids, logs, tokenize and detokenize."""

from __future__ import annotations

import json
import logging

import pytest
from fake_server_engine import FakeEngine, call


def test_probes_and_version() -> None:
    assert call(FakeEngine(), "/version", method="GET").json() == {"version": "9.9.9"}
    sick = FakeEngine(is_ready=False)
    assert call(sick, "/health", method="GET").status_code == 200
    response = call(sick, "/ready", method="GET")
    assert response.status_code == 503
    assert "engine failed: on purpose" in response.json()["error"]["message"]
    assert call(sick, "/v1/completions", {"prompt": "a"}).status_code == 503
    assert not sick.requests


def test_metrics_are_prometheus_text() -> None:
    response = call(FakeEngine(), "/metrics", method="GET")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")


def test_models() -> None:
    model = call(FakeEngine(), "/v1/models", method="GET").json()["data"][0]
    assert model.pop("created") > 0
    assert model == {
        "id": "fake-model",
        "object": "model",
        "owned_by": "poise",
        "max_model_len": 200,
    }
    missing = call(FakeEngine(), "/v1/models/org/other", method="GET")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_no_answer_carries_cors_headers() -> None:
    headers = {"origin": "http://evil.example"}
    response = call(FakeEngine(), "/v1/completions", {"prompt": "a"}, headers=headers)
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert call(FakeEngine(), "/v1/completions", method="OPTIONS").status_code == 405


@pytest.mark.parametrize("given", ["abc-1", "x" * 128])
def test_request_id_comes_back_and_is_never_ours(given: str) -> None:
    engine = FakeEngine()
    headers = {"x-request-id": given}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/nothing", {})):
        response = call(engine, path, body, headers=headers)
        assert response.headers.get_list("x-request-id") == [given]
    assert given not in engine.requests[0].request_id


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb"])
def test_a_strange_request_id_is_replaced(given: str) -> None:
    headers = {"x-request-id": given}
    response = call(FakeEngine(), "/v1/completions", {"prompt": "a"}, headers=headers)
    assert response.json()["id"] == "cmpl-" + response.headers["x-request-id"]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "poise.requests"]


def test_log_line_has_figures_and_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    body = {"prompt": ["secret", "secret"], "max_tokens": 2}
    headers = {"x-request-id": "mine"}
    call(FakeEngine(), "/v1/completions", body, log_format="json", headers=headers)
    (line,) = lines(caplog)
    record = json.loads(line)
    assert record.pop("id").startswith("cmpl-")
    assert record.pop("total_s") >= 0
    assert record == {
        "client_id": "mine",
        "in": 12,
        "cached": 6,
        "out": 4,
        "queue_s": 0.25,
        "ttft_s": 0.5,
        "finish": "length",
    }
    assert "secret" not in caplog.text


def test_log_line_as_text_and_of_refusals(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    call(FakeEngine(), "/v1/completions", {"prompt": "a", "max_tokens": 2})
    call(FakeEngine(), "/v1/completions", {"prompt": "a", "secret\n": 2})
    call(FakeEngine(failure=ValueError("x")), "/v1/completions", {"prompt": "a"})
    first, second, third = lines(caplog)
    assert " in=1 cached=3 out=2 " in first
    assert first.endswith("finish=length")
    assert second.endswith("status=400 about=secret?")
    assert third.endswith("finish=error")


def test_tokenize_and_detokenize() -> None:
    answer = call(FakeEngine(), "/tokenize", {"prompt": "a<|end|>", "model": "fake-model"})
    assert answer.json() == {
        "count": 2,
        "max_model_len": 200,
        "tokens": [97, 256],
        "token_strs": None,
    }
    body = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    chat = call(FakeEngine(), "/tokenize", body).json()
    assert "".join(chat["token_strs"]) == "user: hi\nassistant: "
    body["add_generation_prompt"] = False
    assert call(FakeEngine(), "/tokenize", body).json()["count"] == len("user: hi\n")
    answer = call(FakeEngine(), "/detokenize", {"tokens": [97, 256]})
    assert answer.json() == {"prompt": "a<|end|>"}
    assert call(FakeEngine(), "/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [1]}, "tools"),
        ("/tokenize", {"prompt": "a", "promt": "b"}, "promt"),
        ("/tokenize", {"messages": 5}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_bad_tokenize_requests(path: str, body: dict[str, object], param: str) -> None:
    response = call(FakeEngine(), path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_profiling_is_offered_only_where_it_was_enabled() -> None:
    assert call(FakeEngine(), "/start_profile", method="POST").status_code == 404
    engine = FakeEngine()
    early = call(engine, "/stop_profile", method="POST", profiling=True)
    assert early.status_code == 400
    assert "no profile is running" in early.json()["error"]["message"]
    assert call(engine, "/start_profile", method="POST", profiling=True).status_code == 200
    report = call(engine, "/stop_profile", method="POST", profiling=True).json()
    assert report == {"figures": {"steps": 3}, "trace": {"traceEvents": []}}
