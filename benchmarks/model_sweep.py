"""Which models train here, under which engine, and the same as in float64?

    python benchmarks/model_sweep.py FOLDER [--engines ddp,inductor,xla] [--kinds NAME,...]
        [--models NAME,...] [--random N --seed S] [--batch_sizes 2,8] [--limit_s S] [--quick]
        [--table_only] [--kept benchmarks/model_sweep.jsonl] [--docs docs/models.md]
    python benchmarks/model_sweep.py FOLDER --tiny

For each model: float64's reference and plain ddp in both layouts, then each engine in a process
of its own with a time limit: a run of a few steps, and the numerics pass. With --quick there are
the runs alone, and losses beside those of ddp. Where rounding alone takes plain ddp too far from
float64 to judge anyone, all is done again with the next of the batch sizes. A result is a JSON
file, and one that is there is not made again, unless it is a quick one and more is asked for. With
--kept results are taken from that file as well, and put into it, so that a sweep goes on from one
machine to the next. Prints a table, as Markdown; with --docs puts it between that file's markers.
"""

import argparse
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import sweep_models  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

STEPS = 4
USUAL_BATCH_SIZE = 2
_BATCH_SIZE = "--batch_size="
BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
_FLOORS = {"ddp": (), "ddp-other": ("--ddp.no-channels_last",)}
_SAME, _TOO_SLOW = "trains the same", "not done after"
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
    parser.add_argument("--batch_sizes", type=_numbers, default=(2, 8))
    parser.add_argument("--limit_s", type=float, default=600)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table_only", action="store_true")
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--docs", type=Path)
    add_tiny(parser)
    flags = parser.parse_args()
    if flags.tiny:
        flags.engines = "ddp"
    # As Ctrl-C does it, so that the cell that runs ends as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    engines = flags.engines.split(",")
    models = sweep_models.of_kinds(flags.kinds.split(","))
    if flags.random:
        models = dict(sweep_models.drawn(flags.random, flags.seed, flags.most_parameters))
    if flags.models:
        wanted = flags.models.split(",")
        known = models | (_flags_in(flags.kept) if flags.kept else {})
        if unknown := [name for name in wanted if name not in known]:
            parser.error(f"--models: {', '.join(unknown)}: neither in the list nor in --kept")
        models = {name: known[name] for name in wanted}
    if flags.tiny:
        models = {"benchmarks.nets:tiny": ("--image_size=32", "--synthetic.num_classes=10")}
    base = flags.folder.absolute()
    if flags.kept:
        take(base, flags.kept)
    if not flags.table_only:
        _start_fork_server(engines, () if flags.tiny else ("timm", "transformers"))
        for name, its_flags in models.items():
            folder = base / name.replace(":", "-")
            trial = Trial(folder, name, its_flags, flags.batch_sizes, flags.limit_s, flags.quick)
            trial.sweep(engines)
            if flags.kept:
                keep(base, flags.kept)
    text = table(base, engines)
    print(text)
    if flags.docs:
        before, _, rest = flags.docs.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        flags.docs.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _flags_in(kept: Path) -> dict[str, tuple[str, ...]]:
    """Model -> its flags, of a file of results; models that were drawn at random are in it too."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    return {
        found["model"]: tuple(f for f in found["flags"] if not f.startswith(_BATCH_SIZE))
        for found in map(json.loads, lines)
    }


def _batch_size(flags: list[str]) -> int:
    """Of a result's flags, which do not tell the usual one."""
    sizes = [int(flag.removeprefix(_BATCH_SIZE)) for flag in flags if flag.startswith(_BATCH_SIZE)]
    return sizes[-1] if sizes else USUAL_BATCH_SIZE


