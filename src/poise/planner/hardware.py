"""Machines by their data sheets: memory, bandwidth, peaks, links, each figure with its public source.

`hardware.toml` beside this file holds the figures; a file of the same form may be given instead. Knows no models.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from poise.config_values import size
from poise.errors import ConfigError
from poise.planner.inputs import num_bytes, positive

KNOWN_FILE = Path(__file__).with_name("hardware.toml")
FLOP_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes, bytes/s, FLOP/s. `compute` is the kind of number that `peaks` are taken for unless another is asked for.

    `link`: to each neighbour, one direction. `sources`: where each figure comes from.
    """

    name: str
    title: str
    bandwidth: float
    peaks: Mapping[str, float] = field(default_factory=dict)
    compute: str | None = None
    memory: float | None = None
    link: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def peak(self, dtype: str | None = None) -> float | None:
        """The peak for `dtype`, or for the machine's usual kind; None where none was given at all."""
        if not self.peaks:
            return None
        wanted = dtype or self.compute or next(iter(self.peaks))
        if wanted not in self.peaks:
            raise ConfigError(
                f"--compute {wanted}: {self.name} has no such peak; it has {', '.join(self.peaks)}"
            )
        return self.peaks[wanted]

    @property
    def vector_peak(self) -> float | None:
        """Plain arithmetic, what unpacking weights runs on."""
        return self.peaks.get("f32")


def known_machines() -> dict[str, Machine]:
    return load(KNOWN_FILE)


def find(name: str) -> Machine:
    """A known machine, or the only one in a TOML file. Raises ConfigError with the nearest name."""
    if name.endswith(".toml"):
        machines = load(Path(name))
        if len(machines) != 1:
            raise ConfigError(f"{name} describes {len(machines)} machines: expected one")
        return next(iter(machines.values()))
    known = known_machines()
    if name.lower() in known:
        return known[name.lower()]
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"--hardware {name!r} is not known{hint} (known: {', '.join(known)}, measure, FILE.toml)"
    )


def load(path: Path) -> dict[str, Machine]:
    """Every machine of a file. Raises ConfigError naming file and field."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    sources = content.pop("sources", {})
    return {
        name: _machine(path, name, entry, sources)
        for name, entry in content.items()
        if isinstance(entry, dict)
    }


def _machine(
    path: Path, name: str, entry: dict[str, object], sources: Mapping[str, str]
) -> Machine:
    unknown = set(entry) - {"title", "compute", "memory", "bandwidth", "link", "peak"}
    if unknown:
        raise ConfigError(f"{path}: {name}.{min(unknown)} is not a field of a machine")
    found: dict[str, str] = {}

    def figure(key: str, value: object) -> float:
        match value:
            case [number, str(source)]:
                found[key] = sources.get(source, source)
                return positive(f"{path}: {name}.{key}", number)
        raise ConfigError(f"{path}: {name}.{key} is {value!r}: expected [number, source]")

    if "bandwidth" not in entry:
        raise ConfigError(f"{path}: {name} has no bandwidth")
    peaks = entry.get("peak", {})
    if not isinstance(peaks, dict):
        raise ConfigError(f"{path}: {name}.peak is {peaks!r}: expected peak.bf16 = [...]")
    return Machine(
        name=name,
        title=str(entry.get("title", name)),
        bandwidth=figure("bandwidth", entry["bandwidth"]),
        peaks={dtype: figure(f"peak.{dtype}", value) for dtype, value in peaks.items()},
        compute=str(entry["compute"]) if "compute" in entry else next(iter(peaks), None),
        memory=figure("memory", entry["memory"]) if "memory" in entry else None,
        link=figure("link", entry["link"]) if "link" in entry else None,
        sources=found,
    )


def measured(title: str, bandwidth: float, peaks: Mapping[str, float], how: str) -> Machine:
    """A machine whose figures were measured; `compute` is the kind that poise's integer weights use."""
    return Machine(
        name="measure",
        title=title,
        bandwidth=bandwidth,
        peaks=peaks,
        compute="int8",
        sources=dict.fromkeys(("bandwidth", *(f"peak.{dtype}" for dtype in peaks)), how),
    )


def memory_bytes(name: str, text: str) -> int:
    """A size such as 80GB, or the memory of a known machine. Raises ConfigError."""
    machine = known_machines().get(text.lower())
    if machine is None:
        return num_bytes(name, text)
    if machine.memory is None:
        raise ConfigError(
            f"{name} is {text!r}: {machine.title} has as much as was put in; give a size"
        )
    return int(machine.memory)


def bytes_per_second(name: str, text: str) -> float:
    """2TB/s, 900GB/s, 1e11. Raises ConfigError."""
    try:
        return positive(name, float(text))
    except ValueError:
        pass
    try:
        return float(size(text.removesuffix("/s")))
    except ValueError:
        raise ConfigError(f"{name} is {text!r}: expected bytes a second, such as 2TB/s") from None


def flop_per_second(name: str, text: str) -> float:
    """312TFLOP/s, 50GFLOP/s, 1e13. Raises ConfigError."""
    match = re.fullmatch(r"([0-9.eE+]+?)\s*([kmgtp]?)(flop/s|flops)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{name} is {text!r}: expected FLOP a second, such as 312TFLOP/s")
    return positive(name, positive(name, match[1]) * FLOP_PREFIXES[match[2].lower()])
