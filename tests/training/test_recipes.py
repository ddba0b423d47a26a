"""Recipes and what they are made of: data, learning rates."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from accbench import config, resolving
from accbench.data import digits
from accbench.data.mixing import Mixing
from accbench.data.recordio.dataset import RecordIODataset
from accbench.data.sources import imagefolder
from accbench.distributed.process_group import Topology
from accbench.models import arcface
from accbench.recording import records
from accbench.training.schedule import Schedule
from tests.conftest import ROOT, TINY, end_of, of_kind, run

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TASK = config.TaskConfig(lr=0.5)


@pytest.fixture(scope="module")
def scans(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    assert digits.make(folder) == 1797
    return folder


def test_digits(scans):
    counts = {
        split: [len(list((scans / split / str(digit)).iterdir())) for digit in range(10)]
        for split in ("train", "val")
    }
    assert sum(counts["train"]) == 1442
    assert sum(counts["val"]) == 355
    assert [t + v for t, v in zip(counts["train"], counts["val"], strict=True)] == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    with Image.open(scans / "train" / "0" / "0000.png") as image:
        assert image.size == (8, 8)
        assert image.getextrema()[1] == 239  # the first scan's darkest is 15 of 16
    for split in ("train", "val"):
        records = RecordIODataset(scans / f"{split}.rec")
        assert len(records) == sum(counts[split])
        records.close()
    assert digits.make(scans) == 1797  # and nothing is made again


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_begins(scans, tmp_path, recipe):
    """With its own kind of data, and images or a Llama of a size for which there is time."""
    asked = yaml.safe_load(recipe.read_text())
    kind, more = asked["data"].partition(":")[0], []
    if kind == "tokens":
        pytest.importorskip("transformers")
        scans = ROOT / "docs"
        more = ["--model=llama_tiny", "--seq_len=16", "--accumulate=2", "--nproc_per_node=2"]
    done = run(f"--config={recipe}", f"--data={kind}:{scans}", "--max_steps=2", "--image_size=32",
               "--batch_size=4", "--workers=0", "--eval_interval=0", "--save_interval=0",
               "--threads=1", "--device=cpu", f"--output_dir={tmp_path / 'run'}",
               *more)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert end_of(tmp_path / "run").num_steps == 2
    compiled = "[--engine=jax]" if "dp_shard" in asked else "[--compiler-opt]"
    assert compiled in recipe.read_text()


@pytest.mark.xla
@pytest.mark.parametrize(
    "model", ["ShallowFace", pytest.param("shallow_vit", marks=pytest.mark.soak)]
)
def test_models_of_recipes_under_xla(scans, tmp_path, model):
    """The losses of ddp; a rate that changes with every step compiles nothing anew.

    Of the recipes' kinds with fewer layers, for torch_xla compiles each anew.
    """
    losses = {}
    for engine in ("ddp", "xla"):
        run_dir = tmp_path / engine
        done = run(f"--data=imagefolder:{scans}", f"--model=tests.nets:{model}",
                   f"--engine={engine}", "--image_size=32", "--batch_size=4", "--amp_level=O0",
                   "--workers=0", "--threads=1",
                   "--lr=1e-4", "--lr_schedule=cosine", "--clip_norm=1", "--decay=matrices",
                   "--max_steps=6", "--warmup_steps=3", "--log_interval=1", "--device=cpu",
                   "--eval_interval=0", f"--output_dir={run_dir}")  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert end_of(run_dir).num_recompiles == 0
        losses[engine] = [window.loss for window in of_kind(run_dir, records.WindowRecord)]
    if model == "shallow_vit":  # the other has dropout
        assert losses["xla"] == pytest.approx(losses["ddp"], rel=1e-3)
    assert losses["xla"][0] == pytest.approx(losses["ddp"][0], rel=0.2)


def test_angular_margin():
    """The target's logit is that of an angle larger by the margin, as long as that is below 180."""
    angles = torch.tensor([0.3, 1.2, 2.6, 3.0], dtype=torch.float64)
    cosines = torch.stack([angles.cos(), torch.zeros(4, dtype=torch.float64)], dim=1)
    spec = arcface.ArcFace("arcface_r18", torch.nn.Identity)
    losses = [spec.loss_of_logits(cosines[i : i + 1], torch.tensor([0])).item() for i in range(4)]
    further = (angles + 0.5).cos()
    assert losses[:3] == pytest.approx((1 + (-64 * further[:3]).exp()).log().tolist())
    assert losses[3] > losses[2]  # and beyond that it still grows
    scores = spec.score(lambda images: images, (cosines, torch.tensor([0, 0, 0, 1])))
    assert scores.tolist()[1:] == [3.0, 4.0, 4.0]


