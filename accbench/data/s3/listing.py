"""Which images a bucket holds, and which class each of them is of."""

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Those of torchvision's `ImageFolder`.
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


@dataclasses.dataclass(frozen=True)
class Listing:
    """The images below a prefix, by key; memory-mapped, so that processes share it."""

    text: np.ndarray
    """All keys' UTF-8 bytes, one after the other; (num_bytes,) uint8."""
    ends: np.ndarray
    """Where each key ends in `text`; (num_keys,) int64."""
    sizes: np.ndarray
    """Bytes of each object; (num_keys,) int64."""
    tags: np.ndarray
    """Another number for another content; (num_keys,) int64."""
    folders: np.ndarray
    """Each key's folder, by number; (num_keys,) int32."""
    folder_names: list[str]
    """Without the last slash; also of folders that hold no image."""
    path: Path | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def key(self, number: int) -> str:
        """A key."""
        begin = int(self.ends[number - 1]) if number else 0
        return self.text[begin : int(self.ends[number])].tobytes().decode()

    def class_folders(self, prefix: str) -> list[str]:
        """The folders right below a prefix that ends in / or is empty, sorted."""
        return sorted({_class_of(folder, prefix) for folder in self.folder_names} - {""})

    def labelled(self, prefix: str, classes: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the images in these folders below the prefix, their labels), both (n,)."""
        label_of = {name: label for label, name in enumerate(classes)}
        names = (_class_of(folder, prefix) for folder in self.folder_names)
        of_folders = np.array([label_of.get(name, -1) for name in names], np.int32)
        labels = of_folders[self.folders]
        chosen = np.flatnonzero(labels >= 0)
        return chosen, labels[chosen]

    @staticmethod
    def load(path: Path) -> "Listing":
        """A saved listing."""
        names = json.loads((path / "folders.json").read_text())
        text, ends, sizes, tags, folders = (
            np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS
        )
        return Listing(text, ends, sizes, tags, folders, names, path)

    def save(self, path: Path) -> None:
        """Write it under `path`, a folder, when it is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=path.parent, suffix=".part"))
        try:
            (part / "folders.json").write_text(json.dumps(self.folder_names))
            for name in _ARRAYS:
                np.save(part / f"{name}.npy", getattr(self, name), allow_pickle=False)
            older = Path(tempfile.mkdtemp(dir=path.parent, suffix=".part"))
            if path.exists():
                path.rename(older / "listing")
            part.rename(path)
            shutil.rmtree(older)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def __reduce__(self) -> Any:
        if self.path is not None:
            return Listing.load, (self.path,)
        return Listing, tuple(getattr(self, f.name) for f in dataclasses.fields(self))


_ARRAYS = ("text", "ends", "sizes", "tags", "folders")


def _class_of(folder: str, prefix: str) -> str:
    """The first folder below the prefix; empty for the prefix itself and what is elsewhere."""
    path = f"{folder}/"
    if not path.startswith(prefix):
        return ""
    # Nameless folders, which a bucket can have, are none in a copy of it on a disk.
    return next((part for part in path[len(prefix) :].split("/") if part), "")


def listing_of(objects: Iterator[dict[str, Any]]) -> Listing:
    """The listing of what S3 tells of a bucket's objects."""
    text, ends, sizes, tags, folders = bytearray(), [], [], [], []
    folder_numbers: dict[str, int] = {}
    for found in objects:
        key = found["Key"]
        folder, slash, name = key.rpartition("/")
        if not slash:
            continue
        number = folder_numbers.setdefault(folder, len(folder_numbers))
        if not name.lower().endswith(_IMAGE_SUFFIXES):
            continue
        text += key.encode()
        ends.append(len(text))
        sizes.append(found["Size"])
        state = f"{found.get('ETag')} {found.get('LastModified')}"
        tags.append(int.from_bytes(hashlib.sha256(state.encode()).digest()[:7], "little"))
        folders.append(number)
    return Listing(
        np.frombuffer(bytes(text), np.uint8),
        np.array(ends, np.int64),
        np.array(sizes, np.int64),
        np.array(tags, np.int64),
        np.array(folders, np.int32),
        list(folder_numbers),
    )
