"""Random access into a .rec of ten million records: time to open it, and memory.

    python benchmarks/input_ten_million.py [--records 10000000]

The file is sparse: every record has its place, but only some are written. Each
line is a process of its own; its memory before opening is that of Python, torch
and accbench.
"""

import argparse
import io
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from accbench.data.recordio import RecordIODataset
from accbench.data.recordio_file import image_record, write_record

STRIDE = 4096


def make(path: Path, num_records: int) -> None:
    """Records of 4 KiB, of which each thousandth is there."""
    image = io.BytesIO()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(image, "JPEG")
    record = image_record([1.0], 0, image.getvalue())
    framed = io.BytesIO()
    write_record(framed, record.ljust(STRIDE - 8, b"\0"))
    with path.open("wb") as file:
        file.truncate(num_records * STRIDE)
        for index in [*range(0, num_records, 1000), num_records - 1]:
            file.seek(index * STRIDE)
            file.write(framed.getvalue())
    with path.with_suffix(".idx").open("w") as idx:
        for begin in range(0, num_records, 100_000):
            keys = range(begin, min(begin + 100_000, num_records))
            idx.write("".join(f"{key}\t{key * STRIDE}\n" for key in keys))


def memory_mib(what: str) -> float:
    lines = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    return int(lines[what].split()[0]) / 1024


def measure(path: Path) -> None:
    before = memory_mib("VmRSS"), memory_mib("RssAnon")
    begun = time.perf_counter()
    dataset = RecordIODataset(path)
    open_s = time.perf_counter() - begun
    random_ = random.Random(0)
    indices = [1000 * random_.randrange(len(dataset) // 1000) for _ in range(2000)]
    begun = time.perf_counter()
    for index in indices:
        dataset[index]
    read_s = time.perf_counter() - begun
    print(
        f"{len(dataset)} records: opened in {open_s:.3f} s, 2000 random reads in {read_s:.2f} s; "
        f"resident {before[0]:.0f} -> {memory_mib('VmRSS'):.0f} MiB, at most "
        f"{memory_mib('VmHWM'):.0f}; of it the process's own, not shared files, "
        f"{before[1]:.0f} -> {memory_mib('RssAnon'):.0f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.rec"
        make(path, arguments.records)
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        again = [sys.executable, __file__, "--measure", str(path)]
        for what in ("first opening, from the .idx file", "opened again", "in a further process"):
            print(what, end=": ", flush=True)
            subprocess.run(again, env=environment, check=True)


if __name__ == "__main__":
    main()
