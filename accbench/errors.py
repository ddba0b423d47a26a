"""Exceptions whose message is meant for a person: one line, the cause and the remedy."""

import errno
import sys
from collections.abc import Iterator

# Set by a launcher that has made the run's folder and reports how the run failed. The value is
# a file of blanks, over which the worker writes its error; its name contains {rank} or
# {local_rank} where all workers share one environment.
ERROR_FILE_VARIABLE = "ACCBENCH_ERROR_FILE"
# Set as well by a launcher that is its workers' parent: the launcher's process id.
LAUNCHER_PID_VARIABLE = "ACCBENCH_LAUNCHER_PID"
# Rendezvous of the workers of several nodes: HOST:PORT/KEY of a store that the launcher holds, or
# file:PATH, into which rank 0 writes the address of its own store.
MEETING_VARIABLE = "ACCBENCH_MEETING"
# Size of the record in bytes when the run was launched: if it has grown, workers were restarted.
RECORDS_BEFORE_VARIABLE = "ACCBENCH_RECORDS_BEFORE"

# Messages of torch, and of torch.compile, for a view that the memory layout does not allow.
REFUSED_VIEWS = (
    "view size is not compatible with input tensor's size and stride",
    "Cannot view a tensor with shape",
)


# Error numbers of a write for which there is no space, or no more of a quota.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class RequestError(Exception):
    """A request that cannot be met; it ends a command with exit status 2."""


class NoMoreRunsError(RequestError):
    """Node 0 has no further runs for the other nodes."""


class NotMetError(RequestError):
    """The workers could not find each other; each worker that raises it knows its own part."""


class UnreadableSampleError(Exception):
    """A sample cannot be read; the message names its file or key, and the position in it."""


class BadSampleError(Exception):
    """More samples could not be read than `--max_bad_samples` allows."""


class NonFiniteLossError(Exception):
    """The loss became infinite or NaN; the run's record ends with status `nan`."""


class RecompiledError(RequestError):
    """More graphs were compiled after the warm-up than `--max_recompiles` allows."""


# Exit status of a run that was stopped and can go on: EX_TEMPFAIL of sysexits.h.
STOPPED_STATUS = 75


class StoppedError(Exception):
    """The run ends because it was asked to, and has a checkpoint to resume from."""


class ScriptExitError(Exception):
    """A user's script exited with a status other than 0."""


class RunEnded(SystemExit):  # noqa: N818
    """A script has taken all its steps; Python ends quietly by this exit, with status 0."""


class ReductionError(Exception):
    """Gradients are not averaged over the ranks, so the run would train something else."""


# Exception class name -> `status` of the end record. By name, because a
# launcher learns of a worker's exception from a file, not from the object.
_END_STATUS = {
    "OutOfMemoryError": "oom",
    "MemoryError": "oom",
    "NonFiniteLossError": "nan",
    "KeyboardInterrupt": "interrupted",
    "StoppedError": "interrupted",
}


# Messages of torch's CPU allocator and of XLA, whose exceptions have no class of their own.
_OUT_OF_MEMORY = ("can't allocate memory", "RESOURCE_EXHAUSTED", "Out of memory")


def end_status(exception_name: str, message: str = "") -> str:
    """Return the end record's `status` for a run that an exception of this class ended."""
    if any(words in message for words in _OUT_OF_MEMORY):
        return "oom"
    return _END_STATUS.get(exception_name, "error")


def errors_behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, or while handling it, and so on, each once."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and all(current is not other for other in seen):
        seen.append(current)
        yield current
        current = current.__cause__ or current.__context__


def print_interruption(line: str) -> int:
    """Print one line on a Ctrl-C that was caught, and return the exit status."""
    print(line, file=sys.stderr)
    # If it came while Python ran code from a string, as dataclasses do, CPython marks it as
    # unhandled and kills itself by SIGINT at exit, even if it was caught. Running another string
    # clears the mark (run_eval_code_obj in CPython's pythonrun.c).
    exec("")
    return 130


def print_refusal(prog: str, error: RequestError) -> int:
    """Print one line on a request that cannot be met, and return the exit status."""
    print(f"{prog}: {error}", file=sys.stderr)
    return 2


def remedy_of_overflow(amp_level: str | None, amp_dtype: str | None) -> str:
    """Return what may help where a number was not finite, for a run's dtypes."""
    if amp_level != "O1":
        return "lower --lr"
    or_bfloat16 = "--amp_dtype bfloat16 or " if amp_dtype == "float16" else ""
    return f"lower --lr, or use {or_bfloat16}--amp_level O0"
