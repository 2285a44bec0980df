"""Servers that a measurement starts itself: a description in TOML, a process on loopback, and its end in every case.

Knows processes, ports and readiness, not what is measured. Invariant: after `ManagedServer` is left, by whatever way (an error,
Ctrl-C, SIGTERM, SIGKILL of this process), no process of the server runs; see `server_guard` for how.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import string
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from poise.bench import server_guard
from poise.errors import ConfigError, PoiseError

HOST = "127.0.0.1"
POLL_SECONDS = 0.05
PROBE_SECONDS = 2.0
GUARD_SECONDS = 10.0  # beyond the server's own stop time, for the guard to end and report
TAIL_LINES, TAIL_BYTES = 15, 8192
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class ManagedServerError(PoiseError):
    """A managed server did not start, was never ready, died or would not end; `log_tail` has the last lines it wrote."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail


class Preparation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a server needs that we don't ship: packages for a virtual environment of its own.

    `environment` holds for the installation only; `imports` are modules that finish their installation when first imported;
    `disk` and `duration` are for people.
    """

    packages: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    remove: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    disk: str = "unknown"
    duration: str = "unknown"


class ServerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server by name: how to start it, when it is ready, how long things may take.

    `command` and the values of `environment` may hold placeholders in braces, such as {port}; `expand` says which there are.
    """

    name: str
    command: tuple[str, ...]
    model: str
    description: str = ""
    environment: dict[str, str] = {}
    ready_path: str = "/health"
    ready_seconds: float = 120.0
    stop_seconds: float = 10.0
    prepare: Preparation | None = None


_KNOWN_KEYS = ServerSpec.__struct_fields__


def load_spec(path: Path) -> ServerSpec:
    """Reads a server's TOML. Raises ConfigError that names the file and the key."""
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        spec = msgspec.convert({"name": path.stem, **table}, ServerSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; known keys: {', '.join(_KNOWN_KEYS)}") from None
    if not NAME.fullmatch(spec.name):
        raise ConfigError(f"{path}: name {spec.name!r} must be of a-z, 0-9, '.', '_' and '-'")
    if not spec.command:
        raise ConfigError(f"{path}: command is empty; give the program and its arguments")
    if not spec.ready_path.startswith("/"):
        raise ConfigError(f"{path}: ready_path {spec.ready_path!r} must begin with '/'")
    for key in ("ready_seconds", "stop_seconds"):
        if not 0 < getattr(spec, key) <= 86400:
            raise ConfigError(f"{path}: {key} {getattr(spec, key)} must be above 0, at most 86400")
    return spec


def expand(spec: ServerSpec, values: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment with their placeholders filled. Raises ConfigError for an unknown one.

    `ManagedServer` gives {host}, {port} and {temporary} (a folder that is removed at the end) to what the caller gives.
    """

    def fill(text: str) -> str:
        try:
            for _, name, form, conversion in string.Formatter().parse(text):
                if name is not None and (name not in values or form or conversion):
                    raise ConfigError(
                        f"server {spec.name}: unknown placeholder {{{name}}} in {text!r}; known "
                        f"are {', '.join(sorted(values))}"
                    )
        except ValueError as error:
            raise ConfigError(f"server {spec.name}: {text!r}: {error}") from None
        return text.format_map(values)

    return [fill(word) for word in spec.command], {
        name: fill(value) for name, value in spec.environment.items()
    }


class ManagedServer:
    """A server of ours between `__enter__` (started and ready) and `__exit__` (gone, port free).

    Raises ManagedServerError if it dies, is not ready within `spec.ready_seconds`, or leaves its port taken.
    """

    def __init__(self, spec: ServerSpec, values: Mapping[str, str] | None = None) -> None:
        self.spec = spec
        self.port = 0
        self.command: list[str] = []
        self.seconds_to_ready = 0.0
        self._values = dict(values or {})
        self._guard: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            self._stop()
            self._forget_log()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._stop()
            if error is None:
                self._check_port_is_free()
        finally:
            self._forget_log()

    def check_alive(self) -> None:
        """Raises ManagedServerError if the server has ended by itself."""
        assert self._guard is not None, "not started"
        status = self._guard.poll()
        if status is not None:
            raise ManagedServerError(
                f"server {self.spec.name} ended with status {status}", self._tail()
            )

    def _start(self) -> None:
        self.port = free_port()
        temporary = tempfile.mkdtemp(prefix="poise-bench-")
        values = {**self._values, "host": HOST, "port": str(self.port), "temporary": temporary}
        try:
            self.command, extra = expand(self.spec, values)
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - has no name, so nothing to remove
            guard = (sys.executable, "-I", server_guard.__file__)
            self._guard = subprocess.Popen(
                [*guard, str(self.spec.stop_seconds), temporary, *self.command],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **extra},
                start_new_session=True,
            )
        except BaseException:
            os.rmdir(temporary)
            raise

    def _wait_until_ready(self) -> None:
        began = time.perf_counter()
        answer = "nothing listens"
        while time.perf_counter() - began < self.spec.ready_seconds:
            self.check_alive()
            answer = self._probe()
            if answer == "200":
                self.seconds_to_ready = time.perf_counter() - began
                self.check_alive()  # else somebody else answered on the port
                return
            time.sleep(POLL_SECONDS)
        raise ManagedServerError(
            f"server {self.spec.name} was not ready within {self.spec.ready_seconds:g} s: GET "
            f"{self.spec.ready_path}: {answer}",
            self._tail(),
        )

    def _probe(self) -> str:
        """The status of the readiness path, or why there is none."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=PROBE_SECONDS)
        try:
            connection.request("GET", self.spec.ready_path)
            return str(connection.getresponse().status)
        except (OSError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__
        finally:
            connection.close()

    def _stop(self) -> None:
        """Closes the guard's pipe, which ends the server, and waits for it."""
        guard = self._guard
        if guard is None:
            return
        self._guard = None
        assert guard.stdin is not None
        with contextlib.suppress(OSError):
            guard.stdin.close()
        deadline = time.monotonic() + self.spec.stop_seconds + GUARD_SECONDS
        while guard.poll() is None:  # an impatient second Ctrl-C leaves the guard to finish alone
            if time.monotonic() > deadline:
                guard.kill()  # takes the server along
            time.sleep(POLL_SECONDS)

    def _check_port_is_free(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, self.port))
            except OSError:
                raise ManagedServerError(
                    f"server {self.spec.name} has ended but port {self.port} is still taken; a "
                    "process it started may have left its group"
                ) from None

    def _tail(self) -> str:
        """The last lines that the server wrote."""
        assert self._log is not None
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - TAIL_BYTES))
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def _forget_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
