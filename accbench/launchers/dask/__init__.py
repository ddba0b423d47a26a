"""Workers on a Dask cluster: `--launcher dask`, and `run` for a function of your own.

The cluster's scheduler and Dask workers already run; each rank is a task on one Dask worker.
"""

import dataclasses
import importlib.util
from typing import Annotated, Any

import tyro

from accbench import launchers
from accbench.config import TaskConfig
from accbench.config.field import flag
from accbench.errors import RequestError
from accbench.launchers import Failure
from accbench.launchers.dask import cluster, driving, rank_assignment
from accbench.launchers.dask.dispatch import run
from accbench.launchers.dask.results import DaskResultsHandler
from accbench.system import extras

__all__ = ["DaskResultsHandler", "Launcher", "run"]


class Launcher(launchers.Launcher):
    """A launcher of ranks on a Dask cluster; `--nproc_per_node` is the total number of ranks."""

    elsewhere = True

    @dataclasses.dataclass(frozen=True)
    class Options:
        """How to reach the cluster; Dask's configuration supplies TLS files that are not set."""

        scheduler: Annotated[str | None, tyro.conf.arg(aliases=["--scheduler"])] = flag(
            None,
            "The scheduler's address, tls://HOST:PORT; tcp:// on this machine alone.",
        )
        scheduler_file: Annotated[str | None, tyro.conf.arg(aliases=["--scheduler_file"])] = flag(
            None,
            "The file in which the scheduler wrote its address.",
        )
        tls_ca_file: str | None = flag(
            None,
            "Certificate (PEM) of the authority that signed the scheduler's certificate.",
        )
        tls_cert: str | None = flag(None, "This client's certificate (PEM).")
        tls_key: str | None = flag(None, "Key of this client's certificate (PEM).")

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
        return cluster.security_problem(cluster.with_protocol(options.scheduler))

    def resolve(self, task: TaskConfig) -> TaskConfig:
        """Resolve the task on rank 0's machine, because the client may lack the device."""
        if (problem := self.problem(task)) is not None:
            raise RequestError(problem)
        with cluster.connect(task.options["dask"]) as client:
            return driving.resolve_on_worker(client, task, _assign_ranks(client, task)[0])

    def launch(self, task: TaskConfig, worker: list[str]) -> Failure | None:
        options = task.options["dask"]
        try:
            with cluster.connect(options) as client:
                try:
                    return driving.drive(client, task, worker, _assign_ranks(client, task))
                except RequestError:
                    raise
                except Exception:
                    if client.status == "running":
                        raise
                    address = cluster.address_of(options)
                    return Failure("error", f"the connection to Dask's scheduler {address} is lost")
        except RequestError as error:
            return Failure("error", str(error), exit_status=2)


def _assign_ranks(client: Any, task: TaskConfig) -> list[rank_assignment.RankAssignment]:
    try:
        return rank_assignment.assign_ranks(client, task.nproc_per_node)
    except ValueError as error:
        raise RequestError(f"{error}: start more, or lower --nproc_per_node") from None
