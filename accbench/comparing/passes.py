"""Numerics passes on disk."""

import json
import shutil
from pathlib import Path

from accbench import config


def copy_without_draws(source: Path, folder: Path) -> None:
    """Copy a pass of plain ddp for a row that is plain ddp, without what draws measured.

    The record keeps how a pass ended, also if that was an error.

    Args:
        source: the folder of the pass; a pass that left no record is copied as none.
        folder: the row's folder, which does not exist.
    """
    file = source / config.RECORDS_FILE
    if not file.exists():
        return
    folder.mkdir(parents=True)
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not json.loads(line).get("phase", "").startswith("noise")]
    (folder / config.RECORDS_FILE).write_text("".join(kept), encoding="utf-8")
    shutil.copyfile(source / config.CONFIG_FILE, folder / config.CONFIG_FILE)
