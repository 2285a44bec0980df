"""The CPU backend: native kernels in several variants, of which one is chosen when this package is imported.

`POISE_ISA=baseline|avx2|avx512` forces a lower variant. All give the same bits (docs/NUMERICS.md, level L4).
"""

from __future__ import annotations

import os

from poise.errors import ConfigError

try:
    from poise.kernels.cpu import _native as native
except ImportError as error:
    raise ConfigError(
        f"the native extension can't be loaded ({error}); reinstall poise on Linux or macOS"
    ) from error

__all__ = ["available_isas", "isa", "native"]

_available: list[str] = native.available_isas()


def available_isas() -> list[str]:
    """Variants that this build holds and this CPU runs, slowest first."""
    return list(_available)


def isa() -> str:
    """The variant in use: the best available, or the one that POISE_ISA names.

    Raises ConfigError where POISE_ISA names one that is unknown or that this CPU lacks.
    """
    wanted = os.environ.get("POISE_ISA")
    if not wanted:
        return _available[-1]
    if wanted not in _available:
        raise ConfigError(f"POISE_ISA is {wanted!r}, available here: {', '.join(_available)}")
    return wanted
