"""The copy of a run's folder that a machine sends to the client."""

import shutil
from pathlib import Path

from accbench.launchers.dask.folder_sync import FolderSync


class Removes:
    """Stands in for the sender; a checkpoint is removed while its first file is under way."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.sent: list[tuple[str, str]] = []

    def send(self, kind: str, path: str, data: bytes) -> None:
        self.sent.append((kind, path))
        shutil.rmtree(self.checkpoint, ignore_errors=True)


def test_a_checkpoint_removed_meanwhile_leaves_nothing(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-000000002"
    checkpoint.mkdir(parents=True)
    for name in ("manifest.json", "tensors.safetensors"):
        (checkpoint / name).write_text("whole")
    sender = Removes(checkpoint)
    folder_sync = FolderSync(sender, tmp_path, "/client/run", None)
    folder_sync.update()
    ((kind, path),) = sender.sent
    assert kind == "whole"
    folder_sync.update(last=True)
    assert sender.sent == [("whole", path), ("remove", path)]
