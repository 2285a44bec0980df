"""The process between us and a managed server: starts it, and ends it and all it started when we are gone.

Runs as a script of its own with the standard library alone, in its own session. Its standard input is a pipe that the owner
holds open: end of file means stop, whether the owner closed it, was interrupted or was killed with SIGKILL. Invariant: when
the guard has ended no descendant of the server runs and the temporary folder is gone.

    server_guard.py STOP_SECONDS TEMPORARY_FOLDER COMMAND [ARGUMENT …]
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOT_STARTED = 127


def main(arguments: list[str]) -> int:
    """Runs the command until it ends or the owner is gone; returns its exit status as a shell would."""
    stop_seconds, folder, command = float(arguments[0]), arguments[1], arguments[2:]
    for number in (signal.SIGINT, signal.SIGHUP):  # the owner's terminal is not our concern
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _raise_exit)
    _process_control(PR_SET_CHILD_SUBREAPER, 1)  # what the server leaves behind becomes our child
    try:
        return _supervise(command, stop_seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _supervise(command: list[str], stop_seconds: float) -> int:
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_guard
        )
    except OSError as error:
        print(f"{command[0]} can't be started: {error.strerror or error}", flush=True)
        return NOT_STARTED
    try:
        while server.poll() is None:
            if select.select([0], [], [], POLL_SECONDS)[0] and not os.read(0, 4096):
                break
    except SystemExit:  # SIGTERM
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end(server, stop_seconds)
    status = server.wait()
    return status if status >= 0 else 128 - status


def _end(server: subprocess.Popen[bytes], stop_seconds: float) -> None:
    """Asks the whole group to leave, then makes it, and what fled from the group too."""
    _signal_group(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + stop_seconds
    while time.monotonic() < deadline and (server.poll() is None or _group_lives(server.pid)):
        time.sleep(POLL_SECONDS)
    _signal_group(server.pid, signal.SIGKILL)
    server.wait()
    while children := list(_children()):
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for zombies
        os.killpg(group, number)


def _group_lives(group: int) -> bool:
    """Whether a process of the group still runs; orphans of it that ended are reaped on the way."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _children() -> Iterator[int]:
    """Our children, adopted ones too (Linux; elsewhere orphans are init's, and only the group is ended)."""
    with contextlib.suppress(OSError):
        path = f"/proc/self/task/{os.getpid()}/children"
        with open(path, encoding="ascii") as listing:
            yield from map(int, listing.read().split())


def _process_control(option: int, value: int) -> None:
    """prctl(2), where the platform has it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_guard() -> None:
    """In the server, before its program starts: should the guard itself be killed, so is the server."""
    _process_control(PR_SET_PDEATHSIG, signal.SIGKILL)


def _raise_exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
