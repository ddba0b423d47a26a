"""`accbench preflight`: trace a run's training step, compile it for a GPU, and report on it."""

import contextlib
import dataclasses
import importlib.util
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from accbench import config, resolving
from accbench.config import TaskConfig, plugins
from accbench.config.field import flag
from accbench.distributed import mesh
from accbench.errors import RequestError, print_interruption, print_refusal
from accbench.pjrt import gpu, nvidia
from accbench.pjrt.gpu import GpuSpec
from accbench.preflight import (
    batch_search,
    communication,
    eager,
    mesh_search,
    stages,
    summary,
    whole_step,
)
from accbench.report import preflight_report
from accbench.system import extras

RESULT_FILE = "preflight.json"
_MESH_TRIES = 3


@dataclasses.dataclass(frozen=True)
class PreflightFlags(TaskConfig):
    """Compile a run's training step for a GPU that is not here, and say what it needs.

    With --pp each stage of engine ddp is counted in its place.

    Takes the flags of a run, and these. Nothing is computed: times are bounds from the GPU's data
    sheet.
    """

    gpu: str = flag("h100", "A GPU's name, or a YAML file that describes one.")
    format: Literal["table", "md", "html", "json"] = flag(
        "table",
        "How to write it; html is one page that needs no network.",
    )
    find_batch: bool = flag(
        False,
        "Also look for the largest batch size that fits, a multiple of 8.",
    )
    find_mesh: bool = flag(
        False,
        "Also look for the meshes (--dp_shard, --tp, --cp) that fit, the fastest bound first; all "
        "take as many samples a step.",
    )
    mesh_tries: int | None = flag(
        None,
        "Meshes that --find_mesh compiles beside the one that is asked for; the others are "
        "estimated. Unset: 3.",
        minimum=1,
    )
    network_gbit_per_s: float = flag(
        400.0,
        "Network of each GPU to other nodes (--nnodes), Gb/s in one direction.",
    )
    keep: Path | None = flag(
        None,
        "A folder for what XLA made: the program, its optimised form, PTX, the executable.",
    )
    compare: tuple[Path, Path] | None = flag(
        None,
        "Two results side by side instead, as folders of --keep or files of --format json.",
    )

    engine: str = flag("jax", "What trains: an engine that compiles whole steps, jax or xla.")
    data: str = flag("synthetic", "As in a run; what matters is the number of classes.")
    device: Literal["auto", "cuda"] = flag("auto", "Always cuda.")


def main(argv: Sequence[str], prog: str) -> int:
    """Run the command, and return the exit status: 1 if the step does not fit on any mesh."""
    try:
        flags = config.read_flags(argv, prog, PreflightFlags)
        if flags.compare is not None:
            first, second = map(read, flags.compare)
            print(preflight_report.render_pair(first, second, flags.format), end="")
            return 0
        with _result_folder(flags.keep) as folder:
            result = preflight(flags, folder)
        print(preflight_report.render(result, flags.format), end="")
    except RequestError as error:
        return print_refusal(prog, error)
    except KeyboardInterrupt:
        return print_interruption(f"{prog}: interrupted")
    meshes = result.get("mesh_search", {}).get("meshes", ())
    return 0 if result["memory"]["fits"] or any(mesh["fits"] for mesh in meshes) else 1


def read(path: Path) -> dict[str, Any]:
    """Read a result that an earlier preflight wrote.

    Raises:
        RequestError: there is no valid result.
    """
    path = path / RESULT_FILE if path.is_dir() else path
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"--compare {path}: {' '.join(str(error).split())}") from None
    if not isinstance(result, dict) or result.get("kind") != "preflight":
        raise RequestError(f"--compare {path}: no result of a compiled step by accbench preflight")
    if result.get("schema_version") != whole_step.SCHEMA_VERSION:
        raise RequestError(
            f"--compare {path}: made by another version of accbench; run preflight again"
        )
    return result


@contextlib.contextmanager
def _result_folder(keep: Path | None) -> Iterator[Path]:
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
    """Trace and compile a training step, and summarise it; files go to `folder`.

    Raises:
        RequestError: this machine lacks something, or the compiler refuses the step.
    """
    target = gpu.load(flags.gpu)
    tracer = _checked_tracer(flags.engine) if flags.pp == 1 else ""
    task = resolving.apply_defaults(_of_known_nodes(config.task_of(flags)), "cuda")
    resolving.check_data(task)
    _check_request(flags, task, target)
    links = communication.Links.of(
        target, int(task.nnodes), task.nproc_per_node, flags.network_gbit_per_s
    )
    with _progress() as report_progress:
        if task.pp > 1:
            report_progress("counting stages")
            result = {**whole_step.setting(task, target), **stages.count(task, target, links)}
        else:
            result = _compiled(task, target, flags, tracer, folder, links, report_progress)
    (folder / RESULT_FILE).write_text(json.dumps(result))
    return result


