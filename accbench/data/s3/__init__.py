"""Images in S3 buckets as a data set."""

from accbench.data.s3.dataset import S3ImageFolder, bucket_and_prefix

__all__ = ["S3ImageFolder", "bucket_and_prefix"]
