"""Markdown from outside text: names, reasons and folders show literally."""

import re
from collections.abc import Collection, Iterable, Sequence

# Characters with a meaning inside a line, in CommonMark and GitHub's tables and mathematics.
_INLINE_MARKS = re.compile(r"[\\`*\[\]|~$]")
# An underscore inside a word is literal in any case, and most names have some.
_UNDERSCORES = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
# Marks that begin a heading or a list at the start of a block.
_BLOCK_MARKS = re.compile(r"^(#{1,6}|[-+]|\d+[.)])(?=\s)")


def plain(text: str) -> str:
    """Escape `text` so that it shows literally in a table's cell, a list or a paragraph."""
    text = " ".join(text.split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _UNDERSCORES.sub(r"\\_", _INLINE_MARKS.sub(r"\\\g<0>", text))
    return _BLOCK_MARKS.sub(lambda match: f"{match[0][:-1]}\\{match[0][-1]}", text)


def table(titles: Sequence[str], left: Collection[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table without a final newline; columns not in `left` are aligned right."""
    rule = ["---" if title in left else "---:" for title in titles]
    lines = [[plain(title) for title in titles], rule]
    lines += [[plain(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """Format a list, one item a line."""
    return "\n".join(f"- {plain(line)}" for line in lines)
