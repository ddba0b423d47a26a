"""docs/troubleshooting.md: the messages that it explains are messages of the code."""

import ast
import re

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
# What the code puts into a message, and where the page has `...`.
GAP = "\0"


def texts(source: str) -> list[str]:
    """Return all texts of a module, with `GAP` in place of what they are formatted with."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
            found.append("".join(map(str, parts)))
    return found


@pytest.fixture(scope="module")
def messages_of_code() -> str:
    paths = sorted((ROOT / "accbench").rglob("*.py"))
    return "\n".join(text for path in paths for text in texts(path.read_text()))


def test_page_has_twenty_messages_and_more():
    assert len(MESSAGES) == len(set(MESSAGES)) >= 20


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_one_of_the_code(message, messages_of_code):
    fixed = [part for part in message.split("...") if len(part) > 3]
    assert fixed, "nothing of it is fixed"
    pattern = f"[^\n]*{GAP}[^\n]*".join(map(re.escape, fixed))
    assert re.search(pattern, messages_of_code), f"no message of the code has {fixed}"
