"""Markdown whose texts come from outside: names, reasons and folders stay what they are."""

import re
from collections.abc import Collection, Iterable, Sequence

# What means something within a line, in CommonMark and GitHub's tables and mathematics.
_MARKS = re.compile(r"[\\`*\[\]|~$]")
# An underscore within a word is one in any case, and most names have some.
_UNDERSCORES = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
# What begins a heading or a list at the start of a block.
_FIRST = re.compile(r"^(#{1,6}|[-+]|\d+[.)])(?=\s)")


def plain(text: str) -> str:
    """`text` so that Markdown shows it as it is, in a table's cell, a list or a paragraph."""
    text = " ".join(text.split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _UNDERSCORES.sub(r"\\_", _MARKS.sub(r"\\\g<0>", text))
    return _FIRST.sub(lambda match: f"{match[0][:-1]}\\{match[0][-1]}", text)


def table(titles: Sequence[str], left: Collection[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without a line's end; the columns not in `left` stand at the right."""
    rule = ["---" if title in left else "---:" for title in titles]
    lines = [[plain(title) for title in titles], rule]
    lines += [[plain(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """A list, an item a line."""
    return "\n".join(f"- {plain(line)}" for line in lines)
