"""Access to a bucket through s3fs: listing it and reading objects, with retries."""

import asyncio
import hashlib
import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from accbench.data.s3.listing import Listing, listing_of
from accbench.errors import RequestError, UnreadableSampleError, errors_behind
from accbench.system import extras

_MAX_REASON = 200  # characters; aiohttp quotes what it could not read
_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 10.0
T = TypeVar("T")


class S3Error(Exception):
    """A request that failed permanently."""


class Bucket:
    """Requests to one bucket; each process that gets the object connects for itself."""

    def __init__(
        self, name: str, endpoint_url: str | None, anonymous: bool, timeout_s: float, attempts: int
    ) -> None:
        self.check_installed()
        self.name, self.endpoint_url, self.anonymous = name, endpoint_url, anonymous
        self.timeout_s, self.attempts = timeout_s, max(1, attempts)
        self._files: Any = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None, "_pid": 0}

    @staticmethod
    def check_installed() -> None:
        """Check that s3fs is installed.

        Raises:
            RequestError: s3fs is missing.
        """
        if importlib.util.find_spec("s3fs") is None:
            command = extras.install_command("s3")
            raise RequestError(f"--data s3://... needs s3fs, which is not installed: {command}")

    @property
    def identity(self) -> str:
        """The bucket's name with its server."""
        endpoint = self.endpoint_url or os.environ.get("AWS_ENDPOINT_URL") or "aws"
        return f"{endpoint}/{self.name}"

    def read(self, key: str, size: int) -> bytes:
        """Return an object's bytes.

        Raises:
            UnreadableSampleError: the request failed, for 4xx at once, for 5xx and timeouts after
                all attempts; the message names bucket and key.
        """
        url = f"s3://{self.name}/{key}"
        try:
            content = self._with_retries(lambda: self._get(key))
        except S3Error as error:
            raise UnreadableSampleError(f"{url}: {error}") from None
        if len(content) != size:
            raise UnreadableSampleError(
                f"{url}: the body ends at {len(content)} of {size} bytes; if the object was "
                "replaced, list the bucket again with --s3.listing_max_age_s 0"
            )
        return content

    def _get(self, key: str) -> bytes:
        # Not s3fs's `cat_file`, which requests the object's size first.
        from fsspec.asyn import sync

        files = self._connection()

        async def get() -> bytes:
            answer = await files._call_s3("get_object", Bucket=self.name, Key=key)
            async with answer["Body"] as body:
                return await body.read()

        content: bytes = sync(files.loop, get)
        return content

    def listing(self, prefix: str, folder: Path, max_age_s: float) -> Listing:
        """Return the images below a prefix, from the cache in `folder` or else from the server.

        Raises:
            RequestError: the bucket cannot be listed.
        """
        name = f"{self.identity}/{prefix}"
        path = folder / "listings" / hashlib.sha256(name.encode()).hexdigest()[:32]
        try:
            if time.time() - (path / "folders.json").stat().st_mtime < max_age_s:
                return Listing.load(path)
        except (OSError, ValueError):  # missing or incomplete: requested below
            pass
        try:
            listing = listing_of(self._objects(prefix))
        except S3Error as error:
            raise RequestError(f"cannot list s3://{self.name}/{prefix}: {error}") from None
        if not len(listing):
            return listing
        try:
            listing.save(path)
            return Listing.load(path)
        except OSError:  # a full disk, a read-only one, or another process was first
            return listing

    def _objects(self, prefix: str) -> Iterator[dict[str, Any]]:
        files = self._connection()
        token: dict[str, str] = {}
        while True:
            arguments = {"Bucket": self.name, "Prefix": prefix, **token}
            page = self._with_retries(
                lambda a=arguments: files.call_s3("list_objects_v2", **a)  # type: ignore[misc]
            )
            yield from page.get("Contents", ())
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _connection(self) -> Any:
        """Return s3fs, created in the process that uses it: connections do not survive a fork."""
        if self._files is None or self._pid != os.getpid():
            import s3fs

            self._files = s3fs.S3FileSystem(
                anon=self.anonymous,
                endpoint_url=self.endpoint_url,
                config_kwargs={
                    "connect_timeout": self.timeout_s,
                    "read_timeout": self.timeout_s,
                    "retries": {"total_max_attempts": 1},  # `_with_retries` retries
                },
                skip_instance_cache=True,
                use_listings_cache=False,
            )
            self._files.retries = 1
            self._pid = os.getpid()
        return self._files

    def _with_retries(self, request: Callable[[], T]) -> T:
        """Repeat a request, with growing pauses, on a 5xx status or a timeout and nothing else."""
        import aiohttp
        import botocore.exceptions

        for attempt in range(self.attempts):
            try:
                return request()
            except (OSError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError,
                    aiohttp.ClientError) as error:  # fmt: skip
                # asyncio's and aiohttp's timeouts are OSErrors too.
                if not _is_temporary(error):
                    raise S3Error(_reason(error)) from None
                reason = _reason(error)
            if attempt + 1 < self.attempts:
                max_pause_s = min(_MAX_BACKOFF_S, _BACKOFF_S * 2**attempt)
                time.sleep(max_pause_s * random.uniform(0.5, 1.0))
        raise S3Error(f"{reason} ({self.attempts} attempts)")


def _status(error: BaseException) -> int | None:
    for cause in errors_behind(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return int(status) if status is not None else None
    return None


def _is_temporary(error: BaseException) -> bool:
    import botocore.exceptions as boto_errors

    status = _status(error)
    if status is not None:
        return status >= 500
    timeouts = (
        TimeoutError,
        asyncio.TimeoutError,
        boto_errors.ReadTimeoutError,
        boto_errors.ConnectTimeoutError,
    )
    return any(isinstance(cause, timeouts) for cause in errors_behind(error))


def _reason(error: BaseException) -> str:
    status = _status(error)
    text = " ".join(str(error).split())[:_MAX_REASON] or type(error).__name__
    return f"answered {status}: {text}" if status is not None else f"{type(error).__name__}: {text}"
