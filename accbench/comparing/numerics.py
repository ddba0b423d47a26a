"""The numerics pass: an engine's training, step by step beside float64. Nothing here is timed.

`python -m accbench.comparing.numerics reference NUM_SHARDS FLAGS` makes a reference in the
run's folder; `... check REFERENCE FLAGS` holds an engine against it and leaves a run's
folder whose records hold `numerics` lines in place of windows. `... floor REFERENCE FLAGS` is
that for plain ddp, which also does each step again to see what rounding may do in it.

Before each checked step the engine is put into the reference's state, so that every step is
a test by itself and nothing drifts. Then it trains freely from the start, as in a run.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accbench.comparing import dropout, reference, roundings, script_pass, update_rules
from accbench.comparing.examination import Examination
from accbench.comparing.reference import Reference
from accbench.config import TaskConfig
from accbench.distributed.process_group import Topology
from accbench.engines.common.training_state import NotLoadableError
from accbench.errors import ERROR_FILE_VARIABLE, RequestError
from accbench.launchers.common.run import run
from accbench.recording import records
from accbench.recording.logger import RunLogger
from accbench.training import worker
from accbench.training.opening import first_engine_of


def check(task: TaskConfig, topology: Topology, reference_dir: Path, num_draws: int = 0) -> None:
    """Hold `task.engine` against a reference and record what was found.

    Args:
        num_draws: how often to do each step again from weights that are off by some roundings.

    Raises:
        RequestError: there is no reference, or it is of another task.
    """
    assert task.max_steps is not None
    logger = RunLogger(task.run_dir, topology.rank)
    engine = first_engine_of(task, topology)
    against = Reference(reference_dir, update_rules.of_task(task), topology.rank)
    losses = against.facts.losses
    made_for = (against.facts.batch_size, len(losses), len(losses[0]))
    if made_for != (task.batch_size, task.max_steps, topology.world_size):
        raise RequestError(f"the reference in {reference_dir} is of another task")
    (source,) = reference.sources(task, [topology])
    logger.write(worker.run_record(task, engine, topology, source.num_classes))
    engine.strategy.prove()
    examination = Examination(task, topology, engine, against, logger, num_draws)
    examination.build(source.num_classes)
    try:
        with dropout.given():
            examination.steps(source)
            examination.evaluation(source)
            examination.overflow(source)
            examination.free_run()
    except NotLoadableError as error:  # on all ranks
        examination.write("not loadable", 0, {}, note=str(error))
    examination.dropout()
    logger.write(records.EndRecord("ok", num_steps=task.max_steps))
    engine.close()


def make_reference(task: TaskConfig, num_shards: int) -> None:
    """Leave a reference in the run's folder, and its losses in the record."""
    assert task.max_steps is not None
    logger = RunLogger(task.run_dir)
    facts = reference.make(task, num_shards, task.max_steps, task.run_dir)
    note = "the model draws random numbers that cannot be given to all engines"
    for step, losses in enumerate(facts.losses):
        logger.write(
            records.NumericsRecord(
                phase="reference", step=step + 1, distances={},
                loss=records.finite_or_none(sum(losses) / len(losses)),
                note=note if facts.draws_otherwise else None,
            )
        )  # fmt: skip
    logger.write(records.EndRecord("ok", num_steps=task.max_steps))


def main(argv: Sequence[str], started: float) -> int:
    """The launcher, and behind it each worker; `argv` is what to do, its argument, flags."""
    what, argument, *flags = argv
    if what not in ("reference", "floor", "check"):
        raise RequestError(f"reference, floor or check, not {what!r}")
    if ERROR_FILE_VARIABLE not in os.environ:
        command = ["-m", "accbench.comparing.numerics_process", what, argument]
        return run(flags, prog="accbench numerics", worker=command, attached=True)

    def job(task: TaskConfig, topology: Topology, _started: float, _console: Any) -> None:
        if task.script is not None:
            given = None if what == "reference" else Path(argument)
            script_pass.run(task, topology, given)
        elif what == "reference":
            make_reference(task, int(argument))
        else:
            num_draws = roundings.NUM_DRAWS if what == "floor" else 0
            check(task, topology, Path(argument), num_draws)

    return worker.main(flags, started, job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], time.perf_counter()))
