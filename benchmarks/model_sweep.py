"""Which models train here, under which engine, and the same as in float64?

    python benchmarks/model_sweep.py FOLDER [--engines ddp,inductor,xla] [--kinds NAME,...]
        [--models NAME,...] [--random N --seed S] [--limit_s S] [--table_only]
        [--docs docs/models.md]

For each model: float64's reference and plain ddp in both layouts, then each engine in a process
of its own with a time limit: a run of a few steps, and the numerics pass. A result is a JSON file,
and one that is there is not made again. Prints a table, as Markdown; with --docs puts it between
that file's markers.
"""

import argparse
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import sweep_models  # noqa: E402

STEPS = 4
BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
_FLOORS = {"ddp": (), "ddp-other": ("--ddp.no-channels_last",)}
_SAME = "trains the same"
# What is asked is whether it is right: LLVM's passes take most of the time that XLA compiles.
_XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engines", default="ddp,inductor,xla")
    parser.add_argument("--kinds", default=",".join(sweep_models.KINDS))
    parser.add_argument("--models")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most_parameters", type=float, default=30e6)
    parser.add_argument("--limit_s", type=float, default=600)
    parser.add_argument("--table_only", action="store_true")
    parser.add_argument("--docs", type=Path)
    flags = parser.parse_args()
    engines = flags.engines.split(",")
    models = sweep_models.of_kinds(flags.kinds.split(","))
    if flags.random:
        models = dict(sweep_models.drawn(flags.random, flags.seed, flags.most_parameters))
    if flags.models:
        models = {name: models[name] for name in flags.models.split(",")}
    base = flags.folder.absolute()
    if not flags.table_only:
        _start_fork_server(engines)
        for name, its_flags in models.items():
            sweep(base / _file_name(name), name, its_flags, engines, flags.limit_s)
    text = table(base, engines)
    print(text)
    if flags.docs:
        before, _, rest = flags.docs.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        flags.docs.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _file_name(model: str) -> str:
    return model.replace(":", "-")


def sweep(
    folder: Path, model: str, model_flags: tuple[str, ...], engines: list[str], limit_s: float
) -> None:
    """All engines on one model; what has a result is left as it is."""
    wanted = [engine for engine in engines if not (folder / f"{engine}.json").exists()]
    if not wanted:
        return
    shutil.rmtree(folder / "work", ignore_errors=True)
    work = folder / "work"
    work.mkdir(parents=True)
    flags = [
        f"--model={model}", *model_flags, "--batch_size=2", "--amp_level=O0", "--lr=1e-4",
        "--workers=0", "--threads=1", "--device=cpu", "--data=synthetic", "--tensorboard=off",
        f"--synthetic.num_batches={STEPS}", f"--max_steps={STEPS}", "--save_interval=0",
        "--warmup_steps=1", "--log_interval=1",
    ]  # fmt: skip
    (folder / "flags.json").write_text(json.dumps(flags))
    problem, seconds = _process(work, "floors", flags, limit_s)
    for engine in wanted:
        if engine != "ddp":  # which is one of the floors
            problem, seconds = _process(work, engine, flags, limit_s)
        result = _result(work, engine, problem, seconds)
        text = json.dumps({"model": model, "flags": model_flags, **result}, indent=1)
        (folder / f"{engine}.json").write_text(text + "\n")
        print(model, engine, result["verdict"] or result["error"], f"{seconds:.0f} s", flush=True)
    shutil.rmtree(work)


def _start_fork_server(engines: list[str]) -> None:
    """Imports take longer than a small model: each process is forked from one that has them."""
    os.environ |= {
        "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU", "NPROC": "1", "TORCH_WARM_POOL": "0",
        "OMP_NUM_THREADS": "1", "XLA_FLAGS": _XLA_FLAGS,
    }  # fmt: skip
    found = [name for name in ("timm", "transformers") if importlib.util.find_spec(name)]
    if set(engines) <= {"ddp", "xla"}:  # torch_xla is not to be beside inductor
        found.append("torch_xla")
    preloaded = [
        "torch", "torch._dynamo", "torchvision", "accbench.comparing.numerics",
        "accbench.training.worker", "benchmarks.model_sweep", *found,
    ]  # fmt: skip
    multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)


def _process(work: Path, what: str, flags: list[str], limit_s: float) -> tuple[str | None, float]:
    """What went wrong in a process that does `what`, if anything, and its seconds."""
    log = work / f"{what}.log"
    started = time.perf_counter()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=in_process, args=(work, what, flags, log))
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        return f"not done after {limit_s:.0f} s", limit_s
    problem = None
    if process.exitcode:
        text = log.read_text(errors="replace").strip().splitlines()
        problem = text[-1] if text else f"exit status {process.exitcode}"
    return problem, time.perf_counter() - started


