"""A tracing process reports what went wrong in its folder."""

import json

from accbench.errors import RequestError
from accbench.preflight.tracing import process, programs

FLAGS = ("--model=tests.nets:tiny", "--data=synthetic", "--batch_size=4")


def run(folder, trace):
    status = process.run([str(folder), *FLAGS], trace)
    path = folder / programs.FACTS_FILE
    return status, json.loads(path.read_text()) if path.exists() else None


def test_errors_are_one_line_with_the_exit_status(tmp_path):
    def refuse(task, folder):
        raise RequestError(f"no {task.model}")

    def run_out_of_memory(task, folder):
        raise MemoryError

    def fail(task, folder):
        raise ValueError("two\nlines")

    assert run(tmp_path, refuse) == (2, {"error": "no tests.nets:tiny"})
    status, facts = run(tmp_path, run_out_of_memory)
    assert status == 2
    assert "not enough memory" in facts["error"]
    status, facts = run(tmp_path, fail)
    assert status == 2
    assert facts["error"].startswith("ValueError: two lines")


def test_a_step_without_a_program_is_refused(tmp_path):
    status, facts = run(tmp_path, lambda task, folder: None)
    assert status == 2
    assert "nothing for XLA to compile" in facts["error"]


def test_a_program_and_its_facts_are_written(tmp_path):
    def trace(task, folder):
        process.write(folder, "hlo", b"program", {"model": task.model})

    assert run(tmp_path, trace) == (0, {"model": "tests.nets:tiny"})
    assert programs.read(tmp_path) == ("hlo", b"program")
