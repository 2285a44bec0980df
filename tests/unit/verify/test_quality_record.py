"""Records of quality: what counts as missed, and which one speaks for a model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from poise.verify.quality_record import (
    SHIPPED,
    Figure,
    QualityRecord,
    TextQuality,
    failures,
    find_record,
    own_folder,
    save,
)


def text(
    kl: float = 0.001, change: float = 0.0, agreement: float = 0.98, judged: bool = True
) -> TextQuality:
    return TextQuality(
        name="prose",
        sha256="0" * 64,
        judged=judged,
        num_windows=1,
        num_tokens=256,
        kl=Figure(kl, 0.0001),
        kl_p99=0.01,
        perplexity=Figure(10.0, 0.5),
        reference_perplexity=Figure(10.0, 0.5),
        perplexity_change=Figure(change, 0.001),
        top1_agreement=Figure(agreement, 0.003),
    )


def record(**changes: object) -> QualityRecord:
    values = {
        "model": "tiny",
        "model_digest": "d" * 64,
        "format": "GGUF Q4_1",
        "activations": "int8",
        "kv_cache_dtype": "bf16",
        "poise": "0.1.0",
        "numerics": 1,
        "fingerprint": "0123456789ab",
        "isa": "baseline",
        "python": "3.11.0",
        "made": "2026-01-01T00:00:00+00:00",
        "window": 512,
        "kl_target": 0.0033,
        "texts": [text()],
        "failures": [],
    }
    return QualityRecord(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POISE_HOME", str(tmp_path))
    return tmp_path


def test_targets_bind_judged_texts_only() -> None:
    assert failures([text()], 0.0033) == []
    assert failures([text(kl=0.1)], None) == []
    [line] = failures([text(kl=0.004)], 0.0033)
    assert "mean KL 0.00400 is above 0.0033" in line
    assert len(failures([text(kl=1, change=0.02, agreement=0.9)], 0.0033)) == 3
    assert failures([text(kl=1, change=0.02, agreement=0.9, judged=False)], 0.0033) == []


def test_a_record_speaks_for_its_fingerprint() -> None:
    made = record()
    save(made, own_folder() / made.file_name)
    found = find_record(made.fingerprint)
    assert found == (made, own_folder() / "quality-tiny-int8-kv-bf16.json")
    assert find_record("ba9876543210") is None


def test_a_part_of_the_texts_is_no_evidence() -> None:
    whole = [replace(text(), name=name, num_windows=24) for name in ("prose", "code")]
    assert record(texts=whole).is_evidence
    assert not record(texts=whole[:1]).is_evidence
    assert not record(texts=[whole[0], replace(whole[1], num_windows=4)]).is_evidence


def test_what_is_no_record_is_passed_over(home: Path) -> None:
    made = record()
    save(made, own_folder() / "quality-z.json")
    (home / "records" / "quality-a.json").write_text("{}")
    (home / "records" / "quality-b.json").write_text("not JSON")
    assert find_record(made.fingerprint) == (made, home / "records" / "quality-z.json")


def test_shipped_records_can_be_read_and_met_their_targets() -> None:
    for path in SHIPPED.glob("*.json"):
        shipped = msgspec.json.decode(path.read_bytes(), type=QualityRecord)
        assert path.name == shipped.file_name
        assert shipped.is_evidence
        assert shipped.failures == failures(shipped.texts, shipped.kl_target) == []
