"""The command `accbench data convert FOLDER OUT.rec`: a folder of images to a RecordIO file."""

import contextlib
import os
from pathlib import Path

from rich.progress import track

from accbench.data import decode, files
from accbench.data.recordio.file import image_record, write_record
from accbench.errors import RequestError


def convert(folder: Path, rec_path: Path) -> int:
    """Write a folder of class folders as rec_path and its .idx; return the number of images.

    Images are copied unchanged, in the order and with the labels of torchvision's `ImageFolder`;
    keys count from 0. The class names go to rec_path's .classes.txt, one per line. A file gets its
    name when it is complete, the .rec last.

    Raises:
        RequestError: there are no images, a file is not an image, the output exists already, or it
            cannot be written.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    if rec_path.suffix != ".rec":
        raise RequestError(f"the file to write must end in .rec, not {rec_path}")
    if rec_path.exists():
        raise RequestError(f"{rec_path} is already there; remove it or choose another name")
    try:
        classes, class_to_label = find_classes(str(folder))
        samples = make_dataset(str(folder), class_to_label, IMG_EXTENSIONS)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RequestError(" ".join(str(error).split())) from None
    for name in classes:
        if len(name.splitlines()) > 1:
            raise RequestError(f"the class folder {name!r} has a line break in its name; rename it")
    parts = {suffix: _part(rec_path, suffix) for suffix in (".classes.txt", ".idx", ".rec")}
    try:
        rec_path.parent.mkdir(parents=True, exist_ok=True)
        # Written as the bytes on the disk: a name need not be UTF-8.
        parts[".classes.txt"].write_bytes(b"".join(os.fsencode(name) + b"\n" for name in classes))
        _write(samples, parts[".rec"], parts[".idx"])
        for suffix, part in parts.items():  # the .rec last, as readers look for it
            part.rename(rec_path.with_suffix(suffix))
    except OSError as error:
        raise RequestError(f"cannot write {rec_path}: {error.strerror}") from None
    finally:
        for part in parts.values():
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    return len(samples)


def _part(rec_path: Path, suffix: str) -> Path:
    return rec_path.with_name(f".{rec_path.stem}{suffix}.{os.getpid()}.part")


def _write(samples: list[tuple[str, int]], rec_part: Path, idx_part: Path) -> None:
    with rec_part.open("wb") as rec, idx_part.open("w") as idx:
        for key, (path, label) in enumerate(track(samples, f"{len(samples)} images")):
            try:
                payload = files.read(path)
                decode.size_of(payload)
            except OSError as error:
                raise RequestError(f"cannot read {path}: {error.strerror}") from None
            except decode.ImageError as error:
                raise RequestError(f"{path}: {error}; mend or remove it") from None
            idx.write(f"{key}\t{rec.tell()}\n")
            try:
                write_record(rec, image_record([float(label)], key, payload))
            except ValueError as error:
                raise RequestError(f"{path}: {error}") from None
        for file in (rec, idx):  # flushed to the disk before it gets its name
            file.flush()
            os.fsync(file.fileno())
