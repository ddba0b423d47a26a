"""One compilation, in a process of its own, for XLA ends the process on some errors.

`python -m accbench.preflight.compiling FOLDER GPU NUM_DEVICES` compiles
the program that was traced and leaves FOLDER/compiled.json and, as XLA dumps it,
FOLDER/compiled/*.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from accbench.pjrt import nvidia
from accbench.preflight import gpu, programs
from accbench.preflight.pjrt_c_api import CompilerError, Plugin

FACTS_FILE = "compiled.json"
EXECUTABLE_FILE = "executable.bin"


def dump(folder: Path) -> Path:
    """Where XLA leaves what it made."""
    return folder / "compiled"


def read_dump(folder: Path) -> tuple[str, str]:
    """The optimised program as text, and the list of what it launches (empty if there is none)."""
    (program,) = dump(folder).glob("*gpu_after_optimizations.txt")
    launched = next(dump(folder).glob("*thunk_sequence.txt"), None)
    return program.read_text(), launched.read_text() if launched else ""


def environment(folder: Path, xla_flags: str) -> dict[str, str]:
    """What the process must start with.

    Args:
        xla_flags: those that a run on the GPU has.
    """
    plugin = nvidia.find_plugin()
    toolkit = nvidia.toolkit(plugin)
    own = [
        # Algorithms are chosen by timing them on the device, which is not here.
        "--xla_gpu_autotune_level=0",
        # Likewise; without a choice a product of few rows is cut in more parts than it has.
        "--xla_gpu_enable_split_k_autotuning=false",
        f"--xla_dump_to={dump(folder)}",
        "--xla_dump_hlo_as_text",
        *([f"--xla_gpu_cuda_data_dir={toolkit}"] if toolkit else []),
    ]
    return {"XLA_FLAGS": " ".join([xla_flags, *own]), "TF_CPP_MIN_LOG_LEVEL": "1"}


def main(argv: Sequence[str]) -> int:
    """Compile; returns the exit status."""
    folder, target, num_devices = Path(argv[0]), gpu.load(argv[1]), int(argv[2])
    library = nvidia.find_plugin()
    assert library is not None
    form, program = programs.read(folder)
    try:
        plugin = Plugin(library)
        started = time.perf_counter()
        executable = plugin.compile(program, form, target.target_config, num_devices)
        facts = {
            "compile_s": time.perf_counter() - started,
            "memory": dataclasses.asdict(executable.memory()),
        }
        (folder / EXECUTABLE_FILE).write_bytes(executable.serialize())
    except CompilerError as error:
        facts = {"error": str(error)}
    (folder / FACTS_FILE).write_text(json.dumps(facts))
    sys.stdout.flush()
    os._exit(0)  # the plugin's threads and its own end are not worth waiting for


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
