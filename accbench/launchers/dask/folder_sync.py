"""Continuous copy of a run's folder to a client that does not share the disk."""

import os
from pathlib import Path

from accbench import config
from accbench.launchers.dask.event_log import EventSender

# Files that only grow, of which each new part is sent at once.
_APPEND_ONLY = (".jsonl", ".log")
_CHUNK_BYTES = 4 << 20


class FolderSync:
    """A sender of new files and new parts of files in a folder.

    Args:
        sender: sends messages to the client.
        folder: the folder on this machine.
        client_folder: the run's folder at the client, which replaces `folder` in records and logs.
        subfolders: send only these; None: send everything.
    """

    def __init__(
        self,
        sender: EventSender,
        folder: Path,
        client_folder: str,
        subfolders: tuple[str, ...] | None,
    ) -> None:
        self.sender, self.folder, self.subfolders = sender, folder, subfolders
        self._renaming = os.fsencode(folder), os.fsencode(client_folder)
        self._sent: dict[str, tuple[int, int]] = {}  # path -> (bytes, mtime in ns)

    def update(self, last: bool = False) -> None:
        """Send what has changed since the last update.

        Args:
            last: the run has ended, so that all files are complete.
        """
        current = self._files()
        for path in self._sent.keys() - current.keys():
            del self._sent[path]
            self.sender.send("remove", path, b"")
        for path, status in current.items():
            sent = self._sent.get(path)
            if sent == status:
                continue
            try:
                if path.endswith(_APPEND_ONLY):
                    self._send_growth(path, sent, last)
                # Other files are sent at the end; a file under a checkpoint's name is complete.
                elif last or path.startswith("checkpoints/"):
                    self.sender.send("whole", path, (self.folder / path).read_bytes())
                    self._sent[path] = status
            except FileNotFoundError:  # the run has just removed an old checkpoint
                continue

    def with_client_folder(self, lines: bytes) -> bytes:
        """Replace the folder's path in `lines` by its path at the client."""
        return lines.replace(*self._renaming)

    def _send_growth(self, path: str, sent: tuple[int, int] | None, last: bool) -> None:
        begin = 0 if sent is None else sent[0]
        while True:
            with (self.folder / path).open("rb") as file:
                file.seek(begin)
                new = file.read(_CHUNK_BYTES)
            complete_lines = (
                new if last and len(new) < _CHUNK_BYTES else new[: new.rfind(b"\n") + 1]
            )
            complete_lines = complete_lines or (new if len(new) == _CHUNK_BYTES else b"")
            if not complete_lines:
                return
            self.sender.send("append", path, self.with_client_folder(complete_lines))
            begin += len(complete_lines)
            self._sent[path] = (begin, 0)

    def _files(self) -> dict[str, tuple[int, int]]:
        files = {}
        for folder, folders, names in os.walk(self.folder):
            relative = os.path.relpath(folder, self.folder)
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = name if relative == "." else f"{relative}/{name}"
                selected = self.subfolders is None or path.split("/")[0] in self.subfolders
                if name.startswith(".") or path == config.CONFIG_FILE or not selected:
                    continue
                try:
                    status = os.stat(os.path.join(folder, name))
                except FileNotFoundError:
                    continue
                files[path] = (status.st_size, status.st_mtime_ns)
        return files
