"""Numerics passes of the settings in `benchmarks.numerics_settings`, and their verdicts.

    python -m benchmarks.numerics_passes FOLDER NAME SEEDS ENGINES   (JSON; one rank's process)

benchmarks/numerics_trials.py runs all of them, the tests run the small ones.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.numerics_settings import SETTINGS
from benchmarks.processes import ROOT, run_ranks

FLOORS = ("ddp", "ddp:no-channels_last")
# Each needs a process of its own: torch_xla must be imported before anything is differentiated.
APART = ("xla", "xla:lean", "inductor", "jax", "jax:lean")


def folder_of(base: Path, setting: str, seed: int, engine: str) -> Path:
    """Return the run folder of an engine's pass."""
    name = setting.replace(" ", "-").replace(",", "")
    return base / name / str(seed) / engine.replace(":", "-")


def run_setting(base: Path, name: str, seeds: list[int], engines: list[str], rank: int) -> None:
    """Make the passes of a setting one after the other, in a rank's process."""
    from accbench.distributed import process_group
    from accbench.distributed.process_group import Topology

    num_workers = SETTINGS[name].num_workers
    topology = Topology(rank, rank, num_workers, num_workers)
    process_group.init_distributed(topology, "cpu", 300)
    for seed in seeds:
        _run_seed(base, name, seed, engines, topology)
    process_group.close()


def _run_seed(base: Path, name: str, seed: int, engines: list[str], topology: Any) -> None:
    from accbench.comparing import check_pass, reference_files, reference_pass, roundings
    from accbench.config import plugins
    from accbench.distributed import process_group

    num_workers, rank = SETTINGS[name].num_workers, topology.rank
    at = folder_of(base, name, seed, "reference")
    if rank == 0 and not (at / reference_files.FOLDER).exists():
        reference_pass.run(_task(name, seed, "ddp", at, topology), num_workers)
    process_group.broadcast_value(0)
    for engine in engines:
        folder = folder_of(base, name, seed, engine)
        if process_group.broadcast_value(int(folder.exists())):
            continue
        plugins.load("engines", engine.partition(":")[0])
        if engine == "inductor":
            import torch._dynamo

            torch._dynamo.reset()  # or after eight of them a forward is compiled no more
        started = time.perf_counter()
        try:
            num_draws = roundings.NUM_DRAWS if engine in FLOORS else 0
            task = _task(name, seed, engine, folder, topology)
            check_pass.run(task, topology, at, num_draws)
        except Exception:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"error{rank}.txt").write_text(traceback.format_exc())
            if num_workers > 1:
                raise  # the other rank waits for this one
        if rank == 0:
            print(f"{name} {seed} {engine}: {time.perf_counter() - started:.1f} s", flush=True)


def _task(name: str, seed: int, engine: str, folder: Path, topology: Any) -> Any:
    from accbench import config, resolving
    from accbench.training import worker

    setting = SETTINGS[name]
    kind, _, option = engine.partition(":")
    lean = [f"--{kind}.lean=on", *(["--xla.replay=off"] if kind == "xla" else [])]  # as on a GPU
    variant = {"no-channels_last": ["--ddp.no-channels_last"], "lean": lean}
    task = resolving.resolve(
        config.parse(
            [*setting.flags, f"--seed={seed}", f"--nproc_per_node={setting.num_workers}",
             f"--engine={kind}", *variant.get(option, ()), f"--output_dir={folder}"]
        )
    )  # fmt: skip
    worker.apply_environment(task, topology)
    return task


def start_setting(
    base: Path, name: str, seeds: list[int], engines: list[str], plugins: Path,
    run: Callable[[int, list[str], dict[str, str]], None] = run_ranks,
) -> None:  # fmt: skip
    """Run the passes of a setting, one process a rank.

    Args:
        base: the folder for all settings.
        name: the setting.
        seeds: one pass each.
        engines: those to run, beside the floors.
        plugins: the folder that `planted.install` wrote.
        run: starts `python ARGUMENTS` for so many ranks with an environment, and waits.
    """
    together = [engine for engine in engines if engine not in APART]
    groups = [list(dict.fromkeys([*FLOORS, *together]))]
    if all(folder_of(base, name, seed, e).exists() for seed in seeds for e in groups[0]):
        groups = []
    env = {
        "PYTHONPATH": os.pathsep.join((str(plugins), str(ROOT))),
        "PJRT_DEVICE": "CPU", "NPROC": "1", "TORCH_WARM_POOL": "0",
    }  # fmt: skip
    for group in (*groups, *([engine] for engine in engines if engine in APART)):
        what = [str(base), name, json.dumps(seeds), json.dumps(group)]
        run(SETTINGS[name].num_workers, ["-m", "benchmarks.numerics_passes", *what], env)


def judge(base: Path, name: str, seed: int, engine: str):
    """Return the verdict of a pass, as a comparison would give it."""
    from accbench.report import numerics
    from accbench.report import run as runs

    def run(which: str):
        return runs.read_if_there(folder_of(base, name, seed, which))

    floors = (run("ddp"), run("ddp:no-channels_last"))
    if engine == "ddp":  # beside another start of itself
        engine = "ddp:again"
    return numerics.judge_run(run(engine), run("reference"), floors)


if __name__ == "__main__":
    _base, _name, _seeds, _engines = sys.argv[1:]
    _rank = int(os.environ["RANK"])
    run_setting(Path(_base), _name, json.loads(_seeds), json.loads(_engines), _rank)
