"""Files that carry a step's program from the tracing to the compiling process."""

from pathlib import Path

# PJRT's name of the format -> file: an HloModuleProto (xla/service/hlo.proto) for all replicas of
# a node, or a portable artifact of StableHLO for all partitions.
_FILES = {"hlo": "step.hlo_module.pb", "mlir": "step.stablehlo.mlirbc"}
FACTS_FILE = "trace.json"
"""Facts that the tracing process reports, as JSON."""


def write(folder: Path, program_format: str, program: bytes) -> None:
    """Write a program whose format is "hlo" or "mlir"."""
    (folder / _FILES[program_format]).write_bytes(program)


def read(folder: Path) -> tuple[str, bytes]:
    """Return the format and the program that `write` wrote."""
    (program_format,) = [name for name, file in _FILES.items() if (folder / file).exists()]
    return program_format, (folder / _FILES[program_format]).read_bytes()
