"""Reports on a training step compiled for an absent GPU: what it needs, moves and at best does.

Times here are bounds from the GPU's data sheet and never measurements, and every text says so.
"""

import json
from collections.abc import Callable
from typing import Literal

from accbench.report import preflight_page, preflight_pair, preflight_sections, preflight_stages
from accbench.report.preflight_page import Document, PreflightResult

Format = Literal["table", "md", "html", "json"]


def render(result: PreflightResult, format: Format) -> str:
    """Render one result; the text ends in a newline."""
    if format == "json":
        return json.dumps(result, indent=1) + "\n"
    sections = preflight_stages if "ranks" in result else preflight_sections
    return _render_document(sections.build_document(result), format)


def render_pair(a: PreflightResult, b: PreflightResult, format: Format) -> str:
    """Render two results side by side, with the change from `a` to `b`; ends in a newline."""
    if format == "json":
        return json.dumps(preflight_pair.as_json(a, b), indent=1) + "\n"
    return _render_document(preflight_pair.build_document(a, b), format)


def _render_document(document: Document, format: Format) -> str:
    renderers: dict[str, Callable[[Document], str]] = {
        "table": preflight_page.terminal,
        "md": preflight_page.as_markdown,
        "html": preflight_page.page,
    }
    return renderers[format](document)
