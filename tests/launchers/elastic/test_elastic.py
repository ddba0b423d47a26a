"""Two nodes with a launcher each train as one does, and none is left waiting for another."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from accbench import cli
from accbench.recording import records
from benchmarks.nodes import MAY_HIDE, Nodes, ended, logs_of, on_loopback, two_nodes
from tests.conftest import TINY, end_of, of_kind, processes_of, run, wait_until
from tests.signals import Signalled

SYNTHETIC = (*TINY, "--data=synthetic")
# About 0.2 s a step, a hundred an epoch.
SLOW = (*SYNTHETIC, "--model=tests.nets:slow", "--max_steps=100000", "--epochs=100000")


class ForkedNodes(Nodes):
    """Fork what starts on a node, into its namespace, where Python can."""

    def start_python(self, node: int, inside: Sequence[str], words: Sequence[str]):
        if self.names is not None and not hasattr(os, "setns"):  # before Python 3.12
            return super().start_python(node, inside, words)
        return Signalled(words, network=None if self.names is None else self.names[node])


@pytest.fixture
def nodes():
    with two_nodes(ForkedNodes) as found:
        yield found


def losses_of(run_dir: Path) -> list[float]:
    return [window.loss for window in of_kind(run_dir, records.WindowRecord)]


def has_window(run_dir: Path) -> bool:
    path = run_dir / "records.jsonl"
    return path.exists() and '"window"' in path.read_text()


def worker_of(run_dir: Path, rank: int) -> psutil.Process:
    (found,) = (
        process for process in processes_of(run_dir)
        if process.environ().get("RANK") == str(rank)
        and any("--config=" in argument for argument in process.cmdline())
    )  # fmt: skip
    return found


@pytest.mark.parametrize(("engine", "num_workers"), [
    ("ddp", 2), pytest.param("jax", 1, marks=pytest.mark.soak),
    pytest.param("xla", 1, marks=[pytest.mark.soak, pytest.mark.xla]),
])  # fmt: skip
def test_two_nodes_train_as_one_with_as_many_workers(nodes: Nodes, tmp_path, engine, num_workers):
    if engine == "jax":
        pytest.importorskip("jax")
    flags = (*SYNTHETIC, f"--engine={engine}")
    one, two = tmp_path / "one", tmp_path / "two"
    of_nodes = nodes.run(*flags, f"--nproc_per_node={num_workers}", f"--output_dir={two}")
    assert [status for status, _, _ in of_nodes] == [0, 0], of_nodes
    assert run(*flags, f"--nproc_per_node={2 * num_workers}", f"--output_dir={one}").returncode == 0
    assert losses_of(two) == losses_of(one)
    assert end_of(two).num_samples == end_of(one).num_samples
    (header,) = of_kind(two, records.RunRecord)
    assert header.world_size == len(header.hosts) == 2 * num_workers
    assert logs_of(two) == [f"rank{rank}.log" for rank in range(2 * num_workers)]
    # Rank 0 has the terminal, wherever it is; nobody warns.
    assert sum("done: 6 steps" in output for _, output, _ in of_nodes) == 1
    assert [errors for _, _, errors in of_nodes] == ["", ""]


def test_a_cut_link_ends_both_nodes(nodes: Nodes, tmp_path):
    if nodes.names is None:
        pytest.skip("needs network namespaces: root, and iproute2")
    run_dir = tmp_path / "run"
    flags = (*SLOW, f"--output_dir={run_dir}", "--timeout_s=10")
    started = [nodes.start(node, *flags) for node in (0, 1)]
    wait_until(lambda: has_window(run_dir))
    nodes.cut()
    of_nodes = [ended(process) for process in started]
    assert [status for status, _, _ in of_nodes] == [1, 1]
    last = [errors.splitlines()[-1] for _, _, errors in of_nodes]
    assert "failed: " in last[0]
    assert "10.77.0.2" in last[0]
    assert f"node 0 at {nodes.host}:29400 was out of reach" in last[1]
    assert not processes_of(run_dir)
    assert end_of(run_dir).status == "error"


def test_a_killed_worker_and_a_killed_node_are_taken_in_again(nodes: Nodes, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*SYNTHETIC, "--model=tests.nets:slow", f"--output_dir={run_dir}", "--max_steps=32")
    flags = (*flags, "--save_steps=4", "--max_restarts=2")
    host, other = (nodes.start(node, *flags) for node in (0, 1))
    wait_until(lambda: list(run_dir.glob("checkpoints/step-*")))
    worker_of(run_dir, 1).kill()
    wait_until(lambda: '"kind": "resume"' in (run_dir / "records.jsonl").read_text())
    other.kill()
    ended(other)
    back = nodes.start(1, *flags)
    of_nodes = [ended(host), ended(back)]
    assert [status for status, _, _ in of_nodes] == [0, 0], of_nodes
    assert "starting again, 1 of 2" in of_nodes[0][1]
    first, second = of_kind(run_dir, records.ResumeRecord)
    assert 4 <= first.step <= second.step
    assert end_of(run_dir).num_steps == 32


@pytest.mark.soak
def test_a_node_that_joins_is_taken_in(nodes: Nodes, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*SLOW, f"--output_dir={run_dir}", "--save_steps=4", "--max_restarts=2")
    first = nodes.start(0, *flags, "--nnodes=1:2")
    wait_until(lambda: list(run_dir.glob("checkpoints/step-*")))
    joined = nodes.start(1, *flags, "--nnodes=1:2")
    # However long it takes to join, there are steps to do together.
    records_of = run_dir / "records.jsonl"
    wait_until(lambda: '"window"' in records_of.read_text().partition('"kind": "resume"')[2])
    joined.terminate()
    of_nodes = [ended(first), ended(joined)]
    assert [status for status, _, _ in of_nodes] == [75, 75], of_nodes
    assert [header.world_size for header in of_kind(run_dir, records.RunRecord)] == [1, 2]
    (resumed,) = of_kind(run_dir, records.ResumeRecord)
    end = end_of(run_dir)
    assert 4 <= resumed.step < end.num_steps
    assert end.status == "interrupted"
    assert end.num_samples == resumed.step * 4 + (end.num_steps - resumed.step) * 8


@pytest.mark.soak
def test_over_ipv6_with_a_folder_that_the_second_node_lacks(tmp_path):
    if not MAY_HIDE:
        pytest.skip("mounting is not allowed here")
    run_dir = tmp_path / "run"
    with on_loopback("[::1]", hidden=tmp_path) as nodes:
        of_nodes = nodes.run(*SYNTHETIC, f"--output_dir={run_dir}")
    assert [status for status, _, _ in of_nodes] == [0, 0], of_nodes
    assert end_of(run_dir).num_samples == 6 * 8
    for name in ("rank0.log", "rank1.log"):
        assert "done: 6 steps" in (run_dir / "logs" / name).read_text()


@pytest.mark.soak
def test_a_spare_node_does_not_change_how_a_run_ended(nodes: Nodes, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*SYNTHETIC, "--model=tests.nets:slow", "--max_steps=60", "--nnodes=1:1")
    host, spare = (nodes.start(node, *flags, f"--output_dir={run_dir}") for node in (0, 1))
    of_nodes = [ended(host), ended(spare)]
    assert of_nodes[0][0] == 0, of_nodes
    # Either may be the spare one, also the host.
    assert sum("done: 60 steps" in output for _, output, _ in of_nodes) == 1
    (end,) = of_kind(run_dir, records.EndRecord)
    assert end.status == "ok"
    assert not list(run_dir.glob(".*.shared"))


def test_a_stop_signal_on_one_node_saves_and_stops_both(nodes: Nodes, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*SLOW, f"--output_dir={run_dir}", "--max_restarts=3")
    started = [nodes.start(node, *flags) for node in (0, 1)]
    wait_until(lambda: has_window(run_dir))
    started[1].terminate()
    assert [ended(process)[0] for process in started] == [75, 75]
    assert end_of(run_dir).status == "interrupted"
    assert list(run_dir.glob("checkpoints/step-*"))


@pytest.mark.soak
def test_a_comparison_runs_on_both_nodes(nodes: Nodes, tmp_path):
    folder = tmp_path / "comparison"
    flags = (*SYNTHETIC, "--engines=ddp,ddp", "--repeats=2", "--numerics_steps=0")
    flags = (*flags, f"--output_dir={folder}", "--timeout_s=120")
    compare = ("-m", "accbench", "compare")
    started = [nodes.start(node, *flags, to_do=compare) for node in (0, 1)]
    of_nodes = [ended(process) for process in started]
    assert of_nodes[1][0] == 0, of_nodes  # the first, where others shared the machine, says so
    assert of_nodes[1][1].count("for node 0") == 4
    found = json.loads((folder / "report.json").read_text())
    assert found["setting"]["global batch"] == 8
    assert [row["rounds_ok"] for row in found["rows"]] == [2, 2]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--nnodes=2",), "needs --rdzv_endpoint HOST:PORT"),
        (("--nnodes=two",), "it must be a number, or MIN:MAX"),
        (("--nnodes=3:2", "--rdzv_endpoint=localhost:1"), "the minimum comes first"),
        (("--nnodes=2", "--rdzv_endpoint=localhost:x"), "it must be HOST:PORT"),
        (("--nnodes=2", "--rdzv_endpoint=localhost:1", "--on_oom=halve"), "is for one machine"),
        (
            ("--nnodes=2", "--node_rank=1", "--rdzv_endpoint=127.0.0.1:9", "--timeout_s=1"),
            "no node 0 at --rdzv_endpoint 127.0.0.1:9 within --timeout_s 1",
        ),
    ],
)
def test_wrong_flags_get_a_line(flags, said, tmp_path, capsys):
    folder = tmp_path / "run"
    assert cli.run([*SYNTHETIC, *flags, "--device=cpu", f"--output_dir={folder}"]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1
    assert not folder.exists()


def test_alone_a_node_ends_where_the_others_do_not_come(nodes: Nodes, tmp_path):
    run_dir = tmp_path / "run"
    status, _, errors = ended(
        nodes.start(0, *SYNTHETIC, f"--output_dir={run_dir}", "--timeout_s=2")
    )
    assert status == 1
    assert "could not meet the others" in errors
    assert json.loads((run_dir / "records.jsonl").read_text())["status"] == "error"
