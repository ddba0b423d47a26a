"""Checkpoints on disk: whole or not there, found again, damaged ones passed over."""

import contextlib
import dataclasses
import errno
import json
import os
import random

import pytest
import torch

from accbench import config
from accbench.engines.common.training_state import TrainingState
from accbench.errors import RequestError
from accbench.recording import records, run_folder
from accbench.training import checkpoint_file, checkpoints, resume
from accbench.training.checkpoint_file import Checkpoint, CheckpointFacts, DamagedError
from tests.conftest import small_disk


def checkpoint(
    step: int = 3, top1: float | None = None, size: int = 8, loss: float | None = None
) -> Checkpoint:
    """A made-up one of `size` x `size` weights."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(size, size, 3, 3, generator=generator)
    weight = weight.contiguous(memory_format=torch.channels_last)
    state = TrainingState(
        model={"net.weight": weight, "net.a/b": torch.arange(5), "count": torch.tensor(7)},
        optimizer={"net.weight": {"step": torch.tensor(float(step)), "exp_avg": weight * 2}},
        scaler={"scale": 1024.0, "growth_tracker": 3.0},
    )
    loader = {"epoch": 1, "stages": [[2, 5]], "seed": 0}
    facts = CheckpointFacts(
        step=step, epoch=1, loader=loader, world_size=2, engine="ddp", model="m", seed=0,
        num_classes=10, scaler=state.scaler, top1=top1, loss=loss,
    )  # fmt: skip
    rng = tuple({"torch": torch.full((4,), rank, dtype=torch.uint8)} for rank in range(2))
    return Checkpoint(facts, state, rng)


def writer(folder, keep: int = 2, stop: bool = True):
    told: list[str] = []
    return checkpoints.Writer(folder, keep, stop, told.append), told


def test_what_is_written_is_read(tmp_path):
    saved = checkpoint()
    folder = checkpoints.folder_of(tmp_path, 3)
    num_bytes = checkpoint_file.write(folder, saved)
    assert num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert checkpoint_file.verify(folder) == saved.facts
    found = checkpoint_file.read(folder)
    assert found.facts == saved.facts
    assert found.state.scaler == saved.state.scaler
    for own, expected in (
        (found.state.model, saved.state.model),
        (found.state.optimizer["net.weight"], saved.state.optimizer["net.weight"]),
        *zip(found.rng, saved.rng, strict=True),
    ):
        assert own.keys() == expected.keys()
        for name, tensor in expected.items():
            assert own[name].dtype == tensor.dtype
            assert torch.equal(own[name], tensor)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def damage(path, kind: str, where: float) -> None:
    content = bytearray(path.read_bytes())
    position = min(int(where * len(content)), len(content) - 1)
    if kind == "truncated":
        path.write_bytes(content[:position])
    elif kind == "flipped":
        content[position] ^= 1 << random.Random(position).randrange(8)
        path.write_bytes(content)
    else:
        path.unlink()


@pytest.mark.parametrize("where", [0.0, 0.1, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("kind", ["truncated", "flipped", "missing"])
@pytest.mark.parametrize("file", ["checkpoint.json", "tensors.safetensors"])
def test_damage_is_found_and_passed_over(tmp_path, file, kind, where):
    for step in (2, 4):
        checkpoint_file.write(checkpoints.folder_of(tmp_path, step), checkpoint(step))
    newest = checkpoints.folder_of(tmp_path, 4)
    damage(newest / file, kind, where)
    with pytest.raises(DamagedError, match=file):
        checkpoint_file.verify(newest)
    told: list[str] = []
    found = checkpoints.find("auto", tmp_path, told.append)
    assert found == checkpoints.folder_of(tmp_path, 2)
    assert len(told) == 1
    assert "damaged" in told[0]
    assert "going on from step 2" in told[0]
    # Named itself, it is refused.
    with pytest.raises(RequestError, match="--resume"):
        checkpoints.find(str(newest), None, told.append)


def test_never_a_silent_fresh_start(tmp_path):
    assert checkpoints.find("auto", tmp_path, pytest.fail) is None  # who calls it says so
    with pytest.raises(RequestError, match="no checkpoint is in it"):
        checkpoints.find(str(tmp_path), None, pytest.fail)
    with pytest.raises(RequestError, match="no such folder"):
        checkpoints.find(str(tmp_path / "other"), None, pytest.fail)
    folder = checkpoints.folder_of(tmp_path, 4)
    checkpoint_file.write(folder, checkpoint(4))
    damage(folder / "tensors.safetensors", "truncated", 0.5)
    with pytest.raises(RequestError, match="no checkpoint in .* is whole"):
        checkpoints.find("auto", tmp_path, pytest.fail)


def test_newer_format_is_not_guessed_at(tmp_path):
    folder = checkpoints.folder_of(tmp_path, 3)
    checkpoint_file.write(folder, checkpoint())
    path = folder / "checkpoint.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    content["format"] = 99
    path.write_text(json.dumps({**content, "sha256": checkpoint_file._sha256_of(content)}))
    with pytest.raises(DamagedError, match="format 99"):
        checkpoint_file.verify(folder)


@pytest.mark.parametrize("keep", [1, 3])
def test_newest_and_best_are_kept(tmp_path, keep):
    saving, told = writer(tmp_path, keep)
    for step, top1 in enumerate([0.1, 0.9, None, 0.5, 0.9, 0.3, None, 0.2], start=1):
        saving.save(checkpoint(step, top1), stall_s=0.0)
    saving.finish()
    assert checkpoints.steps_of(tmp_path) == {1: [8, 5], 3: [8, 7, 6, 5]}[keep]
    assert not told
    found = records.read(tmp_path / "records.jsonl")
    assert [record.step for record in found] == list(range(1, 9))
    assert all(record.num_bytes > 3000 for record in found)


def test_the_lowest_loss_is_best_where_there_is_no_top1(tmp_path):
    saving, _ = writer(tmp_path, keep=1)
    for step, loss in enumerate([0.9, None, 0.1, 0.5, 0.1, 0.3], start=1):
        saving.save(checkpoint(step, loss=loss), stall_s=0.0)
    saving.save(checkpoint(7), stall_s=0.0)
    saving.finish()
    assert checkpoints.steps_of(tmp_path) == [7, 5]
    saving.save(checkpoint(8, top1=0.2, loss=9.0), stall_s=0.0)
    saving.save(checkpoint(9), stall_s=0.0)
    saving.finish()
    assert checkpoints.steps_of(tmp_path) == [9, 8]  # a top-1 wins where there is one


def test_facts_that_an_older_checkpoint_lacks_are_not_compared(tmp_path):
    wanted = ["--model=m", "--data=imagefolder:/images", "--seed=0"]
    old = checkpoint()
    of_data = dataclasses.replace(old.facts, data="recordio", num_train_samples=9)
    new = dataclasses.replace(old, facts=of_data)
    for folder, saved, flags, cause in (
        (tmp_path / "old", old, wanted, None),
        (tmp_path / "old", old, [*wanted, "--seed=1"], "--seed 0, and this is 1"),
        (tmp_path / "new", new, wanted, "--data recordio, and this is imagefolder"),
        (tmp_path / "new", new, [*wanted, "--data=recordio:/r"], "training samples 9, and this is"),
    ):
        checkpoint_file.write(folder, saved)
        with (
            contextlib.nullcontext() if cause is None else pytest.raises(RequestError, match=cause)
        ):
            resume.refuse_other(folder, config.parse(flags), 10, 8)


def test_a_task_is_replaced_as_a_whole(tmp_path, monkeypatch):
    task = config.parse(["--data=synthetic", f"--output_dir={tmp_path}"])
    run_folder.write(task)

    def full(path, text):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "write_text", full)
    with pytest.raises(OSError, match="No space"):
        run_folder.write(task)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert json.loads((tmp_path / "config.json").read_text())["data"] == "synthetic"


def test_full_disk_leaves_the_one_before_whole(tmp_path):
    with small_disk(tmp_path / "disk", "120k"):
        run_dir = tmp_path / "disk" / "run"
        saving, told = writer(run_dir, keep=1, stop=False)
        saving.save(checkpoint(1, size=32), 0.0)
        saving.save(checkpoint(2, size=64), 0.0)  # more than is left
        saving.finish()
        assert len(told) == 1
        assert "cannot write a checkpoint" in told[0]
        assert "No space left on device" in told[0]
        assert "training goes on" in told[0]
        assert checkpoints.steps_of(run_dir) == [1]
        checkpoint_file.verify(checkpoints.folder_of(run_dir, 1))
        assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step-000000001"]
        stopping, _ = writer(run_dir, keep=1, stop=True)
        stopping.save(checkpoint(2, size=64), 0.0)
        with pytest.raises(RequestError, match="the ones before are whole"):
            stopping.finish()


def test_what_a_killed_writer_left_is_removed(tmp_path):
    checkpoint_file.write(checkpoints.folder_of(tmp_path, 1), checkpoint(1))
    for name in (".step-000000002.77.part", ".step-000000000.77.gone", ".step-000000001.77.old"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "tensors.safetensors").write_bytes(b"begun")
    assert checkpoints.steps_of(tmp_path) == [1]
    # Killed between giving up the old name and taking the new one.
    checkpoint_file.write(checkpoints.folder_of(tmp_path, 3), checkpoint(3))
    checkpoints.folder_of(tmp_path, 3).rename(tmp_path / "checkpoints" / ".step-000000003.77.old")
    checkpoints.clean(tmp_path)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000000001", "step-000000003"]
    for step in (1, 3):
        checkpoint_file.verify(checkpoints.folder_of(tmp_path, step))


def test_what_cannot_be_written_at_all_is_not_called_saved(tmp_path):
    """Two names for one memory, which the format refuses: a fault of ours, whatever the policy."""
    saving, _ = writer(tmp_path, stop=False)
    broken = checkpoint()
    broken.state.model["twin"] = broken.state.model["count"]
    saving.save(broken, 0.0)
    with pytest.raises(RuntimeError, match="share memory"):
        saving.finish()
    assert not checkpoints.steps_of(tmp_path)
    assert not os.listdir(tmp_path / "checkpoints")
