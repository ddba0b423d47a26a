"""`accbench preflight`: trace the step that a run would take, compile it for a GPU, and say."""

import contextlib
import dataclasses
import importlib.util
import json
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from accbench import config, extras, plugins, resolving
from accbench.config import TaskConfig
from accbench.errors import RequestError, print_interruption, print_refusal
from accbench.pjrt import nvidia
from accbench.preflight import (
    batch_search,
    children,
    compiling,
    eager,
    gpu,
    hlo,
    kernels,
    programs,
    summary,
)
from accbench.preflight.gpu import Gpu
from accbench.recording import provenance
from accbench.report import preflight as pages

RESULT_FILE = "preflight.json"
SCHEMA_VERSION = 1
# What of a task is of no meaning for its step.
_OF_THE_HOST = ("output_dir", "workers", "threads")
# Its behaviour without a device was looked at; another may need other flags.
_PINNED_PLUGIN = "jax-cuda12-pjrt 0.6.2"


@dataclasses.dataclass(frozen=True)
class PreflightFlags(TaskConfig):
    """Compile a run's training step for a GPU that is not here, and say what it needs.

    Takes the flags of a run, and these. Nothing is computed: times are bounds from the GPU's data
    sheet.
    """

    gpu: str = "h100"
    """A GPU's name, or a YAML file that describes one."""
    format: Literal["table", "md", "html", "json"] = "table"
    """How to write it; html is one page that needs no network."""
    find_batch: bool = False
    """Also look for the largest batch size that fits, a multiple of 8."""
    keep: Path | None = None
    """A folder for what XLA made: the program, its optimised form, PTX, the executable."""
    compare: tuple[Path, Path] | None = None
    """Two results side by side instead, as folders of --keep or files of --format json."""

    engine: str = "xla"
    """What trains: an engine that compiles whole steps."""
    data: str = "synthetic"
    """As in a run; what matters is the number of classes."""
    device: Literal["auto", "cuda"] = "auto"
    """Always cuda."""


def main(argv: Sequence[str], prog: str) -> int:
    """The command; returns the exit status: 1 where the step does not fit the GPU."""
    try:
        flags = config.read_flags(argv, prog, PreflightFlags)
        if flags.compare is not None:
            first, second = map(read, flags.compare)
            print(pages.render_pair(first, second, flags.format), end="")
            return 0
        with _folder(flags.keep) as folder:
            result = preflight(flags, folder)
        print(pages.render(result, flags.format), end="")
    except RequestError as error:
        return print_refusal(prog, error)
    except KeyboardInterrupt:
        return print_interruption(f"{prog}: interrupted")
    return 0 if result["memory"]["fits"] else 1


def read(path: Path) -> dict[str, Any]:
    """A result that was kept.

    Raises:
        RequestError: there is none.
    """
    path = path / RESULT_FILE if path.is_dir() else path
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"--compare {path}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or found.get("kind") != "preflight":
        raise RequestError(f"--compare {path}: no result of accbench preflight")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise RequestError(f"--compare {path}: made by another version of accbench; make it anew")
    return found


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="accbench-preflight-") as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise RequestError(f"--keep {keep}: the folder is not empty")
    except OSError as error:
        raise RequestError(f"--keep {keep}: {error.strerror}") from None
    yield keep.absolute()


def preflight(flags: Any, folder: Path) -> dict[str, Any]:
    """Trace, compile and count; leaves files in `folder`.

    Raises:
        RequestError: it cannot be done here, or the compiler refuses the step.
    """
    target = gpu.load(flags.gpu)
    tracer = _tracer(flags.engine)
    task = resolving.apply_defaults(config.task_of(flags), "cuda")
    resolving.check_data(task)
    if task.amp_level == "O1" and task.amp_dtype not in target.dense_tflops:
        raise RequestError(
            f"--gpu {flags.gpu}: {target.name} has no {task.amp_dtype}; use --amp_dtype float16"
        )
    assert task.batch_size is not None
    with _progress() as say:
        compiled = compile_step(task, target, flags.gpu, tracer, folder, say)
        result = _result(task, target, compiled, folder)
        if flags.find_batch:
            result["batch_search"] = _search(task, target, flags.gpu, tracer, folder, result, say)
        say("counting eager PyTorch")
        result["eager"] = eager.count(
            task, target, compiled["model"]["num_classes"], compiled["model"]["batch"]
        )
    (folder / RESULT_FILE).write_text(json.dumps(result))
    return result


def _tracer(engine: str) -> str:
    tracer: str | None = plugins.load("engines", engine).step_tracer
    if tracer is None:
        able = [n for n, found in plugins.classes("engines").items() if found.step_tracer]
        raise RequestError(
            f"--engine {engine} compiles no whole steps ahead; preflight is for: {', '.join(able)}"
        )
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise RequestError("preflight needs Linux on x86-64: the compiler for CUDA is for that")
    library = nvidia.find_plugin()
    install = nvidia.install_command()
    module, extra = importlib.import_module(tracer).NEEDS
    if importlib.util.find_spec(module) is None:
        raise RequestError(f"preflight needs {extras.not_installed(module, extra)}")
    if library is None or not library.exists():
        where = "is not installed" if library is None else f"is not at {library}"
        raise RequestError(f"preflight needs a PJRT plugin for CUDA, which {where}: {install}")
    if nvidia.toolkit(library) is None:
        raise RequestError(f"preflight needs ptxas and libdevice of CUDA: {install}")
    return tracer


