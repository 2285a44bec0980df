"""`poise serve --explain` shows the record that speaks for the model, or the command that would make one."""

from __future__ import annotations

from pathlib import Path

import pytest

from poise.cli.explain import optimisation_table
from poise.config import ComputeConfig, resolve
from poise.executor.load import fingerprint_of, identity_of
from poise.verify.quality_record import Figure, QualityRecord, TextQuality, own_folder, save
from poise.weights.cache import file_digest


def evidence_column(model: Path) -> str:
    table = optimisation_table(resolve({"model": str(model)}, environment={}))
    cells = zip(table.columns[0].cells, table.columns[4].cells)
    [found] = [text for name, text in cells if str(name).startswith("quantised activations")]
    return str(found)


@pytest.mark.parametrize("failures", [[], ["code: mean KL 0.00400 is above 0.0033"]])
def test_a_record_is_the_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: list[str]
) -> None:
    monkeypatch.setenv("POISE_HOME", str(tmp_path / "home"))
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"a model")
    assert "no evidence here: run " in evidence_column(model)
    zero = Figure(0.0, 0.0)
    texts = [
        TextQuality(name, "0" * 64, judged, 1, 256, Figure(kl, 0.0), 0.1, zero, zero, zero, zero)
        for name, judged, kl in (
            ("prose", True, 0.003),
            ("code", True, 0.0028),
            ("other", False, 1),
        )
    ]
    record = QualityRecord(
        model="tiny",
        model_digest=file_digest(model),
        format="GGUF Q4_1",
        activations="int8",
        kv_cache_dtype="bf16",
        poise="0.1.0",
        numerics=1,
        fingerprint=fingerprint_of(identity_of(file_digest(model), ComputeConfig(), "bf16")),
        isa="baseline",
        python="3.11.0",
        made="2026-01-01T00:00:00+00:00",
        window=512,
        kl_target=0.0033,
        texts=texts,
        failures=failures,
    )
    save(record, own_folder() / record.file_name)
    shown = evidence_column(model)
    assert "evidence: KL 0.0030 prose, 0.0028 code" in shown
    assert "quality-tiny-int8-kv-bf16.json" in shown
    assert ("misses a target: code: mean KL" in shown) == bool(failures)
