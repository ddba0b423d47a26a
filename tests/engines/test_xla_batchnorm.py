"""BatchNorm and the other norms through XLA are those of PyTorch."""

from typing import Any

import pytest

from .test_xla_replay import answer_of, both, start

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


@pytest.fixture(scope="module")
def answers() -> tuple[dict[str, Any], dict[str, Any]]:
    return both("batchnorm", "0")


def test_statistics_are_torchs_through_short_batches_evaluations_and_loading(answers) -> None:
    assert answers[1]["replayed"] > 10
    for answer in answers:
        assert answer["differences"]["1.num_batches_tracked"] == 0
        assert answer["differences"]["1.running_mean"] < 1e-5
        # Left biased, the variance of the short batches alone would be 2e-3 off.
        assert answer["differences"]["1.running_var"] < 1e-5
        assert len(answer["evaluations"]) == 4
        for through_xla, expected in answer["evaluations"]:
            assert through_xla == pytest.approx(expected, abs=1e-3)


def test_reading_and_evaluating_compile_nothing_more_after_the_first_time(answers) -> None:
    compiles = answers[0]["compiles"]
    # Steps of both sizes have run, a state was read, and an evaluation was made.
    assert compiles[10] == compiles[22]
    # What was loaded is copied in one graph more.
    assert compiles[23] == compiles[29]


@pytest.mark.parametrize("lean", ["off", "on"])
def test_norms_of_values_far_from_zero_are_those_of_float64(lean: str) -> None:
    """Output, gradients, statistics and evaluation, where the mean is 100 deviations: a variance
    of float32 taken as the mean of the squares less the square of the mean is 1e-3 and more off."""
    for case, difference in answer_of(start("norms", lean)).items():
        assert difference < 1e-4, case
