"""Records in, pages out: pure functions.

`figures(PATH, ...)` is for notebooks: matplotlib figures of a comparison or of runs.
"""

from pathlib import Path
from typing import Any


def figures(*paths: str | Path) -> list[Any]:
    """Matplotlib figures of one comparison's folder, or of several runs' folders.

    Raises:
        RequestError: there are no records, or the runs do not belong side by side.
    """
    from accbench.report import plots

    return plots.of_paths(paths)
