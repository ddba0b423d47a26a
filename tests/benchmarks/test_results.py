"""docs/measured.md claims nothing without a command that is in the tree."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

MEASURED = ROOT / "docs" / "measured.md"
RESULTS = ROOT / "docs" / "results"
FILES = sorted(RESULTS.glob("2026-*.md"))
PAGES = [MEASURED, RESULTS / "README.md", ROOT / "benchmarks" / "README.md",
         ROOT / "benchmarks" / "research" / "README.md", *FILES]  # fmt: skip


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading of measured.md."""
    section = MEASURED.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_claim_has_a_command_and_a_result():
    claims = rows("Claims")
    assert len(claims) > 12
    for claim, figure, _, command, result in claims:
        assert re.search(r"\d", figure), claim
        assert command.startswith(("the same", "`python ", "`accbench ")), claim
        assert result.startswith(("the same", "[")), claim


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_named_scripts_and_linked_files_are_there(path: Path):
    text = path.read_text()
    for script in re.findall(r"(?<![\w/])benchmarks/[\w/]+\.(?:py|sh|jsonl)", text):
        assert (ROOT / script).exists(), script
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / target).exists(), target


def test_every_result_is_dated_and_listed():
    listed = (RESULTS / "README.md").read_text()
    for path in FILES:
        text = path.read_text()
        assert f"({path.name})" in listed, path.name
        assert re.search(r"\*\*Recorded:\*\* 2026-\d\d-\d\d", text), path.name
        assert "**Command:**" in text, path.name


def test_the_summary_is_short():
    assert len(MEASURED.read_text().splitlines()) <= 70
