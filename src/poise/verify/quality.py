"""`poise verify quality`: what the arithmetic that serves costs in quality, against the plain float32 model.

Runs both on the same windows of text and compares the distributions of every scored position. Owns no arithmetic.
Invariant: a logit that is not a number fails the run; it never enters a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import numpy as np

from poise.config import CacheConfig, ComputeConfig, SchedulerConfig
from poise.errors import ConfigError, PoiseError
from poise.executor.load import NUMERICS_VERSION, LoadedExecutor, load_executor
from poise.machine import environment_report
from poise.tokenizer.tokenizer import Tokenizer
from poise.verify.quality_logits import Logits, NativeLogits, ReferenceLogits
from poise.verify.quality_record import (
    KL_TARGETS,
    TARGETS_FOR,
    Figure,
    QualityRecord,
    TextQuality,
    failures,
)
from poise.verify.quality_statistics import Estimate, Summary, TokenScores, compare, summarise
from poise.verify.quality_texts import FIRST_SCORED, WINDOW, Text, Windows, windows_of
from poise.weights.checkpoint import Checkpoint

Progress = Callable[[str, int, int], None]  # text, windows done, windows in all


def measure_quality(
    checkpoint: Checkpoint,
    cache: CacheConfig,
    compute: ComputeConfig,
    texts: Sequence[Text],
    *,
    num_windows: int,
    max_kl: float | None = None,
    progress: Progress = lambda text, done, total: None,
) -> QualityRecord:
    """Measures a model on at most `num_windows` windows of each text.

    `max_kl` replaces the target of the mean KL divergence. Raises ConfigError for a model whose context is shorter than a
    window, PoiseError where logits are not finite.
    """
    if checkpoint.config.max_position_embeddings < WINDOW:
        raise ConfigError(
            f"{checkpoint.name} was made for {checkpoint.config.max_position_embeddings} tokens; "
            f"quality is measured in windows of {WINDOW}"
        )
    limits = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=WINDOW, max_model_len=WINDOW)
    loaded = load_executor(checkpoint, cache, limits, compute)
    tokenizer = Tokenizer(checkpoint.tokenizer)
    reference, native = ReferenceLogits(checkpoint, WINDOW), NativeLogits(loaded, WINDOW)
    results = []
    for text in texts:
        windows = windows_of(text, tokenizer, num_windows)
        if not len(windows):
            raise PoiseError(f"text {text.name} has fewer than {WINDOW} tokens of this model")
        scores = _compare_windows(text.name, windows, reference, native, progress)
        results.append(_text_quality(text, len(windows), summarise(scores)))
    return _record(checkpoint, loaded, results, max_kl)


def _compare_windows(
    name: str, windows: Windows, reference: Logits, native: Logits, progress: Progress
) -> list[TokenScores]:
    scores = []
    for done, window in enumerate(windows):
        progress(name, done, len(windows))
        position = FIRST_SCORED
        tiles = zip(
            reference.tiles(window, FIRST_SCORED),
            native.tiles(window, FIRST_SCORED),
            strict=True,
        )
        for expected, found in tiles:
            if not np.isfinite(found).all():
                raise PoiseError(f"text {name}, window {done}: logits are not finite")
            next_tokens = window[position : position + len(found)]
            scores.append(compare(expected, found, next_tokens))
            position += len(found)
    progress(name, len(windows), len(windows))
    return scores


def _record(
    checkpoint: Checkpoint,
    loaded: LoadedExecutor,
    texts: list[TextQuality],
    max_kl: float | None,
) -> QualityRecord:
    setting = (loaded.details["activations"], loaded.details["kv_dtype"])
    if max_kl is None and checkpoint.name == TARGETS_FOR:
        max_kl = KL_TARGETS.get(setting)
    environment = environment_report()
    return QualityRecord(
        model=checkpoint.name,
        model_digest=checkpoint.digest(),
        format=checkpoint.format,
        activations=setting[0],
        kv_cache_dtype=setting[1],
        poise=str(environment["poise"]),
        numerics=NUMERICS_VERSION,
        fingerprint=loaded.fingerprint,
        isa=loaded.details["isa"],
        python=str(environment["python"]),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        window=WINDOW,
        kl_target=max_kl,
        texts=texts,
        failures=failures(texts, max_kl),
    )


def _text_quality(text: Text, num_windows: int, summary: Summary) -> TextQuality:
    def figure(estimate: Estimate) -> Figure:
        return Figure(estimate.value, estimate.error)

    return TextQuality(
        name=text.name,
        sha256=text.sha256,
        judged=text.judged,
        num_windows=num_windows,
        num_tokens=summary.num_tokens,
        kl=figure(summary.kl),
        kl_p99=summary.kl_p99,
        perplexity=figure(summary.perplexity),
        reference_perplexity=figure(summary.reference_perplexity),
        perplexity_change=figure(summary.perplexity_change),
        top1_agreement=figure(summary.top1_agreement),
    )
