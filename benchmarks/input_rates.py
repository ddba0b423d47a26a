"""Images/s from files to ready uint8 batches: accbench's sources, their peers, decoding alone.

    python benchmarks/input_rates.py data/mock_imagenet [--mxnet PYTHON] [--rounds 3]
    python benchmarks/input_rates.py FOLDER --tiny      makes images in FOLDER; no S3, no peers

Every round runs every case once, in turn; the best round counts, since whatever
else the machine does only slows. "1 core" is images per second of CPU time (of wall
time from a cold disk) of one process without workers; "2 workers" is images per second
of wall time from two loader processes, started and warm before the clock. The
peers crop, mirror and batch alike, each with the decoder that it comes with.
mxnet runs in an environment of its own (mxnet 1.9.1 with NumPy 1.23.5).
"""

import argparse
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, default_collate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accbench.data import Collate, ReadableSamples, decode, mock_images
from accbench.data.convert import convert
from accbench.data.recordio import RecordIODataset, Samples
from accbench.data.recordio.file import image_record, write_record
from accbench.data.s3 import dataset as s3
from accbench.data.sources.imagefolder import ReadableImages
from benchmarks.smoke import add_tiny

BATCH, SIZE, REPEAT = 64, 224, 3
MXNET = """
import sys, time, numpy
numpy.bool = bool
import mxnet
path, threads, repeat, size = sys.argv[1], *map(int, sys.argv[2:])
batches = mxnet.io.ImageRecordUInt8Iter(
    path_imgrec=path, path_imgidx=path[:-3] + "idx", data_shape=(3, size, size), batch_size=64,
    preprocess_threads=threads, rand_mirror=True, shuffle=True, random_resized_crop=size > 112,
    min_random_area=0.08, max_random_area=1.0, min_aspect_ratio=0.75, max_aspect_ratio=1.33333)
rates, clock = [], time.process_time if threads == 1 else time.perf_counter
for _ in range(repeat + 1):
    count, begun = 0, clock()
    for batch in batches:
        batch.data[0].asnumpy()
        count += 64 - batch.pad
    rates.append(count / (clock() - begun))
    batches.reset()
print(max(rates[1:]))
"""


def rate(batches: Iterable, clock: Callable[[], float] = time.perf_counter) -> float:
    """Images/s over one pass."""
    count, begun = 0, clock()
    for images, *_ in batches:
        count += len(images)
    return count / (clock() - begun)


def warmed(make: Callable[[int], Iterable]) -> Callable[[int], float]:
    """Measures loaders that are made and run once before, and keep their processes."""
    made: dict[int, Iterable] = {}

    def measure(workers: int) -> float:
        if workers not in made:
            made[workers] = make(workers)
            rate(made[workers])
        return rate(made[workers], time.perf_counter if workers else time.process_time)

    return measure


def of_dataset(dataset: Dataset, collate: Callable) -> Callable[[int], float]:
    def make(workers: int) -> DataLoader:
        return DataLoader(
            ConcatDataset([dataset] * REPEAT), BATCH, shuffle=True, num_workers=workers,
            collate_fn=collate, persistent_workers=workers > 0,
            multiprocessing_context="forkserver" if workers else None,
        )  # fmt: skip

    return warmed(make)


def ours(dataset: ReadableSamples) -> Callable[[int], float]:
    return of_dataset(dataset, Collate())


def decode_all(payloads: list[bytes], clock: Callable[[], float] = time.perf_counter) -> float:
    begun = clock()
    for payload in payloads * REPEAT:
        decode.decode_rgb(payload)
    return REPEAT * len(payloads) / (clock() - begun)


def decode_only(payloads: list[bytes]) -> Callable[[int], float]:
    """The limit: bytes in memory to pixels, nothing else."""

    def measure(workers: int) -> float:
        if workers < 2:
            return decode_all(payloads, time.process_time)
        with ProcessPoolExecutor(workers, get_context("fork")) as pool:
            return sum(pool.map(decode_all, [payloads] * workers))

    return measure


def torchvision_folder(folder: Path) -> Callable[[int], float]:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    transform = v2.Compose(
        [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    )
    dataset = ImageFolder(str(folder), transform)
    return of_dataset(dataset, default_collate)


class DecodedByPillow:
    """What webdataset's users write: Pillow and torchvision's transforms."""

    def __init__(self, size: int) -> None:
        from torchvision.transforms import v2

        crop = [v2.RandomResizedCrop(size, antialias=True)] if size > 112 else []
        self.transform = v2.Compose([*crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def __call__(self, sample: tuple[bytes, bytes]) -> tuple[torch.Tensor, int]:
        image = Image.open(io.BytesIO(sample[0])).convert("RGB")
        return self.transform(image), int(sample[1])


def webdataset_shards(
    payloads: list[tuple[bytes, int]], folder: Path, size: int
) -> Callable[[int], float]:
    import webdataset

    for shard in range(4):
        with tarfile.open(folder / f"{size}-{shard}.tar", "w") as tar:
            for number, (payload, label) in enumerate(payloads[shard::4]):
                for suffix, content in (("jpg", payload), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))

    def make(workers: int) -> DataLoader:
        urls = [str(folder / f"{size}-{shard}.tar") for shard in range(4)] * REPEAT
        dataset = (
            webdataset.WebDataset(urls, shardshuffle=False)
            .to_tuple("jpg", "cls").map(DecodedByPillow(size)).batched(BATCH)
        )  # fmt: skip
        return DataLoader(
            dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0,
            multiprocessing_context="forkserver" if workers else None,
        )  # fmt: skip

    return warmed(make)


def mxnet_iter(python: str, rec: Path, size: int) -> Callable[[int], float]:
    def measure(workers: int) -> float:
        command = [python, "-c", MXNET, str(rec), str(max(1, workers)), "3", str(size)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, workers))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout.splitlines()[-1])

    return measure


