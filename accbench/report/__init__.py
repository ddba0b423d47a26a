"""Turn records into pages, by pure functions.

`figures(PATH, ...)` is for notebooks: matplotlib figures of a comparison or of runs.
"""

from pathlib import Path
from typing import Any


def figures(*paths: str | Path) -> list[Any]:
    """Return matplotlib figures of one comparison's folder, or of several runs' folders.

    Raises:
        RequestError: there are no records, or the runs cannot be compared.
    """
    from accbench.report import plots

    return plots.figures_from_paths(paths)