def take(base: Path, kept: Path) -> None:
    """Results of a file that the folder has none of."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    for found in map(json.loads, lines):
        folder = base / found["model"].replace(":", "-")
        path = folder / f"{found['engine']}.json"
        if path.exists() and not (json.loads(path.read_text())["quick"] and not found["quick"]):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "flags.json").write_text(
            json.dumps([f"--model={found['model']}", *found["flags"]])
        )
        path.write_text(json.dumps(found, indent=1) + "\n")


def keep(base: Path, kept: Path) -> None:
    """All of the folder's results in one file, a line each, what others have put there too."""
    take(base, kept)
    found = [json.loads(path.read_text()) | {"engine": path.stem}
             for path in sorted(base.glob("*/*.json")) if path.stem != "flags"]  # fmt: skip
    part = kept.with_name(f".{kept.name}.part")
    part.write_text("".join(json.dumps(one) + "\n" for one in found))
    part.replace(kept)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A model under some engines."""

    folder: Path
    model: str
    model_flags: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    limit_s: float
    quick: bool

    @property
    def work(self) -> Path:
        """Records and tensors, which are in the way once there is a result."""
        return self.folder / "work"

    def sweep(self, engines: list[str]) -> None:
        """What has a result is left as it is."""
        batch_size = None
        while batch_size != self._next_batch_size():
            batch_size = self._next_batch_size()
            self._sweep_at(batch_size, engines)

    def _next_batch_size(self) -> int:
        """Larger than that of ddp's result, if that was too noisy and there is a larger one."""
        path = self.folder / "ddp.json"
        if not path.exists():
            return self.batch_sizes[0]
        found = json.loads(path.read_text())
        size = _batch_size(found["flags"])
        larger = [one for one in self.batch_sizes if one > size]
        return larger[0] if larger and _is_too_noisy(found) else size

    def _sweep_at(self, batch_size: int, engines: list[str]) -> None:
        wanted = [engine for engine in engines if not self._is_done(engine, batch_size)]
        if not wanted:
            return
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        own = list(self.model_flags)
        if batch_size != USUAL_BATCH_SIZE:
            own.append(f"{_BATCH_SIZE}{batch_size}")
        flags = [
            f"--model={self.model}", *self.model_flags, f"{_BATCH_SIZE}{batch_size}",
            "--amp_level=O0", "--lr=1e-4", "--workers=0", "--threads=1", "--device=cpu",
            "--data=synthetic", "--tensorboard=off", f"--synthetic.num_batches={STEPS}",
            f"--max_steps={STEPS}", "--save_interval=0", "--warmup_steps=1", "--log_interval=1",
        ]  # fmt: skip
        (self.folder / "flags.json").write_text(json.dumps(flags))
        problem, seconds = None, 0.0
        if "ddp" in wanted or not self.quick:  # it is one of the floors
            problem, seconds = self._process("ddp", flags)
        for engine in wanted:
            if engine != "ddp":
                problem, seconds = self._process(engine, flags)
            result = {"quick": self.quick, **_result(self.work, engine, problem, seconds)}
            text = json.dumps({"model": self.model, "flags": own, **result}, indent=1)
            (self.folder / f"{engine}.json").write_text(text + "\n")
            told = result["verdict"] or result["error"] or "trains"
            print(self.model, engine, told, f"batch {batch_size}, {seconds:.0f} s", flush=True)
            if engine == "ddp" and self._next_batch_size() != batch_size:
                break  # nobody can be judged
        shutil.rmtree(self.work)

    def _is_done(self, engine: str, batch_size: int) -> bool:
        path = self.folder / f"{engine}.json"
        if not path.exists():
            return False
        found = json.loads(path.read_text())
        same_size = _batch_size(found["flags"]) == batch_size
        return same_size and (self.quick or not found["quick"])

    def _process(self, engine: str, flags: list[str]) -> tuple[str | None, float]:
        """What went wrong in an engine's process, if anything, and its seconds."""
        log = self.work / f"{engine}.log"
        started = time.perf_counter()
        context = multiprocessing.get_context("forkserver")
        arguments = (self.work, engine, flags, self.quick, log)
        process = context.Process(target=in_process, args=arguments)
        process.start()
        try:
            process.join(self.limit_s)
        finally:
            slow = process.exitcode is None
            process.kill()
            process.join()
        if slow:
            return f"{_TOO_SLOW} {self.limit_s:.0f} s", self.limit_s
        problem = None
        if (process.exitcode or 0) < 0:  # for want of memory, as a rule
            problem = f"killed by {signal.Signals(-process.exitcode).name}"
        elif process.exitcode:
            text = log.read_text(errors="replace").strip().splitlines()
            problem = text[-1] if text else f"exit status {process.exitcode}"
        return problem, time.perf_counter() - started


def _is_too_noisy(found: dict[str, Any]) -> bool:
    from accbench.report import numerics

    return numerics.Numerics(found["verdict"], reason=found["reason"]).is_too_noisy


def _start_fork_server(engines: list[str], libraries: tuple[str, ...]) -> None:
    """Imports take longer than a small model: each process is forked from one that has them."""
    os.environ |= {
        "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU", "NPROC": "1", "TORCH_WARM_POOL": "0",
        "OMP_NUM_THREADS": "1", "XLA_FLAGS": _XLA_FLAGS,
    }  # fmt: skip
    found = [name for name in libraries if importlib.util.find_spec(name)]
    if set(engines) <= {"ddp", "xla"}:  # torch_xla is not to be beside inductor
        found.append("torch_xla")
    preloaded = [
        "torch", "torch._dynamo", "torchvision", "accbench.comparing.numerics_worker",
        "accbench.training.worker", "benchmarks.model_sweep", *found,
    ]  # fmt: skip
    multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)