def compile_step(
    task: TaskConfig, target: Gpu, gpu_name: str, tracer: str, folder: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Trace the task's step and compile it: `model`, `memory` and `cost` as a result has them.

    Args:
        gpu_name: what `--gpu` was.

    Raises:
        RequestError: one of the two failed.
    """
    traced = importlib.import_module(tracer)
    values = {name: value for name, value in config.as_mapping(task).items() if value is not None}
    values.pop("output_dir", None)
    what = f"{task.model} for {task.nproc_per_node} x {target.name}, batch {task.batch_size}"
    tracing = children.run(
        tracer, [str(folder), *config.as_flags(values)],
        traced.environment(folder, task.nproc_per_node), folder / "trace.log",
        lambda seconds: say(f"tracing {what}: {seconds:.0f} s"),
    )  # fmt: skip
    facts = _facts(folder / programs.FACTS_FILE, tracing, "tracing the step")
    compiled = children.run(
        "accbench.preflight.compiling", [str(folder), gpu_name, str(task.nproc_per_node)],
        compiling.environment(folder, traced.gpu_flags(task)), folder / "compile.log",
        lambda seconds: say(f"compiling {what}: {seconds:.0f} s"),
    )  # fmt: skip
    made = _facts(folder / compiling.FACTS_FILE, compiled, "XLA's compiler")
    return {
        "model": {k: v for k, v in facts.items() if not k.endswith("_s")},
        "memory": made["memory"],
        "cost": {
            "build_s": facts["build_s"],
            "trace_s": facts["trace_s"],
            "compile_s": made["compile_s"],
            "compiler_peak_bytes": compiled.peak_bytes,
        },
    }


def _facts(path: Path, ended: children.Ended, what: str) -> dict[str, Any]:
    if not path.exists():
        how = f"signal {-ended.status}" if ended.status < 0 else f"exit status {ended.status}"
        if ended.status == -9:
            how += ", as Linux ends a process when memory is out"
        raise RequestError(f"{what} ended by {how}: {ended.last_words or 'it said nothing'}")
    facts: dict[str, Any] = json.loads(path.read_text())
    if "error" in facts:
        raise RequestError(_refusal(facts["error"], what))
    return facts


def _refusal(text: str, what: str) -> str:
    """The compiler's words in one line, with the operation's place in the model."""
    line = " ".join(text.split())
    name = re.search(r'op_name="([^"]*)"', line)
    place = f" at {hlo.without_numbers(name[1])}" if name else ""
    source = re.search(r'source_file="([^"]*)" source_line=(\d+)', line)
    place += f" ({source[1]}:{source[2]})" if source else ""
    line = re.sub(r",? ?metadata=\{.*?\}", "", line)
    return f"{what} refuses the step{place}: {line[:400]}" if name else f"{what}: {line[:600]}"


def _result(
    task: TaskConfig, target: Gpu, compiled: dict[str, Any], folder: Path
) -> dict[str, Any]:
    program, launched = compiling.read_dump(folder)
    found = kernels.of_program(hlo.parse(program))
    assert task.batch_size is not None
    thunks = summary.thunk_counts(launched)
    values = config.as_mapping(task)
    return {
        "kind": "preflight",
        "schema_version": SCHEMA_VERSION,
        "engine": task.engine,
        "num_gpus": task.nproc_per_node,
        "gpu": dataclasses.asdict(target),
        "task": {name: value for name, value in values.items() if name not in _OF_THE_HOST},
        "versions": {**provenance.versions(), **_plugin_version()},
        "model": compiled["model"],
        "memory": summary.memory(compiled["memory"], target, program),
        **summary.of_kernels(
            found, target, task.batch_size, thunks, compiled["model"]["parameter_sizes"]
        ),
        "reduction": summary.of_reduction(found, target),
        "eager": None,
        "cost": compiled["cost"],
        "notes": _notes(),
    }


def _plugin_version() -> dict[str, str]:
    name, _, number = (nvidia.plugin_version() or "").partition(" ")
    return {name: number} if name else {}


def _notes() -> list[str]:
    notes = [
        "Compiled with xla_gpu_autotune_level=0: choosing algorithms means timing them on the "
        "device. On the GPU other ones may run, with other workspaces.",
    ]
    found = nvidia.plugin_version()
    if nvidia.find_plugin() is not None and found != _PINNED_PLUGIN:
        notes.append(f"The compiler is {found or 'of no known package'}, not {_PINNED_PLUGIN}.")
    return notes


def _search(
    task: TaskConfig, target: Gpu, gpu_name: str, tracer: str, folder: Path,
    result: dict[str, Any], say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    def peak_bytes(batch_size: int) -> int:
        tried = dataclasses.replace(task, batch_size=batch_size)
        inner = folder / f"batch{batch_size}"
        inner.mkdir()
        stats = compile_step(tried, target, gpu_name, tracer, inner, say)["memory"]
        peak: int = summary.memory(stats, target, "")["peak_bytes"]
        return peak

    assert task.batch_size is not None
    known = {task.batch_size: result["memory"]["peak_bytes"]}
    parts = task.accumulate
    return batch_search.search(peak_bytes, known, target.memory_bytes, multiple_of=8 * parts)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says what is going on, on a terminal alone."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _line: None
        return
    with console.status("starting") as status:
        yield lambda line: status.update(line)
