"""Records: a restart gives the recorded bytes, a changed answer shows, another fingerprint is said in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from poise.config import resolve
from poise.errors import ConfigError
from poise.verify.answers import Token
from poise.verify.faults import WITHOUT_FAULT, Fault
from poise.verify.proof import Proof, prove
from poise.verify.record import Record, read
from poise.verify.trials import DIFFERENT, SAME


def against(record: Record | None, path: Path | None = None, fault: Fault | None = None) -> Proof:
    return prove(
        resolve({}, {}),
        quick=True,
        checks=(),
        tiny=True,
        against=record,
        record=path,
        fault=fault,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Record:
    path = tmp_path_factory.mktemp("record") / "answers.json"
    assert against(None, path).passed
    return read(path)


def test_a_restart_gives_the_same_bytes(recorded: Record) -> None:
    [outcome] = against(recorded).outcomes
    assert outcome.status == SAME
    assert outcome.num_answers == len(recorded.answers) > 0
    assert "must be equal" in outcome.claim


def test_the_reference_gives_the_bytes_of_the_native_kernels(recorded: Record) -> None:
    """It stands in the kernels' place where faults of the arithmetic are injected."""
    [outcome] = against(recorded, fault=WITHOUT_FAULT[1]).outcomes
    assert outcome.status == SAME


def test_one_bit_shows(recorded: Record) -> None:
    first = recorded.answers[0].choices[0].tokens[2]
    assert first.logprob is not None
    text = msgspec.json.encode(recorded).replace(b"%d" % first.logprob, b"%d" % (first.logprob ^ 1))
    [outcome] = against(msgspec.json.decode(text, type=Record)).outcomes
    assert outcome.status == DIFFERENT
    assert outcome.reproduction is not None
    assert outcome.reproduction.differing == recorded.probes[0].name
    assert outcome.reproduction.difference.where == "choice 0, output token 2"


def test_another_fingerprint_is_said_in_words(recorded: Record) -> None:
    [outcome] = against(replace(recorded, fingerprint="poise-v0-000000000000")).outcomes
    assert outcome.status == SAME
    assert "poise-v0-000000000000" in outcome.claim
    assert "not promised" in outcome.claim


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"format": "poise answers 1"}'])
def test_a_file_that_is_no_record_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a record"):
        read(path)


def test_a_missing_file_and_another_format_are_refused(recorded: Record, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.json")
    path = tmp_path / "answers.json"
    path.write_bytes(msgspec.json.encode(recorded).replace(b"poise answers 1", b"poise answers 9"))
    with pytest.raises(ConfigError, match="poise answers 9"):
        read(path)


def test_tokens_of_another_model_are_refused(recorded: Record) -> None:
    text = msgspec.json.encode(recorded)
    raised = msgspec.json.decode(text, type=Record)
    raised.probes[0] = type(raised.probes[0])("far", (100_000,), raised.probes[0].params, 1)
    with pytest.raises(ConfigError, match="does not have"):
        against(raised)


def test_a_token_is_a_row_of_numbers() -> None:
    assert msgspec.json.encode(Token(1, 2, 3, ((4, 5),))) == b"[1,2,3,[[4,5]]]"