def test_mixing():
    """Each image has as much of its neighbour as its labels say."""
    colors = torch.tensor([0, 60, 120, 240], dtype=torch.uint8)
    images = colors.view(4, 1, 1, 1).expand(4, 24, 24, 3)
    labels = torch.arange(4)
    pasted = set()
    for key in range(40):
        for mixup, cutmix in ((0.0, 1.0), (0.3, 0.0), (0.3, 1.0)):
            mix = Mixing(mixup, cutmix, num_classes=5, seed=1)
            mixed, weights = mix(images, labels, key)
            assert mixed.dtype == torch.uint8
            assert mixed.shape == images.shape
            assert weights.shape == (4, 5)
            assert torch.allclose(weights.sum(1), torch.ones(4))
            assert weights[:, 4].sum() == 0
            mean = mixed.float().mean(dim=(1, 2, 3))
            assert torch.allclose(mean, weights[:, :4] @ colors.float(), atol=0.51)
            again, _ = mix(images, labels, key)
            assert torch.equal(mixed, again)
            if mixup and cutmix:
                pasted.add(len(mixed[1].unique()) == 2 or weights[1, 1] in (0, 1))
    assert pasted == {True, False}
    assert not torch.equal(mix(images, labels, 0)[1], mix(images, labels, 1)[1])


def test_images_of_a_batch_are_mixed_wherever_they_are_read(scans):
    flags = [*TINY, f"--data=imagefolder:{scans}", "--mixup=0.2", "--cutmix=1"]
    found = []
    for workers in (0, 2):
        task = resolving.resolve(config.parse([*flags, f"--workers={workers}"]))
        loader = imagefolder.Source(
            str(scans), task, task.options["imagefolder"], Topology()
        ).train_loader()
        found.append([batch for batch, _ in zip(loader, range(5), strict=False)])
    for (images, labels), (others, their_labels) in zip(*found, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, their_labels)
        assert labels.shape == (4, 10)
        assert images.is_contiguous(memory_format=torch.channels_last)


def rates(task: config.TaskConfig, num_steps: int, begin: int = 0) -> list[float]:
    """Of each step, at ten steps an epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=task.lr)
    schedule = Schedule(optimizer, task, 10, num_steps, begin)
    found = []
    for _ in range(begin, num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return found


def test_rates():
    assert rates(TASK, 4) == [0.5] * 4
    warming = rates(replace(TASK, lr_warmup_epochs=0.4), 6)
    assert warming == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    halving = replace(TASK, lr_schedule="step", lr_step_epochs=1, lr_step_factor=0.5)
    assert rates(halving, 30)[::5] == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.125, 0.125])
    line = replace(TASK, lr_schedule="linear", lr_warmup_epochs=1, lr_final=0.2)
    assert rates(line, 20)[10:] == pytest.approx([0.5 - 0.04 * step for step in range(10)])
    cosine = replace(TASK, lr_schedule="cosine", lr_warmup_epochs=1, lr_final=0.1)
    expected = [0.05 + 0.45 * (1 + math.cos(math.pi * step / 40)) / 2 for step in range(40)]
    assert rates(cosine, 50)[10:] == pytest.approx(expected)
    # As torch's own has it.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40, eta_min=0.05)
    of_torch = []
    for _ in range(40):
        of_torch.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torchs.step()
    assert rates(cosine, 50)[10:] == pytest.approx(of_torch)


def test_rates_go_on():
    task = replace(TASK, lr_schedule="cosine", lr_warmup_epochs=2.5)
    whole = rates(task, 60)
    for begin in (1, 7, 25, 26, 59):
        assert rates(task, 60, begin) == whole[begin:]
