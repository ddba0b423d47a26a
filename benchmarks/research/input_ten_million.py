"""Random access into a .rec of ten million records: time to open it, and memory.

    python benchmarks/research/input_ten_million.py [--records 10000000]

The file is sparse: every record has its place, but only some are written. Each
line is a process of its own.
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

STRIDE = 4096


def make(path: Path, num_records: int) -> None:
    """Records of 4 KiB, of which each thousandth is there."""
    import numpy as np
    from PIL import Image

    from accbench.data.recordio.file import image_record, write_record

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


def memory_mib() -> tuple[float, float]:
    """(resident, of it the process's own) of this process."""
    lines = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    resident, own = (int(lines[what].split()[0]) / 1024 for what in ("VmRSS", "RssAnon"))
    return resident, own


def measure(path: Path) -> None:
    # Imported one by one, for torch alone has more memory than all that comes after it.
    import torch  # noqa: F401

    memory = {"torch": memory_mib()}
    from accbench.data.recordio import RecordIODataset

    memory["accbench"] = memory_mib()
    begun = time.perf_counter()
    dataset = RecordIODataset(path)
    open_s = time.perf_counter() - begun
    memory["opened"] = memory_mib()
    random_ = random.Random(0)
    indices = [1000 * random_.randrange(len(dataset) // 1000) for _ in range(2000)]
    begun = time.perf_counter()
    for index in indices:
        dataset[index]
    read_s = time.perf_counter() - begun
    memory["read"] = memory_mib()
    print(f"{len(dataset)} records: opened in {open_s:.3f} s, 2000 random reads in {read_s:.2f} s")
    for what, (resident, own) in memory.items():
        print(f"    {what}: resident {resident:.0f} MiB, own {own:.0f} MiB", flush=True)


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
