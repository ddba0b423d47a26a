"""Transport of results, logs and checkpoints from a call's ranks to files at the client.

The interface follows dask-pytorch-ddp, whose transport, Dask's Pub/Sub, no longer exists.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from accbench.launchers.dask import event_log, safe_folder
from accbench.launchers.dask.collecting import Collector, FileWriter
from accbench.launchers.dask.safe_folder import SafeFolder

log = logging.getLogger(__name__)

_POLL_S = 0.1
# Seconds in which the cause of an error may follow it: a rank often reports that another is gone
# before the scheduler has noticed.
_CAUSE_S = 3.0


class DaskResultsHandler:
    """A handler that carries results from tasks on a Dask cluster to files at the client.

    Args:
        key: names the results; the same at both ends. None: a new key.

    >>> handler = DaskResultsHandler()
    >>> def train():
    ...     handler.submit_result(f"rank{dist.get_rank()}/loss.json", json.dumps(loss))
    >>> handler.process_results("results", run(client, train))
    """

    def __init__(self, key: str | None = None) -> None:
        self.key = uuid.uuid4().hex if key is None else key
        self._lock = threading.Lock()
        self._sender: event_log.EventSender | None = None

    def __reduce__(self) -> Any:
        return DaskResultsHandler, (self.key,)

    @property
    def pub_sub_key(self) -> str:
        """The key, under dask-pytorch-ddp's name."""
        return self.key

    def submit_result(self, path: str, data: str | bytes) -> None:
        """Send a file to the client; the first call comes from the task's own thread.

        The scheduler has the file when this returns, even if this process is killed afterwards.

        Args:
            path: path in the folder that the client chooses; an existing file is replaced.
            data: the content; text is written as UTF-8.

        Raises:
            ValueError: the path is absolute or goes up.
            NotCollectedError: the client collects no results, and too many wait.
        """
        safe_folder.relative_parts(path)
        self.sender().send("whole", path, data.encode() if isinstance(data, str) else data)

    def sender(self) -> event_log.EventSender:
        """Return this task's sender."""
        with self._lock:
            if self._sender is None:
                self._sender = event_log.EventSender(self.key)
            return self._sender

    def process_results(
        self, folder: str | os.PathLike[str], futures: Sequence[Any], raise_errors: bool = True
    ) -> None:
        """Write the results of tasks as they come, until all these tasks have ended.

        Args:
            folder: nothing is written outside it.
            futures: the tasks' futures.
            raise_errors: raise a task's error, after writing its results until then. Otherwise
                log it.

        Raises:
            ResultsLostError: results that tasks sent have not arrived.
            ValueError: a result's path leads out of the folder; all others are written.
        """
        from distributed import default_client

        client = futures[0].client if futures else default_client()
        files = FileWriter(SafeFolder(folder))
        with Collector(client, self.key, files) as collector:
            error = None
            pending = list(futures)
            while pending and not (error is not None and raise_errors):
                collector.collect(_POLL_S)
                ended = [future for future in pending if future.done()]
                pending = [future for future in pending if future not in ended]
                for future in ended:
                    if (task_error := error_of(future)) is not None:
                        log.error("%s: %s", future.key, task_error)
                        error = error or task_error
            if error is not None and raise_errors:
                error = find_cause(futures, error, collector)
            collector.finish()
        if error is not None and raise_errors:
            raise error
        if files.refused:
            raise ValueError(f"not written: {'; '.join(files.refused)}")


def error_of(future: Any) -> BaseException | None:
    """Return the error of a future that is done, or None."""
    if future.status == "finished":
        return None
    try:
        future.result(timeout=_CAUSE_S)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return error
    return None


def find_cause(futures: Sequence[Any], error: BaseException, collector: Collector) -> BaseException:
    """Return the error of a rank whose Dask worker is lost, if any: it caused the others."""
    deadline = time.monotonic() + _CAUSE_S
    while True:
        for future in futures:
            if future.status == "cancelled":
                return error_of(future) or error
        if time.monotonic() > deadline or all(future.done() for future in futures):
            return error
        collector.collect(_POLL_S)
