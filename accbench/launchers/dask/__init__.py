"""Workers on a Dask cluster: `--launcher dask`, and `run` for a function of your own."""

from accbench.launchers.dask.dispatch import run
from accbench.launchers.dask.results import DaskResultsHandler

__all__ = ["DaskResultsHandler", "run"]
