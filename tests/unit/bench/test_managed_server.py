"""Managed servers start, become ready in time or fail in words, and leave nothing behind however they or we end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from poise.bench import managed_server
from poise.bench.contestants import Contestant
from poise.bench.managed_server import (
    ManagedServer,
    ManagedServerError,
    ServerSpec,
    expand,
    load_spec,
)
from poise.errors import ConfigError

SERVE = """
import http.server, os, pathlib, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
pathlib.Path(sys.argv[2]).joinpath(f"server-{os.getpid()}").touch()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
FORK = """
import os, subprocess, sys, pathlib
for apart in (False, True):  # one stays in the group, one leaves it
    child = subprocess.Popen(["sleep", "300"], start_new_session=apart)
    pathlib.Path(sys.argv[2]).joinpath(f"child-{child.pid}").touch()
"""


def spec_of(tmp_path: Path, program: str, **changes: object) -> ServerSpec:
    """A server that runs this program with its port and a folder to leave its process ids in."""
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(program))
    pids = tmp_path / "pids"
    pids.mkdir(exist_ok=True)
    spec = ServerSpec(
        name="fake",
        command=(sys.executable, "-S", str(script), "{port}", str(pids)),
        model="m",
        ready_seconds=20,
        stop_seconds=5,
    )
    return replace(spec, **changes)


def pids(tmp_path: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in (tmp_path / "pids").iterdir()]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(managed_server.tempfile, "tempdir", str(tmp_path / "temporary"))


def assert_nothing_is_left(tmp_path: Path) -> None:
    assert not [pid for pid in pids(tmp_path) if is_running(pid)]
    assert not list((tmp_path / "temporary").iterdir())


def test_a_server_is_ready_inside_and_gone_after(tmp_path: Path) -> None:
    with ManagedServer(spec_of(tmp_path, SERVE)) as server:
        server.check_alive()
        assert server.seconds_to_ready > 0
        socket.create_connection(("127.0.0.1", server.port)).close()
        assert len(pids(tmp_path)) == 1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    assert_nothing_is_left(tmp_path)


def test_a_contestants_facts_name_no_folder_of_this_machine(tmp_path: Path) -> None:
    found = Contestant("a", "model", spec=spec_of(tmp_path, SERVE))
    with found.running() as target:
        assert target.base_url.startswith("http://127.0.0.1:")
    assert found.facts["command"][0] == Path(sys.executable).name
    assert found.facts["seconds_to_ready"] > 0
    assert str(tmp_path) not in found.facts["command"]
    assert_nothing_is_left(tmp_path)


def test_an_error_inside_ends_the_server_and_passes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), ManagedServer(spec_of(tmp_path, SERVE)):
        raise KeyboardInterrupt
    assert_nothing_is_left(tmp_path)


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE
    with ManagedServer(spec_of(tmp_path, stubborn, stop_seconds=0.3)):
        assert len(pids(tmp_path)) == 1
    assert_nothing_is_left(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="fleeing children are found on Linux only")
def test_children_end_too_in_the_group_or_out_of_it(tmp_path: Path) -> None:
    with ManagedServer(spec_of(tmp_path, FORK + SERVE)):
        assert len(pids(tmp_path)) == 3
        assert all(map(is_running, pids(tmp_path)))
    assert_nothing_is_left(tmp_path)


def test_one_that_dies_at_once_shows_its_last_lines(tmp_path: Path) -> None:
    program = "import sys\nprint('no weights in /nowhere')\nsys.exit(3)"
    with pytest.raises(ManagedServerError, match="ended with status 3") as failure:
        ManagedServer(spec_of(tmp_path, program)).__enter__()
    assert failure.value.log_tail == "no weights in /nowhere"
    assert "\n" not in str(failure.value)
    assert_nothing_is_left(tmp_path)


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "", command=("no-such-program", "{port}"))
    with pytest.raises(ManagedServerError, match="status 127") as failure:
        ManagedServer(spec).__enter__()
    assert "no-such-program can't be started" in failure.value.log_tail
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"), [({}, "refused"), ({"ready_path": "/ready"}, "404")], ids=["deaf", "path"]
)
def test_one_that_is_never_ready_fails_in_time(
    tmp_path: Path, change: dict[str, str], why: str
) -> None:
    program = (
        SERVE
        if change
        else FORK + "print('still loading', flush=True)\nimport time; time.sleep(300)"
    )
    spec = spec_of(tmp_path, program, ready_seconds=0.7, **change)
    with pytest.raises(ManagedServerError, match=f"not ready within 0.7 s.*{why}"):
        ManagedServer(spec).__enter__()
    assert_nothing_is_left(tmp_path)


