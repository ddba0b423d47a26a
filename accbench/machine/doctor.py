"""What is on this machine, which engines can train on it, and why others cannot: `accbench doctor`.

The answer holds nothing private: no host name, user, path or environment.
"""

import dataclasses
import io
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from accbench.config import TaskConfig, plugins
from accbench.data import shared_memory
from accbench.pjrt import nvidia
from accbench.recording import provenance
from accbench.system import cache_folders, cgroups, extras, user_name

_DEVICES: tuple[Literal["cpu", "cuda", "tpu"], ...] = ("cpu", "cuda", "tpu")
# Library -> its package, named by the major version of the CUDA that torch was built with.
_LIBRARIES = {"cudnn": "nvidia-cudnn-cu{}", "nccl": "nvidia-nccl-cu{}"}


@dataclasses.dataclass(frozen=True)
class EngineSupport:
    """Whether an engine can train on a device here."""

    engine: str
    device: str
    reason: str | None
    """Why the engine cannot, and what to do; None if it can."""
    torch: str | None = None
    """The version of torch in the engine's own environment; None if it runs in this one."""


def examine() -> dict[str, Any]:
    """Collect everything that is known without starting a device: name -> plain values."""
    driver = nvidia.driver()
    library = nvidia.find_plugin()
    toolkit = nvidia.toolkit(library)
    memory_bytes, free_disk_bytes = _memory_bytes(), shutil.disk_usage(".").free
    return {
        "versions": provenance.versions(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": provenance.cpu_name(),
        "cores": cgroups.num_cores(),
        "memory_bytes": memory_bytes,
        "free_disk_bytes": free_disk_bytes,
        "free_port": _has_free_port(),
        **_user_facts(),
        "gpus": [dataclasses.asdict(gpu) for gpu in driver.gpus],
        "gpu_problem": driver.problem,
        "driver": _driver_version(),
        "driver_cuda": driver.cuda_version,
        "torch_cuda": _torch_cuda(),
        "plugin": None if library is None else nvidia.plugin_version() or "named by hand",
        **_library_versions(),
        "ptxas": None if toolkit is None else _ptxas_version(toolkit),
        "engines": [dataclasses.asdict(usable) for usable in check_engines()],
    }


def check_engines() -> list[EngineSupport]:
    """Check every engine on every kind of device, with one worker."""
    checked = []
    for name, engine in plugins.classes("engines").items():
        if (python := engine.other_python()) is not None:
            checked += _ask_environment(python, name)
            continue
        for device in _DEVICES:
            reason = engine.unavailable_reason(TaskConfig(engine=name, device=device))
            if reason is None and device == "tpu" and engine.find_device("auto") != "tpu":
                reason = "there is no TPU here"
            checked.append(EngineSupport(name, device, reason))
    return checked


def _ask_environment(python: Path, engine: str) -> list[EngineSupport]:
    """Return what the doctor of another environment says of an engine."""
    # Without this environment's packages; accbench itself is installed there.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-m", "accbench", "doctor", "--format", "json"]
    asked = subprocess.run(command, capture_output=True, text=True, env=env)
    if asked.returncode != 0:
        lines = asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"]
        return [
            EngineSupport(engine, device, f"its environment: {lines[-1]}") for device in _DEVICES
        ]
    facts = json.loads(asked.stdout)
    return [
        EngineSupport(engine, row["device"], row["reason"], facts["versions"]["torch"])
        for row in facts["engines"]
        if row["engine"] == engine
    ]


def render(facts: dict[str, Any], format: str) -> str:
    """Render the facts as a table or JSON, ending in a newline."""
    if format == "json":
        public_facts = {name: _public(value) for name, value in facts.items()}
        return json.dumps(public_facts, indent=1) + "\n"
    facts_table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, value in _lines(facts):
        facts_table.add_row(name, escape(value))
    tables = [facts_table, _engine_table(facts["engines"])]
    if "self_test" in facts:
        tables.append(_self_test_table(facts["self_test"]))
    console = Console(file=io.StringIO(), width=110, force_terminal=False)
    for table in tables:
        console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _lines(facts: dict[str, Any]) -> Iterable[tuple[str, str]]:
    yield from facts["versions"].items()
    yield "system", facts["system"]
    yield "processor", f"{facts['cpu']}, {facts['cores']} cores to use"
    yield "memory", f"{facts['memory_bytes'] / 2**30:.0f} GiB"
    yield "free disk here", f"{facts['free_disk_bytes'] / 2**30:.0f} GiB"
    yield from _user_problems(facts)
    yield "port on localhost", "can be opened" if facts["free_port"] else "cannot be opened"
    for gpu in facts["gpus"]:
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        yield "GPU", f"{gpu['name']}, {memory}, compute capability {gpu['compute_capability']}"
    if facts["gpu_problem"]:
        yield "GPU", f"none: {facts['gpu_problem']}"
    yield "driver", f"{facts['driver'] or '-'}, CUDA up to {facts['driver_cuda'] or '-'}"
    yield "CUDA of torch", facts["torch_cuda"] or "none, torch was built without it"
    yield "PJRT plugin", facts["plugin"] or f"none: {nvidia.install_command()}"
    for name in (*_LIBRARIES, "ptxas"):
        yield name, facts[name] or "-"


_CACHES = {
    "user": "in the user's cache folder",
    "temporary": "in the temporary folder, for the user's cannot be written: set XDG_CACHE_HOME",
    "run": "in each run's folder, for no other can be written: set XDG_CACHE_HOME or TMPDIR",
}


def _user_facts() -> dict[str, Any]:
    """Return what this process's user lacks: a name, a home, a temporary folder, shared memory."""
    shared = shared_memory.sizes()
    caches = "run" if cache_folders.temporary() is None else "temporary"
    return {
        "user_has_name": user_name.lookup() is not None,
        "caches": caches if cache_folders.user_folder() is None else "user",
        "temporary_folder": cache_folders.temporary() is not None,
        "shared_memory_bytes": None if shared is None else shared[0],
        "free_shared_memory_bytes": None if shared is None else shared[1],
    }


def _user_problems(facts: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if not facts.get("user_has_name", True):
        yield "user", "has no name; workers are given one"
    if "caches" in facts:
        yield "compile caches", _CACHES[facts["caches"]]
    if not facts.get("temporary_folder", True):
        yield "temporary folder", "none that can be written; set TMPDIR"
    if "shared_memory_bytes" in facts:
        size, free = facts["shared_memory_bytes"], facts["free_shared_memory_bytes"]
        yield "shared memory", shared_memory.described(size, free)


def _public(value: Any) -> Any:
    """Return a fact without the folders that commands in it name."""
    if isinstance(value, str):
        return extras.without_paths(value)
    if isinstance(value, dict):
        return {name: _public(inner) for name, inner in value.items()}
    return [_public(inner) for inner in value] if isinstance(value, list) else value


def _engine_table(engines: list[dict[str, Any]]) -> Table:
    table = Table("engine", "device", "can train here", box=box.SIMPLE_HEAD)
    for usable in engines:
        torch = usable["torch"]
        answer = usable["reason"] or (f"yes, beside torch {torch}" if torch else "yes")
        table.add_row(usable["engine"], usable["device"], escape(answer))
    return table


def _self_test_table(results: list[dict[str, Any]]) -> Table:
    table = Table("self-test", "device", "workers", "result", "seconds", box=box.SIMPLE_HEAD)
    for result in results:
        verdict = "ok" if result["error"] is None else escape(result["error"])
        table.add_row(result["engine"], result["device"], str(result["workers"]), verdict,
                      f"{result['wall_s']:.1f}")  # fmt: skip
    return table


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _library_versions() -> dict[str, str | None]:
    cuda = (_torch_cuda() or "").partition(".")[0]
    majors = [cuda] if cuda else ["13", "12"]  # torch without CUDA, beside JAX with it
    return {
        name: next(filter(None, (_version(package.format(major)) for major in majors)), None)
        for name, package in _LIBRARIES.items()
    }


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _driver_version() -> str | None:
    version_file = Path("/proc/driver/nvidia/version")
    match = (
        re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", version_file.read_text())
        if version_file.exists()
        else None
    )
    return match[1] if match else None


def _ptxas_version(toolkit: Path) -> str | None:
    try:
        finished = subprocess.run(
            [str(toolkit / "bin/ptxas"), "--version"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"V([\d.]+)", finished.stdout)
    return match[1] if match else None


def _memory_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemTotal:\s+(\d+)", meminfo.read_text()) if meminfo.exists() else None
    of_machine = int(found[1]) * 1024 if found else 0
    return min(of_machine, cgroups.memory_limit_bytes() or of_machine)


def _has_free_port() -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return False
        return True
