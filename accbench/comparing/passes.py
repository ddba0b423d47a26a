"""Numerics passes on disk."""

import shutil
from pathlib import Path

from accbench import config
from accbench.recording import records


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
    for record in records.read(file):
        if not (isinstance(record, records.NumericsRecord) and record.phase.startswith("noise")):
            records.append(folder / config.RECORDS_FILE, record)
    if (source / config.CONFIG_FILE).exists():  # not of a launcher that was killed at once
        shutil.copyfile(source / config.CONFIG_FILE, folder / config.CONFIG_FILE)
