"""A step's program between the process that traces it and the one that compiles it."""

from pathlib import Path

# By PJRT's name of the format: an HloModuleProto (xla/service/hlo.proto) for all replicas of a
# node, or a portable artifact of StableHLO for all partitions.
_FILES = {"hlo": "step.hlo_module.pb", "mlir": "step.stablehlo.mlirbc"}
FACTS_FILE = "trace.json"
"""What the tracing process has to tell."""


def write(folder: Path, program_format: str, program: bytes) -> None:
    """Leave a program: "hlo" or "mlir"."""
    (folder / _FILES[program_format]).write_bytes(program)


def read(folder: Path) -> tuple[str, bytes]:
    """(format, program) that was left."""
    (found,) = [name for name, file in _FILES.items() if (folder / file).exists()]
    return found, (folder / _FILES[found]).read_bytes()
