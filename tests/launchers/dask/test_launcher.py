"""`--launcher dask` on a real cluster, on TLS, of which one folder of the client is hidden."""

import contextlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from accbench import cli
from accbench.recording import records
from tests.conftest import (
    HANG_S,
    ROOT,
    TINY,
    command,
    end_of,
    leave_to_fixture,
    of_kind,
    processes_of,
    run,
    wait_until,
)
from tests.signals import under_way

SMALL = (*TINY, "--nproc_per_node=2", "--data=synthetic")
LONG = (*SMALL, "--max_steps=1000000", "--epochs=100000", "--log_interval=20")
_HIDING = 'mount -t tmpfs tmpfs "$1" 2>/dev/null && touch "$2/hidden"; exec "$0" -m {} "$2"'.format(
    "tests.launchers.dask.clusters"
)


class Cluster(NamedTuple):
    flags: tuple[str, ...]
    hidden: Path
    """A folder of the client's that the cluster's machine lacks."""
    hides: bool


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster on TLS in a process of its own, which ends with the block."""
    hidden, of_cluster = folder / "hidden", folder / "cluster"
    hidden.mkdir()
    of_cluster.mkdir()
    shell = ["sh", "-c", _HIDING, sys.executable, str(hidden), str(of_cluster)]
    may_hide = subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    process = subprocess.Popen(
        [*(["unshare", "-m"] if may_hide else []), *(shell if may_hide else [
            sys.executable, "-m", "tests.launchers.dask.clusters", str(of_cluster)])],
        cwd=ROOT, stdin=subprocess.PIPE,
    )  # fmt: skip
    try:
        address = of_cluster / "address"
        wait_until(lambda: address.exists() or process.poll() is not None)
        assert process.poll() is None
        names = {"ca_file": "ca.pem", "cert": "cert.pem", "key": "key.pem"}
        flags = [f"--dask.tls_{name}={of_cluster / file}" for name, file in names.items()]
        yield Cluster(
            ("--launcher=dask", f"--scheduler={address.read_text()}", *flags),
            hidden, (of_cluster / "hidden").exists(),
        )  # fmt: skip
    finally:
        process.stdin.close()
        process.wait(HANG_S)


@pytest.fixture(scope="module")
def on_tls(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("dask")) as made:
        yield made


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["ddp", pytest.param("xla", marks=pytest.mark.xla)])
def test_a_resnet_trains_and_its_folder_is_as_of_any_run(on_tls, images, tmp_path, engine):
    folder = tmp_path / "run"
    flags = (*SMALL, f"--data=imagefolder:{images}", "--model=resnet10", f"--engine={engine}")
    done = run(*on_tls.flags, *flags, "--max_steps=4", f"--output_dir={folder}")
    assert done.returncode == 0, done.stderr
    assert f"done: 4 steps, 32 samples, records in {folder}" in done.stdout
    end = end_of(folder)
    assert (end.status, end.num_steps, end.num_samples) == ("ok", 4, 32)
    (header,) = of_kind(folder, records.RunRecord)
    assert (header.world_size, header.engine) == (2, engine)
    for rank in range(2):
        assert "done: 4 steps" in (folder / "logs" / f"rank{rank}.log").read_text()
    assert (folder / "checkpoints" / "step-000000004" / "tensors.safetensors").exists()


def losses_of(folder: Path) -> list[float | None]:
    """Of the second, the fourth and the sixth step."""
    losses = {w.first_step + w.num_steps: w.loss for w in of_kind(folder, records.WindowRecord)}
    return [losses[step] for step in (2, 4, 6)]


def test_a_folder_that_no_machine_shares_is_collected(on_tls):
    if not on_tls.hides:
        pytest.skip("mounting is not allowed here")
    folder = on_tls.hidden / "run"
    flags = (*SMALL, "--tensorboard=auto", "--save_steps=2", "--keep_checkpoints=1")
    done = run(*on_tls.flags, *flags, f"--output_dir={folder}")
    assert done.returncode == 0, done.stderr
    assert f"done: 6 steps, 48 samples, records in {folder}" in done.stdout
    assert end_of(folder).status == "ok"
    (header,) = of_kind(folder, records.RunRecord)
    assert header.task["output_dir"] == str(folder)
    for rank in range(2):
        assert "done: 6 steps" in (folder / "logs" / f"rank{rank}.log").read_text()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert checkpoint.name == "step-000000006"
    here = on_tls.hidden / "here"
    assert run(*SMALL, f"--output_dir={here}").returncode == 0
    assert losses_of(folder) == losses_of(here)
    refused = run(*on_tls.flags, *SMALL, "--resume=auto", f"--output_dir={folder}")
    assert refused.returncode == 2
    assert "--resume needs a run's folder that all machines share" in refused.stderr


@pytest.mark.soak
def test_a_file_that_the_client_cannot_write_ends_the_run(on_tls):
    if not on_tls.hides:
        pytest.skip("mounting is not allowed here")
    folder = on_tls.hidden / "refusing"
    folder.mkdir()
    (folder / "checkpoints").symlink_to(on_tls.hidden)
    flags = (*LONG, "--nproc_per_node=1", "--save_steps=2")
    done = run(*on_tls.flags, *flags, f"--output_dir={folder}")
    assert done.returncode == 1, done.stderr
    told = f"cannot write into {folder}: 'checkpoints/"
    assert told in done.stderr
    assert told in end_of(folder).error
    assert not processes_of(folder)


def test_a_stopped_run_saves_itself(on_tls, tmp_path):
    folder = tmp_path / "run"
    arguments = command(*on_tls.flags, *LONG, "--nproc_per_node=1", f"--output_dir={folder}")
    with under_way(folder, arguments, num_windows=2) as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 75, errors
    assert end_of(folder).status == "interrupted"
    assert list((folder / "checkpoints").iterdir())
    assert not processes_of(folder)


def test_nothing_goes_on_when_the_client_or_a_dask_worker_is_killed(on_tls, tmp_path):
    """And each time the cluster is used again, in the end by a run of which a rank fails."""
    folder = tmp_path / "client"
    flags = (*on_tls.flags, *LONG, "--save_interval=0")
    arguments = command(*flags, "--nproc_per_node=1", f"--output_dir={folder}")
    with under_way(folder, arguments, num_windows=2) as process:
        assert processes_of(folder)
        process.kill()
    wait_until(lambda: not processes_of(folder))

    folder = tmp_path / "worker"
    with under_way(folder, command(*flags, f"--output_dir={folder}"), num_windows=2) as process:
        (of_rank1,) = [p for p in processes_of(folder) if p.environ().get("RANK") == "1"]
        dask_worker = psutil.Process(of_rank1.ppid())
        keeper = dask_worker.parent()
        assert keeper is not None
        kept = {*keeper.children()} - {dask_worker}
        dask_worker.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1's Dask worker tls://127.0.0.1:" in errors
    assert "has left the cluster" in errors
    assert "has left the cluster" in end_of(folder).error
    wait_until(lambda: not processes_of(folder))

    folder = tmp_path / "again"
    flags = (*on_tls.flags, *SMALL, "--model=tests.nets:raises_on_rank1")
    tries = []

    def is_taken() -> bool:
        """Whether there were enough Dask workers, one of which starts again."""
        tries.append(run(*flags, f"--output_dir={folder}"))
        return tries[-1].returncode != 2

    wait_until(is_taken)
    leave_to_fixture({*keeper.children()} - kept)
    done = tries[-1]
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "accbench: rank 1 failed: ValueError: planted fault" in done.stderr
    assert end_of(folder).error == "rank 1 failed: ValueError: planted fault"
    assert end_of(folder).num_steps == 2


@pytest.mark.soak
def test_engines_are_compared_on_a_cluster(on_tls, tmp_path):
    flags = (*TINY, "--data=synthetic", "--repeats=2", "--numerics_steps=0")
    engines = "--engines=ddp,ddp:channels_last=false"
    done = run(
        "tests.launchers.dask.compared", *on_tls.flags, *flags, engines,
        f"--output_dir={tmp_path / 'comparison'}", script="-m",
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # two rounds may judge nothing
    folders = [path.parent for path in (tmp_path / "comparison").rglob("records.jsonl")]
    headers = [of_kind(folder, records.RunRecord)[0] for folder in folders]
    assert [header.task["launcher"] for header in headers] == ["dask"] * 4
    ends = [of_kind(folder, records.EndRecord)[-1] for folder in folders]
    assert [end.status for end in ends] == ["ok"] * 4


REFUSED = [
    ([], "--launcher dask needs one of --scheduler tls://HOST:PORT and --scheduler_file FILE"),
    (["--scheduler=tcp://10.9.8.7:8786"], "beyond this machine Dask has to be on TLS"),
    (["--scheduler=10.9.8.7:8786"], "beyond this machine Dask has to be on TLS"),
    (["--scheduler_file=absent.json"], "--scheduler_file absent.json: it is not a file of a Dask"),
    (["--scheduler=tls://10.9.8.7:1", "--dask.tls_cert=absent.pem"], "cannot read absent.pem"),
]


@pytest.mark.parametrize(("flags", "told"), REFUSED)
def test_what_cannot_be_is_refused_in_a_line(capsys, flags, told):
    assert cli.run(["--launcher=dask", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_too_few_workers_and_what_a_machine_lacks_are_refused(on_tls, capsys, tmp_path):
    output = f"--output_dir={tmp_path / 'run'}"
    for flags, told in (
        (["--nproc_per_node=3"], "the cluster has 2 Dask workers, but 3 are needed"),
        (["--data=imagefolder:/absent"], "there is no folder /absent (on "),
    ):
        assert cli.run([*on_tls.flags, *flags, output]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line
    assert not (tmp_path / "run").exists()


def test_without_dask_a_command_to_install_it_is_told(capsys, monkeypatch):
    # Stands in for an environment without the package.
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "distributed" else found(name)
    )
    assert cli.run(["--launcher=dask", "--scheduler=tls://h:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--launcher dask needs distributed, which is not installed: " in line
    assert "[dask]" in line
