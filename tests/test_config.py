"""Flags and YAML to a task."""

import json
from pathlib import Path

import pytest

from accbench import config


def test_hyphens_and_underscores_are_the_same():
    a = config.parse(["--batch-size", "4", "--nproc-per-node=2", "--ddp.no-channels-last"])
    b = config.parse(["--batch_size", "4", "--nproc_per_node=2", "--ddp.no_channels_last"])
    assert a == b
    assert (a.batch_size, a.nproc_per_node) == (4, 2)
    assert not a.options["ddp"].channels_last


def test_compiler_opt_is_engine_xla():
    assert config.parse(["--compiler-opt"]) == config.parse(["--engine", "xla"])
    assert config.parse(["--compiler_opt"]).engine == "xla"
    assert config.parse([]).engine == "ddp"


def test_flags_win_over_yaml(tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text("lr: 0.5\nbatch_size: 4\nddp: {channels_last: false}\nmax_steps: null\n")
    task = config.parse(["--lr", "0.25", "--config", str(file)])
    assert (task.lr, task.batch_size, task.max_steps) == (0.25, 4, None)
    assert not task.options["ddp"].channels_last


def test_written_task_reads_back_the_same(tmp_path):
    flags = ["--compiler-opt", "--data=synthetic", "--synthetic.num_classes=7", "--lr=0.125"]
    asked = config.resolve(config.parse([*flags, f"--output_dir={tmp_path / 'run'}"]))
    file = tmp_path / "run" / "config.json"
    with config.claim_output_dir(asked) as task:
        again = config.parse(["--config", str(file)])
    assert config.as_mapping(again) == config.as_mapping(task)
    assert json.loads(file.read_text())["synthetic"]["num_classes"] == 7


def test_defaults_on_a_cpu():
    task = config.resolve(
        config.parse(["--data=synthetic", "--device=cpu", "--nproc_per_node=1000"])
    )
    assert (task.device, task.batch_size, task.amp_dtype) == ("cpu", 8, "bfloat16")
    assert (task.threads, task.workers) == (1, 1)


def test_two_runs_in_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = config.parse(["--data=synthetic"])
    # Stands in for another process that makes the folder right after one has looked.
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with config.claim_output_dir(task) as first, config.claim_output_dir(task) as second:
        assert first.output_dir != second.output_dir


def test_plugin_names_and_their_options_do_not_collide():
    from accbench import plugins

    names = [name for kind in plugins.KINDS for name in plugins.classes(kind)]
    assert len(names) == len(set(names))
    assert not {field for field in config.TaskConfig.__dataclass_fields__} & set(names)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("mock", ("mock", None)),
        ("imagefolder:/a/b:c", ("imagefolder", "/a/b:c")),
        ("s3://bucket/prefix", ("s3", "s3://bucket/prefix")),
    ],
)
def test_data_names(data, expected):
    assert config.data_name(data) == expected