def in_process(work: Path, what: str, flags: list[str], log: Path) -> None:
    """The runs of one process."""
    from accbench.comparing import numerics
    from accbench.training import worker

    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    started = time.perf_counter()

    def do(name: str, job: Any, *more: str) -> None:
        status = worker.main([*flags, *more, f"--output_dir={work / name}"], started, job)
        if status:
            sys.exit(status)

    def check(task: Any, topology: Any, _started: float, _console: Any) -> None:
        numerics.check(task, topology, work / "reference")

    if what == "floors":
        do("run-ddp", None, "--engine=ddp")
        do("reference", lambda task, *_: numerics.make_reference(task, 1))
        for name, more in _FLOORS.items():
            do(name, check, "--engine=ddp", *more)
        return
    do(f"run-{what}", None, f"--engine={what}")
    do(what, check, f"--engine={what}")


def _result(work: Path, engine: str, problem: str | None, seconds: float) -> dict[str, Any]:
    """What the records of a cell say."""
    from accbench.report import numerics
    from accbench.report import run as runs

    run = runs.read_if_there(work / f"run-{engine}")
    which = "ddp-other" if engine == "ddp" else engine
    floors = [runs.read_if_there(work / name) for name in _FLOORS]
    own, reference = runs.read_if_there(work / which), runs.read_if_there(work / "reference")
    trained = run.status == "ok" and all(window.loss is not None for window in run.windows)
    verdict = numerics.judge_run(own, reference, floors)
    return {
        "trained": trained,
        "error": None if trained else run.end and run.end.error or problem or run.status,
        "verdict": verdict.verdict if trained else None,
        "reason": verdict.reason or (problem if trained else None),
        "worst": verdict.worst,
        "losses": [window.loss for window in run.windows],
        "reference_losses": [record.loss for record in reference.numerics],
        "seconds": round(seconds, 1),
        **{
            name: getattr(run.end, name, None)
            for name in (
                "compile_s", "num_compiles", "num_recompiles", "num_graphs", "num_fallbacks",
            )
        },
    }  # fmt: skip


@dataclasses.dataclass
class _Cell:
    words: str
    trained: bool
    same: bool
    reason: str | None


def _cell(folder: Path, engine: str) -> _Cell | None:
    path = folder / f"{engine}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    if not found["trained"]:
        return _Cell("does not train", False, False, _short(found["error"]))
    same = found["verdict"] == _SAME
    words = {_SAME: "same", "differs": "differs"}.get(found["verdict"], "trains")
    details = []
    if engine != "ddp":
        details = [f"{found['num_graphs'] or 0:g} graphs", f"{found['compile_s'] or 0:.0f} s"]
        if found["num_recompiles"]:
            details.append(f"{found['num_recompiles']} recompiled")
        if found["num_fallbacks"]:
            details.append(f"{found['num_fallbacks']} left it")
    reason = None if same else _short(found["reason"])
    return _Cell(", ".join([words, *details]), True, same, reason)


def _short(text: str | None) -> str | None:
    line = " ".join((text or "").split())
    return f"{line[:160]} ..." if len(line) > 160 else line or None


def table(base: Path, engines: list[str]) -> str:
    """Model x engine as Markdown, the sums below it, and then why a cell is not `same`."""
    lines = ["| model | px | " + " | ".join(engines) + " |", "| --- " * (len(engines) + 2) + "|"]
    counts = {engine: [0, 0, 0] for engine in engines}
    reasons = []
    for folder in sorted(path.parent for path in base.glob("*/flags.json")):
        given = json.loads((folder / "flags.json").read_text())
        model = given[0].partition("=")[2]
        size = next((f.partition("=")[2] for f in given if f.startswith("--image_size=")), "")
        row = []
        for engine in engines:
            cell = _cell(folder, engine)
            row.append("" if cell is None else cell.words)
            if cell is not None:
                for index, counted in enumerate((True, cell.trained, cell.same)):
                    counts[engine][index] += counted
                if cell.reason:
                    reasons.append(f"- {model}, {engine}: {cell.reason}")
        lines.append(f"| {model} | {size} | " + " | ".join(row) + " |")
    sums = [
        f"{engine}: of {number} models {trained} train, {same} of them the same"
        for engine, (number, trained, same) in counts.items()
        if number
    ]
    return "\n".join([*lines, "", "; ".join(sums) + ".", "", *reasons])


if __name__ == "__main__":
    main()
