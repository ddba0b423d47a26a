"""A run's folder on a machine that does not share the client's, copied there as it grows."""

import os
from pathlib import Path

from accbench import config
from accbench.launchers.dask.sending import Sender

# What only ever grows, and is worth seeing while it does.
_GROWING = (".jsonl", ".log")
_STEP_BYTES = 4 << 20


class Mirror:
    """Sends what is new in a folder.

    Args:
        folder: on this machine.
        known_as: the run's folder at the client, whose name records and logs are to hold.
        parts: what to send, by the first part of the path; None: all.
    """

    def __init__(
        self, sender: Sender, folder: Path, known_as: str, parts: tuple[str, ...] | None
    ) -> None:
        self.sender, self.folder, self.parts = sender, folder, parts
        self._renamed = os.fsencode(folder), os.fsencode(known_as)
        self._sent: dict[str, tuple[int, int]] = {}  # path -> (bytes, time of change in ns)

    def update(self, last: bool = False) -> None:
        """Send what has come since.

        Args:
            last: the run has ended, and what is there is whole.
        """
        there = self._files()
        for path in self._sent.keys() - there.keys():
            del self._sent[path]
            self.sender.send("remove", path, b"")
        for path, found in there.items():
            before = self._sent.get(path)
            if before == found:
                continue
            try:
                if path.endswith(_GROWING):
                    self._send_growth(path, before, last)
                # Others once they have stood still; those with a checkpoint's name are whole.
                elif last or path.startswith("checkpoints/"):
                    self.sender.send("whole", path, (self.folder / path).read_bytes())
                    self._sent[path] = found
            except FileNotFoundError:  # an old checkpoint, which the run has removed meanwhile
                continue

    def renamed(self, lines: bytes) -> bytes:
        """With the client's name of the folder in place of this one's."""
        return lines.replace(*self._renamed)

    def _send_growth(self, path: str, before: tuple[int, int] | None, last: bool) -> None:
        begin = 0 if before is None else before[0]
        while True:
            with (self.folder / path).open("rb") as file:
                file.seek(begin)
                new = file.read(_STEP_BYTES)
            whole_lines = new if last and len(new) < _STEP_BYTES else new[: new.rfind(b"\n") + 1]
            whole_lines = whole_lines or (new if len(new) == _STEP_BYTES else b"")
            if not whole_lines:
                return
            self.sender.send("append", path, self.renamed(whole_lines))
            begin += len(whole_lines)
            self._sent[path] = (begin, 0)

    def _files(self) -> dict[str, tuple[int, int]]:
        found = {}
        for folder, folders, names in os.walk(self.folder):
            below = os.path.relpath(folder, self.folder)
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = name if below == "." else f"{below}/{name}"
                wanted = self.parts is None or path.split("/")[0] in self.parts
                if name.startswith(".") or path == config.CONFIG_FILE or not wanted:
                    continue
                try:
                    status = os.stat(os.path.join(folder, name))
                except FileNotFoundError:
                    continue
                found[path] = (status.st_size, status.st_mtime_ns)
        return found
