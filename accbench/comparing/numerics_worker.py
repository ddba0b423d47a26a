"""A worker of the numerics pass: it makes a reference, or holds an engine against one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accbench.comparing import (
    check_pass,
    reference_pass,
    roundings,
    script_check_pass,
    script_reference_pass,
)
from accbench.comparing.numerics import check_part
from accbench.config import TaskConfig
from accbench.distributed.process_group import Topology
from accbench.report.comparison import FREE_DRAWS
from accbench.training import worker


def main(argv: Sequence[str], started: float) -> int:
    """Run this worker's share of one part of the numerics pass, and return the exit status.

    Args:
        argv: the part, its argument and the flags of a run, as `accbench.comparing.numerics` has
            them.
        started: `time.perf_counter()` at the start of the process.

    Raises:
        RequestError: there is no such part.
    """
    part, argument, *flags = argv
    check_part(part)

    def job(task: TaskConfig, topology: Topology, _started: float, _console: Any) -> None:
        if part == "reference" and task.script is not None:
            script_reference_pass.run(task, topology)
        elif part == "reference":
            numbers, *words = argument.split(":")
            num_shards, _, workers_per_batch = numbers.partition("x")
            reference_pass.run(
                task, int(num_shards), "reuse" in words, int(workers_per_batch or 1),
                drops="undropped" not in words,
            )  # fmt: skip
        elif task.script is not None:
            script_check_pass.run(task, topology, Path(argument))
        elif part == "free_draws":
            floor = task.run_dir.name.removesuffix(FREE_DRAWS)
            check_pass.draw_free_runs(task, topology, Path(argument), roundings.NUM_DRAWS, floor)
        else:
            num_draws = roundings.NUM_DRAWS if part == "floor" else 0
            check_pass.run(task, topology, Path(argument), num_draws, draws_free_run=False)

    return worker.main(flags, started, job)
