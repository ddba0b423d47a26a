"""A job of a real Slurm of one node trains like a run here, and is requeued from its checkpoint."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from accbench import cli, config, resolving
from accbench.distributed import slurm_variables
from accbench.distributed.slurm_variables import as_torchrun, tasks_per_node
from accbench.errors import RequestError
from accbench.launchers import slurm as slurm_launcher
from accbench.launchers.slurm import job
from accbench.recording import records
from accbench.system import folders
from accbench.training import checkpoint_file, checkpoints
from tests.conftest import (
    HANG_S,
    ROOT,
    TINY,
    command,
    end_of,
    free_port,
    of_kind,
    python,
    run,
    start_python,
    wait_until,
)
from tests.launchers.slurm import cluster
from tests.training.test_checkpoints import checkpoint

SYNTHETIC = (*TINY, "--data=synthetic", "--device=cpu", "--nproc_per_node=2")
FLAGS = (*SYNTHETIC, "--launcher=slurm")
OWN_SCRIPT = ROOT / "tests/scripts/own_script.py"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which Slurm's commands find it."""
    if not cluster.is_installed():
        pytest.skip("needs root, and Debian's slurm-wlm and munge")
    with cluster.running(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def launched(environment: dict[str, str], *flags: object) -> "subprocess.CompletedProcess[str]":
    """Run the launcher, which submits a run, to its end."""
    return python(*command(*FLAGS, *flags)[1:], SLURM_CONF=environment["SLURM_CONF"])


def submit(environment: dict[str, str], *flags: object) -> str:
    """Submit a run; the job's number."""
    done = launched(environment, *flags)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert line.startswith("submitted job ")
    return line.split(";")[0].removeprefix("submitted job ")


def asked(environment: dict[str, str], *words: str) -> str:
    return subprocess.run(words, env=environment, capture_output=True, text=True).stdout


def state_at_end(environment: dict[str, str], job: str) -> str:
    """Wait for the job to be over; how it ended, as Slurm says."""
    wait_until(lambda: not asked(environment, "squeue", "-h", "-j", job).strip())
    shown = asked(environment, "scontrol", "show", "job", job)
    return shown.split("JobState=")[1].split()[0]


def windows(run_dir: Path) -> int:
    path = run_dir / "records.jsonl"
    return path.read_text().count('"kind": "window"') if path.exists() else 0


def losses_of(run_dir: Path) -> list[tuple[int, float | None]]:
    """(step, loss) of each window."""
    return [(w.first_step, w.loss) for w in of_kind(run_dir, records.WindowRecord)]


def test_a_job_that_is_requeued_goes_on_and_trains_as_a_run_here(slurm, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    steps = ("--max_steps=20", "--warmup_steps=1", "--log_interval=1")
    job = submit(slurm, *steps, "--model=tests.nets:slow", f"--output_dir={there}")
    assert run(*SYNTHETIC, *steps, f"--output_dir={here}").returncode == 0
    wait_until(lambda: windows(there) >= 2)
    asked(slurm, "scontrol", "requeue", job)
    assert state_at_end(slurm, job) == "COMPLETED"
    (resumed,) = of_kind(there, records.ResumeRecord)
    assert 2 <= resumed.step < 20
    assert losses_of(there) == losses_of(here)
    assert len(losses_of(there)) == 20
    end = of_kind(there, records.EndRecord)[-1]
    assert (end.status, end.num_steps) == ("ok", 20)
    assert {header.world_size for header in of_kind(there, records.RunRecord)} == {2}
    assert {path.name for path in (there / "logs").iterdir()} == {
        "rank0.log", "rank1.log", f"slurm-{job}.log"
    }  # fmt: skip


def test_a_workers_error_ends_the_record_and_the_job(slurm, tmp_path):
    run_dir = tmp_path / "a run"
    words = "--slurm.sbatch_args=--comment='it\\s two \"words\"' --qos=normal"
    job = submit(slurm, "--model=tests.nets:raises_on_rank1", words, f"--output_dir={run_dir}")
    assert state_at_end(slurm, job) == "FAILED"
    assert 'Comment=it\\s two "words"' in asked(slurm, "scontrol", "show", "job", job)
    assert end_of(run_dir).error == "rank 1 failed: ValueError: planted fault"
    assert "planted fault" in (run_dir / "logs" / f"slurm-{job}.log").read_text()


def test_what_sbatch_refuses_is_told(slurm, tmp_path):
    done = launched(slurm, "--slurm.partition=nowhere", f"--output_dir={tmp_path / 'run'}")
    assert done.returncode == 2
    assert "sbatch refused" in done.stderr
    assert "nowhere" in done.stderr


def test_dry_run_prints_the_script_and_makes_nothing(tmp_path, capsys):
    folder = tmp_path / "a run"
    words = r"--mem=64G --qos='low prio' --comment=say\"so\""
    flags = ("--slurm.time=4:00:00", f"--slurm.sbatch_args={words}", "--nnodes=3")
    assert cli.run([*FLAGS, *flags, "--dry_run", f"--output_dir={folder}"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n")
    for line in ("--nodes=3", "--ntasks-per-node=2", "--time=4:00:00", "--signal=TERM@120",
                 "--mem=64G", "--requeue", f'--output="{folder}/logs/slurm-%j.log"',
                 '"--qos=low prio"', r'"--comment=say\"so\""'):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert "--gpus" not in script
    assert not folder.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--launcher=slurm", "--device=auto"), "needs --device cuda or --device cpu"),
        (("--launcher=slurm", "--nnodes=1:4"), "must be a number"),
        (("--launcher=slurm", "--max_restarts=1"), "requeues by itself"),
        (("--launcher=slurm", "--slurm.sbatch_args='"), "No closing quotation"),
        (("--launcher=slurm",), "needs Slurm's sbatch"),
        (("--dry_run",), "--dry_run is not for --launcher local"),
    ],
)
def test_wrong_flags_get_a_line(flags, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.run([*SYNTHETIC, *flags, f"--output_dir={tmp_path / 'run'}"]) == 2
    errors = capsys.readouterr().err
    assert said in errors


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Have Slurm's commands be shell scripts, which are given as text."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def install(**commands: str) -> None:
        for name, text in commands.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)

    return install


def test_a_job_finds_its_checkpoint_when_it_starts(fake_slurm, tmp_path, capsys, monkeypatch):
    fake_slurm(sbatch="echo 7", srun=f'echo "$SRUN_CPUS_PER_TASK" >>{tmp_path}/cpus')
    run_dir = tmp_path / "run"
    flags = [*FLAGS, "--nproc_per_node=1", "--resume=auto", f"--output_dir={run_dir}"]
    assert cli.run(flags) == 0
    assert "submitted job 7" in capsys.readouterr().out
    _, command_line = (run_dir / "job.sh").read_text().split("exec ", 1)
    words = shlex.split(command_line)
    monkeypatch.setattr(sys, "argv", words[words.index(str(run_dir)) - 1 :])
    variables = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "3"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    saved = checkpoint(4)
    facts = dataclasses.replace(saved.facts, model="tests.nets:tiny")
    newest = None
    # Two jobs that are submitted before any checkpoint is there: the first makes one.
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            job.main()
        assert ended.value.code == 0
        assert json.loads((run_dir / "config.json").read_text())["resume"] == newest
        checkpoint_file.write(
            checkpoints.folder_of(run_dir, 4), dataclasses.replace(saved, facts=facts)
        )
        newest = str(checkpoints.folder_of(run_dir, 4))
        monkeypatch.setenv("SRUN_CPUS_PER_TASK", "2")  # by the user
    assert (tmp_path / "cpus").read_text() == "3\n2\n"
    # A second one at the same time leaves the record to the first.
    with folders.lock(run_dir), pytest.raises(SystemExit) as ended:
        job.main()
    assert ended.value.code == 2
    assert "another process is at work" in capsys.readouterr().err
    assert not (run_dir / "records.jsonl").exists()


def test_a_squeue_that_fails_is_asked_again(fake_slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_launcher, "_POLL_S", 0)
    task = resolving.resolve(config.parse([*SYNTHETIC, f"--output_dir={tmp_path}"]))
    task = dataclasses.replace(task, options={"slurm": slurm_launcher.Launcher.Options()})
    launcher = slurm_launcher.Launcher()
    launcher.attached = True
    asked, record = tmp_path / "asked", tmp_path / "records.jsonl"
    end = '{"kind": "end", "status": "ok"}'
    unknown = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"
    no_answer = "echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1"
    fake_slurm(
        sbatch="echo 7", scancel=f"echo cancelled >>{asked}",
        squeue=f"""echo >>{asked}
case $(wc -l <{asked}) in 1) echo RUNNING;; 2) {no_answer};; 3) echo RUNNING;;
*) echo '{end}' >{record}; {unknown};; esac""",
    )  # fmt: skip
    assert launcher.launch(task, []) is None
    assert asked.read_text() == "\n" * 4
    monkeypatch.setattr(slurm_launcher, "_NO_ANSWER_S", 0)
    fake_slurm(squeue=no_answer)
    failure = launcher.launch(task, [])
    assert failure.exit_status == 2
    assert failure.is_recorded  # by the job, if it still runs
    assert "Unable to contact slurm controller; scancel 7 if it still runs" in failure.error
    assert asked.read_text().endswith("cancelled\n")


def test_a_job_that_wrote_no_record_is_told(fake_slurm, tmp_path):
    fake_slurm(squeue="echo Invalid job id specified >&2; exit 1")
    failure = slurm_launcher._wait_for_job("7", tmp_path)
    assert failure.error.startswith("job 7: it ended before it wrote a record; see its log in ")


def test_a_killed_worker_comes_before_those_that_lost_it(tmp_path):
    error_files = {rank: tmp_path / f"{rank}.json" for rank in range(2)}
    error = {"rank": 1, "name": "RuntimeError", "message": "lost", "traceback": "", "unix_time": 1}
    error_files[1].write_text(json.dumps(error))
    for status, was_told, said in (
        (137, False, "a worker was killed by SIGKILL (srun's status 137)"),
        (137, True, "rank 1 failed: RuntimeError: lost"),
        (143, False, "rank 1 failed: RuntimeError: lost"),
        (1, False, "rank 1 failed: RuntimeError: lost"),
    ):
        assert job._first_failure(status, {1: 1}, error_files, was_told).error.startswith(said)
    assert "a worker ended (srun's status 255)" in job._first_failure(255, {}, {}, False).error


def test_a_tasks_place_is_read_from_slurms_variables():
    """Three nodes, as srun(1) describes what it sets."""
    assert tasks_per_node("2(x2),1") == [2, 2, 1]
    told = {
        "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
        "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    }  # fmt: skip
    assert as_torchrun(told) == {
        "RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "1"
    }  # fmt: skip
    with pytest.raises(ValueError, match="not as Slurm counts"):
        tasks_per_node("2(x)")


def srun(slurm, script, *arguments):
    """`srun -n2 python SCRIPT ...` as a person types it; nothing of accbench's launches it."""
    return subprocess.run(
        ["srun", "-n2", "--overcommit", sys.executable, script, *map(str, arguments)],
        cwd=ROOT, env={**slurm, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANG_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_tasks_of_a_plain_srun_are_one_run(slurm, tmp_path):
    flags = [flag for flag in SYNTHETIC if "nproc_per_node" not in flag]
    done = srun(slurm, "main.py", *flags, f"--output_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert of_kind(tmp_path / "run", records.RunRecord)[0].world_size == 2
    assert end_of(tmp_path / "run").status == "ok"


SCRIPT_WORDS = ("nothing", "threads=1", "tensorboard=off", "max_steps=4")


@pytest.mark.soak
def test_so_are_those_of_a_script_of_ones_own(slurm, tmp_path):
    done = srun(slurm, OWN_SCRIPT, *SCRIPT_WORDS, f"output_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert end_of(tmp_path / "run").num_samples == 4 * 4 * 2


# What srun(1) says of a task's environment; the names and forms of Slurm 22.05.
TASK = {
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "here",
}  # fmt: skip


def test_a_script_of_ones_own_knows_its_task_by_its_environment(tmp_path):
    """Which is here that of srun's tasks, without Slurm."""
    of_both = {**TASK, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    words = ("-m", "tests.started", "{}", OWN_SCRIPT, *SCRIPT_WORDS, f"output_dir={tmp_path}/run")
    tasks = [
        start_python(*words, **{**of_both, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        for rank in "01"
    ]
    for task in tasks:
        try:
            status = task.wait(HANG_S)
        finally:
            _, errors = task.end()
        assert status == 0, errors
    assert of_kind(tmp_path / "run", records.RunRecord)[0].world_size == 2
    assert end_of(tmp_path / "run").num_samples == 4 * 4 * 2


@pytest.mark.parametrize(("variables", "expected"), [
    (TASK, ("2", "127.0.0.1", "15120")),
    ({**TASK, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "b,a",
      "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, ("2", "b", "15120")),
    # A batch script, an interactive shell of one task, torchrun within a task.
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}, (None, None, None)),
    ({**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, (None, None, None)),
    ({**TASK, "RANK": "0", "WORLD_SIZE": "4"}, ("4", None, None)),
    ({"OMPI_COMM_WORLD_SIZE": "1"}, (None, None, None)),
])  # fmt: skip
def test_whose_task_a_process_is(variables, expected, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(os, "environ", dict(variables))
        slurm_variables.adopt()
        names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        assert tuple(os.environ.get(name) for name in names) == expected


@pytest.mark.parametrize(("variables", "told"), [
    ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun started 4 processes"),
    ({**TASK, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]"}, "set MASTER_ADDR"),
])  # fmt: skip
def test_what_would_be_separate_runs_is_refused(variables, told, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(os, "environ", {**variables, "PATH": ""})
        with pytest.raises(RequestError, match=re.escape(told)):
            slurm_variables.adopt()


def test_torch_distributed_launch_starts_a_run(tmp_path):
    """It hands a worker --local-rank beside the environment."""
    flags = [flag for flag in SYNTHETIC if "nproc_per_node" not in flag]
    launch = ("-m", "tests.all_forked", "-m", "torch.distributed.launch", "--nproc_per_node=2")
    done = python(
        *launch, f"--master_port={free_port()}", "main.py", *flags,
        f"--output_dir={tmp_path / 'run'}", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert of_kind(tmp_path / "run", records.RunRecord)[0].world_size == 2
