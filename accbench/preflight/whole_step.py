"""A whole training step, traced and compiled for a GPU that is not here, and its result."""

import dataclasses
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accbench import config
from accbench.config import TaskConfig, plugins
from accbench.distributed import mesh
from accbench.errors import RequestError
from accbench.pjrt import nvidia, xla_flags
from accbench.pjrt.gpu import GpuSpec
from accbench.preflight import children, communication, compiling, hlo, kernels, summary
from accbench.preflight.tracing import programs
from accbench.recording import provenance

SCHEMA_VERSION = 1
# Fields of a task that do not affect its training step.
_HOST_FIELDS = ("output_dir", "workers", "threads")
# The plug-ins that are tested without a device; other versions may need other flags.
_TESTED_PLUGINS = ("jax-cuda12-pjrt 0.6.2", "jax-cuda13-pjrt 0.12.0.1")


def num_gpus(task: TaskConfig) -> int:
    """Return how many GPUs a task trains on."""
    return mesh.num_workers(task) or task.nproc_per_node


def compile_step(
    task: TaskConfig, target: GpuSpec, gpu_name: str, tracer: str, folder: Path,
    report_progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Trace the task's step and compile it, and return a result's `model`, `memory` and `cost`.

    Args:
        task: the resolved task.
        target: the GPU to compile for.
        gpu_name: value of `--gpu`, by which the compiling process loads `target`.
        tracer: name of the module that traces the engine's step.
        folder: receives the program, logs and the compiler's files.
        report_progress: called with a line to show.

    Raises:
        RequestError: tracing or compiling failed.
    """
    tracer_module = importlib.import_module(tracer)
    values = {name: value for name, value in config.as_mapping(task).items() if value is not None}
    values.pop("output_dir", None)
    num_devices = num_gpus(task)
    what = f"{task.model} for {num_devices} x {target.name}, batch {task.batch_size}"
    tracing = children.run(
        tracer, [str(folder), *config.as_flags(values)],
        tracer_module.environment(folder, num_devices, target.compute_capability),
        folder / "trace.log",
        lambda seconds: report_progress(f"tracing {what}: {seconds:.0f} s"),
    )  # fmt: skip
    trace_facts = _read_facts(folder / programs.FACTS_FILE, tracing, "tracing the step")
    compiled = children.run(
        "accbench.preflight.compiling",
        [str(folder), gpu_name, task.nnodes, str(task.nproc_per_node)],
        compiling.environment(folder, _gpu_xla_flags(task)), folder / "compile.log",
        lambda seconds: report_progress(f"compiling {what}: {seconds:.0f} s"),
    )  # fmt: skip
    compile_facts = _read_facts(folder / compiling.FACTS_FILE, compiled, "XLA's compiler")
    return {
        "model": {k: v for k, v in trace_facts.items() if not k.endswith("_s")},
        "memory": compile_facts["memory"],
        "cost": {
            "build_s": trace_facts["build_s"],
            "trace_s": trace_facts["trace_s"],
            "compile_s": compile_facts["compile_s"],
            "tracer_peak_bytes": tracing.peak_bytes,
            "compiler_peak_bytes": compiled.peak_bytes,
        },
    }


def _gpu_xla_flags(task: TaskConfig) -> str:
    """Return XLA_FLAGS of a run on the GPU."""
    options = task.options.get(task.engine, plugins.load("engines", task.engine).Options())
    unknown = xla_flags.unknown_in_table(nvidia.find_plugin())
    return xla_flags.merge("cuda", options.flags, unknown)


def _read_facts(path: Path, process: children.ProcessResult, what: str) -> dict[str, Any]:
    if not path.exists():
        how = f"signal {-process.status}" if process.status < 0 else f"exit status {process.status}"
        if process.status == -9:
            how += ", with which Linux kills a process when memory runs out"
        raise RequestError(f"{what} ended by {how}: {process.last_message or 'its log is empty'}")
    facts: dict[str, Any] = json.loads(path.read_text())
    if "error" in facts:
        raise RequestError(_refusal_message(facts["error"], what))
    return facts


def _refusal_message(text: str, what: str) -> str:
    """Return the compiler's message as one line, with the operation's location in the model."""
    line = " ".join(text.split())
    name = re.search(r'op_name="([^"]*)"', line)
    location = f" at {hlo.without_numbers(name[1])}" if name else ""
    source = re.search(r'source_file="([^"]*)" source_line=(\d+)', line)
    location += f" ({source[1]}:{source[2]})" if source else ""
    line = re.sub(r",? ?metadata=\{.*?\}", "", line)
    return f"{what} refuses the step{location}: {line[:400]}" if name else f"{what}: {line[:600]}"


def build_result(
    task: TaskConfig, target: GpuSpec, compiled: dict[str, Any], folder: Path,
    links: communication.Links,
) -> dict[str, Any]:  # fmt: skip
    program, thunk_text = compiling.read_dump(folder)
    program_kernels = kernels.list_kernels(hlo.parse(program))
    assert task.batch_size is not None
    thunks = summary.thunk_counts(thunk_text)
    asked = setting(task, target)
    return {
        **asked,
        "kind": "preflight",
        "versions": {**asked["versions"], **_plugin_version()},
        "model": compiled["model"],
        "memory": summary.memory(compiled["memory"], target, program),
        **summary.summarize_kernels(
            program_kernels, target, task.batch_size, thunks, compiled["model"]["parameter_sizes"]
        ),
        "reduction": summary.summarize_reduction(program_kernels, target),
        "communication": communication.summarize(program_kernels, target, links)
        if num_gpus(task) > 1
        else None,
        "eager": None,
        "cost": compiled["cost"],
        "notes": _notes(),
    }


def setting(task: TaskConfig, target: GpuSpec) -> dict[str, Any]:
    """Return what each result says of the task, the GPU and the versions."""
    values = config.as_mapping(task)
    return {
        "schema_version": SCHEMA_VERSION,
        "engine": task.engine,
        "num_gpus": num_gpus(task),
        "num_nodes": int(task.nnodes),
        "gpu": dataclasses.asdict(target),
        "task": {name: value for name, value in values.items() if name not in _HOST_FIELDS},
        "versions": provenance.versions(),
    }


def _plugin_version() -> dict[str, str]:
    name, _, number = (nvidia.plugin_version() or "").partition(" ")
    return {name: number} if name else {}


def _notes() -> list[str]:
    notes = [
        "Compiled with xla_gpu_autotune_level=0: choosing algorithms means timing them on the "
        "device. On the GPU other ones may run, with other workspaces.",
    ]
    unknown = compiling.unknown_flags()
    if unknown:
        notes.append(f"{xla_flags.left_out_notice(unknown)}.")
    version = nvidia.plugin_version()
    if nvidia.find_plugin() is not None and version not in _TESTED_PLUGINS:
        tested = " or ".join(_TESTED_PLUGINS)
        notes.append(f"The compiler is {version or 'of no known package'}, not {tested}.")
    return notes
