"""A container's user: without a name, a home, or folders that it can write."""

import shutil
from pathlib import Path

import pytest

from accbench.recording import records
from tests import containers
from tests.conftest import ROOT, TINY, end_of, of_kind
from tests.engine_params import XLA

FLAGS = (
    *TINY, "--max_steps=4", "--data=synthetic", "--eval_interval=0", "--save_interval=0",
    "--device=cpu", "--output_dir=run",
)  # fmt: skip
# Two products, whose graphs compile in less time than a convolution's.
SMALLEST = "--model=tests.nets:Autoencoder"
OWN_LOOP = ROOT / "tests/scripts/own_container_loop.py"


def train(engine: str, work: Path, *flags: str, **how):
    command = ("-m", "accbench", "run", f"--engine={engine}", *FLAGS, *flags)
    return containers.run(command, work, **how)


@pytest.fixture(scope="module")
def torch_bears_no_name(tmp_path_factory):
    """Skip where torch alone fails: it asks for the user's name to make an optimizer."""
    work = tmp_path_factory.mktemp("torch_alone")
    done = containers.run(["-c", "import torch; torch.optim.SGD([torch.ones(1)])"], work)
    if done.returncode:
        pytest.skip(f"torch alone: {done.stderr.splitlines()[-1]}")


def compile_cache(run_dir: Path) -> str:
    (first,) = of_kind(run_dir, records.RunRecord)
    return first.compile_cache


def test_a_user_without_a_name_trains_by_inductor(tmp_path):
    done = train("inductor", tmp_path, SMALLEST, HOME="/")  # docker's
    assert done.returncode == 0, done.stderr
    assert end_of(tmp_path / "run").num_steps == 4
    assert compile_cache(tmp_path / "run") == f"/tmp/torchinductor_uid{containers.UID}"
    assert {path.name for path in tmp_path.iterdir()} == {"run"}  # no folder named ~


def test_caches_are_in_the_run_s_folder_where_that_alone_can_be_written(tmp_path):
    """JAX's too, with a home and temporary folders that are read-only."""
    home = tmp_path / "home"
    home.mkdir()
    mounts = containers.read_only("/tmp", "/var/tmp", home)
    done = train("jax", tmp_path, SMALLEST, mounts=mounts, HOME=str(home))
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "run"
    assert compile_cache(run_dir).startswith(str(run_dir / "cache"))
    assert end_of(run_dir).num_steps == 4


@pytest.mark.usefixtures("torch_bears_no_name")
@pytest.mark.parametrize("engine", ["ddp", XLA])
def test_a_loop_of_one_s_own_trains(tmp_path, engine):
    done = containers.run([OWN_LOOP, engine, "run", 0], tmp_path, TMPDIR="/nowhere")
    assert done.returncode == 0, done.stderr
    assert end_of(tmp_path / "run").num_steps == 4


def test_too_little_shared_memory_is_named_and_the_remedy(images, tmp_path):
    shutil.copytree(images, tmp_path / "images")
    small = ["mount -t tmpfs -o size=300k,mode=1777 tmpfs /dev/shm"]
    done = train(
        "ddp", tmp_path, "--data=imagefolder:images", "--workers=1", "--image_size=128",
        mounts=small,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "/dev/shm has 0.3 MiB" in line
    assert "--workers 0" in line


@pytest.mark.usefixtures("torch_bears_no_name")
@pytest.mark.parametrize("size", ["300k", "4k"], ids=["for batches", "for locks"])
def test_a_loader_of_one_s_own_names_it_too(size, tmp_path):
    mounts = [f"mount -t tmpfs -o size={size},mode=1777 tmpfs /dev/shm"]
    done = containers.run([OWN_LOOP, "ddp", "run", 2], tmp_path, mounts=mounts)
    assert done.returncode == 1
    assert "/dev/shm has 0." in done.stderr
    assert "num_workers=0" in done.stderr