def _check_request(flags: Any, task: TaskConfig, target: GpuSpec) -> None:
    """Refuse flags that do not go together.

    Raises:
        RequestError: some do not.
    """
    if task.amp_level == "O1" and task.amp_dtype not in target.dense_tflops:
        raise RequestError(
            f"--gpu {flags.gpu}: {target.name} has no {task.amp_dtype}; use --amp_dtype float16"
        )
    if not flags.network_gbit_per_s > 0:
        raise RequestError(
            f"--network_gbit_per_s must be more than 0, not {flags.network_gbit_per_s:g}"
        )
    if flags.mesh_tries is not None and not flags.find_mesh:
        raise RequestError(f"--mesh_tries {flags.mesh_tries} tries nothing without --find_mesh")
    num_gpus = whole_step.num_gpus(task)
    if flags.find_mesh and num_gpus == 1:
        raise RequestError("--find_mesh needs several GPUs: --nproc_per_node 8, and --nnodes")
    if flags.find_mesh and plugins.load("engines", task.engine).mesh_problem(
        dataclasses.replace(task, dp_shard="auto"), mesh.MeshShape(shard=num_gpus)
    ):
        raise RequestError(f"--find_mesh: engine {task.engine} has no meshes; use --engine jax")
    problem = stages.problem(task, flags) if task.pp > 1 else None
    if problem is not None:
        raise RequestError(problem)


def _compiled(
    task: TaskConfig, target: GpuSpec, flags: Any, tracer: str, folder: Path,
    links: communication.Links, report_progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Return the result of a step that is compiled as a whole, with the searches asked for."""
    compiled = whole_step.compile_step(task, target, flags.gpu, tracer, folder, report_progress)
    result = whole_step.build_result(task, target, compiled, folder, links)
    if flags.find_mesh:
        result["mesh_search"] = _search_mesh(
            task, target, flags, tracer, folder, result, links, report_progress
        )
    if flags.find_batch:
        result["batch_search"] = _search_batch(
            task, target, flags.gpu, tracer, folder, result, report_progress
        )
    report_progress("counting eager PyTorch")
    result["eager"] = eager.count(
        task, target, compiled["model"]["num_classes"], compiled["model"]["batch"]
    )
    return result


def _of_known_nodes(task: TaskConfig) -> TaskConfig:
    """Return the task with a number of nodes, which need no place to meet at.

    Raises:
        RequestError: it has no such number.
    """
    if mesh.num_workers(task) is None:
        raise RequestError(f"--nnodes {task.nnodes}: preflight needs one number, such as 2")
    if task.nnodes != TaskConfig.nnodes and task.rdzv_endpoint is None:
        return dataclasses.replace(task, rdzv_endpoint="localhost")
    return task


def _checked_tracer(engine: str) -> str:
    tracer: str | None = plugins.load("engines", engine).step_tracer
    if tracer is None:
        able = [name for name, cls in plugins.classes("engines").items() if cls.step_tracer]
        raise RequestError(
            f"--engine {engine} cannot compile whole steps ahead of time; preflight needs one of: "
            f"{', '.join(able)}"
        )
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise RequestError(
            "preflight needs Linux on x86-64, which the compiler for CUDA is built for"
        )
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


def _search_batch(
    task: TaskConfig, target: GpuSpec, gpu_name: str, tracer: str, folder: Path,
    result: dict[str, Any], report_progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    def peak_bytes(batch_size: int) -> int:
        candidate = dataclasses.replace(task, batch_size=batch_size)
        subfolder = folder / f"batch{batch_size}"
        subfolder.mkdir()
        compiled = whole_step.compile_step(
            candidate, target, gpu_name, tracer, subfolder, report_progress
        )
        stats = compiled["memory"]
        peak: int = summary.memory(stats, target, "")["peak_bytes"]
        return peak

    assert task.batch_size is not None
    known = {task.batch_size: result["memory"]["peak_bytes"]}
    multiple_of = 8 * task.accumulate
    return batch_search.search(peak_bytes, known, target.memory_bytes, multiple_of)


def _search_mesh(
    task: TaskConfig, target: GpuSpec, flags: Any, tracer: str, folder: Path,
    result: dict[str, Any], links: communication.Links, report_progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    model, flops = result["model"], result["step"]["flops"]
    report_progress("estimating meshes")
    meshes, refused = mesh_search.candidates(task, links, model["num_classes"], flops)
    known = {mesh: result for mesh in meshes if mesh.is_of(task)}
    tried: list[mesh_search.CandidateMesh] = []
    tries = _MESH_TRIES if flags.mesh_tries is None else flags.mesh_tries

    def compile_mesh(mesh: mesh_search.CandidateMesh) -> dict[str, Any]:
        tried.append(mesh)
        subfolder = folder / f"mesh{len(tried)}"
        subfolder.mkdir()

        def report(line: str) -> None:
            report_progress(f"mesh {len(tried)} of {tries} at most, {mesh.name}: {line}")

        candidate = mesh.task(task)
        compiled = whole_step.compile_step(candidate, target, flags.gpu, tracer, subfolder, report)
        return whole_step.build_result(candidate, target, compiled, subfolder, links)

    found = mesh_search.search(meshes, compile_mesh, known, target.memory_bytes, tries)
    return {**found, "refused": refused}


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line of progress, on a terminal alone."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _line: None
        return
    with console.status("starting") as status:
        yield lambda line: status.update(line)
