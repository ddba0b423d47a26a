"""What cannot be done is refused before a worker starts: exit status 2 and one line."""

import importlib.util

import pytest
import torch

from accbench import cli
from accbench.system import extras
from tests.conftest import TINY, run

NO_CLASSES, NO_IMAGES = "no class folders", "are empty"


def refusal(capsys, *flags: str) -> str:
    """The one line on standard error."""
    assert cli.run(list(flags)) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--engine", "jaxx"], ["unknown engine 'jaxx'", "ddp", "xla"]),
        (["--model", "resnet51"], ["unknown model 'resnet51'", "resnet50", "resnet18"]),
        (["--model", "no_such_module:net"], ["no_such_module"]),
        (["--model", "vit_s_16", "--image_size", "40"], ["patches of 16 pixels"]),
        (["--model", "arcface_r18", "--mixup", "0.2"], ["mix labels", "arcface_r18"]),
        (["--batch_size", "5", "--accumulate", "2"], ["cannot be cut into --accumulate 2"]),
        (["--model", ":x"], ["--model :x is not of the form package.module:callable"]),
        (["--model", ".a:b"], ["--model .a:b is not of the form package.module:callable"]),
        (["--data", "tfrecord:x"], ["unknown data source 'tfrecord'", "imagefolder", "synthetic"]),
        (["--launcher", "mpi"], ["unknown launcher 'mpi'", "local"]),
        (["--amp_level", "O2"], ["O2", "O0", "O1", "amp"]),
        (["--batch_size", "0"], ["--batch_size must be at least 1, not 0"]),
        (["--batch_size", "eight"], ["batch_size", "eight"]),
        (["--nproc_per_node", "0"], ["--nproc_per_node must be at least 1"]),
        (["--max-steps", "-1"], ["--max_steps must be at least 1"]),
        (["--lr", "nan"], ["--lr must be at least 0, not nan"]),
        (["--lr", "inf"], ["--lr must be at most", "not inf"]),
        (["--timeout_s", "inf"], ["--timeout_s must be at most 1e+06, not inf"]),
        (["--timeout_s", "1e30"], ["--timeout_s must be at most 1e+06, not 1e+30"]),
        (["--timeout_s", "nan"], ["--timeout_s must be at least 1, not nan"]),
        (["--batchsize", "3"], ["--batchsize", "perhaps you meant --batch_size"]),
        (["--engine", "ddp", "--ddp.nhwc"], ["--ddp.nhwc"]),
        (["--device", "cuda", "--data", "synthetic"], ["no CUDA device", "--device cpu"]),
        (["--device", "tpu", "--data", "synthetic"], ["TPU", "--engine xla"]),
        (["--data", "imagefolder"], ["imagefolder:DIR"]),
        (["--data", "imagefolder:/no/such"], ["no folder /no/such"]),
        (["--data", "mock:/no/such"], ["/no/such", "python -m accbench data mock"]),
        (["--config", "/no/such.yaml"], ["/no/such.yaml", "No such file"]),
        (["--compiler-opt", "--engine", "inductor"], ["--compiler-opt means --engine xla"]),
    ],
)
def test_one_line_names_cause_and_remedy(capsys, flags, expected):
    line = refusal(capsys, *flags)
    for part in expected:
        assert part in line


@pytest.mark.parametrize(
    ("plugin", "option", "expected"),
    [
        ("--data=synthetic", "synthetic.num_batches=0", "at least 1, not 0"),
        ("--data=synthetic", "synthetic.num_classes=0", "at least 1, not 0"),
        ("--data=synthetic", "synthetic.steps_per_epoch=-1", "at least 1, not -1"),
        ("--data=recordio:x.rec", "recordio.num_classes=0", "at least 1, not 0"),
        ("--data=s3://b/p", "s3.attempts=0", "at least 1, not 0"),
        ("--data=s3://b/p", "s3.timeout_s=-1", "at least 0.001, not -1.0"),
        ("--data=s3://b/p", "s3.timeout_s=inf", "at most 1e+06, not inf"),
        ("--data=s3://b/p", "s3.cache_gib=nan", "at least 0, not nan"),
        ("--data=s3://b/p", "s3.listing_max_age_s=-1", "at least 0, not -1.0"),
        ("--engine=xla", "xla.host_bucket_mib=0", "at least 1, not 0"),
    ],
)
def test_options_of_a_plugin_have_limits(capsys, plugin, option, expected):
    name = option.partition("=")[0]
    assert f"--{name} must be {expected}" in refusal(capsys, plugin, f"--{option}")


