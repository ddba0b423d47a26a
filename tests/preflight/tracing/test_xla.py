"""A step of engine xla, traced for GPUs that are not here."""

import os
import subprocess
import sys

import pytest

from accbench.preflight.tracing import programs, xla
from tests.conftest import HANG_S, ROOT
from tests.preflight import running

pytest.importorskip("torch_xla")
pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("as_users_have_it")]


def test_eight_gpus_reduce_beside_the_backward_pass() -> None:
    flags = ("--engine=xla", "--model=resnet10", "--image_size=64", "--batch_size=16",
             "--gpu=a100_80")  # fmt: skip
    found = running.result_of(*flags, "--nproc_per_node=8", "--xla.bucket_mib=3")
    assert found["num_gpus"] == 8
    reduction = found["reduction"]
    # every gradient, the loss scale's none: 5.4 million parameters of four bytes
    assert reduction["bytes"] == pytest.approx(4 * found["model"]["num_parameters"], rel=1e-4)
    assert len(reduction["all_reduces"]) > 4
    assert reduction["started_before_last_product"] > 0.9


def test_all_ranks_have_one_program(tmp_path) -> None:
    """Byte for byte, of dropout, mixup and a loss scale: or they would wait for each other."""
    flags = ("--model=tests.nets:dropping", "--image_size=32", "--batch_size=8", "--engine=xla",
             "--device=cuda", "--amp_level=O1", "--amp_dtype=float16", "--data=synthetic",
             "--nproc_per_node=2", "--mixup=0.2")  # fmt: skip
    found = []
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c",
             "import sys; from accbench.preflight.tracing import xla; "
             f"sys.exit(xla.main(sys.argv[1:], rank={rank}))", str(folder), *flags],
            cwd=ROOT, env={**os.environ, **xla.environment(folder, 2, "9.0")}, text=True,
            capture_output=True, timeout=HANG_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(programs.read(folder))
    assert found[0][0] == "hlo"
    assert len(found[0][1]) > 10_000
    assert found[0] == found[1]


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_a_step_that_is_recorded_compiles_for_gpus_as_well(num_gpus) -> None:
    flags = ("--model=tests.nets:tiny", "--batch_size=8", "--image_size=32", "--xla.replay=on")
    found = running.result_of("--engine=xla", *flags, f"--nproc_per_node={num_gpus}")
    assert found["host_transfers"] == []
    assert found["step"]["launches"] > 20
    assert (found["reduction"] is not None) == (num_gpus > 1)


def test_a_step_that_asks_the_host_is_told_with_its_place_in_the_model() -> None:
    flags = ("--engine=xla", "--model=tests.nets:asks_the_host", "--batch_size=8")
    status, _, err = running.completed(*flags)
    assert status == 2
    assert "a value is needed on the host" in err
    assert "tests/nets/" in err
    assert "if logits.max() > 100" in err
    assert err.count("\n") == 1


def test_a_backward_pass_that_fails_is_told_with_its_place_in_the_model() -> None:
    flags = ("--engine=xla", "--model=tests.nets:raising", "--batch_size=8")
    status, _, err = running.completed(*flags)
    assert (status, err.count("\n")) == (2, 1), err
    assert "ValueError: no way back from here" in err
    assert "tests/nets/" in err


def test_a_module_is_read_once_its_file_is_complete() -> None:
    module = b"program"
    hlo_proto = b"\x0a\x07" + module + b"\x12\x02ab" + b"\x18\x96\x01"
    assert xla.extract_module(hlo_proto) == module
    assert [xla.extract_module(hlo_proto[:size]) for size in (4, 10, 12, 14)] == [None] * 4
