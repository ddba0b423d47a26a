"""`--data s3://BUCKET/PREFIX`: images in an S3 bucket, with one key prefix per class.

Below the prefix are train/ and perhaps val/, or else the classes themselves.
"""

import dataclasses

from accbench import data
from accbench.config import TaskConfig
from accbench.config.field import flag
from accbench.data import decode, mixing
from accbench.data.s3.bucket import Bucket
from accbench.data.s3.dataset import S3ImageFolder, S3Samples, bucket_and_prefix
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError


class Source(data.Source):
    """Images in a bucket, through a cache on this machine."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the data source s3."""

        endpoint_url: str | None = flag(
            None,
            "The server, if it is not Amazon's; AWS_ENDPOINT_URL means the same.",
        )
        anonymous: bool = flag(False, "Send requests without signing them.")
        cache_dir: str | None = flag(
            None,
            "The cache's folder. Unset: accbench/s3 in the user's cache folder.",
            is_path=True,
        )
        cache_gib: float = flag(
            50.0,
            "Largest size of the cache, in GiB; 0 stores nothing.",
            minimum=0,
            maximum=1000000000.0,
        )
        listing_max_age_s: float = flag(
            3600.0,
            "Seconds for which a stored list of keys is used.",
            minimum=0,
        )
        timeout_s: float = flag(
            20.0,
            "Seconds without a byte after which a request counts as failed.",
            minimum=0.001,
            maximum=1000000.0,
        )
        attempts: int = flag(
            5,
            "Attempts for a request that times out or gets a 5xx status.",
            minimum=1,
        )

    @classmethod
    def check(cls, location: str | None) -> None:
        bucket_and_prefix(location)
        Bucket.check_installed()

    def __init__(
        self, location: str, task: TaskConfig, options: Options, topology: Topology
    ) -> None:
        self.task, self.topology = task, topology
        bucket, prefix = bucket_and_prefix(location)
        arguments = {**dataclasses.asdict(options)}
        cache_bytes = int(arguments.pop("cache_gib") * 2**30)
        everything = S3ImageFolder(
            bucket, prefix, **arguments, cache_bytes=cache_bytes, allow_empty=True
        )
        is_split = bool(everything.class_folders("train"))
        self.train_set = everything.subfolder("train" if is_split else "")
        has_val = is_split and "val" in everything.class_folders()
        self.eval_set = everything.subfolder("val") if has_val else None
        if self.eval_set is not None and self.eval_set.classes != self.train_set.classes:
            raise RequestError(f"--data: train and val of {location} have different classes")
        self.num_classes = len(self.train_set.classes)

    def train_loader(self) -> data.Loader:
        chance = decode.Chance(self.task.seed)
        samples = S3Samples(self.train_set, decode.RandomView(self.task.image_size, chance))
        return data.Loader(
            samples, self.task, self.topology, train=True, chance=chance,
            mixing=mixing.of_task(self.task, self.num_classes),
        )  # fmt: skip

    def eval_loader(self) -> data.Loader | None:
        if self.eval_set is None:
            return None
        samples = S3Samples(self.eval_set, decode.CentreView(self.task.image_size))
        return data.Loader(samples, self.task, self.topology, train=False)
