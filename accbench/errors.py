"""Exceptions whose message is meant for a person: one line, the cause and the remedy."""

import sys

# Set by a launcher, which then has made the run's folder and tells how the run
# failed; the value is a file of blanks over which the worker writes its error, with
# {rank} or {local_rank} in its name where all workers have one environment.
ERROR_FILE_VARIABLE = "ACCBENCH_ERROR_FILE"
# Set beside it by a launcher that is its workers' parent: its process id.
LAUNCHER_PID_VARIABLE = "ACCBENCH_LAUNCHER_PID"
# Where the workers of several nodes meet: HOST:PORT/KEY, of a store that the launcher holds; or
# file:PATH, into which rank 0 writes where its own is.
MEETING_VARIABLE = "ACCBENCH_MEETING"
# Bytes that the record had when the run was launched: with more, workers were started again.
RECORDS_BEFORE_VARIABLE = "ACCBENCH_RECORDS_BEFORE"

# What torch says of a view that memory does not allow, and torch.compile in its place.
REFUSED_VIEWS = (
    "view size is not compatible with input tensor's size and stride",
    "Cannot view a tensor with shape",
)


class RequestError(Exception):
    """What was asked for cannot be done. Ends a command with exit status 2."""


class NoMoreRunsError(RequestError):
    """Node 0 has no more to do for those who take part."""


class NotMetError(RequestError):
    """The workers could not find each other; each of them that tells so knows its own part."""


class UnreadableSampleError(Exception):
    """A sample cannot be read. Names its file or key, and where in it."""


class BadSampleError(Exception):
    """More samples could not be read than `--max_bad_samples` allows."""


class NonFiniteLossError(Exception):
    """The loss became infinite or NaN; the run's record ends with status `nan`."""


class RecompiledError(RequestError):
    """More graphs were compiled after the warm-up than `--max_recompiles` allows."""


# Exit status of a run that was stopped and can go on: EX_TEMPFAIL of sysexits.h.
STOPPED_STATUS = 75


class StoppedError(Exception):
    """The run ends because it was asked to, with a checkpoint to go on from."""


class ScriptExitError(Exception):
    """A script of a user's ended by an exit status other than 0."""


class RunEnded(SystemExit):  # noqa: N818
    """A script has taken the steps that it was to take. Python ends quietly by it, status 0."""


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


# What torch's allocator for CPUs and XLA say, in exceptions of no class of their own.
_OUT_OF_MEMORY = ("can't allocate memory", "RESOURCE_EXHAUSTED", "Out of memory")


def end_status(exception_name: str, message: str = "") -> str:
    """`status` of the end record for a run that an exception of this class ended."""
    if any(words in message for words in _OUT_OF_MEMORY):
        return "oom"
    return _END_STATUS.get(exception_name, "error")


def interrupted(line: str) -> int:
    """One line on a Ctrl-C that was caught; returns the exit status."""
    print(line, file=sys.stderr)
    # Where it came while Python ran code from a string (dataclasses are made so), CPython notes
    # it as unhandled and at its very end kills itself by SIGINT, caught or not. Running another
    # string takes the note away (run_eval_code_obj in CPython's pythonrun.c).
    exec("")
    return 130


def refused(prog: str, error: RequestError) -> int:
    """One line on a request that cannot be met; returns the exit status."""
    print(f"{prog}: {error}", file=sys.stderr)
    return 2


def remedy_of_overflow(amp_level: str | None, amp_dtype: str | None) -> str:
    """What may help where a number was not finite, in the types of a run."""
    if amp_level != "O1":
        return "lower --lr"
    also = "--amp_dtype bfloat16 or " if amp_dtype == "float16" else ""
    return f"lower --lr, or use {also}--amp_level O0"
