"""Weights and networks as other tools load them."""

import dataclasses
import json
import resource
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import nn

from accbench import config, models, resolving
from accbench.data import digits
from accbench.data.sources import imagefolder
from accbench.distributed.process_group import Topology
from accbench.engines.common import model_state
from accbench.engines.common.training_state import TrainingState
from accbench.errors import RequestError
from accbench.models.tasks.classification import Normalized
from accbench.recording import records
from accbench.training import checkpoint_file, checkpoints
from accbench.training import export as exporting
from tests.conftest import TINY, of_kind, run


class HasHead(nn.Module):
    """A network of a user's own, whose parts have the names that a wrapper's have."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(4, 4), nn.Linear(4, 2)


class HeadBehind(models.Spec):
    def build(self, num_classes: int) -> nn.Module:
        return HasHead()

    def loss(self, model, batch):
        raise NotImplementedError

    def synthetic_batch(self, batch_size, num_classes, generator):
        raise NotImplementedError


class WeightsOfItsOwn(models.Classifier):
    """A classifier of accbench's to which a user has added a weight."""

    def __init__(self, net: nn.Module, num_classes: int) -> None:
        super().__init__(net, num_classes)
        self.temperature = nn.Parameter(torch.ones(()))


class WeightBeside(HeadBehind):
    def build(self, num_classes: int) -> nn.Module:
        return WeightsOfItsOwn(nn.Linear(4, num_classes), num_classes)


class TakesNoArguments(nn.Linear):
    """A network whose `state_dict` no module around it can call as torch does."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(4, num_classes)

    def state_dict(self):
        return {"w": self.weight, "b": self.bias}


class Pixels(HeadBehind):
    takes = "images"

    def build(self, num_classes: int) -> nn.Module:
        return Normalized(nn.Conv2d(3, 3, 1))


@dataclasses.dataclass(frozen=True)
class Positions(HeadBehind):
    """A network with a weight for each position of a text."""

    seq_len: int = 128

    def build(self, num_classes: int) -> nn.Module:
        return nn.Embedding(self.seq_len, 2)


def write_run(run_dir: Path, model: str, num_classes: int = 3, **flags) -> nn.Module:
    """A run with a checkpoint of a network that nobody has trained, which is returned."""
    flags = {"model": model, "image_size": 32, **flags}
    task = config.task_of_values(flags)
    torch.manual_seed(0)
    net = models.of_task(task).build(num_classes).eval()
    facts = checkpoint_file.CheckpointFacts(
        1, 0, None, 1, "ddp", model, 0, num_classes, {}, image_size=32
    )
    state = TrainingState({name: t.detach() for name, t in model_state.tensors(net).items()}, {})
    folder = checkpoints.folder_of(run_dir, 1)
    checkpoint_file.write(folder, checkpoint_file.Checkpoint(facts, state, ()))
    (run_dir / "config.json").write_text(json.dumps(config.as_mapping(task)))
    return net


def here(model: type) -> str:
    return f"{__name__}:{model.__name__}"


def load(path: Path):
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (HeadBehind, {"net.weight", "net.bias", "head.weight", "head.bias"}),
        (WeightBeside, {"net.weight", "net.bias", "temperature"}),
        (TakesNoArguments, {"w", "b"}),
    ],
)
def test_what_is_beside_a_users_net_is_exported_with_it(model, names, tmp_path):
    write_run(tmp_path / "run", here(model))
    exporting.export(tmp_path / "run", tmp_path / "out", "state_dict")
    assert load(tmp_path / "out").keys() == names


def test_modules_that_look_at_their_version_load_the_state_dict(tmp_path):
    write_run(tmp_path / "run", "torchvision:mnasnet0_5")
    exporting.export(tmp_path / "run", tmp_path / "out", "state_dict")
    torchvision.models.mnasnet0_5(num_classes=3).load_state_dict(load(tmp_path / "out"))


def test_a_network_that_depends_on_the_runs_flags(tmp_path):
    """Whatever its loss is asked for, and also by its checkpoint's folder."""
    run_dir = tmp_path / "run"
    net = write_run(run_dir, here(Positions), seq_len=8)
    values = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({**values, "label_smoothing": 0.1}))
    for folder in (run_dir, checkpoints.folder_of(run_dir, 1)):
        exporting.export(folder, tmp_path / "out", "state_dict")
        assert torch.equal(load(tmp_path / "out")["weight"], net.weight)


