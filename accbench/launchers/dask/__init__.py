"""Workers on a Dask cluster: `--launcher dask`, and `run` for a function of your own.

Dask starts nothing here: its scheduler and workers are there already, one worker a rank.
"""

import dataclasses
import importlib.util
from typing import Annotated, Any

import tyro

from accbench import extras, launchers
from accbench.config import TaskConfig
from accbench.errors import RequestError
from accbench.launchers import Failure
from accbench.launchers.dask import cluster, driving, places
from accbench.launchers.dask.dispatch import run
from accbench.launchers.dask.results import DaskResultsHandler

__all__ = ["DaskResultsHandler", "Launcher", "run"]


class Launcher(launchers.Launcher):
    """A task's ranks on the workers of a Dask cluster; `--nproc_per_node` is how many in all."""

    elsewhere = True

    @dataclasses.dataclass(frozen=True)
    class Options:
        """How to reach the cluster. Files of TLS that are not given, Dask's configuration has."""

        scheduler: Annotated[str | None, tyro.conf.arg(aliases=["--scheduler"])] = None
        """Its scheduler's address, tls://HOST:PORT; tcp:// on this machine alone."""
        scheduler_file: Annotated[str | None, tyro.conf.arg(aliases=["--scheduler_file"])] = None
        """The file that the scheduler has written, which has its address."""
        tls_ca_file: str | None = None
        """Certificate, as PEM, of whom the scheduler's is signed by."""
        tls_cert: str | None = None
        """This client's certificate, as PEM."""
        tls_key: str | None = None
        """The key of it, as PEM."""

    @classmethod
    def problem(cls, task: TaskConfig) -> str | None:
        if importlib.util.find_spec("distributed") is None:
            return f"--launcher dask needs {extras.not_installed('distributed', 'dask')}"
        if task.nnodes != TaskConfig.nnodes:
            return "--nnodes is not for --launcher dask: --nproc_per_node is the ranks in all"
        options = task.options["dask"]
        if (options.scheduler is None) == (options.scheduler_file is None):
            return (
                "--launcher dask needs one of --scheduler tls://HOST:PORT and --scheduler_file FILE"
            )
        if options.scheduler is None:
            return None
        return cluster.insecure(cluster.with_protocol(options.scheduler))

    def resolve(self, task: TaskConfig) -> TaskConfig:
        """As the machine of rank 0 makes of it: the client may have no such device."""
        if (problem := self.problem(task)) is not None:
            raise RequestError(problem)
        with cluster.connect(task.options["dask"]) as client:
            return driving.resolved(client, task, _ranks(client, task)[0])

    def launch(self, task: TaskConfig, worker: list[str]) -> Failure | None:
        options = task.options["dask"]
        try:
            with cluster.connect(options) as client:
                try:
                    return driving.drive(client, task, worker, _ranks(client, task))
                except RequestError:
                    raise
                except Exception:
                    if client.status == "running":
                        raise
                    lost = f"the connection to Dask's scheduler {cluster.address_of(options)}"
                    return Failure("error", f"{lost} is lost")
        except RequestError as error:
            return Failure("error", str(error), exit_status=2)


def _ranks(client: Any, task: TaskConfig) -> list[places.Place]:
    try:
        return places.of_workers(client, task.nproc_per_node)
    except ValueError as error:
        raise RequestError(f"{error}: start more, or lower --nproc_per_node") from None
