"""Loops of a user's own over parameters in shards: `accbench.accelerate(..., dp_shard="auto")`."""

import json

import pytest
import torch
from torch import nn

from accbench import config, launchers
from accbench.errors import RequestError
from accbench.recording import records
from accbench.training import accelerated_optimizer
from tests.conftest import ROOT, of_kind, run, several_ranks
from tests.scripts import own_sharded_loops

SCRIPT = ("-m", "tests.scripts.own_sharded_loops")
NUM_RANKS = 4
TWO_GROUPS = "two-groups-read-outside-of-calls"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """case -> [distance of losses, of parameters, of moments], the largest of all ranks."""
    out = tmp_path_factory.mktemp("own-sharded-loops")
    done = several_ranks(NUM_RANKS, *SCRIPT, out, "all")
    assert done.returncode == 0, done.stderr
    return largest(out), out


def largest(out):
    ranks = [json.loads((out / f"found-{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    return {
        case: [max(values) for values in zip(*(of[case] for of in ranks), strict=True)]
        for case in ranks[0]
    }


@pytest.mark.parametrize("case", own_sharded_loops.CASES)
def test_loops_train_as_with_whole_parameters(found, case):
    check_distances(found[0][case], case)


def check_distances(distances, case):
    # AdamW and its kin divide gradients by their own size, and so their rounding.
    losses, *state = distances
    assert losses < 1e-5
    assert max(state) < (1e-5 if "sgd" in case or "clipped" in case else 1e-4)


@pytest.mark.parametrize("optimizer", ["fused", "sgd"])
def test_an_overflow_on_one_rank_is_skipped_by_all(found, optimizer):
    check_overflow(found[0], optimizer)


def check_overflow(distances, optimizer):
    at_overflow, behind_it = distances[f"overflow {optimizer}"]
    assert at_overflow == 0 < behind_it


@pytest.mark.soak
def test_loops_train_so_in_each_way_by_itself(tmp_path):
    done = several_ranks(NUM_RANKS, *SCRIPT, tmp_path, "repeated")
    assert done.returncode == 0, done.stderr
    distances = largest(tmp_path)
    for case in own_sharded_loops.REPEATED:
        check_distances(distances[case], case)
    check_overflow(distances, "adamw")


def test_each_rank_keeps_its_part(found):
    whole, sharded = (
        of_kind(found[1] / f"{TWO_GROUPS}-{how}", records.EndRecord)[0].state_bytes
        for how in ("whole", "sharded")
    )
    assert sharded < 0.35 * whole  # of 7 and 13 rows, four ranks keep 2 and 4


@pytest.mark.soak
def test_compiled_loops_train_as_with_whole_parameters(tmp_path):
    done = several_ranks(NUM_RANKS, *SCRIPT, tmp_path, "inductor")
    assert done.returncode == 0, done.stderr
    assert max(largest(tmp_path)["adamw"]) < 1e-5


def test_wholes_that_one_rank_alone_asks_for_are_told_in_a_line(tmp_path):
    done = several_ranks(2, *SCRIPT, tmp_path, "alone")
    assert done.returncode != 0
    assert (
        "run.to_host: workers 1 have not called it within 5 s: with --dp_shard each has a part of "
        "every tensor, so call it on all, and save on one what it returns"
    ) in done.stderr
    for rank in range(2):  # of a layer that was added
        line = (tmp_path / f"late-{rank}.txt").read_text()
        assert "shape (1, 7) came after accbench.accelerate, and --dp_shard averages no" in line


OF_SCRIPT = (f"--script={own_sharded_loops.__file__}", "--nproc_per_node=2", "--device=cpu")


@pytest.mark.parametrize(("flags", "line"), [
    (["--zero=1", "--dp_shard=auto"], "--zero 1: a script's optimizer steps with the parameters"),
    (["--tp=2"], "--tp, --cp, --pp and --offload are for accbench's own loop"),
    (["--offload=optimizer"], "--tp, --cp, --pp and --offload are for accbench's own loop"),
    (["--dp_shard=3"], "2 workers are no multiple of --dp_shard 3; use auto or one of 1, 2"),
    (["--dp_shard=auto", "--engine=jax"], "--dp_shard auto: engine jax shards in accbench's own"),
])  # fmt: skip
def test_what_a_script_cannot_have_is_refused(flags, line):
    with pytest.raises(RequestError) as caught:
        launchers.resolve(config.parse([*OF_SCRIPT, *flags]))
    assert str(caught.value).startswith(line)


def test_a_refusal_is_told_in_a_line(tmp_path):
    result = run(
        "-m", "accbench", "run", *OF_SCRIPT, "--tp=2", f"--output_dir={tmp_path / 'run'}",
        script="-B",
    )  # fmt: skip
    assert result.returncode == 2
    assert "--tp, --cp, --pp and --offload are for accbench's own loop" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_fused_optimizer_without_a_form_for_shards_is_refused():
    sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, fused=True)
    with pytest.raises(RequestError, match="leave fused out, or use AdamW"):
        accelerated_optimizer.check_steps_with_shards(sgd)


@pytest.mark.soak
def test_a_comparison_judges_the_script(tmp_path):
    flags = (
        "--engines=ddp,ddp:dp_shard=auto", "--nproc_per_node=2", "--max_steps=12",
        "--warmup_steps=2", "--log_interval=2", "--numerics_steps=5", "--repeats=2",
        "--max_repeats=2", "--threads=1", "--amp_level=O0", f"--output_dir={tmp_path / 'c'}",
    )  # fmt: skip
    script = ROOT / "examples/language/accelerated.py"
    result = run("-m", "accbench", "compare", *flags, f"--script={script}", script="-B")
    rows = json.loads((tmp_path / "c/report.json").read_text())["rows"]
    assert [row["numerics"]["verdict"] for row in rows] == ["trains the same"] * 2, result.stdout
