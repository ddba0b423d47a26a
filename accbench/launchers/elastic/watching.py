"""The launcher's watch over its node's agent: the files they share, and when to end the agent."""

import json
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from accbench.config import TaskConfig
from accbench.launchers import Failure
from accbench.launchers.common import failures
from accbench.launchers.elastic import rendezvous
from accbench.launchers.elastic.rendezvous import Endpoint
from accbench.system.stop_signals import StopSignals

# Files in a folder of the launcher: the plan, the workers' errors and process ids, the outcome,
# and the id of the meeting in which this node's workers last took part, unless the node was one
# too many in the end.
PLAN_FILE, ERROR_FILE = "plan.json", "local{local_rank}.error.json"
PIDS_FILE, OUTCOME_FILE, AGENT_LOG = "pids.json", "outcome.json", "agent.log"
MEETING_FILE = "meeting"
POLL_S = 0.1
# Seconds between checks whether the host can be reached.
_CHECK_S = 5.0
# Seconds after the workers' end, for an agent to exit and for the other nodes' reports.
GRACE_S = 15.0


def error_files(folder: Path, num_workers: int) -> dict[int, Path]:
    """Return the error file of each worker, by local rank."""
    return {n: folder / ERROR_FILE.format(local_rank=n) for n in range(num_workers)}


def wait_for_agent(
    agent: "subprocess.Popen[bytes]", task: TaskConfig, endpoint: Endpoint, folder: Path,
    signals: StopSignals,
) -> Failure | None:  # fmt: skip
    """Wait for the agent's end, and return how this node's workers ended; no process is left."""
    try:
        why = _watch(agent, task, endpoint, folder, signals)
    finally:
        agent.kill()
        agent.wait()
        failures.end_groups(_read_json(folder / PIDS_FILE) or [])
    outcome = _read_json(folder / OUTCOME_FILE) or {}
    failure = _failure_of(outcome, folder, task.nproc_per_node, why)
    if number := signals.forced or signals.graceful:
        stopped = Failure("interrupted", f"stopped by {number.name}", exit_status=130)
        return stopped if failure is None or failure.status == "error" else failure
    return failure


def last_meeting(folder: Path) -> str | None:
    """Return the id of the last meeting of this node's workers; None if it took no part."""
    try:
        return (folder / MEETING_FILE).read_text() or None
    except OSError:
        return None


def _watch(
    agent: "subprocess.Popen[bytes]", task: TaskConfig, endpoint: Endpoint, folder: Path,
    signals: StopSignals,
) -> str | None:  # fmt: skip
    """Wait for the agent's end.

    Returns:
        Why the agent must be killed, or None.
    """
    forwarded = False
    now = time.monotonic()
    checked_at = reached_at = now
    ended_at: float | None = None
    while agent.poll() is None:
        time.sleep(POLL_S)
        now = time.monotonic()
        if signals.forced or (signals.graceful and not (folder / PIDS_FILE).exists()):
            return "stopped"
        if signals.graceful and not forwarded:
            agent.send_signal(signal.SIGTERM)
            forwarded = True
        if ended_at is None and (folder / OUTCOME_FILE).exists():
            ended_at = now
        if ended_at is not None and now - ended_at > GRACE_S:
            return None  # the workers have ended, and the outcome is written
        if not endpoint.is_host and now - checked_at > _CHECK_S:
            checked_at = now
            if rendezvous.is_reachable(endpoint):
                reached_at = now
            elif now - reached_at > (_CHECK_S if signals.graceful else task.timeout_s + _CHECK_S):
                return f"node 0 at {endpoint} was out of reach for {now - reached_at:.0f} s"
    return None


def _failure_of(
    outcome: dict[str, Any], folder: Path, num_workers: int, why: str | None
) -> Failure | None:
    if outcome.get("ok"):
        return None
    codes = {int(rank): code for rank, code in outcome.get("exit_codes", {}).items()}
    first = outcome.get("first_rank", 0)
    files = {first + n: path for n, path in error_files(folder, num_workers).items()}
    raised = any(failures.read_error(path) for path in files.values())
    if codes or raised:
        failure = failures.first_failure(codes or dict.fromkeys(files, 1), files)
        return failure if why is None else replace(failure, error=f"{failure.error}; {why}")
    reason = why or outcome.get("error") or f"torch elastic's agent died: {_last_log_line(folder)}"
    return Failure("error", reason, at=time.time())


def _last_log_line(folder: Path) -> str:
    lines = (folder / AGENT_LOG).read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


def _read_json(path: Path) -> Any | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
