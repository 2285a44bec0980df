"""What a measurement of quality leaves behind, and where `poise serve --explain` looks for it.

Knows no numbers' meaning beyond their targets, and imports no arrays. A record speaks for a fingerprint (model file,
setting of the arithmetic, numerics version): equal ones compute equal bytes, so they have equal quality. Records lie in
`records` beside this module (shipped) and in the same folder of POISE_HOME (made here), which is asked first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from poise.config import Settings
from poise.errors import PoiseError
from poise.models.registry import REGISTRY
from poise.weights.cache import known_digest, poise_home

SHIPPED = Path(__file__).parent / "records"

JUDGED = ("prose", "code")  # the texts that targets bind; others are reported
NUM_WINDOWS = 24  # of each text, in a whole run
# Of the mean KL divergence, in nats, on the judged texts of smollm2-135m, by activations and KV type.
KL_TARGETS = {("int8", "bf16"): 0.0033, ("bf16", "bf16"): 0.0003, ("int8", "int8"): 0.005}
TARGETS_FOR = "smollm2-135m"
MAX_PERPLEXITY_CHANGE = 0.01  # gross failure, on any model: a few thousand tokens resolve no finer
MIN_TOP1_AGREEMENT = 0.96


class Figure(msgspec.Struct, frozen=True):
    """A mean and its standard error over the scored tokens."""

    value: float
    error: float


class TextQuality(msgspec.Struct, frozen=True):
    """One text's figures; KL divergence in nats, perplexity change and agreement as shares."""

    name: str
    sha256: str
    judged: bool
    num_windows: int
    num_tokens: int
    kl: Figure
    kl_p99: float
    perplexity: Figure
    reference_perplexity: Figure
    perplexity_change: Figure
    top1_agreement: Figure


class QualityRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. `failures` are the targets missed, one line each; empty: passed."""

    schema: Literal["poise.verify.quality/1"] = "poise.verify.quality/1"
    model: str
    model_digest: str
    format: str
    activations: str
    kv_cache_dtype: str
    poise: str
    numerics: int
    fingerprint: str
    isa: str
    python: str
    made: str
    window: int
    kl_target: float | None
    texts: list[TextQuality]
    failures: list[str]

    @property
    def is_evidence(self) -> bool:
        """Whether it measured enough to speak for a setting: every judged text, in the windows of a whole run."""
        counts = {text.name: text.num_windows for text in self.texts if text.judged}
        return set(counts) == set(JUDGED) and min(counts.values()) >= NUM_WINDOWS

    @property
    def file_name(self) -> str:
        return f"quality-{self.model}-{self.activations}-kv-{self.kv_cache_dtype}.json"


def failures(texts: list[TextQuality], kl_target: float | None) -> list[str]:
    """What the judged texts miss: the KL target, where there is one, and the limits of gross failure."""
    lines = []
    for text in texts:
        if not text.judged:
            continue
        if kl_target is not None and text.kl.value > kl_target:
            lines.append(f"{text.name}: mean KL {text.kl.value:.5f} is above {kl_target}")
        change = text.perplexity_change.value
        if change > MAX_PERPLEXITY_CHANGE:
            lines.append(
                f"{text.name}: perplexity {change:+.2%}, allowed {MAX_PERPLEXITY_CHANGE:+.0%}"
            )
        agreement = text.top1_agreement.value
        if agreement < MIN_TOP1_AGREEMENT:
            lines.append(
                f"{text.name}: top-1 agreement {agreement:.2%}, at least {MIN_TOP1_AGREEMENT:.0%} wanted"
            )
    return lines


def encode(record: QualityRecord) -> str:
    """The record as JSON for people."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode()


def save(record: QualityRecord, path: Path) -> None:
    """Writes the record. Raises PoiseError naming the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(encode(record) + "\n", encoding="utf-8")
    except OSError as error:
        raise PoiseError(f"{path} can't be written: {error.strerror or error}") from None


def own_folder() -> Path:
    """Where records made on this machine lie."""
    return poise_home() / "records"


def find_record(fingerprint: str) -> tuple[QualityRecord, Path] | None:
    """The record of a model and arithmetic, and its file."""
    return next((item for item in _records() if item[0].fingerprint == fingerprint), None)


def evidence(settings: Settings) -> str | None:
    """One line on the quality of a model under these settings, from its record; no file is hashed for it."""
    from poise.executor.load import fingerprint_of, identity_of

    model = settings.source.model
    if model in REGISTRY:
        digest: str | None = REGISTRY[model].sha256
    else:
        digest = known_digest(Path(model).expanduser())
    if digest is None:
        return None
    found = find_record(
        fingerprint_of(identity_of(digest, settings.compute, settings.cache.kv_dtype))
    )
    if found is None:
        return None
    record, path = found
    figures = ", ".join(f"{text.kl.value:.4f} {text.name}" for text in record.texts if text.judged)
    verdict = f", which misses a target: {record.failures[0]}" if record.failures else ""
    return f"KL {figures}{verdict} (record {path.name})"


def _records() -> Iterator[tuple[QualityRecord, Path]]:
    """Every readable record, own ones first; a file that is something else is passed over."""
    for folder in (own_folder(), SHIPPED):
        for path in sorted(folder.glob("quality-*.json")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                yield msgspec.json.decode(path.read_bytes(), type=QualityRecord), path
