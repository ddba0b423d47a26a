"""Ranks of a numerics pass find things together."""

import math

import pytest
import torch

from accbench.comparing import rank_results
from accbench.engines.common.training_state import NotLoadableError
from accbench.recording import records


class Log:
    """Holds what is written, in the place of a run's record."""

    def write(self, record: records.NumericsRecord) -> None:
        self.record = record


def beside(monkeypatch, *others: list[float]) -> None:
    """Have this process be the last rank; the others send these numbers, one list a call."""
    sent = iter(others)
    monkeypatch.setattr(rank_results, "is_single_worker", lambda: False)
    monkeypatch.setattr(rank_results, "all_gather_values", lambda own: [next(sent), own])


@pytest.mark.parametrize(("own", "written"), [(-0.5, -0.5), (0.1, 0.2), (math.nan, 1e30)])
def test_the_furthest_of_all_ranks_is_written_also_if_it_is_no_number(monkeypatch, own, written):
    beside(monkeypatch, [0.0, 0.2], [3.0])
    log = Log()
    rank_results.write(log, "step", 1, {"loss": own}, loss=5.0)
    assert (log.record.distances, log.record.loss) == ({"loss": written}, 4.0)


def test_tensors_that_differ_in_a_bit_are_counted_apart(monkeypatch):
    mine = {"a": torch.ones(3), "b": torch.zeros(2), "c": torch.ones(2, dtype=torch.bfloat16)}
    same = [float(rank_results.crc32(mine[name])) for name in "abc"]
    beside(monkeypatch, same)
    assert rank_results.count_apart(mine, "abc") == 0
    beside(monkeypatch, same)
    assert rank_results.count_apart({**mine, "b": torch.tensor([0.0, -0.0])}, "abc") == 1


def test_a_problem_of_one_rank_is_known_to_all(monkeypatch):
    beside(monkeypatch, [0.0], [1.0], [1.0])
    assert rank_results.joined(None, "could not evaluate") is None
    assert rank_results.joined(None, "could not evaluate") == "rank 0 could not evaluate"
    assert rank_results.joined("no memory", "could not evaluate") == "no memory"


def test_a_problem_of_one_rank_is_raised_on_all(monkeypatch):
    beside(monkeypatch, [0.0], [1.0], [0.0])
    of_others = "got other batches"
    rank_results.raise_together(None, of_others)
    with pytest.raises(NotLoadableError, match="rank 0 got other batches"):
        rank_results.raise_together(None, of_others)
    with pytest.raises(NotLoadableError, match="a is not what was loaded"):
        rank_results.raise_together("a is not what was loaded", of_others)
