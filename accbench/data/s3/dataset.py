"""Images in an S3 bucket, through a local cache, as a PyTorch data set."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from accbench import data
from accbench.data import decode
from accbench.data.s3.bucket import Bucket
from accbench.data.s3.cache import BoundedCache, default_folder
from accbench.errors import RequestError, UnreadableSampleError

# Concurrent requests of each process: a request waits rather than computes.
_NUM_CONNECTIONS = 16


def bucket_and_prefix(url: str | None) -> tuple[str, str]:
    """Split s3://bucket/prefix; the prefix ends in / unless it is empty.

    Raises:
        RequestError: the URL is not of that form.
    """
    parts = urlsplit(url or "")
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
        raise RequestError(f"--data s3 needs s3://BUCKET/PREFIX, not {url!r}")
    prefix = parts.path.strip("/")
    return parts.netloc, f"{prefix}/" if prefix else ""


class S3ImageFolder(Dataset[tuple[Any, int]]):
    """Images of a bucket; an image's class is the first folder below the prefix.

    Images directly below the prefix are left out, as torchvision's `ImageFolder` does.

    Items are (image, label), fetched once and stored in a bounded cache that the processes of a
    machine share. Reading an unreadable item raises `UnreadableSampleError`, whose message names
    bucket and key.

    Args:
        bucket: the bucket's name.
        prefix: the prefix of all keys.
        transform: called with each image as a PIL image in RGB. Without one a sample is a (3, H, W)
            uint8 tensor.
        endpoint_url: the server; None for AWS_ENDPOINT_URL's or else Amazon's.
        anonymous: send requests without signing them.
        cache_dir: the cache's folder; None for accbench/s3 in the user's cache folder.
        cache_bytes: the cache's maximum size; 0 stores nothing.
        listing_max_age_s: seconds for which a stored list of keys is used.
        timeout_s: seconds without a byte after which a request counts as failed.
        attempts: attempts for a request that times out or gets a 5xx status.
        allow_empty: whether a class folder without an image is a class instead of an error.

    Raises:
        RequestError: s3fs is not installed, the bucket cannot be listed, there is no image in a
            folder below the prefix, or one of the folders has no image.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        transform: Callable[[Image.Image], Any] | None = None,
        *,
        endpoint_url: str | None = None,
        anonymous: bool = False,
        cache_dir: str | Path | None = None,
        cache_bytes: int = 50 * 2**30,
        listing_max_age_s: float = 3600.0,
        timeout_s: float = 20.0,
        attempts: int = 5,
        allow_empty: bool = False,
    ) -> None:
        prefix = prefix.strip("/")
        self.prefix = f"{prefix}/" if prefix else ""
        self.transform = transform
        folder = Path(cache_dir) if cache_dir is not None else default_folder()
        self._bucket = Bucket(bucket, endpoint_url, anonymous, timeout_s, attempts)
        self._cache = BoundedCache(folder, cache_bytes)
        self._listing = self._bucket.listing(self.prefix, folder, listing_max_age_s)
        self._fetched: dict[int, bytes | UnreadableSampleError] = {}
        self._choose(allow_empty)

    def _choose(self, allow_empty: bool) -> None:
        url = f"s3://{self._bucket.name}/{self.prefix}"
        self.classes = self._listing.class_folders(self.prefix)
        self._chosen, self._labels = self._listing.labelled(self.prefix, self.classes)
        if not len(self._chosen):
            raise RequestError(f"no image in a folder below {url}")
        empty = np.setdiff1d(np.arange(len(self.classes)), self._labels)
        if len(empty) and not allow_empty:
            names = ", ".join(self.classes[label] for label in empty[:5])
            more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
            raise RequestError(
                f"{url} has no image for the classes {names}{more}; fill those folders or remove "
                "their keys"
            )

    def class_folders(self, name: str = "") -> list[str]:
        """Return the folders directly below the prefix, or below its folder `name`, sorted."""
        return self._listing.class_folders(f"{self.prefix}{name}/" if name else self.prefix)

    def subfolder(self, name: str = "") -> "S3ImageFolder":
        """Return the data set with the prefix extended by `name`/, every class with an image.

        Raises:
            RequestError: a class has no image, or there is no image at all.
        """
        part = object.__new__(S3ImageFolder)
        part.__dict__.update(self.__dict__)
        part.prefix = f"{self.prefix}{name}/" if name else self.prefix
        part._choose(allow_empty=False)
        return part

    def __len__(self) -> int:
        return len(self._chosen)

    def key(self, index: int) -> str:
        """Return the key of an image."""
        return self._listing.key(int(self._chosen[index]))

    def encoded(self, index: int) -> bytes:
        """Return an image's bytes, as `fetch` left them, from the cache or else from the bucket.

        Raises:
            UnreadableSampleError: it cannot be read; the message names bucket and key.
        """
        fetched = self._fetched.pop(index, None)
        if fetched is None:
            fetched = self._try_read(index)
        if isinstance(fetched, UnreadableSampleError):
            raise fetched
        return fetched

    def _read(self, index: int) -> bytes:
        number = int(self._chosen[index])
        key, size = self._listing.key(number), int(self._listing.sizes[number])
        name = f"{self._bucket.identity}/{key}#{self._listing.tags[number]:x}"
        content = self._cache.get(name, size)
        if content is None:
            content = self._bucket.read(key, size)
            self._cache.put(name, content)
        return content

    def fetch(self, indices: list[int]) -> None:
        """Fetch images, several at a time, for the next `encoded` of each.

        A failure is raised then.
        """
        # Kept here too: the cache may store nothing, and a failed request is not repeated.
        with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
            self._fetched = dict(zip(indices, pool.map(self._try_read, indices), strict=True))

    def _try_read(self, index: int) -> bytes | UnreadableSampleError:
        try:
            return self._read(index)
        except UnreadableSampleError as error:
            return error

    def where(self, index: int) -> str:
        """Return the image's URL."""
        return f"s3://{self._bucket.name}/{self.key(index)}"

    def __getitem__(self, index: int) -> tuple[Any, int]:
        encoded, label = self.encoded(index), int(self._labels[index])
        try:
            pixels_HWC = decode.decode_rgb(encoded)
        except decode.ImageError as error:
            raise UnreadableSampleError(f"{self.where(index)}: {error}") from None
        if self.transform is None:
            return torch.from_numpy(pixels_HWC).permute(2, 0, 1), label
        return self.transform(Image.fromarray(pixels_HWC)), label

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, int]]:
        self.fetch(indices)  # torch's loader requests a whole batch
        return [self[index] for index in indices]

    def get_img_info(self, index: int) -> dict[str, int]:
        """Return the image's height and width, from its header."""
        encoded = self.encoded(index)
        try:
            height, width = decode.size_of(encoded)
        except decode.ImageError as error:
            raise UnreadableSampleError(f"{self.where(index)}: {error}") from None
        return {"height": height, "width": width}

    def label(self, index: int) -> int:
        """Return an image's class number."""
        return int(self._labels[index])


class S3Samples(data.ReadableSamples):
    """An `S3ImageFolder` with the interface that accbench's loader needs."""

    def __init__(self, dataset: S3ImageFolder, viewer: decode.Viewer) -> None:
        self.dataset, self.viewer = dataset, viewer

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch_samples(self, indices: list[int]) -> None:
        """Fetch images, several at a time, before they are read."""
        self.dataset.fetch(indices)

    def __getitems__(self, indices: list[int]) -> list[data.Sample]:
        self.fetch_samples(indices)
        return [self[index] for index in indices]

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        encoded = self.dataset.encoded(index)
        try:
            return decode.decode_view(encoded, self.viewer), self.dataset.label(index)
        except decode.ImageError as error:
            raise UnreadableSampleError(f"{self.dataset.where(index)}: {error}") from None
