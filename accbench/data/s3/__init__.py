"""Images in S3 buckets: the data source and its data set."""

from accbench.data.s3.source import S3ImageFolder, Source, bucket_and_prefix

__all__ = ["S3ImageFolder", "Source", "bucket_and_prefix"]
