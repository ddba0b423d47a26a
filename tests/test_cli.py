"""The command as it is installed, in somebody's folder and in a pipe."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accbench import cli
from accbench.recording import records
from tests.conftest import ROOT, TINY, end_of, of_kind, python

SMALL = (*TINY[1:], "--data=synthetic")


@pytest.fixture
def mine(tmp_path) -> Path:
    """A folder with nets."""
    shutil.copy(ROOT / "benchmarks" / "nets.py", tmp_path / "my_nets.py")
    return tmp_path


def accbench(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    script = shutil.which("accbench", path=Path(sys.executable).parent)
    if script is None:
        pytest.skip("accbench is not installed beside this Python")
    return subprocess.run(
        [script, *map(str, arguments)], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def test_a_net_in_the_current_folder_trains(mine):
    """And a file there does not hide Python's own module of its name."""
    (mine / "random.py").write_text("raise RuntimeError('a module of the user, not Python')\n")
    result = accbench(mine, "run", *SMALL, "--model=my_nets:tiny", "--output_dir=run")
    assert result.returncode == 0, result.stderr
    assert end_of(mine / "run").status == "ok"


# Of the installed command, each process imports torch anew.
@pytest.mark.parametrize("command", ["forked", pytest.param("installed", marks=pytest.mark.soak)])
def test_nets_in_the_current_folder_are_compared(mine, command):
    # Other tests beside this one disturb its rounds.
    flags = (*SMALL, "--engines=ddp,ddp:channels_last=false", "--repeats=2", "--numerics_steps=0",
             "--no-repeat_disturbed", "--model=my_nets:tiny", "--output_dir=c")  # fmt: skip
    if command == "installed":
        result = accbench(mine, "compare", *flags)
    else:
        there = ("-m", "tests.started", json.dumps({"folder": str(mine)}))
        result = python(*there, "-m", "tests.all_forked", "-m", "accbench", "compare", *flags)
    assert result.returncode in (0, 1), result.stderr  # two rounds may judge nothing
    assert "2 rounds" in result.stdout
    rows = json.loads((mine / "c" / "report.json").read_text())["rows"]
    assert [row["rounds_ok"] for row in rows] == [2, 2]


def reader_that_leaves(*arguments: object, lines: int) -> tuple[int, str]:
    """Read so many lines of `accbench ...` and leave; its exit status and errors."""
    process = subprocess.Popen(
        [sys.executable, "-m", "accbench", *map(str, arguments)], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(lines):
        assert process.stdout.readline()
    process.stdout.close()
    _, errors = process.communicate(timeout=600)
    return process.returncode, errors


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], pytest.param(["doctor"], marks=pytest.mark.soak)]
)
def test_a_command_ends_quietly_with_its_reader(arguments):
    assert reader_that_leaves(*arguments, lines=0) == (141, "")


def test_a_run_goes_on_without_its_reader(tmp_path):
    flags = (*SMALL, "--model=tests.nets:slow", f"--output_dir={tmp_path}")
    assert reader_that_leaves("run", *flags, lines=2) == (0, "")
    assert end_of(tmp_path).status == "ok"
    assert len(of_kind(tmp_path, records.WindowRecord)) == 3
    assert "step 6/6" in (tmp_path / "logs" / "rank0.log").read_text()


def test_interruption_within_generated_code_is_told_by_the_status():
    """CPython would kill itself at its end, though the Ctrl-C was caught."""
    code = (
        "import sys\nfrom accbench.errors import print_interruption\n"
        "try:\n    exec('raise KeyboardInterrupt')\n"
        "except KeyboardInterrupt:\n    sys.exit(print_interruption('interrupted'))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


def test_ctrl_c_before_a_command_begins_is_a_line(monkeypatch, capsys):
    def pressed(argv):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "compare", pressed)
    assert cli.main(["compare", "--quick"]) == 130
    assert capsys.readouterr().err == "accbench compare: interrupted\n"
