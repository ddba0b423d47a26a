"""`accbench compare` as a user runs it, on tiny nets."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from accbench import cli
from accbench.comparing import rounds
from accbench.comparing.order import round_orders
from accbench.comparing.plan import parse
from accbench.errors import RequestError
from accbench.report import analysis, comparison, publish
from accbench.report import run as runs
from benchmarks import planted
from tests.conftest import HANG_S, ROOT, TINY, processes_of, python, wait_until
from tests.engine_params import NEEDS_XLA
from tests.report import fakes
from tests.signals import Signalled

# Other tests beside these would disturb their rounds.
FAST = (*TINY, "--data=synthetic", "--repeats=2", "--device=cpu", "--no-repeat_disturbed")
COMMAND = ("-m", "accbench", "compare")
FORKED = ("-m", "tests.all_forked", *COMMAND)


def compare(folder, *flags, plugins=None) -> tuple[int, str, str]:
    """Compare to the end, all forked; the exit status, and what was said as output and errors."""
    path = os.pathsep.join(map(str, filter(None, (plugins, ROOT))))
    done = python(*FORKED, *FAST, f"--output_dir={folder}", *flags, PYTHONPATH=path)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def refused(monkeypatch, capsys) -> Callable[..., str]:
    """A function of flags: the errors of a comparison that they are refused for."""
    # Nothing is launched, and the server would import torch all the same.
    monkeypatch.setattr("accbench.comparing.run.start_fork_server", lambda: None)

    def refuse(*flags: str) -> str:
        assert cli.main(["compare", *flags]) == 2
        return capsys.readouterr().err

    return refuse


ONE_RUN = """
import sys
from pathlib import Path
from accbench.comparing.run import JobProcess, ended_on_interrupt
if __name__ == "__main__":
    flags = ["--model=no_such", "--data=synthetic", "--device=cpu"]
    process = JobProcess("run", "", flags, Path("../run"), Path("../log"), 0)
    with ended_on_interrupt([process]) as stop:
        process.start(stop)
        sys.exit(process.join())
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_file_here_does_not_hide_a_module_of_pythons(tmp_path):
    """One that multiprocessing imports, with the command's own file elsewhere."""
    (tmp_path / "here").mkdir()
    for name in ("random", "grp"):
        (tmp_path / "here" / f"{name}.py").write_text("raise SystemExit('of the user')")
    (tmp_path / "one_run").write_text(ONE_RUN)
    done = subprocess.run(
        [sys.executable, tmp_path / "one_run"], cwd=tmp_path / "here",
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "")
    assert "unknown model 'no_such'" in (tmp_path / "log").read_text()


