"""The secret file: made once, private, complete or not there; salts that can't be guessed or confused."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from poise.engine.secret import FILE_NAME, LocalSecret, fresh_secret, local_secret


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    monkeypatch.setenv("POISE_HOME", str(path))
    return path


def test_the_secret_is_kept_for_this_user_only(home: Path) -> None:
    secret = local_secret()
    assert local_secret() == secret
    path = home / FILE_NAME
    assert path.read_bytes() == secret.value
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in home.iterdir()] == [FILE_NAME]


def test_processes_that_start_at_once_agree(home: Path) -> None:
    found: list[LocalSecret] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        found.append(local_secret())

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({secret.value for secret in found}) == 1


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [(b"x" * 32, 0o644, "0644"), (b"x" * 31, 0o600, "32 bytes"), (b"x" * 33, 0o600, "32 bytes")],
)
def test_a_secret_that_others_know_or_a_damaged_one_is_not_used(
    home: Path, caplog: pytest.LogCaptureFixture, content: bytes, mode: int, why: str
) -> None:
    home.mkdir()
    (home / FILE_NAME).write_bytes(content)
    os.chmod(home / FILE_NAME, mode)
    assert local_secret() != local_secret()
    assert why in caplog.text
    assert (home / FILE_NAME).read_bytes() == content


def test_a_link_is_not_followed(home: Path, tmp_path: Path) -> None:
    home.mkdir()
    other = tmp_path / "other"
    other.write_bytes(b"x" * 32)
    other.chmod(0o600)
    (home / FILE_NAME).symlink_to(other)
    assert local_secret().value != b"x" * 32


def test_where_no_file_can_be_kept_the_secret_is_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("POISE_HOME", str(tmp_path / "file" / "home"))
    assert len(local_secret().value) == 32
    assert local_secret() != local_secret()


def test_every_salt_is_another_and_none_is_the_key() -> None:
    secret, other = fresh_secret(), fresh_secret()
    salts = [
        secret.cache_salt(None, None),
        secret.cache_salt("acme", None),
        secret.cache_salt("acme", "x"),
        secret.cache_salt("acmex", None),
        secret.cache_salt("acme", ""),
        secret.cache_salt(None, "acme"),
        secret.cache_salt("x", "acme"),
        other.cache_salt("acme", None),
        secret.block_key,
    ]
    assert len(set(salts)) == len(salts)
    assert secret.cache_salt("acme", "x") == secret.cache_salt("acme", "x")


def test_the_secret_is_not_shown() -> None:
    assert repr(LocalSecret(b"confidential")) == "LocalSecret()"
