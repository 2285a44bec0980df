"""The step-time model as an earlier run left it, its coefficients and corrections, by model, processor and build.

Kept in POISE_HOME. Invariant: a file that can't be read or written costs a slower start of the predictions, nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import msgspec

from poise.config import CacheConfig, ComputeConfig
from poise.core.output import KVGroupSpec
from poise.core.step_time import KINDS, Fit, StepCost, StepTimeModel
from poise.machine import cpu_model, default_threads, poise_version
from poise.models.cost import kv_groups, layer_windows
from poise.weights.cache import poise_home, write_atomically
from poise.weights.checkpoint import Checkpoint

FILE: Final = "step-times.json"
MOST_KEPT: Final = 64
LEAST_STEPS: Final = 64  # fewer say too little to be kept

COST: Final = "cost"  # beside the kinds: the coefficients by name

_Fits = dict[str, dict[str, dict[str, float]]]  # by key, kind of step and size class


def fit_key(fingerprint: str, isa: str, threads: str) -> str:
    """What a fit depends on: the model and its numerics, the processor, the kernels, the build."""
    return "|".join([fingerprint, cpu_model() or "", isa, threads, poise_version()])


def stored_fit(key: str) -> Fit | None:
    found = _read().get(key)
    if found is None:
        return None
    return {
        kind: {int(size): ratio for size, ratio in found.get(kind, {}).items()} for kind in KINDS
    }


def stored_model(key: str, groups: Sequence[KVGroupSpec]) -> StepTimeModel | None:
    """The model itself, for whoever plans without an engine; None where no run has left one."""
    found = _read().get(key, {})
    try:
        cost = StepCost(**found[COST])
    except (KeyError, TypeError):
        return None
    return StepTimeModel(cost, groups, stored_fit(key))


def served_model(checkpoint: Checkpoint) -> StepTimeModel | None:
    """What serving this model with default settings has left on this machine."""
    from poise.executor.load import fingerprint_of, identity_of
    from poise.kernels.cpu import isa

    identity = identity_of(checkpoint.digest(), ComputeConfig(), CacheConfig().kv_dtype)
    key = fit_key(fingerprint_of(identity), isa(), str(default_threads()))
    return stored_model(key, kv_groups(layer_windows(checkpoint.config)).specs)


def store_fit(key: str, model: StepTimeModel) -> None:
    """Keeps what a run has learnt, unless it is too little; the oldest of many are forgotten."""
    if model.num_observed < LEAST_STEPS:
        return
    fits = _read()
    fits.pop(key, None)
    fits[key] = {
        kind: {str(size): ratio for size, ratio in sizes.items()}
        for kind, sizes in model.fit.items()
    }
    fits[key][COST] = asdict(model.cost)
    kept = dict(list(fits.items())[-MOST_KEPT:])
    with contextlib.suppress(OSError):
        poise_home().mkdir(parents=True, exist_ok=True)
        write_atomically(poise_home() / FILE, msgspec.json.encode(kept))


def _read() -> _Fits:
    try:
        return msgspec.json.decode((poise_home() / FILE).read_bytes(), type=_Fits)
    except (OSError, msgspec.DecodeError):
        return {}
