"""Child processes: status, memory, and the line of their log that tells why they ended."""

from pathlib import Path

import pytest

from accbench.preflight import children

CHILD = """
import sys

def main(argv):
    print(argv[0], end="", file=sys.stderr)
    return 3
"""


def run(folder: Path, output: str, seconds: list[float]) -> children.ProcessResult:
    (folder / "noisy_child.py").write_text(CHILD)
    environment = {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}
    return children.run("noisy_child", [output], environment, folder / "child.log", seconds.append)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("first\nlast\n", "last"),
        ("ValueError: no\nlast\n", "ValueError: no"),
        ("F0000 00:00:1.0 12 parse.cc:1] Unknown flag\nSomeError: aborted\n", "Unknown flag"),
        ("\n", ""),
    ],
)
def test_the_message_is_the_line_that_explains_the_end(output, message, tmp_path):
    seconds: list[float] = []
    result = run(tmp_path, output, seconds)
    assert (result.status, result.last_message) == (3, message)
    assert result.peak_bytes > 5e6
    assert result.wall_s >= seconds[-1] > 0
