"""Damaged RecordIO files, made at random: reading one ends in a named error or in samples.

Run for longer than the tests do: python -m tests.data.recordio_fuzz --minutes 10
"""

import argparse
import io
import random
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path

from accbench.data.recordio import RecordIODataset
from accbench.data.recordio.file import MAGIC, image_record, write_record
from accbench.errors import RequestError, UnreadableSampleError
from tests.data.pictures import jpeg

SLOW_S = 5.0


def valid_file(random_: random.Random) -> tuple[bytes, bytes]:
    """A small .rec and its .idx; some records hold the magic number, some many labels."""
    rec, idx = io.BytesIO(), []
    for key in range(random_.randint(1, 6)):
        idx.append(f"{key}\t{rec.tell()}\n")
        payload = random_.choice([jpeg(8, 8), b"", b"x" * random_.randint(0, 40)])
        for _ in range(random_.randint(0, 3)):
            cut = random_.randint(0, len(payload))
            payload = payload[:cut] + MAGIC + payload[cut:]
        labels = [float(random_.randint(0, 5)) for _ in range(random_.choice([1, 1, 2, 5]))]
        write_record(rec, image_record(labels, key, payload))
    return rec.getvalue(), "".join(idx).encode()


def damaged(content: bytes, random_: random.Random) -> bytes:
    """Some of: flipped bits, a word replaced, bytes cut out, put in, or cut off the end."""
    data = bytearray(content)
    for _ in range(random_.randint(0, 4)):
        if not data:
            break
        at = random_.randrange(len(data))
        word = at - at % 4
        kind = random_.randrange(7)
        if kind == 0:
            data[at] ^= 1 << random_.randrange(8)
        elif kind == 1:
            data[word : word + 4] = random_.choice(
                [MAGIC, b"\xff\xff\xff\x1f", b"\xff" * 4, bytes(4), random_.randbytes(4)]
            )
        elif kind == 2:
            del data[at : at + random_.randint(1, 16)]
        elif kind == 3:
            data[at:at] = random_.randbytes(random_.randint(1, 16))
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data[at:at] = data[word : word + random_.randint(4, 64)]
        else:
            data[word + 7 : word + 8] = bytes([random_.randrange(256)])  # flag and length
    return bytes(data)


def read_all(rec: bytes, idx: bytes | None, folder: Path) -> Counter[str]:
    """Open it and read every sample; counts how each ended."""
    path = folder / "train.rec"
    path.write_bytes(rec)
    path.with_suffix(".idx").unlink(missing_ok=True)
    if idx is not None:
        path.with_suffix(".idx").write_bytes(idx)
    try:
        dataset = RecordIODataset(path)
    except RequestError as error:
        if str(folder) not in str(error):
            raise AssertionError("an error without its file") from error
        return Counter(refused=1)
    ends: Counter[str] = Counter()
    for index in range(len(dataset)):
        try:
            dataset[index]
            ends["read"] += 1
        except UnreadableSampleError as error:
            if f"{path}, offset" not in str(error):
                raise AssertionError("an error without its place") from error
            ends["unreadable"] += 1
    try:
        dataset.count_classes()
    except RequestError:
        ends["too many classes"] += 1
    dataset.close()
    return ends


def one(seed: int, folder: Path) -> Counter[str]:
    """One damaged file; the seed makes it again."""
    random_ = random.Random(seed)
    rec, idx = valid_file(random_)
    rec = damaged(rec, random_)
    kind = random_.randrange(3)
    return read_all(rec, None if kind == 0 else damaged(idx, random_) if kind == 1 else idx, folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    end, seed, ends = time.monotonic() + 60 * arguments.minutes, arguments.seed, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            begun = time.monotonic()
            try:
                ends += one(seed, Path(folder))
            except BaseException:
                print(f"seed {seed}")
                raise
            if time.monotonic() - begun > SLOW_S:
                ends["slow"] += 1
                print(f"seed {seed} took {time.monotonic() - begun:.1f} s")
            seed += 1
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{seed - arguments.seed} files: {dict(ends)}; peak {peak_mib:.0f} MiB")


if __name__ == "__main__":
    main()
