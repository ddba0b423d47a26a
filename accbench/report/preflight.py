"""What a training step compiled for an absent GPU needs, moves and at best does, as text.

Times here are bounds from the GPU's data sheet and never measurements, and every text says so.
"""

import json
from collections.abc import Callable
from typing import Literal

from accbench.report import preflight_page as pages
from accbench.report import preflight_pair as pair
from accbench.report import preflight_sections as sections
from accbench.report.preflight_page import Document, Result

Format = Literal["table", "md", "html", "json"]


def render(result: Result, format: Format) -> str:
    """One result, ending in a newline."""
    if format == "json":
        return json.dumps(result, indent=1) + "\n"
    return _written(sections.document(result), format)


def render_pair(a: Result, b: Result, format: Format) -> str:
    """Two results side by side, with the change from `a` to `b`; ends in a newline."""
    if format == "json":
        return json.dumps(pair.as_json(a, b), indent=1) + "\n"
    return _written(pair.document(a, b), format)


def _written(document: Document, format: Format) -> str:
    forms: dict[str, Callable[[Document], str]] = {
        "table": pages.terminal, "md": pages.as_markdown, "html": pages.page,
    }  # fmt: skip
    return forms[format](document)
