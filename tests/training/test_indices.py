"""Indices that are out of range end a run before it trains on them, in every engine."""

import json

import pytest

from tests.conftest import TINY, python, run
from tests.training.own_indices import CASES
from tests.training.test_own_loop import ENGINES

COMPILED = ENGINES[2:]


@pytest.mark.parametrize("engine", [ENGINES[0], *COMPILED])
def test_a_loop_of_ones_own_ends_where_torch_on_the_host_would_end_it(engine, tmp_path):
    done = python("-m", "tests.training.own_indices", engine, tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == CASES.keys()
    for case, (_, _, is_wrong) in CASES.items():
        one = found[case]
        assert (one["error"] is not None) == is_wrong, (case, one)
        assert one["steps"] == (3 if not is_wrong else 0 if "at once" in case else 2), case
        assert one["far"] < 1e-6, case
        if is_wrong:
            kind, message = one["error"].split(": ", 1)
            assert "\n" not in message
            # jax compiles the model alone, and the rest is torch's own.
            assert kind == "RequestError" or engine in ("ddp", "jax")
    if engine != "ddp":
        assert "labels" in found["label of the model"]["error"]
        assert (
            "has 1 to 5 for cross_entropy, which takes 0 to 4"
            in (found["label of the model"]["error"])
        )
        assert "has 0 to 7 for embedding, which takes 0 to 6" in found["word"]["error"]


@pytest.mark.parametrize("engine", COMPILED)
def test_a_run_of_a_spec_that_checks_nothing_is_refused(engine, tmp_path):
    parts = 2 if engine == "jax" else 1
    done = run(
        *TINY, "--model=tests.nets:Mislabelled", "--data=synthetic", f"--engine={engine}",
        "--synthetic.num_batches=4", f"--accumulate={parts}", f"--output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "cross_entropy" in line)
    assert "batch['classes'] has 3 to 3 for cross_entropy, which takes 0 to 2" in line
