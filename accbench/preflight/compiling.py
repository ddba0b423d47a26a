"""One compilation in a process of its own, because XLA aborts its process on some errors.

`python -m accbench.preflight.compiling FOLDER GPU NUM_NODES NUM_DEVICES` compiles the traced
program for nodes of so many devices each, and writes FOLDER/compiled.json and XLA's dump in
FOLDER/compiled/.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from accbench.pjrt import gpu, nvidia, xla_flags
from accbench.preflight.pjrt_c_api import CompilerError, Plugin
from accbench.preflight.tracing import programs

FACTS_FILE = "compiled.json"
EXECUTABLE_FILE = "executable.bin"
_FLAGS = {
    # Autotuning times algorithms on the device, which is absent.
    "xla_gpu_autotune_level": "0",
    # Without autotuning, split-k cuts a product of few rows into more parts than it has.
    "xla_gpu_enable_split_k_autotuning": "false",
}


def dump_folder(folder: Path) -> Path:
    """Return the folder that XLA dumps its programs to."""
    return folder / "compiled"


def read_dump(folder: Path) -> tuple[str, str]:
    """Read the optimised program's text and its list of launches, which is empty if absent."""
    (program,) = dump_folder(folder).glob("*gpu_after_optimizations.txt")
    thunks = next(dump_folder(folder).glob("*thunk_sequence.txt"), None)
    return program.read_text(), thunks.read_text() if thunks else ""


def environment(folder: Path, run_flags: str) -> dict[str, str]:
    """Return the environment variables that the compiling process must start with.

    Args:
        folder: where the process writes its results.
        run_flags: XLA_FLAGS of a run on the GPU.
    """
    plugin = nvidia.find_plugin()
    toolkit = nvidia.toolkit(plugin)
    preflight_flags = [
        *(f"--{name}={value}" for name, value in _FLAGS.items() if name not in unknown_flags()),
        f"--xla_dump_to={dump_folder(folder)}",
        "--xla_dump_hlo_as_text",
        *([f"--xla_gpu_cuda_data_dir={toolkit}"] if toolkit else []),
    ]
    return {"XLA_FLAGS": " ".join([run_flags, *preflight_flags]), "TF_CPP_MIN_LOG_LEVEL": "1"}


def unknown_flags() -> tuple[str, ...]:
    """Return accbench's flags that the plugin does not know, and that are left out for it."""
    library = nvidia.find_plugin()
    if library is None:
        return ()
    own = xla_flags.unknown_to(library, tuple(_FLAGS))
    return (*xla_flags.unknown_in_table(library), *own)


def main(argv: Sequence[str]) -> int:
    """Compile the traced program, write the results, and exit with status 0."""
    folder, target, nodes = Path(argv[0]), gpu.load(argv[1]), (int(argv[2]), int(argv[3]))
    library = nvidia.find_plugin()
    assert library is not None
    program_format, program = programs.read(folder)
    try:
        plugin = Plugin(library)
        started = time.perf_counter()
        executable = plugin.compile(program, program_format, target.target_config, nodes)
        facts = {
            "compile_s": time.perf_counter() - started,
            "memory": dataclasses.asdict(executable.memory()),
        }
        (folder / EXECUTABLE_FILE).write_bytes(executable.serialize())
    except CompilerError as error:
        facts = {"error": str(error)}
    (folder / FACTS_FILE).write_text(json.dumps(facts))
    sys.stdout.flush()
    os._exit(0)  # without waiting for the plug-in's threads and shutdown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
