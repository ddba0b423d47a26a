"""Links, paths and module names in the documentation lead somewhere, and each page is listed."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

DOCS = ROOT / "docs"
# Dated results name the code of their day.
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
ALL = [*PAGES, *sorted(DOCS.glob("results/*.md")), *sorted(ROOT.glob("*/*/README.md"))]
ASKED_FOR = {"accbench/engines/optimizers/adagrad.py"}  # of a reader, to be written
# Groups of entry points, without a package of that name.
GROUPS = {"accbench.lowerings", "accbench.optimizers"}
MOST_LINES = 130


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """Return a page without its comments and its blocks of code."""
    text = re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.DOTALL)
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(path), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_are_there(page):
    folders = "accbench|benchmarks|docs|examples|notebooks|recipes|requirements|tests"
    text = re.sub(r"accbench/\w+ in the user's cache folder", "", prose(page))
    for path in re.findall(rf"(?<![\w/.:-])(?:{folders})/[\w./-]*\w", text):
        if "NAME" not in path and path not in ASKED_FOR:
            assert (ROOT / path).exists(), f"{path} is not there"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_modules_are_there(page):
    for name in re.findall(r"(?<![\w.\"])accbench(?:\.\w+)+", page.read_text()):
        assert name in GROUPS or is_there(name), f"{name} is not there"


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or stands in the source of one."""
    path, rest = ROOT / "accbench", name.split(".")[1:]
    while rest and (path / rest[0]).is_dir():
        path, rest = path / rest[0], rest[1:]
    if rest and (path / f"{rest[0]}.py").exists():
        source, rest = path / f"{rest[0]}.py", rest[1:]
    else:
        source = path / "__init__.py"
    return not rest or (
        source.exists() and re.search(rf"\b{rest[0]}\b", source.read_text()) is not None
    )


def test_index_has_a_line_for_each_page():
    listed = set(
        re.findall(r"^\| \[.*?\]\(([\w./-]+)\) \|", (DOCS / "README.md").read_text(), re.M)
    )
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert listed == pages | {"results/README.md"}


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES
