"""JPEG decoders and resizers side by side, one thread, CPU time: what the choice rests on.

    python benchmarks/research/input_decode.py DIR_OF_JPEG_FILES

Needs `pip install opencv-python-headless`.
"""

import argparse
import io
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.nn import functional
from torchvision.io import ImageReadMode, decode_jpeg

SIZE, ROUNDS = 224, 4


def milliseconds(work: Callable, items: list) -> float:
    """CPU time for each item, of the best round."""
    rounds = []
    for _ in range(ROUNDS):
        begun = time.thread_time()
        for item in items:
            work(item)
        rounds.append(time.thread_time() - begun)
    return 1e3 * min(rounds) / len(items)


def middle(pixels_HWC: np.ndarray) -> np.ndarray:
    """About half of the area, as a random crop has."""
    height, width = pixels_HWC.shape[:2]
    return pixels_HWC[height // 7 : height - height // 7, width // 7 : width - width // 7]


def resized_by_torch(pixels_HWC: np.ndarray) -> torch.Tensor:
    image_1CHW = torch.from_numpy(middle(pixels_HWC)).permute(2, 0, 1).unsqueeze(0)
    return functional.interpolate(image_1CHW, size=(SIZE, SIZE), mode="bilinear", antialias=True)


def resized_by_pillow(pixels_HWC: np.ndarray) -> Image.Image:
    image = Image.fromarray(middle(pixels_HWC))
    return image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    files = sorted(parser.parse_args().folder.rglob("*.jpg"))[:200]
    encoded = [path.read_bytes() for path in files]
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    decoders: dict[str, Callable] = {
        "simplejpeg": lambda content: simplejpeg.decode_jpeg(content, "RGB"),
        "OpenCV": lambda content: cv2.imdecode(np.frombuffer(content, np.uint8), 1),
        "torchvision.io": lambda content: decode_jpeg(
            torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB
        ),
        "Pillow": lambda content: np.asarray(Image.open(io.BytesIO(content)).convert("RGB")),
    }
    print(f"{len(encoded)} files of {np.mean([len(e) for e in encoded]) / 1e3:.0f} kB; ms an image")
    for name, decoder in decoders.items():
        print(f"decode, {name}: {milliseconds(decoder, encoded):.3f}")
    images = [simplejpeg.decode_jpeg(content, "RGB") for content in encoded]
    resizers: dict[str, Callable] = {
        "torch, antialias": resized_by_torch,
        "Pillow, bilinear": resized_by_pillow,
        "OpenCV, area": lambda i: cv2.resize(middle(i), (SIZE, SIZE), interpolation=cv2.INTER_AREA),
        "OpenCV, linear (no antialias)": lambda i: cv2.resize(middle(i), (SIZE, SIZE)),
    }
    for name, resizer in resizers.items():
        print(f"resize, {name}: {milliseconds(resizer, images):.3f}")


if __name__ == "__main__":
    main()
