"""Records survive what happens to files of killed runs."""

import pytest

from accbench.errors import RequestError
from accbench.logger import RunLogger
from accbench.recording import records


def test_a_line_cut_off_by_a_kill_spoils_only_itself(tmp_path):
    path = tmp_path / "records.jsonl"
    records.append(path, records.EvalRecord(0, 1.0, 0.5, 0.75, 8))
    with path.open("a") as file:
        file.write('{"kind": "window", "epo')
    end = records.EndRecord("error", "killed")
    records.append(path, end)
    assert records.read(path) == [records.EvalRecord(0, 1.0, 0.5, 0.75, 8), end]


def test_fields_of_a_newer_schema_are_passed_over(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind": "end", "status": "ok", "colour": 1}\n{"kind": "dance"}\n')
    assert records.read(path) == [records.EndRecord("ok")]


@pytest.mark.parametrize("content", ["", "hello\n", "[1]\n", '{"kind": "window"}\n'])
def test_foreign_files_are_named(tmp_path, content):
    path = tmp_path / "records.jsonl"
    path.write_text(content)
    with pytest.raises(RequestError, match="holds no record of a run"):
        records.read(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(RequestError, match="no-such"):
        records.read(tmp_path / "no-such.jsonl")


def test_logger_writes_on_rank_0_alone(tmp_path):
    for rank in (0, 1):
        logger = RunLogger(tmp_path / "run", rank)
        logger.log_params({"dropout": 0.1})
        logger.log_metrics({"grad_norm": float("inf"), "lr": 1}, step=3)
    assert records.read(tmp_path / "run" / "records.jsonl") == [
        records.ParamsRecord({"dropout": 0.1}),
        records.MetricsRecord({"grad_norm": None, "lr": 1.0}, 3),
    ]
