"""The servers known by name (server_presets/*.toml), what they need, and how to get it into an environment of its own.

Nothing is installed or downloaded unless `prepare` is called. Invariant: a peer's packages lie under POISE_HOME/peers/NAME only,
marked complete when all of them are in; poise's own environment is never touched.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from poise.bench.managed_server import (
    ManagedServerError,
    Preparation,
    ServerSpec,
    expand,
    load_spec,
)
from poise.errors import ConfigError
from poise.machine import allowed_cpus, default_threads
from poise.weights.cache import poise_home

PRESETS = Path(__file__).with_name("server_presets")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
COMPLETE = "prepared.txt"


def preset_names() -> list[str]:
    """The names that `find_spec` knows without a file."""
    return sorted(path.name.removesuffix(".toml") for path in PRESETS.glob("*.toml"))


def find_spec(name_or_file: str) -> ServerSpec:
    """A preset by name, or a TOML file by its path. Raises ConfigError."""
    if name_or_file.endswith(".toml"):
        return load_spec(Path(name_or_file).expanduser())
    if name_or_file not in preset_names():
        raise ConfigError(
            f"no server named {name_or_file!r}; known are {', '.join(preset_names())}, or give a "
            "path that ends in .toml"
        )
    return replace(load_spec(PRESETS / f"{name_or_file}.toml"), name=name_or_file)


def peer_folder(spec: ServerSpec) -> Path:
    """Where the server's own environment is, or would be."""
    return poise_home() / "peers" / spec.name


def placeholders(
    spec: ServerSpec, *, model: str, model_path: str, threads: int | None = None
) -> dict[str, str]:
    """The values for a spec's braces, but for those that a start decides (host, port, temporary).

    Raises ConfigError if the server needs packages that aren't there yet.
    """
    if not is_prepared(spec):
        raise ConfigError(
            f"server {spec.name} is not prepared; see what it needs with 'poise bench servers "
            f"{spec.name} --plan'"
        )
    folder = peer_folder(spec)
    if "{benchmarks}" in " ".join(spec.command) and not BENCHMARKS.is_dir():
        raise ConfigError(
            f"server {spec.name} is started through a script of poise's source checkout, and this "
            "poise is installed without it; run from a checkout"
        )
    return {
        "python": sys.executable,
        "peer": str(folder),
        "peer_python": str(folder / "bin" / "python"),
        "peer_packages": str(_packages(folder)),
        "benchmarks": str(BENCHMARKS),
        "model": model,
        "model_path": model_path,
        **_machine(threads),
    }


def _machine(threads: int | None) -> dict[str, str]:
    return {
        "threads": str(threads or default_threads()),
        "cpu_list": ",".join(map(str, sorted(allowed_cpus()))),
    }


def _packages(folder: Path) -> Path:
    found = sorted(folder.glob("lib/python*/site-packages"))
    return found[0] if found else folder / "lib"


def is_prepared(spec: ServerSpec) -> bool:
    """Whether nothing is missing: exactly these packages were installed to the end, or none are needed."""
    if spec.prepare is None:
        return True
    try:
        written = (peer_folder(spec) / COMPLETE).read_text(encoding="utf-8")
    except OSError:
        return False
    return written == _receipt(spec.prepare)


def _receipt(needs: Preparation) -> str:
    return "".join(f"{line}\n" for line in (*needs.packages, *needs.options))


def plan(spec: ServerSpec) -> list[str]:
    """What `prepare` would do, a line each, to be read or pasted into a shell; nothing is done."""
    needs = spec.prepare
    if needs is None:
        return [f"{spec.name} needs nothing but poise and a model"]
    state = "already prepared" if is_prepared(spec) else "not prepared"
    lines = [
        f"# {spec.name}: {spec.description} ({state})",
        f"# disk {needs.disk}; time {needs.duration}; packages come from the index pip is set up for",
    ]
    for command, environment in _steps(spec, needs):
        settings = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        lines.append(" ".join([*settings, shlex.join(command)]))
    return lines


def prepare(spec: ServerSpec) -> None:
    """Installs what the server needs, pip's output going where ours goes.

    Does nothing if that was done before; a failed try can be repeated. Raises ManagedServerError.
    """
    needs = spec.prepare
    if needs is None or is_prepared(spec):
        return
    folder = peer_folder(spec)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for command, environment in _steps(spec, needs):
        try:
            subprocess.run(command, env={**os.environ, **environment}, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ManagedServerError(
                f"server {spec.name} can't be prepared: {error}; {folder} may be removed"
            ) from None
    (folder / COMPLETE).write_text(_receipt(needs), encoding="utf-8")


def _steps(spec: ServerSpec, needs: Preparation) -> list[tuple[list[str], Mapping[str, str]]]:
    folder = peer_folder(spec)
    python = str(folder / "bin" / "python")
    _, environment = expand(
        replace(spec, command=(), environment=needs.environment), _machine(None)
    )
    steps: list[tuple[list[str], Mapping[str, str]]] = [
        ([sys.executable, "-m", "venv", str(folder)], {}),
        ([python, "-m", "pip", "install", *needs.options, *needs.packages], environment),
    ]
    if needs.remove:
        steps.append(([python, "-m", "pip", "uninstall", "--yes", *needs.remove], {}))
    steps += [([python, "-c", f"import {module}"], {}) for module in needs.imports]
    return steps
