"""References that are kept for later comparisons."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accbench import config, launchers, resolving
from accbench.comparing import numerics, passes, reference_cache, reference_files, reference_pass
from accbench.comparing.reference_cache import KEPT, FloorEntry
from accbench.comparing.reference_files import FOLDER
from accbench.report import run as runs

FLAGS = (
    "--model=lstm_tiny", "--seq_len=4", "--batch_size=2", "--amp_level=O0", "--workers=0",
    "--threads=1", "--device=cpu", "--data=synthetic", "--synthetic.num_classes=8",
    "--max_steps=2",
)  # fmt: skip


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A function of a name and flags: whether the reference in that folder had been kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def made(name: str, *flags: str, num_shards: int = 2) -> bool:
        run_dir = tmp_path / name
        run_dir.mkdir()
        task = resolving.resolve(config.parse([*FLAGS, *flags, f"--output_dir={run_dir}"]))
        reference_pass.run(task, num_shards, reuses=True)
        return any(record.phase == KEPT for record in runs.read(run_dir).numerics)

    return made


def entries(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "cache" / "accbench" / "references"
    return sorted(folder.iterdir(), key=os.path.getmtime) if folder.exists() else []


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / FOLDER).iterdir()}


def losses(folder: Path) -> list[float | None]:
    return [r.loss for r in runs.read(folder).numerics if r.phase == "reference"]


def test_same_reference_is_taken_and_any_other_is_made(make, tmp_path, monkeypatch):
    assert not make("first")
    assert make("same")
    assert files(tmp_path / "same") == files(tmp_path / "first")
    assert losses(tmp_path / "same") == losses(tmp_path / "first")
    for flag in ("--seed=1", "--lr=0.5", "--batch_size=3", "--max_steps=3", "--clip_norm=0.1",
                 "--synthetic.num_classes=9"):  # fmt: skip
        assert not make(flag, flag), flag
    assert not make("one shard", num_shards=1)
    # What its settings do not tell: batches, the environment, and accbench's own code.
    with monkeypatch.context() as patch:
        read = reference_pass._host_batches
        patch.setattr(reference_pass, "_host_batches", lambda loader: [*read(loader)][::-1])
        assert not make("other order")
    with monkeypatch.context() as patch:
        patch.setenv("MKL_CBWR", "COMPATIBLE")
        assert not make("environment")
    with monkeypatch.context() as patch:
        patch.setattr(reference_cache, "_source", lambda: "edited")
        assert not make("source")
    assert make("same again")


def test_damaged_reference_is_made_anew(make, tmp_path):
    make("first")
    (entry,) = entries(tmp_path)
    file = entry / "step-0001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.unlink()
    file.write_bytes(content)
    assert not make("second")
    first, second = (
        load_file(tmp_path / name / FOLDER / file.name) for name in ("first", "second")
    )
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert make("third")


def test_models_of_ones_own_are_never_kept(make, tmp_path):
    flags = ("--model=tests.nets:tiny", "--image_size=32")
    assert not make("first", *flags)
    assert not make("second", *flags)
    assert entries(tmp_path) == []


def test_least_recently_used_go(make, tmp_path, monkeypatch):
    make("first")
    (first,) = entries(tmp_path)
    size = sum(path.stat().st_size for path in first.iterdir())
    monkeypatch.setattr(reference_cache, "MAX_BYTES", int(2.5 * size))
    os.utime(first, (1, 1))
    make("second", "--seed=1")
    _, second = entries(tmp_path)
    os.utime(second, (2, 2))
    make("third", "--seed=2")
    kept = entries(tmp_path)
    assert len(kept) == 2
    assert second in kept
    monkeypatch.setattr(reference_cache, "MAX_BYTES", size)
    make("too large", "--seed=3")
    assert len(entries(tmp_path)) == 2


def test_plain_ddps_pass_is_kept_beside_its_reference(make, tmp_path):
    make("reference")
    key = reference_files.read_facts(tmp_path / "reference" / FOLDER).cache_key
    assert key is not None

    def entry(name: str, *flags: str) -> FloorEntry:
        task = config.parse([*FLAGS, *flags, f"--output_dir={tmp_path / name}"])
        return FloorEntry(key, launchers.resolve(task))

    first = entry("first")
    assert not first.fetch()
    records = (tmp_path / "reference" / config.RECORDS_FILE).read_bytes()
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / config.RECORDS_FILE).write_bytes(records)
    first.store()
    assert entry("second").fetch()
    assert losses(tmp_path / "second") == losses(tmp_path / "reference")
    assert not entry("other layout", "--ddp.no-channels_last").fetch()
    assert make("again")
    # The part of the pass takes it, and starts no worker.
    third = tmp_path / "third"
    assert numerics.main(["floor", str(tmp_path / "again"), *FLAGS, f"--output_dir={third}"]) == 0
    assert losses(third) == losses(tmp_path / "reference")
    assert not (third / "logs").exists()
    # A row that is plain ddp copies it.
    passes.copy_without_draws(third, tmp_path / "row")
    assert losses(tmp_path / "row") == losses(tmp_path / "reference")
    task = config.parse([f"--config={tmp_path / 'row' / config.CONFIG_FILE}"])
    assert (task.model, task.max_steps) == ("lstm_tiny", 2)