def cold(rec: Path, viewer: decode.Viewer) -> Callable[[int], float]:
    """One pass over a file that the kernel was told to forget; says what it read from disk."""
    original, rec = rec, rec.with_name("cold.rec")

    def measure(workers: int) -> float:
        if not rec.exists():  # a copy of its own, which no process has mapped
            shutil.copy(original, rec)
            shutil.copy(original.with_suffix(".idx"), rec.with_suffix(".idx"))
        descriptor = os.open(rec, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        before = read_bytes()
        dataset = RecordIODataset(rec)
        samples = Samples(dataset, viewer, 1 << 24)
        batches = DataLoader(
            samples, BATCH, shuffle=True, num_workers=workers, collate_fn=Collate(),
            multiprocessing_context="fork" if workers else None,
        )  # fmt: skip
        result = rate(batches)
        if not workers:
            share = (read_bytes() - before) / rec.stat().st_size
            print(f"    (cold: {share:.0%} of the file came from the disk)")
        dataset.close()
        return result

    return measure


def read_bytes() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def through_s3(folder: Path, cache: Path) -> Callable[[int], float]:
    """A moto server, its objects in the cache already."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request
    os.environ.update(
        AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_DEFAULT_REGION="us-east-1"
    )
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="images")
    for path in sorted(folder.rglob("*.jpg")):
        client.put_object(
            Bucket="images", Key=str(path.relative_to(folder)), Body=path.read_bytes()
        )
    dataset = s3.S3ImageFolder("images", "", endpoint_url=endpoint, cache_dir=cache)
    begun = time.perf_counter()
    dataset.fetch(list(range(len(dataset))))
    print(f"    (S3 into the cache: {len(dataset) / (time.perf_counter() - begun):.0f} images/s)")
    server.stop()
    return ours(s3.S3Samples(dataset, decode.RandomView(SIZE)))


def faces(folder: Path, out: Path) -> list[tuple[bytes, int]]:
    """The middle 112 x 112 of each image, as face sets are kept."""
    found = []
    with out.open("wb") as rec, out.with_suffix(".idx").open("w") as idx:
        for key, path in enumerate(sorted(folder.rglob("*.jpg"))):
            image = Image.open(path).convert("RGB")
            left, top = image.width // 2 - 56, image.height // 2 - 56
            file = io.BytesIO()
            image.crop((left, top, left + 112, top + 112)).save(file, "JPEG", quality=95)
            found.append((file.getvalue(), key % 10))
            idx.write(f"{key}\t{rec.tell()}\n")
            write_record(rec, image_record([float(key % 10)], key, file.getvalue()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mxnet", help="a Python that has mxnet 1.9.1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose names hold this")
    add_tiny(parser)
    arguments = parser.parse_args()
    if arguments.tiny:
        mock_images.make(
            arguments.folder, mock_images.MockImagePlan(num_classes=2, num_train=8, num_val=1)
        )
        arguments.rounds = 1
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        os.environ["XDG_CACHE_HOME"] = temporary
        train, rec, face_rec = arguments.folder / "train", work / "train.rec", work / "faces.rec"
        convert(train, rec)
        of_faces = faces(train, face_rec)
        data = RecordIODataset(rec)
        payloads = [bytes(data.record(i).payload) for i in range(len(data))]
        labelled = [(payload, 0) for payload in payloads]
        view, whole = decode.RandomView(SIZE), decode.WholeView(112, decode.Chance())
        cases = {
            "photographs: decode only": decode_only(payloads),
            "photographs: RecordIO": ours(Samples(data, view, 1 << 24)),
            "photographs: RecordIO, cold": cold(rec, view),
            "photographs: ImageFolder": ours(ReadableImages(train, view)),
            "faces: decode only": decode_only([payload for payload, _ in of_faces]),
            "faces: RecordIO": ours(Samples(RecordIODataset(face_rec), whole, 1 << 24)),
        }
        if not arguments.tiny:
            cases |= {
                "photographs: torchvision ImageFolder": torchvision_folder(train),
                "photographs: webdataset": webdataset_shards(labelled, work, SIZE),
                "faces: webdataset": webdataset_shards(of_faces, work, 112),
            }
            if arguments.only in "photographs: S3 through the cache":
                cases["photographs: S3 through the cache"] = through_s3(train, work / "s3")
        if arguments.mxnet:
            cases["photographs: mxnet ImageRecordIter"] = mxnet_iter(arguments.mxnet, rec, SIZE)
            cases["faces: mxnet ImageRecordIter"] = mxnet_iter(arguments.mxnet, face_rec, 112)
        cases = {name: case for name, case in cases.items() if arguments.only in name}
        rates: dict[str, list[list[float]]] = {name: [[], []] for name in cases}
        for _ in range(arguments.rounds):
            for name, case in cases.items():
                for column, workers in enumerate((0, 2)):
                    rates[name][column].append(case(workers))
        best = {name: [max(column) for column in columns] for name, columns in rates.items()}
        kilobytes = np.mean([len(payload) for payload in payloads]) / 1000
        print(f"{len(payloads)} photographs of {kilobytes:.0f} kB, {SIZE} px, batches of {BATCH}")
        print("| case | 1 core, images/s | of decode only | 2 workers, images/s | of decode only |")
        print("| --- | --- | --- | --- | --- |")
        for name, (one, two) in best.items():
            limit = best.get(f"{name.split(':')[0]}: decode only", [one, two])
            print(
                f"| {name} | {one:.0f} | {one / limit[0]:.0%} | {two:.0f} | {two / limit[1]:.0%} |"
            )
        print(json.dumps(rates))


if __name__ == "__main__":
    main()