@pytest.mark.parametrize(("name", "kind"), [("task.yaml", "YAML"), ("task.json", "JSON")])
def test_file_nested_too_deeply(capsys, tmp_path, name, kind):
    (tmp_path / name).write_text("[" * 100_000)
    assert f"{name} is not {kind}: " in refusal(capsys, "--config", str(tmp_path / name))


@pytest.mark.parametrize("name", ["records.jsonl", "comparison.json"])
def test_record_nested_too_deeply(capsys, tmp_path, name):
    (tmp_path / name).write_text("[" * 100_000 + "\n")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("batchsize: 8\n", ["task.yaml: ", "--batchsize", "--batch_size"]),
        ("batch_size: many\n", ["task.yaml: ", "batch_size", "many"]),
        ("amp_level: O3\n", ["task.yaml: ", "O3"]),
        ("ddp:\n  channels_first: true\n", ["task.yaml: ", "channels_first"]),
        ("- batch_size\n", ["task.yaml", "must hold `flag: value` lines"]),
        ("a: b: c\n", ["task.yaml is not YAML"]),
        ("lr: !!python/object/apply:os.getcwd []\n", ["task.yaml is not YAML"]),
    ],
)
def test_yaml_is_checked_as_flags_are(capsys, tmp_path, content, expected):
    file = tmp_path / "task.yaml"
    file.write_text(content)
    line = refusal(capsys, "--config", str(file))
    for part in expected:
        assert part in line


@pytest.mark.parametrize(
    ("folders", "expected"),
    [([], "no folder train/"), (["train"], NO_CLASSES), (["train/a", "train/b"], NO_IMAGES)],
)
def test_folder_without_images(capsys, tmp_path, folders, expected):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    assert expected in refusal(capsys, "--data", f"imagefolder:{tmp_path}")


def test_output_folder_that_cannot_be_written(capsys, tmp_path):
    file = tmp_path / "file"
    file.touch()
    line = refusal(capsys, "--data", "synthetic", "--output_dir", str(file / "run"))
    assert "cannot write to --output_dir" in line


def test_output_folder_of_another_run(capsys, tmp_path):
    (tmp_path / "records.jsonl").touch()
    line = refusal(capsys, "--data", "synthetic", "--output_dir", str(tmp_path))
    assert "already holds a run" in line


def test_more_workers_than_cuda_devices(capsys, monkeypatch):
    # Stands in for a machine with one GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    line = refusal(capsys, "--nproc_per_node", "2", "--data", "synthetic")
    assert "--nproc_per_node 2 is more than the 1 CUDA devices here" in line


def test_compiler_opt_without_torch_xla(capsys, monkeypatch):
    # Stands in for an environment without the package.
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch_xla" else found(name)
    )
    monkeypatch.setattr(extras, "xla_python", lambda: None)  # as before it has been installed
    line = refusal(capsys, "--compiler-opt", "--data", "synthetic")
    assert "needs torch_xla, which is not installed: " in line
    assert line.endswith(extras.install_command("xla"))


def test_batch_larger_than_a_shard_is_known_in_the_worker(images, tmp_path):
    flags = (*TINY, "--batch_size=32", f"--data=mock:{images}", f"--output_dir={tmp_path / 'run'}")
    result = run("--nproc_per_node=2", *flags)
    assert result.returncode == 2
    assert result.stderr.count("lower --batch_size 32") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("script", ["launch_single_task.py", "main.py"])
def test_scripts_refuse_alike(script):
    result = run("--engine=jaxx", script=script)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "unknown engine 'jaxx'" in result.stderr
