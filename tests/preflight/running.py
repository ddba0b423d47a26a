"""`accbench preflight` as a process."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema

from tests.conftest import HANG_S, ROOT, python

SCHEMA = json.loads((ROOT / "accbench/report/preflight.schema.json").read_text())
# Run the command with a tracing process that is a copy of it, and has its imports.
FORKED = ("-m", "tests.all_forked")
WITH_LLAMA = (*FORKED, "--import=transformers:LlamaForCausalLM")


def start(*flags: object, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "accbench", "preflight", *map(str, flags)],
        cwd=ROOT, env={**os.environ, **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def end(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=HANG_S)
    return process.returncode, out, err


def completed(*flags: object, by: Sequence[str] = ()) -> tuple[int, str, str]:
    """Return (status, output, errors) of a process that nobody sends signals to.

    Args:
        flags: of the command.
        by: what Python runs, to run the command.
    """
    done = python(*by, "-m", "accbench", "preflight", *flags)
    return done.returncode, done.stdout, done.stderr


def result_of(*flags: object, by: Sequence[str] = ()) -> dict[str, Any]:
    status, out, err = completed("--format=json", *flags, by=by)
    assert status == 0, err
    assert err == ""
    result: dict[str, Any] = json.loads(out)
    jsonschema.validate(result, SCHEMA)
    return result
