"""Imports go one way: core, then the rooms of models and numbers, then executor, engine, server; the command line is a leaf."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import poise

PACKAGE = Path(poise.__file__).parent
FOUNDATION = {"errors"}
SETTINGS = {"config", "config_flags", "config_speculation", "config_values", "machine"}
NUMBERS = {"sampling", "spec_decode", "models", "kernels", "weights", "tokenizer"}
MAY_IMPORT = {
    "core": {"core"} | FOUNDATION,
    **dict.fromkeys(NUMBERS, {"core"} | NUMBERS | SETTINGS | FOUNDATION),
    "executor": {"core", "executor"} | NUMBERS | SETTINGS | FOUNDATION,
    "engine": {"core", "executor", "engine"} | NUMBERS | SETTINGS | FOUNDATION,
    "server": {"core", "engine", "server"} | SETTINGS | FOUNDATION,
    "bench": {"bench", "weights"} | SETTINGS | FOUNDATION,
    "planner": {"core", "models", "planner"} | SETTINGS | FOUNDATION,
    "verify": {"core", "executor", "engine", "verify"} | NUMBERS | SETTINGS | FOUNDATION,
    "cli": {"bench", "core", "engine", "executor", "server", "cli", "optimisations", "verify"}
    | {"models", "planner", "weights", ""}
    | SETTINGS
    | FOUNDATION,
}
ROOMS = sorted(MAY_IMPORT)


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports anywhere, functions and type checking included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            yield node.module


def room(module: str) -> str | None:
    """The room of a module of ours, "" for the package itself, None for a library."""
    parts = module.split(".")
    if parts[0] != "poise":
        return None
    return parts[1] if len(parts) > 1 else ""


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_only_what_lies_below_it(name: str) -> None:
    for path in (PACKAGE / name).rglob("*.py"):
        for module in imports(path):
            target = room(module)
            assert target is None or target in MAY_IMPORT[name], f"{path} imports {module}"


def test_core_is_plain_python() -> None:
    for path in (PACKAGE / "core").rglob("*.py"):
        for module in imports(path):
            assert module.split(".")[0] not in ("numpy", "msgspec", "tokenizers"), path


def test_the_planner_knows_of_models_their_shape_and_cost_only() -> None:
    for path in (PACKAGE / "planner").rglob("*.py"):
        found = {module for module in imports(path) if room(module) == "models"}
        assert found <= {"poise.models", "poise.models.config", "poise.models.cost"}, path
        assert "numpy" not in set(imports(path)), path


def test_nothing_imports_the_command_line() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.parent != PACKAGE / "cli":
            assert not [module for module in imports(path) if room(module) == "cli"], path


def test_nothing_can_run_what_it_reads() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not {"pickle", "marshal", "shelve", "torch"} & set(imports(path)), path
