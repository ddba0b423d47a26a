"""The agent of a node seen from its launcher: what they tell each other, and when it has to go."""

import json
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from accbench.config import TaskConfig
from accbench.launchers import Failure, failures
from accbench.launchers.elastic import meeting
from accbench.launchers.elastic.meeting import Endpoint
from accbench.stop_signals import StopSignals

# In a folder of the launcher's: what to do, the workers' errors and process ids, how it went.
PLAN_FILE, ERROR_FILE = "plan.json", "local{local_rank}.error.json"
PIDS_FILE, OUTCOME_FILE, AGENT_LOG = "pids.json", "outcome.json", "agent.log"
POLL_S = 0.1
# Seconds between two looks at whether the host is there.
_LOOK_S = 5.0
# Seconds for what comes after the workers' end: an agent's way out, the other nodes' last words.
GRACE_S = 15.0


def error_files(folder: Path, num_workers: int) -> dict[int, Path]:
    """By local rank."""
    return {n: folder / ERROR_FILE.format(local_rank=n) for n in range(num_workers)}


def to_its_end(
    agent: "subprocess.Popen[bytes]", task: TaskConfig, endpoint: Endpoint, folder: Path,
    signals: StopSignals,
) -> Failure | None:  # fmt: skip
    """How this node's workers ended; nothing of them or of their agent is left."""
    try:
        why = _watch(agent, task, endpoint, folder, signals)
    finally:
        agent.kill()
        agent.wait()
        failures.end_groups(_read(folder / PIDS_FILE) or [])
    outcome = _read(folder / OUTCOME_FILE) or {}
    failure = _failure(outcome, folder, task.nproc_per_node, why)
    if number := signals.order or signals.wish:
        stopped = Failure("interrupted", f"stopped by {number.name}", exit_status=130)
        return stopped if failure is None or failure.status == "error" else failure
    return failure


def _watch(
    agent: "subprocess.Popen[bytes]", task: TaskConfig, endpoint: Endpoint, folder: Path,
    signals: StopSignals,
) -> str | None:  # fmt: skip
    """Wait for the agent's end; returns why it has to be ended, if so."""
    passed_on = False
    now = time.monotonic()
    looked_at = seen_at = now
    ended_at: float | None = None
    while agent.poll() is None:
        time.sleep(POLL_S)
        now = time.monotonic()
        if signals.order or (signals.wish and not (folder / PIDS_FILE).exists()):
            return "stopped"
        if signals.wish and not passed_on:
            agent.send_signal(signal.SIGTERM)
            passed_on = True
        if ended_at is None and (folder / OUTCOME_FILE).exists():
            ended_at = now
        if ended_at is not None and now - ended_at > GRACE_S:
            return None  # its workers have ended, and how is known
        if not endpoint.is_host and now - looked_at > _LOOK_S:
            looked_at = now
            if meeting.reachable(endpoint):
                seen_at = now
            elif now - seen_at > (_LOOK_S if signals.wish else task.timeout_s + _LOOK_S):
                return f"node 0 at {endpoint} was out of reach for {now - seen_at:.0f} s"
    return None


def _failure(
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
    reason = why or outcome.get("error") or f"torch elastic's agent died: {_last_line(folder)}"
    return Failure("error", reason, at=time.time())


def _last_line(folder: Path) -> str:
    lines = (folder / AGENT_LOG).read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _read(path: Path) -> Any | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
