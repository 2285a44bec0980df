"""How the command line writes sizes: binary units, so that KiB, MiB and GiB mean what they say."""

from __future__ import annotations


def binary_size(num_bytes: float) -> str:
    """512 B, 22.5 KiB, 93.8 MiB, 1.25 GiB."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024 or unit == "GiB":
            break
    digits = 2 if unit == "GiB" else 1
    return f"{num_bytes:,.{digits}f} {unit}"