@pytest.mark.parametrize("content", ['{"a flag of another version": 1}', "{", None, "another"])
def test_without_the_runs_flags_a_checkpoint_is_exported_by_what_it_says(content, tmp_path):
    run_dir = tmp_path / "run"
    net = write_run(run_dir, here(Positions))
    if content == "another":
        content = json.dumps({"model": "tests.nets:tiny", "seq_len": 8})
    if content is None:
        (run_dir / "config.json").unlink()
    else:
        (run_dir / "config.json").write_text(content)
    exporting.export(run_dir, tmp_path / "out", "state_dict")
    assert torch.equal(load(tmp_path / "out")["weight"], net.weight)


@pytest.mark.parametrize("format", ["state_dict", "safetensors", "onnx"])
def test_a_file_that_cannot_be_written_gets_a_line(format, tmp_path):
    write_run(tmp_path / "run", "tests.nets:tiny")
    (tmp_path / "file").write_text("")
    # The second name is too long for a file system once it is made a hidden one.
    for out in (tmp_path / "file" / "out", tmp_path / ("o" * 250)):
        with pytest.raises(RequestError, match=f"^cannot write {out}: .*(exists|directory|long)"):
            exporting.export(tmp_path / "run", out, format)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "file"}


@pytest.mark.parametrize("format", ["state_dict", "safetensors"])
def test_a_disk_that_fills_up_gets_a_line(format, tmp_path):
    """By a limit of a file's size, beyond which a write fails as on a full disk."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    write_run(run_dir, here(Positions), seq_len=2**18)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(RequestError, match=f"^cannot write {out}: .*File too large"):
            exporting.export(run_dir, out, format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_folders_without_a_whole_checkpoint_get_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="^auto: there is no such folder$"):
        exporting.export(Path("auto"), Path("out"), "state_dict")
    write_run(Path("run"), here(Positions))
    at = checkpoints.folder_of(Path("run"), 1)
    (at / checkpoint_file.TENSORS_FILE).write_bytes(b"")
    for folder in (Path("run"), at):
        with pytest.raises(
            RequestError, match=f"^{folder}: no checkpoint in it is whole \\(.* 0 b"
        ):
            exporting.export(folder, Path("out"), "state_dict")


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
        for format, load_of in (("state_dict", load), ("safetensors", load_file)):
            out = tmp_path / "out" / format
            done = export(run_dir, out, f"--format={format}", *flags)
            assert done.returncode == 0, done.stderr
            assert done.stdout == f"weights after step 2 in {out}\n"
            net = torchvision.models.resnet18(num_classes=3)
            net.load_state_dict(load_of(out))  # all names, and no other
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


def test_logits_among_what_a_network_returns(trained, tmp_path):
    scans, _ = trained
    model = "tests.nets:returns_dict"  # whose logits are not the first of what it returns
    net = write_run(
        tmp_path / "run", model, num_classes=10, data=f"imagefolder:{scans}", batch_size=64,
        workers=0,
    )  # fmt: skip
    line = exporting.export(tmp_path / "run", tmp_path / "net.onnx", "onnx", evaluate=True)
    onnx_top1, torch_top1 = line.split(" held-out samples ")[1].split(", torch ")
    assert onnx_top1 == torch_top1
    session = onnxruntime.InferenceSession(
        str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"]
    )
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    (logits,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(logits), net(images)["logits"], atol=1e-4)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("torchvision:lraspp_mobilenet_v3_large", "takes images with masks; use --format state"),
        ("lstm_tiny", "--model lstm_tiny takes tokens; use --format state_dict or safetensors"),
        (here(HeadBehind), "takes batches; use --format state_dict"),
        (here(Pixels), r"logits are of shape \(3, 3, 32, 32\), not \(images, classes\)"),
        ("tests.nets:returns_words", "returns str, in which no logits were found"),
    ],
)
def test_onnx_is_of_image_classifiers(model, told, tmp_path):
    write_run(tmp_path / "run", model)
    with pytest.raises(RequestError, match=told):
        exporting.export(tmp_path / "run", tmp_path / "net.onnx", "onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
