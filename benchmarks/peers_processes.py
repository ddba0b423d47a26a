"""The processes of `benchmarks/peers.py`: one a peer, those of a setting in turn."""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from accbench.comparing.run import StopRequest
from accbench.comparing.turns import TurnGiver, take_turns

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benchmarks" / "peers"
BATCH_SIZES = {"resnet18": 8, "vit_ti": 8, "gpt2_tiny": 8}
STEPS = {"resnet18": 60, "vit_ti": 60, "gpt2_tiny": 100}
WARMUP_SHARE = 0.25
WINDOW = 5
_TIMEOUT_S = 900


@dataclasses.dataclass(frozen=True)
class Row:
    """One training by one peer."""

    model: str
    mode: str
    workers: int
    peer: str

    def __str__(self) -> str:
        return f"{self.setting}/{self.peer}"

    @property
    def setting(self) -> str:
        """What rows have in common that are compared with each other."""
        return f"{self.model}/{self.mode}/{self.workers}"


def command(row: Row, case: dict, flags: argparse.Namespace) -> list[str]:
    """Return the command line of a row's process."""
    python, torchrun = str(flags.python), ["-m", "torch.distributed.run", "--standalone"]
    if row.peer == "accbench":
        size = ["--seq_len=128"] if row.model == "gpt2_tiny" else [f"--image_size={_pixels(case)}"]
        return [
            python, "-m", "accbench", "run", f"--model=for_launcher:{row.model}",
            f"--engine={'inductor' if case['compiled'] else 'ddp'}", "--data=synthetic",
            "--device=cpu", "--amp_level=O0", f"--nproc_per_node={row.workers}", *size,
            f"--synthetic.num_classes={512 if row.model == 'gpt2_tiny' else 10}",
            f"--batch_size={case['batch_size']}", f"--threads={case['threads']}", "--workers=0",
            "--optimizer=adamw", "--lr=1e-3", "--weight_decay=0.01", "--epochs=1000",
            f"--max_steps={case['steps']}", f"--warmup_steps={case['warmup']}",
            "--log_interval=10", "--save_interval=0", "--eval_interval=0",
            f"--output_dir={case['folder']}/run",
        ]  # fmt: skip
    script = {"bare": "bare", "accbench_accelerate": "with_accbench"}.get(row.peer)
    words = [str(SCRIPTS / f"{script or f'with_{row.peer}'}.py")]
    if row.peer == "timm":
        words.append(str(flags.timm_train))
    if row.workers == 1:
        return [python, *words]
    return [python, *torchrun, f"--nproc_per_node={row.workers}", *words]


def _pixels(case: dict) -> int:
    return 32 if case["tiny"] else 96


class PeerProcess:
    """A row's process, which is killed where it takes too long.

    Args:
        row: the row.
        number: the round.
        giver: gives it its turns.
        flags: of this program.
    """

    def __init__(self, row: Row, number: int, giver: TurnGiver, flags: argparse.Namespace) -> None:
        self.row, self.number, self.flags = row, number, flags
        self.at = flags.folder / "processes" / f"{number:02}" / str(row).replace("/", "-")
        steps = 8 if flags.tiny else flags.steps or STEPS[row.model]
        self.case = {
            "model": row.model, "compiled": row.mode == "compiled", "workers": row.workers,
            "threads": max(1, len(os.sched_getaffinity(0)) // row.workers), "tiny": flags.tiny,
            "batch_size": 2 if flags.tiny else BATCH_SIZES[row.model], "steps": steps,
            "warmup": max(2, int(WARMUP_SHARE * steps)), "folder": str(self.at),
            "window": 2 if flags.tiny else WINDOW, "turns": str(giver.path), "started": 0.0,
        }  # fmt: skip
        self.pid = self.sentinel = -1

    def start(self, stop: StopRequest) -> None:
        """Start it."""
        shutil.rmtree(self.at, ignore_errors=True)
        self.at.mkdir(parents=True)
        # Cold in a row's first round.
        cache = self.flags.folder / "caches" / str(self.row).replace("/", "-")
        env = {
            **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{SCRIPTS}", "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self.case["threads"]), "TORCHINDUCTOR_CACHE_DIR": str(cache),
        }  # fmt: skip
        with stop.held_back(), (self.at / "output.log").open("w") as log:
            self.case["started"] = time.time()
            env["PEER_CASE"] = json.dumps(self.case)
            self.process = subprocess.Popen(
                command(self.row, self.case, self.flags), cwd=self.at, env=env, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
            self.pid, self.sentinel = self.process.pid, os.pidfd_open(self.process.pid)
            self.timer = threading.Timer(_TIMEOUT_S, self.process.kill)
            self.timer.start()

    def end(self) -> None:
        """End it, if it is still there."""
        if self.sentinel >= 0:
            self.timer.cancel()
            self.process.terminate()
            self.process.wait()
            os.close(self.sentinel)
            self.sentinel = -1

    def result(self) -> dict[str, Any]:
        """Return what its ranks measured, or its error."""
        status = self.process.wait()
        ranks = [json.loads(path.read_text()) for path in sorted(self.at.glob("rank*.json"))]
        found: dict[str, Any] = {"row": str(self.row), "round": self.number}
        if status or len(ranks) != self.row.workers:
            return {**found, "error": f"status {status}: {_why(self.at / 'output.log')}"}
        threads = {rank["threads"] for rank in ranks}
        if threads != {self.case["threads"]} or {r["ranks"] for r in ranks} != {self.row.workers}:
            return {**found, "error": f"threads {threads}, not {self.case['threads']}"}
        return {
            **found,
            **{name: ranks[0][name] for name in ("samples_per_s", "windows_s", "first_step_s")},
            "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        }


def measure(rows: list[Row], number: int, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the processes of a setting's rows once, and return what each measured, or its error."""
    givers = [TurnGiver(row.workers) for row in rows]
    processes = [
        PeerProcess(row, number, giver, flags) for row, giver in zip(rows, givers, strict=True)
    ]
    try:
        with StopRequest() as stop:
            take_turns(processes, givers, stop)
            return [process.result() for process in processes]
    finally:
        for process, giver in zip(processes, givers, strict=True):
            process.end()
            giver.close()


def _why(log: Path) -> str:
    """Return the line of a log that tells an error, or its last one."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    told = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return (told or lines)[-1]
