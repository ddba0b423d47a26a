"""Reports of the nodes to the host, and what it tells from them."""

import json
from pathlib import Path

import pytest
from torch.distributed import HashStore

from accbench import config, launchers
from accbench.config import TaskConfig
from accbench.errors import RequestError
from accbench.launchers import Failure
from accbench.launchers.elastic import Launcher, node_reports, rendezvous
from accbench.launchers.elastic.node_reports import Report

STOPPED = Failure("interrupted", "stopped by SIGINT", exit_status=130)
OVER = Failure("error", "the run is over: the other nodes have ended it", at=2.0)
LOST = Failure("error", "rank 0 lost rank 1", at=1.0)


def ended(run_dir: Path, host: Report, *reports: Report) -> Failure | None:
    """How a run ended, as the host says."""
    (run_dir / "logs").mkdir(exist_ok=True)
    launcher = Launcher()
    launcher._store = HashStore()
    for report in reports:
        number = launcher._store.add("nodes", 1)
        node_reports.send_report(launcher._store, number, report, logs_folder=None)
    task = config.parse([f"--output_dir={run_dir}"])
    return launcher._first_failure(task, host)


@pytest.mark.parametrize("meeting", [None, "earlier"])
def test_a_node_outside_the_last_meeting_does_not_undo_a_finished_run(tmp_path, meeting):
    host = Report(None, "last")
    others = [Report(STOPPED, meeting), Report(OVER, meeting), Report(None, "last")]
    assert ended(tmp_path, host, *others) is None
    assert ended(tmp_path, Report(LOST, "last"), *others) == LOST
    assert ended(tmp_path, host, Report(STOPPED, "last"), *others) == STOPPED
    assert ended(tmp_path, host, *others, Report(LOST, "last")) == LOST


def test_a_host_that_is_one_too_many_leaves_the_end_to_the_others(tmp_path):
    host = Report(OVER, None)
    assert ended(tmp_path, host, Report(None, "last")) is None
    assert ended(tmp_path, host, Report(None, "last"), Report(LOST, "last")) == LOST
    assert ended(tmp_path, host, Report(STOPPED, "last")) == STOPPED
    assert ended(tmp_path, host) == OVER


def test_a_node_shares_the_folder_in_which_it_sees_the_hosts_marker(tmp_path, monkeypatch):
    monkeypatch.setattr(node_reports, "_VISIBLE_S", 0)
    folder = tmp_path / "run"
    first = config.as_mapping(config.parse([f"--output_dir={folder}"]))
    task, is_shared = node_reports.prepare_run_folder(folder, first, "id")
    assert not is_shared
    assert task.run_dir == folder
    # After a restart the shared folder's task names another checkpoint than the first.
    node_reports.marker_file(folder, "id").touch()
    resumed = json.dumps({**first, "resume": "step-2"})
    (folder / config.CONFIG_FILE).write_text(resumed)
    task, is_shared = node_reports.prepare_run_folder(folder, first, "id")
    assert is_shared
    assert task.resume == "step-2"
    assert (folder / config.CONFIG_FILE).read_text() == resumed
    assert not node_reports.prepare_run_folder(folder, first, "another run")[1]
    assert {path.name for path in folder.iterdir()} == {"config.json", "logs", ".id.shared"}


def test_the_host_learns_why_a_node_refused(tmp_path, monkeypatch):
    """Else it only says that it met nobody within its timeout."""
    store, launcher = HashStore(), Launcher()
    (tmp_path / "file").touch()
    run = {
        "id": "1", "what_runs": launchers.what_runs(), "records_bytes": 0, "worker": [],
        "task": {"output_dir": str(tmp_path / "file" / "run")},
    }  # fmt: skip
    monkeypatch.setattr(rendezvous, "wait_for_next_run", lambda *_: (store, run))
    with pytest.raises(RequestError, match="cannot create the run's folder"):
        launcher.joined(task_at("localhost:29400", "--node_rank=1", "--device=cpu"))
    report = node_reports.collect_reports(store, [1], None, 0)[1]
    assert "cannot create the run's folder" in report.failure.error
    assert report.meeting is None


def task_at(endpoint: str, *flags: str) -> TaskConfig:
    return config.parse(["--nnodes=1:2", f"--rdzv_endpoint={endpoint}", *flags])


def test_the_host_is_found_by_its_ipv6_address():
    if not rendezvous._is_here("::1"):
        pytest.skip("needs IPv6")
    endpoint = rendezvous.parse_endpoint(task_at("[::1]:29400"))
    assert endpoint == rendezvous.Endpoint("::1", 29400, is_host=True)
    assert not rendezvous.parse_endpoint(task_at("[2001:db8::1]:29400")).is_host


@pytest.mark.parametrize(("endpoint", "flags", "is_refused"), [
    ("node0", (), True),
    ("node0", ("--node_rank=1",), False),
    ("node0", ("--nnodes=1",), False),
    ("localhost", (), False),
    ("127.0.1.1", (), False),
])  # fmt: skip
def test_a_name_that_is_the_loopback_on_node_0_is_refused(endpoint, flags, is_refused, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(
        rendezvous.socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))]
    )
    problem = Launcher.problem(task_at(f"{endpoint}:29400", "--node_rank=0", *flags))
    if not is_refused:
        assert problem is None
        return
    assert "on this machine node0 is 127.0.1.1" in problem
    assert "/etc/hosts" in problem
