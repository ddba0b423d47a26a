"""The flag `--tiny` of every benchmark, which tests/benchmarks/test_smoke.py runs."""

import argparse


def add_tiny(parser: argparse.ArgumentParser) -> None:
    """Add `--tiny`: the same code with the smallest sizes, in seconds."""
    parser.add_argument(
        "--tiny", action="store_true", help="smallest sizes: shows that it runs, and no result"
    )


# A network and sizes with which a worker takes a few steps in seconds.
TINY_RUN = (
    "--model=benchmarks.nets:tiny", "--image_size=32", "--batch_size=4", "--workers=0",
    "--threads=1", "--device=cpu", "--tensorboard=off",
)  # fmt: skip
