"""Weights and networks as other tools load them."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import torchvision
from safetensors.torch import load_file

from accbench import config, resolving
from accbench.data import digits
from accbench.data.sources import imagefolder
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError
from accbench.recording import records
from accbench.training import checkpoint_file, checkpoints
from accbench.training import export as exporting
from tests.conftest import TINY, of_kind, run


def export(run_dir, out, *flags: str):
    return run("accbench", "export", run_dir, out, *flags, script="-m")


def test_state_dict_is_what_torchvision_loads(images, tmp_path):
    run_dir = tmp_path / "run"
    done = run(*TINY, "--model=resnet18", f"--data=imagefolder:{images}", "--max_steps=2",
               "--ema_decay=0.5", f"--output_dir={run_dir}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    saved = checkpoint_file.read(checkpoints.folder_of(run_dir, 2)).state
    averages = {name: kept["average"] for name, kept in saved.optimizer.items()}
    for flags, expected in ((("--no-average",), saved.model), ((), {**saved.model, **averages})):
        for format, load in (
            ("state_dict", lambda path: torch.load(path, weights_only=True)),
            ("safetensors", load_file),
        ):
            out = tmp_path / "out" / format
            done = export(run_dir, out, f"--format={format}", *flags)
            assert done.returncode == 0, done.stderr
            assert done.stdout == f"weights after step 2 in {out}\n"
            net = torchvision.models.resnet18(num_classes=3)
            net.load_state_dict(load(out))  # all names, and no other
            for name, tensor in net.state_dict().items():
                assert torch.equal(tensor, expected[f"net.{name}"])
    for folder in (tmp_path / "out", Path(".")):  # the second has no name either
        with pytest.raises(RequestError, match=f"cannot write {folder}: it is a folder"):
            exporting.export(run_dir, folder, "state_dict")
    done = export(tmp_path, tmp_path / "more")
    assert done.returncode == 2
    assert "no checkpoint is in it" in done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the scans' folder, the folder of a run that has learned them)"""
    folder = tmp_path_factory.mktemp("digits")
    digits.make(folder / "scans")
    done = run(*TINY, f"--data=imagefolder:{folder / 'scans'}", "--model=resnet10", "--lr=0.002",
               "--imagefolder.augment=part", "--batch_size=32", "--max_steps=90", "--epochs=2",
               "--ema_decay=0.9", f"--output_dir={folder / 'run'}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "scans", folder / "run"


@pytest.mark.parametrize(("format", "apart"), [("onnx", 1e-4), ("onnx_int8", 0.2)])
def test_onnx_runtime_reads_the_digits(trained, tmp_path, format, apart):
    scans, run_dir = trained
    out = tmp_path / "digits.onnx"
    done = export(run_dir, out, f"--format={format}", "--evaluate")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    line, _, told = done.stdout.partition(", logits of random images within ")
    assert line == f"weights after step 90 in {out}"
    assert float(told.split()[0]) < apart
    assert [path.name for path in tmp_path.iterdir()] == ["digits.onnx"]
    flags = [*TINY, f"--data=imagefolder:{scans}", "--imagefolder.augment=part"]
    task = resolving.resolve(config.parse(flags))
    loader = imagefolder.Source(
        str(scans), task, task.options["imagefolder"], Topology()
    ).eval_loader()
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    hits = num = 0
    for images, labels in loader:  # the last is filled up with images of label -1
        (logits,) = session.run(None, {"images": np.ascontiguousarray(images.numpy())})
        hits += int((logits.argmax(1) == labels.numpy()).sum())
        num += int((labels >= 0).sum())
    assert num == 355
    averaged = [e for e in of_kind(run_dir, records.EvalRecord) if e.averaged][-1]
    assert averaged.top1 > 0.9
    assert hits / num == pytest.approx(averaged.top1, abs=0.001 if format == "onnx" else 0.02)
    assert told.strip().endswith(
        f"; top-1 of 355 held-out samples {hits / num:.2%}, torch {averaged.top1:.2%}"
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--evaluate",), "--evaluate is of --format onnx and onnx_int8"),
        (("--evaluate", "--format=onnx"), "there is no folder"),
    ],
)
def test_nothing_to_evaluate(trained, tmp_path, flags, expected):
    _, run_dir = trained
    moved = tmp_path / "run"
    shutil.copytree(run_dir, moved)
    values = json.loads((moved / "config.json").read_text())
    values["data"] = f"imagefolder:{tmp_path / 'gone'}"
    (moved / "config.json").write_text(json.dumps(values))
    done = export(moved, tmp_path / "out", *flags)
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_network_that_onnx_cannot_have(images, tmp_path):
    run_dir = tmp_path / "run"
    done = run(*TINY, "--model=tests.nets:decides_by_value", f"--data=imagefolder:{images}",
               "--max_steps=1", "--warmup_steps=1", f"--output_dir={run_dir}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = export(run_dir, tmp_path / "net.onnx", "--format=onnx")
    assert done.returncode == 2
    assert "the network cannot be written as ONNX" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "net.onnx").exists()