# Each begins with the same lines.
@pytest.mark.parametrize(
    "module",
    [pytest.param("comparing.numerics_worker_process", marks=pytest.mark.soak),
     pytest.param("preflight.child", marks=pytest.mark.soak), "training.worker_process"],
)  # fmt: skip
def test_file_here_does_not_hide_a_module_from_a_worker(tmp_path, module):
    (tmp_path / "random.py").write_text("raise SystemExit('of the user')")
    what = {
        "comparing.numerics_worker_process": ("reference", "1", "--model=no_such"),
        "preflight.child": (str(os.getpid()), "accbench.preflight.tracing.xla", "x", "--model=x"),
        "training.worker_process": ("--model=no_such",),
    }[module]
    done = subprocess.run(
        [sys.executable, "-m", f"accbench.{module}", *what], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert "of the user" not in done.stdout + done.stderr
    assert "unknown model" in done.stdout + done.stderr


def rows_of(folder) -> dict:
    return {row["name"]: row for row in json.loads((folder / "report.json").read_text())["rows"]}


def test_rows_reports_and_an_engine_that_crashes(tmp_path):
    """Variants are rows; what one engine cannot do does not stop the others."""
    plugins = planted.install(tmp_path / "plugins")
    folder = tmp_path / "c"
    # First, so that it is not in need of it that the numerics pass makes its reference.
    flags = ("--engines=crashes,ddp,ddp:channels_last=false", "--baseline=ddp")
    flags = (
        *flags,
        "--numerics_steps=2",
        "--order_seed=6",
        "--fail_if=crashes slower, crashes failed",
    )
    status, out, err = compare(folder, *flags, plugins=plugins)
    assert status == 3, err
    (line,) = err.splitlines()
    assert "--fail_if 'crashes failed' holds: crashes is failed (" in line
    assert "planted crash" in line
    rows = rows_of(folder)
    assert list(rows) == ["crashes", "ddp", "ddp:channels_last=false"]
    assert rows["crashes"]["verdict"] == "failed"
    assert "planted crash" in rows["crashes"]["reasons"][0]
    assert rows["ddp:channels_last=false"]["rounds_ok"] == 2
    assert rows["ddp:channels_last=false"]["speedup"] > 0
    assert rows["ddp:channels_last=false"]["numerics"]["verdict"] == "trains the same"
    run = comparison.read(folder).rows[2].rounds[0]
    assert run.header.task["ddp"]["channels_last"] is False
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert "planted crash" in (folder / "report.md").read_text()
    # Measured in turn, not one engine after the other, in the order that was asked for.
    lines = [line for line in out.splitlines() if line.startswith("round")]
    assert [line.split()[1] for line in lines] == ["1/2", "1/2", "1/2", "2/2", "2/2"]
    first, second = round_orders(list(rows), 2, 6)
    second.remove("crashes")  # once is enough
    assert [line.split()[2].rstrip(":") for line in lines] == [*first, *second]
    assert "planted crash" in next(line for line in lines if "crashes" in line)
    assert "--order_seed 6" in out
    # Rows that are plain ddp are checked once, by the passes that give the noise.
    assert "numerics  ddp, as plain ddp: 2 steps" in out
    assert "numerics  ddp:channels_last=false, as plain ddp, other layout: 2 steps" in out
    passes = comparison.read(folder)
    assert {r.phase for r in passes.floors[0].numerics} >= {"step", "free", "noise"}
    assert not any(r.phase.startswith("noise") for r in passes.rows[1].numerics.numerics)


def test_a_baseline_that_crashes_ends_the_comparison(tmp_path):
    plugins = planted.install(tmp_path / "plugins")
    flags = ("--engines=crashes,ddp", "--numerics_steps=2")
    status, out, err = compare(tmp_path / "c", *flags, plugins=plugins)
    assert status == 1, err
    assert "crashes, the baseline, failed: nothing can be held against it" in out
    assert "round 2" not in out
    assert "numerics  float64" not in out
    reasons = rows_of(tmp_path / "c")["ddp"]["reasons"]
    assert "round 1 of crashes failed" in reasons[0]
    assert "planted crash" in reasons[0]


def test_interrupted_comparison_goes_on_where_it_stopped(tmp_path, refused):
    folder = tmp_path / "c"
    flags = ("--engines=ddp,ddp", "--numerics_steps=0")
    process = Signalled([*FORKED, *FAST, f"--output_dir={folder}", *flags])
    first = folder / "rounds" / "01" / "ddp" / "records.jsonl"
    deadline = time.monotonic() + HANG_S
    while not (first.exists() and '"kind": "device"' in first.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(HANG_S)
    assert process.returncode == 130
    assert f"--output_dir {folder}" in err
    assert "Traceback" not in err
    kept = first.read_text()
    order_seed = comparison.ComparisonPlan.read(folder).order_seed
    assert f"--order_seed {order_seed}\n" in out
    status, out, err = compare(folder, *flags, "--format=json")
    assert json.loads(out) == json.loads((folder / "report.json").read_text())
    verdicts = {row["verdict"] for row in rows_of(folder).values()}
    assert status == int("not valid" in verdicts), err
    assert f"wrote {folder / 'report.html'}" in err
    assert first.read_text() == kept, "a run that had ended well was repeated"
    assert {row["rounds_ok"] for row in rows_of(folder).values()} == {2}
    assert list(rows_of(folder)) == ["ddp", "ddp#2"]
    # The order that was drawn is kept, and is in the report.
    assert comparison.ComparisonPlan.read(folder).order_seed == order_seed
    assert f"--order_seed {order_seed}\n" in (folder / "report.md").read_text()

    for other in ("--min_effect=0.5", f"--order_seed={order_seed + 1}"):
        assert "other settings" in refused(*FAST, f"--output_dir={folder}", *flags, other)


PRESSED = """
import os, signal
from accbench.comparing import run
from multiprocessing import forkserver
run._PRELOADED.clear()  # nothing is forked from it
def pressed():
    os.kill(os.getpid(), signal.SIGINT)
    return ensure_running()
ensure_running, forkserver.ensure_running = forkserver.ensure_running, pressed
for _ in range(2):
    try:
        run.start_fork_server()
    except KeyboardInterrupt:
        print("came")
assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""


def test_ctrl_c_while_the_fork_server_is_looked_after_is_not_lost():
    done = subprocess.run(
        [sys.executable, "-c", PRESSED], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "came\n" * 2, "")


def test_an_engine_that_does_not_learn_is_found_by_its_losses(tmp_path, images):
    """In two rounds already; ddp beside itself is not."""
    folder = tmp_path / "c"
    flags = ("--engines=ddp,ddp,frozen", "--numerics_steps=0", "--no-input_round", "--seed=5")
    learning = (f"--data=mock:{images}", "--batch_size=16", "--max_steps=60", "--lr=0.03")
    plugins = planted.install(tmp_path / "plugins")
    status, _, err = compare(folder, *flags, *learning, plugins=plugins)
    assert status == 1, err
    rows = rows_of(folder)
    assert "frozen: losses part from the baseline's: " in " ".join(rows["frozen"]["reasons"])
    assert rows["frozen"]["verdict"] == "not valid"
    assert "losses" not in " ".join(rows["ddp#2"]["reasons"])
    # A seed a round, the same for all rows.
    found = comparison.read(folder).rows
    seeds = [[run.header.task["seed"] for run in row.rounds] for row in found]
    assert seeds == [[5, 6]] * 3
    assert found[0].rounds[0].windows[0].mean_loss != found[0].rounds[1].windows[0].mean_loss


def lines_below(pid: int) -> list[str]:
    """The command lines of all processes below this one."""
    lines = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            lines.append(" ".join(process.cmdline()))
    return lines


def write_all_runs_but_the_last(folder: Path, flags: Sequence[str]) -> None:
    """Write made-up runs, so that a comparison with these flags has one left to make."""
    with rounds.claim(parse([*FAST, *flags], "accbench compare").plan, str(folder)):
        plan = comparison.ComparisonPlan.read(folder)
        orders = round_orders(plan.rows, plan.repeats, plan.order_seed)
        *made, _ = [(number, row) for number, order in enumerate(orders, 1) for row in order]
        for number, row in made:
            fakes.write_run(comparison.round_folder(folder, number, row), fakes.run("ddp", number))


def test_killed_comparison_leaves_no_process_and_another_goes_on(
    images, tmp_path, monkeypatch, refused
):
    folder = tmp_path / "two words, #1: ☃ 🙂"
    flags = ("--engines=ddp,ddp", "--numerics_steps=0", "--no-input_round", "--workers=1",
             f"--data=mock:{images}", "--model=tests.nets:slow")  # fmt: skip
    write_all_runs_but_the_last(folder, flags)
    with monkeypatch.context() as patch:
        patch.setenv("SLOW_NET_S", "600")
        first = subprocess.Popen(  # as anyone starts it, processes of its own and all
            [sys.executable, *COMMAND, *FAST, f"--output_dir={folder}", *flags], cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
    begun: list[psutil.Process] = []
    try:
        wait_until(lambda: any("spawn_main" in line for line in lines_below(first.pid)))
        # Its fork server, the launcher, a worker and what loads for it.
        begun = psutil.Process(first.pid).children(recursive=True)
        err = refused(*FAST, f"--output_dir={folder}", *flags)
        assert f"another process is at work in {folder}" in err
        assert len(err.splitlines()) == 1
    finally:
        first.kill()
        _, alive = psutil.wait_procs(begun, timeout=30)
        for process in alive:
            process.kill()
        first.communicate()
    assert not alive
    assert not processes_of(folder)
    status, out, err = compare(folder, *flags)
    assert status in (0, 1), err  # two rounds may judge nothing
    assert out.count("round 2/2") == 1, "more than the last run was made"
    assert {row["rounds_ok"] for row in rows_of(folder).values()} == {2}


@pytest.mark.xla
@NEEDS_XLA
def test_a_disturbed_round_is_measured_again_once_and_named(tmp_path, monkeypatch):
    """By what was seen of the machine; a machine that is always busy repeats nothing for long."""
    plan = parse([*FAST, "--engines=ddp,xla", "--numerics_steps=0", "--repeats=4",
                  "--order_seed=1", "--repeat_disturbed", "--no-alternate_windows"],
                 "accbench compare").plan  # fmt: skip
    plan = dataclasses.replace(plan, looks_for_far=False)  # which would decide after two
    shares: dict[tuple[int, str], list[float]] = {(2, "xla"): [0.4, 0.0], (3, "ddp"): [0.4, 0.3]}
    order: list[tuple[int, str]] = []

    def measured(job, cache):
        name = job.row.folder
        order.append((job.number, name))
        share = shares.get((job.number, name), [usual]).pop(0)
        found = [
            dataclasses.replace(record, other_cpu_share=share) if hasattr(record, "wall_s") and
            hasattr(record, "lr") else record
            for record in fakes.run(name, job.number)
        ]  # fmt: skip
        fakes.write_run(job.folder, found)
        (job.folder.parent / f"{name}.log").write_text("")
        return runs.read(job.folder)

    monkeypatch.setattr(rounds, "run", measured)
    usual, folder = 0.02, tmp_path / "c"
    console = Console(file=io.StringIO(), width=200)
    with rounds.claim(plan, str(folder)):
        rounds.measure(plan, folder, console)
    told = console.file.getvalue()
    assert "round 2/4  xla: repeated, as others used 40% of the machine" in told
    assert "xla is decided after 3 rounds" in told
    # Made-up runs of 20 s; of ddp three are left, and xla's first is all compiling.
    assert told.startswith("how long it takes is told after the first round")
    assert "about 1 min left after round 1" in told
    assert [order.count(which) for which in ((2, "xla"), (3, "ddp"), (1, "ddp"))] == [2, 2, 1]
    ddp, xla = analysis.judge(comparison.read(folder)).rows
    assert xla.repeated_rounds == (
        analysis.DisturbedRound(2, "others used 40% of the machine in 3 of 3 windows"),
    )
    assert [what.number for what in (*ddp.repeated_rounds, *ddp.disturbed_rounds)] == [3, 3]
    page = publish.render([comparison.read(folder)], "md")
    assert "round 2 of xla was repeated: others used 40% of the machine" in page
    assert "ddp: 1 of 3 rounds stand though disturbed; in round 3 others used 30%" in page

    order.clear()
    shares.clear()
    usual, folder = 0.4, tmp_path / "busy"
    with rounds.claim(plan, str(folder)):
        rounds.measure(plan, folder, Console(quiet=True))
    assert len(order) - len(set(order)) == 2 < plan.repeat_rule.max_repeats


def test_two_comparisons_in_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = parse([*FAST, "--engines=ddp,ddp"], "accbench compare").plan
    # Stands in for another process that makes the folder right after one has looked.
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with rounds.claim(plan, None) as first, rounds.claim(plan, None) as second:
        assert first != second


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engines=ddp"], "two or more"),
        (["--engines=ddp,dpd"], "unknown engine 'dpd'; there are: ddp, inductor"),
        (["--engines=ddp,ddp:channels=1"], "ddp.channels"),
        (["--engines=ddp,ddp:channels_last"], "not of the form option=value"),
        (["--engines=ddp,ddp:channels_last={"], "--ddp.channels_last is either on or off, not '{'"),
        (["--synthetic.num_batches=0"], "--synthetic.num_batches must be at least 1"),
        (["--engines=ddp,xla", "--baseline=eager"], "none of the rows: ddp, xla"),
        (["--repeats=1"], "--repeats must be at least 2"),
        (["--max_minutes=0"], "--max_minutes must be more than 0"),
        (["--repeats=8", "--max_repeats=7"], "--max_repeats 7 is less than --repeats 8"),
        (["--repeats=3", "--max_repeats=7"], "looks begin with --repeats 4: leave it out"),
        (["--quick", "--max_repeats=7"], "--quick looks once, at its end"),
        (["--max_steps=20", "--warmup_steps=20"], "leaves nothing to measure after --warmup_steps"),
        (["--max_steps=40", "--log_interval=20"], "a verdict needs 2 windows of --log_interval 20"),
        (["--price_per_hour=-1"], "--price_per_hour must be more than 0"),
        (["--compiler-opt"], "takes --engines"),
        (["--engines=ddp,xla", "--fail_if=jax slower"], "begins with none of the rows: ddp, xla"),
        (["--engines=ddp,jax", "--quick", "--fail_if=jax differs"], "which --quick leaves out"),
        (
            ["--numerics_steps=0", "--fail_if=inductor not checked"],
            "which --numerics_steps 0 leaves",
        ),
        (["--log_interval=0"], "--log_interval must be at least 1, not 0"),
        (["--dry_run"], "compare has no --dry_run"),
        (["--inductor.cache_dir=/tmp/x", "--engines=ddp,inductor"], "out --inductor.cache_dir"),
        (["--engines=ddp,jax:cache_dir=/tmp/x"], "leave out --jax.cache_dir"),
        (["--lr=fast"], "lr"),
    ],
)
def test_bad_request_is_one_line(flags, message, refused, tmp_path):
    err = refused("--data=synthetic", f"--output_dir={tmp_path / 'c'}", *flags)
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "c").exists()


def test_what_a_script_decides_is_refused_and_not_dropped():
    with pytest.raises(RequestError, match="--eval_interval is not for a script"):
        parse(["--engines=ddp,ddp", "--script=train.py", "--eval_interval=3"], "accbench compare")


def test_settings_that_are_chosen_fit_those_that_are_given():
    def tasks(*flags: str) -> tuple[int, int, int]:
        argv = ["--engines=ddp,ddp", "--device=cpu", "--data=synthetic", *flags]
        task = parse(argv, "accbench compare").plan.rows[0].task
        return task["max_steps"], task["warmup_steps"], task["log_interval"]

    assert tasks() == (55, 5, 5)
    assert tasks("--max_steps=40") == (40, 5, 5)
    assert tasks("--log_interval=50") == (255, 5, 50)
    assert tasks("--warmup_steps=200") == (220, 200, 4)
    assert tasks("--quick") == (26, 6, 4)
    assert tasks("--quick", "--max_steps=20") == (20, 6, 2)


def test_quick_intervals_lean_on_the_usual_scatter_where_windows_take_turns_alone():
    flags = ["--quick", "--engines=ddp,ddp", "--device=cpu", "--data=synthetic"]
    in_turn = parse(flags, "accbench compare").plan
    one_by_one = parse([*flags, "--no-alternate_windows"], "accbench compare").plan
    assert (in_turn.alternates_windows, in_turn.usual_scatter) == (True, 0.05)
    assert (one_by_one.alternates_windows, one_by_one.usual_scatter) == (False, None)


def test_quick_says_what_it_did_not_test(tmp_path):
    argv = ["--quick", "--engines=ddp,ddp", "--device=cpu", "--data=synthetic"]
    plan = parse(argv, "accbench compare").plan
    assert (plan.repeats, plan.most_rounds, plan.max_minutes) == (4, 4, 2)
    assert (plan.numerics_steps, plan.input_round, plan.stops_when_decided) == (0, False, False)
    assert plan.repeat_rule.max_repeats == 0
    # Rounds that take 60 s leave no time for a third.
    made = fakes.plan(
        quick=True,
        numerics_steps=0,
        input_round=False,
        repeats=4,
        max_minutes=2,
        takes_medians=True,
    )
    page = publish.render([comparison.read(fakes.write(tmp_path, made))], "md")
    assert "there was no time for more rounds: --max_minutes 2" in page
    assert "median of 2 rounds" in page
    assert "did not test whether the rows train the same, what the input costs, differences" in page


def test_a_folder_with_something_else_is_refused(tmp_path, refused):
    (tmp_path / "mine.txt").write_text("mine")
    assert "not empty" in refused(*FAST, "--engines=ddp,ddp", f"--output_dir={tmp_path}")