def test_one_that_dies_later_is_noticed(tmp_path: Path) -> None:
    with ManagedServer(spec_of(tmp_path, SERVE)) as server:
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        with pytest.raises(ManagedServerError, match="ended with status 137"):
            wait_for(lambda: bool(server.check_alive()))
    assert_nothing_is_left(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="fleeing children are found on Linux only")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_ends_with_us_however_we_end(tmp_path: Path, number: signal.Signals) -> None:
    spec = spec_of(tmp_path, FORK + SERVE)
    owner = f"""
        import tempfile, time
        tempfile.tempdir = {str(tmp_path / "temporary")!r}
        from poise.bench.managed_server import ManagedServer, ServerSpec
        with ManagedServer({spec!r}):
            print("ready", flush=True)
            time.sleep(300)
        """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(owner)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert all(map(is_running, pids(tmp_path)))
    process.send_signal(number)
    process.wait(timeout=30)
    process.stdout.close()
    assert wait_for(lambda: not list((tmp_path / "temporary").iterdir()))
    assert_nothing_is_left(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_the_server_ends_with_its_guard(tmp_path: Path) -> None:
    with ManagedServer(spec_of(tmp_path, SERVE)) as server:
        assert server._guard is not None
        server._guard.kill()
        assert wait_for(lambda: not is_running(pids(tmp_path)[0]))


GOOD = 'command = ["serve", "{port}"]\nmodel = "m"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("command = [", "not valid TOML"),
        ("", "missing required field `command`"),
        (GOOD + 'flags = "x"', "unknown field `flags`; known keys: name, command"),
        (GOOD + "ready_seconds = true", "Expected `float`, got `bool` - at `$.ready_seconds`"),
        (GOOD + "ready_seconds = 0", "ready_seconds 0.0 must be above 0"),
        (GOOD + 'ready_path = "health"', "must begin with '/'"),
        (GOOD + 'name = "../x"', "name '../x' must be of"),
        (GOOD + "environment = { A = 1 }", "Expected `str`, got `int` - at `$.environment[...]`"),
        ('command = "serve"\nmodel = "m"', "Expected `array`, got `str` - at `$.command`"),
        ('command = []\nmodel = "m"', "command is empty"),
        (GOOD + "[prepare]\npackage = []", "unknown field `package` - at `$.prepare`"),
        (GOOD + "[prepare]\n", "missing required field `packages` - at `$.prepare`"),
    ],
)
def test_a_wrong_description_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as failure:
        load_spec(path)
    assert message in str(failure.value)
    assert str(path) in str(failure.value)


def test_a_description_takes_its_name_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD + "ready_seconds = 3")
    spec = load_spec(tmp_path / "mine.toml")
    assert (spec.name, spec.command, spec.ready_seconds) == ("mine", ("serve", "{port}"), 3.0)
    with pytest.raises(ConfigError, match="can't be read"):
        load_spec(tmp_path / "other.toml")


@pytest.mark.parametrize("text", ["{nope}", "{port!r}", "{port:>9}", "{port.real}", "{", "{}"])
def test_only_known_placeholders_are_filled(text: str) -> None:
    spec = ServerSpec(name="s", command=("{{literal}}", "--port={port}"), model="m")
    values = {"port": "80"}
    assert expand(spec, values) == (["{literal}", "--port=80"], {})
    with pytest.raises(ConfigError, match="server s"):
        expand(replace(spec, environment={"A": text}), values)
