"""The images that a bucket holds, and their classes."""

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# The suffixes of torchvision's `ImageFolder`.
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


@dataclasses.dataclass(frozen=True)
class Listing:
    """The images below a prefix, by key; memory-mapped, so that processes share it."""

    text: np.ndarray
    """UTF-8 bytes of all keys, one after the other; (num_bytes,) uint8."""
    ends: np.ndarray
    """Where each key ends in `text`; (num_keys,) int64."""
    sizes: np.ndarray
    """Bytes of each object; (num_keys,) int64."""
    tags: np.ndarray
    """Numbers that change with the objects' content; (num_keys,) int64."""
    folders: np.ndarray
    """Each key's folder, by number; (num_keys,) int32."""
    folder_names: list[str]
    """Names without the last slash; also of folders that hold no image."""
    path: Path | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def key(self, number: int) -> str:
        """Return the key of image `number`."""
        begin = int(self.ends[number - 1]) if number else 0
        return self.text[begin : int(self.ends[number])].tobytes().decode()

    def class_folders(self, prefix: str) -> list[str]:
        """Return the folders directly below a prefix, which ends in / or is empty, sorted."""
        return sorted({_class_of(folder, prefix) for folder in self.folder_names} - {""})

    def labelled(self, prefix: str, classes: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the images in these folders below the prefix, and their labels, both (n,)."""
        label_of = {name: label for label, name in enumerate(classes)}
        names = (_class_of(folder, prefix) for folder in self.folder_names)
        folder_labels = np.array([label_of.get(name, -1) for name in names], np.int32)
        labels = folder_labels[self.folders]
        chosen = np.flatnonzero(labels >= 0)
        return chosen, labels[chosen]

    @staticmethod
    def load(path: Path) -> "Listing":
        """Load a saved listing."""
        names = json.loads((path / "folders.json").read_text())
        text, ends, sizes, tags, folders = (
            np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS
        )
        return Listing(text, ends, sizes, tags, folders, names, path)

    def save(self, path: Path) -> None:
        """Save the listing atomically as the folder `path`."""
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
    """Return the first folder below the prefix; empty for the prefix itself and elsewhere."""
    path = f"{folder}/"
    if not path.startswith(prefix):
        return ""
    # A bucket can have folders without a name, which a copy of it on a disk does not have.
    return next((part for part in path[len(prefix) :].split("/") if part), "")


def listing_of(objects: Iterator[dict[str, Any]]) -> Listing:
    """Build the listing from S3's descriptions of a bucket's objects."""
    text, ends, sizes, tags, folders = bytearray(), [], [], [], []
    folder_numbers: dict[str, int] = {}
    for description in objects:
        key = description["Key"]
        folder, slash, name = key.rpartition("/")
        if not slash:
            continue
        number = folder_numbers.setdefault(folder, len(folder_numbers))
        if not name.lower().endswith(_IMAGE_SUFFIXES):
            continue
        text += key.encode()
        ends.append(len(text))
        sizes.append(description["Size"])
        state = f"{description.get('ETag')} {description.get('LastModified')}"
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
