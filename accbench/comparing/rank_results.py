"""Join what the ranks of a numerics pass find; all ranks call each of these functions."""

from collections.abc import Iterable, Mapping

from accbench.comparing import distances
from accbench.comparing.rank_share import crc32
from accbench.distributed.process_group import all_gather_values, is_single_worker
from accbench.engines.common.training_state import NotLoadableError, Tensors
from accbench.recording import records
from accbench.recording.logger import RunLogger


def write(
    logger: RunLogger, phase: str, step: int, measured: Mapping[str, float],
    note: str | None = None, loss: float | None = None, num_apart: int = 0,
) -> None:  # fmt: skip
    """Record the largest of the ranks' distances, and the mean of their losses.

    Args:
        logger: the run's record.
        phase: the part of the pass.
        step: the step, from 1.
        measured: this rank's distances; all ranks have the same names.
        note: what there is to say in words.
        loss: this rank's loss.
        num_apart: parameters that differ between ranks.
    """
    names = sorted(measured)
    # Bounded here, as no number is larger than NaN. One value at least.
    own = [distances.bounded(measured[name]) for name in names]
    _, *furthest = [
        max(values, key=abs) for values in zip(*all_gather_values([0.0, *own]), strict=True)
    ]
    losses = [value for (value,) in all_gather_values([0.0 if loss is None else loss])]
    record = records.NumericsRecord(
        phase=phase,
        step=step,
        distances=dict(zip(names, furthest, strict=True)),
        loss=None if loss is None else records.finite_or_none(sum(losses) / len(losses)),
        ranks_apart=num_apart,
        note=note,
    )
    logger.write(record)


def count_apart(tensors: Tensors, names: Iterable[str]) -> int:
    """Count the tensors that are not bitwise equal on all ranks.

    Args:
        tensors: this rank's.
        names: those to look at, the same on all ranks.
    """
    if is_single_worker():
        return 0
    sums = [float(crc32(tensors[name])) for name in sorted(names)]
    of_tensors = zip(*all_gather_values(sums), strict=True)
    return sum(len(set(rank_sums)) > 1 for rank_sums in of_tensors)


def raise_together(problem: str | None, of_others: str) -> None:
    """Raise on all ranks if any has a problem, so that none waits for another.

    Args:
        problem: this rank's; None if it has none.
        of_others: what ranks without one say of the first that has one, behind "rank 3 ".

    Raises:
        NotLoadableError: a rank has a problem.
    """
    if (joined_problem := joined(problem, of_others)) is not None:
        raise NotLoadableError(joined_problem)


def joined(problem: str | None, of_others: str) -> str | None:
    """Return this rank's problem, or what is to be said of another rank's; None if none has any.

    Args:
        problem: this rank's; None if it has none.
        of_others: what ranks without one say of the first that has one, behind "rank 3 ".
    """
    bad = [rank for rank, (n,) in enumerate(all_gather_values([float(problem is not None)])) if n]
    return (problem or f"rank {bad[0]} {of_others}") if bad else None
