"""Recipes and what they are made of: data, learning rates."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from accbench import config
from accbench.data import digits
from accbench.data.recordio.source import RecordIODataset
from accbench.training.schedule import Schedule
from tests.conftest import ROOT, end_of, run

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


@pytest.mark.parametrize("engine", ["ddp", "xla"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_begins(scans, tmp_path, recipe, engine):
    """And a rate that changes with every step compiles nothing anew."""
    done = run(f"--config={recipe}", f"--data=imagefolder:{scans}", "--max_steps=8",
               "--warmup_steps=4", "--log_interval=1", "--workers=0", f"--engine={engine}",
               "--device=cpu", f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    end = end_of(tmp_path / "run")
    assert end.num_steps == 8
    assert end.num_recompiles == 0


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
