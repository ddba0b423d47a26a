"""PJRT's C interface."""

from pathlib import Path

import psutil
import pytest

from accbench.preflight.pjrt_c_api import CompilerError, Plugin


def test_a_library_that_is_no_plug_in():
    maps = psutil.Process().memory_maps()
    libc = next(m.path for m in maps if "libc.so" in m.path or "libc-" in m.path)
    with pytest.raises(CompilerError, match="is not a PJRT plug-in"):
        Plugin(Path(libc))
