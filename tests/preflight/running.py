"""`accbench preflight` as a process."""

import json
import os
import subprocess
import sys
from typing import Any

import jsonschema

from tests.conftest import HANG_S, ROOT, run

SCHEMA = json.loads((ROOT / "accbench/report/preflight.schema.json").read_text())


def start(*flags: object, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "accbench", "preflight", *map(str, flags)],
        cwd=ROOT, env={**os.environ, **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def end(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=HANG_S)
    return process.returncode, out, err


def completed(*flags: object) -> tuple[int, str, str]:
    """Return (status, output, errors) of a process that nobody sends signals to."""
    done = run("accbench", "preflight", *flags, script="-m")
    return done.returncode, done.stdout, done.stderr


def result_of(*flags: object) -> dict[str, Any]:
    status, out, err = completed("--format=json", *flags)
    assert status == 0, err
    assert err == ""
    result: dict[str, Any] = json.loads(out)
    jsonschema.validate(result, SCHEMA)
    return result
