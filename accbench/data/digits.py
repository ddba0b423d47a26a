"""The command `accbench data digits DIR`: scikit-learn's digits as files.

They are real scans that need no download: 1,797 digits of 8 x 8 pixels in 17 greys, from the UCI
"Optical Recognition of Handwritten Digits" test set (Alpaydin and Kaynak, 1998), which
scikit-learn's package contains. One fifth of each digit is held out, by a seeded shuffle that is
the same everywhere.
"""

import random
import shutil
from pathlib import Path

from PIL import Image

from accbench.data import convert
from accbench.errors import RequestError
from accbench.system import extras

_DONE = "digits.txt"
_SEED = 0


def make(folder: Path) -> int:
    """Write DIR/train, DIR/val, DIR/train.rec and DIR/val.rec; return the number of images.

    There is one folder for each digit. Digits that exist already are left unchanged.

    Raises:
        RequestError: scikit-learn is missing, the folder holds something else, or cannot be
            written.
    """
    if (folder / _DONE).exists():
        return int((folder / _DONE).read_text())
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RequestError(
            "the digits come from scikit-learn, which is not installed: "
            + extras.install_command("digits")
        ) from None
    if folder.exists() and any(folder.iterdir()):
        raise RequestError(f"{folder} is not empty and holds no digits; choose another folder")
    digits = load_digits()
    part = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        by_digit: dict[int, list[int]] = {}
        for index, label in enumerate(digits.target.tolist()):
            by_digit.setdefault(label, []).append(index)
        for label, indices in sorted(by_digit.items()):
            random.Random(_SEED).shuffle(indices)
            num_held_out = len(indices) // 5
            for number, index in enumerate(indices):
                split = "val" if number < num_held_out else "train"
                path = part / split / str(label) / f"{index:04}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                # 0..16 to 0..255
                pixels = (digits.images[index] * (255 / 16)).round().astype("uint8")
                Image.fromarray(pixels).save(path)
        for split in ("train", "val"):
            convert.convert(part / split, part / f"{split}.rec")
        (part / _DONE).write_text(str(len(digits.target)))
        if folder.exists():
            folder.rmdir()
        folder.parent.mkdir(parents=True, exist_ok=True)
        part.rename(folder)
    except OSError as error:
        raise RequestError(f"cannot write {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return len(digits.target)
