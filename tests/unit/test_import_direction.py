"""ARCHITECTURE rule 1: who may import whom, read from the source of every module."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import poise

PACKAGE = Path(poise.__file__).parent

CORE = {"core", "errors"}
SETTINGS = {"errors", "config", "config_values", "machine", "optimisations"}
BASE = CORE | SETTINGS
MIDDLE = {"sampling", "spec_decode", "lora", "grammar", "quantization", "models", "kernels"}
BESIDE = {
    "weights",
    "tokenizer",
}  # files in, arrays and text out: beside models, below the executor
BELOW_EXECUTOR = BASE | MIDDLE | BESIDE
BELOW_SERVER = BELOW_EXECUTOR | {"executor", "engine"}

ALLOWED: dict[str, set[str]] = {
    **dict.fromkeys(SETTINGS, SETTINGS),
    "errors": set(),
    "core": CORE,
    **dict.fromkeys(MIDDLE, BASE | MIDDLE),
    "tokenizer": BASE | {"models", "tokenizer"},
    "weights": BASE | {"models", "kernels", "tokenizer", "weights"},
    "executor": BELOW_EXECUTOR | {"executor"},
    "engine": BELOW_SERVER,
    "server": BELOW_SERVER | {"server"},
    "planner": BASE | {"models", "planner"},
}
"""What each room may import of poise. Rooms that are missing here (the root module, bench) are held to FORBIDDEN only."""

CONTRACTS = {"poise.weights.checkpoint"}
"""Records and protocols without code, which any room above core may name."""

REPORTS = {("poise.machine", "poise.kernels.cpu"), ("poise.machine", "poise.weights.pull")}
"""`poise env` asks those who know, from inside a function, when it is called."""

FORBIDDEN = {"cli": {"cli"}, "verify": {"verify", "cli"}}
"""Who alone may import these: nothing else does."""


def room_of(module: str) -> str:
    """`poise.core.output` -> `core`; the package itself -> ``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports anywhere, also inside functions."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"poise.{a.name}" for a in node.names} if source == "poise" else {source}
    return found - {"poise.__version__"}


SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_every_room_imports_only_what_lies_below_it() -> None:
    faults = []
    for path in SOURCES:
        room = room_of(module_name(path))
        for module in imported_modules(path):
            if module.split(".")[0] != "poise" or (module_name(path), module) in REPORTS:
                continue
            target = room_of(module)
            allowed = target in ALLOWED.get(room, {target})
            if module in CONTRACTS:
                allowed = room not in BASE
            if target in FORBIDDEN:
                allowed = room in FORBIDDEN[target]
            if not allowed:
                faults.append(f"{module_name(path)} imports {module}")
    assert not faults


def test_core_is_plain_python() -> None:
    faults = [
        f"{module_name(path)} imports {module}"
        for path in SOURCES
        if room_of(module_name(path)) in CORE
        for module in imported_modules(path)
        if module.split(".")[0] not in {"poise", *sys.stdlib_module_names}
    ]
    assert not faults


def test_nothing_unpickles() -> None:
    faults = [
        f"{module_name(path)} imports {module}"
        for path in SOURCES
        for module in imported_modules(path)
        if module.split(".")[0] in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    ]
    assert not faults


def test_time_comes_from_the_clock_alone_in_core() -> None:
    users = {
        module_name(path)
        for path in SOURCES
        if room_of(module_name(path)) == "core" and {"time", "datetime"} & imported_modules(path)
    }
    assert users == {"poise.core.clock"}


def test_the_checker_reads_names_and_imports() -> None:
    path = PACKAGE / "core" / "output.py"
    assert "poise.core.sampling_params" in imported_modules(path)
    assert module_name(path) == "poise.core.output"
    assert room_of("poise") == ""
