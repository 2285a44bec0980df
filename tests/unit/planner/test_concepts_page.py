"""docs/CONCEPTS.md is true: each command in it is run, and prints what stands under it."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
from pathlib import Path

import pytest

from poise.cli.main import run

PAGE = Path(__file__).parents[3] / "docs/CONCEPTS.md"
BLOCK = re.compile(r"^```\n\$ (poise .*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUESTIONS = 10


def examples() -> list[tuple[str, str]]:
    """(command, the output that the page shows); a line of "..." stands for lines left out."""
    return [(match[1], match[2]) for match in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("command", "shown"), examples(), ids=lambda text: text[:40])
def test_the_page_shows_what_the_command_prints(command: str, shown: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run(shlex.split(command)[1:]) == 0
    matches = doctest.OutputChecker().check_output(
        shown, printed.getvalue(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert matches, printed.getvalue()


def test_each_question_has_a_command() -> None:
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(sections) == QUESTIONS
    for section in sections:
        assert BLOCK.search(section), section.splitlines()[0]