def in_process(work: Path, engine: str, flags: list[str], quick: bool, log: Path) -> None:
    """The runs of one process."""
    from accbench.comparing import check_pass, reference_pass, roundings
    from accbench.training import worker

    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    started = time.perf_counter()

    def do(name: str, job: Any, *more: str) -> None:
        status = worker.main([*flags, *more, f"--output_dir={work / name}"], started, job)
        if status:
            sys.exit(status)

    num_draws = roundings.NUM_DRAWS if engine == "ddp" else 0

    def check(task: Any, topology: Any, _started: float, _console: Any) -> None:
        check_pass.run(task, topology, work / "reference", num_draws)

    do(f"run-{engine}", None, f"--engine={engine}")
    if quick:
        return
    if engine != "ddp":
        do(engine, check, f"--engine={engine}")
        return
    do("reference", lambda task, *_: reference_pass.run(task, 1))
    for name, more in _FLOORS.items():
        do(name, check, "--engine=ddp", *more)


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
        "verdict": verdict.verdict if trained and own.status != "not run" else None,
        "reason": problem or verdict.reason if trained else None,
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
    checked: bool
    """Whether the numerics pass came to a verdict."""
    same: bool
    reason: str | None


def _cell(folder: Path, engine: str, batch_size: int) -> _Cell | None:
    """An engine's result; it says so where it is not of the row's batch size."""
    path = folder / f"{engine}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    if not found["trained"]:
        slow = found["error"].startswith(_TOO_SLOW)
        return _Cell(
            f"{len(found['losses'])} steps in time" if slow else "does not train",
            False, False, False, _short(found["error"]),
        )  # fmt: skip
    from accbench.report import losses

    apart = _apart(folder, found)
    if apart is not None and apart > losses.FAR:  # the pass gives dropout, the run draws its own
        reason = f"its losses are {apart:.0e} times ddp's away from them"
        return _Cell("wrong losses", False, False, False, reason)
    same = found["verdict"] == _SAME
    words = {_SAME: "same", "differs": "differs"}.get(found["verdict"], "trains")
    if found["quick"] and engine != "ddp" and apart is not None:
        words += f", losses {apart:.0e} from ddp's"
    size = _batch_size(found["flags"])
    details = [] if size == batch_size else [f"batch {size}"]
    if engine != "ddp":
        details += [f"{found['num_graphs'] or 0:g} graphs", f"{found['compile_s'] or 0:.0f} s"]
        if found["num_recompiles"]:
            details.append(f"{found['num_recompiles']} recompiled")
        if found["num_fallbacks"]:
            details.append(f"{found['num_fallbacks']} left it")
    reason = None if same or found["quick"] else _short(found["reason"])
    checked = same or found["verdict"] == "differs"
    return _Cell(", ".join([words, *details]), True, checked, same, reason)


def _apart(folder: Path, found: dict[str, Any]) -> float | None:
    """The largest relative distance of a run's losses from those of ddp on the same batches."""
    path = folder / "ddp.json"
    of_ddp = json.loads(path.read_text()) if path.exists() else found | {"losses": []}
    if _batch_size(of_ddp["flags"]) != _batch_size(found["flags"]):
        return None
    of_ddp, losses = of_ddp["losses"], found["losses"]
    if not of_ddp or len(of_ddp) != len(losses) or None in (*of_ddp, *losses):
        return None
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, of_ddp, strict=True))


def _short(text: str | None) -> str | None:
    line = " ".join((text or "").split())
    return f"{line[:160]} ..." if len(line) > 160 else line or None


def table(base: Path, engines: list[str]) -> str:
    """Model x engine as Markdown, the sums below it, and then why a cell is not `same`."""
    lines = [
        "| model | px | batch | " + " | ".join(engines) + " |",
        "| --- " * (len(engines) + 3) + "|",
    ]
    counts = {engine: [0, 0, 0, 0] for engine in engines}
    reasons: dict[tuple[str, str], list[str]] = {}  # of a model in one way, engines
    for folder in sorted(path.parent for path in base.glob("*/flags.json")):
        given = json.loads((folder / "flags.json").read_text())
        model = given[0].partition("=")[2]
        size = next((f.partition("=")[2] for f in given if f.startswith("--image_size=")), "")
        of_ddp = folder / "ddp.json"
        batch_size = _batch_size(
            json.loads(of_ddp.read_text())["flags"] if of_ddp.exists() else given
        )
        row = []
        for engine in engines:
            cell = _cell(folder, engine, batch_size)
            row.append("" if cell is None else cell.words)
            if cell is not None:
                for index, counted in enumerate((True, cell.trained, cell.checked, cell.same)):
                    counts[engine][index] += counted
                if cell.reason:
                    reasons.setdefault((model, cell.reason), []).append(engine)
        lines.append(f"| {model} | {size} | {batch_size} | " + " | ".join(row) + " |")
    sums = [
        f"{engine}: of {number} models {trained} train; {checked} were checked, {same} are the same"
        for engine, (number, trained, checked, same) in counts.items()
        if number
    ]
    told = [f"- {model}, {', '.join(its)}: {why}" for (model, why), its in reasons.items()]
    return "\n".join([*lines, "", "; ".join(sums) + ".", "", *told])


if __name__ == "__main__":
    main()
