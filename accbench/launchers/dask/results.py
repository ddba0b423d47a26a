"""Results, logs and checkpoints from the ranks of a call to files at the client.

Of the shape of dask-pytorch-ddp, whose way there, Dask's Pub/Sub, is gone.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from accbench.launchers.dask import below, sending
from accbench.launchers.dask.below import Below
from accbench.launchers.dask.collecting import Collector, Files

log = logging.getLogger(__name__)

_POLL_S = 0.1
# Seconds in which the cause of an error may come behind it: what ranks say when another is gone
# is often here before the scheduler has noticed.
_CAUSE_S = 3.0


class DaskResultsHandler:
    """Takes results from tasks on a Dask cluster to files at the client.

    Args:
        key: names the results; the same at both ends. Unset: a new one.

    >>> handler = DaskResultsHandler()
    >>> def train():
    ...     handler.submit_result(f"rank{dist.get_rank()}/loss.json", json.dumps(loss))
    >>> handler.process_results("results", run(client, train))
    """

    def __init__(self, key: str | None = None) -> None:
        self.key = uuid.uuid4().hex if key is None else key
        self._lock = threading.Lock()
        self._sender: sending.Sender | None = None

    def __reduce__(self) -> Any:
        return DaskResultsHandler, (self.key,)

    @property
    def pub_sub_key(self) -> str:
        """The key, by dask-pytorch-ddp's name for it."""
        return self.key

    def submit_result(self, path: str, data: str | bytes) -> None:
        """Have the client write a file; called in a task, in its own thread at first.

        The scheduler has it when this returns, also where this process is killed afterwards.

        Args:
            path: below the folder that the client chooses; a file of that name is replaced.
            data: text is written as UTF-8.

        Raises:
            ValueError: the path is absolute or goes up.
            NotCollectedError: the client takes no results, and too many wait for it.
        """
        below.parts_of(path)
        self.sender().send("whole", path, data.encode() if isinstance(data, str) else data)

    def sender(self) -> sending.Sender:
        """This task's own."""
        with self._lock:
            if self._sender is None:
                self._sender = sending.Sender(self.key)
            return self._sender

    def process_results(
        self, folder: str | os.PathLike[str], futures: Sequence[Any], raise_errors: bool = True
    ) -> None:
        """Write the results of tasks as they come, until all these tasks have ended.

        Args:
            folder: nothing is written but below it.
            futures: of the tasks.
            raise_errors: raise what a task failed by, with its results until then written.
                Otherwise it is logged.

        Raises:
            ResultsLostError: results that tasks handed over have not arrived.
            ValueError: a result's path leads out of the folder; all others are written.
        """
        from distributed import default_client

        client = futures[0].client if futures else default_client()
        files = Files(Below(folder))
        with Collector(client, self.key, files) as collector:
            error = None
            pending = list(futures)
            while pending and not (error is not None and raise_errors):
                collector.collect(_POLL_S)
                ended = [future for future in pending if future.done()]
                pending = [future for future in pending if future not in ended]
                for future in ended:
                    if (failed := error_of(future)) is not None:
                        log.error("%s: %s", future.key, failed)
                        error = error or failed
            if error is not None and raise_errors:
                error = cause(futures, error, collector)
            collector.finish()
        if error is not None and raise_errors:
            raise error
        if files.refused:
            raise ValueError(f"not written: {'; '.join(files.refused)}")


def error_of(future: Any) -> BaseException | None:
    """What a future that is done has failed by."""
    if future.status == "finished":
        return None
    try:
        future.result(timeout=_CAUSE_S)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return error
    return None


def cause(futures: Sequence[Any], error: BaseException, collector: Collector) -> BaseException:
    """The error of a rank that has lost its Dask worker, if there is one: it caused the others."""
    until = time.monotonic() + _CAUSE_S
    while True:
        for future in futures:
            if future.status == "cancelled":
                return error_of(future) or error
        if time.monotonic() > until or all(future.done() for future in futures):
            return error
        collector.collect(_POLL_S)
