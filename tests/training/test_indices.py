"""Indices that are out of range end a run before it trains on them, in every engine."""

import json

import pytest

from tests.conftest import TINY, python, run
from tests.engine_params import NEEDS_JAX, XLA
from tests.training.own_indices import CASES
from tests.training.test_own_loop import ENGINES

COMPILED = ENGINES[2:]
# Of jax, which compiles the model alone: the others' loss is torch's own, of the same graph.
OF_JAX = (
    "label", "label of the model", "label of the model at once", "ignored label of the model",
    "label that is shifted away", "word", "longer than places",
)  # fmt: skip


@pytest.mark.parametrize(("engine", "cases"), [
    pytest.param("ddp", tuple(CASES), id="ddp"),
    pytest.param("jax", OF_JAX, id="jax", marks=NEEDS_JAX),
    pytest.param("jax", tuple(CASES), id="jax-all", marks=[NEEDS_JAX, pytest.mark.soak]),
    pytest.param(*XLA.values, tuple(CASES), id="xla", marks=XLA.marks),
])  # fmt: skip
def test_a_loop_of_ones_own_ends_where_torch_on_the_host_would_end_it(engine, cases, tmp_path):
    done = python("-m", "tests.training.own_indices", engine, tmp_path, *cases)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [*found] == [*cases]
    for case, one in found.items():
        is_wrong = CASES[case][2]
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
