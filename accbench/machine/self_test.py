"""A reduction and three training steps for every engine and device that can train here.

Each is an ordinary run in a process of its own, so that the test takes the same path as training:
two workers begin by averaging known values.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from accbench import config
from accbench.config import plugins
from accbench.errors import RequestError
from accbench.machine import doctor
from accbench.recording import records

_STEPS = 3
_FLAGS = (
    "--model=accbench.machine.self_test:net", "--data=synthetic", "--image_size=32",
    "--batch_size=4", f"--max_steps={_STEPS}", "--warmup_steps=1", "--log_interval=1",
    "--eval_interval=0", "--save_interval=0", "--workers=0", "--amp_level=O0", "--seed=1",
    "--synthetic.num_classes=10",
)  # fmt: skip


def net(num_classes: int) -> Any:
    """Build a network of a convolution, BatchNorm and a linear layer."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )  # fmt: skip


def run(timeout_s: float = 300.0) -> list[dict[str, Any]]:
    """Test every usable engine and device with one worker, and with two where two have room."""
    return [
        test_engine(usable.engine, usable.device, workers, timeout_s)
        for usable in doctor.check_engines()
        for workers in (1, 2)
        if usable.reason is None and _takes(usable, workers)
    ]


def _takes(usable: doctor.EngineSupport, workers: int) -> bool:
    """Return whether so many workers can train, each on a device of its own."""
    device: Any = usable.device
    task = config.TaskConfig(engine=usable.engine, device=device, nproc_per_node=workers)
    return plugins.load("engines", usable.engine).unavailable_reason(task) is None


def test_engine(engine: str, device: str, workers: int, timeout_s: float) -> dict[str, Any]:
    """Train three steps, and return what came of it: `error` is None, or why they failed."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            sys.executable, "-m", "accbench", "run", *_FLAGS, f"--engine={engine}",
            f"--device={device}", f"--nproc_per_node={workers}", f"--output_dir={run_dir}",
        ]  # fmt: skip
        try:
            finished = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
            error = (
                _find_problem(run_dir, device, workers)
                if finished.returncode == 0
                else _last_error_line(finished)
            )
        except subprocess.TimeoutExpired:
            error = f"took more than {timeout_s:.0f} s"
        error = None if error is None else error.replace(folder, "DIR")
    wall_s = time.perf_counter() - started
    return {"engine": engine, "device": device, "workers": workers, "error": error,
            "wall_s": wall_s}  # fmt: skip


def _last_error_line(finished: "subprocess.CompletedProcess[str]") -> str:
    lines = finished.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {finished.returncode}"


def _find_problem(run_dir: Path, device: str, workers: int) -> str | None:
    """Return what is wrong with a run that exited with status 0; None if nothing is."""
    try:
        run_records = records.read(run_dir / config.RECORDS_FILE)
    except (RequestError, json.JSONDecodeError) as error:
        return str(error)
    run_record, end = run_records[0], run_records[-1]
    if not isinstance(run_record, records.RunRecord) or not isinstance(end, records.EndRecord):
        return "the record is incomplete"
    if (run_record.device_type, run_record.world_size) != (device, workers):
        return f"it ran on {run_record.world_size} x {run_record.device_type}"
    if end.num_steps != _STEPS or end.skipped_steps:
        return f"{end.num_steps} steps, {end.skipped_steps} of them skipped"
    return None
