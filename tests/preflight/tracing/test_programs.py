"""Programs on their way from the tracing to the compiling process."""

import pytest

from accbench.preflight.tracing import programs


@pytest.mark.parametrize("program_format", ["hlo", "mlir"])
def test_a_program_is_read_as_it_was_written(program_format, tmp_path):
    programs.write(tmp_path, program_format, b"program")
    assert programs.read(tmp_path) == (program_format, b"program")
