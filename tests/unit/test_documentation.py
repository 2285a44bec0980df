"""What the documents name exists: files, functions, links, flags, verbs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from poise.cli.main import VERBS
from poise.config import NOT_FLAGS, environment_name, flag_names

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
VERB_FLAGS = {"config", "explain", "json", "chat", "seed", "help", "version", "inject", "hardware"}

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def prose(document: Path) -> str:
    """The text without fenced blocks of other languages' code."""
    return document.read_text(encoding="utf-8")


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", prose(document)):
        if "://" not in target:
            assert (document.parent / target).exists(), target


@each_document
def test_named_files_and_functions_exist(document: Path) -> None:
    """`core/scheduler.py`, `src/poise/config.py`, `core/scheduler.py::Scheduler.schedule`, `tests/unit`."""
    for word in re.findall(r"`([^`\s]+)`", prose(document)):
        name, _, symbol = word.partition("::")
        known = re.match(r"(src|tests|docs|\.ci)/", name)
        is_module = re.fullmatch(r"[\w/]+\.(py|cpp|h|pyi)", name) and not name.startswith("utils")
        if not known and not is_module:
            continue
        found = [path for path in (ROOT / name, ROOT / "src/poise" / name) if path.exists()]
        assert found, f"{document.name} names {name}, which does not exist"
        if symbol:
            assert symbol in symbols(found[0]), f"{document.name} names {word}"


def symbols(path: Path) -> set[str]:
    """Functions and classes of a module, methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


def test_the_readme_names_only_flags_variables_and_verbs_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    flags = {*flag_names(), *VERB_FLAGS, *(f"no-{name}" for name in flag_names())}
    for flag in re.findall(r"--([a-z][a-z-]+)", text):
        assert flag in flags, flag
    variables = {environment_name(name) for name in flag_names()} | set(NOT_FLAGS)
    for variable in re.findall(r"POISE_[A-Z_]+", text):
        assert variable in variables, variable
    for verb in re.findall(r"`poise ([a-z]+)", text):
        assert verb in VERBS, verb


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = sorted(int(path.name[:4]) for path in (ROOT / "docs/decisions").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_no_document_speaks_of_a_place_that_readers_do_not_have() -> None:
    for document in DOCUMENTS:
        assert not re.search(r"(?<![\w.])/(work|tmp|root)/", prose(document)), document.name


@pytest.mark.parametrize(
    "record", sorted((ROOT / "docs" / "records").glob("*.json")), ids=lambda path: str(path.name)
)
def test_records_name_no_folder_of_the_machine_they_were_made_on(record: Path) -> None:
    words = re.findall(r'"(/[^"/]+/[^"]*)"', record.read_text(encoding="utf-8"))
    assert [word for word in words if not word.startswith("/v1/")] == []
